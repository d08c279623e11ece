"""Session files: one conversation's tokens, running state, checkpoint and K/V written to one checksummed file and read.

It owns writing, the materializing and the two-pass reading, and looking into files without a model; it knows nothing
of models, HTTP and terminals, and gets K/V through the protocols KvSource and KvSink. Invariant: no byte of a file
reaches a sink before it was vouched for, and a failed write leaves the destination as it was.
Read next: sessionparse.py for the structure, blockfile.py for the disk, checksum.py for the checksums.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

import blockfile
from blockfile import BLOCK_BYTES, BlockReader, BlockWriter, Check, NotPlainFile, Phase, Progress, failure_kind
from plainhash import hash64
from sessioninfo import Peek, SessionInfo
from sessionlayout import (
    COUNT,
    END_MARK,
    FRAME_BYTES,
    GEOMETRY,
    HEADER,
    IMAGE,
    KV_HEADER,
    KV_PARTS,
    LAYER_RANGE,
    LIVE_OFFSET,
    OPEN,
    START_MARK,
    STATE_ARRAYS,
    TRAILER,
    VERSION,
    Extent,
    Header,
    Identity,
    Image,
    KvSink,
    KvSource,
    Limits,
    Record,
    SessionError,
    hex64,
    invalid,
    read_peak_bytes,
    starts_like_session,
    stream_peak_bytes,
)
from sessionparse import Keep, Structure, check_size, check_trailer, read_header

if TYPE_CHECKING:
    import checksum


# --- Checksums: the kernels are loaded when the first byte is hashed, as who only looks into files needs none ---


def _payload_hash() -> "checksum.Hash64":
    import checksum

    return checksum.Hash64()


def _crc32c(block: np.ndarray) -> int:
    import checksum

    return checksum.crc32c(block)


# --- Failures of the system ---


@contextlib.contextmanager
def _system_failures(step: Callable[[], str], writer: BlockWriter | None = None) -> Iterator[None]:
    """Turn what the system refuses into a SessionError whose kind follows from the error number."""
    try:
        yield
    except NotPlainFile as error:
        raise SessionError("invalid", error.reason, f"not a session file: {error}") from error
    except MemoryError as error:
        raise SessionError("memory", "memory", f"{step()}: not enough memory") from error
    except OSError as error:
        text = f"{step()}: {error.strerror or error}"
        if writer and writer.published:
            text += "; the new file has already replaced the old one"
        if writer and writer.leftover:
            text += f"; {writer.leftover}"
        raise SessionError(failure_kind(error), "os", text, published=bool(writer and writer.published)) from error


# --- Writing ---


def write_session(
    path: str,
    image: Image,
    identity: Identity,
    sources: Sequence[KvSource] | None = None,
    *,
    reserve_bytes: int = 0,
    durable: bool = True,
    progress: Progress | None = None,
    phase: Phase | None = None,
    warn: Callable[[str], None] | None = None,
) -> int:
    """Write a session to `path` and return the file's size; until it is complete an older file there stays.

    K/V comes from the image or, piece by piece, from `sources`, never from both. `reserve_bytes` of the disk must stay
    free. `warn` is told when the folder cannot be flushed, so that the new name may not survive a power cut.
    """
    path = os.fspath(path)
    _refuse_unwritable(image, sources)
    layers = sources or image.kv
    size_bytes = session_bytes(image, layers)
    if size_bytes > OPEN:
        raise SessionError("invalid", "too-large", f"the file would have {size_bytes} bytes, more than 64 bits count")
    _refuse_foreign(path)
    if reserve_bytes > 0:
        _require_disk_space(path, size_bytes, reserve_bytes)
    with _system_failures(lambda: "opening the file"):
        writer = BlockWriter(path, size_bytes, progress)
    with _system_failures(lambda: writer.step, writer), writer:
        _write_contents(_Output(writer), image, identity, layers)
        writer.publish(durable=durable, phase=phase)
    if not writer.folder_flushed and warn:
        warn("folder flush unsupported: the new file's name may not survive a power cut")
    return size_bytes


def _refuse_unwritable(image: Image, sources: Sequence[KvSource] | None) -> None:
    arrays = [array for record in image.records for array in (record.ids, record.images, *record.state)]
    assert not any(isinstance(array, Extent) for array in arrays), "an Extent has no bytes that could be written"
    if any(record.stage_parts for record in image.records):
        raise SessionError(
            "invalid", "layer-split", "state that is split over layers of several devices cannot be saved"
        )
    if image.kv and sources:
        raise SessionError("invalid", "kv-twice", "K/V was given in the image and as sources as well")


def may_replace(path: str) -> bool:
    """Whether a name may be saved to or removed: it is free, a link, or that of a session file, or of an empty one.

    Pipes, sockets and devices stay: a SAVE as root to /dev/null would take it from every other program.

    Raises OSError where the file cannot be looked at, or the file system cannot have such a name.
    """
    try:
        start = blockfile.first_bytes(path, len(START_MARK))
    except NotPlainFile as found:
        # A link gives its name away, and nothing of what it leads to; the system itself refuses folders.
        return found.reason in ("symlink", "folder")
    return start is None or starts_like_session(start)


def _refuse_foreign(path: str) -> None:
    with _system_failures(lambda: "looking at the file that is to be replaced"):
        if not may_replace(path):
            text = "the file of this name is no session file and stays: save under another name, or move it away"
            raise SessionError("invalid", "foreign", text)


def session_bytes(image: Image, layers: Sequence[KvSource]) -> int:
    """Size of the file that `write_session` makes of an image and the K/V of these layers."""
    return FRAME_BYTES + _payload_bytes(image, layers)


def _payload_bytes(image: Image, layers: Sequence[KvSource]) -> int:
    size = LIVE_OFFSET - HEADER.size + 2 * COUNT.size
    for record in image.records:
        arrays = sum(COUNT.size + array.size for array in record.state)
        size += 3 * COUNT.size + 4 * record.n_tokens + IMAGE.size * record.n_images + arrays
    return size + sum(KV_HEADER.size + sum(COUNT.size + part for part in layer.part_sizes) for layer in layers)


def _require_disk_space(path: str, size_bytes: int, reserve_bytes: int) -> None:
    """A look ahead, not a reservation; a file that is about to be replaced does not count as free."""
    folder = blockfile.free_space_folder(path)
    with _system_failures(lambda: f"asking for the free disk space of '{folder}'"):
        free = blockfile.system.free_bytes(folder)
    if free < size_bytes or free - size_bytes < reserve_bytes:
        raise SessionError(
            "storage",
            "disk-space",
            f"not enough disk space in '{folder}': {free} bytes are free, the file takes {size_bytes} "
            f"and {reserve_bytes} must stay free",
        )


class _Output:
    """Bytes into the blocks of the file that is written, hashed on their way."""

    def __init__(self, writer: BlockWriter):
        self._writer = writer
        self.hash = _payload_hash()

    def pull(self, size: int, read: Callable[[int, np.ndarray], None]) -> None:
        """Have `read(offset, out)` fill the next `size` bytes, in pieces that fit the blocks."""
        offset = 0
        while offset < size:
            out = self._writer.space()[: size - offset]
            read(offset, out)
            self.hash.update(out)
            self._writer.advance(out.size)
            offset += out.size

    def put(self, data) -> None:
        """Copy bytes, or a uint8 array."""
        data = np.frombuffer(data, np.uint8)

        def copy(offset: int, out: np.ndarray) -> None:
            out[:] = data[offset : offset + out.size]

        self.pull(data.size, copy)

    def put_counted(self, array: np.ndarray) -> None:
        self.put(COUNT.pack(array.size))
        self.put(np.ascontiguousarray(array))


def _write_contents(output: _Output, image: Image, identity: Identity, layers: Sequence[KvSource]) -> None:
    """Header, payload and trailer, whose hash is that of the payload alone."""
    header = Header(START_MARK, VERSION, HEADER.size, *identity, _payload_bytes(image, layers), 0, 0, 0)
    head = HEADER.pack(*header)[: -COUNT.size]
    output.put(head + COUNT.pack(hash64(head)))
    output.hash = _payload_hash()
    output.put(GEOMETRY.pack(*image.geometry))
    output.put(LAYER_RANGE.pack(image.layer_lo, image.layer_hi) + COUNT.pack(bool(image.cvec)))
    _write_record(output, image.live)
    output.put(COUNT.pack(len(image.checkpoints)))
    for checkpoint in image.checkpoints:
        _write_record(output, checkpoint)
    output.put(COUNT.pack(len(layers)))
    for layer in layers:
        _write_layer(output, layer)
    output.put(TRAILER.pack(output.hash.digest(), END_MARK))


def _write_record(output: _Output, record: Record) -> None:
    output.put(COUNT.pack(record.n_tokens))
    output.put(np.ascontiguousarray(record.ids, "<i4"))
    output.put(COUNT.pack(record.n_images) + b"".join(IMAGE.pack(*image) for image in record.images))
    for array in record.state:
        output.put_counted(array)
    output.put(COUNT.pack(record.used))


def _write_layer(output: _Output, layer: KvSource) -> None:
    output.put(KV_HEADER.pack(*layer.header))
    for part, size in enumerate(layer.part_sizes):
        output.put(COUNT.pack(size))

        def read(offset: int, out: np.ndarray, part=part) -> None:
            try:
                layer.read(part, offset, out)
            except MemoryError:
                raise
            except Exception as error:  # whatever a pool raises, the file cannot be written
                raise SessionError("io", "source", str(error)) from error

        output.pull(size, read)


# --- Reading: sources of bytes ---


class _Stream:
    """A file's bytes in order, block by block; the payload is hashed as it arrives, and `note` sees every block."""

    def __init__(self, reader: BlockReader, progress: Progress | None, note: Check | None = None):
        self.offset = 0
        self.size_bytes = reader.size_bytes
        self.hash = _payload_hash()
        self._reader = reader
        self._progress = progress
        self._note = note
        self._block = np.empty(0, np.uint8)
        self._end = 0  # file offset of the end of the present block

    def pieces(self, size: int) -> Iterator[np.ndarray]:
        """The next `size` bytes as views, each valid until the next one is asked for."""
        end = self.offset + size
        while self.offset < end:
            if self.offset == self._end:
                self._next_block()
            start = self.offset - (self._end - self._block.size)
            piece = self._block[start : start + end - self.offset]
            self.offset += piece.size
            yield piece

    def _next_block(self) -> None:
        start = self._end
        self._block = self._reader.next_block()
        self._end += self._block.size
        if self._note:
            self._note(self._block)
        payload = self._block[max(0, HEADER.size - start) : max(0, self.size_bytes - TRAILER.size - start)]
        self.hash.update(payload)
        if self._progress:
            self._progress(self._end, self.size_bytes)

    def take(self, size: int) -> bytes:
        return b"".join(piece.tobytes() for piece in self.pieces(size))

    def fill(self, out: np.ndarray) -> None:
        filled = 0
        for piece in self.pieces(out.size):
            out[filled : filled + piece.size] = piece
            filled += piece.size

    def skip(self, size: int) -> None:
        for _ in self.pieces(size):
            pass


class _Seeker:
    """A file's bytes by position, for reading the structure alone."""

    def __init__(self, reader: BlockReader):
        self.offset = 0
        self.size_bytes = reader.size_bytes
        self._reader = reader

    def take(self, size: int) -> bytes:
        data = self._reader.read_at(self.offset, size)
        self.offset += size
        return data

    def fill(self, out: np.ndarray) -> None:
        out[:] = np.frombuffer(self.take(out.size), np.uint8)

    def skip(self, size: int) -> None:
        self.offset += size


# --- Reading: whole files ---


Admission = Callable[[int], str | None]  # is told the RAM that a reading needs; returns why it cannot have it


def _read_all(
    reader: BlockReader,
    identity: Identity | None,
    limits: Limits,
    keep: Keep,
    *,
    admit: Admission | None = None,
    need_bytes: int = 0,
    progress: Progress | None = None,
    ledger: list[int] | None = None,
) -> tuple[Header, Image, int]:
    """Read a whole file, check by check in the order of the format; return header, image and payload hash.

    A `ledger` gets the CRC-32C of every block, and the page cache is kept for the second reading that will need it.
    """
    check_size(reader.size_bytes, limits)
    reader.start(last=ledger is None)
    note = None if ledger is None else lambda block: ledger.append(_crc32c(block))
    stream = _Stream(reader, progress, note)
    header = read_header(stream, identity)
    refusal = admit(need_bytes) if admit else None
    if refusal:
        raise SessionError("memory", "admit", refusal)
    image = Structure(stream, limits, keep).read()
    return header, image, check_trailer(stream, stream.hash.digest())


def _reading() -> str:
    return "reading the file"


def read_session(
    path: str,
    identity: Identity | None,
    limits: Limits,
    *,
    admit: Admission | None = None,
    progress: Progress | None = None,
) -> Image:
    """Read a whole session into memory; nothing is returned of a file that fails any check."""
    with _system_failures(_reading), BlockReader(os.fspath(path)) as reader:
        need_bytes = read_peak_bytes(reader.size_bytes)
        return _read_all(reader, identity, limits, Keep.ALL, admit=admit, need_bytes=need_bytes, progress=progress)[1]


class SessionReader:
    """A session restored in two passes of one open file, so that K/V never has to lie in memory beside the pools.

    Entering it is pass 1: everything is read and checked, K/V is dropped and leaves Extents in `image`; with
    `keep_state` false the five state arrays of every record too. The caller then holds the image against its geometry,
    makes room, and calls `apply`, which is pass 2. `touched` tells whether a sink has been called: an error before
    that is a clean refusal, an error after it leaves the sinks half written.
    """

    def __init__(
        self,
        path: str,
        identity: Identity | None,
        limits: Limits,
        *,
        admit: Admission | None = None,
        progress: Progress | None = None,
        keep_state: bool = True,
    ):
        self._path = os.fspath(path)
        self._identity = identity
        self._limits = limits
        self._admit = admit
        self._progress = progress
        self._keep = Keep.STATE if keep_state else Keep.TOKENS
        self._ledger: list[int] = []
        self.touched = False

    def __enter__(self) -> "SessionReader":
        with _system_failures(_reading), contextlib.ExitStack() as undo:
            self._reader = undo.enter_context(BlockReader(self._path))
            self.size_bytes = self._reader.size_bytes
            _, self.image, self._payload_hash = _read_all(
                self._reader,
                self._identity,
                self._limits,
                self._keep,
                admit=self._admit,
                need_bytes=stream_peak_bytes(self.size_bytes, self._limits),
                progress=self._progress,
                ledger=self._ledger,
            )
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        with _system_failures(_reading):
            self._undo.close()

    @property
    def part_sizes(self) -> list[tuple[int, ...]]:
        """The five part sizes of every K/V layer."""
        return [layer.part_sizes for layer in self.image.kv]

    def apply(
        self,
        sinks: Sequence[KvSink],
        record_sinks: Sequence[KvSink] = (),
        *,
        progress: Progress | None = None,
    ) -> None:
        """Read the file again and hand every K/V part to its layer's sink, in order, at most a block at a time.

        Without `keep_state` the state arrays go to `record_sinks`: one for the live record, then one a checkpoint.
        Every block is held against the first pass before any of its bytes is handed on.
        """
        targets = self._targets(sinks, record_sinks)
        with _system_failures(_reading):
            found = self._reader.current_size()
            if found != self.size_bytes:
                raise self._changed("file size", 0, self.size_bytes, found)
            self._reader.start(last=True, check=self._voucher())
            stream = _Stream(self._reader, progress)
            for extent, sink, part in targets:
                stream.skip(extent.offset - stream.offset)
                self._feed(stream.pieces(extent.size), sink, part)
            stream.skip(self.size_bytes - TRAILER.size - stream.offset)
            digest = stream.hash.digest()
            stored, _ = TRAILER.unpack(stream.take(TRAILER.size))
        if not digest == stored == self._payload_hash:
            raise self._changed("payload hash", stream.offset - TRAILER.size, hex64(self._payload_hash), hex64(digest))

    def _targets(self, sinks: Sequence[KvSink], record_sinks: Sequence[KvSink]) -> list[tuple[Extent, KvSink, int]]:
        """What goes where, in the order of the file, after every size was compared with its sink's."""
        records = [] if self._keep >= Keep.STATE else [record.state for record in self.image.records]
        layers = [layer.parts for layer in self.image.kv]
        targets = []
        for what, names, entries, takers in (
            ("record", STATE_ARRAYS, records, record_sinks),
            ("layer", KV_PARTS, layers, sinks),
        ):
            if len(entries) != len(takers):
                raise invalid("layer-count", f"{what} count", None, len(takers), len(entries))
            for i, (extents, sink) in enumerate(zip(entries, takers, strict=True)):
                for part, (name, extent, room) in enumerate(zip(names, extents, sink.part_sizes, strict=True)):
                    if room != extent.size:
                        raise invalid(
                            "part-size", f"part size of {name} of {what} {i}", extent.offset, room, extent.size
                        )
                    targets.append((extent, sink, part))
        return targets

    def _voucher(self) -> Check:
        """A check of each block, in order, against the ledger of the first pass."""
        blocks = enumerate(self._ledger)

        def vouch(block: np.ndarray) -> None:
            index, expected = next(blocks)
            found = _crc32c(block)
            if found != expected:
                raise self._changed("CRC-32C of the block", index * BLOCK_BYTES, f"{expected:08x}", f"{found:08x}")

        return vouch

    def _changed(self, section: str, offset: int, expected, found) -> SessionError:
        return invalid("changed", section, offset, expected, found, advice="the file changed since the first pass")

    def _feed(self, pieces: Iterator[np.ndarray], sink: KvSink, part: int) -> None:
        done = 0
        for piece in pieces:
            self.touched = True
            try:
                sink.write(part, done, piece)
            except Exception as error:  # whatever a pool raises, it is half written now
                raise SessionError("io", "sink", f"what was read could not be taken: {error}") from error
            done += piece.size


# --- Looking into files without a model ---

LOOK_LIMITS = Limits()


def inspect_session(path: str) -> SessionInfo:
    """What is in a file, from its header and structure; arrays are stepped over, and nothing is proved of them.

    A look ends behind sessionparse.MOST_LISTED checkpoints or layers, and says so.
    """
    with _system_failures(_reading), BlockReader(os.fspath(path)) as reader:
        check_size(reader.size_bytes, LOOK_LIMITS)
        source = _Seeker(reader)
        header = read_header(source, None)
        image = Structure(source, LOOK_LIMITS, Keep.LAYOUT, whole=False).read()
        payload_hash = check_trailer(source, None)
        return _info(path, reader, header, image, payload_hash)


def verify_session(path: str, *, progress: Progress | None = None) -> SessionInfo:
    """Read every byte of a file and hold header, structure, payload hash and end marker; no model is needed."""
    with _system_failures(_reading), BlockReader(os.fspath(path)) as reader:
        return _info(path, reader, *_read_all(reader, None, LOOK_LIMITS, Keep.LAYOUT, progress=progress))


def _info(path: str, reader: BlockReader, header: Header, image: Image, payload_hash: int) -> SessionInfo:
    identity = Identity(header.model, header.config)
    return SessionInfo(path, reader.size_bytes, reader.modified_s, identity, payload_hash, image)


def peek_session(path: str) -> Peek:
    """A file's header and token count, for listings; raises SessionError."""
    with _system_failures(_reading), BlockReader(os.fspath(path)) as reader:
        check_size(reader.size_bytes, LOOK_LIMITS)
        source = _Seeker(reader)
        header = read_header(source, None)
        source.skip(LIVE_OFFSET - source.offset)
        n_tokens = Structure(source, LOOK_LIMITS, Keep.LAYOUT).count("token ids of live", 4, OPEN)
        identity = Identity(header.model, header.config)
        return Peek(os.path.basename(path), reader.size_bytes, reader.modified_s, n_tokens, identity)


def read_tokens(path: str, max_tokens: int) -> tuple[Identity, np.ndarray]:
    """What a file belongs to and its conversation's token ids, int32; the rest is not read. Raises SessionError."""
    with _system_failures(_reading), BlockReader(os.fspath(path)) as reader:
        check_size(reader.size_bytes, LOOK_LIMITS)
        source = _Seeker(reader)
        header = read_header(source, None)
        source.skip(LIVE_OFFSET - source.offset)
        ids = Structure(source, Limits(max_tokens=max_tokens), Keep.TOKENS).token_ids("live")
        return Identity(header.model, header.config), ids
