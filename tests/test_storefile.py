"""One store file: written in steps with pauses, given up, read in any order, and damaged under its reader."""

import os
import threading

import numpy as np
import pytest

import blockfile
from given_store import PLAIN, SHAPE, StateSink, empty_windows, ids_of, kept, same_cells, same_state, write, writer_of
from storefile import HEAD_READ, StoreReader, read_head
from storelayout import StoreError

BLOCK_BYTES = 8192


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", BLOCK_BYTES)


def test_each_step_writes_a_block_and_the_name_comes_last(tmp_path):
    what = kept(ids_of(800, 1), [800])
    writer = writer_of(tmp_path / "a", what)
    n_steps = 0
    while writer.step():
        n_steps += 1
        assert not (tmp_path / "a").exists()
        assert not writer.published
        assert len(list(tmp_path.iterdir())) == 1
    assert writer.published
    size = (tmp_path / "a").stat().st_size
    assert n_steps == -(-size // BLOCK_BYTES) > 3
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("n_steps", range(5))
def test_a_writer_that_gives_up_leaves_nothing(n_steps, tmp_path):
    n_threads = threading.active_count()
    writer = writer_of(tmp_path / "a", kept(ids_of(800, 1), [800]))
    for _ in range(n_steps):
        assert writer.step()
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == n_threads


def test_cells_that_come_later_do_not_disturb_a_pause(tmp_path):
    """A request that continues the conversation writes behind the cells that are on their way."""
    ids = ids_of(1200, 1)
    whole, what = kept(ids), kept(ids[:800])
    writer = writer_of(tmp_path / "a", kept(ids[:800]))
    writer.close()
    for window, later in zip(what.windows, whole.windows, strict=True):
        window.parts = later.parts
    write(tmp_path / "b", what)
    with StoreReader(str(tmp_path / "b")) as reader:
        windows = empty_windows(SHAPE, 800)
        for number in range(4):
            reader.segment(number, SHAPE, windows)
        assert same_cells(SHAPE, windows, ids[:800])


def test_a_pool_that_fails_is_told(tmp_path):
    what = kept(ids_of(300, 1))

    class Broken:
        def read(self, part, offset, out):
            raise RuntimeError("device lost")

    what.windows = [Broken()] * 3
    writer = writer_of(tmp_path / "a", what)
    with pytest.raises(StoreError, match="device lost") as caught:
        writer.step()
    assert caught.value.kind == "io"
    assert list(tmp_path.iterdir()) == []


def test_pieces_come_in_any_order_and_cut(tmp_path):
    ids = ids_of(700, 2)
    write(tmp_path / "a", kept(ids, [256, 650]))
    with StoreReader(str(tmp_path / "a")) as reader:
        for order, n_tokens in (((0, 1, 2), 700), ((2, 0, 1), 700), ((1, 0), 300), ((1, 0, 2), 514), ((0,), 1)):
            windows = empty_windows(SHAPE, n_tokens)
            for number in order:
                reader.segment(number, SHAPE, windows, min(256, n_tokens - 256 * number))
            assert same_cells(SHAPE, windows, ids[:n_tokens])
            for number, position in ((1, 650), (0, 256)):
                sink = StateSink(SHAPE)
                reader.state(number, SHAPE, sink)
                assert same_state(SHAPE, sink, ids[:position])


def test_a_draft_layer_that_one_side_has_not(tmp_path):
    ids = ids_of(300, 1)
    write(tmp_path / "a", kept(ids))
    without = SHAPE._replace(layers=SHAPE.layers[:-1], has_draft=False)
    write(tmp_path / "b", kept(ids, shape=without))
    write(tmp_path / "c", kept(ids, n_drafted=0))
    for name, shape, n_drafted in (("a", without, 0), ("b", SHAPE, 0), ("c", SHAPE, 0), ("a", SHAPE, 300)):
        with StoreReader(str(tmp_path / name)) as reader:
            windows = empty_windows(shape, 300)
            for number in range(2):
                reader.segment(number, shape, windows)
            assert same_cells(shape, windows, ids, n_drafted)
    with StoreReader(str(tmp_path / "a")) as reader, pytest.raises(StoreError, match="of another size") as caught:
        reader.segment(0, PLAIN, empty_windows(PLAIN, 300))
    assert (caught.value.reason, caught.value.is_damage) == ("shape", False)


def usable(path, shape=SHAPE, n_segments=4) -> tuple[int, StoreError | None]:
    """How many segments can be read one after the other, and what ended that."""
    ids = ids_of(1024, 1)
    windows = empty_windows(shape, 1024)
    try:
        with StoreReader(str(path)) as reader:
            for number in range(n_segments):
                reader.segment(number, shape, windows)
                assert same_cells(shape, windows, ids[: 256 * (number + 1)])
    except StoreError as error:
        return windows_held(windows, ids), error
    return n_segments, None


def windows_held(windows, ids) -> int:
    return sum(same_cells(SHAPE, windows, ids[: 256 * (n + 1)]) for n in range(4))


def test_damage_says_from_which_segment_on(tmp_path):
    write(tmp_path / "a", kept(ids_of(1024, 1), [1024]))
    good = (tmp_path / "a").read_bytes()
    head = read_head(str(tmp_path / "a")).head
    seen = set()
    for block in range(-(-len(good) // BLOCK_BYTES)):
        data = bytearray(good)
        data[min((block + 1) * BLOCK_BYTES, len(good)) - 20] ^= 1
        (tmp_path / "b").write_bytes(data)
        n_read, error = usable(tmp_path / "b")
        first_byte = block * (BLOCK_BYTES - 8)
        clean = sum(end <= first_byte for end in (*head.offsets[1:], head.file_bytes))
        if error is None:
            assert clean >= 4
            continue
        assert error.is_damage
        assert error.part == f"block {block}"
        assert error.first_bad == clean == n_read
        seen.add(n_read)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("way", ["cut", "removed", "replaced"])
def test_a_file_that_changes_under_its_reader(way, tmp_path):
    path, ids = tmp_path / "a", ids_of(1024, 1)
    write(path, kept(ids))
    found = read_head(str(path))
    windows = empty_windows(SHAPE, 1024)
    with StoreReader(str(path), found.hash) as reader:
        reader.segment(0, SHAPE, windows)
        if way == "cut":
            os.truncate(path, 2 * BLOCK_BYTES)
            with pytest.raises(StoreError, match="shorter") as caught:
                reader.segment(3, SHAPE, windows)
            assert caught.value.is_damage
            assert 0 < caught.value.first_bad < 4
            return
        path.unlink()
        if way == "replaced":
            write(path, kept(ids_of(1024, 2)))
        for number in range(1, 4):
            reader.segment(number, SHAPE, windows)
        assert same_cells(SHAPE, windows, ids)
    with pytest.raises(StoreError) as caught, StoreReader(str(path), found.hash):
        pass
    assert caught.value.reason == {"removed": "gone", "replaced": "changed"}[way]
    assert not caught.value.is_damage


def test_what_is_no_plain_file_is_not_read(tmp_path):
    write(tmp_path / "a", kept(ids_of(300, 1)))
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        for look in (read_head, lambda path: StoreReader(path).__enter__()):
            with pytest.raises(StoreError) as caught:
                look(str(tmp_path / name))
            assert (caught.value.kind, caught.value.reason, caught.value.is_damage) == ("invalid", "plain", False)
    os.link(tmp_path / "a", tmp_path / "second")
    with pytest.raises(StoreError, match="one name"):
        read_head(str(tmp_path / "a"))


def test_a_long_head_takes_a_second_read(tmp_path, monkeypatch):
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", 1 << 20)
    ids = ids_of(HEAD_READ // 4 + 1000, 1)
    what = kept(ids[:300], shape=PLAIN)
    what.ids = ids
    what.windows = empty_windows(PLAIN, len(ids))
    write(tmp_path / "a", what)
    head = read_head(str(tmp_path / "a")).head
    assert b"".join(s.ids for s in head.segments) == np.asarray(ids, "<i4").tobytes()
    assert head.head_bytes > HEAD_READ
