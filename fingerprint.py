"""What a session file belongs to: the identities of a model and of a configuration.

It owns the typed field stream and the two fingerprints; it knows nothing of the layout of a session file and nothing of
models beyond the files they lie in. Invariant: two inputs that differ in any field have different streams of bytes.
Read next: sessionfile.py.
"""

import os
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from checksum import Hash64

CONFIG_SEED = 0x434F4E4649473031
MODEL_SEED = 0x5354524154414D44
SAMPLE_SEED = 0x46494C4553414D50
SAMPLE_BYTES = 1 << 20  # how much of a model file's head and of its tail enters its fingerprint


class FingerprintError(Exception):
    """A model file that has to enter a fingerprint cannot be read."""


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
