"""Products of experts on the host, with the bits that the device's kernels give.

It owns the twin of the sums in cudaproducts.py; it knows neither slots nor layers. Invariant: a weight is rounded, and
a row is summed, exactly as there: a slice takes every n-th block of 32 columns, in it one column after the other by
fused multiply-adds, and the slices are added in their order. Sixteen rows lie in the lanes of a vector, so no sum
crosses lanes, however the rows are cut or shared out. Read next: cudaexperts.py.
"""

import numpy as np
from numba import carray

import cpusimd as simd
from cpudecode import decode
from cpuproducts import JOB_WORK
from cputeam import Job, Team, arguments, array_at, awake, begin, given, run_jobs
from jit import njit
from packs import BLOCK, KINDS, ROWS

TILE = 8  # rows of x that share one decoding of a weight
DECODED = BLOCK * ROWS  # weights of a decoded block
MAX_SLICES = 16  # of a block of 256 threads, the largest that is launched


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


@njit(forceinline=True)
def _row_group(kind, data, at, n_cols, slices, x, first, n, sums):
    """Sixteen rows times the rows first..first + n (at most TILE) of x; sums [n][slices][16]."""
    weights = carray(simd.stack_f32(2048), (2048,))  # four decoded blocks
    sums[: n * slices * ROWS] = np.float32(0)
    block, n_whole = 0, n_cols // BLOCK
    while block * BLOCK < n_cols:
        step = 4 if slices >= 4 and block + 4 <= n_whole else 1
        for i in range(step):
            decode(kind, data, at, block + i, weights[i * DECODED :])
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


# --- jobs ---------------------------------------------------------------------------------------------------------

_Product = arguments("data group_bytes n_rows n_cols slices x n_tokens active n_active out per_job jobs_each")


def _product(kind):
    """Some row groups of one expert of a kind times its rows of x."""

    def job(control, number):
        c = given(control, _Product)
        n_rows, n_cols, slices, groups = c.n_rows, c.n_cols, c.slices, (c.n_rows + ROWS - 1) // ROWS
        expert, first, count = array_at(c.active, (c.n_active, 3), np.int64)[number // c.jobs_each]
        data = array_at(c.data, (expert + 1) * groups * c.group_bytes, np.uint8)
        x, out = array_at(c.x, c.n_tokens * n_cols, np.float32), array_at(c.out, (c.n_tokens, n_rows), np.float32)
        sums = carray(simd.stack_f32(2048), (2048,))  # TILE rows of MAX_SLICES sums of sixteen
        start = number % c.jobs_each * c.per_job
        for group in range(start, min(start + c.per_job, groups)):
            at = (expert * groups + group) * c.group_bytes
            for row in range(first, first + count, TILE):
                n = min(TILE, first + count - row)
                _row_group(kind, data, at, n_cols, slices, x, row, n, sums)
                for i in range(n):
                    _write_sums(sums, slices, i, out, row + i, group * ROWS, min(ROWS, n_rows - group * ROWS))

    return Job(job)


_PRODUCTS = [_product(kind) for kind in range(len(KINDS))]


def multiply(team: Team, weights, x: np.ndarray, active: np.ndarray, slices: int, out: np.ndarray) -> None:
    """Rows of x times the experts of a pack of cpuproducts.py, summed in `slices` as the device's blocks do it.

    x float32 [n, n_cols], out [n, n_rows]; active int64 [m, 3]: expert, first row, number of rows.
    """
    assert 1 <= slices <= MAX_SLICES  # a job has room for no more
    w = weights
    per_job = max(1, JOB_WORK // (ROWS * w.n_cols * max(1, len(x) // max(1, len(active)))))
    _multiply(awake(team), _PRODUCTS[w.kind].address, w.data, w.group_bytes, w.n_rows, x, active, slices, per_job, out)


@njit
def _multiply(control, job, data, group_bytes, n_rows, x, active, slices, per_job, out):
    groups = (n_rows + ROWS - 1) // ROWS
    c = begin(control, job, _Product)
    c.data, c.group_bytes, c.n_rows, c.slices = data.ctypes.data, group_bytes, n_rows, slices
    c.x, c.n_tokens, c.n_cols, c.out = x.ctypes.data, x.shape[0], x.shape[1], out.ctypes.data
    c.active, c.n_active = active.ctypes.data, len(active)
    c.per_job, c.jobs_each = min(groups, per_job), (groups + min(groups, per_job) - 1) // min(groups, per_job)
    run_jobs(control, c.jobs_each * len(active))
