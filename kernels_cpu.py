"""The operations of a forward pass on the CPU, in Numba.

It owns arithmetic on plain arrays; it knows no layer, no token and no file. Invariant: what is computed for a token
does not depend on which other tokens stand in the same call or how many threads run it: every sum has a fixed order.
kernels_cuda.py has the same names. Read next: model.py.

Weights lie in *packs*: sixteen rows side by side in the lanes of a vector, so no sum runs across lanes, and blocks of
32 (K types: 256) input columns, in as many bits as in the file. Inside a block the codes stand in *quads*: four columns
of sixteen rows, 64 bytes, a row's four bytes in one 32-bit lane.
"""

import functools
import types
from typing import NamedTuple

import numpy as np
from numba import carray

import simd
from jit import njit
from team import (
    ARGUMENTS,
    HELPERS,
    OPERATION,
    Team,
    await_jobs,
    claim_job,
    finish_job,
    open_jobs,
    pointer_to,
    wait_for_jobs,
)

ROWS = 16  # rows of a pack, the lanes of a vector
BLOCK = 32  # columns decoded at once
TILE = 64  # tokens that share one decoding of a block

F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K = range(9)
BLOCK_COLUMNS = {F32: 32, F16: 32, BF16: 32, Q8_0: 32, Q4_0: 32, Q4_1: 32, Q4_K: 256, Q5_K: 256, Q6_K: 256}
BLOCK_BYTES = {F32: 2048, F16: 1024, BF16: 1024, Q8_0: 544, Q4_0: 288, Q4_1: 320, Q4_K: 2368, Q5_K: 2880, Q6_K: 3360}
_BYTES = np.array([BLOCK_BYTES[kind] for kind in range(9)], dtype=np.int64)


# --- arrays ---------------------------------------------------------------------------------------------------------
# A backend whose kernels cannot read the host's memory copies here; this one works where the arrays lie.


DEVICE_ERRORS = ()  # what a failing device raises


def empty(shape, dtype=np.float32):
    """An array of any content."""
    return np.empty(shape, dtype)


def zeros(shape, dtype=np.float32):
    """An array of zeros."""
    return np.zeros(shape, dtype)


def from_host(array):
    """A NumPy array as one that the operations take; it may be the same one."""
    return array


def to_host(array):
    """An operation's array as a NumPy one; it may be the same one."""
    return array


def host_copy(array):
    """An operation's array as a NumPy one of its own."""
    return array.copy()


def copy(array):
    """A copy that the operations take."""
    return array.copy()


def assign(out, source):
    """out = source, of the same shape; `source` may be an operation's array or a NumPy one."""
    out[...] = source


def clear(array):
    """Set an array to zeros."""
    array.fill(0)


def cells(n_pages, n_heads, sizes, residency=None):
    """The K/V pools of one layer, an array [pages][kv head][cell][bytes] for each of `sizes`, all in this memory."""
    if residency is not None:
        raise ValueError("there is no other memory to keep cells in")
    return [np.zeros((n_pages, n_heads, PAGE, size), np.uint8) for size in sizes]


def settle(pool, n_tokens):
    """After a rewind or a restore; nothing here depends on where cells lie."""


def read_bytes(array, offset, out):
    """Copy len(out) bytes of an array, from byte `offset`, into the NumPy array `out` (uint8)."""
    out[:] = array.reshape(-1).view(np.uint8)[offset : offset + len(out)]


def write_bytes(array, offset, data):
    """Copy `data` (NumPy, uint8) over the bytes of an array from byte `offset`."""
    # A reshape of a contiguous array is a view, which is what makes the bytes reach it.
    array.reshape(-1).view(np.uint8)[offset : offset + len(data)] = data


# --- packs: weights as the kernels read them ----------------------------------------------------------------------


class Pack(NamedTuple):
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
    data = np.zeros((n_matrices, groups, blocks, BLOCK_BYTES[kind]), np.uint8)
    for matrix in range(n_matrices):
        rows = raw[matrix].reshape(n_rows, -1)
        if n_rows % ROWS:
            rows = np.concatenate([rows, np.zeros((groups * ROWS - n_rows, rows.shape[1]), rows.dtype)])
        _PACKERS[kind](rows.reshape(groups, ROWS, -1), data[matrix])
    return Pack(kind, data.reshape(-1), n_rows, n_cols, n_matrices, round_x and kind >= Q8_0)


def _pack_floats(rows, out):
    groups, blocks = out.shape[:2]
    padded = np.zeros((groups, ROWS, blocks * BLOCK), rows.dtype)
    padded[:, :, : rows.shape[2]] = rows
    columns = padded.reshape(groups, ROWS, blocks, BLOCK).transpose(0, 2, 3, 1)
    out[:] = np.ascontiguousarray(columns).reshape(groups, blocks, -1).view(np.uint8)


def _blocks(rows, block_bytes):
    """[groups, 16, bytes] to [groups, blocks, 16, block_bytes]."""
    return rows.reshape(rows.shape[0], ROWS, -1, block_bytes).transpose(0, 2, 1, 3)


def _lanes(fields):
    """Fields [groups, blocks, 16, n] to the lane order [groups, blocks, n * 16], as bytes of whole fields."""
    return np.ascontiguousarray(np.swapaxes(fields, 2, 3)).reshape(*fields.shape[:2], -1)


def _halves(blocks, first, n):
    """`n` float16 fields at byte `first` of every block, lane order, as bytes."""
    fields = np.ascontiguousarray(blocks[..., first : first + 2 * n]).view(np.uint16)
    return _lanes(fields).view(np.uint8)


def _quads(codes):
    """Codes [groups, blocks, 16, columns] to [groups, blocks, quads, 64]: four columns of a row in one lane."""
    groups, blocks, _, columns = codes.shape
    quads = codes.reshape(groups, blocks, ROWS, columns // 4, 4).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(quads).reshape(groups, blocks, columns // 4, 64)


def _nibble_quads(codes):
    """32-column codes: the low 4 bits of quads 0..3 beside those of quads 4..7, in [groups, blocks, 256]."""
    quads = _quads(codes) & 15
    both = quads[:, :, :4] | quads[:, :, 4:] << 4
    return both.reshape(*both.shape[:2], -1)


def _nibbles(packed):
    """ggml's nibbles: the low ones are the first half of a block, the high ones the second."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _pack_q8_0(rows, out):
    blocks = _blocks(rows, 34)
    out[..., :32] = _halves(blocks, 0, 1)
    out[..., 32:] = _quads(blocks[..., 2:]).reshape(*out.shape[:2], -1)


def _pack_q4_0(rows, out):
    blocks = _blocks(rows, 18)
    out[..., :32] = _halves(blocks, 0, 1)
    out[..., 32:] = _nibble_quads(_nibbles(blocks[..., 2:]))


def _pack_q4_1(rows, out):
    blocks = _blocks(rows, 20)
    out[..., :64] = _halves(blocks, 0, 2)
    out[..., 64:] = _nibble_quads(_nibbles(blocks[..., 4:]))


def _k_scales(packed):
    """The eight 6-bit scales and minima of Q4_K and Q5_K out of their 12 bytes."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=-1)
    return scales, minima


def _put_k_header(blocks, out):
    out[..., :64] = _halves(blocks, 0, 2)
    scales, minima = _k_scales(blocks[..., 4:16])
    out[..., 64:192] = _lanes(scales)
    out[..., 192:320] = _lanes(minima)


def _k_codes(nibbles):
    """128 bytes of Q4_K or Q5_K to 256 codes: 64 columns at a time, low nibbles first."""
    chunks = nibbles.reshape(*nibbles.shape[:-1], 4, 32)
    return np.concatenate([chunks & 15, chunks >> 4], axis=-1).reshape(*nibbles.shape[:-1], 256)


def _put_sub_blocks(codes, first_byte, sub_bytes, out, high_planes):
    """Each 32-column sub-block: nibble quads, then its planes of higher bits."""
    for sub in range(8):
        part = codes[..., sub * 32 : sub * 32 + 32]
        at = first_byte + sub * sub_bytes
        out[..., at : at + 256] = _nibble_quads(part)
        if high_planes:
            out[..., at + 256 : at + sub_bytes] = high_planes(part >> 4)


def _fifth_bits(high):
    """One bit a column: byte j of a lane holds the bits of column 4 q + j at bit q."""
    quads = _quads(high)
    return np.bitwise_or.reduce(quads << np.arange(8, dtype=np.uint8)[:, None], axis=2)


def _top_two_bits(high):
    """Two bits a column: plane p holds quads 4 p .. 4 p + 3, quad q at bits 2 (q mod 4)."""
    quads = _quads(high).reshape(*high.shape[:2], 2, 4, 64)
    planes = np.bitwise_or.reduce(quads << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=3)
    return planes.reshape(*high.shape[:2], 128)


def _pack_q4_k(rows, out):
    blocks = _blocks(rows, 144)
    _put_k_header(blocks, out)
    _put_sub_blocks(_k_codes(blocks[..., 16:]), 320, 256, out, None)


def _pack_q5_k(rows, out):
    blocks = _blocks(rows, 176)
    _put_k_header(blocks, out)
    bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [..., column mod 32, sub-block]
    high = np.swapaxes(bits, -1, -2).reshape(*bits.shape[:-2], 256)
    _put_sub_blocks(_k_codes(blocks[..., 48:]) | high << 4, 320, 320, out, _fifth_bits)


def _q6_codes(low, high):
    """ggml's order of Q6_K: two halves of 128 columns, each four runs of 32 that share the bytes of `high`."""
    halves = []
    for half in range(2):
        ql, qh = low[..., half * 64 : half * 64 + 64], high[..., half * 32 : half * 32 + 32]
        runs = (ql[..., :32] & 15, ql[..., 32:] & 15, ql[..., :32] >> 4, ql[..., 32:] >> 4)
        halves += [run | ((qh >> 2 * i) & 3) << 4 for i, run in enumerate(runs)]
    return np.concatenate(halves, axis=-1)


def _pack_q6_k(rows, out):
    blocks = _blocks(rows, 210)
    out[..., :32] = _halves(blocks, 208, 1)
    out[..., 32:288] = _lanes(blocks[..., 192:208])
    _put_sub_blocks(_q6_codes(blocks[..., :128], blocks[..., 128:192]), 288, 384, out, _top_two_bits)


_PACKERS = (
    _pack_floats, _pack_floats, _pack_floats, _pack_q8_0, _pack_q4_0, _pack_q4_1, _pack_q4_k, _pack_q5_k, _pack_q6_k,
)


@njit
def _decode_quad(codes, quad, scale, offset, out):
    """Four columns of sixteen rows, `codes` one unsigned byte each, to scale * code + offset in `out`."""
    for j in range(4):
        value = simd.to_float(simd.bits(codes, np.int32(8 * j), np.int32(255)))
        simd.store(out, (4 * quad + j) * ROWS, simd.fma(value, scale, offset))


@njit
def _decode_float(kind, data, at, out):
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


@njit
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


@njit
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
        _decode_float(kind, data, at, out)


# --- matrix products ----------------------------------------------------------------------------------------------


@njit
def _block_1(weights, n_quads, x, at, sums, token):
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
def _block_4(weights, n_quads, x, at, stride, sums, token):
    """Four tokens, each summed exactly as in `_block_1`; the weights are loaded once for all of them."""
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


@njit
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
            _block_4(weights, n_quads, x, (first + token) * stride + column, stride, sums, token)
            token += 4
        while token < n_tokens:
            _block_1(weights, n_quads, x, (first + token) * stride + column, sums, token)
            token += 1


# --- matrix products with 8-bit activations -----------------------------------------------------------------------
#
# x is rounded to int8 with one scale for 32 columns, and products are summed as integers, exactly; so only the sum over
# blocks has an order, and it is that of the blocks. Kinds of at least 8 bits a weight with a floating point keep x.


@njit
def _round_block(x, at, codes, scales, sums, block):
    """Round 32 values: codes int8, one scale, and the sums of the two halves of the codes."""
    top = simd.maximum(simd.magnitude(simd.load(x, at)), simd.magnitude(simd.load(x, at + ROWS)))
    peak = simd.max_lanes(top)
    scales[block] = peak / np.float32(127)
    inverse = np.float32(127) / peak if peak > 0 else np.float32(0)
    for half in range(2):
        start = at + half * ROWS
        whole = simd.round_even(simd.mul(simd.load(x, start), simd.splat(inverse)))
        sums[2 * block + half] = np.int32(simd.sum_lanes(whole))  # at most 16 x 127: exact in float32
        simd.store_i8(codes, start, whole)


@njit
def _quad_codes(kind, data, at, quad):
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


@njit
def _block_parts(kind, data, at, block):
    """Where a 32-column block's codes start, its scale and offset (w = scale * code + offset, zero point apart)."""
    zero = simd.splat(np.float32(0))
    if kind >= Q4_K:
        at += (block >> 3) * _BYTES[kind]
        sub = block & 7
        scale = simd.mul(simd.load_f16(data, at), simd.load_u8(data, at + 64 + sub * ROWS))
        low = simd.mul(simd.load_f16(data, at + 32), simd.load_u8(data, at + 192 + sub * ROWS))
        return at + 320 + sub * (256 if kind == Q4_K else 320), scale, simd.sub(zero, low)
    at += block * _BYTES[kind]
    scale = simd.load_f16(data, at)
    if kind == Q4_1:
        return at + 64, scale, simd.load_f16(data, at + 32)
    return at + 32, scale, zero


AHEAD = 4096  # bytes; one token streams all weights from memory, and what the hardware fetches by itself is half of it


@njit
def _prefetch_block(data, at, kind):
    """Ask for as many bytes as a 32-column block takes, AHEAD of the one that is read."""
    per_block = _BYTES[kind] >> 3 if kind >= Q4_K else _BYTES[kind]
    for line in range(0, per_block, 64):
        simd.prefetch(data, at + AHEAD + line)


@njit
def _zero_point(kind):
    """The code that stands for 0 where a kind has signed codes."""
    if kind == Q8_0:
        return np.int32(128)
    return np.int32(8) if kind == Q4_0 else np.int32(0)


@njit
def _scaled_1(kind, data, at, n_cols, codes, scales, sums, token):
    """The sixteen outputs of one token."""
    total, zero_point = simd.splat(np.float32(0)), _zero_point(kind)
    offset_counts = kind >= Q4_1
    blocks = n_cols // BLOCK
    for block in range(blocks):
        start, scale, offset = _block_parts(kind, data, at, block)
        k, i = token * n_cols + block * BLOCK, token * blocks + block
        sum_codes = sums[2 * i] + sums[2 * i + 1]
        _prefetch_block(data, start, kind)
        dots = simd.splat_i32(np.int32(-zero_point * sum_codes))
        for quad in range(8):
            dots = simd.dot_bytes(dots, _quad_codes(kind, data, start, quad), simd.broadcast_i32(codes, k + 4 * quad))
        step = scales[i]
        total = simd.fma(simd.to_float(dots), simd.mul(scale, simd.splat(step)), total)
        if offset_counts:
            total = simd.fma(offset, simd.splat(step * np.float32(sum_codes)), total)
    return total


@njit
def _scaled_4(kind, data, at, n_cols, codes, scales, sums, token, out):
    """The outputs of four tokens, each summed as in `_scaled_1`; the weights are taken apart once for all of them."""
    zero, zero_point, offset_counts = simd.splat(np.float32(0)), _zero_point(kind), kind >= Q4_1
    total_a, total_b, total_c, total_d = zero, zero, zero, zero
    blocks = n_cols // BLOCK
    for block in range(blocks):
        start, scale, offset = _block_parts(kind, data, at, block)
        k, i = token * n_cols + block * BLOCK, token * blocks + block
        sum_a, sum_b = sums[2 * i] + sums[2 * i + 1], sums[2 * (i + blocks)] + sums[2 * (i + blocks) + 1]
        j = i + 2 * blocks
        sum_c, sum_d = sums[2 * j] + sums[2 * j + 1], sums[2 * (j + blocks)] + sums[2 * (j + blocks) + 1]
        a, b = simd.splat_i32(np.int32(-zero_point * sum_a)), simd.splat_i32(np.int32(-zero_point * sum_b))
        c, d = simd.splat_i32(np.int32(-zero_point * sum_c)), simd.splat_i32(np.int32(-zero_point * sum_d))
        for quad in range(8):
            weights = _quad_codes(kind, data, start, quad)
            at_x = k + 4 * quad
            a = simd.dot_bytes(a, weights, simd.broadcast_i32(codes, at_x))
            b = simd.dot_bytes(b, weights, simd.broadcast_i32(codes, at_x + n_cols))
            c = simd.dot_bytes(c, weights, simd.broadcast_i32(codes, at_x + 2 * n_cols))
            d = simd.dot_bytes(d, weights, simd.broadcast_i32(codes, at_x + 3 * n_cols))
        step_a, step_b, step_c, step_d = scales[i], scales[i + blocks], scales[j], scales[j + blocks]
        total_a = simd.fma(simd.to_float(a), simd.mul(scale, simd.splat(step_a)), total_a)
        total_b = simd.fma(simd.to_float(b), simd.mul(scale, simd.splat(step_b)), total_b)
        total_c = simd.fma(simd.to_float(c), simd.mul(scale, simd.splat(step_c)), total_c)
        total_d = simd.fma(simd.to_float(d), simd.mul(scale, simd.splat(step_d)), total_d)
        if offset_counts:
            total_a = simd.fma(offset, simd.splat(step_a * np.float32(sum_a)), total_a)
            total_b = simd.fma(offset, simd.splat(step_b * np.float32(sum_b)), total_b)
            total_c = simd.fma(offset, simd.splat(step_c * np.float32(sum_c)), total_c)
            total_d = simd.fma(offset, simd.splat(step_d * np.float32(sum_d)), total_d)
    simd.store(out, 0, total_a)
    simd.store(out, 16, total_b)
    simd.store(out, 32, total_c)
    simd.store(out, 48, total_d)


@njit
def _scaled_6_bits(data, at, n_cols, codes, scales, sums, token):
    """The sixteen outputs of one token for Q6_K, whose scales change every 16 columns."""
    total, blocks = simd.splat(np.float32(0)), n_cols // BLOCK
    for block in range(blocks):
        base, sub = at + (block >> 3) * _BYTES[Q6_K], block & 7
        d, i = simd.load_f16(data, base), token * blocks + block
        for half in range(2):
            dots = simd.splat_i32(np.int32(-32 * sums[2 * i + half]))
            for quad in range(half * 4, half * 4 + 4):
                weights = _quad_codes(Q6_K, data, base + 288 + sub * 384, quad)
                dots = simd.dot_bytes(dots, weights, simd.broadcast_i32(codes, i * BLOCK + 4 * quad))
            scale = simd.mul(d, simd.load_i8(data, base + 32 + sub * 32 + half * ROWS))
            total = simd.fma(simd.to_float(dots), simd.mul(scale, simd.splat(scales[i])), total)
    return total


@njit
def _int8_group(kind, data, at, n_cols, codes, scales, sums, first, n_tokens, out, column, n):
    """Rows `at` (a group's byte offset) times tokens first.. : the first `n` outputs into out[token, column:]."""
    tile = carray(simd.stack_f32(64), (64,))
    token = first
    while token < first + n_tokens:
        step = 1
        if kind == Q6_K:
            simd.store(tile, 0, _scaled_6_bits(data, at, n_cols, codes, scales, sums, token))
        elif token + 4 <= first + n_tokens:
            _scaled_4(kind, data, at, n_cols, codes, scales, sums, token, tile)
            step = 4
        else:
            simd.store(tile, 0, _scaled_1(kind, data, at, n_cols, codes, scales, sums, token))
        for i in range(step):
            for row in range(n):
                out[token + i, column + row] = tile[i * ROWS + row]
        token += step


@njit
def _float_group(kind, data, at, n_cols, x, first, n_tokens, out, column, n):
    """Rows `at` (a group's byte offset) times tokens first.. : the first `n` outputs into out[token, column:]."""
    sums = carray(simd.stack_f32(1024), (1024,))
    for start in range(first, first + n_tokens, TILE):
        n_tile = min(TILE, first + n_tokens - start)
        _row_group(kind, data, at, n_cols, x, start, n_tile, sums)
        for token in range(n_tile):
            for row in range(n):
                out[start + token, column + row] = sums[token * ROWS + row]


# --- operations shared out over a team ----------------------------------------------------------------------------
#
# An operation puts its arguments into the team's control array, arrays by address, and cuts its work into jobs; whoever
# claims a job, the caller or a helper, finds everything there. How the work is cut never changes a result.

_ROUND, _PRODUCT, _TILES, _SEGMENTS, _SELECT, _DELTA = range(6)
ALONE = Team(1, None)
# Multiply-adds of one job: some 5 us, a few times what claiming it costs.
JOB_WORK = 150_000


@njit
def _bytes_at(address, n):
    return carray(pointer_to(address), (n,), np.uint8)


@njit
def _put(control, operation, arguments):
    control[OPERATION] = operation
    for i in range(len(arguments)):
        control[ARGUMENTS + i] = arguments[i]


@njit
def _run_job(control, job):
    operation = control[OPERATION]
    if operation == _PRODUCT:
        _product_job(control, job)
    elif operation == _ROUND:
        _round_job(control, job)
    elif operation == _TILES:
        _tile_job(control, job)
    elif operation == _SEGMENTS:
        _segment_job(control, job)
    elif operation == _SELECT:
        _select_job(control, job)
    else:
        _delta_job(control, job)


@njit
def _run(control, n_jobs):
    """Do all jobs of the operation in `control`, with whatever helpers come by."""
    if n_jobs <= 1 or control[HELPERS] == 0:
        for job in range(n_jobs):
            _run_job(control, job)
        return
    open_jobs(control, n_jobs)
    _work(control)
    wait_for_jobs(control, n_jobs)


@njit
def _work(control):
    job = claim_job(control)
    while job >= 0:
        _run_job(control, job)
        finish_job(control)
        job = claim_job(control)


@njit
def _assist(control):
    """What a helper does: jobs, until none were open for a while."""
    while await_jobs(control):
        _work(control)


def _awake(team):
    """The control array of a team whose helpers look for jobs; without one the caller works alone."""
    team = team or ALONE
    team.wake()
    return team.control


def operations(n_threads):
    """This module's operations on a team of `n_threads`, and the team."""
    team = Team(n_threads, _assist)
    shared = (matmul, expert_matmul, attention, attention_selected, select_blocks, delta_net)
    bound = {function.__name__: functools.partial(function, team=team) for function in shared}
    return types.SimpleNamespace(**(globals() | bound)), team


# --- products -----------------------------------------------------------------------------------------------------


@njit
def _round_job(control, job):
    """Round one row of x: x, codes, scales, sums by address; columns."""
    c = control[ARGUMENTS : ARGUMENTS + 6]
    n_rows, n_cols = c[4], c[5]
    blocks = n_cols // BLOCK
    x = carray(pointer_to(c[0]), (n_rows * n_cols,), np.float32)
    codes = carray(pointer_to(c[1]), (n_rows * n_cols,), np.int8)
    scales = carray(pointer_to(c[2]), (n_rows * blocks,), np.float32)
    sums = carray(pointer_to(c[3]), (n_rows * blocks * 2,), np.int32)
    for block in range(job * blocks, (job + 1) * blocks):
        _round_block(x, block * BLOCK, codes, scales, sums, block)


@njit
def _product_job(control, job):
    """Some row groups of one expert times its rows of x."""
    c = control[ARGUMENTS : ARGUMENTS + 17]
    kind, group_bytes, n_rows, n_cols, n_tokens = c[0], c[1], c[2], c[3], c[4]
    rounded, per_job, jobs_per_expert, n_active = c[5], c[6], c[7], c[8]
    groups, blocks = (n_rows + ROWS - 1) // ROWS, n_cols // BLOCK
    active = carray(pointer_to(c[14]), (n_active, 3), np.int64)
    expert, first, count = active[job // jobs_per_expert]
    data = _bytes_at(c[9], (expert + 1) * groups * group_bytes)
    out = carray(pointer_to(c[10]), (n_tokens, n_rows), np.float32)
    start = job % jobs_per_expert * per_job
    if rounded:
        codes = carray(pointer_to(c[11]), (n_tokens * n_cols,), np.int8)
        scales = carray(pointer_to(c[12]), (n_tokens * blocks,), np.float32)
        sums = carray(pointer_to(c[13]), (n_tokens * blocks * 2,), np.int32)
        for group in range(start, min(start + per_job, groups)):
            at, n = (expert * groups + group) * group_bytes, min(ROWS, n_rows - group * ROWS)
            _int8_group(kind, data, at, n_cols, codes, scales, sums, first, count, out, group * ROWS, n)
    else:
        x = carray(pointer_to(c[11]), (n_tokens, n_cols), np.float32)
        for group in range(start, min(start + per_job, groups)):
            at, n = (expert * groups + group) * group_bytes, min(ROWS, n_rows - group * ROWS)
            _float_group(kind, data, at, n_cols, x, first, count, out, group * ROWS, n)


@njit
def _active_experts(offsets):
    """(expert, first row, rows) of the experts that have rows, as int64 [n, 3]."""
    active = np.empty((len(offsets) - 1, 3), np.int64)
    n = 0
    for expert in range(len(offsets) - 1):
        if offsets[expert + 1] > offsets[expert]:
            active[n, 0] = expert
            active[n, 1] = offsets[expert]
            active[n, 2] = offsets[expert + 1] - offsets[expert]
            n += 1
    return active[:n]


@njit
def _put_product(control, kind, data, group_bytes, n_rows, n_cols, x, scales, sums, offsets, out):
    """Arguments of a product of x, float32 or rounded (int8): the number of jobs, and the list they read."""
    n_tokens, groups = x.shape[0], (n_rows + ROWS - 1) // ROWS
    active = _active_experts(offsets)
    rows_each = max(1, n_tokens // max(1, len(active)))
    per_job = max(1, min(groups, JOB_WORK // (ROWS * n_cols * rows_each)))
    jobs_per_expert = (groups + per_job - 1) // per_job
    _put(control, _PRODUCT, (
        np.int64(kind), np.int64(group_bytes), np.int64(n_rows), np.int64(n_cols), np.int64(n_tokens),
        np.int64(x.itemsize == 1), np.int64(per_job), np.int64(jobs_per_expert), np.int64(len(active)),
        np.int64(data.ctypes.data), np.int64(out.ctypes.data), np.int64(x.ctypes.data), np.int64(scales.ctypes.data),
        np.int64(sums.ctypes.data), np.int64(active.ctypes.data),
    ))
    return jobs_per_expert * len(active), active


@njit
def _put_round(control, x):
    """Arguments of rounding x, one job a row, and room for codes, scales and sums."""
    n_blocks = x.size // BLOCK
    codes, scales = np.empty(x.shape, np.int8), np.empty(n_blocks, np.float32)
    sums = np.empty(2 * n_blocks, np.int32)
    _put(control, _ROUND, (
        np.int64(x.ctypes.data), np.int64(codes.ctypes.data), np.int64(scales.ctypes.data), np.int64(sums.ctypes.data),
        np.int64(x.shape[0]), np.int64(x.shape[1]),
    ))
    return codes, scales, sums


@njit
def _gather_rows(kind, data, group_bytes, n_cols, ids, out):
    weights = carray(simd.stack_f32(512), (512,))
    for i in range(len(ids)):
        at, lane = (ids[i] // ROWS) * group_bytes, ids[i] % ROWS
        for block in range((n_cols + BLOCK - 1) // BLOCK):
            _decode(kind, data, at, block, weights)
            for k in range(min(BLOCK, n_cols - block * BLOCK)):
                out[i, block * BLOCK + k] = weights[k * ROWS + lane]


def matmul(weights, x, out, team=None):
    """out = x times the transposed weights; x float32 [T, n_cols], out float32 [T, n_rows], both C-contiguous."""
    expert_matmul(weights, x, np.array([0, len(x)]), out, team)


def expert_matmul(weights, x, offsets, out, team=None):
    """Rows offsets[e]..offsets[e + 1] of x times expert e; x [n, n_cols], out [n, n_rows], offsets int64 [E + 1]."""
    w, control = weights, _awake(team)
    # Jobs read arrays by address: x, its rounded form and the list of active experts are held by name until the end.
    rows, scales, sums = x, _NO_SCALES, _NO_SUMS
    if w.rounds_x:
        rows, scales, sums = _put_round(control, x)
        _run(control, len(x))
    n_jobs, _active = _put_product(
        control, w.kind, w.data, w.group_bytes, w.n_rows, w.n_cols, rows, scales, sums, offsets, out
    )
    _run(control, n_jobs)


_NO_SCALES, _NO_SUMS = np.empty(0, np.float32), np.empty(0, np.int32)


def gather_rows(weights, ids, out):
    """out[i] = row ids[i] of the weights as float32 [n_cols]."""
    _gather_rows(weights.kind, weights.data, weights.group_bytes, weights.n_cols, ids, out)


# --- elementwise and row operations -------------------------------------------------------------------------------


@njit
def _square_sum(x, at, n):
    total = simd.splat(np.float32(0))
    for k in range(0, n - n % ROWS, ROWS):
        value = simd.load(x, at + k)
        total = simd.fma(value, value, total)
    rest = np.float32(0)
    flat = x.ravel()
    for k in range(n - n % ROWS, n):
        rest += flat[at + k] * flat[at + k]
    return simd.sum_lanes(total) + rest


@njit
def _inverse_rms(x, at, n, eps):
    return np.float32(1) / np.sqrt(_square_sum(x, at, n) / np.float32(n) + eps)


@njit
def rms_norm(x, weight, eps, out):
    """out[r] = x[r] / sqrt(mean(x[r]**2) + eps) * weight[r mod C]; x, out float32 [R, N], weight [C, N]."""
    n = x.shape[1]
    for row in range(x.shape[0]):
        scale = _inverse_rms(x, row * n, n, eps)
        w = row % weight.shape[0]
        for k in range(n):
            out[row, k] = x[row, k] * scale * weight[w, k]


@njit
def silu_mul(gate, up, out):
    """out = gate * sigmoid(gate) * up; float32 [T, N], N a multiple of 16."""
    for k in range(0, gate.size, ROWS):
        g = simd.load(gate, k)
        simd.store(out, k, simd.mul(simd.mul(g, simd.sigmoid(g)), simd.load(up, k)))


@njit
def sigmoid_mul(gate, x):
    """x *= sigmoid(gate) in place; float32 [T, N], N a multiple of 16."""
    for k in range(0, x.size, ROWS):
        simd.store(x, k, simd.mul(simd.load(x, k), simd.sigmoid(simd.load(gate, k))))


@njit
def silu_scaled(x, scale):
    """x = silu(x * scale) in place; float32 [T, N], N a multiple of 16."""
    for k in range(0, x.size, ROWS):
        value = simd.mul(simd.load(x, k), simd.splat(scale))
        simd.store(x, k, simd.mul(value, simd.sigmoid(value)))


@njit
def add_rows(x, y):
    """x += y; float32 of one shape."""
    flat, other = x.ravel(), y.ravel()
    for k in range(len(flat)):
        flat[k] += other[k]


@njit
def add_scaled_rows(x, scale, y):
    """x[t] += sigmoid(scale[t, 0]) * y[t]; the shared expert's gate."""
    for t in range(x.shape[0]):
        gate = np.float32(1) / (np.float32(1) + np.exp(-scale[t, 0]))
        for k in range(x.shape[1]):
            x[t, k] += gate * y[t, k]


@njit
def add_bias(x, bias):
    """x[t] += bias; x float32 [T, N], bias [N]."""
    for t in range(x.shape[0]):
        for k in range(x.shape[1]):
            x[t, k] += bias[k]


@njit
def split_gate(both, q, gate):
    """Each head's first half to q, its second to gate; both float32 [T, H, 2 D], q and gate [T, H, D]."""
    width = q.shape[2]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            for k in range(width):
                q[t, h, k] = both[t, h, k]
                gate[t, h, k] = both[t, h, width + k]


@njit
def rope_table(positions, inverse_frequency, cos, sin):
    """cos, sin (float32 [T, n_rot / 2]) of position * frequency, taken in float64; positions int64 [T]."""
    for t in range(len(positions)):
        for k in range(len(inverse_frequency)):
            angle = positions[t] * inverse_frequency[k]
            cos[t, k] = np.cos(angle)
            sin[t, k] = np.sin(angle)


@njit
def _rotate(x, cos, sin, paired):
    half = len(cos)
    for k in range(half):
        i, j = (2 * k, 2 * k + 1) if paired else (k, k + half)
        a, b = x[i], x[j]
        x[i] = a * cos[k] - b * sin[k]
        x[j] = b * cos[k] + a * sin[k]


@njit
def norm_rope_heads(x, weight, eps, cos, sin, paired):
    """RMS norm (weight float32 [1, D], or [0, D] for none) and rotation of each head's first dimensions, in place.

    x float32 [T, heads, D]; cos, sin [T, n_rot / 2]; `paired` rotates (2k, 2k + 1) instead of (k, k + n_rot / 2).
    """
    n_heads, width = x.shape[1], x.shape[2]
    for t in range(x.shape[0]):
        for h in range(n_heads):
            if len(weight):
                scale = _inverse_rms(x, (t * n_heads + h) * width, width, eps)
                for k in range(width):
                    x[t, h, k] = x[t, h, k] * scale * weight[0, k]
            _rotate(x[t, h], cos[t], sin[t], paired)


@njit
def hadamard_heads(x):
    """Orthonormal Walsh-Hadamard transform of every head in place; x float32 [T, heads, D], D a power of two."""
    width = x.shape[2]
    scale = np.float32(1 / np.sqrt(np.float64(width)))
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            row = x[t, h]
            span = 1
            while span < width:
                for start in range(0, width, 2 * span):
                    for k in range(start, start + span):
                        a, b = row[k], row[k + span]
                        row[k] = a + b
                        row[k + span] = a - b
                span *= 2
            for k in range(width):
                row[k] *= scale


# --- K/V cells ----------------------------------------------------------------------------------------------------

PAGE = 4  # cells of a page
CELL_F16, CELL_INT8, CELL_Q4_0, CELL_F32 = range(4)  # storage of one head's K or V in a cell
SCALE_GROUP = 64  # values that share an int8 scale


@njit
def _quantize_int8(x, codes, scales):
    for group in range(len(x) // SCALE_GROUP):
        values = x[group * SCALE_GROUP : (group + 1) * SCALE_GROUP]
        largest = np.float32(0)
        for value in values:
            largest = max(largest, abs(value))
        half = simd.float_to_half(largest / np.float32(127))
        scales[2 * group] = half & 0xFF
        scales[2 * group + 1] = half >> 8
        scale = simd.half_to_float(half)
        for k in range(SCALE_GROUP):
            code = np.rint(values[k] / scale) if scale > 0 else np.float32(0)
            codes[group * SCALE_GROUP + k] = np.uint8(np.int8(min(max(code, np.float32(-127)), np.float32(127))))


@njit
def _quantize_q4_0(x, out):
    for block in range(len(x) // 32):
        values = x[block * 32 : block * 32 + 32]
        peak = np.float32(0)
        for value in values:
            if abs(value) > abs(peak):
                peak = value
        d = peak / np.float32(-8)
        inverse = np.float32(1) / d if d != 0 else np.float32(0)
        half = simd.float_to_half(d)
        at = block * 18
        out[at] = half & 0xFF
        out[at + 1] = half >> 8
        for k in range(16):
            low = min(15, np.int32(values[k] * inverse + np.float32(8.5)))
            high = min(15, np.int32(values[k + 16] * inverse + np.float32(8.5)))
            out[at + 2 + k] = low | high << 4


@njit
def _store_cell(storage, x, codes, scales):
    if storage == CELL_F16:
        for k in range(len(x)):
            half = simd.float_to_half(x[k])
            codes[2 * k] = half & 0xFF
            codes[2 * k + 1] = half >> 8
    elif storage == CELL_F32:
        codes[:] = x.view(np.uint8)
    elif storage == CELL_INT8:
        _quantize_int8(x, codes, scales)
    else:
        _quantize_q4_0(x, codes)


@njit
def append_cells(storage, x, first_cell, codes, scales):
    """Store x float32 [T, heads, D] in cells first_cell.. of one pool.

    codes uint8 [pages, heads, PAGE, bytes], scales uint8 [pages, heads, PAGE, 2 D / 64] (width 0 where the storage
    has no scales).
    """
    for t in range(x.shape[0]):
        page, slot = (first_cell + t) // PAGE, (first_cell + t) % PAGE
        for h in range(x.shape[1]):
            _store_cell(storage, x[t, h], codes[page, h, slot], scales[page, h, slot])


@njit
def _load_cell(storage, codes, at, scales, scales_at, width, out, out_at):
    """Widen one head's cell to float32; `at` and `scales_at` are byte offsets in the whole pools."""
    if storage == CELL_F16:
        for k in range(0, width, ROWS):
            simd.store(out, out_at + k, simd.load_f16(codes, at + 2 * k))
    elif storage == CELL_F32:
        for k in range(0, width, ROWS):
            simd.store(out, out_at + k, simd.load_f32(codes, at + 4 * k))
    elif storage == CELL_INT8:
        flat = scales.ravel()
        for k in range(0, width, ROWS):
            s = scales_at + 2 * (k // SCALE_GROUP)
            scale = simd.half_to_float(np.uint16(flat[s]) | np.uint16(flat[s + 1]) << np.uint16(8))
            simd.store(out, out_at + k, simd.mul(simd.load_i8(codes, at + k), simd.splat(scale)))
    else:
        flat = codes.ravel()
        for block in range(width // 32):
            b = at + block * 18
            scale = simd.half_to_float(np.uint16(flat[b]) | np.uint16(flat[b + 1]) << np.uint16(8))
            for k in range(16):
                byte = np.int32(flat[b + 2 + k])
                out[out_at + block * 32 + k] = scale * np.float32((byte & 15) - 8)
                out[out_at + block * 32 + k + 16] = scale * np.float32((byte >> 4) - 8)


# --- attention ----------------------------------------------------------------------------------------------------

SEGMENT = 64  # pages whose softmax is taken together; partial results are merged in the order of the segments
TOKENS = 8  # tokens of a prompt that share one widening of a page
_EMPTY = np.float32(-3.0e38)


@njit
def _dot(a, a_at, b, b_at, n):
    total = simd.splat(np.float32(0))
    for k in range(0, n, ROWS):
        total = simd.fma(simd.load(a, a_at + k), simd.load(b, b_at + k), total)
    return simd.sum_lanes(total)


@njit
def _visible_cells(pages, first, last, position):
    """How many cells of the pages first..last-1 a token at `position` sees; they are the first ones (may be <= 0)."""
    if len(pages):
        return (last - 1 - first) * PAGE + min(PAGE, position + 1 - pages[last - 1] * PAGE)
    return min((last - first) * PAGE, position + 1 - first * PAGE)


@njit
def _softmax_segment(scores, at, n):
    """Turn `n` scores into e ** (score - max); returns (max, sum). The row has room for a multiple of 16."""
    padded = (n + ROWS - 1) // ROWS * ROWS
    scores[at + n : at + padded] = _EMPTY
    top = simd.splat(_EMPTY)
    for k in range(0, padded, ROWS):
        top = simd.maximum(top, simd.load(scores, at + k))
    peak = simd.max_lanes(top)
    for k in range(0, padded, ROWS):
        simd.store(scores, at + k, simd.exp(simd.sub(simd.load(scores, at + k), simd.splat(peak))))
    scores[at + n : at + padded] = np.float32(0)
    total = simd.splat(np.float32(0))
    for k in range(0, padded, ROWS):
        total = simd.add(total, simd.load(scores, at + k))
    return peak, simd.sum_lanes(total)


@njit
def _merge(peak, total, partial, part_at, peaks, sums, out, out_at, width):
    """Fold one segment's (peak, total, weighted V) into the running ones at index `part_at`."""
    if sums[part_at] == np.float32(0):
        keep, fresh = np.float32(0), np.float32(1)
        peaks[part_at] = peak
    else:
        top = max(peaks[part_at], peak)
        keep, fresh = np.exp(peaks[part_at] - top), np.exp(peak - top)
        peaks[part_at] = top
    sums[part_at] = sums[part_at] * keep + total * fresh
    for k in range(0, width, ROWS):
        value = simd.mul(simd.load(out, out_at + k), simd.splat(keep))
        simd.store(out, out_at + k, simd.fma(simd.load(partial, part_at * width + k), simd.splat(fresh), value))


@njit
def _segment_scores(storage, k_codes, k_scales, pages, first, last, head, q, token, n_tokens, group, position, scale,
                    scores, cell):
    """scores[(token, query head)][cell of the segment] for the pages first..last-1 of a page list, where visible."""
    width, n_kv, row = q.shape[2], k_codes.shape[1], k_codes.shape[3]
    for p in range(first, last):
        page = pages[p] if len(pages) else p
        for slot in range(PAGE):
            index = page * PAGE + slot
            if index > position + n_tokens - 1:
                continue
            at = (page * n_kv + head) * PAGE + slot
            _load_cell(storage, k_codes, at * row, k_scales, at * k_scales.shape[3], width, cell, 0)
            for t in range(max(0, index - position), n_tokens):
                for g in range(group):
                    q_at = ((token + t) * q.shape[1] + head * group + g) * width
                    value = _dot(q, q_at, cell, 0, width) * scale
                    scores[(t * group + g) * SEGMENT * PAGE + (p - first) * PAGE + slot] = value


@njit
def _segment_values(storage, v_codes, v_scales, pages, first, last, head, n_tokens, group, position, scores, cell,
                    partial, width):
    """partial[(token, query head)] = sum of weight * V over the cells of the segment, in the order of the cells."""
    n_kv, row = v_codes.shape[1], v_codes.shape[3]
    partial[: n_tokens * group * width] = np.float32(0)
    for p in range(first, last):
        page = pages[p] if len(pages) else p
        for slot in range(PAGE):
            index = page * PAGE + slot
            at = (page * n_kv + head) * PAGE + slot
            if index > position + n_tokens - 1:
                continue
            _load_cell(storage, v_codes, at * row, v_scales, at * v_scales.shape[3], width, cell, 0)
            for t in range(max(0, index - position), n_tokens):
                for g in range(group):
                    i = t * group + g
                    weight = simd.splat(scores[i * SEGMENT * PAGE + (p - first) * PAGE + slot])
                    for k in range(0, width, ROWS):
                        a = i * width + k
                        simd.store(partial, a, simd.fma(simd.load(cell, k), weight, simd.load(partial, a)))


@njit
def _attend_segment(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, pages, first, last, head, q, token,
                    n_tokens, group, position, scale, scores, cell, partial, peaks, sums):
    width = q.shape[2]
    _segment_scores(k_storage, k_codes, k_scales, pages, first, last, head, q, token, n_tokens, group, position, scale,
                    scores, cell)
    for i in range(n_tokens * group):
        n = _visible_cells(pages, first, last, position + i // group)
        sums[i] = np.float32(0)
        if n > 0:
            peaks[i], sums[i] = _softmax_segment(scores, i * SEGMENT * PAGE, n)
    _segment_values(v_storage, v_codes, v_scales, pages, first, last, head, n_tokens, group, position, scores, cell,
                    partial, width)


@njit
def _attend_tile(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, pages, n_pages, head, q, token, n_tokens,
                 position, scale, out):
    """All segments, one after the other, for up to TOKENS tokens and the query heads of one K/V head."""
    width, group = q.shape[2], q.shape[1] // k_codes.shape[1]
    n = n_tokens * group
    scores = np.empty(n * SEGMENT * PAGE, np.float32)
    cell, partial = np.empty(width, np.float32), np.empty(n * width, np.float32)
    peaks, sums = np.empty(n, np.float32), np.empty(n, np.float32)
    top, total = np.zeros(n, np.float32), np.zeros(n, np.float32)
    result = np.zeros(n * width, np.float32)
    for first in range(0, n_pages, SEGMENT):
        _attend_segment(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, pages, first,
                        min(first + SEGMENT, n_pages), head, q, token, n_tokens, group, position, scale, scores, cell,
                        partial, peaks, sums)
        for i in range(n):
            if sums[i] > np.float32(0):
                _merge(peaks[i], sums[i], partial, i, top, total, result, i * width, width)
    for i in range(n):
        row = out[token + i // group, head * group + i % group]
        for k in range(width):
            row[k] = result[i * width + k] / total[i]


def attention(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out, team=None):
    """Causal attention of T tokens at cells position..position+T-1 over every cell up to their own.

    q, out float32 [T, H, D]; pools as in `append_cells`, K heads shared by H / K query heads in order. The softmax is
    taken per segment of 64 pages and merged in order, so neither T nor the number of threads changes a bit.
    """
    pools, pages = (k_codes, k_scales, v_codes, v_scales), (position + PAGE) // PAGE
    _attend(team, (k_storage, v_storage, *pools, q, position, scale, out), _NO_BLOCKS, _NO_COUNTS, pages)


def attention_selected(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, blocks, counts,
                       out, team=None):
    """`attention` over chosen pages only: token t reads pages blocks[t, :counts[t]] (ascending, its own page last)."""
    pools = k_codes, k_scales, v_codes, v_scales
    _attend(team, (k_storage, v_storage, *pools, q, position, scale, out), blocks, counts, int(counts[0]))


_NO_BLOCKS, _NO_COUNTS = np.empty((0, 1), np.int32), np.empty(0, np.int64)


def _attend(team, arguments, blocks, counts, n_pages):
    """One token is cut by segments, several are cut by tiles of tokens; both give the same sums."""
    control, q, out, n_kv = _awake(team), arguments[6], arguments[9], arguments[2].shape[1]
    if len(q) == 1:
        n_jobs = -(-n_pages // SEGMENT) * n_kv
        partial, peaks_sums = _put_segments(control, *arguments, blocks, n_pages, n_jobs)
        _run(control, n_jobs)
        _merge_segments(partial, peaks_sums, n_kv, out)
        return
    per_tile = 1 if len(blocks) else TOKENS
    _put_tiles(control, *arguments, blocks, counts, per_tile)
    _run(control, -(-len(q) // per_tile) * n_kv)


@njit
def _put_pools(control, operation, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out):
    """The arguments that every attention job needs; the next free one is number 19."""
    _put(control, operation, (
        np.int64(k_storage), np.int64(v_storage), np.int64(k_codes.ctypes.data), np.int64(k_scales.ctypes.data),
        np.int64(v_codes.ctypes.data), np.int64(v_scales.ctypes.data), np.int64(q.ctypes.data), np.int64(position),
        np.int64(out.ctypes.data), np.int64(k_codes.shape[0]), np.int64(k_codes.shape[1]), np.int64(k_codes.shape[3]),
        np.int64(k_scales.shape[3]), np.int64(v_codes.shape[3]), np.int64(v_scales.shape[3]), np.int64(q.shape[0]),
        np.int64(q.shape[1]), np.int64(q.shape[2]),
    ))
    control.view(np.float64)[ARGUMENTS + 18] = scale


@njit
def _put_tiles(control, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out, blocks,
               counts, per_tile):
    _put_pools(control, _TILES, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out)
    control[ARGUMENTS + 19] = per_tile
    control[ARGUMENTS + 20] = blocks.shape[1]
    control[ARGUMENTS + 21] = len(blocks)
    control[ARGUMENTS + 22] = np.int64(blocks.ctypes.data)
    control[ARGUMENTS + 23] = np.int64(counts.ctypes.data)


@njit
def _put_segments(control, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out, blocks,
                  n_pages, n_jobs):
    """Arguments of one token's segments, and room for what each leaves: weighted V, peaks and sums."""
    group = q.shape[1] // k_codes.shape[1]
    partial = np.empty((n_jobs, group * q.shape[2]), np.float32)
    peaks_sums = np.empty((2, n_jobs, group), np.float32)
    _put_pools(control, _SEGMENTS, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out)
    control[ARGUMENTS + 19] = n_pages
    control[ARGUMENTS + 20] = n_pages if len(blocks) else 0
    control[ARGUMENTS + 21] = n_jobs
    control[ARGUMENTS + 22] = np.int64(blocks.ctypes.data)
    control[ARGUMENTS + 23] = np.int64(partial.ctypes.data)
    control[ARGUMENTS + 24] = np.int64(peaks_sums.ctypes.data)
    return partial, peaks_sums


@njit
def _pools(c):
    """The four pools, q and out of `_put_pools`."""
    pages, n_kv = c[9], c[10]
    return (
        carray(pointer_to(c[2]), (pages, n_kv, PAGE, c[11]), np.uint8),
        carray(pointer_to(c[3]), (pages, n_kv, PAGE, c[12]), np.uint8),
        carray(pointer_to(c[4]), (pages, n_kv, PAGE, c[13]), np.uint8),
        carray(pointer_to(c[5]), (pages, n_kv, PAGE, c[14]), np.uint8),
        carray(pointer_to(c[6]), (c[15], c[16], c[17]), np.float32),
        carray(pointer_to(c[8]), (c[15], c[16], c[17]), np.float32),
    )


@njit
def _tile_job(control, job):
    """A tile of tokens with the query heads of one K/V head; with a page list a tile is one token."""
    c = control[ARGUMENTS : ARGUMENTS + 24]
    scale = np.float32(control.view(np.float64)[ARGUMENTS + 18])
    k_codes, k_scales, v_codes, v_scales, q, out = _pools(c)
    n_kv, per_tile, n_lists = c[10], c[19], c[21]
    token = job // n_kv * per_tile
    n_tokens, position = min(per_tile, q.shape[0] - token), c[7] + token
    pages, n_pages = carray(pointer_to(c[22]), (0,), np.int32), (position + n_tokens - 1 + PAGE) // PAGE
    if n_lists:
        n_pages = carray(pointer_to(c[23]), (n_lists,), np.int64)[token]
        pages = carray(pointer_to(c[22] + 4 * token * c[20]), (n_pages,), np.int32)
    _attend_tile(c[0], c[1], k_codes, k_scales, v_codes, v_scales, pages, n_pages, job % n_kv, q, token, n_tokens,
                 position, scale, out)


@njit
def _segment_job(control, job):
    """Segment job // K of K/V head job mod K for one token."""
    c = control[ARGUMENTS : ARGUMENTS + 25]
    scale = np.float32(control.view(np.float64)[ARGUMENTS + 18])
    k_codes, k_scales, v_codes, v_scales, q, _ = _pools(c)
    n_kv, n_pages, n_listed, n_jobs = c[10], c[19], c[20], c[21]
    group, first = q.shape[1] // n_kv, job // n_kv * SEGMENT
    pages = carray(pointer_to(c[22]), (n_listed,), np.int32)
    partial = carray(pointer_to(c[23]), (n_jobs, group * q.shape[2]), np.float32)
    peaks_sums = carray(pointer_to(c[24]), (2, n_jobs, group), np.float32)
    scores, cell = np.empty(group * SEGMENT * PAGE, np.float32), np.empty(q.shape[2], np.float32)
    _attend_segment(c[0], c[1], k_codes, k_scales, v_codes, v_scales, pages, first, min(first + SEGMENT, n_pages),
                    job % n_kv, q, 0, 1, group, c[7], scale, scores, cell, partial[job], peaks_sums[0, job],
                    peaks_sums[1, job])


@njit
def _merge_segments(partial, peaks_sums, n_kv, out):
    """Merge one token's segments in their order: the sums of `_attend_tile`."""
    group, width = peaks_sums.shape[2], out.shape[2]
    top, total, result = np.zeros(group, np.float32), np.zeros(group, np.float32), np.empty(group * width, np.float32)
    for head in range(n_kv):
        total[:] = np.float32(0)
        result[:] = np.float32(0)
        for job in range(head, len(partial), n_kv):
            for g in range(group):
                peak, part = peaks_sums[0, job, g], peaks_sums[1, job, g]
                if part > np.float32(0):
                    _merge(peak, part, partial[job], g, top, total, result, g * width, width)
        for g in range(group):
            for k in range(width):
                out[0, head * group + g, k] = result[g * width + k] / total[g]


# --- the block indexer --------------------------------------------------------------------------------------------


@njit
def pool_keys(raw, first_cell, tail, dead, weight, eps, inverse_frequency, pooled):
    """Fold raw index keys of cells first_cell.. into pooled block keys; mutates tail, dead and pooled.

    raw float32 [T, D]; tail [3, D] holds the raw keys of the open block; a block that becomes complete gets
    pooled[block] = rope(rms(mean of its four keys), position of its first cell); dead [D] = rms(raw key of cell 0).
    """
    width = raw.shape[1]
    half = len(inverse_frequency)
    mean = np.empty((1, width), np.float32)
    normed = np.empty((1, width), np.float32)
    cos, sin = np.empty((1, half), np.float32), np.empty((1, half), np.float32)
    position = np.empty(1, np.int64)
    for t in range(raw.shape[0]):
        cell = first_cell + t
        slot, block = cell % PAGE, cell // PAGE
        if cell == 0:
            scale = _inverse_rms(raw, t * width, width, eps)
            for k in range(width):
                dead[k] = raw[t, k] * scale * weight[0, k]
        if slot < PAGE - 1:
            tail[slot] = raw[t]
            continue
        for k in range(width):
            mean[0, k] = (tail[0, k] + tail[1, k] + tail[2, k] + raw[t, k]) * np.float32(0.25)
        scale = _inverse_rms(mean, 0, width, eps)
        for k in range(width):
            normed[0, k] = mean[0, k] * scale * weight[0, k]
        position[0] = block * PAGE
        rope_table(position, inverse_frequency, cos, sin)
        _rotate(normed[0], cos[0], sin[0], False)
        pooled[block] = normed[0]


@njit
def _nth_largest(scores, n, rank):
    """The score of rank `rank` (1 the largest) among scores[:n], none negative, byte by byte of its bit pattern."""
    bits, prefix, known = scores.view(np.uint32), np.uint32(0), np.uint32(0)
    counts = np.empty(256, np.int64)
    for shift in (24, 16, 8, 0):
        counts[:] = 0
        for i in range(n):
            if bits[i] & known == prefix:
                counts[bits[i] >> np.uint32(shift) & np.uint32(255)] += 1
        byte = 255
        while counts[byte] < rank:
            rank -= counts[byte]
            byte -= 1
        prefix |= np.uint32(byte) << np.uint32(shift)
        known |= np.uint32(255) << np.uint32(shift)
    return prefix


@njit
def _select(scores, n, keep, out):
    """The `keep` largest of scores[:n] as ascending indices, equal scores by the lowest index."""
    bits, limit = scores.view(np.uint32), _nth_largest(scores, n, keep)
    above = 0
    for b in range(n):
        above += bits[b] > limit
    ties, m = keep - above, 0
    for b in range(n):
        if bits[b] > limit:
            out[m] = b
            m += 1
        elif bits[b] == limit and ties > 0:
            out[m] = b
            m += 1
            ties -= 1
    return m


def select_blocks(queries, pooled, position, keep, blocks, counts, team=None):
    """For token t the `keep` complete blocks of highest score, ascending, and the open block behind them.

    queries float32 [T, heads, D] (normed, rotated), pooled float32 [rows, D]; score = sum over heads of
    relu(query . pooled). blocks int32 [T, keep + 1], counts int64 [T].
    """
    control = _awake(team)
    _put_select(control, queries, pooled, position, keep, blocks, counts)
    _run(control, len(queries))


@njit
def _put_select(control, queries, pooled, position, keep, blocks, counts):
    _put(control, _SELECT, (
        np.int64(queries.ctypes.data), np.int64(pooled.ctypes.data), np.int64(position), np.int64(keep),
        np.int64(blocks.ctypes.data), np.int64(counts.ctypes.data), np.int64(queries.shape[0]),
        np.int64(queries.shape[1]), np.int64(queries.shape[2]), np.int64(pooled.shape[0]),
    ))


@njit
def _select_job(control, t):
    """The blocks of token t."""
    c = control[ARGUMENTS : ARGUMENTS + 10]
    position, keep, n_heads, width = c[2], c[3], c[7], c[8]
    queries = carray(pointer_to(c[0]), (c[6], n_heads, width), np.float32)
    pooled = carray(pointer_to(c[1]), (c[9], width), np.float32)
    blocks, counts = carray(pointer_to(c[4]), (c[6], keep + 1), np.int32), carray(pointer_to(c[5]), (c[6],), np.int64)
    complete = (position + t + 1) // PAGE
    m = min(complete, keep)
    if complete <= keep:
        for b in range(complete):
            blocks[t, b] = b
    else:
        scores = np.empty(complete, np.float32)
        for b in range(complete):
            total = np.float32(0)
            for h in range(n_heads):
                total += max(np.float32(0), _dot(queries, (t * n_heads + h) * width, pooled, b * width, width))
            scores[b] = total
        m = _select(scores, complete, keep, blocks[t])
    if (position + t + 1) % PAGE:
        blocks[t, m] = complete
        m += 1
    counts[t] = m


# --- gated delta net ----------------------------------------------------------------------------------------------


@njit
def conv_silu(x, history, weight, out):
    """Causal depthwise convolution over time, then SiLU; the last rows of x become the history.

    x, out float32 [T, channels]; history [K - 1, channels], oldest first, mutated; weight [K, channels], the current
    row's tap last.
    """
    n_taps = weight.shape[0]
    for t in range(x.shape[0]):
        for c in range(x.shape[1]):
            total = x[t, c] * weight[n_taps - 1, c]
            for tap in range(n_taps - 1):
                total += history[tap, c] * weight[tap, c]
            out[t, c] = total / (np.float32(1) + np.exp(-total))
        for tap in range(n_taps - 2):
            history[tap] = history[tap + 1]
        history[n_taps - 2] = x[t]


@njit
def _l2_normalise(x, extra, out):
    total = np.float32(0)
    for value in x:
        total += value * value
    scale = np.float32(1) / np.sqrt(total + np.float32(1e-6)) * extra
    for k in range(len(x)):
        out[k] = x[k] * scale


@njit
def _delta_step(state, decay, beta, q, k, v, delta, out):
    """One token of one head: decay, then the delta update, then the read (state float32 [S_key, S_value])."""
    delta[:] = np.float32(0)
    out[:] = np.float32(0)
    for i in range(state.shape[0]):
        key = k[i]
        for j in range(state.shape[1]):
            value = state[i, j] * decay
            state[i, j] = value
            delta[j] += value * key
    for j in range(state.shape[1]):
        delta[j] = beta * (v[j] - delta[j])
    for i in range(state.shape[0]):
        key, query = k[i], q[i]
        for j in range(state.shape[1]):
            value = state[i, j] + key * delta[j]
            state[i, j] = value
            out[j] += value * query


def delta_net(mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out, team=None):
    """The gated delta rule, token by token; mutates state float32 [Hv, S, S].

    mixed float32 [T, 2 Hk S + Hv S] (q, k, v after the convolution), alpha, beta [T, Hv], a = -e ** A_log and dt_bias
    [Hv], out [T, Hv, S]. Value head v reads key head v // (Hv / Hk) where `grouped`, else v mod Hk.
    """
    control = _awake(team)
    _put_delta(control, mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out)
    _run(control, len(state))


@njit
def _put_delta(control, mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out):
    _put(control, _DELTA, (
        np.int64(mixed.ctypes.data), np.int64(alpha.ctypes.data), np.int64(beta.ctypes.data), np.int64(a.ctypes.data),
        np.int64(dt_bias.ctypes.data), np.int64(state.ctypes.data), np.int64(out.ctypes.data), np.int64(n_key_heads),
        np.int64(grouped), np.int64(mixed.shape[0]), np.int64(mixed.shape[1]), np.int64(state.shape[0]),
        np.int64(state.shape[1]),
    ))


@njit
def _delta_job(control, head):
    """All tokens of one value head."""
    c = control[ARGUMENTS : ARGUMENTS + 13]
    n_key_heads, grouped, n_tokens, n_heads, size = c[7], c[8], c[9], c[11], c[12]
    mixed = carray(pointer_to(c[0]), (n_tokens, c[10]), np.float32)
    alpha = carray(pointer_to(c[1]), (n_tokens, n_heads), np.float32)
    beta = carray(pointer_to(c[2]), (n_tokens, n_heads), np.float32)
    a, dt_bias = carray(pointer_to(c[3]), (n_heads,), np.float32), carray(pointer_to(c[4]), (n_heads,), np.float32)
    state = carray(pointer_to(c[5]), (n_heads, size, size), np.float32)
    out = carray(pointer_to(c[6]), (n_tokens, n_heads, size), np.float32)
    q, k, delta = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    key_head = head // (n_heads // n_key_heads) if grouped else head % n_key_heads
    for t in range(n_tokens):
        at = key_head * size
        _l2_normalise(mixed[t, at : at + size], np.float32(1 / np.sqrt(np.float64(size))), q)
        at += n_key_heads * size
        _l2_normalise(mixed[t, at : at + size], np.float32(1), k)
        at = 2 * n_key_heads * size + head * size
        x = alpha[t, head] + dt_bias[head]
        softplus = x if x > np.float32(20) else np.log1p(np.exp(x))
        decay = np.exp(a[head] * softplus)
        gate = np.float32(1) / (np.float32(1) + np.exp(-beta[t, head]))
        _delta_step(state[head], decay, gate, q, k, mixed[t, at : at + size], delta, out[t, head])


@njit
def norm_gate_heads(x, weight, eps, z, silu):
    """x = rms(x per head) * weight * gate(z), in place; gate is silu or sigmoid; x [T, Hv, S], z [T, Hv * S]."""
    n_heads, width = x.shape[1], x.shape[2]
    for t in range(x.shape[0]):
        for h in range(n_heads):
            scale = _inverse_rms(x, (t * n_heads + h) * width, width, eps)
            for k in range(width):
                gate = z[t, h * width + k]
                factor = np.float32(1) / (np.float32(1) + np.exp(-gate))
                if silu:
                    factor *= gate
                x[t, h, k] = x[t, h, k] * scale * weight[0, k] * factor


# --- hyper-connections --------------------------------------------------------------------------------------------


@njit
def mix_streams(gates, normed, out):
    """out[t] = mean over streams of sigmoid(gates) * normed; gates, normed float32 [T, C * N], out [T, N]."""
    n = out.shape[1]
    n_streams = gates.shape[1] // n
    for t in range(out.shape[0]):
        for k in range(n):
            total = np.float32(0)
            for c in range(n_streams):
                gate = np.float32(1) / (np.float32(1) + np.exp(-gates[t, c * n + k]))
                total += gate * normed[t, c * n + k]
            out[t, k] = total / np.float32(n_streams)


@njit
def inject_streams(residual, inject, y):
    """residual[t, c] += 2 sigmoid(inject[t, c] / C) * y[t]; residual float32 [T, C, N]."""
    n_streams = residual.shape[1]
    for t in range(residual.shape[0]):
        for c in range(n_streams):
            gate = np.float32(2) / (np.float32(1) + np.exp(-inject[t, c] / np.float32(n_streams)))
            for k in range(residual.shape[2]):
                residual[t, c, k] += gate * y[t, k]


@njit
def repeat_streams(x, residual):
    """residual[t, c] = x[t] for every stream; x float32 [T, N], residual [T, C, N]."""
    for t in range(residual.shape[0]):
        for c in range(residual.shape[1]):
            residual[t, c] = x[t]


@njit
def add_to_streams(residual, y):
    """residual[t, c] += y[t] for every stream; y float32 [T, N], or [1, N] for every token the same."""
    for t in range(residual.shape[0]):
        row = t if y.shape[0] > 1 else 0
        for c in range(residual.shape[1]):
            for k in range(residual.shape[2]):
                residual[t, c, k] += y[row, k]


# --- experts ------------------------------------------------------------------------------------------------------


@njit
def route(logits, weights, experts):
    """Softmax over all experts, the largest (ties to the lowest index), renormalised.

    logits float32 [T, E], mutated; weights float32 [T, k], experts int32 [T, k], both in falling order of weight.
    """
    for t in range(logits.shape[0]):
        row = logits[t]
        peak = row.max()
        for e in range(len(row)):
            row[e] = np.exp(row[e] - peak)
        chosen = np.float32(0)
        for rank in range(weights.shape[1]):
            best = 0
            for e in range(1, len(row)):
                if row[e] > row[best]:
                    best = e
            experts[t, rank] = best
            weights[t, rank] = row[best]
            chosen += row[best]
            row[best] = np.float32(-1)
        for rank in range(weights.shape[1]):
            weights[t, rank] /= chosen


@njit
def order_by_expert(experts, n_experts, order, offsets):
    """Stable order of the T * k assignments by expert: order int64 [T * k], offsets int64 [E + 1]."""
    flat = experts.ravel()
    offsets[:] = 0
    for e in flat:
        offsets[e + 1] += 1
    for e in range(n_experts):
        offsets[e + 1] += offsets[e]
    place = offsets.copy()
    for i in range(len(flat)):
        order[place[flat[i]]] = i
        place[flat[i]] += 1


@njit
def gather_assigned(x, order, rows):
    """rows[i] = the token of assignment order[i]; x float32 [T, N], order int64 [T * k], rows [T * k, N]."""
    n_used = rows.shape[0] // x.shape[0]
    for i in range(rows.shape[0]):
        rows[i] = x[order[i] // n_used]


@njit
def combine_experts(y, order, weights, out):
    """out[t] = sum over ranks, in their order, of weights[t, rank] * y[row of (t, rank)]."""
    n_used = weights.shape[1]
    row_of = np.empty(len(order), np.int64)
    for row in range(len(order)):
        row_of[order[row]] = row
    for t in range(out.shape[0]):
        out[t] = np.float32(0)
        for rank in range(n_used):
            row, weight = row_of[t * n_used + rank], weights[t, rank]
            for k in range(out.shape[1]):
                out[t, k] += weight * y[row, k]


# --- n-gram embeddings --------------------------------------------------------------------------------------------


@njit
def ngram_rows(ids, previous, eos, multipliers, vocab_sizes, head_offsets, rows):
    """Table rows of every token's n-grams: rows int64 [T, heads]; `previous` int64 [n - 1], newest first, -1 missing.

    Order n of the n-grams runs from 2 to len(multipliers), heads in equal shares; a missing predecessor or an
    end-of-text token turns itself and everything older into end-of-text.
    """
    n_orders = len(multipliers) - 1
    per_order = rows.shape[1] // n_orders
    context = np.empty(n_orders + 1, np.int64)
    for t in range(len(ids)):
        context[0] = ids[t]
        cut = False
        for back in range(1, n_orders + 1):
            token = np.int64(ids[t - back]) if t >= back else previous[back - t - 1]
            cut = cut or token < 0 or token == eos
            context[back] = eos if cut else token
        mixed = context[0] * multipliers[0]
        for order in range(1, n_orders + 1):
            mixed ^= context[order] * multipliers[order]
            for h in range((order - 1) * per_order, order * per_order):
                rows[t, h] = mixed % vocab_sizes[h] + head_offsets[h]


@njit
def ngram_gate(key, query, value, out):
    """out[t, c] = g * value[t], g = sigmoid(sign(s) sqrt(max(|s|, 1e-6))), s = key . query / sqrt(N) per stream.

    key, query, out float32 [T, C, N], value [T, N].
    """
    width = key.shape[2]
    for t in range(key.shape[0]):
        for c in range(key.shape[1]):
            at = (t * key.shape[1] + c) * width
            s = _dot(key, at, query, at, width) / np.sqrt(np.float32(width))
            root = np.sqrt(max(abs(s), np.float32(1e-6)))
            signed = root if s > 0 else -root
            if s == 0:
                signed = np.float32(0)
            gate = np.float32(1) / (np.float32(1) + np.exp(-signed))
            for k in range(width):
                out[t, c, k] = gate * value[t, k]


@njit
def ngram_conv(normed, history, weight, dilation, gated, residual):
    """residual += gated + silu(conv(normed)): taps at t, t - dilation, ...; the last rows become the history.

    normed, gated, residual float32 [T, C * N]; history [(K - 1) * dilation, C * N], oldest first, mutated; weight
    [K, C * N], the current row's tap last.
    """
    n_taps, n_history = weight.shape[0], history.shape[0]
    for t in range(normed.shape[0]):
        for k in range(normed.shape[1]):
            total = normed[t, k] * weight[n_taps - 1, k]
            for tap in range(n_taps - 1):
                total += history[tap * dilation, k] * weight[tap, k]
            residual[t, k] += gated[t, k] + total / (np.float32(1) + np.exp(-total))
        for row in range(n_history - 1):
            history[row] = history[row + 1]
        history[n_history - 1] = normed[t]


@njit
def push_rows(history, rows):
    """Fold rows float32 [T, N] into history [n, N], which keeps the last n of all, oldest first."""
    n, fresh = history.shape[0], rows.shape[0]
    for row in range(n):
        history[row] = history[row + fresh] if row + fresh < n else rows[row + fresh - n]


# --- the choice of a token ----------------------------------------------------------------------------------------


def greedy(logits):
    """The index of each row's largest value, the lowest of equals, as NumPy int64 [T]; logits float32 [T, V]."""
    return logits.argmax(axis=1)


def greedy_with_share(logits):
    """`greedy`, and the softmax probability of each choice as NumPy float32 [T]."""
    ids = logits.argmax(axis=1)
    share = [1 / np.exp(row - row[token]).sum() for row, token in zip(logits, ids, strict=True)]
    return ids, np.array(share, np.float32)
