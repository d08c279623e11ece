"""The list of saved sessions over HTTP, and what may be deleted."""

import fcntl
import os

import pytest

import sessionfolder
from given_front import error_of
from given_images import write_empty_session

# --- Saved sessions ---


def listed(front) -> dict[str, dict]:
    return {entry["filename"]: entry for entry in front.get("/sessions").json()["data"]}


def test_the_list_of_sessions(front):
    folder = front.folder / "saved"
    size = write_empty_session(folder / "mine.bin", 1234)
    write_empty_session(folder / "other-model.bin", 5, model=1)
    write_empty_session(folder / "other-config.bin", 6, config=1)
    (folder / "damaged.bin").write_bytes(b"STRSESS\x01" + bytes(20))
    (folder / "notes.txt").write_text("not a session")
    (folder / ".mine.bin.0123456789abcdef.tmp").write_bytes(b"STRSESS\x01")
    (folder / "link.bin").symlink_to(folder / "mine.bin")
    found = listed(front)
    assert not {"notes.txt", "link.bin", ".mine.bin.0123456789abcdef.tmp"} & found.keys()
    mine = found["mine.bin"]
    assert (mine["n_bytes"], mine["n_tokens"], mine["match"], mine["problem"]) == (size, 1234, True, None)
    assert mine["modified"] == pytest.approx((folder / "mine.bin").stat().st_mtime)
    assert (found["other-model.bin"]["match"], found["other-model.bin"]["model_match"]) == (False, False)
    assert (found["other-config.bin"]["match"], found["other-config.bin"]["model_match"]) == (False, True)
    assert found["damaged.bin"]["problem"]
    assert found["damaged.bin"]["match"] is False
    write_empty_session(folder / "mine.bin", 4321)
    assert listed(front)["mine.bin"]["n_tokens"] == 4321


def test_deleting_sessions(front, tmp_path):
    folder = front.folder / "saved"
    write_empty_session(folder / "gone.bin", 3)
    answer = front.client.delete("/sessions/gone.bin")
    assert (answer.status_code, answer.json()["filename"]) == (200, "gone.bin")
    assert not (folder / "gone.bin").exists()
    error_of(front.client.delete("/sessions/gone.bin"), 404)
    outside = tmp_path / "outside.bin"
    write_empty_session(outside, 3)
    (folder / "evil.bin").symlink_to(outside)
    (folder / "foreign.txt").write_text("mine")
    (folder / "folder.bin").mkdir()
    for name in ("evil.bin", "foreign.txt", "folder.bin", ".hidden", "%2e%2e%2foutside.bin", "a%2fb", "x%00y"):
        error_of(front.client.delete(f"/sessions/{name}"), 400)
    assert outside.exists()
    assert (folder / "foreign.txt").exists()
    error_of(front.client.delete("/sessions/"), 400)


def test_a_folder_full_of_files_is_looked_into_once(tmp_path):
    looked = []
    for number in range(1200):
        (tmp_path / f"{number}.bin").touch()

    def inspect(path):
        looked.append(path)
        return sessionfolder.SavedSession(n_tokens=1, model="aa", config="bb")

    folder = sessionfolder.SessionFolder(str(tmp_path), inspect)
    first = folder.listing("aa", "bb")
    assert (len(first["data"]), first["complete"]) == (sessionfolder.MAX_LISTED, False)
    assert folder.listing("aa", "bb") == first
    assert len(looked) == sessionfolder.MAX_LISTED
    assert folder.listing(None, None)["data"][0]["match"] is None


def test_what_is_wrong_with_a_file_is_told_on_one_line(tmp_path):
    (tmp_path / "a.bin").touch()
    folder = sessionfolder.SessionFolder(str(tmp_path), lambda path: sessionfolder.SavedSession(problem="a\x1b[2J\nb"))
    assert folder.listing(None, None)["data"][0]["problem"] == "a\\x1b[2J b"


def test_what_killed_saves_left_is_swept(tmp_path):
    unfinished = [".a.bin.0123456789abcdef.tmp", ".日本.fedcba9876543210.tmp"]
    kept = ["a.bin", ".a.bin.tmp", ".a.bin.0123456789ABCDEF.tmp", "a.bin.0123456789abcdef.tmp"]
    for name in unfinished + kept:
        (tmp_path / name).write_bytes(b"STRSESS\x01")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".foreign.0123456789abcdef.tmp").write_bytes(b"not ours")
    os.utime(tmp_path / ".foreign.0123456789abcdef.tmp", (0, 0))
    running = tmp_path / ".running.0123456789abcdef.tmp"
    running.write_bytes(b"STRSESS\x01")
    os.utime(running, (0, 0))
    with open(running, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sessionfolder.SessionFolder(str(tmp_path)).sweep() == len(unfinished)
    left = {".foreign.0123456789abcdef.tmp", running.name, *kept}
    assert set(os.listdir(tmp_path)) == left
    assert sessionfolder.SessionFolder(str(tmp_path / "none")).sweep() == 0


def test_an_empty_or_missing_folder_has_no_sessions(tmp_path):
    assert sessionfolder.SessionFolder(str(tmp_path / "none")).listing("aa", "bb")["data"] == []
