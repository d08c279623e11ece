"""Weights as bytes: how each type lies in a file and in a pack.

It owns one row of `KINDS` a type and the way from a file's blocks into a pack, in NumPy; it multiplies nothing.
Invariant: a pack holds the bits of the file's codes and scales, in another order only. Read next: cpudecode.py, which
makes numbers of them.

A pack has row groups of sixteen rows, the lanes of a vector, and in them blocks of 32 (K types: 256) input columns.
Inside a block the codes stand in *quads*: four columns of sixteen rows, 64 bytes, a row's four in one 32-bit lane. A
block is a header, in which each field has sixteen values side by side, then the codes of each 32 columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

ROWS = 16  # rows of a pack, the lanes of a vector
BLOCK = 32  # columns decoded at once


# --- the types as a file has them -----------------------------------------------------------------------------------
#
# A reader takes blocks apart: uint8 [groups, blocks, 16, bytes of a block]. All values below are of that shape but for
# the last axis. The orders of bits and columns are ggml's.


class Fields(NamedTuple):
    """What a block of integer codes consists of: a weight is scale * (code - zero) + offset."""

    codes: np.ndarray  # uint8, one a column; signed ones from zero up
    d: np.ndarray  # bits of a float16, the scale
    m: np.ndarray | None = None  # bits of a float16, the offset or what `minima` are factors of
    scales: np.ndarray | None = None  # uint8, factors of d by sub-block
    minima: np.ndarray | None = None  # uint8, factors of -m by sub-block


def _half(blocks, at):
    """The float16 at byte `at` of every block, as its bits."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.uint16)


def _nibbles(packed):
    """The low nibbles are the first half of a block, the high ones the second."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q8_0(blocks):
    return Fields(blocks[..., 2:] ^ 128, _half(blocks, 0))


def _q4_0(blocks):
    return Fields(_nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks):
    return Fields(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks):
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return Fields(_nibbles(blocks[..., 6:]) | high << 4, _half(blocks, 0))


def _q5_1(blocks):
    high = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little")
    return Fields(_nibbles(blocks[..., 8:]) | high << 4, _half(blocks, 0), _half(blocks, 2))


# What the four bits of the IQ4 types stand for; a pack has a byte in their place.
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]) + 128
_IQ4_CODES = _IQ4_VALUES.astype(np.uint8)


def _iq4_nl(blocks):
    return Fields(_IQ4_CODES[_nibbles(blocks[..., 2:])], _half(blocks, 0))


def _iq4_xs(blocks):
    """Eight runs of 32 columns, each with a scale of six bits: four of them together, and two behind each other."""
    runs = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    codes = _IQ4_CODES[_nibbles(runs)].reshape(*blocks.shape[:-1], 256)
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*blocks.shape[:-1], 8)
    high = np.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(low.shape)
    return Fields(codes, _half(blocks, 0), scales=(low | high << 4) - np.uint8(32))


def _q3_k(blocks):
    """Codes of three bits, the highest of them apart; sixteen scales of six bits, four low and two high ones apart."""
    shape, shifts = blocks.shape[:-1], np.arange(0, 8, 2, dtype=np.uint8)
    low = blocks[..., 32:96].reshape(*shape, 2, 1, 32) >> shifts[:, None] & 3
    high = np.swapaxes(np.unpackbits(blocks[..., :32, None], axis=-1, bitorder="little"), -1, -2)
    packed = blocks[..., 96:108]
    scales = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    upper = (packed[..., None, 8:] >> shifts[:, None] & 3).reshape(*shape, 16)
    codes = low.reshape(*shape, 256) | high.reshape(*shape, 256) << 2
    return Fields(codes, _half(blocks, 108), scales=(scales | upper << 4) - np.uint8(32))


def _k_scales(packed):
    """The eight 6-bit scales and minima of Q4_K and Q5_K out of their 12 bytes."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=-1)
    return scales, minima


def _k_codes(nibbles):
    """128 bytes of Q4_K or Q5_K to 256 codes: 64 columns at a time, low nibbles first."""
    return _nibbles(nibbles.reshape(*nibbles.shape[:-1], 4, 32)).reshape(*nibbles.shape[:-1], 256)


def _q4_k(blocks):
    return Fields(_k_codes(blocks[..., 16:]), _half(blocks, 0), _half(blocks, 2), *_k_scales(blocks[..., 4:16]))


def _q5_k(blocks):
    bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [..., column mod 32, sub-block]
    high = np.swapaxes(bits, -1, -2).reshape(*bits.shape[:-2], 256)
    codes = _k_codes(blocks[..., 48:]) | high << 4
    return Fields(codes, _half(blocks, 0), _half(blocks, 2), *_k_scales(blocks[..., 4:16]))


def _q6_k(blocks):
    """Two halves of 128 columns, each four runs of 32 that share the bytes of the high bits."""
    runs = []
    for half in range(2):
        ql, qh = blocks[..., half * 64 : half * 64 + 64], blocks[..., 128 + half * 32 : 160 + half * 32]
        low = (ql[..., :32] & 15, ql[..., 32:] & 15, ql[..., :32] >> 4, ql[..., 32:] >> 4)
        runs += [run | ((qh >> 2 * i) & 3) << 4 for i, run in enumerate(low)]
    return Fields(np.concatenate(runs, axis=-1), _half(blocks, 208), scales=blocks[..., 192:208])


# --- the types as a pack has them -----------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A weight type; a place is a byte of a pack's block.

    A weight is scale * (code - zero) + offset. The scale is the float16 at byte 0, times the factor of its sub-block
    where there are `scales`; the offset is the float16 at `offset`, or minus that times the factor of its sub-block
    where there are `minima`. Floats have `bits` above 8 and neither.
    """

    name: str  # as GGUF names the type
    bits: int  # of a weight
    read: Callable | None = None  # takes a file's blocks apart
    file_bytes: int = 0  # of a row's block in a file
    file_halves: tuple[int, ...] = ()  # where such a block holds float16
    columns: int = BLOCK  # of a block
    zero: int = 0  # the code that stands for 0
    codes: int = 0  # place of the codes
    scales: int = 0  # place of the factors of the scale, 0 for none
    signed: bool = False  # whether those have a sign
    halves: int = 1  # scales of 32 columns
    offset: int = 0  # place of the float16, 0 for none
    minima: int = 0  # place of its factors, 0 for none

    @property
    def codes_step(self) -> int:
        """Bytes of 32 columns' codes."""
        return BLOCK * self.bits * ROWS // 8

    @property
    def share(self) -> int:
        """Column blocks of 32 in a block."""
        return self.columns // BLOCK

    @property
    def n_bytes(self) -> int:
        """Bytes of a block of sixteen rows."""
        return self.codes + self.share * self.codes_step


KINDS = (
    Kind("F32", 32),
    Kind("F16", 16),
    Kind("BF16", 16),
    Kind("Q8_0", 8, _q8_0, 34, (0,), zero=128, codes=32),
    Kind("Q4_0", 4, _q4_0, 18, (0,), zero=8, codes=32),
    Kind("Q4_1", 4, _q4_1, 20, (0, 2), codes=64, offset=32),
    Kind("Q5_0", 5, _q5_0, 22, (0,), zero=16, codes=32),
    Kind("Q5_1", 5, _q5_1, 24, (0, 2), codes=64, offset=32),
    Kind("IQ4_NL", 8, _iq4_nl, 18, (0,), zero=128, codes=32),
    Kind("IQ4_XS", 8, _iq4_xs, 136, (0,), columns=256, zero=128, codes=160, scales=32, signed=True),
    Kind("Q3_K", 4, _q3_k, 110, (108,), columns=256, zero=4, codes=288, scales=32, signed=True, halves=2),
    Kind("Q4_K", 4, _q4_k, 144, (0, 2), columns=256, codes=320, scales=64, offset=32, minima=192),
    Kind("Q5_K", 5, _q5_k, 176, (0, 2), columns=256, codes=320, scales=64, offset=32, minima=192),
    Kind("Q6_K", 6, _q6_k, 210, (208,), columns=256, zero=32, codes=288, scales=32, signed=True, halves=2),
)
NUMBERS = {kind.name: number for number, kind in enumerate(KINDS)}
F32, F16, BF16 = (NUMBERS[name] for name in ("F32", "F16", "BF16"))

CODED = tuple(kind.bits <= 8 for kind in KINDS)  # integer codes, not floats
# The same by number, as both compilers take it: a tuple is a constant in a kernel.
BITS, ZERO, HALVES, SIGNED, CODES, CODES_STEP, SCALES, OFFSET, MINIMA, SHARE, BYTES = (
    tuple(getattr(kind, name) for kind in KINDS)
    for name in ("bits", "zero", "halves", "signed", "codes", "codes_step", "scales", "offset", "minima", "share",
                 "n_bytes")
)  # fmt: skip


def fill(number: int, rows: np.ndarray, out: np.ndarray) -> None:
    """Pack rows as they stand in a file, [groups, 16, values or bytes], into `out`, uint8 [groups, blocks, bytes]."""
    kind = KINDS[number]
    if kind.bits > 8:
        _put_floats(rows, out)
        return
    fields = kind.read(rows.reshape(rows.shape[0], ROWS, -1, kind.file_bytes).transpose(0, 2, 1, 3))
    out[..., :32] = _lanes(fields.d)
    for place, values in ((kind.offset, fields.m), (kind.scales, fields.scales), (kind.minima, fields.minima)):
        if place:
            lanes = _lanes(values)
            out[..., place : place + lanes.shape[-1]] = lanes
    for sub in range(kind.share):
        part, at = fields.codes[..., sub * BLOCK : (sub + 1) * BLOCK], kind.codes + sub * kind.codes_step
        out[..., at : at + kind.codes_step] = _put_codes(kind.bits, part)


def _put_floats(rows, out):
    groups, blocks = out.shape[:2]
    padded = np.zeros((groups, ROWS, blocks * BLOCK), rows.dtype)
    padded[:, :, : rows.shape[2]] = rows
    columns = padded.reshape(groups, ROWS, blocks, BLOCK).transpose(0, 2, 3, 1)
    out[:] = np.ascontiguousarray(columns).reshape(groups, blocks, -1).view(np.uint8)


def _lanes(fields):
    """Fields [groups, blocks, 16, n] one after the other, each with its sixteen rows side by side, as bytes."""
    ordered = np.ascontiguousarray(np.swapaxes(fields, 2, 3))
    return ordered.reshape(*fields.shape[:2], -1).view(np.uint8)


def _quads(codes):
    """Codes [groups, blocks, 16, columns] to [groups, blocks, quads, 64]: four columns of a row in one lane."""
    groups, blocks, _, columns = codes.shape
    quads = codes.reshape(groups, blocks, ROWS, columns // 4, 4).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(quads).reshape(groups, blocks, columns // 4, 64)


def _put_codes(bits, codes):
    """Codes of 32 columns as a pack has them: eight quads, or those of nibbles and behind them the higher bits."""
    quads = _quads(codes)
    if bits < 8:
        # The low four bits of quads 0..3 beside those of quads 4..7, then the planes of the bits above.
        low = quads & 15
        quads = np.concatenate([low[:, :, :4] | low[:, :, 4:] << 4, *_planes(bits, quads >> 4)], axis=2)
    return quads.reshape(*quads.shape[:2], -1)


def _planes(bits, high):
    """The bits above the low four, in quads.

    One bit: quad q at bit q of one plane. Two bits: quads 4 p .. 4 p + 3 in plane p, quad q at bits 2 (q mod 4).
    """
    width = bits - 4
    if width:
        per_plane = 8 // width
        shifts = (width * np.arange(per_plane, dtype=np.uint8))[:, None]
        for first in range(0, 8, per_plane):
            yield np.bitwise_or.reduce(high[:, :, first : first + per_plane] << shifts, axis=2, keepdims=True)
