"""The expert profile: what is written comes back, what is wrong is told in one line, a failed write harms nothing."""

import os
import pathlib
import stat

import pytest

import expertprofile
from expertprofile import ExpertProfile

MODEL, LAYERS, EXPERTS = 0x0123456789ABCDEF, 2, 4
RANKING = [[2, 0, 3, 1], [0, 1, 2, 3]]
TEXT = "strata expert profile 1\nmodel 0123456789abcdef layers 2 experts 4\n2 0 3 1\n0 1 2 3\n"


@pytest.fixture
def log():
    return []


def profile(path, log, model=MODEL) -> ExpertProfile:
    return ExpertProfile(str(path), model, LAYERS, EXPERTS, log.append)


def save(one: ExpertProfile) -> None:
    one.save(lambda: RANKING)


def test_what_is_written_is_read(tmp_path, log):
    path = tmp_path / "experts"
    assert profile(path, log).read() is None  # none yet: nothing to tell
    save(profile(path, log))
    assert path.read_text() == TEXT
    assert profile(path, log).read() == RANKING
    path.write_text(TEXT.removesuffix("\n"))
    assert profile(path, log).read() == RANKING
    assert log == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no expert profile of this format"),
        (b"\x00\xff" * 20, "other bytes than text"),
        (b"strata expert profile 2\n", "no expert profile of this format"),
        (TEXT.replace("\n", "\r\n"), "no expert profile of this format"),
        (TEXT.replace("cdef", "cdee"), "it is for 'model 0123456789abcdee layers 2 experts 4', this is 'model 0"),
        (TEXT.replace("layers 2", "layers 3"), "it is for"),
        (TEXT.replace("experts 4", "experts 5"), "it is for"),
        (TEXT + "0 1 2 3\n", "longer than the"),
        (TEXT.replace("2 0 3 1\n", ""), "it has 1 layers of 2"),
        (TEXT[: TEXT.index("2 0 3")], "it has 1 layers of 2"),
        (TEXT.replace("2 0 3 1\n", "2 0\n3 1\n"), "it has 3 layers of 2"),
        (TEXT.replace("2 0 3 1", "2 0 3"), "layer 0 names 3 experts of 4"),
        (TEXT.replace("2 0 3 1", "2 0 3 0"), "layer 0 names expert 0 twice"),
        (TEXT.replace("0 1 2 3", "0 1 2 4"), "layer 1 names '4', which is no expert below 4"),
        (TEXT.replace("2 0 3 1", "2 0 3 -"), "layer 0 names '-'"),
        (TEXT.replace("2 0 3 1", "2  0 3"), "layer 0 names ''"),
        (TEXT.replace("2 0 3 1", "02 0 1"), "layer 0 names '02'"),
        (TEXT.replace("2 0 3 1", "1e0 2"), "layer 0 names '1e0'"),
        (b"0" * (1 << 20), "no expert profile of this format"),
        (TEXT.replace("layers 2", "layers 9") + "0 1 2 3\n" * 7, "it is for"),
        (TEXT + "\n" * (1 << 20), "longer than the"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_and_replaced_by_the_next_save_if_it_is_ours(content, reason, tmp_path, log):
    path = tmp_path / "experts"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    one = profile(path, log)
    assert one.read() is None
    assert len(log) == 1
    assert log[0].startswith(f"--expert-profile-save: {path} is not used, the order of the model is: ")
    assert reason in log[0]
    assert log[0].isprintable()
    before = path.read_bytes()
    save(one)
    if b"strata expert profile ".startswith(before[:22]):
        assert profile(path, log).read() == RANKING
    else:
        assert log[1:] == [f"--expert-profile-save: {path} could not be written: it is no expert profile, and stays"]
        assert path.read_bytes() == before


def test_a_profile_of_another_model_is_not_used(tmp_path, log):
    save(profile(tmp_path / "experts", log, model=MODEL + 1))
    assert profile(tmp_path / "experts", log).read() is None
    assert "it is for 'model 0123456789abcdf0" in log[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system")
def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path, log):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", pathlib.Path("/dev/zero")):
        log.clear()
        one, kind = profile(path, log), stat.S_IFMT(path.stat().st_mode)
        assert one.read() is None
        save(one)
        assert [line.rpartition(": ")[2] for line in log] == ["it is no regular file"] * 2
        assert stat.S_IFMT(path.stat().st_mode) == kind


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path, log):
    (tmp_path / "real").write_text("strata expert profile 0")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(profile(tmp_path / "link", log))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == TEXT


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_is_told(call, tmp_path, log, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "experts"
    path.write_text("strata expert profile 0")
    with monkeypatch.context() as broken:
        broken.setattr(expertprofile.os, call, fail)
        save(profile(path, log))
    assert log == [f"--expert-profile-save: {path} could not be written: No space left on device"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["experts"]
    assert path.read_text() == "strata expert profile 0"


def test_a_folder_that_is_not_there_is_told(tmp_path, log):
    one = profile(tmp_path / "absent" / "experts", log)
    assert one.read() is None
    save(one)
    assert len(log) == 1
    assert log[0].endswith("could not be written: No such file or directory")


def test_a_file_is_written_before_it_takes_its_name(tmp_path, log, monkeypatch):
    calls, path = [], tmp_path / "experts"
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, n=name, real=real: (calls.append((n, path.exists())), real(*args)))
    save(profile(path, log))
    assert calls == [("fsync", False), ("replace", False), ("fsync", True)]  # the last one is the folder's


def test_a_save_is_due_once_in_ten_minutes(tmp_path, log, monkeypatch):
    now, path = [1000.0], tmp_path / "experts"
    monkeypatch.setattr(expertprofile.time, "monotonic", lambda: now[0])
    one = profile(path, log)
    for at, written in ((1599, False), (1600, True), (1601, False), (2199, False), (2200, True)):
        now[0] = at
        one.save_if_due(lambda: RANKING)
        assert path.exists() == written
        path.unlink(missing_ok=True)
