"""The names of session files, and what lies there already when one is written."""

import errno
import os
import re

import pytest

import disksystem
import unfinished
from given_images import Pattern, bare_image
from given_target import OLD, SAMPLE_BYTES, Recording, assert_untouched, refusal, use, write_sample
from sessionfile import may_replace, verify_session, write_session
from sessionfolder import NameRefused, SessionFolder, sweep
from sessionlayout import Identity
from unfinished import temporary_name

# --- Names and what lies there already ---


def test_paths_without_a_file_name(tmp_path):
    for path in (f"{tmp_path}/", f"{tmp_path}/.", f"{tmp_path}/..", "", ".", ".."):
        assert refusal(write_sample, path).kind == "io"
    assert refusal(write_sample, tmp_path / "none" / "chat.bin").kind == "io"
    assert os.listdir(tmp_path) == []


def test_relative_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sample("chat.bin")
    assert verify_session("chat.bin").size_bytes == SAMPLE_BYTES


def test_a_foreign_temporary_file_stays(target):
    planted = target.parent / "chat.bin.tmp"
    planted.write_bytes(b"not ours")
    refusal(write_session, target, bare_image(), Identity(1, 2), [Pattern(1 << 20, 0)])
    write_sample(target)
    assert planted.read_bytes() == b"not ours"


def test_a_symbolic_link_is_replaced_not_followed(tmp_path):
    outside = tmp_path / "outside.bin"
    outside.write_bytes(OLD)
    link = tmp_path / "chat.bin"
    link.symlink_to(outside)
    write_sample(link)
    assert outside.read_bytes() == OLD
    assert not link.is_symlink()
    assert verify_session(link).size_bytes == SAMPLE_BYTES


FOREIGN = (b"notes of a year", b"GGUF\3\0\0\0", b"STRSESX\x01", bytes(9), b"S\n", b"\0")


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_that_is_no_session_file_is_not_replaced(content, target):
    target.write_bytes(content)
    error = refusal(write_sample, target)
    assert (error.kind, error.reason, error.published) == ("invalid", "foreign", False)
    assert "no session file and stays" in str(error)
    assert (target.read_bytes(), os.listdir(target.parent)) == (content, [target.name])


@pytest.mark.parametrize("content", [b"", b"STR", b"STRSESS", b"STRSESS\2 of another version", b"STRSESS\1 damaged"])
def test_an_empty_file_and_whatever_was_a_session_file_are_replaced(content, target):
    target.write_bytes(content)
    write_sample(target)
    assert verify_session(target).size_bytes == SAMPLE_BYTES


def test_saving_and_deleting_ask_the_same_question(target):
    """What the one leaves alone, the other does; a listing names nothing that cannot be deleted."""
    folder = SessionFolder(str(target.parent))
    for content in (*FOREIGN, b"", b"STR", b"STRSESS", OLD):
        target.write_bytes(content)
        saved = may_replace(str(target))
        listed = folder.listing(None, None)["data"]
        try:
            folder.delete(target.name)
        except NameRefused:
            assert not saved
            assert not listed
        else:
            assert saved
    assert may_replace(str(target)), "a name that is free"


def test_a_name_that_is_too_long_is_refused_before_anything_is_written(target, monkeypatch):
    """Of 256 bytes, in one character each or three, below a folder or in the current one."""
    monkeypatch.chdir(target.parent)
    for name in ("x" * 256, "日" * 86, str(target.parent / ("x" * 300))):
        system = use(monkeypatch, Recording())
        error = refusal(write_sample, name)
        assert (error.kind, os.strerror(errno.ENAMETOOLONG) in str(error)) == ("io", True)
        assert not {"create", "write"} & set(system.calls)
    write_sample("x" * 255)
    assert verify_session("x" * 255).size_bytes == SAMPLE_BYTES


def test_a_temporary_file_is_held_until_it_has_its_name(target, monkeypatch):
    """A sweep in the middle of a save, at whatever call, removes nothing; one of a dead process's file does."""

    class Swept(disksystem.PosixSystem):
        def __getattribute__(self, name):
            method = super().__getattribute__(name)
            if name not in ("write", "flush", "rename", "flush_folder"):
                return method

            def call(*arguments):
                swept.append(sweep(str(target.parent)))
                return method(*arguments)

            return call

    swept = []
    use(monkeypatch, Swept())
    write_sample(target)
    assert (len(swept) >= 4, set(swept)) == (True, {0})
    assert verify_session(target).size_bytes == SAMPLE_BYTES


def test_a_sweep_between_creating_and_locking_costs_another_try(target, monkeypatch):
    class Late(disksystem.PosixSystem):
        def lock(self, *arguments):
            if len(swept) < 3:
                swept.append(sweep(str(target.parent)))
            return super().lock(*arguments)

    swept = []
    use(monkeypatch, Late())
    write_sample(target)
    assert swept == [1, 1, 1]
    assert os.listdir(target.parent) == [target.name]
    assert verify_session(target).size_bytes == SAMPLE_BYTES


def test_where_there_are_no_locks_the_clock_decides(target, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(unfinished.fcntl, "flock", none)
    write_sample(target)
    paths = [target.parent / f".a.{number:016x}.tmp" for number in range(2)]
    for path in paths:
        path.write_bytes(OLD)
    os.utime(paths[0], (0, 0))
    assert sweep(str(target.parent)) == 1
    assert [path.exists() for path in paths] == [False, True]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_the_owner_may_read(mask, tmp_path):
    before = os.umask(mask)
    try:
        write_sample(tmp_path / "chat.bin")
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "chat.bin").st_mode & 0o777 == 0o600


def test_temporary_names():
    for leaf in (
        "a",
        "chat.bin",
        "x" * 200,
        "日本語" * 40,
        "e\N{COMBINING ACUTE ACCENT}" * 60,
        os.fsdecode(b"\xff" * 9),
    ):
        name = os.fsencode(temporary_name(leaf))
        assert len(name) <= 86
        stem, digits = re.fullmatch(rb"\.(.*)\.([0-9a-f]{16})\.tmp", name, re.DOTALL).groups()
        assert os.fsencode(leaf).startswith(stem)
        if len(os.fsencode(leaf)) > 64:
            assert 60 < len(stem.decode().encode()) <= 64  # whole characters, cut no shorter than needed
        assert temporary_name(leaf) != name
        assert unfinished.NAME.fullmatch(os.fsdecode(name))
        assert digits != b"0" * 16


def test_a_name_that_is_taken_is_tried_again(target, monkeypatch):
    for taken, succeeds in ((7, True), (8, False)):
        left = taken

        class Taken(disksystem.PosixSystem):
            def create(self, folder, name):
                nonlocal left
                left -= 1
                if left >= 0:
                    raise FileExistsError(errno.EEXIST, "taken")
                return super().create(folder, name)

        use(monkeypatch, Taken())
        target.write_bytes(OLD)
        if succeeds:
            write_sample(target)
        else:
            assert refusal(write_sample, target).kind == "io"
            assert_untouched(target)
