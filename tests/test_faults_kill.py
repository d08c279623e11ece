"""kill -9 at every call of a save: the old file or the new one lies under the name, and leftovers are swept."""

import fcntl
import os
import pathlib
import re
import subprocess
import sys

import pytest

import killed_saves
import serveloop
import unfinished
from given_engine import DEFAULTS, MODELS, tree
from given_faults import count
from options import EngineOptions
from sessionfile import verify_session, write_session
from sessionfolder import SessionFolder, list_sessions, sweep

SCRIPT = pathlib.Path(killed_saves.__file__)
LEFTOVER = re.compile(r"\.chat\.bin\.[0-9a-f]{16}\.tmp")
PATIENCE_S = 300


def killed(tmp_path, writer: str) -> list[pathlib.Path]:
    """A folder for each point of death."""
    root = tmp_path / writer
    root.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    subprocess.run([sys.executable, SCRIPT, root, writer], check=True, timeout=PATIENCE_S, env=environment)
    return sorted(root.iterdir())


def check(folder: pathlib.Path, old: bytes, new: bytes) -> tuple[bool, int | None]:
    """Hold one folder against the promise; returns whether the new file is there, and the leftover's size."""
    data = (folder / "chat.bin").read_bytes()
    assert data in (old, new), f"{folder.name}: neither the old file nor the new one"
    verify_session(str(folder / "chat.bin"))
    rest = [path for path in folder.iterdir() if path.name != "chat.bin"]
    assert len(rest) <= 1
    assert all(LEFTOVER.fullmatch(path.name) for path in rest)
    assert [entry.name for entry in list_sessions(folder)] == ["chat.bin"]
    assert [entry["filename"] for entry in SessionFolder(str(folder)).listing(None, None)["data"]] == ["chat.bin"]
    return data == new, rest[0].stat().st_size if rest else None


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of the old file and of the new one."""
    folder = tmp_path_factory.mktemp("written")
    for seed in (1, 2):
        write_session(str(folder / str(seed)), killed_saves.image(seed), killed_saves.IDENTITY, durable=False)
    return (folder / "1").read_bytes(), (folder / "2").read_bytes()


@pytest.mark.kills
def test_a_save_killed_at_every_call(tmp_path, written):
    seen = []
    for folder in killed(tmp_path, "safe"):
        count("kill -9 at a call in SAVE")
        seen.append(check(folder, *written))
        present = tree(folder)
        assert sweep(str(folder)) == (seen[-1][1] is not None)
        assert tree(folder) == {"chat.bin": present["chat.bin"]}
    assert len(seen) > 50
    assert {new for new, _ in seen} == {True, False}
    sizes = {size for _, size in seen}
    assert {None, 0, len(written[1])} <= sizes
    assert len(sizes) > 10


@pytest.mark.kills
def test_a_writer_that_works_on_the_old_file_is_found(tmp_path, written):
    folders = killed(tmp_path, "direct")
    with pytest.raises(AssertionError, match="neither the old file nor the new one"):
        any(check(folder, *written) is None for folder in folders)


FOREIGN = {
    ".notes.0123456789abcdef.tmp": b"somebody's own",
    ".a.bin.0123456789ABCDEF.tmp": b"STRSESS\x01",
    ".a.bin.tmp": b"STRSESS\x01",
    "a.bin.0123456789abcdef.tmp": b"STRSESS\x01",
}


def plant(folder: pathlib.Path) -> dict[str, bytes]:
    """Leftovers and what only looks like them; returns what must stay."""
    ours = {f".a.bin.{number:016x}.tmp": data for number, data in enumerate((b"", bytes(5000), b"STRSESS\x01..."))}
    for name, data in (ours | FOREIGN).items():
        (folder / name).write_bytes(data)
    (folder / ".link.bin.0123456789abcdef.tmp").symlink_to(folder / ".notes.0123456789abcdef.tmp")
    (folder / ".dir.bin.0123456789abcdef.tmp").mkdir()
    return {name: value for name, value in tree(folder).items() if name not in ours}


def test_the_next_start_of_the_engine_sweeps_what_is_ours(tmp_path):
    kept = plant(tmp_path)
    options = EngineOptions(model=str(MODELS / "llama.gguf"), slot_save_path=str(tmp_path), **DEFAULTS)
    log = []
    with open(os.devnull, "rb") as stdin, open(os.devnull, "wb") as stdout:
        assert serveloop.serve_verbs(options, stdin, stdout, log.append) == 0
    assert tree(tmp_path) == kept
    assert "removed 3 unfinished files of saves that were killed" in log


def test_a_folder_that_cannot_be_swept_does_not_keep_the_engine_from_starting(tmp_path, monkeypatch):
    plant(tmp_path)
    before = tree(tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "unlink", refuse)
    log = []
    serveloop.sweep_folder(str(tmp_path), log.append)
    assert log == ["unfinished files of killed saves stay: [Errno 13] Permission denied: " + log[0].rsplit(": ", 1)[1]]
    assert tree(tmp_path) == before
    serveloop.sweep_folder(str(tmp_path / "none"), log.append)
    assert len(log) == 1


def test_a_sweep_that_asks_neither_lock_nor_content_is_found(tmp_path, monkeypatch):
    kept = plant(tmp_path)
    held = tmp_path / ".held.bin.0123456789abcdef.tmp"
    held.write_bytes(b"STRSESS\x01...")
    with open(held, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert (sweep(str(tmp_path)), held.exists()) == (3, True)
        with monkeypatch.context() as patch:
            patch.setattr(unfinished, "lock", lambda descriptor: True)
            sweep(str(tmp_path))
        assert not held.exists()
    unfinished.sweep(str(tmp_path), lambda start: True, 8)
    assert tree(tmp_path).keys() == kept.keys() - {".notes.0123456789abcdef.tmp"}
