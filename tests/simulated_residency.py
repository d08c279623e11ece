"""Residency of K/V cells in Numba's simulator; run by test_kernels_cuda.py in its own process.

Owns: that a layer which keeps few pages on the device reads the same bits as one that keeps all, also after what a
restore or a rewind does to it, and that bytes go in and out unchanged. Read next: simulated_sessions.py.
"""

import given_simulator  # first: it turns the simulator on
from given_simulator import small_blocks

# isort: split

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import cuda_cases
import gpu_check

import backend
import cudapools
from cells import EXACT, FORMATS, PAGE, Residency
from kvcache import CacheShape, LayerPool

assert given_simulator.config.ENABLE_CUDASIM

ops = backend.load("cuda", 1, print)
HEADS, GROUP, WIDTH, PAGES = 2, 2, 32, 14
SHAPE = CacheShape(
    geometry=(0,) * 18, n_attention=1, n_recurrent=0, has_draft=False, n_head_kv=HEADS, head_dim=WIDTH, index_dim=0,
    history_bytes=0, n_cells=PAGES * PAGE, cell_format=FORMATS["fp16"], draft_format=EXACT,
)  # fmt: skip
SCALE = np.float32(WIDTH**-0.5)


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    small_blocks(monkeypatch, 4)


class Layer:
    """One layer's pools with the calls that a forward pass makes."""

    def __init__(self, n_slots: int | None, *, ring: bool = False):
        residency = None if n_slots is None else Residency(n_slots, ring)
        self.pool = LayerPool(SHAPE, FORMATS["fp16"], 0, ops, residency)

    @property
    def map(self) -> cudapools.PageMap:
        return self.pool.k.page_map

    def append(self, keys: np.ndarray, first: int) -> "Layer":
        """`keys` as K, their negatives as V."""
        pool = self.pool
        for storage, x, codes, scales in (
            (pool.format.k_storage, keys, pool.k, pool.k_scale), (pool.format.v_storage, -keys, pool.v, pool.v_scale),
        ):  # fmt: skip
            ops.append_cells(storage, ops.from_host(x), first, codes, scales)
        return self

    @property
    def _pools(self):
        pool = self.pool
        return pool.format.k_storage, pool.format.v_storage, pool.k, pool.k_scale, pool.v, pool.v_scale

    def dense(self, q: np.ndarray, position: int) -> np.ndarray:
        out = ops.empty(q.shape)
        ops.attention(*self._pools, ops.from_host(q), position, SCALE, out)
        return ops.to_host(out)

    def chosen(self, q: np.ndarray, position: int, pages: list[list[int]]) -> np.ndarray:
        blocks = np.zeros((len(pages), max(map(len, pages))), np.int32)
        for token, mine in enumerate(pages):
            blocks[token, : len(mine)] = mine
        out, counts = ops.empty(q.shape), np.array([len(mine) for mine in pages], np.int64)
        lists = ops.from_host(blocks), ops.from_host(counts)
        ops.attention_selected(*self._pools, ops.from_host(q), position, SCALE, *lists, out)
        return ops.to_host(out)

    def bytes(self, n_tokens: int) -> list[bytes]:
        """What a session file would hold of the layer."""
        window = self.pool.window(n_tokens)
        parts = [np.empty(size, np.uint8) for size in window.part_sizes]
        for part, out in enumerate(parts):
            window.read(part, 0, out)
        return [out.tobytes() for out in parts]

    def restore(self, source: "Layer", n_tokens: int) -> None:
        """What a restore does: overwrite the first cells from outside, in two pieces, then settle."""
        window = self.pool.window(n_tokens)
        for part, whole in enumerate(source.bytes(n_tokens)):
            data = np.frombuffer(whole, np.uint8)
            for first in range(0, len(data), 100):
                window.write(part, first, data[first : first + 100])
        ops.settle(self.pool.k, n_tokens)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def keys(n: int, seed: int = 0) -> np.ndarray:
    return normal(n, HEADS, WIDTH, seed=seed)


def queries(n: int, seed: int = 9) -> np.ndarray:
    return normal(n, HEADS * GROUP, WIDTH, seed=seed)


def table(layer: Layer) -> np.ndarray:
    return ops.to_host(layer.map.table)


def consistent(layer: Layer, n_tokens: int) -> bool:
    """Whether table and slots name each other, and the cells of each resident page are the host's."""
    places, pages = table(layer), ops.to_host(layer.map.slot_page)
    host, device = (ops.to_host(array) for array in (layer.pool.k.host.bytes, layer.pool.k.device.bytes))
    resident = np.flatnonzero(places >= 0)
    assert sorted(resident) == sorted(pages[pages >= 0])
    assert all(pages[places[page]] == page for page in resident)
    held = ((page, max(0, min(PAGE, n_tokens - page * PAGE))) for page in resident)
    return all((device[places[page], :, :n] == host[page, :, :n]).all() for page, n in held)


def test_a_context_that_fits_is_not_streamed():
    assert Layer(PAGES).map is None
    assert Layer(PAGES - 1).map is not None


@pytest.mark.parametrize("n_slots", [1, 3])
def test_streamed_reads_are_those_of_a_resident_layer(n_slots):
    resident, streamed = Layer(None), Layer(n_slots)
    rng, position = np.random.default_rng(n_slots), 0
    for n in (5, 1, 13, 1, 2, 1):
        fresh, q = keys(n, seed=position), queries(n, seed=position)
        resident.append(fresh, position)
        streamed.append(fresh, position)
        pages = [cuda_cases._some_pages(rng, cell).tolist() for cell in range(position, position + n)]
        np.testing.assert_array_equal(streamed.chosen(q, position, pages), resident.chosen(q, position, pages))
        position += n
        assert consistent(streamed, position)
        np.testing.assert_array_equal(streamed.dense(q[-1:], position - 1), resident.dense(q[-1:], position - 1))
        assert consistent(streamed, position)
    assert streamed.bytes(position) == resident.bytes(position)


def test_what_is_read_is_brought_in_and_stays():
    layer = Layer(3).append(keys(40), 0)
    assert (table(layer) == -1).all()
    layer.chosen(queries(1), 39, [[2, 5, 9]])
    assert np.flatnonzero(table(layer) >= 0).tolist() == [2, 5, 9]
    counters = ops.to_host(layer.map.counters)
    layer.chosen(queries(1), 39, [[5, 9]])
    again = ops.to_host(layer.map.counters)
    assert again[cudapools.MISSES] == 0
    assert again[cudapools.BROUGHT_IN] == counters[cudapools.BROUGHT_IN] == 3


def test_clock_spares_what_was_read_since_the_hand_passed():
    layer = Layer(3).append(keys(40), 0)
    layer.chosen(queries(1), 39, [[0, 1, 2]])  # every reference bit set
    layer.chosen(queries(1), 39, [[3]])  # one round takes the bits away, the next finds a victim
    hand, pages = ops.to_host(layer.map.counters)[cudapools.HAND], ops.to_host(layer.map.slot_page)
    at_hand = int(pages[hand])
    layer.chosen(queries(1), 39, [[at_hand]])
    layer.chosen(queries(1), 39, [[5]])
    assert np.flatnonzero(table(layer) >= 0).tolist() == sorted([3, at_hand, 5])


def test_more_pages_than_slots_are_counted_and_read_in_place():
    resident, streamed = Layer(None).append(keys(40), 0), Layer(3).append(keys(40), 0)
    q = queries(1)
    np.testing.assert_array_equal(streamed.chosen(q, 39, [list(range(10))]), resident.chosen(q, 39, [list(range(10))]))
    assert ops.to_host(streamed.map.counters)[cudapools.OVERFLOW] == 7


def restored(n_slots: int, *, ring: bool = False) -> tuple[Layer, Layer, int]:
    """A layer that held another conversation and then restored this one, and the uninterrupted layer."""
    n = 45
    through, other = Layer(n_slots, ring=ring).append(keys(n), 0), Layer(n_slots, ring=ring).append(keys(50, seed=7), 0)
    for layer in (through, other):
        for position in (10, 30, n - 1):
            layer.dense(queries(1), position)
    other.restore(through, n)
    return through, other, n


@pytest.mark.parametrize("ring", [False, True])
def test_a_restored_layer_goes_on_bitwise(ring):
    through, other, n = restored(4, ring=ring)
    for position in range(n, n + 3):
        for layer in (through, other):
            layer.append(keys(1, seed=position), position)
        q = queries(1, seed=position)
        np.testing.assert_array_equal(other.dense(q, position), through.dense(q, position))
    assert other.bytes(n + 3) == through.bytes(n + 3)


@pytest.mark.parametrize(("ring", "step"), [(False, "kv_stream_reset"), (True, "kv_ring_restore")])
def test_without_its_step_a_restored_layer_reads_the_old_conversation(ring, step, monkeypatch):
    monkeypatch.setattr(cudapools, step, lambda *_: None)
    through, other, n = restored(4, ring=ring)
    assert not consistent(other, n)
    assert (other.dense(queries(1), n - 1) != through.dense(queries(1), n - 1)).any()


def test_a_ring_looks_back_over_its_window():
    layer, n = Layer(3, ring=True), 30
    layer.append(keys(n), 0)
    q = queries(1)
    last = Layer(None).append(keys(n), 0)
    expected = last.chosen(q, n - 1, [[5, 6, 7]])
    np.testing.assert_array_equal(layer.dense(q, n - 1), expected)
    assert np.flatnonzero(table(layer) >= 0).tolist() == [5, 6, 7]


@pytest.mark.parametrize("sizes", [[18], [1] * 18, [7, 1, 6, 4]])
def test_a_ring_reads_the_same_however_cells_came(sizes):
    whole, pieces = Layer(None).append(keys(18), 0), Layer(3, ring=True)
    q, position, found = queries(18), 0, []
    for n in sizes:
        pieces.append(keys(18)[position : position + n], position)
        found.append(pieces.dense(q[position : position + n], position))
        position += n
        assert consistent(pieces, position)
    pages = [list(range(max(0, cell // PAGE - 2), cell // PAGE + 1)) for cell in range(18)]
    np.testing.assert_array_equal(np.concatenate(found), whole.chosen(q, 0, pages))


def test_a_ring_that_is_rewound_goes_on():
    layer = Layer(3, ring=True).append(keys(50), 0)
    ops.settle(layer.pool.k, 18)
    assert np.flatnonzero(table(layer) >= 0).tolist() == [2, 3, 4]
    assert consistent(layer, 18)
    layer.append(keys(4, seed=3), 18)
    assert consistent(layer, 22)
    plain = Layer(None).append(keys(50)[:18], 0).append(keys(4, seed=3), 18)
    q = queries(1)
    np.testing.assert_array_equal(layer.dense(q, 21), plain.chosen(q, 21, [[3, 4, 5]]))


def test_a_ring_takes_back_a_page_that_discarded_cells_had_pushed_out():
    layer, plain = Layer(1, ring=True).append(keys(6), 0), Layer(None).append(keys(6), 0)
    for part in (layer, plain):
        part.append(keys(4, seed=2), 6)  # page 2 takes the place of page 1, and then only one of these cells is kept
        part.append(keys(1, seed=3), 7)
    assert consistent(layer, 8)
    q = queries(1)
    np.testing.assert_array_equal(layer.dense(q, 7), plain.chosen(q, 7, [[1]]))


# --- copies


def small_buffers(monkeypatch) -> None:
    """Staging buffers of 64 bytes, for this test alone."""
    monkeypatch.setattr(cudapools, "STAGE_BYTES", 64)
    monkeypatch.setattr(cudapools, "_STAGING", cudapools._Staging())


def test_bytes_read_in_pieces_are_those_of_the_pool(monkeypatch):
    small_buffers(monkeypatch)
    data = np.random.default_rng(0).integers(0, 256, (5, 2, 4, 10), np.uint8)
    array, found = ops.from_host(data), np.empty(data.size, np.uint8)
    for first, last in ((0, 1), (1, 150), (150, 151), (151, 300), (300, 400)):
        ops.read_bytes(array, first, found[first:last])
    np.testing.assert_array_equal(found, data.reshape(-1))


def test_a_copy_that_was_started_early_is_not_used_after_a_write(monkeypatch):
    small_buffers(monkeypatch)
    array, found = ops.from_host(np.arange(200, dtype=np.uint8)), np.empty(64, np.uint8)
    ops.read_bytes(array, 0, found)  # starts on bytes 64..127
    ops.write_bytes(array, 64, np.full(64, 9, np.uint8))
    ops.read_bytes(array, 64, found)
    assert (found == 9).all()


def test_a_copy_that_was_started_early_is_not_used_after_an_append(monkeypatch):
    small_buffers(monkeypatch)
    layer = Layer(None).append(keys(8), 0)
    codes, found = layer.pool.k, np.empty(64, np.uint8)
    ops.read_bytes(codes, 0, found)
    layer.append(keys(8, seed=5), 0)
    ops.read_bytes(codes, 64, found)
    assert found.tobytes() == ops.to_host(codes.device.bytes).tobytes()[64:128]


@pytest.mark.parametrize("n_slots", [None, 3])
def test_bytes_written_in_pieces_are_the_pools(n_slots, monkeypatch):
    small_buffers(monkeypatch)
    source, layer = Layer(None).append(keys(21), 0), Layer(n_slots)
    layer.restore(source, 21)
    assert layer.bytes(21) == source.bytes(21)


def test_the_session_check_for_a_device_passes(monkeypatch, tmp_path):
    """tools/gpu_check.py, on a file of some kilobytes."""
    monkeypatch.setattr(gpu_check, "LAYER", {"heads": 2, "kv_heads": 1, "head_dim": 64})
    rows = gpu_check.check_sessions(str(tmp_path), 50_000, 8)
    assert [row["mode"] for row in rows] == ["resident", "streamed", "ring"]
    assert all(row["ok"] and row["bytes"] > 40_000 for row in rows)
