"""`strata session inspect`, `verify` and `list`: what they print where, and their exit codes."""

import dataclasses
import json
import os
import pathlib
import pty
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

import sessionparse
import strata
from given_images import DATA, IMAGES, identity, image, number
from sessionfile import inspect_session, write_session
from sessionfolder import SessionFolder
from sessionlayout import Identity, KvLayer, Record

ROOT = pathlib.Path(__file__).resolve().parent.parent
STRATA = [sys.executable, str(ROOT / "strata.py"), "session"]
GOOD = str(DATA / "ckpt1_images_2kv.bin")
EMPTY = str(DATA / "min_empty.bin")


@pytest.fixture
def bad(tmp_path):
    """A file with one changed byte in its payload."""
    data = bytearray((DATA / "ckpt1_images_2kv.bin").read_bytes())
    data[4000] ^= 1
    (tmp_path / "bad.bin").write_bytes(data)
    return str(tmp_path / "bad.bin")


def run(capsys, *arguments):
    code = strata.main(["session", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_verify_says_what_it_proved(capsys):
    code, out, err = run(capsys, "verify", GOOD, EMPTY)
    assert code == 0
    assert err == ""
    for line, name in zip(out.splitlines(), ("ckpt1_images_2kv", "min_empty"), strict=True):
        assert line.startswith(f"{DATA / name}.bin: sound. All {IMAGES[name]['file']['size']} bytes were read")
        assert IMAGES[name]["file"]["payload_hash"][2:] in line


def test_verify_goes_on_after_a_bad_file(capsys, bad):
    code, out, _ = run(capsys, "verify", bad, GOOD)
    assert code == 1
    refused, sound = out.splitlines()
    assert "refused (invalid): payload hash at offset 7596: expected " in refused
    assert "found " in refused
    assert ": sound." in sound


def test_verify_json(capsys, bad):
    code, out, _ = run(capsys, "verify", "--json", bad, GOOD)
    refused, sound = map(json.loads, out.splitlines())
    assert code == 1
    assert (refused["file"], refused["ok"], refused["kind"], refused["reason"]) == (
        bad,
        False,
        "invalid",
        "payload-hash",
    )
    assert refused["offset"] == 7596
    assert refused["expected"] != refused["found"]
    assert refused["message"]
    assert (sound["file"], sound["ok"], sound["size_bytes"]) == (GOOD, True, 7612)


def test_inspect_text(capsys):
    code, out, err = run(capsys, "inspect", GOOD)
    assert (code, err) == (0, "")
    known = identity("ckpt1_images_2kv")
    for words in (f"{known.model:016x}", f"{known.config:016x}", "7612 bytes", "int8 rotated", "code -2147483648"):
        assert words in out
    assert "live state    gdn 129, ple 40, tails 31, dead 32, block_pos 12" in out
    assert max(map(len, out.splitlines()[1:])) <= 80


def test_inspect_json(capsys):
    code, out, _ = run(capsys, "inspect", "--json", GOOD)
    assert code == 0
    info, expected = json.loads(out), image("ckpt1_images_2kv")
    assert info["geometry"] == list(expected.geometry)
    assert info["layers"] == [expected.layer_lo, expected.layer_hi]
    assert info["control_vector"] is False
    assert info["live"]["n_tokens"] == expected.live.n_tokens
    assert [c["n_tokens"] for c in info["checkpoints"]] == [c.n_tokens for c in expected.checkpoints]
    assert [layer["format"] for layer in info["kv_layers"]] == [17, -(1 << 31)]
    assert [tuple(layer["part_bytes"].values()) for layer in info["kv_layers"]] == [k.part_sizes for k in expected.kv]
    assert int(info["payload_hash"], 16) == number(IMAGES["ckpt1_images_2kv"]["file"]["payload_hash"])


def test_inspect_tells_refusals_on_stderr(capsys, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF".ljust(200, b"\0"))
    code, out, err = run(capsys, "inspect", str(tmp_path / "model.gguf"), EMPTY)
    assert code == 1
    assert "not a session file: it looks like a GGUF model" in err
    assert out.startswith(EMPTY)


@pytest.mark.parametrize("view", ["inspect", "verify"])
def test_what_is_no_file_is_refused_without_waiting(view, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("folder")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    shutil.copy(EMPTY, "a.bin")
    os.symlink("a.bin", "link")
    for path, words in (
        ("-", "standard input"),
        ("pipe", "pipe"),
        ("folder", "folder"),
        ("socket", "socket"),
        ("/dev/null", "device"),
        ("link", "symbolic link"),
        ("none", "No such file"),
    ):
        code, out, err = run(capsys, view, path)
        assert code == 1
        assert words in out + err
        assert len((out + err).splitlines()) == 1
    listener.close()


@pytest.mark.parametrize("view", ["inspect", "verify"])
def test_a_pipe_in_place_of_a_file(view):
    """As a shell's process substitution gives it."""
    reading, writing = os.pipe()
    done = subprocess.run(
        [*STRATA, view, f"/dev/fd/{reading}"],
        pass_fds=[reading],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(reading)
    os.close(writing)
    assert done.returncode == 1
    assert "refused" in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [[], ["verify"], ["inspect"], ["list"], ["verify", "--fast", "a"], ["mend", "a"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        strata.main(["session", *arguments])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_list(capsys, tmp_path):
    for name in ("ckpt1_images_2kv", "min_empty"):
        shutil.copy(DATA / f"{name}.bin", tmp_path)
        os.utime(tmp_path / f"{name}.bin", (1e9, 1e9))
    (tmp_path / "notes.txt").write_text("x")
    code, out, err = run(capsys, "list", str(tmp_path))
    assert (code, err) == (0, "")
    assert [line.split()[:2] + line.split()[4:] for line in out.splitlines()] == [
        ["8", "7612", "ckpt1_images_2kv.bin"],
        ["0", "328", "min_empty.bin"],
    ]
    assert "2001-09-" in out
    (tmp_path / "cut\n.bin").write_bytes((DATA / "min_empty.bin").read_bytes()[:300])
    code, out, _ = run(capsys, "list", "--json", str(tmp_path))
    entries = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [entry["ok"] for entry in entries] == [True, False, True]
    assert entries[0]["modified_s"] == 1e9
    assert int(entries[0]["model"], 16) == identity("ckpt1_images_2kv").model
    code, out, _ = run(capsys, "list", str(tmp_path))
    assert len(out.splitlines()) == 3, "one line a file, whatever its name"
    assert "cut\\n.bin: refused" in out


def test_list_of_no_folder(capsys, tmp_path):
    code, out, err = run(capsys, "list", str(tmp_path / "none"))
    assert (code, out) == (1, "")
    assert "No such file" in err


def test_names_that_would_disturb_a_terminal(capsys, tmp_path):
    name = os.fsdecode(b"\x1b[31m\xff\r\nA.bin")
    shutil.copy(EMPTY, tmp_path / name)
    code, out, _ = run(capsys, "verify", str(tmp_path / name))
    assert code == 0
    assert out.isprintable() or out.rstrip("\n").isprintable()
    assert "\\x1b[31m" in out
    code, out, _ = run(capsys, "inspect", "--json", str(tmp_path / name))
    assert json.loads(out)["ok"]


# --- The terminal ---


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "[red]sample.bin"
    write_session(path, image("sample"), identity("sample"), durable=False)
    return str(path)


def on_terminal(*arguments) -> tuple[bytes, str, int]:
    """What a run writes to a terminal on stderr, its stdout and its exit code."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [*STRATA, *arguments], stderr=theirs, stdout=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    out, _ = child.communicate(timeout=60)
    os.close(ours)
    return bytes(shown), out.decode(), child.returncode


def test_a_bar_on_a_terminal(sample):
    shown, out, code = on_terminal("verify", sample)
    assert code == 0
    assert b"[red]sample.bin" in shown
    assert b"/s" in shown
    assert out.count("\n") == 1


def test_quiet(sample):
    shown, out, code = on_terminal("verify", "--quiet", sample)
    assert (shown, code) == (b"", 0)
    assert "sound" in out


def test_lines_for_large_files_without_a_terminal(capsys, sample, monkeypatch):
    monkeypatch.setattr(strata, "LARGE_BYTES", 1 << 20)
    code, out, err = run(capsys, "verify", sample)
    assert code == 0
    assert [line.rsplit(": ", 1)[1] for line in err.splitlines()] == [
        "read 16777216 of 17878535 bytes",
        "read 17878535 of 17878535 bytes",
    ]
    assert out.count("\n") == 1
    assert run(capsys, "verify", "--quiet", sample)[2] == ""


def test_a_reader_that_goes_away_is_no_traceback():
    for view in (["inspect", GOOD], ["verify", "--json", GOOD], ["list", str(DATA)]):
        child = subprocess.Popen([*STRATA, *view], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        child.stdout.close()
        err = child.stderr.read()
        child.stderr.close()
        assert child.wait(60) == 1
        assert err == ""


def test_help_needs_the_standard_library_alone():
    script = (
        "import sys, strata\n"
        "try: strata.main(['session', 'verify', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'numba', 'rich', 'crcmod'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def many_records(path: pathlib.Path, n_checkpoints: int, n_layers: int) -> None:
    """A file with so many checkpoints, each of two tokens and a byte of state, and so many layers of three bytes."""
    whole, one = image("ckpt1_images_2kv"), np.ones(1, np.uint8)
    checkpoints = [Record(np.arange(2, dtype=np.int32), gdn=one) for _ in range(n_checkpoints)]
    layers = [KvLayer(whole.kv[0].header, (one, one, one, one[:0], one[:0])) for _ in range(n_layers)]
    write_session(path, dataclasses.replace(whole, checkpoints=checkpoints, kv=layers), Identity(1, 2), durable=False)


@pytest.mark.parametrize(("n_checkpoints", "n_layers"), [(5, 2), (3, 4), (5, 5), (3, 3), (0, 4)])
def test_a_file_of_more_records_than_are_listed_is_sound(capsys, monkeypatch, tmp_path, n_checkpoints, n_layers):
    """Verified to its last byte; a look without reading ends where its list does, and says so."""
    monkeypatch.setattr(sessionparse, "MOST_LISTED", 3)
    path = tmp_path / "many.bin"
    many_records(path, n_checkpoints, n_layers)
    code, out, _ = run(capsys, "verify", "--json", str(path))
    proved = json.loads(out)
    assert (code, proved["ok"]) == (0, True)
    live_bytes = sum(proved["live"]["state_bytes"].values())
    assert proved["state_bytes"] - live_bytes == n_checkpoints
    assert proved["kv_bytes"] == 3 * n_layers
    more = (max(0, n_checkpoints - 3), max(0, n_layers - 3))
    rest = proved.get("not_listed", {"n_checkpoints": 0, "n_layers": 0, "looked_at": True})
    assert (rest["n_checkpoints"], rest["n_layers"], rest["looked_at"]) == (*more, True)
    code, out, _ = run(capsys, "inspect", str(path))
    assert code == 0
    assert ("was not looked at" in out) == any(more)
    code, out, _ = run(capsys, "list", "--json", str(tmp_path))
    assert (code, json.loads(out)["ok"]) == (0, True)
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    assert run(capsys, "verify", str(path))[0] == 1


@pytest.mark.slow
def test_a_file_of_70000_checkpoints_is_sound(capsys, tmp_path):
    many_records(tmp_path / "many.bin", 70_000, 1)
    code, out, _ = run(capsys, "verify", str(tmp_path / "many.bin"))
    assert (code, ": sound. All " in out) == (0, True)
    info = inspect_session(tmp_path / "many.bin")
    assert len(info.image.checkpoints) + info.image.unlisted.n_checkpoints == 70_000
    assert SessionFolder(str(tmp_path)).listing(None, None)["data"][0]["problem"] is None
