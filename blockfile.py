"""Durable files in blocks of 16 MiB: written beside their destination and renamed, read on ahead of their user.

It owns the order of the calls that a durable file needs, the blocks, and the helper thread that keeps the disk busy
while the caller works; it knows nothing of what the bytes mean. Invariant: a destination is either as it was or the
whole new file, and at most two blocks are alive for each open file. Read next: disksystem.py for the calls,
sessionfile.py for the bytes.
"""

import collections
import contextlib
import errno
import mmap
import ntpath
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

import unfinished
from disksystem import system
from helperthread import HelperThread

BLOCK_BYTES = 16 << 20
CACHE_SAMPLES = 16  # pages of a file that are looked for in the page cache
CACHE_SHARE = 2  # a file that is read twice may take one such part of the available memory as page cache
DIRECT_UNIT = 4096  # addresses, offsets and lengths of direct transfers are multiples of it
MAX_NAME_TRIES = 8
BUFFERED_SWITCH = "STRATA_SESSION_BUFFERED"

Progress = Callable[[int, int], None]
Phase = Callable[[str, int], None]
Check = Callable[[np.ndarray], None]


def failure_kind(error: OSError) -> str:
    """What a failed call means for a save: no room (storage), no memory (memory), or anything else (io)."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "storage"
    return "memory" if error.errno == errno.ENOMEM else "io"


class NotPlainFile(Exception):
    """The name is not that of a regular file with one name; `reason` says what it is."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason = reason


def _close_read(descriptor) -> None:
    """Close what was only read: a failure loses nothing, and must not hide another or undo a finished restore."""
    with contextlib.suppress(OSError):
        system.close(descriptor)


def _forget(descriptor: int, offset: int, size: int) -> None:
    with contextlib.suppress(OSError):  # advice: where it is not taken, memory that was free stays cache
        system.forget(descriptor, offset, size)


@contextlib.contextmanager
def _kept(folder, name: str) -> Iterator[None]:
    """What a rename replaces stays until the end, so that nobody waits while its blocks are freed."""
    held = None
    with contextlib.suppress(OSError):  # nothing has this name, or it cannot be kept
        held = system.hold(folder, name)
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError):
                system.release(held)


@contextlib.contextmanager
def _folder_of(path: str) -> Iterator[tuple]:
    """The open folder of a file and the file's name there."""
    folder, leaf = split_path(path)
    opened_folder = system.open_folder(folder)
    try:
        yield opened_folder, leaf
    finally:
        _close_read(opened_folder)


def remove(path: str) -> None:
    """Take a file's name away; its blocks are freed while the caller goes on."""
    with _folder_of(path) as (folder, leaf), _kept(folder, leaf):
        system.unlink(folder, leaf)


def rename(path: str, leaf: str) -> None:
    """Give a file another name in its folder, in place of what may have that."""
    with _folder_of(path) as (folder, old):
        system.rename(folder, old, leaf)


def _goes_direct(descriptor: int) -> bool:
    """Switch direct transfers on unless the user or the file system will not have it; the bytes are the same."""
    if os.environ.get(BUFFERED_SWITCH, "").startswith("1"):
        return False
    try:
        system.set_direct(descriptor, True)
    except OSError:
        return False
    return True


def _buffered_after(error: OSError, descriptor: int, direct: bool) -> bool:
    """Go through the page cache where a direct transfer was refused as such: returns False; raises any other error."""
    if error.errno != errno.EINVAL or not direct:
        raise error
    system.set_direct(descriptor, False)
    return False


def allocate_block(file_bytes: int) -> np.ndarray:
    """A block for a file of this size, at a page boundary as direct transfers need it.

    It goes back to the system with its last view. Pages of 2 MiB, where they are had, save eight thousand page faults.
    """
    size = min(BLOCK_BYTES, max(1, -(-file_bytes // DIRECT_UNIT)) * DIRECT_UNIT)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    block = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)


def split_path(path: str) -> tuple[str, str]:
    """The folder that a file at `path` is written into, and its name there."""
    if system.windows:
        folder, leaf = ntpath.split(path)
        if ":" in leaf:
            raise OSError(errno.EINVAL, "a colon would name a stream of another file")
        return folder or ".", leaf
    head, slash, leaf = path.rpartition("/")
    return head or slash or ".", leaf


def free_space_folder(path: str, *, windows: bool | None = None) -> str:
    """The folder whose free space counts for a file at `path`; on Windows an empty string is the current one."""
    if system.windows if windows is None else windows:
        path = path.replace("/", "\\")
        if "\\" in path:
            return path[: path.rindex("\\") + 1]
        return f"{path[:2]}\\" if path[1:2] == ":" else ""
    head, slash, _ = path.rpartition("/")
    return head or slash or "."


def _check_path(path: str) -> None:
    """Refuse as the system would what Python refuses to hand to it."""
    try:
        encoded = path.encode() if system.windows else os.fsencode(path)
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, "the path cannot be encoded for the file system") from error
    if b"\0" in encoded:
        raise OSError(errno.EINVAL, "the path holds a zero byte")


# --- Writing ---


class BlockWriter:
    """A new file of a known size that takes its destination's name only when it is complete.

    A context manager: left without `publish`, only its own temporary file goes. The caller fills `space()` and calls
    `advance`; a full block is written by the helper thread while the caller fills the other one. OSError of any step
    passes through; `step` names the step that was under way.
    """

    def __init__(self, path: str, size_bytes: int, progress: Progress | None = None):
        _check_path(path)
        self.size_bytes = size_bytes
        self.published = False
        self.folder_flushed = True  # False when the file system cannot flush folders
        self.leftover = ""  # why the temporary file could not be removed
        self.step = "opening the folder"
        self._path = path
        self._progress = progress or (lambda done, total: None)
        self._descriptor = None
        self._direct = False
        self._offset = 0  # in the file, of the block that is being filled
        self._filled = 0
        self._pending: Future | None = None

    def __enter__(self) -> "BlockWriter":
        folder, self._leaf = split_path(self._path)
        if self._leaf in ("", ".", ".."):
            raise OSError(errno.EINVAL, "the path does not end in a file name")
        with contextlib.ExitStack() as undo:
            self._folder = system.open_folder(folder)
            undo.callback(_close_read, self._folder)
            self._create_temporary()
            undo.callback(self._unlock)
            undo.callback(self._discard)
            self._direct = _goes_direct(self._descriptor)
            self.step = "allocating a block"
            self._block = allocate_block(self.size_bytes)
            self._spare = allocate_block(self.size_bytes) if self.size_bytes > BLOCK_BYTES else None
            self.step = "starting a thread"
            self._thread = undo.enter_context(HelperThread())
            self.step = "writing"
            self._progress(0, self.size_bytes)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._undo.close()

    def _create_temporary(self) -> None:
        self.step = "creating the temporary file"
        for last_try in range(MAX_NAME_TRIES - 1, -1, -1):
            self._temporary = unfinished.temporary_name(self._leaf)
            try:
                self._descriptor = system.create(self._folder, self._temporary)
            except FileExistsError:
                if not last_try:
                    raise
                continue
            if self._lock_temporary():
                return
        raise OSError(errno.EBUSY, "the temporary file was removed each time")

    def _lock_temporary(self) -> bool:
        """Keep sweeps away from the new file; False where one came before."""
        try:
            self._release = system.lock(self._folder, self._temporary, self._descriptor)
        except OSError:
            self._discard()
            raise
        if self._release is None:
            self._close()
        return self._release is not None

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):  # of a file that was closed before, and of which that was told
            self._release()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None  # a failed close has closed it all the same
        if descriptor is not None:
            system.close(descriptor)

    def _discard(self) -> None:
        """Remove the temporary file unless it has become the destination."""
        if self.published:
            return
        for remove in (self._close, lambda: system.unlink(self._folder, self._temporary)):
            try:
                remove()
            except OSError as error:  # must not hide the failure that brought us here
                self.leftover = f"its temporary file '{self._temporary}' could not be removed: {error.strerror}"

    def space(self) -> np.ndarray:
        """The part of the current block that is still to be filled, at least one byte."""
        if self._filled == BLOCK_BYTES:
            self._hand_over(BLOCK_BYTES)
        return self._block[self._filled :]

    def advance(self, size: int) -> None:
        """Take `size` bytes of `space()` as filled."""
        self._filled += size

    def _hand_over(self, size: int) -> None:
        """Have the block written; the other one is free as soon as the write before this one is done."""
        before = self._pending
        self._pending = self._thread.submit(self._write, self._block[:size], self._offset)
        self._wait(before, self._offset)  # with the next write queued already, the disk is never kept waiting
        self._offset += self._filled
        self._filled = 0
        self._block, self._spare = self._spare, self._block

    def _wait(self, write: Future | None, end: int) -> None:
        """Wait until the file is written up to `end`, and report it."""
        if write is not None:
            write.result()
            self._progress(end, self.size_bytes)

    def _write(self, data: np.ndarray, offset: int) -> None:
        """Write all of `data`; runs in the helper thread."""
        start = offset
        while data.size:
            try:
                n_written = system.write(self._descriptor, data, offset)
            except OSError as error:
                self._direct = _buffered_after(error, self._descriptor, self._direct)
                continue
            if not n_written:
                raise OSError(errno.EIO, "the system accepted no bytes")
            data, offset = data[n_written:], offset + n_written
        if not self._direct:
            _forget(self._descriptor, start, offset - start)

    def publish(self, *, durable: bool = True, phase: Phase | None = None) -> None:
        """Write what is left, flush, and give the file its name; from then on `published` is true."""
        phase = phase or (lambda name, size_bytes: None)
        self._finish()
        if durable:
            phase("flush", self.size_bytes)
            self.step = "flushing the file"
            system.flush(self._descriptor)
        self.step = "closing the file"
        self._close()
        phase("publish", self.size_bytes)
        self.step = "renaming the file"
        with _kept(self._folder, self._leaf):
            system.rename(self._folder, self._temporary, self._leaf)
            self.published = True
            if durable:
                self.step = "flushing the folder"
                self._flush_folder()

    def _finish(self) -> None:
        """Write the last block, padded to whole units for a direct transfer and cut again."""
        end = self._offset + self._filled
        assert end == self.size_bytes, f"{end} bytes were written of {self.size_bytes}"
        # The helper may still fall back to buffered writing: padding that was not needed is cut off all the same.
        padded = -self._filled % DIRECT_UNIT if self._direct else 0
        self._block[self._filled : self._filled + padded] = 0
        self._hand_over(self._filled + padded)
        self._wait(self._pending, end)
        if padded:
            self.step = "cutting the file to its size"
            system.truncate(self._descriptor, self.size_bytes)

    def _flush_folder(self) -> None:
        try:
            system.flush_folder(self._folder)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.folder_flushed = False


# --- Reading ---


def _open_existing(path: str) -> int:
    try:
        return system.open_existing(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPlainFile("symlink", "it is a symbolic link, not the file itself") from error
        if error.errno == errno.ENXIO:
            raise NotPlainFile("not-regular", "it is a socket or a device, not a regular file") from error
        raise


def first_bytes(path: str, size: int) -> bytes | None:
    """The start of a regular file; None where nothing has this name. Raises NotPlainFile, or OSError."""
    try:
        descriptor = _open_existing(path)
    except FileNotFoundError:
        return None
    try:
        mode = system.status(descriptor).st_mode
        if not stat.S_ISREG(mode):
            reason = "folder" if stat.S_ISDIR(mode) else "not-regular"
            raise NotPlainFile(reason, f"it is {_file_kind(mode)}, not a regular file")
        data = np.empty(size, np.uint8)
        return data[: system.read(descriptor, data, 0)].tobytes()
    finally:
        _close_read(descriptor)


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """The descriptor of an existing file, to be looked at; what it is, `system.status` tells."""
    descriptor = _open_existing(path)
    try:
        yield descriptor
    finally:
        _close_read(descriptor)


class BlockReader:
    """A regular file read in blocks, the next one while the caller works on the present one; may be read again.

    A context manager. A file that lies in the page cache is read from there and stays. Any other one is read past the
    cache, but for a first reading of two that leaves enough of it to others: the second is then served by the cache,
    which is given back behind it. OSError passes through; NotPlainFile is raised for links, folders, pipes and devices.
    """

    def __init__(self, path: str):
        _check_path(path)
        self._path = path
        self._blocks: list[np.ndarray] = []
        self._direct = False
        self._queued: collections.deque[Future] = collections.deque()

    def __enter__(self) -> "BlockReader":
        with contextlib.ExitStack() as undo:
            self._descriptor = _open_existing(self._path)
            undo.callback(_close_read, self._descriptor)
            status = system.status(self._descriptor)
            if stat.S_ISLNK(status.st_mode):
                raise NotPlainFile("symlink", "it is a symbolic link or a junction, not the file itself")
            if not stat.S_ISREG(status.st_mode):
                raise NotPlainFile("not-regular", f"it is {_file_kind(status.st_mode)}, not a regular file")
            if status.st_nlink != 1:
                raise NotPlainFile("hard-link", f"it is a hard link: the file has {status.st_nlink} names")
            system.set_blocking(self._descriptor)
            self.size_bytes = status.st_size
            self.modified_s = status.st_mtime
            self._was_cached = _is_cached(self._descriptor, self.size_bytes)
            undo.callback(self._forget_all)
            self._thread = undo.enter_context(HelperThread())
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._undo.close()

    def _forget_all(self) -> None:
        if self._blocks:  # a file that was only looked into keeps its place in the cache
            self._blocks = []
            self._queued.clear()
            if not self._was_cached and not self._direct:
                _forget(self._descriptor, 0, 0)

    def current_size(self) -> int:
        """The file's size now; `size_bytes` is that at opening."""
        return system.status(self._descriptor).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        """A few bytes from anywhere, beside the blocks."""
        data = np.empty(size, np.uint8)
        self._fill(data, size, offset)
        return data.tobytes()

    def start(self, *, last: bool, check: Check | None = None, first: int = 0) -> None:
        """Begin at block `first`, for the `last` time or not.

        `check` sees each block, in order, in the helper thread; what it raises comes in place of the block.
        """
        if not self._blocks:
            n_blocks = 2 if self.size_bytes > BLOCK_BYTES else 1
            self._blocks = [allocate_block(self.size_bytes) for _ in range(n_blocks)]
            self._choose_way(once=last)
        while self._queued:  # a block of an earlier start is read to its end
            self._queued.popleft().exception()
        self._forget = last and not self._was_cached
        self._check = check
        self._asked = first
        self._ask()

    def _choose_way(self, *, once: bool) -> None:
        """Past the page cache or through it."""
        if self._was_cached:
            return
        self._direct = (once or not self._leaves_cache()) and _goes_direct(self._descriptor)
        if not self._direct:
            with contextlib.suppress(OSError):  # advice
                system.read_ahead(self._descriptor)

    def _leaves_cache(self) -> bool:
        """Whether the whole file in the page cache leaves enough memory to others."""
        try:
            return self.size_bytes * CACHE_SHARE <= system.available_bytes()
        except OSError:
            return False

    def _ask(self) -> None:
        """Have the helper thread read one block more, if there is one."""
        offset = self._asked * BLOCK_BYTES
        if offset < self.size_bytes:
            self._queued.append(self._thread.submit(self._read, self._blocks[self._asked % 2], offset))
            self._asked += 1

    def next_block(self) -> np.ndarray:
        """The next block; it is overwritten when the one after it is asked for."""
        self._ask()  # into the block that the caller is done with, before waiting: the helper thread never idles
        return self._queued.popleft().result()

    def _read(self, block: np.ndarray, offset: int) -> np.ndarray:
        """Fill a block, and check it; runs in the helper thread."""
        if self._forget and not self._direct and offset >= 2 * BLOCK_BYTES:
            # Not the block just read: its last pages still wait in a list of this processor, and to give them back
            # the kernel would have every other processor empty such lists as well.
            _forget(self._descriptor, offset - 2 * BLOCK_BYTES, BLOCK_BYTES)
        size = min(BLOCK_BYTES, self.size_bytes - offset)
        self._fill(block, size, offset)
        if self._check:
            self._check(block[:size])
        return block[:size]

    def _fill(self, room: np.ndarray, size: int, offset: int) -> None:
        """Read `size` bytes; `room` has whole units where transfers are direct."""
        filled = 0
        while filled < size:
            end = -(-size // DIRECT_UNIT) * DIRECT_UNIT if self._direct else size
            try:
                n_read = system.read(self._descriptor, room[filled:end], offset + filled)
            except OSError as error:
                self._direct = _buffered_after(error, self._descriptor, self._direct)
                continue
            if not n_read:
                raise OSError(errno.EIO, f"the file became shorter: it ends at {offset + filled}")
            filled += n_read


def _is_cached(descriptor: int, size_bytes: int) -> bool:
    """Whether the file seems to be in the page cache: pages all over it can be had without waiting for the disk."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        for page in range(CACHE_SAMPLES):
            os.preadv(descriptor, [bytearray(1)], size_bytes * page // CACHE_SAMPLES, os.RWF_NOWAIT)
    except OSError:  # EAGAIN where a page is not there; other systems of files cannot tell
        return False
    return True


def _file_kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")
