"""The 64-bit hash of format v1 in plain Python, for headers: to load the kernels takes half a second.

It owns one function, the twin of `checksum.hash64`; it knows no file. Invariant: both give the same value for every
input. Read next: checksum.py, which hashes whole files.
"""

import struct

_MASK = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_STRIPE = struct.Struct("<4Q")
_WORD = struct.Struct("<Q")


def _rotate(value: int, n_bits: int) -> int:
    value &= _MASK
    return (value << n_bits | value >> (64 - n_bits)) & _MASK


def _mix(lane: int, word: int) -> int:
    return _rotate(lane + word * _P2, 31) * _P1 & _MASK


def hash64(data: bytes, seed: int = 0) -> int:
    """The hash of a few bytes: some microseconds each."""
    lanes = [seed + _P1 + _P2, seed + _P2, seed, seed - _P1]
    n_whole = len(data) // _STRIPE.size * _STRIPE.size
    for words in _STRIPE.iter_unpack(data[:n_whole]):
        lanes = [_mix(lane, word) for lane, word in zip(lanes, words, strict=True)]
    h = sum(_rotate(lane, n_bits) for lane, n_bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
    for lane in lanes:
        h = (h ^ _mix(0, lane)) * _P1 + _P4 & _MASK
    h += len(data)
    rest = data[n_whole:]
    n_words = len(rest) // _WORD.size * _WORD.size
    for (word,) in _WORD.iter_unpack(rest[:n_words]):
        h = _rotate(h ^ _mix(0, word), 27) * _P1 + _P4
    for byte in rest[n_words:]:
        h = _rotate(h ^ byte * _P5, 11) * _P1
    h &= _MASK
    for shift, factor in ((33, _P2), (29, _P3)):
        h = (h ^ h >> shift) * factor & _MASK
    return h ^ h >> 32
