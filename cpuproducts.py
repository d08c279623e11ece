"""Weights on the CPU: packs, their rows, and products with them.

It owns the matrix products; it knows no layer. Invariant: what is computed for a token does not depend on which other
tokens stand in the same call, on how many threads run it or on what the processor has: every sum has a fixed order, and
what is summed as integers is exact. Read next: kernels_cpu.py.

Weights lie in packs (see packs.py): sixteen rows side by side in the lanes of a vector, so no sum runs across lanes.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numba import carray

import cpumemory
import cpusimd as simd
import cpuunits
import packs
from cpudecode import block_offset, block_scale, codes_start, decode, quad_codes
from cpusums import block_1, block_4
from cputeam import HELPERS, Job, arguments, array_at, awake, begin, call_job, control_array, given, hold, run_jobs
from jit import njit
from packs import BLOCK, KINDS, ROWS

TILE = 64  # tokens that share one decoding of a block


# --- packs: weights as the kernels read them ----------------------------------------------------------------------

# What a product reads of each pack that it multiplies: the function, the weights, bytes of sixteen rows, rows, whether
# x is rounded.
PART = arguments("product data group_bytes n_rows rounds_x")


@dataclass(frozen=True, eq=False)
class Pack:
    """Weights of one or more matrices of a shape, packed. data uint8 [matrix][row group][block][bytes]."""

    kind: int
    data: np.ndarray
    n_rows: int
    n_cols: int
    n_matrices: int
    rounds_x: bool = False  # multiply with x rounded to int8: several times faster, some 0.5 % of error a product

    @property
    def group_bytes(self) -> int:
        """Bytes of sixteen rows."""
        kind = KINDS[self.kind]
        return -(-self.n_cols // kind.columns) * kind.n_bytes

    @functools.cached_property
    def table(self) -> np.ndarray:
        """What a product reads of it, one PART."""
        product = (_INT8_PRODUCTS if self.rounds_x else _FLOAT_PRODUCTS)[self.kind]
        fields = (product.address, self.data.ctypes.data, self.group_bytes, self.n_rows, self.rounds_x)
        return np.array([fields], PART)


@dataclass(frozen=True, eq=False)
class Packs:
    """Packs of one width and number of matrices that read the same x: their product is one operation."""

    parts: tuple[Pack, ...]

    @functools.cached_property
    def table(self) -> np.ndarray:
        return np.concatenate([part.table for part in self.parts])

    @functools.cached_property
    def n_rows(self) -> tuple[int, ...]:
        return tuple(part.n_rows for part in self.parts)


def together(*parts: Pack) -> Packs:
    """Packs that will be multiplied with the same x, for `matmul_each` and `expert_matmul_each`."""
    return Packs(parts)


def pack(kind, raw, n_cols, *, round_x=False):
    """Pack matrices as they stand in a file: raw [matrices, rows, ...], float32/float16/uint16 or uint8 blocks.

    `round_x` lets products round x to int8 where the kind has integer codes.

    Raises ValueError where the width cannot be cut into the kind's blocks.
    """
    coded, columns = packs.CODED[kind], KINDS[kind].columns
    if n_cols % (columns if coded else 4):
        raise ValueError(f"a width of {n_cols} cannot be packed")
    n_matrices, n_rows = raw.shape[:2]
    groups = -(-n_rows // ROWS)
    data = cpumemory.aligned_zeros((n_matrices, groups, -(-n_cols // columns), KINDS[kind].n_bytes), np.uint8)
    for matrix in range(n_matrices):
        rows = raw[matrix].reshape(n_rows, -1)
        if n_rows % ROWS:
            rows = np.concatenate([rows, np.zeros((groups * ROWS - n_rows, rows.shape[1]), rows.dtype)])
        packs.fill(kind, rows.reshape(groups, ROWS, -1), data[matrix])
    return Pack(kind, data.reshape(-1), n_rows, n_cols, n_matrices, round_x and coded)


# --- matrix products ----------------------------------------------------------------------------------------------


@njit(forceinline=True)
def _row_group(kind, data, at, n_cols, x, first, n_tokens, sums):
    """Sixteen rows times `n_tokens` (at most TILE) rows of x from row `first`, into sums[token * 16 + row]."""
    weights = carray(simd.stack_f32(512), (512,))
    stride = x.shape[1]
    sums[: n_tokens * ROWS] = np.float32(0)
    for block in range((n_cols + BLOCK - 1) // BLOCK):
        if n_tokens == 1:
            _prefetch_block(data, at + block * (packs.BYTES[kind] // packs.SHARE[kind]), kind)
        decode(kind, data, at, block, weights)
        column = block * BLOCK
        n_quads = min(BLOCK, n_cols - column) // 4
        token = 0
        while token + 4 <= n_tokens:
            block_4(weights, n_quads, x, (first + token) * stride + column, stride, sums, token)
            token += 4
        while token < n_tokens:
            block_1(weights, n_quads, x, (first + token) * stride + column, sums, token)
            token += 1


# --- matrix products with 8-bit activations -----------------------------------------------------------------------
#
# x is rounded to int8 with one scale for 32 columns, and products are summed as integers, exactly; so only the sum over
# blocks has an order, and it is that of the blocks. Kinds of at least 8 bits a weight with a floating point keep x.
#
# A sub-block is what has one scale: 32 columns, of Q6_K 16.


@njit
def _round_block(x, at, codes, steps, sums, lifts, block):
    """Round 32 values: int8 codes, their step, the sums of the codes' halves, and step times the sum of all."""
    top = simd.maximum(simd.magnitude(simd.load(x, at)), simd.magnitude(simd.load(x, at + ROWS)))
    peak = simd.max_lanes(top)
    step = peak / np.float32(127)
    inverse = np.float32(127) / peak if peak > 0 else np.float32(0)
    for half in range(2):
        start = at + half * ROWS
        whole = simd.round_even(simd.mul(simd.load(x, start), simd.splat(inverse)))
        sums[2 * block + half] = np.int32(simd.sum_lanes(whole))  # at most 16 x 127: exact in float32
        simd.store_i8(codes, start, whole)
    steps[block] = step
    lifts[block] = step * np.float32(sums[2 * block] + sums[2 * block + 1])


AHEAD = 4096  # bytes; one token streams all weights from memory, and what the hardware fetches by itself is half of it


@njit(forceinline=True)
def _prefetch_block(data, at, kind):
    """Ask for as many bytes as a 32-column block takes, AHEAD of the one that is read."""
    for line in range(0, packs.BYTES[kind] // packs.SHARE[kind], 64):
        simd.prefetch(data, at + AHEAD + line)


@njit(forceinline=True)
def _scaled_1(kind, data, at, n_cols, codes, steps, sums, lifts, token):
    """The sixteen outputs of one token."""
    total, blocks = simd.splat(np.float32(0)), n_cols // BLOCK
    halves = packs.HALVES[kind]
    for block in range(blocks):
        start, i = codes_start(kind, at, block), token * blocks + block
        _prefetch_block(data, start, kind)
        for half in range(halves):
            dots = simd.splat_i32(np.int32(-packs.ZERO[kind] * _sum_codes(kind, sums, i, half)))
            for q in range(8 // halves):
                quad = half * 4 + q
                column = simd.broadcast_i32(codes, i * BLOCK + 4 * quad)
                dots = cpuunits.dot_bytes(dots, quad_codes(kind, data, start, quad), column)
            scale = simd.mul(block_scale(kind, data, at, block, half), simd.splat(steps[i]))
            total = simd.fma(simd.to_float(dots), scale, total)
        if packs.OFFSET[kind]:
            total = simd.fma(block_offset(kind, data, at, block), simd.splat(lifts[i]), total)
    return total


@njit(forceinline=True)
def _scaled_4(kind, data, at, n_cols, codes, steps, sums, lifts, token, out):
    """The outputs of four tokens, each summed as in `_scaled_1`; the weights are taken apart once for all of them."""
    zero, negated = simd.splat(np.float32(0)), np.int32(-packs.ZERO[kind])
    total_a, total_b, total_c, total_d = zero, zero, zero, zero
    blocks, halves = n_cols // BLOCK, packs.HALVES[kind]
    for block in range(blocks):
        start, i = codes_start(kind, at, block), token * blocks + block
        j = i + 2 * blocks
        for half in range(halves):
            a = simd.splat_i32(np.int32(negated * _sum_codes(kind, sums, i, half)))
            b = simd.splat_i32(np.int32(negated * _sum_codes(kind, sums, i + blocks, half)))
            c = simd.splat_i32(np.int32(negated * _sum_codes(kind, sums, j, half)))
            d = simd.splat_i32(np.int32(negated * _sum_codes(kind, sums, j + blocks, half)))
            for q in range(8 // halves):
                quad = half * 4 + q
                weights, at_x = quad_codes(kind, data, start, quad), i * BLOCK + 4 * quad
                a = cpuunits.dot_bytes(a, weights, simd.broadcast_i32(codes, at_x))
                b = cpuunits.dot_bytes(b, weights, simd.broadcast_i32(codes, at_x + n_cols))
                c = cpuunits.dot_bytes(c, weights, simd.broadcast_i32(codes, at_x + 2 * n_cols))
                d = cpuunits.dot_bytes(d, weights, simd.broadcast_i32(codes, at_x + 3 * n_cols))
            scale = block_scale(kind, data, at, block, half)
            total_a = simd.fma(simd.to_float(a), simd.mul(scale, simd.splat(steps[i])), total_a)
            total_b = simd.fma(simd.to_float(b), simd.mul(scale, simd.splat(steps[i + blocks])), total_b)
            total_c = simd.fma(simd.to_float(c), simd.mul(scale, simd.splat(steps[j])), total_c)
            total_d = simd.fma(simd.to_float(d), simd.mul(scale, simd.splat(steps[j + blocks])), total_d)
        if packs.OFFSET[kind]:
            offset = block_offset(kind, data, at, block)
            total_a = simd.fma(offset, simd.splat(lifts[i]), total_a)
            total_b = simd.fma(offset, simd.splat(lifts[i + blocks]), total_b)
            total_c = simd.fma(offset, simd.splat(lifts[j]), total_c)
            total_d = simd.fma(offset, simd.splat(lifts[j + blocks]), total_d)
    simd.store(out, 0, total_a)
    simd.store(out, 16, total_b)
    simd.store(out, 32, total_c)
    simd.store(out, 48, total_d)


@njit(forceinline=True)
def _sum_codes(kind, sums, i, half):
    """Sum of x's codes over a sub-block."""
    return sums[2 * i + half] if packs.HALVES[kind] == 2 else sums[2 * i] + sums[2 * i + 1]


@njit(forceinline=True)
def _unpack_group(kind, data, at, n_cols, weights, scales, offsets):
    """A row group with its codes as signed bytes, quad after quad, and scales and offsets as float32."""
    halves = packs.HALVES[kind]
    for block in range(n_cols // BLOCK):
        start = codes_start(kind, at, block)
        for quad in range(8):
            codes = simd.subtract_bytes(quad_codes(kind, data, start, quad), np.int32(packs.ZERO[kind]))
            simd.store_i32(weights, block * 512 + quad * 64, codes)
        for half in range(halves):
            simd.store(scales, (block * halves + half) * ROWS, block_scale(kind, data, at, block, half))
        if packs.OFFSET[kind]:
            simd.store(offsets, block * ROWS, block_offset(kind, data, at, block))


@njit(forceinline=True)
def _tile_block(kind, weights, scales, offsets, block, codes, n_cols, steps, lifts, token, dots, totals):
    """Add a column block's share to the totals of sixteen tokens, each as in `_scaled_1`."""
    blocks, halves = n_cols // BLOCK, packs.HALVES[kind]
    for half in range(halves):
        column = block * BLOCK + half * 16
        if halves == 2:
            cpuunits.tile_product(codes, token * n_cols + column, n_cols, weights, column * ROWS, 16, dots)
        else:
            cpuunits.tile_product(codes, token * n_cols + column, n_cols, weights, column * ROWS, 32, dots)
        scale = simd.load(scales, (halves * block + half) * ROWS)
        for t in range(16):
            step = simd.load_broadcast(steps, (token + t) * blocks + block)
            dot = simd.to_float(simd.load_i32(dots, t * 64))
            total = simd.fma(dot, simd.mul(scale, step), simd.load(totals, t * ROWS))
            if packs.OFFSET[kind]:
                lift = simd.load_broadcast(lifts, (token + t) * blocks + block)
                total = simd.fma(simd.load(offsets, block * ROWS), lift, total)
            simd.store(totals, t * ROWS, total)


@njit(forceinline=True)
def _put_rows(totals, n_tokens, out, at, n_rows, n):
    """Write the first `n` of sixteen outputs for each of some tokens, whose rows of `out` are `n_rows` apart."""
    for t in range(n_tokens):
        if n == ROWS:
            simd.store(out, at + t * n_rows, simd.load(totals, t * ROWS))
        else:
            for row in range(n):
                out[at + t * n_rows + row] = totals[t * ROWS + row]


FEWEST_FOR_TILES = 8  # tokens from which a tile, though not full, is the faster way


@njit(forceinline=True)
def _tiled_group(kind, data, at, n_cols, codes, steps, lifts, first, n_tokens, out, out_at, n_rows, n):
    """Tiles of sixteen tokens from token `first`; `out_at` is the first one's first output. Returns how many it did."""
    if n_tokens < FEWEST_FOR_TILES:
        return 0
    weights, scales = cpumemory.scratch_bytes(n_cols * ROWS), cpumemory.scratch(n_cols)
    offsets = cpumemory.scratch(n_cols // 2)
    totals, dots = carray(simd.stack_f32(256), (256,)), cpumemory.scratch_bytes(1024)
    _unpack_group(kind, data, at, n_cols, weights, scales, offsets)
    cpuunits.tiles_begin(cpuunits.TILE_SHAPES)
    done = 0
    while n_tokens - done >= FEWEST_FOR_TILES:
        totals[:] = np.float32(0)
        for block in range(n_cols // BLOCK):
            _tile_block(kind, weights, scales, offsets, block, codes, n_cols, steps, lifts, first + done, dots, totals)
        n_here = min(16, n_tokens - done)
        _put_rows(totals, n_here, out, out_at + done * n_rows, n_rows, n)
        done += n_here
    cpuunits.tiles_end()
    return done


@njit(forceinline=True)
def _int8_group(kind, data, at, n_cols, codes, steps, sums, lifts, first, n_tokens, tiles, out, out_at, n_rows, n):
    """Rows `at` (a group's byte offset) times tokens first.. : the first `n` outputs of each, into `out`."""
    totals, done = carray(simd.stack_f32(64), (64,)), 0
    if tiles:
        done = _tiled_group(kind, data, at, n_cols, codes, steps, lifts, first, n_tokens, out, out_at, n_rows, n)
    while n_tokens - done >= 4:
        _scaled_4(kind, data, at, n_cols, codes, steps, sums, lifts, first + done, totals)
        _put_rows(totals, 4, out, out_at + done * n_rows, n_rows, n)
        done += 4
    while done < n_tokens:
        simd.store(totals, 0, _scaled_1(kind, data, at, n_cols, codes, steps, sums, lifts, first + done))
        _put_rows(totals, 1, out, out_at + done * n_rows, n_rows, n)
        done += 1


@njit(forceinline=True)
def _float_group(kind, data, at, n_cols, x, first, n_tokens, out, out_at, n_rows, n):
    """Rows `at` (a group's byte offset) times tokens first.. : the first `n` outputs of each, into `out`."""
    totals = carray(simd.stack_f32(1024), (1024,))
    for done in range(0, n_tokens, TILE):
        n_tile = min(TILE, n_tokens - done)
        _row_group(kind, data, at, n_cols, x, first + done, n_tile, totals)
        _put_rows(totals, n_tile, out, out_at + done * n_rows, n_rows, n)


# --- products -----------------------------------------------------------------------------------------------------
#
# A product is that of x with one or more packs (the parts), of which each may hold many matrices (the experts): rows
# offsets[e]..offsets[e + 1] of x times matrix e. The outputs of the parts lie one behind the other. A job is some row
# groups of one matrix.

# Multiply-adds of one job: some 5 us, a few times what claiming it costs.
JOB_WORK = 150_000
ROUND_ROWS = 4  # rows of x that a job rounds
PLAN = arguments("first_job groups_per_job n_jobs out_at")  # of a part; jobs are those of each of its matrices

_Rounding = arguments("x codes steps sums lifts n_rows n_cols")
_Product = arguments("table plan n_parts x codes steps sums lifts n_tokens n_cols active n_active out tiles")


def _round_job(control, job):
    """Round some rows of x."""
    c = given(control, _Rounding)
    blocks = c.n_cols // BLOCK
    x, codes = array_at(c.x, c.n_rows * c.n_cols, np.float32), array_at(c.codes, c.n_rows * c.n_cols, np.int8)
    steps, lifts = array_at(c.steps, c.n_rows * blocks, np.float32), array_at(c.lifts, c.n_rows * blocks, np.float32)
    sums = array_at(c.sums, c.n_rows * blocks * 2, np.int32)
    for block in range(job * ROUND_ROWS * blocks, min((job + 1) * ROUND_ROWS, c.n_rows) * blocks):
        _round_block(x, block * BLOCK, codes, steps, sums, lifts, block)


def _product_job(control, job):
    """Find the part of a job and let the function for its kind do it."""
    c = given(control, _Product)
    plan, part = array_at(c.plan, c.n_parts, PLAN), c.n_parts - 1
    while plan[part].first_job > job:
        part -= 1
    call_job(array_at(c.table, c.n_parts, PART)[part].product, control_array(control), job << 8 | part)


@njit
def _product_part(c, job):
    """What a job of a part multiplies: weights, and where they and the outputs lie; `job` is number and part."""
    part, plan = array_at(c.table, c.n_parts, PART)[job & 255], array_at(c.plan, c.n_parts, PLAN)[job & 255]
    job = (job >> 8) - plan.first_job
    matrix, first, count = array_at(c.active, (c.n_active, 3), np.int64)[job // plan.n_jobs]
    n_rows, group_bytes, groups = part.n_rows, part.group_bytes, (part.n_rows + ROWS - 1) // ROWS
    data = array_at(part.data + matrix * groups * group_bytes, groups * group_bytes, np.uint8)
    out = array_at(c.out + 4 * plan.out_at, c.n_tokens * n_rows, np.float32)
    group = job % plan.n_jobs * plan.groups_per_job
    return data, group_bytes, n_rows, first, count, out, group, min(group + plan.groups_per_job, groups)


def _float_product(kind):
    """A job of a part of a kind with x as it is."""

    def job(control, number):
        c = given(control, _Product)
        data, group_bytes, n_rows, first, count, out, start, end = _product_part(c, number)
        n_cols, x = c.n_cols, array_at(c.x, (c.n_tokens, c.n_cols), np.float32)
        for group in range(start, end):
            n, out_at = min(ROWS, n_rows - group * ROWS), first * n_rows + group * ROWS
            _float_group(kind, data, group * group_bytes, n_cols, x, first, count, out, out_at, n_rows, n)

    return Job(job)


def _int8_product(kind):
    """A job of a part of a kind with x rounded."""

    def job(control, number):
        c = given(control, _Product)
        data, group_bytes, n_rows, first, count, out, start, end = _product_part(c, number)
        n_cols, tiles, n_blocks = c.n_cols, c.tiles, c.n_tokens * (c.n_cols // BLOCK)
        codes, steps = array_at(c.codes, c.n_tokens * n_cols, np.int8), array_at(c.steps, n_blocks, np.float32)
        sums, lifts = array_at(c.sums, n_blocks * 2, np.int32), array_at(c.lifts, n_blocks, np.float32)
        for group in range(start, end):
            at, n, out_at = group * group_bytes, min(ROWS, n_rows - group * ROWS), first * n_rows + group * ROWS
            _int8_group(kind, data, at, n_cols, codes, steps, sums, lifts, first, count, tiles, out, out_at, n_rows, n)

    return Job(job)


# One function a kind, and one with rounded x, each compiled when a model first needs it: where codes and scales lie is
# a constant in it.
_FLOAT_PRODUCTS = [_float_product(kind) for kind in range(len(KINDS))]
_INT8_PRODUCTS = {kind: _int8_product(kind) for kind in range(len(KINDS)) if packs.CODED[kind]}
_ROUND, _PRODUCT = Job(_round_job), Job(_product_job)


@njit
def _active_matrices(offsets):
    """(matrix, first row, rows) of the matrices that have rows of x, as int64 [n, 3]."""
    active = np.empty((len(offsets) - 1, 3), np.int64)
    n = 0
    for matrix in range(len(offsets) - 1):
        if offsets[matrix + 1] > offsets[matrix]:
            active[n, 0] = matrix
            active[n, 1] = offsets[matrix]
            active[n, 2] = offsets[matrix + 1] - offsets[matrix]
            n += 1
    return active[:n]


@njit
def _rounded(control, round_job, x):
    """x [T, n_cols] rounded: codes, steps, sums and lifts, with rows for a last tile of sixteen tokens behind them."""
    n_rows, blocks = x.shape[0], x.shape[1] // BLOCK
    padded = n_rows if n_rows < FEWEST_FOR_TILES else n_rows + 15
    codes, sums = cpumemory.scratch_bytes(padded * x.shape[1]).view(np.int8), np.empty(2 * padded * blocks, np.int32)
    steps, lifts = np.empty(padded * blocks, np.float32), np.empty(padded * blocks, np.float32)
    codes[x.size :] = np.int8(0)
    steps[n_rows * blocks :] = np.float32(0)
    lifts[n_rows * blocks :] = np.float32(0)
    if n_rows <= ROUND_ROWS or control[HELPERS] == 0:
        flat = x.reshape(x.size)
        for block in range(n_rows * blocks):
            _round_block(flat, block * BLOCK, codes, steps, sums, lifts, block)
    else:
        c = begin(control, round_job, _Rounding)
        c.x, c.codes, c.steps, c.sums, c.lifts = (
            x.ctypes.data, codes.ctypes.data, steps.ctypes.data, sums.ctypes.data, lifts.ctypes.data,
        )
        c.n_rows, c.n_cols = x.shape
        run_jobs(control, (n_rows + ROUND_ROWS - 1) // ROUND_ROWS)
    return codes, steps, sums, lifts


@njit
def _plan(table, n_tokens, n_cols, n_active, plan):
    """Cut every part into jobs of about JOB_WORK; returns their number."""
    rows_each, job, out_at = max(1, n_tokens // max(1, n_active)), 0, 0
    for part in range(len(table)):
        p, n_rows = plan[part], table[part].n_rows
        groups = (n_rows + ROWS - 1) // ROWS
        per_job = max(1, min(groups, JOB_WORK // (ROWS * n_cols * rows_each)))
        p.first_job, p.groups_per_job, p.n_jobs, p.out_at = job, per_job, (groups + per_job - 1) // per_job, out_at
        job += p.n_jobs * n_active
        out_at += n_tokens * n_rows
    return job


@njit
def multiply(control, round_job, product_job, tiles, table, x, offsets, out):
    """All parts of a table times x; `offsets` as in `expert_matmul`, `out` contiguous float32, part after part."""
    any_rounded = False
    for part in range(len(table)):
        any_rounded = any_rounded or table[part].rounds_x != 0
    codes, steps, sums, lifts = _rounded(control, round_job, x[: len(x) if any_rounded else 0])
    active, plan = _active_matrices(offsets), np.empty(len(table), PLAN)
    n_jobs = _plan(table, x.shape[0], x.shape[1], len(active), plan)
    c = begin(control, product_job, _Product)
    c.table, c.plan, c.n_parts, c.out, c.tiles = table.ctypes.data, plan.ctypes.data, len(table), out.ctypes.data, tiles
    c.x, c.n_tokens, c.n_cols = x.ctypes.data, x.shape[0], x.shape[1]
    c.codes, c.steps, c.sums, c.lifts = codes.ctypes.data, steps.ctypes.data, sums.ctypes.data, lifts.ctypes.data
    c.active, c.n_active = active.ctypes.data, len(active)
    run_jobs(control, n_jobs)
    hold((codes, steps, sums, lifts, active, plan))


def product_jobs() -> tuple[int, int, bool]:
    """What `multiply` is told beside the control array: the functions of its jobs, and whether there are tiles."""
    return _ROUND.address, _PRODUCT.address, cpuunits.has_tiles


def _run_product(table, x, offsets, out, team) -> None:
    multiply(awake(team), *product_jobs(), table, x, offsets, out)


def matmul(weights, x, out, team=None):
    """out = x times the transposed weights; x float32 [T, n_cols], out float32 [T, n_rows], both C-contiguous."""
    _run_product(weights.table, x, np.array([0, len(x)]), out, team)


def expert_matmul(weights, x, offsets, out, team=None):
    """Rows offsets[e]..offsets[e + 1] of x times expert e; x [n, n_cols], out [n, n_rows], offsets int64 [E + 1]."""
    _run_product(weights.table, x, offsets, out, team)


def matmul_each(weights, x, team=None):
    """x times each of the packs put `together`: an array float32 [T, n_rows] for each."""
    return expert_matmul_each(weights, x, np.array([0, len(x)]), team)


def expert_matmul_each(weights, x, offsets, team=None):
    """`expert_matmul` with each of the packs put `together`: an array float32 [n, n_rows] for each."""
    n, parts, first = len(x), [], 0
    out = np.empty(n * sum(weights.n_rows), np.float32)
    _run_product(weights.table, x, offsets, out, team)
    for n_rows in weights.n_rows:
        parts.append(out[first : first + n * n_rows].reshape(n, n_rows))
        first += n * n_rows
    return parts


@njit
def _gather_rows(kind, data, group_bytes, n_cols, ids, out):
    weights = carray(simd.stack_f32(512), (512,))
    for i in range(len(ids)):
        at, lane = (ids[i] // ROWS) * group_bytes, ids[i] % ROWS
        for block in range((n_cols + BLOCK - 1) // BLOCK):
            decode(kind, data, at, block, weights)
            for k in range(min(BLOCK, n_cols - block * BLOCK)):
                out[i, block * BLOCK + k] = weights[k * ROWS + lane]


def gather_rows(weights, ids, out):
    """out[i] = row ids[i] of the weights as float32 [n_cols]."""
    _gather_rows(weights.kind, weights.data, weights.group_bytes, weights.n_cols, ids, out)
