"""The layout of a store file: what it says of itself, where its segments and states lie, and how both are named.

A store file holds some pieces of one conversation. A segment is the cells of the tokens [256 i, 256 (i + 1)), or of
fewer at the end; where another piece has the first of these, it may leave them out. A state is what folds all tokens
before a position. Both are named by the key of the full segments before them (`parent`) and by the ids behind those,
which stand in the file.

The parts of a segment follow each other without a gap: for each attention layer in order, then for the draft layer
where its cells were computed, K codes, V codes, K scales, V scales and pooled index keys. The pools keep cells in pages
of 4, so each part of a segment is one range of a pool's bytes: from page 64 i + s, where s pages are left out, up to
page 64 i + ceil(n / 4); of the pooled keys from row 64 i + s up to row 64 i + n // 4. The parts of a state are gdn,
ple, tails, dead and block_pos. `Shape` gives the bytes of a page and of a row of each layer, and of each state array;
every offset follows from these and the counts.

It owns every number of the format, the keys and the one exception; it touches no file. Invariant: a head that was
parsed is whole, its hash was right, and every range that it speaks of lies in a file of the size that it gives.
`man/strata-store.5` is the same as a table. Read next: storefile.py, which writes and reads such files.
"""

import functools
import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import blockfile
from cells import PAGE

START_MARK = b"STRSTOR\x01"
END_MARK = b"STRSTEN\x01"
VERSION = 1
HEADER = struct.Struct("<8sII32sQQIIIIII5Q")
HASH_BYTES = 32  # of the header and the table, behind the header
LAYER = struct.Struct("<5I")
SEGMENT = struct.Struct("<16sIHBB")
STATE = struct.Struct("<16sIIQ")
CHECKSUM = struct.Struct("<Q")

SEGMENT_TOKENS = 256
KEY_BYTES = 16
IDENTITY_BYTES = 32
ID_BYTES = 4
MAX_LABEL_BYTES = 512
DRAFT = 1  # the flag of a file whose last layer is the draft layer, and of a segment that holds its cells
PARTS = ("k", "v", "k_scale", "v_scale", "pooled")
STATE_PARTS = ("gdn", "ple", "tails", "dead", "block_pos")
TURN, ROOT = 0, 1  # kinds of states: the second is the end of a system prompt
MASK64 = (1 << 64) - 1


class StoreError(Exception):
    """A store file was refused or could not be written or read, or there is no room for it.

    `kind` is invalid, storage, memory or io; `reason` a short code, "gone" where nothing has the name any more. `path`
    is the file, `part` the place in it. Segments from number `first_bad` on, and all states, cannot be trusted.
    """

    def __init__(self, kind: str, reason: str, path: str, text: str, *, part: str = "", first_bad: int = 0):
        super().__init__(f"{path}: {text}")
        self.kind, self.reason, self.path, self.part, self.first_bad = kind, reason, path, part, first_bad

    @property
    def is_damage(self) -> bool:
        """Whether the file's own bytes are wrong, which reading it once more does not mend."""
        return self.kind == "invalid" and self.reason not in ("gone", "changed", "version", "plain", "shape")


# --- Keys ---


def root_key(identity: bytes) -> bytes:
    """The parent of every first segment."""
    return hashlib.blake2b(identity, digest_size=KEY_BYTES).digest()


def child_key(parent: bytes, ids: bytes) -> bytes:
    """The name of a segment: that of the one before it and its own ids, int32, as bytes."""
    return hashlib.blake2b(parent + ids, digest_size=KEY_BYTES).digest()


def id_bytes(ids: np.ndarray) -> bytes:
    """Token ids as they stand in files."""
    return np.ascontiguousarray(ids, "<i4").tobytes()


# --- Records ---


class Shape(NamedTuple):
    """All that decides how many bytes cells and states take."""

    layers: tuple[tuple[int, ...], ...]  # of each: bytes of a page of k, v, k_scale, v_scale, and of a row of pooled
    has_draft: bool  # whether the last one is the draft layer
    state_sizes: tuple[int, ...]  # of the five arrays; all 0 where a model folds nothing

    @classmethod
    def of(cls, windows, has_draft: bool, state_sizes: Sequence[int]) -> "Shape":
        """The shape behind every layer's window of at least one token (`Cache.windows`, or layers of an image)."""
        layers = []
        for window in windows:
            pages, rows = window.header[1] // PAGE, window.header[5]
            counts = (pages, pages, pages, pages, rows)
            layers.append(tuple(size // n if n else 0 for size, n in zip(window.part_sizes, counts, strict=True)))
        return cls(tuple(layers), has_draft, tuple(state_sizes))

    @property
    def state_bytes(self) -> int:
        return sum(self.state_sizes)

    @property
    def trunk(self) -> tuple[tuple[int, ...], ...]:
        """The attention layers, without the draft layer."""
        return self.layers[:-1] if self.has_draft else self.layers

    def rates(self, has_draft: bool) -> tuple[int, int]:
        """Bytes of a page and of a row of all layers of a segment."""
        return _rates(self.layers if has_draft else self.trunk)

    def takes(self, other: "Shape") -> bool:
        """Whether pools and states of this shape can be filled from a file of another; either may lack the draft."""
        same = self.trunk == other.trunk and self.state_sizes == other.state_sizes
        return same and (not (self.has_draft and other.has_draft) or self.layers[-1] == other.layers[-1])


@functools.lru_cache(maxsize=64)  # files of one model have one shape, and there may be ten thousand
def _rates(layers: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    return sum(sum(units[:-1]) for units in layers), sum(units[-1] for units in layers)


def _counts(n_tokens: int, n_skipped: int) -> tuple[int, int]:
    """Pages and rows of a segment."""
    return -(-n_tokens // PAGE) - n_skipped // PAGE, n_tokens // PAGE - n_skipped // PAGE


def _size(segment: "Segment", rates: tuple[int, int]) -> int:
    pages, rows = _counts(segment.n_tokens, segment.n_skipped)
    return pages * rates[0] + rows * rates[1]


class Part(NamedTuple):
    """One part of a segment: `size` bytes of part `part` of layer `layer`'s pool, from byte `pool_offset` of it."""

    layer: int
    part: int
    pool_offset: int
    size: int


class Segment(NamedTuple):
    """The cells of up to 256 tokens, from token 256 `index` on."""

    parent: bytes  # key of the segment before it
    index: int
    ids: bytes  # int32
    has_draft: bool  # whether the draft layer's cells were computed and are there
    n_skipped: int = 0  # tokens at its start, whole pages of them, whose cells are in another piece

    @property
    def start(self) -> int:
        return self.index * SEGMENT_TOKENS

    @property
    def n_tokens(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def end(self) -> int:
        return self.start + self.n_tokens

    @property
    def is_full(self) -> bool:
        return self.n_tokens == SEGMENT_TOKENS

    @property
    def key(self) -> bytes:
        return child_key(self.parent, self.ids)

    def parts(self, shape: Shape) -> Iterator[Part]:
        """Where its bytes belong in the pools, in the order of the file."""
        pages, rows = _counts(self.n_tokens, self.n_skipped)
        counts, first = (pages, pages, pages, pages, rows), (self.start + self.n_skipped) // PAGE
        for layer, units in enumerate(shape.layers if self.has_draft else shape.trunk):
            for part, (n, unit) in enumerate(zip(counts, units, strict=True)):
                yield Part(layer, part, first * unit, n * unit)

    def size_bytes(self, shape: Shape) -> int:
        return _size(self, shape.rates(self.has_draft))


class State(NamedTuple):
    """What folds the tokens before `position`; `ids` are those behind the last full segment before it."""

    parent: bytes  # key of that segment
    position: int
    ids: bytes  # int32
    kind: int  # TURN or ROOT
    used: int = 0  # stamp of its last use in the engine that wrote it, as a session file has it

    @property
    def start(self) -> int:
        """Where its ids begin."""
        return self.position - len(self.ids) // ID_BYTES

    @property
    def end(self) -> int:
        return self.position


class Head(NamedTuple):
    """What a file says of itself; segments and then states lie in the payload in this order."""

    identity: bytes
    shape: Shape
    segments: tuple[Segment, ...]
    states: tuple[State, ...]
    label: str = ""

    @property
    def head_bytes(self) -> int:
        n_ids = sum(len(piece.ids) for piece in (*self.segments, *self.states))
        records = LAYER.size * len(self.shape.layers) + SEGMENT.size * len(self.segments)
        records += STATE.size * len(self.states)
        return HEADER.size + HASH_BYTES + records + n_ids + len(self.label.encode())

    @property
    def sizes(self) -> list[int]:
        """Bytes of every segment and then of every state."""
        rates = self.shape.rates(False), self.shape.rates(True)
        sizes = [_size(segment, rates[segment.has_draft]) for segment in self.segments]
        return sizes + [self.shape.state_bytes] * len(self.states)

    @property
    def payload_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def file_bytes(self) -> int:
        return file_bytes(self.head_bytes + self.payload_bytes + len(END_MARK))

    @property
    def offsets(self) -> list[int]:
        """Where every segment and then every state begins in the stream (see `file_bytes`)."""
        return list(itertools.accumulate(self.sizes, initial=self.head_bytes))[:-1]

    @property
    def n_tokens(self) -> int:
        """Where the conversation ends as far as this file goes."""
        return max(piece.end for piece in (*self.segments, *self.states))


# --- Blocks: the stream of head, payload and end mark, cut into blocks of the file that each end in a checksum ---


def data_bytes() -> int:
    """How much of the stream a whole block holds."""
    return blockfile.BLOCK_BYTES - CHECKSUM.size


def file_bytes(stream_bytes: int) -> int:
    return stream_bytes + -(-stream_bytes // data_bytes()) * CHECKSUM.size


def block_seed(head_hash: bytes, number: int) -> int:
    """The seed of a block's checksum: a block of another file, or of another place in this one, does not pass."""
    return int.from_bytes(head_hash[:8], "little") + number & MASK64


# --- The head as bytes ---


def pack_head(head: Head) -> bytes:
    """Header, hash and table. Raises ValueError for what no file may hold."""
    label = head.label.encode()
    pieces = (*head.segments, *head.states)
    if not pieces:
        raise ValueError("a store file holds at least one piece")
    if len(label) > MAX_LABEL_BYTES:
        raise ValueError(f"a label of {len(label)} bytes is longer than {MAX_LABEL_BYTES}")
    if head.head_bytes > data_bytes():
        raise ValueError(f"a table of {head.head_bytes} bytes does not fit into a block: too many tokens for one file")
    table = b"".join(
        (
            *(LAYER.pack(*units) for units in head.shape.layers),
            *(SEGMENT.pack(s.parent, s.index, s.n_tokens, DRAFT * s.has_draft, s.n_skipped // PAGE)
              for s in head.segments),
            *(STATE.pack(s.parent, s.position, s.kind, s.used) for s in head.states),
            *(piece.ids for piece in pieces),
            label,
        )
    )
    counts = len(head.shape.layers), len(head.segments), len(head.states), len(label)
    frame = START_MARK, VERSION, HEADER.size, head.identity, len(table), head.payload_bytes
    header = HEADER.pack(*frame, *counts, DRAFT * head.shape.has_draft, 0, *head.shape.state_sizes)
    return header + head_hash(header, table) + table


def head_hash(header: bytes, table: bytes) -> bytes:
    return hashlib.blake2b(header + table, digest_size=HASH_BYTES).digest()


class Header(NamedTuple):
    magic: bytes
    version: int
    header_bytes: int
    identity: bytes
    table_bytes: int
    payload_bytes: int
    layers: int
    segments: int
    states: int
    label_bytes: int
    flags: int
    reserved: int
    gdn: int
    ple: int
    tails: int
    dead: int
    block_pos: int


def starts_like_store(start: bytes) -> bool:
    """Whether these first bytes are those of a store file of any version, whole or cut, even to nothing."""
    return START_MARK[:-1].startswith(start[: len(START_MARK) - 1])


def parse_header(raw: bytes, size_bytes: int, path: str) -> Header:
    """The first HEADER.size bytes of a file of `size_bytes`, every count held against what there is."""
    least = HEADER.size + HASH_BYTES + len(END_MARK) + CHECKSUM.size
    if len(raw) < HEADER.size or size_bytes < least:
        raise _refusal(path, "size", f"a file of {size_bytes} bytes is cut off: the least is {least}")
    header = Header._make(HEADER.unpack_from(raw))
    if header.magic != START_MARK:
        raise _refusal(path, "magic", f"magic: expected {START_MARK}, found {header.magic}")
    if header.version != VERSION:
        text = f"version: expected {VERSION}, found {header.version}; this reader knows no other"
        raise _refusal(path, "version", text)
    if header.header_bytes != HEADER.size or header.reserved or header.flags not in (0, DRAFT):
        raise _refusal(path, "header", "header: a field has a value that this version does not know")
    if header.label_bytes > MAX_LABEL_BYTES:
        raise _refusal(path, "label", f"label: {header.label_bytes} bytes, at most {MAX_LABEL_BYTES}")
    records = LAYER.size * header.layers + SEGMENT.size * header.segments + STATE.size * header.states
    most = min(data_bytes(), size_bytes) - HEADER.size - HASH_BYTES
    if not records + header.label_bytes <= header.table_bytes <= most:
        text = f"table: {header.table_bytes} bytes, expected {records + header.label_bytes} to {most}"
        raise _refusal(path, "table", text)
    stream = HEADER.size + HASH_BYTES + header.table_bytes + header.payload_bytes + len(END_MARK)
    if file_bytes(stream) != size_bytes:
        text = f"file size: expected {file_bytes(stream)} bytes, found {size_bytes}: cut off, or something was appended"
        raise _refusal(path, "size", text)
    return header


def parse_head(raw: bytes, header: Header, path: str) -> Head:
    """Header, hash and table, `raw` being at least these; every part of the payload lies in the file."""
    end = HEADER.size + HASH_BYTES + header.table_bytes
    table = raw[HEADER.size + HASH_BYTES : end]
    if head_hash(raw[: HEADER.size], table) != raw[HEADER.size : HEADER.size + HASH_BYTES]:
        raise _refusal(path, "hash", "table: its hash does not match")
    has_draft = bool(header.flags & DRAFT)
    if has_draft and not header.layers:
        raise _refusal(path, "layers", "layers: a draft layer is announced, and there is no layer")
    at_segments = LAYER.size * header.layers
    at_states = at_segments + SEGMENT.size * header.segments
    at = at_states + STATE.size * header.states
    shape = Shape(tuple(LAYER.iter_unpack(table[:at_segments])), has_draft, header[-len(STATE_PARTS) :])
    root, end, segments, states = root_key(header.identity), len(table) - header.label_bytes, [], []

    def ids(n_tokens: int) -> bytes:
        nonlocal at
        at += n_tokens * ID_BYTES
        if at > end:
            raise _refusal(path, "ids", "ids: the table is too short for the tokens that it counts")
        return table[at - n_tokens * ID_BYTES : at]

    for parent, index, n_tokens, flags, n_pages in SEGMENT.iter_unpack(table[at_segments:at_states]):
        name, n_skipped = f"segment {len(segments)}", n_pages * PAGE
        if not n_skipped < n_tokens <= SEGMENT_TOKENS or flags not in (0, DRAFT) or (flags and not has_draft):
            text = f"{name}: {n_tokens} tokens, {n_skipped} of them elsewhere, with flags {flags}"
            raise _refusal(path, "segment", text)
        if not index and parent != root:
            raise _refusal(path, "segment", f"{name}: a first segment of another identity")
        segments.append(Segment(parent, index, ids(n_tokens), bool(flags), n_skipped))
    for parent, position, kind, used in STATE.iter_unpack(table[at_states : at_states + STATE.size * header.states]):
        name = f"state {len(states)}"
        if not position or kind not in (TURN, ROOT):
            raise _refusal(path, "state", f"{name}: position {position} with kind {kind}")
        if position < SEGMENT_TOKENS and parent != root:
            raise _refusal(path, "state", f"{name}: a state in the first segment of another identity")
        states.append(State(parent, position, ids(position % SEGMENT_TOKENS), kind, used))
    if at != end:
        raise _refusal(path, "ids", f"ids: {end - at} bytes of the table belong to nothing")
    if not segments and not states:
        raise _refusal(path, "empty", "table: it holds neither a segment nor a state")
    try:
        label = table[end:].decode()
    except UnicodeDecodeError as error:
        raise _refusal(path, "label", "label: not UTF-8") from error
    head = Head(header.identity, shape, tuple(segments), tuple(states), label)
    if head.payload_bytes != header.payload_bytes:
        text = f"payload: the table speaks of {head.payload_bytes} bytes, the header of {header.payload_bytes}"
        raise _refusal(path, "payload", text)
    return head


def _refusal(path: str, reason: str, text: str) -> StoreError:
    return StoreError("invalid", reason, path, text, part=text.partition(":")[0])
