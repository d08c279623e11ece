"""Real disks: full, read-only, with a limit on sizes, with folders that vanish and names that are something else."""

import contextlib
import errno
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

import blockfile
import disksystem
import killed_saves
import unfinished
from given_engine import held, tree
from given_faults import FaultySystem, count, first, installed
from given_session import Live, refusal_of
from sessionfile import inspect_session, may_replace, read_session, verify_session, write_session
from sessionlayout import Limits, SessionError

pytestmark = pytest.mark.faults

NAME_MAX = 255
NOBODY = 65534
NO_ROOM = "a full or read-only disk, a limit on file sizes, a folder of another user"
NO_FOLDER = "the folder vanishes or is replaced during SAVE"
NO_FILE = "a link, pipe, socket, device or folder in place of the file"
N_SWAPS = 200


@pytest.fixture
def live(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    return Live(folder)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 32 KiB; the folder lies on it while the test runs."""
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", mountpoint], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs may not be mounted here: {mounted.stderr.decode().strip()}")
    yield mountpoint
    subprocess.run(["umount", mountpoint], check=True)


def unharmed(live, operation, folder) -> SessionError:
    """An operation on another folder that must be refused: that folder, the live one and all that is held stay."""
    before, files, others = held(live.session), tree(folder), tree(live.folder)
    error = refusal_of(operation)
    assert error, "it was not refused"
    assert not error.published
    assert (tree(folder), tree(live.folder)) == (files, others)
    live.goes_on(before)
    return error


# --- full and read-only disks, limits


def test_a_full_disk(live, small_disk):
    assert len(live.new) > 32 << 10
    (small_disk / "chat.bin").write_bytes(live.old[: 8 << 10])
    for name in ("chat.bin", "other.bin"):
        error = unharmed(live, lambda name=name: live.session.save(str(small_disk / name)), small_disk)
        assert (error.kind, os.strerror(errno.ENOSPC) in str(error)) == ("storage", True)
        count(NO_ROOM)
    live.session.save(str(live.folder / "there_is_room.bin"))


@pytest.mark.parametrize("call", ["create", "allocate", "write"])
def test_a_disk_that_fills_up_while_a_save_runs(call, live, small_disk):
    """There is room when the save begins, and somebody else takes it before the first byte is written."""
    subprocess.run(["mount", "-o", f"remount,size={2 * len(live.new)}", small_disk], check=True)
    live.session.save(str(small_disk / "chat.bin"))
    (small_disk / "chat.bin").unlink()

    def take_it():
        with open(small_disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(small_disk).f_bavail == 0

    system = FaultySystem(1, first(take_it), only=call, kind=NO_ROOM)
    with installed(system):
        error = refusal_of(lambda: live.session.save(str(small_disk / "chat.bin")))
    assert (error.kind, error.published) == ("storage", False)
    assert list(tree(small_disk)) == ["filler"]
    live.goes_on(held(live.session))


def test_a_read_only_disk(live, small_disk):
    (small_disk / "chat.bin").write_bytes(live.old[: 8 << 10])
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    error = unharmed(live, lambda: live.session.save(str(small_disk / "chat.bin")), small_disk)
    assert (error.kind, os.strerror(errno.EROFS) in str(error)) == ("io", True)
    count(NO_ROOM)


def test_a_limit_on_file_sizes(live):
    """RLIMIT_FSIZE, in this process: its signal is ignored by Python, so the call fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    for size in (0, 1, 4096, len(live.new) // 2, len(live.new) - 1):

        def save(size=size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            try:
                live.save()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        error = live.attempt(save)
        assert (error.kind, os.strerror(errno.EFBIG) in str(error)) == ("storage", True)
        count(NO_ROOM)
    live.save()
    assert live.chat.read_bytes() == live.new


@contextlib.contextmanager
def as_a_stranger(folder: str):
    """Whoever may only read in the folder: another user, where this one may do everything."""
    os.chmod(folder, 0o555)
    if not os.getuid():
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if not os.getuid():
            os.seteuid(0)
            os.setegid(0)
        os.chmod(folder, 0o755)


def test_a_folder_of_somebody_else(live):
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, whose folders let nobody else through
        folder = pathlib.Path(name)
        shutil.copy(live.chat, folder)

        def save():
            with as_a_stranger(name):
                live.session.save(f"{name}/chat.bin")

        error = unharmed(live, save, folder)
        assert (error.kind, os.strerror(errno.EACCES) in str(error)) == ("io", True)
        count(NO_ROOM)


# --- folders and names


SAVING = ("open_folder", "create", "write", "flush", "rename")


@pytest.mark.parametrize("call", SAVING)
def test_a_folder_that_vanishes(call, live):
    folder = live.folder.parent / "vanishing"
    folder.mkdir()
    with installed(FaultySystem(1, first(lambda: shutil.rmtree(folder)), only=call, kind=NO_FOLDER)):
        error = unharmed(live, lambda: live.session.save(str(folder / "chat.bin")), live.folder)
    assert error.kind == "io"
    assert not folder.exists()


@pytest.mark.parametrize("call", SAVING[1:])
def test_a_folder_that_is_renamed_and_replaced(call, live):
    """The file goes into the folder that was opened, never half into another one of its name."""
    folder, moved = live.folder.parent / "moving", live.folder.parent / "moved"
    folder.mkdir()

    def swap():
        folder.rename(moved)
        folder.mkdir()

    with installed(FaultySystem(1, first(swap), only=call, kind=NO_FOLDER)):
        live.session.save(str(folder / "chat.bin"))
    assert (tree(folder), tree(moved)) == ({}, {"chat.bin": live.new})


def test_names_at_the_limit_of_the_file_system(live):
    names = ["x" * NAME_MAX, "日" * (NAME_MAX // 3), "e\N{COMBINING ACUTE ACCENT}" * (NAME_MAX // 3)]
    for name in names:
        live.session.save(str(live.folder / name))
        assert (live.folder / name).read_bytes() == live.new
        live.session.restore(str(live.folder / name))
    for name in [f"{name}x" for name in names]:
        error = live.attempt(lambda name=name: live.session.save(str(live.folder / name)))
        assert (error.kind, os.strerror(errno.ENAMETOOLONG) in str(error)) == ("io", True)
        error = live.attempt(lambda name=name: live.session.restore(str(live.folder / name)))
        assert error.kind == "io"
        count("a name or path is too long", 2)
    assert len(tree(live.folder)) == 1 + len(names)
    deep = str(live.folder / "/".join(["d" * 200] * 25) / "chat.bin")
    for operation in (live.session.save, live.session.restore):
        assert live.attempt(lambda operation=operation: operation(deep)).kind == "io"
        count("a name or path is too long")


# --- links of every kind


def things(folder: pathlib.Path) -> dict[str, str]:
    """Names that are no plain file, with a word of the refusal."""
    (folder / "real").write_bytes(b"STRSESS outside")
    (folder / "folder").mkdir()
    for name, target in (("link", "real"), ("dangling", "none"), ("loop", "loop"), ("tofolder", "folder")):
        (folder / name).symlink_to(folder / target)
    (folder / "chain").symlink_to(folder / "link")
    (folder / "proc").symlink_to("/proc/self/mem")
    os.link(folder / "real", folder / "hard")
    os.mkfifo(folder / "fifo")
    words = dict.fromkeys(("link", "dangling", "loop", "tofolder", "chain", "proc"), "symbolic link")
    return words | {"hard": "hard link", "fifo": "a pipe", "folder": "a folder", "socket": "a socket"}


def test_restoring_what_is_no_plain_file(live, tmp_path, monkeypatch):
    folder = tmp_path / "things"
    folder.mkdir()
    words = things(folder)
    monkeypatch.chdir(folder)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name, word in words.items():
            error = live.attempt(lambda name=name: live.session.restore(name))
            assert (error.kind, word in str(error)) == ("invalid", True), name
            count(NO_FILE)
        for device in ("/dev/null", "/dev/zero", "/dev/full"):
            error = live.attempt(lambda device=device: live.session.restore(device))
            assert (error.kind, "a device" in str(error)) == ("invalid", True)
            count(NO_FILE)


def test_saving_over_what_is_no_plain_file(live, tmp_path):
    """The name of a link is replaced, what it led to is not touched; a pipe, a socket, a device and a folder stay."""
    folder = tmp_path / "things"
    folder.mkdir()
    words = things(folder)
    for name in sorted(words.keys() - {"folder", "fifo", "socket"}):
        live.session.save(str(folder / name))
        assert not (folder / name).is_symlink()
        assert (folder / name).read_bytes() == live.new
        count(NO_FILE)
    assert (folder / "real").read_bytes() == b"STRSESS outside"
    assert (folder / "real").stat().st_nlink == 1
    assert tree(folder / "folder") == {}
    (folder / "fifo").unlink()  # a tree with a FIFO cannot be read
    assert unharmed(live, lambda: live.session.save(str(folder / "folder")), folder).kind == "io"


def test_a_pipe_a_socket_and_a_device_are_not_replaced(tmp_path, monkeypatch):
    """As root, a SAVE to /dev/null took it from every other program."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert [may_replace(name) for name in ("fifo", "socket", "/dev/null", "/dev/full")] == [False] * 4
        before = [os.lstat(name) for name in ("fifo", "socket")]
        for name in ("fifo", "socket"):
            with pytest.raises(SessionError, match="no session file and stays"):
                write_session(name, killed_saves.image(1), killed_saves.IDENTITY)
        assert [os.lstat(name) for name in ("fifo", "socket")] == before


def swapped_while_restoring(folder: pathlib.Path) -> set[str]:
    """Read a name that is a good file and a link to another by turns, while they are exchanged N_SWAPS times."""
    name, good, planted = folder / "chat.bin", folder / "good", folder / "planted"
    for path, seed in ((good, 1), (planted, 2)):
        write_session(str(path), killed_saves.image(seed), killed_saves.IDENTITY)
    expected = good.read_bytes()
    shutil.copy(good, name)

    def swap():
        for _ in range(N_SWAPS):
            (folder / "link").symlink_to(planted)
            os.replace(folder / "link", name)
            shutil.copy(good, folder / "copy")
            os.replace(folder / "copy", name)
            count("file and link change places during RESTORE")

    thread, outcomes, interval = threading.Thread(target=swap), set(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # neither of the two waits for the other
    thread.start()
    try:
        while thread.is_alive():
            try:
                image = read_session(str(name), killed_saves.IDENTITY, Limits())
                outcomes.add("good" if image.live.ids.tobytes() in expected else "planted")
            except SessionError as error:
                outcomes.add(error.reason)
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    return outcomes


def test_a_file_and_a_link_that_change_places_while_restoring(tmp_path):
    outcomes = swapped_while_restoring(tmp_path)
    assert outcomes <= {"good", "symlink", "hard-link"}  # a copy that is replaced while it is open has no name left
    assert "good" in outcomes


def test_a_reader_that_follows_links_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(
        disksystem.PosixSystem, "open_existing", lambda self, path: os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    )
    assert "planted" in swapped_while_restoring(tmp_path)


def test_a_writer_that_follows_links_is_found(live, tmp_path, monkeypatch):
    def through(self, folder, source, destination):
        shutil.copy(f"/proc/self/fd/{folder}/{source}", f"/proc/self/fd/{folder}/{destination}")

    monkeypatch.setattr(disksystem.PosixSystem, "rename", through)
    with pytest.raises((AssertionError, SessionError)):
        test_saving_over_what_is_no_plain_file(live, tmp_path)


def test_a_writer_that_leaves_its_temporary_file_is_found(live, monkeypatch):
    monkeypatch.setattr(blockfile.BlockWriter, "_discard", blockfile.BlockWriter._close)
    with pytest.raises(AssertionError):
        test_a_limit_on_file_sizes(live)


def test_a_writer_whose_temporary_name_is_too_long_is_found(live, monkeypatch):
    monkeypatch.setattr(unfinished, "MAX_STEM_BYTES", NAME_MAX)
    with pytest.raises(SessionError, match=os.strerror(errno.ENAMETOOLONG)):
        test_names_at_the_limit_of_the_file_system(live)


def test_a_writer_that_makes_its_folder_again_is_found(live, monkeypatch):
    create = disksystem.PosixSystem.create

    def anew(self, folder, name):
        (live.folder.parent / "vanishing").mkdir(exist_ok=True)
        return create(self, folder, name)

    monkeypatch.setattr(disksystem.PosixSystem, "create", anew)
    with pytest.raises(AssertionError):
        test_a_folder_that_vanishes("create", live)


def test_a_huge_file_of_nothing_is_refused_at_once(live):
    with open(live.folder / "huge.bin", "wb") as file:
        file.truncate(100 << 30)
    before = held(live.session)
    error = refusal_of(lambda: live.session.restore(str(live.folder / "huge.bin")))
    assert (error.kind, error.reason) == ("invalid", "too-big")
    for look in (inspect_session, verify_session):
        assert refusal_of(lambda look=look: look(str(live.folder / "huge.bin"))).kind == "invalid"
    (live.folder / "huge.bin").unlink()
    live.goes_on(before)
    count("a damaged file is restored")
