"""The calls to the operating system that a durable file needs, one a method: POSIX's, and the same on Windows.

It owns every such call, so that a test can make any of them fail; it knows neither blocks nor what is written.
Invariant: both classes have the same methods, raise OSError in errno's words alone, and decide what a name leads to on
the opened file, never on the name. Read next: blockfile.py, which says in which order they come.

Paths are str, folders and descriptors what `open_folder` and `create` return, data C-contiguous uint8 arrays, offsets
and sizes bytes.
"""

import contextlib
import ctypes
import errno
import functools
import ntpath
import os
import shutil
import stat
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import resources
import unfinished
from helperthread import HelperThread

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def _available_bytes() -> int:
    return resources.available_bytes()


class FolderCalls:
    """What a folder of many files asks of any operating system."""

    def make_folder(self, path: str) -> None:
        """Make a folder that its owner alone can enter, unless it is there."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def folder_changed_ns(self, path: str) -> int:
        """When a name last came or went there."""
        return os.stat(path).st_mtime_ns

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def size_and_use(self, path: str) -> tuple[int, int]:
        """Bytes of a file and when it was last changed or touched, in ns; a link is not followed."""
        status = os.lstat(path)
        return status.st_size, status.st_mtime_ns


class PosixSystem(FolderCalls):
    """The calls to the operating system, one a method, so that a test can make any of them fail."""

    windows = False
    _releasing: HelperThread | None = None

    def free_bytes(self, folder: str) -> int:
        if self._releasing:  # what a replaced file still takes is as good as free
            self._releasing.join()
        return shutil.disk_usage(folder).free

    def available_bytes(self) -> int:
        """Memory that can be had, by taking from the page cache where need be."""
        return _available_bytes()

    def open_folder(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def create(self, folder: int, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=folder)

    def lock(self, folder: int, name: str, descriptor: int) -> Callable[[], None] | None:
        """Keep sweeps away from a new file until what is returned is called; None where one came before."""
        if unfinished.lock(descriptor) is False:
            return None
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return functools.partial(os.close, os.dup(descriptor))  # the file is closed before it takes its name

    def open_existing(self, path: str) -> int:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def set_blocking(self, descriptor: int) -> None:
        os.set_blocking(descriptor, True)

    def set_direct(self, descriptor: int, on: bool) -> None:
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def status(self, descriptor: int) -> os.stat_result:
        return os.fstat(descriptor)

    def read(self, descriptor: int, data: np.ndarray, offset: int) -> int:
        return os.preadv(descriptor, [data], offset)

    def write(self, descriptor: int, data: np.ndarray, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def read_ahead(self, descriptor: int) -> None:
        """Say that all of the file will be read in order: the system then reads twice as far ahead."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def forget(self, descriptor: int, offset: int, size: int) -> None:
        """Give the page cache of a range back (size 0: to the end); pages not yet written start on their way."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def flush(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def flush_folder(self, folder: int) -> None:
        os.fsync(folder)

    def hold(self, folder: int, name: str) -> int | None:
        """Keep what has this name alive until `release`; None where that cannot be."""
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder) if hasattr(os, "O_PATH") else None

    def release(self, held: int) -> None:
        """Let go of it in a thread: the blocks of a large file can take half as long to be freed as to be written."""
        try:
            self._releasing = helper = HelperThread()
        except OSError:  # no thread can be had
            os.close(held)
        else:
            helper.submit(os.close, held)
            helper.finish()

    def rename(self, folder: int, source: str, destination: str) -> None:
        os.rename(source, destination, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, folder: int, name: str) -> None:
        os.unlink(name, dir_fd=folder)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def touch(self, path: str) -> None:
        os.utime(path, follow_symlinks=False)

    def exclude(self, path: str) -> int:
        """Open a file and hold it alone until it is closed; BlockingIOError where another process holds it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


class FileStatus(NamedTuple):
    """What a BlockReader asks of an open file, named as in os.stat_result."""

    st_mode: int
    st_nlink: int
    st_size: int
    st_mtime: float


class WindowsFolder(NamedTuple):
    """A folder held open, so that it can be neither renamed nor removed while a file is written into it."""

    handle: int
    path: str

    def of(self, name: str) -> str:
        return ntpath.join(self.path, name)


class _FileInformation(ctypes.Structure):
    """BY_HANDLE_FILE_INFORMATION."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            *("attributes", "created_low", "created_high", "accessed_low", "accessed_high", "written_low"),
            *("written_high", "volume", "size_high", "size_low", "n_names", "index_high", "index_low"),
        )
    )


class _Overlapped(ctypes.Structure):
    """OVERLAPPED: the offset of a transfer on a handle that waits for it."""

    _fields_ = (
        ("internal", ctypes.c_size_t),
        ("internal_high", ctypes.c_size_t),
        ("offset_low", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


class _Kernel32:
    """The functions of kernel32.dll that WindowsSystem calls, with the types of what they take."""

    def __init__(self):
        dll = ctypes.WinDLL("kernel32", use_last_error=True)
        text, number, handle, pointer = ctypes.c_wchar_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p
        for name, result, *arguments in (
            ("CreateFileW", handle, text, number, number, pointer, number, number, handle),
            ("GetFileType", number, handle),
            ("GetFileInformationByHandle", ctypes.c_int, handle, pointer),
            ("ReadFile", ctypes.c_int, handle, pointer, number, pointer, pointer),
            ("WriteFile", ctypes.c_int, handle, pointer, number, pointer, pointer),
            ("FlushFileBuffers", ctypes.c_int, handle),
            ("CloseHandle", ctypes.c_int, handle),
            ("MoveFileExW", ctypes.c_int, text, text, number),
            ("DeleteFileW", ctypes.c_int, text),
            ("GetDiskFreeSpaceExW", ctypes.c_int, text, pointer, pointer, pointer),
        ):
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def last_error(self) -> int:
        return ctypes.get_last_error()


# What the codes of GetLastError say in errno's words; every other one is EIO.
WINDOWS_ERRNO = {
    **dict.fromkeys((2, 3, 53, 67), errno.ENOENT),
    **dict.fromkeys((5, 19, 32, 33), errno.EACCES),  # 19: write-protected; 32, 33: somebody else has it open
    **dict.fromkeys((80, 183), errno.EEXIST),
    **dict.fromkeys((39, 112), errno.ENOSPC),
    **dict.fromkeys((8, 14, 1450), errno.ENOMEM),
    **dict.fromkeys((87, 123, 161), errno.EINVAL),
    206: errno.ENAMETOOLONG, 223: errno.EFBIG, 267: errno.ENOTDIR, 1295: errno.EDQUOT,
}  # fmt: skip


class WindowsSystem(FolderCalls):
    """The same calls by way of kernel32: what a name leads to is decided on the opened handle.

    There is no `truncate`, as only direct transfers are padded, and there are none here.
    """

    windows = True

    READ, WRITE = 0x80000000, 0x40000000
    SHARE_READ, SHARE_WRITE, SHARE_DELETE = 1, 2, 4
    CREATE_NEW, OPEN_EXISTING = 1, 3
    NORMAL, BACKUP_SEMANTICS, OPEN_REPARSE_POINT = 0x80, 0x02000000, 0x00200000
    REPARSE_POINT, DIRECTORY = 0x400, 0x10  # attributes
    DISK = 1  # the type of a file that is neither a pipe nor a device
    REPLACE_EXISTING, WRITE_THROUGH = 1, 8
    INVALID = ctypes.c_void_p(-1).value
    END_OF_FILE = 38
    EPOCH = 116444736000000000  # 1970 in units of 100 ns since 1601

    def __init__(self, kernel32=None):
        self._api = kernel32 or _Kernel32()

    def _failure(self) -> OSError:
        code = self._api.last_error()
        number = WINDOWS_ERRNO.get(code, errno.EIO)
        return OSError(number, f"{os.strerror(number)} (Windows error {code})")

    def _done(self, result: int) -> None:
        if not result:
            raise self._failure()

    def _open(self, path: str, access: int, share: int, disposition: int, flags: int) -> int:
        handle = self._api.CreateFileW(path, access, share, None, disposition, flags, None)
        if handle is None or handle == self.INVALID:
            raise self._failure()
        return handle

    def free_bytes(self, folder: str) -> int:
        free = ctypes.c_uint64()
        self._done(self._api.GetDiskFreeSpaceExW(folder or None, ctypes.byref(free), None, None))
        return free.value

    def open_folder(self, path: str) -> WindowsFolder:
        path = f"{path}." if path.endswith(":") else path  # the drive's current folder, not the drive
        share = self.SHARE_READ | self.SHARE_WRITE
        handle = self._open(path, self.READ, share, self.OPEN_EXISTING, self.BACKUP_SEMANTICS)
        try:
            if not self._information(handle).attributes & self.DIRECTORY:
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except OSError:
            self.close(handle)
            raise
        return WindowsFolder(handle, path)

    def create(self, folder: WindowsFolder, name: str) -> int:
        return self._open(folder.of(name), self.WRITE, 0, self.CREATE_NEW, self.NORMAL | self.OPEN_REPARSE_POINT)

    def open_existing(self, path: str) -> int:
        # Links and folders are opened themselves, so that `status` can tell what they are; nobody may write meanwhile.
        share = self.SHARE_READ | self.SHARE_DELETE
        return self._open(path, self.READ, share, self.OPEN_EXISTING, self.OPEN_REPARSE_POINT | self.BACKUP_SEMANTICS)

    def lock(self, folder: WindowsFolder, name: str, descriptor: int) -> Callable[[], None]:
        """Nothing to do: nobody else can open it as long as it is open."""
        return lambda: None

    def set_blocking(self, descriptor: int) -> None:
        """Handles that are opened so always wait."""

    def set_direct(self, descriptor: int, on: bool) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def _information(self, handle: int) -> _FileInformation:
        information = _FileInformation()
        self._done(self._api.GetFileInformationByHandle(handle, ctypes.byref(information)))
        return information

    def status(self, descriptor: int) -> FileStatus:
        if self._api.GetFileType(descriptor) != self.DISK:
            return FileStatus(stat.S_IFCHR, 1, 0, 0.0)
        found = self._information(descriptor)
        kinds = ((self.REPARSE_POINT, stat.S_IFLNK), (self.DIRECTORY, stat.S_IFDIR))
        mode = next((kind for bit, kind in kinds if found.attributes & bit), stat.S_IFREG)
        ticks = found.written_high << 32 | found.written_low
        return FileStatus(mode, found.n_names, found.size_high << 32 | found.size_low, (ticks - self.EPOCH) / 1e7)

    def _transfer(self, function, descriptor: int, data: np.ndarray, offset: int) -> tuple[int, int]:
        count, at = ctypes.c_uint32(), _Overlapped(offset_low=offset & 0xFFFFFFFF, offset_high=offset >> 32)
        result = function(descriptor, data.ctypes.data, data.size, ctypes.byref(count), ctypes.byref(at))
        return result, count.value

    def read(self, descriptor: int, data: np.ndarray, offset: int) -> int:
        result, count = self._transfer(self._api.ReadFile, descriptor, data, offset)
        if not result and self._api.last_error() != self.END_OF_FILE:
            raise self._failure()
        return count if result else 0

    def write(self, descriptor: int, data: np.ndarray, offset: int) -> int:
        result, count = self._transfer(self._api.WriteFile, descriptor, data, offset)
        self._done(result)
        return count

    def available_bytes(self) -> int:
        return _available_bytes()

    def read_ahead(self, descriptor: int) -> None:
        """There is no such advice here."""

    def forget(self, descriptor: int, offset: int, size: int) -> None:
        """Nor such."""

    def hold(self, folder: WindowsFolder, name: str) -> None:
        """There is no way: what is open cannot be replaced."""

    def flush(self, descriptor: int) -> None:
        self._done(self._api.FlushFileBuffers(descriptor))

    def flush_folder(self, folder: WindowsFolder) -> None:
        """Nothing to do: the rename was written through."""

    def rename(self, folder: WindowsFolder, source: str, destination: str) -> None:
        flags = self.REPLACE_EXISTING | self.WRITE_THROUGH
        self._done(self._api.MoveFileExW(folder.of(source), folder.of(destination), flags))

    def unlink(self, folder: WindowsFolder, name: str) -> None:
        self._done(self._api.DeleteFileW(folder.of(name)))

    def close(self, descriptor: "int | WindowsFolder") -> None:
        handle = descriptor.handle if isinstance(descriptor, WindowsFolder) else descriptor
        self._done(self._api.CloseHandle(handle))


system = WindowsSystem() if os.name == "nt" else PosixSystem()
