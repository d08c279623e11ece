"""Layout of pools and running state: sizes by formula, ranges of bytes, and who may move the number of tokens.

Owns: the evidence that what a session file reads and fills has the sizes that the format states. Refuses to know:
models and files. Invariant: sizes are written out here in numbers, not taken from the code. Read next: test_model.py
for what the bytes mean, test_sessionstate.py for how they reach a file.
"""

import numpy as np
import pytest

import sessionlayout
from cells import EXACT, FORMATS, formats_for
from given_kernels import CPU
from kvcache import GEOMETRY_SLOTS, Cache, CacheShape, Snapshot

HEADS, WIDTH, INDEX = 2, 128, 32
# Bytes of one head's K, V, scales of K and scales of V in one cell of WIDTH values.
CELL_BYTES = {
    "fp16": (256, 256, 0, 0),
    "int8": (128, 128, 4, 4),
    "q4_0": (72, 72, 0, 0),
    "k8v4": (128, 72, 4, 0),
}
CODES = {"fp16": 0, "int8": 1, "q4_0": 2, "k8v4": 3}


def shape_of(kv: str = "fp16", **changes) -> CacheShape:
    """Two attention layers with an indexer, three recurrent ones, n-grams and a draft layer, unless changed."""
    numbers = dict.fromkeys(GEOMETRY_SLOTS, 1) | {
        "ssm_state_size": 8, "ssm_v_heads": 6, "ssm_d_conv": 4, "ssm_conv_channels": 80,
    }  # fmt: skip
    fields = {
        "geometry": tuple(numbers.values()),
        "n_attention": 2,
        "n_recurrent": 3,
        "has_draft": True,
        "n_head_kv": HEADS,
        "head_dim": WIDTH,
        "index_dim": INDEX,
        "history_bytes": 4 * 9 * 64,
        "n_cells": 16,
        "cell_format": FORMATS[kv],
        "draft_format": FORMATS["int8" if kv == "k8v4" else kv],
    }
    return CacheShape(**(fields | changes))


def fill(cache: Cache, seed: int = 0) -> None:
    """Random bytes in every pool."""
    rng = np.random.default_rng(seed)
    for pool in [*cache.pools, cache.draft_pool]:
        for part in (pool.k, pool.v, pool.k_scale, pool.v_scale):
            part[:] = rng.integers(0, 256, part.shape, np.uint8)
        pool.pooled[:] = rng.standard_normal(pool.pooled.shape)


def random_state(cache: Cache, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for array in cache.state.arrays:
        array[:] = rng.integers(-1000, 1000, array.shape)


def ids(n: int) -> np.ndarray:
    return np.arange(100, 100 + n, dtype=np.int32)


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_tokens", "pages", "rows"), [(0, 0, 0), (1, 1, 1), (3, 1, 1), (4, 1, 2), (5, 2, 2)])
@pytest.mark.parametrize("kv", FORMATS)
def test_a_window_has_the_sizes_of_the_file_format(kv, n_tokens, pages, rows):
    *trunk, draft = Cache(shape_of(kv), CPU).windows(n_tokens)
    assert len(trunk) == 2
    sizes = [4 * pages * HEADS * size for size in CELL_BYTES[kv]]
    for window in trunk:
        assert window.header == (CODES[kv], 4 * pages, HEADS, WIDTH, 4, rows, INDEX)
        assert window.part_sizes == (*sizes, rows * INDEX * 4)
    in_draft = "int8" if kv == "k8v4" else kv
    sizes = [4 * pages * HEADS * size for size in CELL_BYTES[in_draft]]
    assert draft.header == (CODES[in_draft], 4 * pages, HEADS, WIDTH, 4, 0, 0)
    assert draft.part_sizes == (*sizes, 0)
    assert len(sessionlayout.KV_PARTS) == len(draft.part_sizes)


def test_the_whole_cache_is_one_window_and_its_spare_row():
    cache = Cache(shape_of("int8"), CPU)
    window = cache.windows(16)[0]
    assert window.part_sizes == (16 * 2 * 128, 16 * 2 * 128, 16 * 2 * 4, 16 * 2 * 4, 5 * INDEX * 4)
    pools = 3 * (16 * 2 * (128 + 128 + 4 + 4)) + 2 * 5 * INDEX * 4
    assert cache.size_bytes == pools + sum(cache.shape.state_sizes)


@pytest.mark.parametrize("changes", [{}, {"has_draft": False}, {"index_dim": 0}, {"n_recurrent": 0}])
@pytest.mark.parametrize("kv", CELL_BYTES)
def test_a_shape_tells_the_bytes_of_its_cache(kv, changes, monkeypatch):
    shape = shape_of(kv, **changes)
    assert shape.device_bytes() == Cache(shape, CPU).size_bytes
    monkeypatch.setattr("kvcache.DRAFT_WINDOW", 8)
    in_draft = CELL_BYTES["int8" if kv == "k8v4" else kv] if shape.has_draft else (0,)
    # Of 16 cells each of the two layers keeps the 4 of one page, the draft layer 8.
    away = HEADS * (2 * 12 * sum(CELL_BYTES[kv]) + 8 * sum(in_draft))
    assert shape.device_bytes(n_resident=7) == shape.device_bytes() - away


def test_running_state_has_the_sizes_of_the_file_format():
    shape = shape_of()
    gdn = 3 * (8 * 8 * 6 + 80 * 3) * 4
    assert shape.state_sizes == (gdn, 4 * 9 * 64, 2 * 3 * INDEX * 4, 2 * INDEX * 4, 2 * 4)
    state = Cache(shape, CPU).state
    assert tuple(array.nbytes for array in state.arrays) == shape.state_sizes
    assert [array.dtype for array in state.arrays] == [np.float32] * 4 + [np.int32]
    assert state.recurrent(2).shape == (6, 8, 8)
    assert state.conv(2).shape == (3, 80)
    assert state.tail(1).shape == (3, INDEX)
    assert state.dead_key(1).shape == (INDEX,)


def test_state_of_the_largest_model_of_the_family():
    # 48 layers, 12 of them attention; 118,063,152 bytes with the token ids apart.
    numbers = dict.fromkeys(GEOMETRY_SLOTS, 1) | {
        "ssm_state_size": 128, "ssm_v_heads": 48, "ssm_d_conv": 4, "ssm_conv_channels": 10240,
    }  # fmt: skip
    shape = shape_of(
        geometry=tuple(numbers.values()), n_attention=12, n_recurrent=36, index_dim=128, history_bytes=9 * 10240 * 4
    )
    assert shape.state_sizes == (117_669_888, 368_640, 18_432, 6_144, 48)


def test_views_of_the_running_state_cover_it_once():
    state = Cache(shape_of(), CPU).state
    views = [view(index) for index in range(3) for view in (state.recurrent, state.conv)]
    views += [view(index) for index in range(2) for view in (state.tail, state.dead_key)]
    for view in views:
        np.add(view, 1, out=view)
    for array in state.arrays[:1] + state.arrays[2:4]:
        assert (array == 1).all()


@pytest.mark.parametrize(
    ("changes", "sizes", "windows"),
    [
        ({"index_dim": 0}, (7488, 2304, 0, 0, 0), 3),
        ({"n_recurrent": 0, "history_bytes": 0}, (0, 0, 768, 256, 8), 3),
        ({"has_draft": False, "history_bytes": 0}, (7488, 0, 768, 256, 8), 2),
        ({"n_recurrent": 0, "history_bytes": 0, "index_dim": 0, "has_draft": False}, (0, 0, 0, 0, 0), 2),
    ],
)
def test_a_part_that_a_model_lacks_takes_no_bytes(changes, sizes, windows):
    cache = Cache(shape_of(**changes), CPU)
    assert cache.shape.state_sizes == sizes
    assert len(cache.windows(5)) == windows
    assert (cache.draft_pool is None) == (not cache.shape.has_draft)
    if not cache.shape.index_dim:
        assert {window.part_sizes[4] for window in cache.windows(5)} == {0}
        assert {window.header[5:] for window in cache.windows(5)} == {(0, 0)}
    cache.commit(ids(5))
    snapshot = cache.capture()
    cache.zero()
    cache.rewind(snapshot)
    assert cache.ids.tolist() == ids(5).tolist()


@pytest.mark.parametrize(
    ("width", "names"),
    [
        (16, ["fp16"]),
        (32, ["fp16", "q4_0"]),
        (48, ["fp16"]),
        (64, ["fp16", "int8", "q4_0", "k8v4"]),
        (80, ["fp16"]),
        (96, ["fp16"]),
        (192, ["fp16", "int8"]),
        (256, ["fp16", "int8", "q4_0", "k8v4"]),
        (20, []),
    ],
)
def test_formats_that_a_head_width_can_be_cut_into(width, names):
    assert formats_for(width) == names


def test_exact_cells_are_no_format_of_a_file():
    assert EXACT.code < 0
    assert EXACT not in FORMATS.values()
    assert {name: cell_format.code for name, cell_format in FORMATS.items()} == CODES


@pytest.mark.parametrize(("kv", "k", "v"), [("fp16", 0, 0), ("int8", 0, 0), ("q4_0", 1, 1), ("k8v4", 0, 1)])
def test_what_is_stored_in_4_bits_is_rotated(kv, k, v):
    assert (FORMATS[kv].rotate_k, FORMATS[kv].rotate_v) == (bool(k), bool(v))


# --- ranges of bytes ----------------------------------------------------------------------------------------------


def read_all(window) -> list[bytes]:
    parts = [np.empty(size, np.uint8) for size in window.part_sizes]
    for number, part in enumerate(parts):
        window.read(number, 0, part)
    return [part.tobytes() for part in parts]


@pytest.mark.parametrize("kv", FORMATS)
def test_a_window_reads_the_first_bytes_of_each_part(kv):
    cache = Cache(shape_of(kv), CPU)
    fill(cache)
    for window, pool in zip(cache.windows(5), [*cache.pools, cache.draft_pool], strict=True):
        arrays = (pool.k[:2], pool.v[:2], pool.k_scale[:2], pool.v_scale[:2], pool.pooled[:2])
        assert read_all(window) == [array.tobytes() for array in arrays]


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_pieces_read_are_the_whole_and_pieces_written_reach_the_pool(size):
    source, target = Cache(shape_of("k8v4"), CPU), Cache(shape_of("k8v4"), CPU)
    fill(source)
    for window, sink in zip(source.windows(11), target.windows(11), strict=True):
        for part, part_size in enumerate(window.part_sizes):
            pieces = []
            for offset in range(0, part_size, size):
                piece = np.empty(min(size, part_size - offset), np.uint8)
                window.read(part, offset, piece)
                sink.write(part, offset, piece)
                pieces.append(piece.tobytes())
            assert b"".join(pieces) == read_all(window)[part]
        assert read_all(sink) == read_all(window)
    assert not target.pools[0].k[3:].any()
    assert not target.pools[0].pooled[3:].any()
    np.testing.assert_array_equal(target.pools[1].pooled[:3], source.pools[1].pooled[:3])


# --- who may move the number of tokens ----------------------------------------------------------------------------


def test_only_commit_rewind_and_zero_move_the_number_of_tokens():
    cache = Cache(shape_of(), CPU)
    cache.commit(ids(5))
    for name, value in (("n_tokens", 3), ("ids", ids(3))):
        with pytest.raises(AttributeError):
            setattr(cache, name, value)
    with pytest.raises(ValueError, match="read-only"):
        cache.ids[0] = 7
    public = {name for name in dir(Cache) if not name.startswith("_")}
    assert public == {"n_tokens", "ids", "size_bytes", "cell_bytes", "windows", "capture", "commit", "rewind", "zero"}
    before = cache.n_tokens
    cache.windows(2)
    cache.capture()
    assert cache.n_tokens == before == 5


def test_tokens_are_counted_in_order_and_block_positions_with_them():
    cache = Cache(shape_of(), CPU)
    for n, first in ((3, 0), (1, 3), (6, 4)):
        cache.commit(ids(10)[first : first + n])
        assert cache.ids.tolist() == ids(first + n).tolist()
        assert cache.state.block_pos.tolist() == [(first + n) // 4 * 4] * 2
    with pytest.raises(ValueError, match="shape"):
        cache.commit(ids(7))
    assert cache.n_tokens == 10


def test_the_dead_key_stands_behind_the_last_complete_block():
    cache = Cache(shape_of(), CPU)
    random_state(cache)
    for n in range(1, 17):
        for pool in cache.pools:
            pool.pooled.fill(-1)
        cache.commit(ids(17)[n - 1 : n])
        for index, pool in enumerate(cache.pools):
            np.testing.assert_array_equal(pool.pooled[n // 4], cache.state.dead_key(index))
            assert (np.delete(pool.pooled, n // 4, axis=0) == -1).all()


def test_a_snapshot_is_a_copy_of_tokens_and_state_and_holds_no_cell():
    cache = Cache(shape_of(), CPU)
    random_state(cache)
    cache.commit(ids(6))
    snapshot = cache.capture()
    copied = (snapshot.ids, *snapshot.arrays)
    saved = [array.copy() for array in copied]
    assert snapshot.n_tokens == 6
    assert snapshot.size_bytes == 6 * 4 + sum(cache.shape.state_sizes)
    assert [array.nbytes for array in snapshot.arrays] == list(cache.shape.state_sizes)
    for array, live in zip(copied, (cache.ids, *cache.state.arrays), strict=True):
        np.testing.assert_array_equal(array, live)
        assert not np.shares_memory(array, live)
    random_state(cache, 1)
    cache.commit(ids(3))
    for array, kept in zip(copied, saved, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_a_rewind_restores_tokens_state_and_dead_key_and_leaves_cells():
    cache = Cache(shape_of(), CPU)
    random_state(cache)
    cache.commit(ids(6))
    snapshot = cache.capture()
    random_state(cache, 1)
    cache.commit(ids(5))
    fill(cache)
    before = [pool.k.copy() for pool in cache.pools]
    cache.rewind(snapshot)
    assert cache.ids.tolist() == ids(6).tolist()
    for array, saved in zip(cache.state.arrays, snapshot.arrays, strict=True):
        np.testing.assert_array_equal(array, saved)
        assert not np.shares_memory(array, saved)
    for index, pool in enumerate(cache.pools):
        np.testing.assert_array_equal(pool.k, before[index])
        np.testing.assert_array_equal(pool.pooled[1], snapshot.arrays[3].reshape(2, INDEX)[index])


def test_a_rewind_may_go_forward_where_a_restore_has_filled_the_pools():
    cache = Cache(shape_of(), CPU)
    state = [np.arange(size // 4, dtype=np.float32) for size in cache.shape.state_sizes[:4]]
    cache.rewind(Snapshot(ids(13), (*state, np.array([12, 12], np.int32))))
    assert cache.n_tokens == 13
    assert cache.ids.tolist() == ids(13).tolist()
    np.testing.assert_array_equal(cache.state.gdn, state[0])
    np.testing.assert_array_equal(cache.pools[1].pooled[3], state[3][INDEX:])


def test_zero_forgets_tokens_and_state():
    cache = Cache(shape_of(), CPU)
    random_state(cache)
    cache.commit(ids(6))
    cache.zero()
    assert cache.n_tokens == len(cache.ids) == 0
    assert not any(array.any() for array in cache.state.arrays)
