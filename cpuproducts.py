"""Weights on the CPU: packs, their rows, and products with them.

It owns the decoding of weight types and the matrix products; it knows no layer. Invariant: what is computed for a token
does not depend on which other tokens stand in the same call, on how many threads run it or on what the processor has:
every sum has a fixed order, and what is summed as integers is exact. Read next: kernels_cpu.py.

Weights lie in packs (see packs.py): sixteen rows side by side in the lanes of a vector, so no sum runs across lanes.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numba import carray

import simd
from jit import njit
from packs import BF16, BLOCK, BLOCK_BYTES, BLOCK_COLUMNS, F16, F32, PACKERS, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, ROWS
from team import ARGUMENTS, HELPERS, Job, awake, call_job, control_array, hold, pointer_to, put, run_jobs

TILE = 64  # tokens that share one decoding of a block

_BYTES = np.array([BLOCK_BYTES[kind] for kind in range(9)], dtype=np.int64)


# --- packs: weights as the kernels read them ----------------------------------------------------------------------


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
        return -(-self.n_cols // BLOCK_COLUMNS[self.kind]) * BLOCK_BYTES[self.kind]

    @functools.cached_property
    def table(self) -> np.ndarray:
        """What a product reads of it, int64 [1, 5]: function, data, bytes of a group, rows, whether x is rounded."""
        product = (_ROUNDED_PRODUCTS if self.rounds_x else _PRODUCTS)[self.kind]
        fields = (product.address, self.data.ctypes.data, self.group_bytes, self.n_rows, self.rounds_x)
        return np.array([fields], np.int64)


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
    if n_cols % (BLOCK_COLUMNS[kind] if kind >= Q8_0 else 4):
        raise ValueError(f"a width of {n_cols} cannot be packed")
    n_matrices, n_rows = raw.shape[:2]
    groups = -(-n_rows // ROWS)
    blocks = -(-n_cols // BLOCK_COLUMNS[kind])
    data = simd.aligned_zeros((n_matrices, groups, blocks, BLOCK_BYTES[kind]), np.uint8)
    for matrix in range(n_matrices):
        rows = raw[matrix].reshape(n_rows, -1)
        if n_rows % ROWS:
            rows = np.concatenate([rows, np.zeros((groups * ROWS - n_rows, rows.shape[1]), rows.dtype)])
        PACKERS[kind](rows.reshape(groups, ROWS, -1), data[matrix])
    return Pack(kind, data.reshape(-1), n_rows, n_cols, n_matrices, round_x and kind >= Q8_0)


@njit
def _decode_quad(codes, quad, scale, offset, out):
    """Four columns of sixteen rows, `codes` one unsigned byte each, to scale * code + offset in `out`."""
    for j in range(4):
        value = simd.to_float(simd.bits(codes, np.int32(8 * j), np.int32(255)))
        simd.store(out, (4 * quad + j) * ROWS, simd.fma(value, scale, offset))


@njit(forceinline=True)
def decode_floats(kind, data, at, out):
    """A block of 32 columns of a kind of floats at byte `at` into `out`, column by column."""
    for k in range(BLOCK):
        if kind == F32:
            value = simd.load_f32(data, at + k * 64)
        elif kind == F16:
            value = simd.load_f16(data, at + k * 32)
        else:
            value = simd.load_bf16(data, at + k * 32)
        simd.store(out, k * ROWS, value)


@njit
def _decode_q8_0(data, at, out):
    scale = simd.load_f16(data, at)
    for quad in range(8):
        codes = simd.load_i32(data, at + 32 + quad * 64)
        for j in range(4):
            value = simd.signed_byte(codes, np.int32(j))
            simd.store(out, (4 * quad + j) * ROWS, simd.mul(value, scale))


@njit
def _decode_nibbles(data, at, scale, offset, out):
    for quad in range(4):
        both = simd.load_i32(data, at + quad * 64)
        _decode_quad(simd.bits(both, np.int32(0), np.int32(0x0F0F0F0F)), quad, scale, offset, out)
        _decode_quad(simd.bits(both, np.int32(4), np.int32(0x0F0F0F0F)), quad + 4, scale, offset, out)


@njit
def _decode_5_bits(data, at, scale, offset, out):
    high = simd.load_i32(data, at + 256)
    for quad in range(8):
        both = simd.load_i32(data, at + (quad & 3) * 64)
        low = simd.bits(both, np.int32(4 * (quad >> 2)), np.int32(0x0F0F0F0F))
        bit = simd.shift_left(simd.bits(high, np.int32(quad), np.int32(0x01010101)), np.int32(4))
        _decode_quad(simd.either(low, bit), quad, scale, offset, out)


@njit
def _decode_6_bits(data, at, d, scales_at, out):
    """Signed 6-bit codes with a scale for each half of the block (16 columns)."""
    for quad in range(8):
        scale = simd.mul(d, simd.load_i8(data, scales_at + (quad >> 2) * ROWS))
        both = simd.load_i32(data, at + (quad & 3) * 64)
        low = simd.bits(both, np.int32(4 * (quad >> 2)), np.int32(0x0F0F0F0F))
        plane = simd.load_i32(data, at + 256 + (quad >> 2) * 64)
        top = simd.shift_left(simd.bits(plane, np.int32(2 * (quad & 3)), np.int32(0x03030303)), np.int32(4))
        _decode_quad(simd.either(low, top), quad, scale, simd.mul(scale, simd.splat(np.float32(-32))), out)


@njit(forceinline=True)
def _decode_k(kind, data, at, sub, out):
    """Sub-block `sub` (32 columns) of a 256-column block of Q4_K, Q5_K or Q6_K."""
    d = simd.load_f16(data, at)
    if kind == Q6_K:
        _decode_6_bits(data, at + 288 + sub * 384, d, at + 32 + sub * 32, out)
        return
    scale = simd.mul(d, simd.load_u8(data, at + 64 + sub * ROWS))
    lowest = simd.mul(simd.load_f16(data, at + 32), simd.load_u8(data, at + 192 + sub * ROWS))
    offset = simd.sub(simd.splat(np.float32(0)), lowest)
    if kind == Q4_K:
        _decode_nibbles(data, at + 320 + sub * 256, scale, offset, out)
    else:
        _decode_5_bits(data, at + 320 + sub * 320, scale, offset, out)


@njit(forceinline=True)
def _decode(kind, data, at, block, out):
    """Decode block `block` (32 columns x 16 rows) of the row group at byte `at` into `out`, column by column."""
    if kind >= Q4_K:
        _decode_k(kind, data, at + (block >> 3) * _BYTES[kind], block & 7, out)
        return
    at += block * _BYTES[kind]
    if kind == Q4_1:
        _decode_nibbles(data, at + 64, simd.load_f16(data, at), simd.load_f16(data, at + 32), out)
    elif kind == Q4_0:
        scale = simd.load_f16(data, at)
        _decode_nibbles(data, at + 32, scale, simd.mul(scale, simd.splat(np.float32(-8))), out)
    elif kind == Q8_0:
        _decode_q8_0(data, at, out)
    else:
        decode_floats(kind, data, at, out)


# --- matrix products ----------------------------------------------------------------------------------------------


@njit
def block_1(weights, n_quads, x, at, sums, token):
    """One token: four partial sums (column mod 4), added in one order to the token's sixteen running sums."""
    zero = simd.splat(np.float32(0))
    a0, a1, a2, a3 = zero, zero, zero, zero
    for quad in range(n_quads):
        w, k = quad * 64, at + quad * 4
        a0 = simd.fma(simd.load(weights, w), simd.load_broadcast(x, k), a0)
        a1 = simd.fma(simd.load(weights, w + 16), simd.load_broadcast(x, k + 1), a1)
        a2 = simd.fma(simd.load(weights, w + 32), simd.load_broadcast(x, k + 2), a2)
        a3 = simd.fma(simd.load(weights, w + 48), simd.load_broadcast(x, k + 3), a3)
    total = simd.add(simd.add(a0, a1), simd.add(a2, a3))
    simd.store(sums, token * ROWS, simd.add(simd.load(sums, token * ROWS), total))


@njit
def block_4(weights, n_quads, x, at, stride, sums, token):
    """Four tokens, each summed exactly as in `block_1`; the weights are loaded once for all of them."""
    zero = simd.splat(np.float32(0))
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    c0, c1, c2, c3 = zero, zero, zero, zero
    d0, d1, d2, d3 = zero, zero, zero, zero
    for quad in range(n_quads):
        w, k = quad * 64, at + quad * 4
        w0, w1, w2, w3 = (
            simd.load(weights, w), simd.load(weights, w + 16), simd.load(weights, w + 32), simd.load(weights, w + 48)
        )
        a0 = simd.fma(w0, simd.load_broadcast(x, k), a0)
        a1 = simd.fma(w1, simd.load_broadcast(x, k + 1), a1)
        a2 = simd.fma(w2, simd.load_broadcast(x, k + 2), a2)
        a3 = simd.fma(w3, simd.load_broadcast(x, k + 3), a3)
        k += stride
        b0 = simd.fma(w0, simd.load_broadcast(x, k), b0)
        b1 = simd.fma(w1, simd.load_broadcast(x, k + 1), b1)
        b2 = simd.fma(w2, simd.load_broadcast(x, k + 2), b2)
        b3 = simd.fma(w3, simd.load_broadcast(x, k + 3), b3)
        k += stride
        c0 = simd.fma(w0, simd.load_broadcast(x, k), c0)
        c1 = simd.fma(w1, simd.load_broadcast(x, k + 1), c1)
        c2 = simd.fma(w2, simd.load_broadcast(x, k + 2), c2)
        c3 = simd.fma(w3, simd.load_broadcast(x, k + 3), c3)
        k += stride
        d0 = simd.fma(w0, simd.load_broadcast(x, k), d0)
        d1 = simd.fma(w1, simd.load_broadcast(x, k + 1), d1)
        d2 = simd.fma(w2, simd.load_broadcast(x, k + 2), d2)
        d3 = simd.fma(w3, simd.load_broadcast(x, k + 3), d3)
    at = token * ROWS
    simd.store(sums, at, simd.add(simd.load(sums, at), simd.add(simd.add(a0, a1), simd.add(a2, a3))))
    simd.store(sums, at + 16, simd.add(simd.load(sums, at + 16), simd.add(simd.add(b0, b1), simd.add(b2, b3))))
    simd.store(sums, at + 32, simd.add(simd.load(sums, at + 32), simd.add(simd.add(c0, c1), simd.add(c2, c3))))
    simd.store(sums, at + 48, simd.add(simd.load(sums, at + 48), simd.add(simd.add(d0, d1), simd.add(d2, d3))))


@njit(forceinline=True)
def _row_group(kind, data, at, n_cols, x, first, n_tokens, sums):
    """Sixteen rows times `n_tokens` (at most TILE) rows of x from row `first`, into sums[token * 16 + row]."""
    weights = carray(simd.stack_f32(512), (512,))
    stride = x.shape[1]
    sums[: n_tokens * ROWS] = np.float32(0)
    for block in range((n_cols + BLOCK - 1) // BLOCK):
        if n_tokens == 1:
            per_block = _BYTES[kind] >> 3 if kind >= Q4_K else _BYTES[kind]
            _prefetch_block(data, at + block * per_block, kind)
        _decode(kind, data, at, block, weights)
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


@njit(forceinline=True)
def quad_codes(kind, data, at, quad):
    """Unsigned codes of four columns: byte j of a lane is column 4 quad + j of its row; `at` is where codes start."""
    if kind == Q8_0:
        return simd.flip(simd.load_i32(data, at + quad * 64), simd.splat_i32(np.int32(-2139062144)))  # 0x80 a byte
    both = simd.load_i32(data, at + (quad & 3) * 64)
    low = simd.bits(both, np.int32(4 * (quad >> 2)), np.int32(0x0F0F0F0F))
    if kind == Q5_K:
        bit = simd.bits(simd.load_i32(data, at + 256), np.int32(quad), np.int32(0x01010101))
        return simd.either(low, simd.shift_left(bit, np.int32(4)))
    if kind == Q6_K:
        plane = simd.load_i32(data, at + 256 + (quad >> 2) * 64)
        top = simd.bits(plane, np.int32(2 * (quad & 3)), np.int32(0x03030303))
        return simd.either(low, simd.shift_left(top, np.int32(4)))
    return low


@njit(forceinline=True)
def zero_point(kind):
    """The unsigned code that stands for 0 where a kind has signed codes."""
    if kind == Q8_0:
        return np.int32(128)
    if kind == Q6_K:
        return np.int32(32)
    return np.int32(8) if kind == Q4_0 else np.int32(0)


@njit(forceinline=True)
def _has_offsets(kind):
    """Whether a weight is scale * code + offset."""
    return kind in (Q4_1, Q4_K, Q5_K)


@njit(forceinline=True)
def codes_start(kind, at, block):
    """Byte of the first quad of column block `block` in the row group at byte `at`."""
    if kind >= Q4_K:
        at += (block >> 3) * _BYTES[kind]
        sub = block & 7
        if kind == Q6_K:
            return at + 288 + sub * 384
        return at + 320 + sub * (256 if kind == Q4_K else 320)
    return at + block * _BYTES[kind] + (64 if kind == Q4_1 else 32)


@njit(forceinline=True)
def block_scale(kind, data, at, block, half):
    """Scale of a column block's sixteen rows (of Q6_K: of its half)."""
    if kind >= Q4_K:
        at += (block >> 3) * _BYTES[kind]
        d, sub = simd.load_f16(data, at), block & 7
        if kind == Q6_K:
            return simd.mul(d, simd.load_i8(data, at + 32 + sub * 32 + half * ROWS))
        return simd.mul(d, simd.load_u8(data, at + 64 + sub * ROWS))
    return simd.load_f16(data, at + block * _BYTES[kind])


@njit(forceinline=True)
def block_offset(kind, data, at, block):
    """Offset of a column block's sixteen rows, of a kind that has offsets."""
    if kind >= Q4_K:
        at += (block >> 3) * _BYTES[kind]
        low = simd.mul(simd.load_f16(data, at + 32), simd.load_u8(data, at + 192 + (block & 7) * ROWS))
        return simd.sub(simd.splat(np.float32(0)), low)
    return simd.load_f16(data, at + block * _BYTES[kind] + 32)


AHEAD = 4096  # bytes; one token streams all weights from memory, and what the hardware fetches by itself is half of it


@njit(forceinline=True)
def _prefetch_block(data, at, kind):
    """Ask for as many bytes as a 32-column block takes, AHEAD of the one that is read."""
    per_block = _BYTES[kind] >> 3 if kind >= Q4_K else _BYTES[kind]
    for line in range(0, per_block, 64):
        simd.prefetch(data, at + AHEAD + line)


@njit(forceinline=True)
def _scaled_1(kind, data, at, n_cols, codes, steps, sums, lifts, token):
    """The sixteen outputs of one token."""
    total, blocks = simd.splat(np.float32(0)), n_cols // BLOCK
    halves = 2 if kind == Q6_K else 1
    for block in range(blocks):
        start, i = codes_start(kind, at, block), token * blocks + block
        _prefetch_block(data, start, kind)
        for half in range(halves):
            dots = simd.splat_i32(np.int32(-zero_point(kind) * _sum_codes(kind, sums, i, half)))
            for q in range(8 // halves):
                quad = half * 4 + q
                column = simd.broadcast_i32(codes, i * BLOCK + 4 * quad)
                dots = simd.dot_bytes(dots, quad_codes(kind, data, start, quad), column)
            scale = simd.mul(block_scale(kind, data, at, block, half), simd.splat(steps[i]))
            total = simd.fma(simd.to_float(dots), scale, total)
        if _has_offsets(kind):
            total = simd.fma(block_offset(kind, data, at, block), simd.splat(lifts[i]), total)
    return total


@njit(forceinline=True)
def _scaled_4(kind, data, at, n_cols, codes, steps, sums, lifts, token, out):
    """The outputs of four tokens, each summed as in `_scaled_1`; the weights are taken apart once for all of them."""
    zero, negated = simd.splat(np.float32(0)), np.int32(-zero_point(kind))
    total_a, total_b, total_c, total_d = zero, zero, zero, zero
    blocks, halves = n_cols // BLOCK, 2 if kind == Q6_K else 1
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
                a = simd.dot_bytes(a, weights, simd.broadcast_i32(codes, at_x))
                b = simd.dot_bytes(b, weights, simd.broadcast_i32(codes, at_x + n_cols))
                c = simd.dot_bytes(c, weights, simd.broadcast_i32(codes, at_x + 2 * n_cols))
                d = simd.dot_bytes(d, weights, simd.broadcast_i32(codes, at_x + 3 * n_cols))
            scale = block_scale(kind, data, at, block, half)
            total_a = simd.fma(simd.to_float(a), simd.mul(scale, simd.splat(steps[i])), total_a)
            total_b = simd.fma(simd.to_float(b), simd.mul(scale, simd.splat(steps[i + blocks])), total_b)
            total_c = simd.fma(simd.to_float(c), simd.mul(scale, simd.splat(steps[j])), total_c)
            total_d = simd.fma(simd.to_float(d), simd.mul(scale, simd.splat(steps[j + blocks])), total_d)
        if _has_offsets(kind):
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
    return sums[2 * i + half] if kind == Q6_K else sums[2 * i] + sums[2 * i + 1]


@njit(forceinline=True)
def _unpack_group(kind, data, at, n_cols, weights, scales, offsets):
    """A row group with its codes as signed bytes, quad after quad, and scales and offsets as float32."""
    halves = 2 if kind == Q6_K else 1
    for block in range(n_cols // BLOCK):
        start = codes_start(kind, at, block)
        for quad in range(8):
            codes = simd.subtract_bytes(quad_codes(kind, data, start, quad), zero_point(kind))
            simd.store_i32(weights, block * 512 + quad * 64, codes)
        for half in range(halves):
            simd.store(scales, (block * halves + half) * ROWS, block_scale(kind, data, at, block, half))
        if _has_offsets(kind):
            simd.store(offsets, block * ROWS, block_offset(kind, data, at, block))


@njit(forceinline=True)
def _tile_block(kind, weights, scales, offsets, block, codes, n_cols, steps, lifts, token, dots, totals):
    """Add a column block's share to the totals of sixteen tokens, each as in `_scaled_1`."""
    blocks = n_cols // BLOCK
    for half in range(2 if kind == Q6_K else 1):
        if kind == Q6_K:
            column = block * BLOCK + half * 16
            simd.tile_product(codes, token * n_cols + column, n_cols, weights, column * ROWS, 16, dots)
            scale = simd.load(scales, (2 * block + half) * ROWS)
        else:
            column = block * BLOCK
            simd.tile_product(codes, token * n_cols + column, n_cols, weights, column * ROWS, 32, dots)
            scale = simd.load(scales, block * ROWS)
        for t in range(16):
            step = simd.load_broadcast(steps, (token + t) * blocks + block)
            dot = simd.to_float(simd.load_i32(dots, t * 64))
            total = simd.fma(dot, simd.mul(scale, step), simd.load(totals, t * ROWS))
            if _has_offsets(kind):
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
    weights, scales, offsets = simd.scratch_bytes(n_cols * ROWS), simd.scratch(n_cols), simd.scratch(n_cols // 2)
    totals, dots = carray(simd.stack_f32(256), (256,)), simd.scratch_bytes(1024)
    _unpack_group(kind, data, at, n_cols, weights, scales, offsets)
    simd.tiles_begin(simd.TILE_SHAPES)
    done = 0
    while n_tokens - done >= FEWEST_FOR_TILES:
        totals[:] = np.float32(0)
        for block in range(n_cols // BLOCK):
            _tile_block(kind, weights, scales, offsets, block, codes, n_cols, steps, lifts, first + done, dots, totals)
        n_here = min(16, n_tokens - done)
        _put_rows(totals, n_here, out, out_at + done * n_rows, n_rows, n)
        done += n_here
    simd.tiles_end()
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
PLAN = 4  # int64 of a part's plan: its first job, row groups of a job, jobs of a matrix, where its outputs begin


def _round_job(control, job):
    """Round some rows of x: x, codes, steps, sums, lifts by address; rows, columns."""
    c = control_array(control)[ARGUMENTS:]
    n_rows, n_cols = c[5], c[6]
    blocks = n_cols // BLOCK
    x = carray(pointer_to(c[0]), (n_rows * n_cols,), np.float32)
    codes = carray(pointer_to(c[1]), (n_rows * n_cols,), np.int8)
    steps = carray(pointer_to(c[2]), (n_rows * blocks,), np.float32)
    sums = carray(pointer_to(c[3]), (n_rows * blocks * 2,), np.int32)
    lifts = carray(pointer_to(c[4]), (n_rows * blocks,), np.float32)
    for block in range(job * ROUND_ROWS * blocks, min((job + 1) * ROUND_ROWS, n_rows) * blocks):
        _round_block(x, block * BLOCK, codes, steps, sums, lifts, block)


def _product_job(control, job):
    """Find the part of a job and let the function for its kind do it."""
    c = control_array(control)[ARGUMENTS:]
    plan = carray(pointer_to(c[1]), (c[2], PLAN), np.int64)
    part = c[2] - 1
    while plan[part, 0] > job:
        part -= 1
    table = carray(pointer_to(c[0]), (c[2], 5), np.int64)
    call_job(table[part, 0], control_array(control), job << 8 | part)


@njit
def _product_part(c, job):
    """What a job of a part multiplies: weights, and where they and the outputs lie; `job` is number and part."""
    part, job, n_parts, n_tokens, n_active = job & 255, job >> 8, c[2], c[4], c[5]
    table = carray(pointer_to(c[0]), (n_parts, 5), np.int64)[part]
    plan = carray(pointer_to(c[1]), (n_parts, PLAN), np.int64)[part]
    matrix, first, count = carray(pointer_to(c[6]), (n_active, 3), np.int64)[(job - plan[0]) // plan[2]]
    group_bytes, n_rows = table[2], table[3]
    groups = (n_rows + ROWS - 1) // ROWS
    data = carray(pointer_to(table[1] + matrix * groups * group_bytes), (groups * group_bytes,), np.uint8)
    out = carray(pointer_to(c[7] + 4 * plan[3]), (n_tokens * n_rows,), np.float32)
    group = (job - plan[0]) % plan[2] * plan[1]
    return data, group_bytes, n_rows, first, count, out, group, min(group + plan[1], groups)


@njit(forceinline=True)
def _float_product(kind, control, job):
    """A job of a part of a known kind with x as it is."""
    c = control_array(control)[ARGUMENTS:]
    data, group_bytes, n_rows, first, count, out, start, end = _product_part(c, job)
    x = carray(pointer_to(c[8]), (c[4], c[3]), np.float32)
    for group in range(start, end):
        n, out_at = min(ROWS, n_rows - group * ROWS), first * n_rows + group * ROWS
        _float_group(kind, data, group * group_bytes, c[3], x, first, count, out, out_at, n_rows, n)


@njit(forceinline=True)
def _int8_product(kind, control, job):
    """A job of a part of a known kind with x rounded."""
    c = control_array(control)[ARGUMENTS:]
    data, group_bytes, n_rows, first, count, out, start, end = _product_part(c, job)
    n_cols, n_tokens = c[3], c[4]
    blocks = n_cols // BLOCK
    codes = carray(pointer_to(c[9]), (n_tokens * n_cols,), np.int8)
    steps = carray(pointer_to(c[10]), (n_tokens * blocks,), np.float32)
    sums = carray(pointer_to(c[11]), (n_tokens * blocks * 2,), np.int32)
    lifts = carray(pointer_to(c[12]), (n_tokens * blocks,), np.float32)
    for group in range(start, end):
        at, n, out_at = group * group_bytes, min(ROWS, n_rows - group * ROWS), first * n_rows + group * ROWS
        _int8_group(kind, data, at, n_cols, codes, steps, sums, lifts, first, count, c[13], out, out_at, n_rows, n)


# One function a kind, and one with rounded x, each compiled when a model first needs it.


def _f32_product(control, job):
    _float_product(F32, control, job)


def _f16_product(control, job):
    _float_product(F16, control, job)


def _bf16_product(control, job):
    _float_product(BF16, control, job)


def _q8_0_product(control, job):
    _float_product(Q8_0, control, job)


def _q4_0_product(control, job):
    _float_product(Q4_0, control, job)


def _q4_1_product(control, job):
    _float_product(Q4_1, control, job)


def _q4_k_product(control, job):
    _float_product(Q4_K, control, job)


def _q5_k_product(control, job):
    _float_product(Q5_K, control, job)


def _q6_k_product(control, job):
    _float_product(Q6_K, control, job)


def _q8_0_rounded_product(control, job):
    _int8_product(Q8_0, control, job)


def _q4_0_rounded_product(control, job):
    _int8_product(Q4_0, control, job)


def _q4_1_rounded_product(control, job):
    _int8_product(Q4_1, control, job)


def _q4_k_rounded_product(control, job):
    _int8_product(Q4_K, control, job)


def _q5_k_rounded_product(control, job):
    _int8_product(Q5_K, control, job)


def _q6_k_rounded_product(control, job):
    _int8_product(Q6_K, control, job)


_PRODUCTS = [Job(function) for function in (
    _f32_product, _f16_product, _bf16_product, _q8_0_product, _q4_0_product, _q4_1_product, _q4_k_product,
    _q5_k_product, _q6_k_product,
)]  # fmt: skip
_ROUNDED_PRODUCTS = {kind: Job(function) for kind, function in (
    (Q8_0, _q8_0_rounded_product), (Q4_0, _q4_0_rounded_product), (Q4_1, _q4_1_rounded_product),
    (Q4_K, _q4_k_rounded_product), (Q5_K, _q5_k_rounded_product), (Q6_K, _q6_k_rounded_product),
)}  # fmt: skip
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
    codes, sums = simd.scratch_bytes(padded * x.shape[1]).view(np.int8), np.empty(2 * padded * blocks, np.int32)
    steps, lifts = np.empty(padded * blocks, np.float32), np.empty(padded * blocks, np.float32)
    codes[x.size :] = np.int8(0)
    steps[n_rows * blocks :] = np.float32(0)
    lifts[n_rows * blocks :] = np.float32(0)
    if n_rows <= ROUND_ROWS or control[HELPERS] == 0:
        flat = x.reshape(x.size)
        for block in range(n_rows * blocks):
            _round_block(flat, block * BLOCK, codes, steps, sums, lifts, block)
    else:
        put(control, round_job, (
            np.int64(x.ctypes.data), np.int64(codes.ctypes.data), np.int64(steps.ctypes.data),
            np.int64(sums.ctypes.data), np.int64(lifts.ctypes.data), np.int64(n_rows), np.int64(x.shape[1]),
        ))
        run_jobs(control, (n_rows + ROUND_ROWS - 1) // ROUND_ROWS)
    return codes, steps, sums, lifts


@njit
def _plan(table, n_tokens, n_cols, n_active, plan):
    """Cut every part into jobs of about JOB_WORK; returns their number."""
    rows_each, job, out_at = max(1, n_tokens // max(1, n_active)), 0, 0
    for part in range(len(table)):
        n_rows = table[part, 3]
        groups = (n_rows + ROWS - 1) // ROWS
        per_job = max(1, min(groups, JOB_WORK // (ROWS * n_cols * rows_each)))
        plan[part, 0], plan[part, 1], plan[part, 2] = job, per_job, (groups + per_job - 1) // per_job
        plan[part, 3] = out_at
        job += plan[part, 2] * n_active
        out_at += n_tokens * n_rows
    return job


@njit
def multiply(control, round_job, product_job, tiles, table, x, offsets, out):
    """All parts of a table times x; `offsets` as in `expert_matmul`, `out` contiguous float32, part after part."""
    any_rounded = False
    for part in range(len(table)):
        any_rounded = any_rounded or table[part, 4] != 0
    codes, steps, sums, lifts = _rounded(control, round_job, x[: len(x) if any_rounded else 0])
    active, plan = _active_matrices(offsets), np.empty((len(table), PLAN), np.int64)
    n_jobs = _plan(table, x.shape[0], x.shape[1], len(active), plan)
    put(control, product_job, (
        np.int64(table.ctypes.data), np.int64(plan.ctypes.data), np.int64(len(table)), np.int64(x.shape[1]),
        np.int64(x.shape[0]), np.int64(len(active)), np.int64(active.ctypes.data), np.int64(out.ctypes.data),
        np.int64(x.ctypes.data), np.int64(codes.ctypes.data), np.int64(steps.ctypes.data),
        np.int64(sums.ctypes.data), np.int64(lifts.ctypes.data), np.int64(tiles),
    ))
    run_jobs(control, n_jobs)
    hold((codes, steps, sums, lifts, active, plan))


def product_jobs() -> tuple[int, int, bool]:
    """What `multiply` is told beside the control array: the functions of its jobs, and whether there are tiles."""
    return _ROUND.address, _PRODUCT.address, simd.has_tiles


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
            _decode(kind, data, at, block, weights)
            for k in range(min(BLOCK, n_cols - block * BLOCK)):
                out[i, block * BLOCK + k] = weights[k * ROWS + lane]


def gather_rows(weights, ids, out):
    """out[i] = row ids[i] of the weights as float32 [n_cols]."""
    _gather_rows(weights.kind, weights.data, weights.group_bytes, weights.n_cols, ids, out)
