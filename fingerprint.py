"""The 64-bit hash and CRC-32C of session files, and the identities made with them: of a model, of a configuration.

It owns both checksums as serial kernels without the GIL, the typed field stream and the two fingerprints; it knows
nothing of the layout of a session file and nothing of models beyond the files they lie in. Invariant: a digest depends
on the bytes and the seed alone, never on how the bytes were cut into calls. Read next: sessionfile.py.
"""

import functools
import os
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import crcmod.predefined
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from cpusimd import prefetch
from jit import njit

CONFIG_SEED = 0x434F4E4649473031
MODEL_SEED = 0x5354524154414D44
SAMPLE_SEED = 0x46494C4553414D50
SAMPLE_BYTES = 1 << 20  # how much of a model file's head and of its tail enters its fingerprint

_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_P1, _P2, _P3, _P4, _P5 = (np.uint64(prime) for prime in _PRIMES)
_U64_MASK = (1 << 64) - 1
_STRIPE = 32  # bytes that the four lanes take in one step
_PREFETCH_BYTES = 4096  # how far ahead: 1.7 times the speed on data that is not in the cache
_TOTAL = 4  # index of the byte count in the hash state, after the four lanes
_PENDING = 5  # index of the first of four words that hold the bytes of a stripe not yet whole
_CRC_LANE = 4096  # bytes of each of the three strands that the instruction's latency lets run side by side


class FingerprintError(Exception):
    """A model file that has to enter a fingerprint cannot be read."""


# --- Kernels ---


@intrinsic
def _word(typingctx, data, offset):
    """The eight bytes at `offset` of a byte array, wherever they lie, as uint64."""

    def codegen(context, builder, signature, args):
        struct_proxy = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0])
        address = builder.gep(struct_proxy.data, [args[1]])
        return builder.load(builder.bitcast(address, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(data, types.int64), codegen


@intrinsic
def _crc_instruction(typingctx, crc, word):
    """CRC-32C of eight bytes more, by the instruction of SSE 4.2: LLVM aborts where the target has none."""

    def codegen(context, builder, signature, args):
        word_type = ir.IntType(64)
        step = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(word_type, [word_type, word_type]), "llvm.x86.sse42.crc32.64.64"
        )
        return builder.call(step, args)

    return types.uint64(types.uint64, types.uint64), codegen


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
            register = _crc_instruction(register, _word(data, offset))
            second = _crc_instruction(second, _word(data, offset + _CRC_LANE))
            third = _crc_instruction(third, _word(data, offset + 2 * _CRC_LANE))
            offset += 8
        register = _crc_move(_crc_move(register, shift) ^ second, shift) ^ third
        offset += 2 * _CRC_LANE
    while data.size - offset >= 8:
        register = _crc_instruction(register, _word(data, offset))
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


@functools.cache
def _has_crc_instruction() -> bool:
    """Whether the target that kernels are compiled for has it, which settings may narrow below the machine's own."""
    return "+sse4.2" in cpu_target.target_context.codegen().magic_tuple()[2]


def crc32c(data, crc: int = 0) -> int:
    """CRC-32C of bytes or a C-contiguous uint8 array; `crc` is the value of the bytes before them."""
    tables, shift = _crc_tables()
    register = np.uint64(crc ^ 0xFFFFFFFF)
    if _has_crc_instruction():
        register = _crc_hardware(register, _as_bytes(data), tables, shift)
    else:
        register = _crc_sliced(register, _as_bytes(data), tables)
    return int(register) ^ 0xFFFFFFFF


# --- Identities ---


class FieldStream:
    """A hash over typed, length-delimited fields: neither `ab`,`c` and `a`,`bc` nor 5 and 5 unsigned are the same."""

    _HEAD = struct.Struct("<Q")
    _MIDDLE = struct.Struct("<cQ")

    def __init__(self, seed: int):
        self._hash = Hash64(seed)

    def _field(self, tag: str, kind: bytes, value: bytes) -> None:
        name = tag.encode()
        self._hash.update(self._HEAD.pack(len(name)) + name + self._MIDDLE.pack(kind, len(value)))
        self._hash.update(value)

    def text(self, tag: str, value: str) -> None:
        self._field(tag, b"s", value.encode())

    def signed(self, tag: str, value: int) -> None:
        self._field(tag, b"i", struct.pack("<q", value))

    def unsigned(self, tag: str, value: int) -> None:
        self._field(tag, b"u", struct.pack("<Q", value))

    def double(self, tag: str, value: float) -> None:
        self._field(tag, b"f", struct.pack("<d", value))

    def raw(self, tag: str, value: bytes) -> None:
        self._field(tag, b"b", value)

    def digest(self) -> int:
        return self._hash.digest()


class Rope(NamedTuple):
    """Resolved values of the rotary position embedding."""

    type: int = 0
    freq_base: float = 0.0
    factor: float = 0.0
    freq_scale: float = 0.0
    orig_ctx: float = 0.0
    ext_factor: float = 0.0
    attn_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0


class Config(NamedTuple):
    """Everything beside the model that changes what is computed or kept for the same tokens."""

    engine: str = ""
    backend: str = ""
    kv: str = ""
    max_context: int = 0
    kv_resident: int = 0
    mtp_window: int = 0  # -1 without a draft model
    kv_rot: bool = False
    rope: Rope = Rope()
    cvec: int = 0  # digest of the control vector's tables, 0 for none
    switches: Sequence[tuple[str, int]] = ()


def config_fingerprint(config: Config) -> int:
    """The identity of a configuration; every switch counts, also by its place in the list."""
    fields = FieldStream(CONFIG_SEED)
    fields.text("engine", config.engine)
    fields.text("backend", config.backend)
    fields.text("kv", config.kv)
    for tag in ("max_context", "kv_resident", "mtp_window", "kv_rot"):
        fields.signed(tag, int(getattr(config, tag)))
    fields.signed("rope.type", config.rope.type)
    for tag in Rope._fields[1:]:
        fields.double(f"rope.{tag}", getattr(config.rope, tag))
    fields.unsigned("cvec", config.cvec)
    fields.unsigned("switches", len(config.switches))
    for name, value in config.switches:
        fields.signed(f"switch.{name}", value)
    return fields.digest()


class ModelFile(NamedTuple):
    """One file of a model, under the role that it plays."""

    role: str
    path: str
    optional: bool = False


def model_fingerprint(files: Iterable[ModelFile], heartbeat: Callable[[], None] | None = None) -> int:
    """The identity of a model: order, roles and sampled contents of its files, wherever they lie.

    `heartbeat` is called once for each distinct path. Raises FingerprintError for a file that has to be there and
    cannot be read.
    """
    files = list(files)
    samples: dict[str, int | None] = {}
    fields = FieldStream(MODEL_SEED)
    fields.unsigned("files", len(files))
    for file in files:
        if file.path not in samples:
            samples[file.path] = _sample_or_none(file)
            if heartbeat:
                heartbeat()
        sample = samples[file.path]
        if sample is not None:
            fields.text("role", file.role)
            fields.unsigned("sample", sample)
        elif file.optional:
            fields.text("absent", file.role)
        else:
            raise FingerprintError(f"model file '{file.path}' ({file.role}) is missing")
    return fields.digest()


def _sample_or_none(file: ModelFile) -> int | None:
    """The sample digest of one file, or None for an optional one that is not there."""
    try:
        return _sample(file.path)
    except FileNotFoundError as error:
        if file.optional:
            return None
        raise FingerprintError(f"model file '{file.path}' ({file.role}) is missing") from error
    except OSError as error:
        raise FingerprintError(f"model file '{file.path}' ({file.role}) cannot be read: {error.strerror}") from error


def _sample(path: str) -> int:
    """Size, first MiB and last MiB of a file; between 1 and 2 MiB the two are exactly the file."""
    # O_NONBLOCK: a FIFO in the place of a model file must be refused, not waited for.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        size = status.st_size
        fields = FieldStream(SAMPLE_SEED)
        fields.unsigned("size", size)
        fields.raw("head", _read_exactly(file, min(size, SAMPLE_BYTES)))
        if size > SAMPLE_BYTES:
            tail_bytes = min(size - SAMPLE_BYTES, SAMPLE_BYTES)
            file.seek(size - tail_bytes)
            fields.raw("tail", _read_exactly(file, tail_bytes))
    return fields.digest()


def _read_exactly(file, size: int) -> bytes:
    data = bytearray(size)
    filled = 0
    while filled < size:
        n_read = file.readinto(memoryview(data)[filled:])
        if not n_read:
            raise OSError(0, "it became shorter while it was read")
        filled += n_read
    return bytes(data)


def role_list(
    *,
    native_shards: Sequence[str] = (),
    native_dense: Sequence[str] = (),
    native_head: Sequence[str] = (),
    embedding: str = "",
    ple: str = "",
    mtp: str = "",
    pack: str = "",
    experts: Sequence[tuple[str, str]] = (),
) -> list[ModelFile]:
    """The files of a model in the order in which the reference engine lists them; `experts` are (role, path)."""
    files = [ModelFile(f"native shard {i}", path) for i, path in enumerate(native_shards)]
    files += [ModelFile(f"native dense {i}", path) for i, path in enumerate(native_dense)]
    files += [ModelFile(f"native head {i}", path) for i, path in enumerate(native_head)]
    files += [ModelFile(role, path) for role, path in (("embedding", embedding), ("ple", ple), ("mtp", mtp)) if path]
    if pack:
        files.append(ModelFile("pack native_experts.txt", f"{pack}/native_experts.txt", optional=True))
    return files + [ModelFile(role, path) for role, path in experts]
