"""The 64-bit hash of session files and CRC-32C, as serial kernels without the GIL.

It owns the two checksums; it knows nothing of what is hashed. Invariant: a digest depends on the bytes and the seed
alone, never on how the bytes were cut into calls. plainhash.py is the same hash without a kernel. Read next:
fingerprint.py, sessionfile.py.
"""

import functools

import crcmod.predefined
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpusimd import prefetch
from cpuunits import crc_instruction, has_crc_instruction
from jit import njit

_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_P1, _P2, _P3, _P4, _P5 = (np.uint64(prime) for prime in _PRIMES)
_U64_MASK = (1 << 64) - 1
_STRIPE = 32  # bytes that the four lanes take in one step
_PREFETCH_BYTES = 4096  # how far ahead: 1.7 times the speed on data that is not in the cache
_TOTAL = 4  # index of the byte count in the hash state, after the four lanes
_PENDING = 5  # index of the first of four words that hold the bytes of a stripe not yet whole
_CRC_LANE = 4096  # bytes of each of the three strands that the instruction's latency lets run side by side


# --- Kernels ---


@intrinsic
def _word(typingctx, data, offset):
    """The eight bytes at `offset` of a byte array, wherever they lie, as uint64."""

    def codegen(context, builder, signature, args):
        struct_proxy = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0])
        address = builder.gep(struct_proxy.data, [args[1]])
        return builder.load(builder.bitcast(address, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(data, types.int64), codegen


@njit(inline="always")
def _rotate(value, n_bits):
    return (value << np.uint64(n_bits)) | (value >> np.uint64(64 - n_bits))


@njit(inline="always")
def _mix(lane, word):
    return _rotate(lane + word * _P2, 31) * _P1


@njit
def _absorb(state, data, offset, n_stripes):
    """Take whole stripes of `data` into the four lanes of `state`."""
    a, b, c, d = state[0], state[1], state[2], state[3]
    for _ in range(n_stripes):
        prefetch(data, offset + _PREFETCH_BYTES)
        a = _mix(a, _word(data, offset))
        b = _mix(b, _word(data, offset + 8))
        c = _mix(c, _word(data, offset + 16))
        d = _mix(d, _word(data, offset + 24))
        offset += _STRIPE
    state[0], state[1], state[2], state[3] = a, b, c, d


@njit
def _update(state, pending, data):
    """Take all of `data`; `pending` are the last 32 bytes of `state`."""
    size = data.size
    held = np.int64(state[_TOTAL] % np.uint64(_STRIPE))
    state[_TOTAL] += np.uint64(size)
    start = 0
    if held:
        start = min(size, _STRIPE - held)
        for i in range(start):
            pending[held + i] = data[i]
        if held + start < _STRIPE:
            return
        _absorb(state, pending, 0, 1)
    n_stripes = (size - start) // _STRIPE
    _absorb(state, data, start, n_stripes)
    start += n_stripes * _STRIPE
    for i in range(start, size):  # single bytes: a slice would take longer to compile than all the rest
        pending[i - start] = data[i]


@njit
def _digest(state, pending):
    """The hash of everything taken so far; `state` stays as it is."""
    zero = np.uint64(0)
    h = _rotate(state[0], 1) + _rotate(state[1], 7) + _rotate(state[2], 12) + _rotate(state[3], 18)
    for lane in range(4):
        h = (h ^ _mix(zero, state[lane])) * _P1 + _P4
    h += state[_TOTAL]
    held = np.int64(state[_TOTAL] % np.uint64(_STRIPE))
    n_words = held // 8
    for i in range(n_words):
        h = _rotate(h ^ _mix(zero, _word(pending, 8 * i)), 27) * _P1 + _P4
    for i in range(8 * n_words, held):
        h = _rotate(h ^ (np.uint64(pending[i]) * _P5), 11) * _P1
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


@njit(inline="always")
def _crc_word(word, tables, after):
    """What eight bytes add to the register `after` bytes later."""
    part = np.uint64(0)
    for k in range(8):
        part ^= tables[after + 7 - k, (word >> np.uint64(8 * k)) & np.uint64(255)]
    return part


@njit
def _crc_sliced(register, data, tables):
    """The CRC register after `data`, sixteen bytes a step through sixteen tables of 256."""
    n_steps = data.size // 16
    for i in range(n_steps):
        register = _crc_word(_word(data, 16 * i) ^ register, tables, 8) ^ _crc_word(_word(data, 16 * i + 8), tables, 0)
    return _crc_bytes(register, data, 16 * n_steps, tables)


@njit
def _crc_bytes(register, data, start, tables):
    for i in range(start, data.size):
        register = tables[0, (register ^ np.uint64(data[i])) & np.uint64(255)] ^ (register >> np.uint64(8))
    return register


@njit
def _crc_hardware(register, data, tables, shift):
    """The CRC register after `data`: three strands at a time, joined by moving a register over a strand's length."""
    offset = 0
    while data.size - offset >= 3 * _CRC_LANE:
        second, third = np.uint64(0), np.uint64(0)
        for _ in range(_CRC_LANE // 8):
            register = crc_instruction(register, _word(data, offset))
            second = crc_instruction(second, _word(data, offset + _CRC_LANE))
            third = crc_instruction(third, _word(data, offset + 2 * _CRC_LANE))
            offset += 8
        register = _crc_move(_crc_move(register, shift) ^ second, shift) ^ third
        offset += 2 * _CRC_LANE
    while data.size - offset >= 8:
        register = crc_instruction(register, _word(data, offset))
        offset += 8
    return _crc_bytes(register, data, offset, tables)


@njit(inline="always")
def _crc_move(register, shift):
    """The register after one strand of zero bytes."""
    byte = np.uint64(255)
    moved = np.uint64(0)
    for k in range(4):
        moved ^= shift[k, (register >> np.uint64(8 * k)) & byte]
    return moved


# --- The two checksums ---


def _as_bytes(data) -> np.ndarray:
    if not isinstance(data, np.ndarray):
        # A writable copy, which is short here: every kernel would be compiled once more for read-only arrays.
        return np.frombuffer(bytearray(data), np.uint8)
    assert data.dtype == np.uint8, "kernels read bytes"
    assert data.ndim == 1, "kernels read one row"
    assert data.flags.c_contiguous, "kernels read bytes that follow each other"
    return data


class Hash64:
    """The streaming 64-bit hash of format v1; a digest may be taken at any point and changes nothing.

    Equal to XXH64 of the same seed only for at least 32 bytes with a length whose remainder by 8 is below 4.
    """

    def __init__(self, seed: int = 0):
        p1, p2 = _PRIMES[:2]
        lanes = (seed + p1 + p2, seed + p2, seed, seed - p1)
        self._state = np.array([lane & _U64_MASK for lane in lanes] + [0] * 5, np.uint64)
        self._pending = self._state[_PENDING:].view(np.uint8)

    def update(self, data) -> "Hash64":
        """Take bytes, or a C-contiguous uint8 array."""
        _update(self._state, self._pending, _as_bytes(data))
        return self

    def digest(self) -> int:
        return int(_digest(self._state, self._pending))


def hash64(data, seed: int = 0) -> int:
    """The 64-bit hash of one piece of bytes."""
    return Hash64(seed).update(data).digest()


@functools.cache
def _crc_tables() -> tuple[np.ndarray, np.ndarray]:
    """Slicing tables uint64 [16, 256] and strand shift tables uint64 [4, 256], grown from crcmod's own table."""
    tables = np.zeros((16, 256), np.uint64)
    tables[0] = crcmod.predefined.PredefinedCrc("crc-32c").table
    for k in range(1, 16):
        tables[k] = _crc_after_zero_byte(tables[k - 1], tables[0])
    shift = np.arange(256, dtype=np.uint64) << (8 * np.arange(4, dtype=np.uint64)[:, None])
    for _ in range(_CRC_LANE):
        shift = _crc_after_zero_byte(shift, tables[0])
    return tables, shift


def _crc_after_zero_byte(register: np.ndarray, table: np.ndarray) -> np.ndarray:
    return table[register & np.uint64(255)] ^ (register >> np.uint64(8))


def crc32c(data, crc: int = 0) -> int:
    """CRC-32C of bytes or a C-contiguous uint8 array; `crc` is the value of the bytes before them."""
    tables, shift = _crc_tables()
    register = np.uint64(crc ^ 0xFFFFFFFF)
    if has_crc_instruction():
        register = _crc_hardware(register, _as_bytes(data), tables, shift)
    else:
        register = _crc_sliced(register, _as_bytes(data), tables)
    return int(register) ^ 0xFFFFFFFF
