"""What the file code decides on Windows, against a kernel32 mocked by a few lines over a dictionary.

The mock follows the documented contract of each function: handles, sharing, exclusive creation, links that are
opened themselves, counts by reference, GetLastError. It shows the decisions of the code, not the behaviour of Windows.
"""

import ctypes
import errno
import ntpath
import re
from dataclasses import dataclass, field

import pytest

import blockfile
import disksystem
from blockfile import BlockReader, BlockWriter
from disksystem import WindowsSystem
from given_faults import CODES, KINDS, count
from given_images import identity, image, plain
from given_session import refusal_of
from sessionfile import read_session, verify_session, write_session
from sessionlayout import Limits, SessionError

NAME = "ckpt1_images_2kv"
FOLDER = "C:\\chats"
PATH = "C:\\chats\\chat.bin"
TICKS = 133_500_000_000_000_000  # some day of 2024, in units of 100 ns since 1601
NOT_FOUND, NO_PATH, DENIED, SHARED, EXISTS, FULL, END = 2, 3, 5, 32, 80, 112, 38


@dataclass
class Entry:
    """A file of the mock disk."""

    data: bytearray = field(default_factory=bytearray)
    attributes: int = 0x80
    n_names: int = 1
    kind: int = 1


class PlayedKernel32:
    """The functions of kernel32 over a dictionary of paths; `fail` lets the n-th call of a name fail with a code."""

    def __init__(self, **fail: tuple[int, int]):
        self.files = {"c:\\chats": Entry(attributes=0x10)}
        self.handles: dict[int, tuple[str, Entry, int, int]] = {}
        self.calls: list[tuple] = []
        self._fail = fail
        self._error = 0

    def last_error(self) -> int:
        return self._error

    def _fails(self, name: str, *arguments) -> bool:
        self.calls.append((name, *arguments))
        number, code = self._fail.get(name, (0, 0))
        if number and [call[0] for call in self.calls].count(name) == number:
            self._error = code
            count("mock Windows: a call fails")
            return True
        return False

    def _refuse(self, code: int) -> int:
        self._error = code
        return 0

    @staticmethod
    def _key(path: str) -> str:
        return ntpath.normpath(path.replace("C:.", "C:\\chats")).lower()

    def CreateFileW(self, path, access, share, security, disposition, flags, template):
        if self._fails("CreateFileW", path, access, share, disposition, flags):
            return WindowsSystem.INVALID
        key = self._key(path)
        entry = self.files.get(key)
        code = 0
        if disposition == 1:
            code = EXISTS if entry else 0 if ntpath.dirname(key) in self.files else NO_PATH
        elif not entry:
            code = NOT_FOUND
        elif entry.attributes & 0x10 and not flags & 0x02000000:
            code = DENIED
        if any(other is entry and not (used & share) for _, other, used, _ in self.handles.values() if entry):
            code = code or SHARED
        if code:
            self._refuse(code)
            return WindowsSystem.INVALID
        if entry and entry.attributes & 0x400 and not flags & 0x00200000:
            raise AssertionError("a link was followed")
        handle = len(self.calls)
        self.handles[handle] = (key, self.files.setdefault(key, Entry()), 2 if access & 0x40000000 else 1, share)
        return handle

    def GetFileType(self, handle):
        return self.handles[handle][1].kind

    def GetFileInformationByHandle(self, handle, information):
        if self._fails("GetFileInformationByHandle", handle):
            return 0
        entry, found = self.handles[handle][1], information._obj
        found.attributes, found.n_names = entry.attributes, entry.n_names
        found.size_high, found.size_low = divmod(len(entry.data), 1 << 32)
        found.written_high, found.written_low = divmod(TICKS, 1 << 32)
        return 1

    def _transfer(self, handle, address, size, counted, overlapped):
        at = overlapped._obj.offset_high << 32 | overlapped._obj.offset_low
        return self.handles[handle][1].data, (ctypes.c_char * size).from_address(address), at, counted._obj

    def ReadFile(self, handle, address, size, counted, overlapped):
        if self._fails("ReadFile", handle, size):
            return 0
        data, memory, at, counted = self._transfer(handle, address, size, counted, overlapped)
        piece = bytes(data[at : at + size])
        if not piece:
            return self._refuse(END)
        memory[: len(piece)] = piece
        counted.value = len(piece)
        return 1

    def WriteFile(self, handle, address, size, counted, overlapped):
        if self._fails("WriteFile", handle, size):
            return 0
        data, memory, at, counted = self._transfer(handle, address, size, counted, overlapped)
        data[at : at + size] = bytes(memory)
        counted.value = size
        return 1

    def FlushFileBuffers(self, handle):
        return not self._fails("FlushFileBuffers", handle)

    def CloseHandle(self, handle):
        failed = self._fails("CloseHandle", handle)
        del self.handles[handle]
        return not failed

    def MoveFileExW(self, source, destination, flags):
        if self._fails("MoveFileExW", source, destination, flags):
            return 0
        target = self.files.get(self._key(destination))
        if any(entry in (target, self.files[self._key(source)]) for _, entry, _, _ in self.handles.values()):
            return self._refuse(SHARED)
        if target and (target.attributes & 0x10 or not flags & 1):
            return self._refuse(DENIED)
        self.files[self._key(destination)] = self.files.pop(self._key(source))
        return 1

    def DeleteFileW(self, path):
        if self._fails("DeleteFileW", path):
            return 0
        if any(key == self._key(path) for key, _, _, _ in self.handles.values()):
            return self._refuse(SHARED)
        del self.files[self._key(path)]
        return 1

    def GetDiskFreeSpaceExW(self, folder, free, total, total_free):
        if self._fails("GetDiskFreeSpaceExW", folder):
            return 0
        free._obj.value = 1 << 40
        return 1

    def names(self) -> set[str]:
        return {name for name in self.files if name != "c:\\chats"}


@pytest.fixture
def play(monkeypatch):
    def install(**fail) -> PlayedKernel32:
        kernel32 = PlayedKernel32(**fail)
        monkeypatch.setattr(blockfile, "system", WindowsSystem(kernel32))
        return kernel32

    return install


def save(path: str = PATH, **named) -> int:
    return write_session(path, image(NAME), identity(NAME), **named)


def read(path: str = PATH):
    return read_session(path, identity(NAME), Limits())


def refusal(call, *arguments) -> SessionError:
    error = refusal_of(lambda: call(*arguments))
    assert error, "it was not refused"
    return error


# --- the order and the flags of the calls


def test_a_save_and_its_flags(play):
    kernel32, told = play(), []
    size = save(reserve_bytes=1, warn=told.append)
    assert not told, "a rename that is written through needs no flush of the folder"
    assert not kernel32.handles
    assert kernel32.names() == {PATH.lower()}
    look, free, folder, create, write, flush, close, move, close_folder = [
        call for call in kernel32.calls if call[0] != "GetFileInformationByHandle"
    ]
    assert look[:2] == ("CreateFileW", PATH)  # nothing is there that would be replaced
    assert free == ("GetDiskFreeSpaceExW", "C:\\chats\\")
    assert folder == ("CreateFileW", FOLDER, 0x80000000, 3, 3, 0x02000000)  # read; others may read and write; existing
    assert re.fullmatch(r"C:\\chats\\\.chat\.bin\.[0-9a-f]{16}\.tmp", create[1])
    assert create[2:] == (0x40000000, 0, 1, 0x00200080)  # write; shared with nobody; a new file; no link followed
    assert (write[0], write[2]) == ("WriteFile", size)
    assert [call[0] for call in (flush, close, close_folder)] == ["FlushFileBuffers", "CloseHandle", "CloseHandle"]
    assert move == ("MoveFileExW", create[1], PATH, 1 | 8)  # replace, write through
    save()
    assert kernel32.names() == {PATH.lower()}


def test_what_was_written_is_read_again(play):
    kernel32 = play()
    size = save()
    assert plain(read()) == plain(image(NAME))
    info = verify_session(PATH)
    assert info.size_bytes == size == len(kernel32.files[PATH.lower()].data)
    assert info.modified_s == (TICKS - 116_444_736_000_000_000) / 1e7
    opened = next(call for call in reversed(kernel32.calls) if call[0] == "CreateFileW")
    # Read; others may read it, rename it and remove it, but not write; existing; links and folders themselves.
    assert opened == ("CreateFileW", PATH, 0x80000000, 1 | 4, 3, 0x02200000)
    assert not kernel32.handles


def test_blocks_at_offsets_past_32_bits(play):
    kernel32 = play()
    system = blockfile.system
    seen = []
    kernel32.WriteFile = lambda handle, address, size, counted, at: seen.append(
        (at._obj.offset_high, at._obj.offset_low)
    )
    with pytest.raises(OSError, match="Windows error 0"):
        system.write(1, blockfile.np.zeros(5, "u1"), (3 << 32) + 7)
    assert seen == [(3, 7)]


# --- what a name leads to is decided on the opened handle


@pytest.mark.parametrize(
    ("change", "reason", "word"),
    [
        ({"attributes": 0x400}, "symlink", "junction"),
        ({"attributes": 0x410}, "symlink", "junction"),  # of a folder
        ({"attributes": 0x10}, "not-regular", "a folder"),
        ({"n_names": 2}, "hard-link", "2 names"),
        ({"kind": 2}, "not-regular", "a device"),
        ({"kind": 3}, "not-regular", "a device"),
    ],
)
def test_what_is_no_plain_file_is_refused_on_its_handle(change, reason, word, play):
    kernel32 = play()
    save()
    entry = kernel32.files[PATH.lower()]
    for name, value in change.items():
        setattr(entry, name, value)
    error = refusal(read)
    assert (error.kind, error.reason) == ("invalid", reason)
    assert word in str(error)
    assert not kernel32.handles
    assert not [call for call in kernel32.calls if call[0] == "ReadFile"]
    count("mock Windows: a link, folder or device in place of the file")


def test_the_folder_must_be_one(play):
    kernel32 = play()
    save()
    assert refusal(save, f"{PATH}\\a.bin").kind == "io"
    assert refusal(save, "C:\\none\\a.bin").kind == "io"
    assert kernel32.names() == {PATH.lower()}
    assert not kernel32.handles


@pytest.mark.parametrize(
    ("path", "folder", "leaf"),
    [
        ("C:\\chats\\a.bin", "C:\\chats", "a.bin"),
        ("C:/chats/a.bin", "C:/chats", "a.bin"),
        ("C:\\a.bin", "C:\\", "a.bin"),
        ("C:a.bin", "C:", "a.bin"),
        ("a.bin", ".", "a.bin"),
        ("chats\\a.bin", "chats", "a.bin"),
        ("\\\\host\\share\\a.bin", "\\\\host\\share\\", "a.bin"),
    ],
)
def test_paths_are_taken_apart_as_windows_does(path, folder, leaf, play):
    play()
    assert blockfile.split_path(path) == (folder, leaf)


def test_names_that_windows_would_read_otherwise(play):
    kernel32 = play()
    for path in ("C:\\chats\\a.bin:stream", "C:\\chats\\\ud800.bin", "C:\\chats\\a\0b", "C:\\chats\\", ""):
        assert refusal(save, path).kind == "io"
    assert not kernel32.names()
    assert not kernel32.handles
    save("C:a.bin")  # of the drive's current folder
    assert kernel32.names() == {"c:\\chats\\a.bin"}


def test_the_free_space_is_that_of_the_folder_or_the_drive(play):
    for path, folder in ((PATH, "C:\\chats\\"), ("C:/chats/a.bin", "C:\\chats\\"), ("C:a.bin", "C:\\")):
        kernel32 = play()
        save(path, reserve_bytes=1)
        assert kernel32.calls[1] == ("GetDiskFreeSpaceExW", folder)
    kernel32 = play()
    blockfile.system.free_bytes(blockfile.free_space_folder("a.bin"))
    assert kernel32.calls == [("GetDiskFreeSpaceExW", None)]  # the current folder's disk
    assert refusal(lambda: save(reserve_bytes=1 << 41)).kind == "storage"


# --- failures


CALLS = (
    *("CreateFileW", "GetFileInformationByHandle", "ReadFile"),
    *("WriteFile", "FlushFileBuffers", "CloseHandle", "MoveFileExW"),
)
OLD = b"STRSESS\1 of yore"
ERRORS = {112: "storage", 39: "storage", 1295: "storage", 223: "storage", 8: "memory", 5: "io", 32: "io", 1117: "io"}


@pytest.mark.parametrize("code", ERRORS)
def test_a_save_whose_nth_call_fails(code, play):
    kernel32 = play()
    save()
    new = bytes(kernel32.files[PATH.lower()].data)
    refused = []
    for call in CALLS:
        for number in (1, 2, 3):
            kernel32 = play(**{call: (number, code)})
            kernel32.files[PATH.lower()] = Entry(bytearray(OLD))
            error = refusal_of(save)
            assert bytes(kernel32.files[PATH.lower()].data) == (OLD if error else new)
            if error:
                assert (error.kind, error.published) == (ERRORS[code], False), call
                assert f"(Windows error {code})" in str(error)
                refused.append(call)
            assert kernel32.names() == {PATH.lower()}
            assert not kernel32.handles
    looks = ["CreateFileW", "GetFileInformationByHandle", "ReadFile"]  # at the older file, then at the folder
    assert refused == [*looks[:1] * 3, *looks[1:2] * 2, *looks[2:], *CALLS[3:]]


@pytest.mark.parametrize("code", ERRORS)
def test_a_restore_whose_nth_call_fails(code, play):
    for call in ("CreateFileW", "GetFileInformationByHandle", "ReadFile", "CloseHandle"):
        kernel32 = play()
        save()
        kernel32._fail, kernel32.calls = {call: (1, code)}, []
        if call == "CloseHandle":
            read()  # all was read: nothing is lost
        else:
            assert refusal(read).kind == ERRORS[code]
        assert not kernel32.handles


def test_a_file_that_somebody_has_open_stays(play):
    kernel32 = play()
    save()
    with BlockReader(PATH):
        error = refusal(save)
        assert (error.kind, error.published, "Windows error 32" in str(error)) == ("io", False, True)
    assert kernel32.names() == {PATH.lower()}
    handle = blockfile.system._open(PATH, WindowsSystem.WRITE, 7, WindowsSystem.OPEN_EXISTING, WindowsSystem.NORMAL)
    assert "Windows error 32" in str(refusal(read)), "somebody who writes"
    blockfile.system.close(handle)


def test_a_name_that_is_taken_is_tried_again(play):
    for taken, succeeds in ((7, True), (8, False)):
        kernel32 = play()
        create, left = kernel32.CreateFileW, [taken]

        def busy(path, *arguments, create=create, left=left, kernel32=kernel32):
            if path.endswith(".tmp") and left[0]:
                left[0] -= 1
                kernel32._error = EXISTS
                return WindowsSystem.INVALID
            return create(path, *arguments)

        kernel32.CreateFileW = busy
        if succeeds:
            save()
        else:
            assert refusal(save).kind == "io"
            assert not kernel32.names()


def test_every_code_of_the_table_is_an_errno_with_a_kind():
    assert set(disksystem.WINDOWS_ERRNO.values()) <= set(errno.errorcode)
    kinds = {KINDS.get(number, "io") for number in disksystem.WINDOWS_ERRNO.values()}
    assert kinds == {"storage", "memory", "io"}
    assert {KINDS.get(code, "io") for code in CODES} == kinds


# --- broken copies


@pytest.mark.parametrize("bit", ["REPARSE_POINT", "DIRECTORY", "OPEN_REPARSE_POINT", "BACKUP_SEMANTICS"])
def test_a_missing_flag_is_found(bit, play, monkeypatch):
    monkeypatch.setattr(WindowsSystem, bit, 0)
    changes = (({"attributes": 0x400}, "symlink", "junction"), ({"attributes": 0x10}, "not-regular", "folder"))
    with pytest.raises((AssertionError, SessionError)):
        any(test_what_is_no_plain_file_is_refused_on_its_handle(*change, play) for change in changes)


@pytest.mark.parametrize("bit", ["REPLACE_EXISTING", "WRITE_THROUGH", "CREATE_NEW", "SHARE_DELETE"])
def test_a_wrong_flag_is_found(bit, play, monkeypatch):
    monkeypatch.setattr(WindowsSystem, bit, 2 if bit == "CREATE_NEW" else 0)
    with pytest.raises((AssertionError, SessionError)):
        any(test(play) for test in (test_a_save_and_its_flags, test_what_was_written_is_read_again))


def test_a_writer_of_its_own_keeps_its_folder(play):
    kernel32 = play()
    with BlockWriter(PATH, 3) as writer:
        writer.space()[:3] = 7
        writer.advance(3)
        assert kernel32._key(FOLDER) in {key for key, _, _, _ in kernel32.handles.values()}
        writer.publish()
    assert kernel32.files[PATH.lower()].data == b"\7\7\7"
    with BlockReader(PATH) as reader, pytest.raises(OSError, match="shorter"):
        reader.read_at(1, 3)
