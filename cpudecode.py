"""A block of weights as numbers, from a pack.

It owns the way from a pack's bytes to codes, scales, offsets and floats, once for products, rows and experts; it sums
nothing. Invariant: where a type has what it has is read in packs.py and known when a kernel is compiled, so `kind` is
given literally and costs nothing; what is decoded is exact. Read next: cpuproducts.py.
"""

import numpy as np

import cpusimd as simd
import packs
from jit import njit
from packs import BLOCK, F16, F32, ROWS


@njit(forceinline=True)
def codes_start(kind, at, block):
    """Byte of the first quad of column block `block` in the row group at byte `at`."""
    share = packs.SHARE[kind]
    return at + block // share * packs.BYTES[kind] + packs.CODES[kind] + block % share * packs.CODES_STEP[kind]


@njit(forceinline=True)
def quad_codes(kind, data, start, quad):
    """Unsigned codes of four columns, byte j of a lane column 4 quad + j of its row; codes begin at `start`."""
    bits = packs.BITS[kind]
    if bits == 8:
        return simd.load_i32(data, start + quad * 64)
    both = simd.load_i32(data, start + (quad & 3) * 64)
    codes = simd.bits(both, np.int32(4 * (quad >> 2)), np.int32(0x0F0F0F0F))
    if bits == 5:
        high = simd.bits(simd.load_i32(data, start + 256), np.int32(quad), np.int32(0x01010101))
        codes = simd.either(codes, simd.shift_left(high, np.int32(4)))
    elif bits == 6:
        plane = simd.load_i32(data, start + 256 + (quad >> 2) * 64)
        high = simd.bits(plane, np.int32(2 * (quad & 3)), np.int32(0x03030303))
        codes = simd.either(codes, simd.shift_left(high, np.int32(4)))
    return codes


@njit(forceinline=True)
def block_scale(kind, data, at, block, half):
    """Scale of a column block's sixteen rows, or of a half of it where a kind has two."""
    share = packs.SHARE[kind]
    at += block // share * packs.BYTES[kind]
    d = simd.load_f16(data, at)
    if packs.SCALES[kind] == 0:
        return d
    place = at + packs.SCALES[kind] + (block % share * packs.HALVES[kind] + half) * ROWS
    if packs.SIGNED[kind]:
        return simd.mul(d, simd.load_i8(data, place))
    return simd.mul(d, simd.load_u8(data, place))


@njit(forceinline=True)
def block_offset(kind, data, at, block):
    """Offset of a column block's sixteen rows, of a kind that has offsets."""
    share = packs.SHARE[kind]
    at += block // share * packs.BYTES[kind]
    m = simd.load_f16(data, at + packs.OFFSET[kind])
    if packs.MINIMA[kind] == 0:
        return m
    factor = simd.load_u8(data, at + packs.MINIMA[kind] + block % share * ROWS)
    return simd.sub(simd.splat(np.float32(-0.0)), simd.mul(m, factor))


@njit(forceinline=True)
def _decode_floats(kind, data, at, out):
    for k in range(BLOCK):
        if kind == F32:
            value = simd.load_f32(data, at + k * 64)
        elif kind == F16:
            value = simd.load_f16(data, at + k * 32)
        else:
            value = simd.load_bf16(data, at + k * 32)
        simd.store(out, k * ROWS, value)


@njit(forceinline=True)
def decode(kind, data, at, block, out):
    """Column block `block` (32 columns x 16 rows) of the row group at byte `at`, column by column into `out`."""
    start = codes_start(kind, at, block)
    if packs.BITS[kind] > 8:
        _decode_floats(kind, data, start, out)
        return
    halves = packs.HALVES[kind]
    for half in range(halves):
        scale = block_scale(kind, data, at, block, half)
        if packs.OFFSET[kind]:
            offset = block_offset(kind, data, at, block)
        else:
            offset = simd.mul(scale, simd.splat(np.float32(-packs.ZERO[kind])))
        for i in range(8 // halves):
            quad = half * (8 // halves) + i
            codes = quad_codes(kind, data, start, quad)
            for j in range(4):
                value = simd.to_float(simd.bits(codes, np.int32(8 * j), np.int32(255)))
                simd.store(out, (4 * quad + j) * ROWS, simd.fma(value, scale, offset))
