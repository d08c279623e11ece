"""The layout of a session file, format v1: its records, the limits a reader sets, what a save or a restore may need.

It owns every number of the format and the one exception; it touches no file and knows nothing of models. Invariant:
integers are little-endian and of fixed width, so an image and an identity give the same bytes on every machine.
`man/strata-session.5` is the same as a table. Read next: sessionfile.py, which writes and reads it.
"""

import struct
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from blockfile import BLOCK_BYTES
from cells import KvHeader

START_MARK = b"STRSESS\x01"
END_MARK = b"STRSEND\x01"
VERSION = 1
HEADER_FIELDS = {
    "magic": "8s", "version": "I", "header_bytes": "I", "model": "Q", "config": "Q", "payload_bytes": "Q",
    "reserved_1": "Q", "reserved_2": "Q", "hash": "Q",
}  # fmt: skip
HEADER = struct.Struct("<" + "".join(HEADER_FIELDS.values()))
GEOMETRY = struct.Struct("<18q")
LAYER_RANGE = struct.Struct("<2q")
COUNT = struct.Struct("<Q")
IMAGE = struct.Struct("<qQ")
KV_HEADER = struct.Struct("<7q")
TRAILER = struct.Struct("<Q8s")
FRAME_BYTES = HEADER.size + TRAILER.size  # the smallest file by size alone; the smallest valid one has 328 bytes
LIVE_OFFSET = HEADER.size + GEOMETRY.size + LAYER_RANGE.size + COUNT.size  # of the live record

STATE_ARRAYS = ("gdn", "ple", "tails", "dead", "block_pos")
FLOAT_STATE = STATE_ARRAYS[:4]  # float32; block_pos is int32
KV_PARTS = ("k", "v", "k_scale", "v_scale", "pooled")
MIN_CHECKPOINT_BYTES = 72  # one word above the real minimum, as every reader of this format counts
MIN_KV_LAYER_BYTES = KV_HEADER.size + len(KV_PARTS) * COUNT.size
OPEN = (1 << 64) - 1  # a limit that limits nothing, and where sums saturate
MIB = 1 << 20
KV_SOURCE_BYTES = 160  # what a layer's source takes in RAM, and its bookkeeping, in the estimate for a save
KV_BOOKKEEPING_BYTES = 256


class SessionError(Exception):
    """A session file was refused or could not be written or read.

    `kind` is invalid, storage, memory or io; `reason` a short code; `published` tells that the new file has already
    replaced the old one. Where bytes of a file were wrong, section, offset, expected and found say which.
    """

    def __init__(self, kind, reason, text, *, published=False, section="", offset=None, expected="", found=""):
        super().__init__(text)
        self.kind = kind
        self.reason = reason
        self.published = published
        self.section = section
        self.offset = offset
        self.expected = expected
        self.found = found


def invalid(reason: str, section: str, offset: int | None, expected, found, *, advice: str = "") -> SessionError:
    """The refusal of a file for what it holds at one place, or, without an offset, as a whole."""
    place = section if offset is None else f"{section} at offset {offset}"
    text = f"{place}: expected {expected}, found {found}" + (f"; {advice}" if advice else "")
    return SessionError(
        "invalid", reason, text, section=section, offset=offset, expected=str(expected), found=str(found)
    )


def starts_like_session(start: bytes) -> bool:
    """Whether these first bytes are those of a session file of any version, sound, damaged or cut, even to nothing."""
    return START_MARK[:-1].startswith(start[: len(START_MARK) - 1])


def hex64(value: int) -> str:
    return f"{value:016x}"


# --- Records ---


Header = namedtuple("Header", HEADER_FIELDS)


def header_offset(field: str) -> int:
    """Byte of a header field in a file."""
    names = list(HEADER_FIELDS)
    return struct.calcsize("<" + "".join(HEADER_FIELDS[name] for name in names[: names.index(field)]))


class Identity(NamedTuple):
    """Fingerprints of the model and of the configuration that a session belongs to."""

    model: int
    config: int


class Extent(NamedTuple):
    """Where an array lies in the file, in place of the array itself; `size` counts elements."""

    offset: int
    size: int


class KvSource(Protocol):
    """One layer's K/V where it lives, read piece by piece into the block that is written."""

    header: KvHeader
    part_sizes: Sequence[int]  # bytes of k, v, k_scale, v_scale, pooled

    def read(self, part: int, offset: int, out: np.ndarray) -> None:
        """Fill `out` (uint8) with the bytes of a part from `offset` on."""


class KvSink(Protocol):
    """Five arrays' worth of room for what a restore reads: a layer's K/V, or the running state of one record."""

    part_sizes: Sequence[int]

    def write(self, part: int, offset: int, data: np.ndarray) -> None:
        """Take `data` (uint8, valid only during the call) as the bytes of a part from `offset` on."""


@dataclass(eq=False)
class Record:
    """Everything that folds a token prefix into fixed size: the live conversation, or a checkpoint of it.

    The five state arrays are uint8, or Extents where only their place in the file was asked for.
    """

    ids: np.ndarray | Extent  # int32 [T]
    images: list[tuple[int, int]] | Extent = field(default_factory=list)  # (start position, identity hash)
    gdn: np.ndarray | Extent = field(default_factory=lambda: np.empty(0, np.uint8))
    ple: np.ndarray | Extent = field(default_factory=lambda: np.empty(0, np.uint8))
    tails: np.ndarray | Extent = field(default_factory=lambda: np.empty(0, np.uint8))
    dead: np.ndarray | Extent = field(default_factory=lambda: np.empty(0, np.uint8))
    block_pos: np.ndarray | Extent = field(default_factory=lambda: np.empty(0, np.uint8))
    used: int = 0  # stamp of the last use
    pinned: bool = False  # of the run time, not stored
    stage_parts: Sequence = ()  # state on further devices, which a file cannot hold

    @property
    def n_tokens(self) -> int:
        return self.ids.size

    @property
    def n_images(self) -> int:
        return self.images.size if isinstance(self.images, Extent) else len(self.images)

    @property
    def state(self) -> tuple:
        """The five state arrays in the order of the file."""
        return tuple(getattr(self, name) for name in STATE_ARRAYS)


@dataclass(eq=False)
class KvLayer:
    """One layer's K/V; a KvSource when its parts are arrays."""

    header: KvHeader
    parts: tuple  # five uint8 arrays, or five Extents

    @property
    def part_sizes(self) -> tuple[int, ...]:
        return tuple(part.size for part in self.parts)

    def read(self, part: int, offset: int, out: np.ndarray) -> None:
        out[:] = self.parts[part][offset : offset + out.size]


@dataclass
class Unlisted:
    """What a look without a model counted and did not keep; without `looked_at` it ended there."""

    n_checkpoints: int = 0
    n_layers: int = 0
    state_bytes: int = 0
    kv_bytes: int = 0
    looked_at: bool = True


@dataclass(eq=False)
class Image:
    """All that a session file holds beside the identity."""

    geometry: Sequence[int]  # 18 values
    layer_lo: int
    layer_hi: int
    cvec: bool
    live: Record
    checkpoints: list[Record] = field(default_factory=list)
    kv: list[KvLayer] = field(default_factory=list)
    unlisted: Unlisted = field(default_factory=Unlisted)

    @property
    def records(self) -> list[Record]:
        """The live record and the checkpoints, in the order of the file."""
        return [self.live, *self.checkpoints]


@dataclass(frozen=True)
class Limits:
    """What a reader is ready to take; every field left alone is open."""

    max_file_bytes: int = OPEN
    max_tokens: int = OPEN
    max_checkpoints: int = OPEN
    max_kv_layers: int = OPEN
    max_state_bytes: tuple[int, ...] = (OPEN,) * len(STATE_ARRAYS)
    max_kv_bytes: Sequence[Sequence[int]] = ()  # five part sizes for each layer
    geometry: Sequence[int] | None = None
    layer_range: tuple[int, int] | None = None
    finite_state: bool = False  # whether every float32 of the state arrays must be a finite number

    def largest_file(self) -> int:
        """The size of the largest file that keeps to every other limit, or the given cap if that is smaller."""
        limits = (self.max_tokens, self.max_checkpoints, self.max_kv_layers, *self.max_state_bytes)
        if OPEN in limits or len(self.max_kv_bytes) < self.max_kv_layers:
            return self.max_file_bytes
        record = 16 + 20 * self.max_tokens + sum(8 + size for size in self.max_state_bytes) + 8
        layers = self.max_kv_bytes[: self.max_kv_layers]
        payload = LIVE_OFFSET - HEADER.size + record + 8 + self.max_checkpoints * record + 8
        payload += sum(KV_HEADER.size + sum(8 + size for size in parts) for parts in layers)
        return min(FRAME_BYTES + payload, self.max_file_bytes, OPEN)


# --- Estimates: how much memory and time a save or a restore may take ---


def read_peak_bytes(file_bytes: int) -> int:
    """RAM of a materializing read."""
    return min(file_bytes + BLOCK_BYTES + (file_bytes // BLOCK_BYTES + 1) * 4096 + MIB, OPEN)


def stream_peak_bytes(file_bytes: int, limits: Limits) -> int:
    """RAM of the first pass of a streaming restore: two blocks, the records, the ledger."""
    record = 20 * limits.max_tokens + sum(limits.max_state_bytes) + 64
    checkpoints = file_bytes if limits.max_checkpoints == OPEN else limits.max_checkpoints * record
    held = min(record + checkpoints, file_bytes)
    return min(2 * BLOCK_BYTES + MIB + held + (file_bytes // BLOCK_BYTES + 1) * 48, OPEN)


def save_peak_bytes(checkpoint_bytes: int, state_bytes: int, n_tokens: int, n_images: int, n_kv_layers: int) -> int:
    """RAM of a save; `checkpoint_bytes` is the size of the checkpoint that goes with it, 0 for none."""
    layers = n_kv_layers * (KV_SOURCE_BYTES + KV_BOOKKEEPING_BYTES)
    records = 2 * checkpoint_bytes + state_bytes + 4 * n_tokens + 16 * n_images
    return min(BLOCK_BYTES + MIB + records + layers, OPEN)


def deepest(checkpoints: Sequence[Record]) -> Record | None:
    """The checkpoint that a save takes: most tokens, the first of equals, among the pinned ones if there are any."""
    pinned = [checkpoint for checkpoint in checkpoints if checkpoint.pinned]
    return max(pinned or checkpoints, key=lambda checkpoint: checkpoint.n_tokens, default=None)
