"""What bench/files.py measures with: a conversation that really comes back, rows as the others write them, the fit."""

import os
import pathlib
import shutil
import sys

import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "bench"))  # its scripts import each other

import files

SHARE = 2e-4  # of the running state, so that a test takes no time


def test_the_file_has_the_size_of_the_reference_shape():
    """Without making it: the sizes of its parts add up."""
    header, counts, ids = 64 + 168 + 16, 8 * 2 + 2 * 8 * 8, 2 * 4 * files.N_TOKENS
    conversation = files.Conversation(files.N_TOKENS // 100, SHARE)
    cells = -(-files.N_TOKENS // files.PAGE) * files.PAGE
    rows = files.N_TOKENS // files.PAGE + 1
    layers = 13 * (cells * (1024 + 32) + 96) + 12 * rows * files.INDEX_DIM * 4
    assert len(conversation.windows) == 13
    assert header + counts + ids + 2 * sum(files.STATE_BYTES) + layers == files.FILE_BYTES


def test_a_conversation_comes_back(tmp_path):
    conversation, path = files.Conversation(50, SHARE), str(tmp_path / "a.bin")
    conversation.save(path)
    for window in conversation.windows:
        for part, size in enumerate(window.part_sizes):
            window.write(part, 0, np.zeros(size, np.uint8))
    conversation.states[0].arrays[0][:] = 0
    conversation.restore(path)
    for window in conversation.windows:
        found = np.empty(window.part_sizes[0], np.uint8)
        window.read(0, 0, found)
        assert np.array_equal(found, files.TILE[: found.size])
    assert np.array_equal(conversation.states[0].arrays[0], files.TILE[: conversation.states[0].part_sizes[0]])


def test_a_save_without_fio_has_nothing_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    figures = files.Figures(1)
    files.measure_save(figures, files.Conversation(50, SHARE), str(tmp_path / "a.bin"))
    new, over = figures.rows
    assert [row["rival_s"] for row in (new, over)] == [None, None]
    assert [row["ratio"] for row in (new, over)] == [None, None]
    assert new["ours_s"] > 0
    assert "fio is not installed" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="files cannot be put out of the page cache")
def test_growth_has_a_point_for_each_size_and_a_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "GROWTH_BYTES", (2e6, 4e6, 8e6, 1e9))
    figures = files.Figures(1)
    files.measure_growth(figures, str(tmp_path / "a.bin"), 1e7)
    sizes = [[gb for gb, _ in curve] for curve in figures.growth.values()]
    assert figures.growth.keys() == {"restore, cold", "restore, warm"}
    assert sizes[0] == sizes[1] == sorted(sizes[0])
    assert len(sizes[0]) == 3
    assert [row["ours"] for row in figures.rows] == [files.power(curve) for curve in figures.growth.values()]


def test_power():
    assert files.power([[x, 3 * x] for x in (1, 2, 5)]) == pytest.approx(1)
    assert files.power([[x, 3 * x * x] for x in (1, 2, 5)]) == pytest.approx(2)
