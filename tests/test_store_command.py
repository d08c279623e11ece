"""`strata store`: what it prints, its exit codes, and that looking changes nothing."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import blockfile
import strata
from given_store import flush, ids_of, kept, new_store
from storefolder import LOCK_NAME

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path):
    """Three conversations, of which two begin alike, and their names by label."""
    store, start = new_store(tmp_path / "store"), ids_of(600, 1)
    for label, ids in (("Hello [b]there\x1b[2J", start), ("a branch", ids_of(900, 2, start[:512])),
                       ("another", ids_of(300, 3))):  # fmt: skip
        flush(store, kept(ids, [len(ids)], label=label))
    return tmp_path / "store"


def run(*words) -> int:
    return strata.main(["store", *map(str, words)])


def tree(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_list_has_a_line_for_each_conversation(folder, capsys):
    before = tree(folder)
    assert run("list", folder, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["label"], line["n_tokens"], line["states"], line["whole"]) for line in lines] == [
        ("another", 300, [300], True),
        ("a branch", 900, [900], True),
        ("Hello [b]there\x1b[2J", 600, [600], True),
    ]
    assert all(line["ok"] and line["file"] in before and line["file"].startswith(line["id"]) for line in lines)
    assert lines[1]["chain_bytes"] > lines[1]["size_bytes"]
    assert lines[2]["chain_bytes"] == lines[2]["size_bytes"] == len(before[lines[2]["file"]])
    assert run("list", folder) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[1:4]] == [[line["id"], str(line["n_tokens"])] for line in lines]
    assert "\x1b" not in "".join(shown)
    assert "[b]there" in shown[3]
    assert shown[-1] == f"3 conversations in 3 files, {sum(map(len, before.values()))} bytes"
    assert tree(folder) == before


def test_a_damaged_file_is_told_and_left_alone(folder, capsys):
    names = sorted(path.name for path in folder.glob("*.store"))
    for name, at in ((names[0], 170), (names[1], -30)):
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)
    before = tree(folder)
    assert run("list", folder, "--json") == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (refused,) = [line for line in lines if not line["ok"]]
    assert (refused["file"], refused["part"]) == (str(folder / names[0]), "table")
    assert run("verify", folder, "--json", "--quiet") == 1
    found = {line["file"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {path: line["ok"] for path, line in found.items()} == {
        str(folder / name): name == names[2] for name in names
    }
    assert found[str(folder / names[1])]["part"] == "block 0"
    assert run("verify", folder, "--quiet") == 1
    shown = capsys.readouterr().out
    assert shown.count("refused (invalid)") == 2
    assert shown.count(": sound. ") == 1
    assert tree(folder) == before


def test_sound_files_are_verified(folder, capsys):
    assert run("verify", folder) == 0
    assert capsys.readouterr().out.count(": sound. ") == 3


def test_prune_removes_what_is_over_the_size(folder, capsys, monkeypatch):
    last = max(folder.glob("*.store"), key=lambda path: path.stat().st_mtime_ns)
    data = last.read_bytes()
    last.write_bytes(data[:-1])
    assert run("prune", folder, "--store-mib", 1) == 0
    assert capsys.readouterr().out == f"1 files removed, {len(data) - 1} bytes\n"
    assert run("prune", folder, "--store-mib", 0, "--json") == 0
    assert json.loads(capsys.readouterr().out)["removed_files"] == 2
    assert set(tree(folder)) == {LOCK_NAME}


def test_what_cannot_be_done_is_told(folder, tmp_path, capsys):
    for view in (["list"], ["verify"], ["prune", "--store-mib", "1"]):
        assert run(view[0], tmp_path / "nothing", *view[1:]) == 1
        assert "nothing" in capsys.readouterr().err
        assert not (tmp_path / "nothing").exists()
    for words in (["prune", folder], ["prune", folder, "--store-mib", "-1"], ["list"], ["keep", folder]):
        with pytest.raises(SystemExit) as caught:
            run(*words)
        assert caught.value.code == 2


def test_looking_loads_no_kernels(folder):
    code = "import sys, strata; strata.main(sys.argv[1:]); sys.exit('numba' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "store", "list", folder]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def test_blocks_have_the_size_of_the_page():
    assert blockfile.BLOCK_BYTES == 16 << 20
