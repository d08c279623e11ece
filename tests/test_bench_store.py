"""What bench/store.py tells of the store: bytes that lie on the disk, sizes that a save really has."""

import json
import os
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "bench"))  # its scripts import each other

import store
from report import HEADING, line_of

from sessionfile import write_session
from sessionlayout import Identity
from sessionstate import image_of, sources_of
from storefolder import Store

SCALE = 0.004  # a turn of 8 tokens, states without the recurrent layers


@pytest.fixture
def written(monkeypatch):
    """Sizes of the files that stores take in, as the disk has them."""
    sizes, take_in = [], Store.take_in

    def seen(self, name, writer):
        sizes.append(os.path.getsize(self.path_of(name)))
        take_in(self, name, writer)

    monkeypatch.setattr(Store, "take_in", seen)
    return sizes


def test_the_table_is_what_was_written(tmp_path, monkeypatch, capsys, written):
    figures, folder = tmp_path / "store.json", tmp_path / "folder"
    folder.mkdir()
    arguments = ["--scale", str(SCALE), "--rounds", "1", "--folder", str(folder), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["store.py", *arguments])
    store.main()
    rows = json.loads(figures.read_text())["rows"]
    assert capsys.readouterr().out.splitlines()[2:] == [*HEADING, *map(line_of, rows)]
    assert list(folder.iterdir()) == []
    n_turns = len(store.MODELS) * len(store.LENGTHS)
    assert len(rows) == n_turns + 3
    turns, run = written[: 2 * n_turns], written[2 * n_turns :]  # before each turn, a prompt up to there
    assert [round(row["ours"] * 1e6) for row in rows[:n_turns]] == turns[1::2]
    assert len(run) == store.N_RUN
    assert round(rows[n_turns]["ours"] * 1e9) == sum(run)


@pytest.mark.parametrize("name", store.MODELS)
def test_the_session_file_has_the_size_that_is_told(tmp_path, name, capsys):
    shape = store.Figures(SCALE, 1).shape(name)
    conversation = store.Conversation(str(tmp_path / "store"), shape, 50)
    conversation.system(10)
    conversation.turn(50, 10)
    timeline, path = conversation.timeline, tmp_path / "a.bin"
    image, sources = image_of(timeline, shape, 0, loaded=False), sources_of(timeline, conversation.cache)
    write_session(str(path), image, Identity(1, 2), sources)
    assert path.stat().st_size == conversation.session_bytes()


def test_the_shapes_have_the_sizes_that_the_bench_says(tmp_path):
    a_token = {store.SMOLLM2: 23_040, store.LLAMA: 32_768, store.HYBRID: 15_264}
    for name, size_bytes in a_token.items():
        conversation = store.Conversation(str(tmp_path / name), store.MODELS[name], 400)
        assert conversation.cache.cell_bytes(400) - conversation.cache.cell_bytes(200) == 200 * size_bytes
        assert sum(conversation.cache.shape.state_sizes) == (118_063_152 if name == store.HYBRID else 0)


def test_a_store_is_opened_over_the_files_that_are_told(tmp_path):
    store.write_heads(str(tmp_path), 3, 300)
    found = Store(str(tmp_path), store.MIB, 0, store.refuse).index.files.values()
    assert [[segment.n_tokens for segment in file.head.segments] for file in found] == [[256, 44]] * 3
    assert len({file.head.segments[0].key for file in found}) == 3


def test_what_a_store_complains_of_ends_the_bench(tmp_path):
    (tmp_path / f"{0:016x}-00000000.store").write_bytes(b"damage")
    with pytest.raises(SystemExit, match=r"^store.py: store: .* set aside"):
        store.opened_s(str(tmp_path))
