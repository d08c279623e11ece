"""Products of experts on the host, with the bits that the device's kernels give.

It owns the twin of the sums in cudaproducts.py; it knows neither slots nor layers. Invariant: a weight is rounded, and
a row is summed, exactly as there: a slice takes every n-th block of 32 columns, in it one column after the other by
fused multiply-adds, and the slices are added in their order. Sixteen rows lie in the lanes of a vector, so no sum
crosses lanes, however the rows are cut or shared out. Read next: cudaexperts.py.
"""

import numpy as np
from numba import carray

import simd
from cpuproducts import JOB_WORK, block_offset, block_scale, codes_start, decode_floats, quad_codes, zero_point
from jit import njit
from packs import BLOCK, BLOCK_BYTES, Q4_1, Q4_K, Q5_K, Q8_0, ROWS
from team import ARGUMENTS, Job, Team, awake, control_array, pointer_to, put, run_jobs

TILE = 8  # rows of x that share one decoding of a weight
DECODED = BLOCK * ROWS  # weights of a decoded block
MAX_SLICES = 16  # of a block of 256 threads, the largest that is launched
_BYTES = np.array([BLOCK_BYTES[kind] for kind in range(len(BLOCK_BYTES))], np.int64)


# --- weights ------------------------------------------------------------------------------------------------------
# cpuproducts.py decodes the same packs, but for the sign of some zeros, which its own sums do not keep either.


@njit
def _offset(kind, data, at, block, scale):
    """What is added to code * scale: of a kind with signed codes its zero point's share."""
    if kind == Q4_1:
        return block_offset(kind, data, at, block)
    if kind in (Q4_K, Q5_K):
        at += (block >> 3) * _BYTES[kind]
        lowest = simd.mul(simd.load_f16(data, at + 32), simd.load_u8(data, at + 192 + (block & 7) * ROWS))
        return simd.sub(simd.splat(np.float32(-0.0)), lowest)
    if kind == Q8_0:
        return simd.splat(np.float32(0))
    return simd.mul(scale, simd.splat(np.float32(-zero_point(kind))))


@njit
def _decode(kind, data, at, block, out):
    """Column block `block` (32 columns x 16 rows) of the row group at byte `at`, column by column into `out`."""
    if kind < Q8_0:
        decode_floats(kind, data, at + block * _BYTES[kind], out)
        return
    start = codes_start(kind, at, block)
    for half in range(2):
        scale = block_scale(kind, data, at, block, half)
        offset = _offset(kind, data, at, block, scale)
        for quad in range(4 * half, 4 * half + 4):
            # Q8_0's codes are signed as they stand; those of the others are at most 63.
            codes = simd.load_i32(data, start + quad * 64) if kind == Q8_0 else quad_codes(kind, data, start, quad)
            for j in range(4):
                value = simd.fma(simd.signed_byte(codes, np.int32(j)), scale, offset)
                simd.store(out, (4 * quad + j) * ROWS, value)


# --- sums ---------------------------------------------------------------------------------------------------------


@njit
def _one_block(weights, x, at, n_columns, sums, place):
    """One column block of sixteen rows times a row of x, on top of the slice's sum."""
    total = simd.load(sums, place)
    for k in range(n_columns):
        total = simd.fma(simd.load(weights, k * ROWS), simd.load_broadcast(x, at + k), total)
    simd.store(sums, place, total)


@njit
def _four_blocks(weights, x, at, sums, first, block, slices):
    """`_one_block` for four neighbours: they belong to different slices, so four chains of sums run side by side."""
    p0, p1 = (first + block % slices) * ROWS, (first + (block + 1) % slices) * ROWS
    p2, p3 = (first + (block + 2) % slices) * ROWS, (first + (block + 3) % slices) * ROWS
    a, b, c, d = simd.load(sums, p0), simd.load(sums, p1), simd.load(sums, p2), simd.load(sums, p3)
    for k in range(BLOCK):
        w, i = k * ROWS, at + k
        a = simd.fma(simd.load(weights, w), simd.load_broadcast(x, i), a)
        b = simd.fma(simd.load(weights, w + DECODED), simd.load_broadcast(x, i + BLOCK), b)
        c = simd.fma(simd.load(weights, w + 2 * DECODED), simd.load_broadcast(x, i + 2 * BLOCK), c)
        d = simd.fma(simd.load(weights, w + 3 * DECODED), simd.load_broadcast(x, i + 3 * BLOCK), d)
    simd.store(sums, p0, a)
    simd.store(sums, p1, b)
    simd.store(sums, p2, c)
    simd.store(sums, p3, d)


@njit
def _row_group(kind, data, at, n_cols, slices, x, first, n, sums):
    """Sixteen rows times the rows first..first + n (at most TILE) of x; sums [n][slices][16]."""
    weights = carray(simd.stack_f32(2048), (2048,))  # four decoded blocks
    sums[: n * slices * ROWS] = np.float32(0)
    block, n_whole = 0, n_cols // BLOCK
    while block * BLOCK < n_cols:
        step = 4 if slices >= 4 and block + 4 <= n_whole else 1
        for i in range(step):
            _decode(kind, data, at, block + i, weights[i * DECODED :])
        for i in range(n):
            start = (first + i) * n_cols + block * BLOCK
            if step == 4:
                _four_blocks(weights, x, start, sums, i * slices, block, slices)
            else:
                n_columns = min(BLOCK, n_cols - block * BLOCK)
                _one_block(weights, x, start, n_columns, sums, (i * slices + block % slices) * ROWS)
        block += step


@njit
def _write_sums(sums, slices, i, out, token, column, n):
    """The slices of one row of x added in their order: the first `n` of sixteen results to out[token, column:]."""
    total = simd.splat(np.float32(0))
    for part in range(slices):
        total = simd.add(total, simd.load(sums, (i * slices + part) * ROWS))
    simd.store(sums, i * slices * ROWS, total)
    for row in range(n):
        out[token, column + row] = sums[i * slices * ROWS + row]


def _job(control, job):
    """Some row groups of one expert times its rows of x."""
    c = control_array(control)[ARGUMENTS:]
    kind, group_bytes, n_rows, n_cols, slices = c[0], c[1], c[2], c[3], c[4]
    per_job, jobs_each, n_active, n_tokens = c[5], c[6], c[7], c[8]
    groups = (n_rows + ROWS - 1) // ROWS
    active = carray(pointer_to(c[12]), (n_active, 3), np.int64)
    expert, first, count = active[job // jobs_each]
    data = carray(pointer_to(c[9]), ((expert + 1) * groups * group_bytes,), np.uint8)
    x = carray(pointer_to(c[10]), (n_tokens * n_cols,), np.float32)
    out = carray(pointer_to(c[11]), (n_tokens, n_rows), np.float32)
    sums = carray(simd.stack_f32(2048), (2048,))  # TILE rows of MAX_SLICES sums of sixteen
    start = job % jobs_each * per_job
    for group in range(start, min(start + per_job, groups)):
        at = (expert * groups + group) * group_bytes
        for row in range(first, first + count, TILE):
            n = min(TILE, first + count - row)
            _row_group(kind, data, at, n_cols, slices, x, row, n, sums)
            for i in range(n):
                _write_sums(sums, slices, i, out, row + i, group * ROWS, min(ROWS, n_rows - group * ROWS))


# --- the team -----------------------------------------------------------------------------------------------------

_JOB = Job(_job)


def multiply(team: Team, weights, x: np.ndarray, active: np.ndarray, slices: int, out: np.ndarray) -> None:
    """Rows of x times the experts of a pack of kernels_cpu.py, summed in `slices` as the device's blocks do it.

    x float32 [n, n_cols], out [n, n_rows]; active int64 [m, 3]: expert, first row, number of rows.
    """
    assert 1 <= slices <= MAX_SLICES  # a job has room for no more
    w, n_active = weights, len(active)
    groups = -(-w.n_rows // ROWS)
    per_job = max(1, min(groups, JOB_WORK // (ROWS * w.n_cols * max(1, len(x) // max(1, n_active)))))
    jobs_each = -(-groups // per_job)
    addresses = [array.ctypes.data for array in (w.data, x, out, active)]
    shape = (w.kind, w.group_bytes, w.n_rows, w.n_cols, slices, per_job, jobs_each, n_active, len(x))
    _run(awake(team), _JOB.address, np.array([*shape, *addresses], np.int64), jobs_each * n_active)


@njit
def _run(control, job, arguments, n_jobs):
    put(control, job, arguments)
    run_jobs(control, n_jobs)
