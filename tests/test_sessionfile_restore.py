"""Restoring in two passes: no byte reaches a sink before it was vouched for, and two blocks are enough."""

import os
import weakref

import numpy as np
import pytest

import blockfile
import disksystem
from blockfile import BLOCK_BYTES
from cells import KvHeader
from given_images import DATA, READABLE, identity, image, pattern, plain
from sessionfile import SessionReader, read_session, write_session
from sessionlayout import Extent, Identity, Image, KvLayer, Limits, Record, SessionError

LARGE = Identity(7, 8)
HEAD_BYTES = 64 + 168 + 64 + 4 * 5 + 8 + 8  # of the large file, before its first K/V layer


class Pool:
    """A sink of preallocated arrays that remembers how it was called; `at_call` runs before its n-th call."""

    def __init__(self, part_sizes, calls, name, at_call=None):
        self.part_sizes = tuple(part_sizes)
        self.parts = [np.full(size, 0xEE, np.uint8) for size in part_sizes]
        self._calls = calls
        self._name = name
        self._at_call = at_call or {}

    def write(self, part, offset, data):
        self._at_call.get(len(self._calls), lambda: None)()
        self._calls.append((self._name, part, offset, data.size))
        self.parts[part][offset : offset + data.size] = data

    @property
    def untouched(self):
        return all((part == 0xEE).all() for part in self.parts)


def pools(sizes, calls, at_call=None):
    return [Pool(parts, calls, i, at_call) for i, parts in enumerate(sizes)]


def large_image() -> Image:
    """Three blocks and a bit: one layer whose K spans them, and a small one."""
    parts = (pattern(40 << 20, 131, 3), pattern(5, 1, 0), pattern(0, 1, 0), pattern(9, 1, 7), pattern(100, 3, 1))
    layers = [
        KvLayer(KvHeader(1, 4, 1, 64, 4, 0, 0), parts),
        KvLayer(KvHeader(1, 4, 1, 64, 4, 0, 0), (*parts[1:], parts[1])),
    ]
    return Image((1,) * 18, 0, 2, False, Record(np.arange(5, dtype=np.int32)), [], layers)


@pytest.fixture
def large(tmp_path):
    write_session(tmp_path / "large.bin", large_image(), LARGE, durable=False)
    return tmp_path / "large.bin"


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "sample.bin"
    write_session(path, image("sample"), identity("sample"), durable=False)
    return path


def refusal(call, *arguments, **named) -> SessionError:
    with pytest.raises(SessionError) as caught:
        call(*arguments, **named)
    return caught.value


def patch(path, offset, mask=1):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


# --- What arrives ---


def test_every_byte_arrives_in_order(sample):
    full = image("sample")
    with SessionReader(sample, identity("sample"), Limits()) as reader:
        assert reader.size_bytes == os.path.getsize(sample)
        assert reader.part_sizes == [layer.part_sizes for layer in full.kv]
        assert plain(reader.image, kv=False) == plain(full, kv=False)
        assert all(isinstance(part, Extent) for layer in reader.image.kv for part in layer.parts)
        assert not reader.touched
        calls = []
        sinks = pools(reader.part_sizes, calls)
        reports = []
        reader.apply(sinks, progress=lambda *report: reports.append(report))
        assert reader.touched
    for sink, layer in zip(sinks, full.kv, strict=True):
        assert all(np.array_equal(got, part) for got, part in zip(sink.parts, layer.parts, strict=True))
    assert max(call[3] for call in calls) <= BLOCK_BYTES
    assert [call[:3] for call in calls] == sorted(call[:3] for call in calls)
    assert {call[2] for call in calls if call[1]} == {0}, "offsets begin again with every part"
    size = os.path.getsize(sample)
    assert reports == [(BLOCK_BYTES, size), (size, size)]


def test_running_state_can_go_to_sinks_as_well(sample):
    full = image("sample")
    with SessionReader(sample, identity("sample"), Limits(), keep_state=False) as reader:
        records = reader.image.records
        assert [record.ids.tolist() for record in records] == [record.ids.tolist() for record in full.records]
        assert [record.images for record in records] == [record.images for record in full.records]
        assert all(isinstance(array, Extent) for record in records for array in record.state)
        record_sinks = pools([[array.size for array in record.state] for record in records], [])
        reader.apply(pools(reader.part_sizes, []), record_sinks)
    for sink, record in zip(record_sinks, full.records, strict=True):
        assert all(np.array_equal(got, array) for got, array in zip(sink.parts, record.state, strict=True))


@pytest.mark.parametrize("name", READABLE)
def test_two_passes_read_what_one_does(name):
    with SessionReader(DATA / f"{name}.bin", identity(name), Limits()) as reader:
        sinks = pools(reader.part_sizes, [])
        reader.apply(sinks)
        reader.image.kv = [
            KvLayer(layer.header, tuple(sink.parts)) for layer, sink in zip(reader.image.kv, sinks, strict=True)
        ]
        assert plain(reader.image) == plain(read_session(DATA / f"{name}.bin", identity(name), Limits()))


def test_applying_again_gives_the_same(large):
    with SessionReader(large, LARGE, Limits()) as reader:
        for _ in range(2):
            sinks = pools(reader.part_sizes, [])
            reader.apply(sinks)
            assert np.array_equal(sinks[0].parts[0], large_image().kv[0].parts[0])


# --- Memory ---


def test_two_blocks_are_enough(large, monkeypatch):
    alive, most = weakref.WeakSet(), 0
    allocate = blockfile.allocate_block

    def counted(file_bytes):
        nonlocal most
        block = allocate(file_bytes)
        alive.add(block.base.obj)  # the mapping, which lives as long as any view of it
        most = max(most, len(alive))
        return block

    monkeypatch.setattr(blockfile, "allocate_block", counted)
    with SessionReader(large, LARGE, Limits()) as reader:
        reader.apply(pools(reader.part_sizes, []))
        assert len(alive) == 2
    assert most == 2
    assert len(alive) == 0


def test_page_cache_is_kept_for_the_second_pass_and_given_back_after_it(large, monkeypatch):
    ranges = []

    class Noting(disksystem.PosixSystem):
        def forget(self, descriptor, offset, size):
            ranges.append((offset, size))

    monkeypatch.setattr(blockfile, "system", Noting())
    with SessionReader(large, LARGE, Limits()) as reader:
        assert ranges == []
        reader.apply(pools(reader.part_sizes, []))
        assert ranges == [(0, BLOCK_BYTES)]
    assert ranges[-1] == (0, 0)


# --- What does not fit is refused between the passes ---


def test_sizes_are_compared_before_anything_is_touched(sample):
    with SessionReader(sample, identity("sample"), Limits()) as reader:
        calls = []
        for sizes, reason, words in (
            (reader.part_sizes[:-1], "layer-count", "layer count"),
            ([*reader.part_sizes, (0,) * 5], "layer-count", "layer count"),
            (grown(reader.part_sizes, 2, 1, -1), "part-size", "part size"),
            (grown(reader.part_sizes, 0, 0, 1), "part-size", "part size"),
            (grown(reader.part_sizes, 1, 2, 1), "part-size", "part size"),
        ):
            sinks = pools(sizes, calls)
            error = refusal(reader.apply, sinks)
            assert (error.kind, error.reason) == ("invalid", reason)
            assert words in str(error)
            assert all(sink.untouched for sink in sinks)
        assert calls == []
        assert not reader.touched
        reader.apply(pools(reader.part_sizes, calls))


def grown(sizes, layer, part, by):
    changed = [list(parts) for parts in sizes]
    changed[layer][part] += by
    return changed


def test_record_sinks_are_compared_too(sample):
    with SessionReader(sample, identity("sample"), Limits(), keep_state=False) as reader:
        sizes = [[array.size for array in record.state] for record in reader.image.records]
        for records in (sizes[:-1], grown(sizes, 1, 4, 1), []):
            sinks, record_sinks = pools(reader.part_sizes, []), pools(records, [])
            assert refusal(reader.apply, sinks, record_sinks).reason in ("layer-count", "part-size")
            assert all(sink.untouched for sink in (*sinks, *record_sinks))


# --- Files that change ---


@pytest.mark.parametrize("offset", [0, 300, HEAD_BYTES + 200, 5 << 20, BLOCK_BYTES - 1])
def test_a_change_of_the_first_block_between_the_passes_touches_nothing(offset, large):
    with SessionReader(large, LARGE, Limits()) as reader:
        patch(large, offset)
        sinks = pools(reader.part_sizes, [])
        error = refusal(reader.apply, sinks)
        assert (error.kind, error.reason) == ("invalid", "changed")
        assert "changed" in str(error)
        assert not reader.touched
        assert all(sink.untouched for sink in sinks)


@pytest.mark.parametrize("offset", [BLOCK_BYTES, (3 * BLOCK_BYTES) // 2, 2 * BLOCK_BYTES - 1, 2 * BLOCK_BYTES, -17, -1])
def test_a_later_change_stops_before_its_block_is_handed_on(offset, large):
    with SessionReader(large, LARGE, Limits()) as reader:
        offset %= reader.size_bytes
        patch(large, offset)
        sinks = pools(reader.part_sizes, [])
        error = refusal(reader.apply, sinks)
        assert (error.kind, error.reason, error.offset) == ("invalid", "changed", offset // BLOCK_BYTES * BLOCK_BYTES)
        assert reader.touched
        extent = reader.image.kv[0].parts[0]
        vouched = error.offset - extent.offset
        assert np.array_equal(sinks[0].parts[0][:vouched], pattern(40 << 20, 131, 3)[:vouched])
        assert (sinks[0].parts[0][vouched:] == 0xEE).all()
        assert sinks[1].untouched


def test_a_change_during_the_second_pass(large):
    with SessionReader(large, LARGE, Limits()) as reader:
        # When the first block is handed on, the third has not been asked for.
        sinks = pools(reader.part_sizes, [], {0: lambda: patch(large, 2 * BLOCK_BYTES + 5)})
        error = refusal(reader.apply, sinks)
        assert (error.reason, error.offset) == ("changed", 2 * BLOCK_BYTES)
        assert (sinks[0].parts[0][2 * BLOCK_BYTES :] == 0xEE).all()


def test_a_first_block_that_reads_differently_the_second_time(large, monkeypatch):
    class Rotten(disksystem.PosixSystem):
        def read(self, descriptor, data, offset):
            n_read = super().read(descriptor, data, offset)
            data[n_read // 2] ^= 4
            return n_read

    with SessionReader(large, LARGE, Limits()) as reader:
        monkeypatch.setattr(blockfile, "system", Rotten())
        sinks = pools(reader.part_sizes, [])
        assert refusal(reader.apply, sinks).reason == "changed"
        assert not reader.touched
        assert all(sink.untouched for sink in sinks)
        monkeypatch.setattr(blockfile, "system", disksystem.PosixSystem())
        reader.apply(sinks)
        assert np.array_equal(sinks[0].parts[0], pattern(40 << 20, 131, 3))


@pytest.mark.parametrize("size", [0, 100, BLOCK_BYTES, (40 << 20) - 1, 60 << 20])
def test_another_size_between_the_passes_touches_nothing(size, large):
    with SessionReader(large, LARGE, Limits()) as reader:
        os.truncate(large, size)
        sinks = pools(reader.part_sizes, [])
        error = refusal(reader.apply, sinks)
        assert (error.kind, error.reason) == ("invalid", "changed")
        assert "size" in str(error)
        assert all(sink.untouched for sink in sinks)
        assert not reader.touched


def test_a_file_that_becomes_shorter_during_the_second_pass(large):
    with SessionReader(large, LARGE, Limits()) as reader:
        sinks = pools(reader.part_sizes, [], {0: lambda: os.truncate(large, 2 * BLOCK_BYTES + 10)})
        error = refusal(reader.apply, sinks)
        assert error.kind == "io"
        assert "shorter" in str(error)
        assert reader.touched


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_another_file_under_the_name_changes_nothing(how, large):
    with SessionReader(large, LARGE, Limits()) as reader:
        if how == "replaced":
            write_session(large, image("min_empty"), LARGE)
        else:
            os.unlink(large)
        sinks = pools(reader.part_sizes, [])
        reader.apply(sinks)
        assert np.array_equal(sinks[0].parts[0], pattern(40 << 20, 131, 3))


def test_a_block_that_fools_the_ledger_is_found_by_the_hash(large, monkeypatch):
    monkeypatch.setattr("checksum.crc32c", lambda block: 0)
    with SessionReader(large, LARGE, Limits()) as reader:
        patch(large, 3 << 20)
        error = refusal(reader.apply, pools(reader.part_sizes, []))
        assert (error.kind, error.reason, error.section) == ("invalid", "changed", "payload hash")
        assert reader.touched


# --- Sinks and bad files ---


def test_a_failing_sink(large):
    def fail():
        raise RuntimeError("the device has gone")

    for at_call, touched in ((0, True), (2, True)):
        with SessionReader(large, LARGE, Limits()) as reader:
            error = refusal(reader.apply, pools(reader.part_sizes, [], {at_call: fail}))
            assert (error.kind, error.reason) == ("io", "sink")
            assert "the device has gone" in str(error)
            assert reader.touched is touched


def test_the_first_pass_refuses_bad_files(large):
    assert refusal(SessionReader(large, Identity(1, 8), Limits()).__enter__).reason == "model"
    assert refusal(SessionReader(large, Identity(7, 1), Limits()).__enter__).reason == "config"
    patch(large, 20 << 20)
    assert refusal(SessionReader(large, LARGE, Limits()).__enter__).reason == "payload-hash"
    os.truncate(large, 20 << 20)
    assert refusal(SessionReader(large, LARGE, Limits()).__enter__).reason == "size-mismatch"


def test_a_file_is_closed_after_a_refusal(large, monkeypatch):
    opened = []

    class Noting(disksystem.PosixSystem):
        def open_existing(self, path):
            opened.append(super().open_existing(path))
            return opened[-1]

        def close(self, descriptor):
            opened.remove(descriptor)
            super().close(descriptor)

    monkeypatch.setattr(blockfile, "system", Noting())
    refusal(SessionReader(large, Identity(1, 8), Limits()).__enter__)
    assert opened == []
    with SessionReader(large, LARGE, Limits()) as reader:
        assert len(opened) == 1
        refusal(reader.apply, [])
    assert opened == []
