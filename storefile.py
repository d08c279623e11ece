"""Store files: written a block at a time, so that the writer can stop for a request; read and proved block by block.

It owns writing a file, reading its head, and handing out its pieces; it knows no folder beyond the one file and no
models, and gets cells through windows as session files do. Invariant: no byte of the payload is handed out before the
checksum of its block was right, and a file has its name only when it is whole and on the disk.
Read next: storelayout.py for the bytes, storefolder.py, which decides what is written.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

import blockfile
from blockfile import BlockReader, BlockWriter, Check, NotPlainFile, Progress, failure_kind
from storelayout import (
    CHECKSUM,
    END_MARK,
    HASH_BYTES,
    HEADER,
    Head,
    Header,
    Segment,
    Shape,
    StoreError,
    block_seed,
    data_bytes,
    pack_head,
    parse_head,
    parse_header,
)

HEAD_READ = 1 << 14  # bytes of a file that are read at once for its head: those of a turn are in it


@contextlib.contextmanager
def system_failures(path: str, step: Callable[[], str]) -> Iterator[None]:
    """Turn what the system refuses into a StoreError whose kind follows from the error number."""
    try:
        yield
    except NotPlainFile as error:
        if not os.path.lexists(path):  # it lost its name while it was opened
            raise StoreError("io", "gone", path, "the file is gone") from error
        raise StoreError("invalid", "plain", path, f"not a store file: {error}") from error
    except MemoryError as error:
        raise StoreError("memory", "memory", path, f"{step()}: not enough memory") from error
    except FileNotFoundError as error:
        raise StoreError("io", "gone", path, f"{step()}: it is gone") from error
    except OSError as error:
        raise StoreError(failure_kind(error), "os", path, f"{step()}: {error.strerror or error}") from error


def _hash64(seed: int):
    import checksum  # the kernels are loaded when the first block is hashed: who reads heads needs none

    return checksum.Hash64(seed)


# --- Sources of a file's payload ---


class Pull(NamedTuple):
    """Bytes of a file, from where they live: `read(offset, out)` fills a uint8 array, in ascending order."""

    size: int
    read: Callable[[int, np.ndarray], None]


def cells_of(segment: Segment, shape: Shape, windows) -> list[Pull]:
    """A segment out of every layer's window (`Cache.windows`, or the layers of a parked conversation)."""

    def pull(part) -> Pull:
        window = windows[part.layer]
        return Pull(part.size, lambda offset, out: window.read(part.part, part.pool_offset + offset, out))

    return [pull(part) for part in segment.parts(shape) if part.size]


def arrays_of(arrays: Sequence[np.ndarray]) -> list[Pull]:
    """A state out of its five arrays."""

    def pull(data: np.ndarray) -> Pull:
        def read(offset: int, out: np.ndarray) -> None:
            out[:] = data[offset : offset + out.size]

        return Pull(data.size, read)

    return [pull(array.reshape(-1).view(np.uint8)) for array in arrays if array.nbytes]


# --- Writing ---


class StoreWriter:
    """A file on its way: `step` writes a block, so that the caller can look around, go on later, or `close` it.

    It holds two blocks of memory and a temporary file until then. Every failure is a StoreError, and closes it.
    """

    def __init__(self, path: str, head: Head, sources: Sequence[Sequence[Pull]]):
        """`sources` are those of every segment and then of every state of the head."""
        self.path, self.head = path, head
        raw = pack_head(head)
        self.hash = _hash_in(raw)
        for size, pulls in zip(head.sizes, sources, strict=True):
            assert size == sum(pull.size for pull in pulls), "a source has another size than its piece"
        frame = [arrays_of([np.frombuffer(data, np.uint8)]) for data in (raw, END_MARK)]
        self._pulls = [pull for pulls in (frame[0], *sources, frame[1]) for pull in pulls]
        self._undo = contextlib.ExitStack()
        with system_failures(path, lambda: "opening the file"):
            self._writer = BlockWriter(path, head.file_bytes)
        with self._failures():
            self._undo.enter_context(self._writer)
        self._steps = self._write()

    @property
    def published(self) -> bool:
        """Whether the file has its name."""
        return self._writer.published

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            with system_failures(self.path, lambda: self._writer.step):
                yield
        except BaseException:
            self.close()
            raise

    def step(self) -> bool:
        """Write a block more, or flush and rename behind the last one; returns whether there is more to do."""
        with self._failures():
            if next(self._steps, None) is not None:
                return True
        self.close()
        return False

    def close(self) -> None:
        """Give up, unless it is done; nothing of the file is left."""
        with system_failures(self.path, lambda: "closing the file"):
            self._undo.close()

    def _write(self) -> Iterator[int]:
        number, room = 0, data_bytes()
        checksum = _hash64(block_seed(self.hash, number))
        for pull in self._pulls:
            offset = 0
            while offset < pull.size:
                if not room:
                    self._seal(checksum)
                    yield number
                    number, room = number + 1, data_bytes()
                    checksum = _hash64(block_seed(self.hash, number))
                out = self._writer.space()[: min(room, pull.size - offset)]
                self._read(pull, offset, out)
                checksum.update(out)
                self._writer.advance(out.size)
                offset, room = offset + out.size, room - out.size
        self._seal(checksum)
        yield number
        self._writer.publish()

    def _read(self, pull: Pull, offset: int, out: np.ndarray) -> None:
        try:
            pull.read(offset, out)
        except (MemoryError, StoreError):
            raise
        except Exception as error:  # whatever a pool raises, the file cannot be written
            raise StoreError("io", "source", self.path, f"the bytes to write cannot be had: {error}") from error

    def _seal(self, checksum) -> None:
        self._writer.space()[: CHECKSUM.size] = np.frombuffer(CHECKSUM.pack(checksum.digest()), np.uint8)
        self._writer.advance(CHECKSUM.size)


# --- Reading ---


class Found(NamedTuple):
    """A file as its head shows it."""

    head: Head
    hash: bytes
    size_bytes: int
    used_ns: int  # when it was written or last touched


def read_head(path: str) -> Found:
    """The head alone, with one read unless it is long; nothing is proved of the payload. Raises StoreError."""
    with system_failures(path, lambda: "reading the head"), blockfile.opened(path) as descriptor:
        status = blockfile.system.status(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise NotPlainFile("not-regular", "it is no regular file with one name")
        raw, header = _raw_head(lambda offset, size: _read(descriptor, offset, size, path), status.st_size, path)
    head = parse_head(raw, header, path)
    return Found(head, _hash_in(raw), status.st_size, status.st_mtime_ns)


def _raw_head(read: Callable[[int, int], bytes], size: int, path: str) -> tuple[bytes, Header]:
    """The bytes of a head, with one `read(offset, size)` unless it is long, and its header."""
    raw = read(0, min(size, HEAD_READ))
    header = parse_header(raw, size, path)
    rest = HEADER.size + HASH_BYTES + header.table_bytes - len(raw)
    return raw + read(len(raw), rest) if rest > 0 else raw, header


def _hash_in(raw: bytes) -> bytes:
    """The hash of header and table, where a head has it."""
    return raw[HEADER.size : HEADER.size + HASH_BYTES]


def _read(descriptor: int, offset: int, size: int, path: str) -> bytes:
    data, filled = np.empty(size, np.uint8), 0
    while filled < size:
        n_read = blockfile.system.read(descriptor, data[filled:], offset + filled)
        if not n_read:
            raise StoreError("invalid", "cut", path, "file size: the file became shorter", part="file size")
        filled += n_read
    return data.tobytes()


class StoreReader:
    """An open store file. A context manager; entering it reads the head, and every failure is a StoreError.

    `expected` is the hash of the head that the caller knows, as another file may have got the name. Pieces are best
    asked for in the order of the file: what lies before the last one asked for is read from the disk again.
    """

    def __init__(self, path: str, expected: bytes | None = None):
        self.path = path
        self._expected = expected
        self._number = -1  # of the block at hand
        self._next = -1  # of the block that the reader brings next, -1 before the first
        self._data = np.empty(0, np.uint8)
        self.head = Head(b"", Shape((), False, ()), (), ())

    def __enter__(self) -> "StoreReader":
        with contextlib.ExitStack() as undo, self._failures():
            self._reader = undo.enter_context(BlockReader(self.path))
            size = self._reader.size_bytes
            raw, header = _raw_head(self._reader.read_at, size, self.path)
            self.hash = _hash_in(raw)
            if self._expected not in (None, self.hash):
                raise StoreError("invalid", "changed", self.path, "another file has got this name")
            self.head = parse_head(raw, header, self.path)
            self._offsets, self._sizes = self.head.offsets, self.head.sizes
            self._n_blocks = -(-size // blockfile.BLOCK_BYTES)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        with self._failures():
            self._undo.close()

    @contextlib.contextmanager
    def _failures(self, block: int = 0) -> Iterator[None]:
        """Failures of the system; that the file became shorter is damage, whatever the system says."""
        try:
            with system_failures(self.path, lambda: "reading the file"):
                yield
        except StoreError as error:
            if error.reason == "os" and self._became_shorter():
                raise self._damage("cut", "the file became shorter", block) from error
            raise

    def _became_shorter(self) -> bool:
        try:
            return self._reader.current_size() < self._reader.size_bytes
        except (OSError, AttributeError):  # not even that, or it was never opened
            return False

    def _damage(self, reason: str, text: str, block: int) -> StoreError:
        """What is wrong with a block, and from which segment on that matters."""
        start = block * data_bytes()
        ends = (offset + size for offset, size in zip(self.head.offsets, self.head.sizes, strict=True))
        whole = sum(1 for end in ends if end <= start)
        return StoreError(
            "invalid", reason, self.path, f"block {block}: {text}",
            part=f"block {block}", first_bad=min(whole, len(self.head.segments)),
        )  # fmt: skip

    def segment(self, number: int, shape: Shape, sinks, n_tokens: int | None = None) -> None:
        """Copy a segment, or its first tokens, to its place in every layer's sink (`Cache.windows`).

        `shape` is that of the sinks: a draft layer that only one side has is left out. Bytes arrive in the order of the
        parts, each proved; a failure leaves the sinks with a part of them.
        """
        self._require(shape)
        whole = self.head.segments[number]
        if n_tokens is not None and n_tokens <= whole.n_skipped:
            return
        cut = whole._replace(ids=whole.ids[: 4 * n_tokens]) if n_tokens is not None else whole
        at = self._offsets[number]
        for stored, wanted in zip(whole.parts(self.head.shape), cut.parts(self.head.shape), strict=True):
            if stored.layer < len(shape.layers):
                sink = sinks[stored.layer]
                self._feed(sink, wanted.part, wanted.pool_offset, at, wanted.size)
            at += stored.size

    def state(self, number: int, shape: Shape, sink) -> None:
        """Copy the five arrays of a state to a sink of such parts."""
        self._require(shape)
        at = self._offsets[len(self.head.segments) + number]
        for part, size in enumerate(self.head.shape.state_sizes):
            self._feed(sink, part, 0, at, size)
            at += size

    def pull(self, index: int) -> Pull:
        """A piece as the source of another file; `index` counts the segments and then the states."""

        def read(offset: int, out: np.ndarray) -> None:
            filled = 0
            for piece in self._pieces(self._offsets[index] + offset, out.size):
                out[filled : filled + piece.size] = piece
                filled += piece.size

        return Pull(self._sizes[index], read)

    def verify(self, progress: Progress | None = None) -> None:
        """Read every block, and hold the end mark."""
        for number in range(self._n_blocks):
            self._block(number)
            if progress:
                progress(min((number + 1) * blockfile.BLOCK_BYTES, self._reader.size_bytes), self._reader.size_bytes)
        end = self.head.head_bytes + sum(self._sizes)
        if b"".join(piece.tobytes() for piece in self._pieces(end, len(END_MARK))) != END_MARK:
            raise self._damage("end-mark", "the end mark is missing", self._n_blocks - 1)

    def _require(self, shape: Shape) -> None:
        if not shape.takes(self.head.shape):
            raise StoreError("invalid", "shape", self.path, "layers: its cells are of another size than the model's")

    def _feed(self, sink, part: int, pool_offset: int, at: int, size: int) -> None:
        done = 0
        for piece in self._pieces(at, size):
            sink.write(part, pool_offset + done, piece)
            done += piece.size

    def _pieces(self, at: int, size: int) -> Iterator[np.ndarray]:
        """Bytes of the stream as views, each valid until the next one is asked for."""
        end = at + size
        while at < end:
            number, start = divmod(at, data_bytes())
            piece = self._block(number)[start : start + end - at]
            yield piece
            at += piece.size

    def _block(self, number: int) -> np.ndarray:
        """What a block holds of the stream, proved; reading goes on behind it meanwhile."""
        if number != self._number:
            following, self._number, self._next = self._next, -1, -1  # nothing is at hand where this fails
            with self._failures(number):
                if number != following:
                    self._reader.start(last=True, first=number, check=self._prover(number))
                self._data = self._reader.next_block()[: -CHECKSUM.size]
            self._number, self._next = number, number + 1
        return self._data

    def _prover(self, first: int) -> Check:
        """A check of each block from the first one on; it runs in the reader's thread."""
        number = first - 1

        def prove(block: np.ndarray) -> None:
            nonlocal number
            number += 1
            (stored,) = CHECKSUM.unpack(block[-CHECKSUM.size :].tobytes())
            if _hash64(block_seed(self.hash, number)).update(block[: -CHECKSUM.size]).digest() != stored:
                raise self._damage("checksum", "its checksum does not match", number)

        return prove
