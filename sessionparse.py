"""The structure of a session file taken apart: header, records and trailer, check by check in the order of the format.

It owns every check of what a file says of itself, in whatever way its bytes come; it knows no disk and no checksum of
the payload. Invariant: every count is held against the bytes left and the limits before anything is allocated.
Read next: sessionlayout.py for the records, sessionfile.py, which hashes what is read here.
"""

import enum
import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np

from cells import KvHeader
from plainhash import hash64
from sessionlayout import (
    COUNT,
    END_MARK,
    FLOAT_STATE,
    FRAME_BYTES,
    GEOMETRY,
    HEADER,
    IMAGE,
    KV_HEADER,
    KV_PARTS,
    LAYER_RANGE,
    LIVE_OFFSET,
    MIN_CHECKPOINT_BYTES,
    MIN_KV_LAYER_BYTES,
    OPEN,
    START_MARK,
    STATE_ARRAYS,
    TRAILER,
    VERSION,
    Extent,
    Header,
    Identity,
    Image,
    KvLayer,
    Limits,
    Record,
    SessionError,
    Unlisted,
    header_offset,
    hex64,
    invalid,
)

FINITE_BYTES = 1 << 18  # of state looked at in one step: within the processor's cache
_FOREIGN = (  # starts of files that are met in the place of session files
    (b"GGUF", "a GGUF model"),
    (b"qsgg", "a llama.cpp slot file"),
    (b"nsgg", "a llama.cpp session file"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "a gzip file"),
)


MOST_LISTED = 1 << 16  # checkpoints, and layers, that a look keeps: a file made to hurt must not fill the memory


class Source(Protocol):
    """A file's bytes in order; `fill` is asked for only where arrays are kept, `pieces` where floats are checked."""

    offset: int  # of the next byte
    size_bytes: int

    def take(self, size: int) -> bytes: ...

    def skip(self, size: int) -> None: ...

    def fill(self, out: np.ndarray) -> None: ...


class Keep(enum.IntEnum):
    """How much of a file becomes arrays; the rest is read past and leaves Extents."""

    LAYOUT = 0
    TOKENS = 1  # token ids and images
    STATE = 2  # the running state and the checkpoints' as well
    ALL = 3  # K/V as well


def check_size(size_bytes: int, limits: Limits) -> None:
    if size_bytes < FRAME_BYTES:
        advice = "not a session file, or cut off"
        raise invalid("too-small", "file size", 0, f"at least {FRAME_BYTES} bytes", size_bytes, advice=advice)
    if size_bytes > limits.largest_file():
        most = limits.largest_file()
        raise invalid("too-big", "file size", 0, f"at most the limit of {most} bytes", size_bytes)


def check_trailer(source: Source, payload_hash: int | None) -> int:
    """Hold the trailer against the hash of what was read, if it was; return the stored hash."""
    offset = source.offset
    stored, mark = TRAILER.unpack(source.take(TRAILER.size))
    if payload_hash is not None and stored != payload_hash:
        raise invalid(
            "payload-hash", "payload hash", offset, hex64(payload_hash), hex64(stored), advice="bytes were changed"
        )
    if mark != END_MARK:
        raise invalid("end-marker", "end marker", offset + COUNT.size, END_MARK, mark)
    return stored


def _wrong(reason: str, what: str, field: str, expected, found, advice: str = "") -> SessionError:
    return invalid(reason, what, header_offset(field), expected, found, advice=advice)


def read_header(source: Source, identity: Identity | None) -> Header:
    """The header, checked in the order of the format; any identity is taken when none is given."""
    raw = source.take(HEADER.size)
    header = Header._make(HEADER.unpack(raw))
    if header.magic != START_MARK:
        raise _foreign(raw)
    found = hash64(raw[: -COUNT.size])
    if header.hash != found:
        raise _wrong("header-hash", "header hash", "hash", hex64(found), hex64(header.hash))
    if header.version != VERSION:
        advice = "this reader knows no other version"
        raise _wrong("version", "format version", "version", VERSION, header.version, advice)
    if header.header_bytes != HEADER.size:
        raise _wrong("header-fields", "header size", "header_bytes", HEADER.size, header.header_bytes)
    for name in ("reserved_1", "reserved_2"):
        if reserved := getattr(header, name):
            raise _wrong("header-fields", "reserved header field", name, 0, hex64(reserved))
    if identity:
        _check_identity(header, identity)
    if header.payload_bytes != source.size_bytes - FRAME_BYTES:
        expected = source.size_bytes - FRAME_BYTES
        advice = f"the file has a size of {source.size_bytes} bytes: cut off, or something was appended"
        raise _wrong("size-mismatch", "payload length", "payload_bytes", expected, header.payload_bytes, advice)
    return header


def _check_identity(header: Header, identity: Identity) -> None:
    advice = "it was saved with another {}; only that one can go on with it"
    if header.model != identity.model:
        what = advice.format("model")
        raise _wrong("model", "model fingerprint", "model", hex64(identity.model), hex64(header.model), what)
    if header.config != identity.config:
        what = advice.format("configuration (backend, K/V format, context, rope, engine version)")
        raise _wrong("config", "config fingerprint", "config", hex64(identity.config), hex64(header.config), what)


def _foreign(raw: bytes) -> SessionError:
    """The refusal of a file that starts with something else, named where it is known."""
    what = next((name for start, name in _FOREIGN if raw.startswith(start)), "")
    if raw[8:10] == b'{"':
        what = "a safetensors file"
    elif raw[:7] == START_MARK[:7]:
        what = f"the start of a session file, but damaged or of layout {raw[7]}"
    elif not what and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in raw):
        what = "text"
    advice = "not a session file" + (f": it looks like {what}" if what else "")
    return invalid("magic", "magic", 0, START_MARK, raw[:8], advice=advice)


class Structure:
    """Takes a payload apart: every count is held against the bytes left and the limits before anything is allocated."""

    def __init__(self, source: Source, limits: Limits, keep: Keep, *, whole: bool = True):
        """A layout lists MOST_LISTED checkpoints and layers; of those behind them it is `whole`, or it ends there."""
        self._source = source
        self._whole = whole
        self._limits = limits
        self._keep = keep
        self._end = source.size_bytes - TRAILER.size

    def read(self) -> Image:
        geometry = self._fixed(GEOMETRY, "geometry")
        self._require("geometry", "geometry", HEADER.size, self._limits.geometry, geometry)
        layers = self._fixed(LAYER_RANGE, "layer range")
        self._require("layer-range", "layer range", HEADER.size + GEOMETRY.size, self._limits.layer_range, layers)
        (cvec,) = self._fixed(COUNT, "control vector flag")
        if cvec > 1:
            raise invalid("cvec-flag", "control vector flag", LIVE_OFFSET - COUNT.size, "0 or 1", cvec)
        image = Image(geometry, *layers, bool(cvec), self._record("live"))
        rest = image.unlisted
        n_checkpoints = self.count("checkpoint count", MIN_CHECKPOINT_BYTES, self._limits.max_checkpoints)
        rest.n_checkpoints = self._list(n_checkpoints, self._checkpoint, image.checkpoints, rest)
        if rest.looked_at:
            n_layers = self.count("K/V layer count", MIN_KV_LAYER_BYTES, self._limits.max_kv_layers)
            rest.n_layers = self._list(n_layers, self._layer, image.kv, rest)
        if not rest.looked_at:
            self._source.skip(self._left)
        if self._left:
            offset = self._source.offset
            raise invalid("payload-rest", "end of the payload", offset, "no bytes left", f"{self._left} bytes")
        return image

    def _list(self, count: int, read: Callable[[int], Record | KvLayer], kept: list, rest: Unlisted) -> int:
        """Read so many checkpoints or layers and keep them; returns how many are beyond what a layout lists."""
        n_kept = min(count, MOST_LISTED) if self._keep == Keep.LAYOUT else count
        kept.extend(read(i) for i in range(n_kept))
        rest.looked_at = self._whole or n_kept == count
        for i in range(n_kept, count if self._whole else n_kept):
            found = read(i)
            if isinstance(found, Record):
                rest.state_bytes += sum(array.size for array in found.state)
            else:
                rest.kv_bytes += sum(found.part_sizes)
        return count - n_kept

    @property
    def _left(self) -> int:
        return self._end - self._source.offset

    def _require(self, reason: str, section: str, offset: int, expected, found: tuple) -> None:
        if expected is not None and tuple(expected) != found:
            raise invalid(
                reason, section, offset, list(expected), list(found), advice="the session is of another model"
            )

    def _fixed(self, record: struct.Struct, section: str) -> tuple:
        if record.size > self._left:
            raise invalid("payload-short", section, self._source.offset, f"{record.size} bytes", f"{self._left} left")
        return record.unpack(self._source.take(record.size))

    def count(self, section: str, element_bytes: int, limit: int) -> int:
        """A count of elements that are still there to be read and that the caller is ready to take."""
        offset = self._source.offset
        (count,) = self._fixed(COUNT, section)
        most = self._left // element_bytes
        if count > most:
            raise invalid("count-payload", section, offset, f"a count of at most {most} in the bytes left", count)
        if count > limit:
            raise invalid("count-limit", section, offset, f"at most the limit of {limit}", count)
        return count

    def _array(self, count: int, dtype: str, kept_from: Keep) -> np.ndarray | Extent:
        extent = Extent(self._source.offset, count)
        if self._keep < kept_from:
            self._source.skip(count * np.dtype(dtype).itemsize)
            return extent
        array = np.empty(count, dtype)
        self._source.fill(array.view(np.uint8))
        return array

    def _floats(self, size: int, section: str) -> np.ndarray | Extent:
        """An array of float32 as bytes: one that is no number would spoil every answer after it."""
        extent, kept = Extent(self._source.offset, size), []
        carry = np.empty(0, np.uint8)  # of a number that lies in two pieces
        for piece in self._source.pieces(size):
            whole = np.concatenate([carry, piece]) if carry.size or self._keep >= Keep.STATE else piece
            numbers = whole.size // 4 * 4
            if not _all_finite(whole[:numbers]):
                raise invalid("not-finite", section, extent.offset, "finite numbers", "infinity or not a number")
            carry = whole[numbers:].copy()
            if self._keep >= Keep.STATE:
                kept.append(whole[:numbers])
        return np.concatenate([*kept, carry]) if self._keep >= Keep.STATE else extent

    def token_ids(self, name: str) -> np.ndarray | Extent:
        """The ids with which a record starts."""
        return self._array(self.count(f"token ids of {name}", 4, self._limits.max_tokens), "<i4", Keep.TOKENS)

    def _record(self, name: str) -> Record:
        limits = self._limits
        ids = self.token_ids(name)
        images = self._images(self.count(f"images of {name}", IMAGE.size, limits.max_tokens))
        state = []
        for array, most in zip(STATE_ARRAYS, limits.max_state_bytes, strict=True):
            size = self.count(f"{array} of {name}", 1, most)
            if limits.finite_state and array in FLOAT_STATE:
                state.append(self._floats(size, f"{array} of {name}"))
            else:
                state.append(self._array(size, "u1", Keep.STATE))
        (used,) = self._fixed(COUNT, f"last use of {name}")
        return Record(ids, images, *state, used)

    def _checkpoint(self, index: int) -> Record:
        return self._record(f"checkpoint {index}")

    def _images(self, count: int) -> list[tuple[int, int]] | Extent:
        if self._keep < Keep.TOKENS:
            return self._array(count, "V16", Keep.TOKENS)
        return list(IMAGE.iter_unpack(self._source.take(count * IMAGE.size)))

    def _layer(self, index: int) -> KvLayer:
        section = f"K/V layer {index}"
        offset = self._source.offset
        header = KvHeader._make(self._fixed(KV_HEADER, f"header of {section}"))
        if not -(1 << 31) <= header.format < 1 << 31:
            raise invalid("kv-format", f"format of {section}", offset, "a 32-bit value", header.format)
        limits = self._limits.max_kv_bytes
        limit = limits[index] if index < len(limits) else (OPEN,) * len(KV_PARTS)
        parts = []
        for name, most in zip(KV_PARTS, limit, strict=True):
            parts.append(self._array(self.count(f"{name} of {section}", 1, most), "u1", Keep.ALL))
        return KvLayer(header, tuple(parts))


def _all_finite(data: np.ndarray) -> bool:
    """Whether bytes hold finite float32 numbers alone; by pieces that stay in the cache, as they may lie unaligned."""
    return all(
        np.isfinite(data[start : start + FINITE_BYTES].copy().view("<f4")).all()
        for start in range(0, data.size, FINITE_BYTES)
    )
