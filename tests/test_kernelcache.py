"""Compiled kernels on disk: whatever is done to the files, kernels are right, files are mended, and a line says so."""

import hashlib
import os
import pathlib
import pickle
import shutil
import socket
import subprocess
import sys

import pytest
from numba import types

import jit
import kernelcache
from kernelcache import TITLE, KernelFolder

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path, monkeypatch) -> KernelFolder:
    """An empty folder that kernels of a test are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    found = KernelFolder([pathlib.Path(__file__)])
    monkeypatch.setattr(jit, "KERNELS", found)
    return found


def twice(x):
    return 2 * x


def compiled() -> int:
    """Ask for a kernel of each kind as a new process would; how many had to be compiled."""
    kernel = jit.njit(twice)
    callback = jit.cfunc(types.int64(types.int64))(twice)
    assert (kernel(3), callback.ctypes(3)) == (6, 6)
    return sum(kernel.stats.cache_misses.values()) + (not callback.cache_hits)


def files(folder: KernelFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(pathlib.Path(folder.path).iterdir())}


def test_a_kernel_is_compiled_once(folder, capsys):
    assert [compiled(), compiled()] == [2, 0]
    assert {pathlib.Path(name).suffix for name in files(folder)} == {".nbi", ".nbc"}
    assert capsys.readouterr() == ("", "")
    assert folder.outlook() == "the next start finds them in the cache"


def cut(share: float):
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def flipped(place: float):
    def damage(path: pathlib.Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[int(place * (len(raw) - 1))] ^= 0x10
        path.write_bytes(raw)

    return damage


class Explosive:
    """Fails the test when it is unpickled."""

    def __reduce__(self):
        return os.abort, ()


def made_folder(path: pathlib.Path) -> None:
    path.unlink()
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").touch()


def made_pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def made_socket(path: pathlib.Path) -> None:
    path.unlink()
    where = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have 108 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(where)


def made_link(path: pathlib.Path) -> None:
    path.unlink()
    path.symlink_to(path.parent)


DAMAGE = {
    "empty": cut(0),
    **{f"cut at {share}": cut(share) for share in (0.001, 0.01, 0.3, 0.9, 0.9999)},
    **{f"bit at {place}": flipped(place) for place in (0, 0.005, 0.02, 0.5, 1)},
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "garbage": lambda path: path.write_bytes(b"\x80\x05" + bytes(range(256)) * 9),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "foreign pickle": lambda path: path.write_bytes(pickle.dumps(Explosive())),
    "foreign pickle behind our title": lambda path: path.write_bytes(TITLE + bytes(32) + pickle.dumps(Explosive())),
    "folder": made_folder,
    "pipe": made_pipe,
    "socket": made_socket,
    "link to a folder": made_link,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_sound_is_named_and_replaced(folder, damage, capsys):
    compiled()
    sound = files(folder)
    for name in sound:
        path = pathlib.Path(folder.path) / name
        DAMAGE[damage](path)
        assert compiled() >= 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert str(path) in err
        assert files(folder).keys() == sound.keys()
        assert compiled() == 0, name
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_opened_is_named_and_replaced(folder, monkeypatch, capsys):
    compiled()
    name = next(iter(files(folder)))

    def refuse(path, flags):
        if path.endswith(name):
            raise PermissionError(13, "Permission denied")
        return os.open(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(kernelcache, "_open", refuse)
        assert folder.read(os.path.join(folder.path, name)) is None
    assert capsys.readouterr().err.count("Permission denied") == 1
    assert name not in files(folder)
    assert [compiled(), compiled()] == [1, 0]


def test_a_file_that_is_missing_is_made_anew(folder, capsys):
    compiled()
    for name in files(folder):
        os.unlink(os.path.join(folder.path, name))
        assert [compiled() > 0, compiled()] == [True, 0]
    assert capsys.readouterr().err == ""


def test_an_index_lost_to_a_race_never_makes_one_form_another(folder):
    """Two processes that compile different forms of one function at once, each with the index it read before."""
    kernel = jit.njit(twice)
    kernel(3)
    index = next(path for path in pathlib.Path(folder.path).iterdir() if path.suffix == ".nbi")
    before = index.read_bytes()
    index.unlink()
    jit.njit(twice)(1.5)
    assert len(files(folder)) == 3
    for content in (index.read_bytes(), before):
        index.write_bytes(content)
        assert (jit.njit(twice)(3), jit.njit(twice)(1.5)) == (6, 3.0)


def test_a_folder_that_vanishes_or_fills_while_kernels_are_compiled_is_told_once(folder, monkeypatch, capsys):
    shutil.rmtree(folder.path)
    assert compiled() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"compiled kernels are not kept: {folder.path} cannot be written (No such file or directory)" in err
    assert folder.outlook().startswith("the next start compiles them again: ")


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernelcache.os, "replace", full)
    assert compiled() == 2
    assert files(folder) == {}
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_what_a_killed_process_was_writing_goes_with_the_next_write(folder):
    paths = [pathlib.Path(folder.path) / f"a.nbc.{name}.tmp" for name in ("old", "young")]
    for path in paths:
        path.touch()
    trial = pathlib.Path(folder.path) / "warm-up-old.tmp"
    trial.mkdir()
    (trial / "session.bin").touch()
    for path in (paths[0], trial):
        os.utime(path, (0, 0))
    compiled()
    assert [path.exists() for path in (*paths, trial)] == [False, True, False]


def test_another_source_is_another_folder(tmp_path, folder):
    (tmp_path / "a.py").write_text("1")
    one = KernelFolder([tmp_path / "a.py"]).path
    (tmp_path / "a.py").write_text("2")
    assert len({one, KernelFolder([tmp_path / "a.py"]).path, folder.path}) == 3


def test_a_seal_is_title_and_digest(folder):
    path = os.path.join(folder.path, "a")
    folder.write(path, [1, 2])
    raw = pathlib.Path(path).read_bytes()
    assert raw[: len(TITLE)] == TITLE
    assert raw[len(TITLE) : len(TITLE) + 32] == hashlib.sha256(raw[len(TITLE) + 32 :]).digest()
    assert folder.read(path) == [1, 2]


WITHOUT_HOME = """if True:
    import os, sys
    from numba import types
    from jit import cfunc, njit
    kernel, callback = njit(lambda x: 2 * x), cfunc(types.int64(types.int64))(lambda x: 3 * x)
    print(kernel(2), callback.ctypes(2), flush=True)
    if sys.argv[1:]:
        os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("signal", ["", "15", "9"])
def test_a_home_that_cannot_be_written_leaves_nothing_behind(tmp_path, signal):
    """However the process ends."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", WITHOUT_HOME, *([signal] if signal else [])]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (-int(signal or 0), "4 6\n", "")
    assert list((tmp_path / "tmp").iterdir()) == []
