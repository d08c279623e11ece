"""What a flush writes and replaces, and that all of it is found again by any engine with the same model."""

import itertools

import numpy as np
import pytest

import blockfile
import storeflush
from cells import FORMATS
from given_kernels import CPU
from given_store import (
    BIG,
    IDENTITY,
    PLAIN,
    SHAPE,
    StateSink,
    check_prompt,
    empty_windows,
    files,
    flush,
    ids_of,
    kept,
    new_store,
    position,
)
from kvcache import Cache, CacheShape
from sessionstate import checkpoint_sink
from storeflush import Kept, OfferedState, superfluous
from storelayout import (
    ROOT,
    TURN,
    Shape,
    State,
)

BLOCK_BYTES = 1 << 14


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", BLOCK_BYTES)


def test_a_conversation_is_found_after_a_restart(tmp_path):
    store, ids = new_store(tmp_path / "store"), ids_of(1000, 1)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    flush(store, kept(ids[:600], [300, 600], label="hello"))
    flush(store, kept(ids, [900, 1000]))
    again = new_store(tmp_path / "store")
    assert position(check_prompt(again, ids)) == (1000, 1000)
    assert position(check_prompt(again, ids_of(2000, 5, ids))) == (1000, 1000)
    assert position(check_prompt(again, ids[:999])) == (999, 900)
    assert position(check_prompt(again, ids_of(900, 2, ids[:500]))) == (500, 300)
    assert position(check_prompt(again, ids, identity=bytes(32))) == (0, 0)


def test_a_model_that_folds_nothing_goes_on_at_any_token(tmp_path):
    store, ids = new_store(tmp_path), ids_of(700, 1)
    flush(store, kept(ids, shape=PLAIN))
    for n_tokens in (1, 255, 256, 257, 601, 700):
        assert check_prompt(store, ids_of(900, 3, ids[:n_tokens]), shape=PLAIN)[0] == n_tokens


@pytest.mark.parametrize("cells", FORMATS)
def test_pools_and_running_state_of_a_cache_come_back_whole(cells, tmp_path, monkeypatch):
    """Windows of a cache feed a flush and take a load as they are; every byte that a session file holds is the same."""
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", 1 << 16)
    geometry = (8, 4, 2, 4, 2, 2, 4, 8, 8, 4, 2, 64, 1, 16, 0, 0, 0, 0)
    form = CacheShape(geometry, 2, 2, True, 2, 64, 16, 64, 1024, FORMATS[cells], FORMATS["fp16"])
    old, new, ids = Cache(form, CPU), Cache(form, CPU), ids_of(702, 1)
    rng = np.random.default_rng(0)
    arrays = [array for pool in old._all_pools for array in (pool.k, pool.v, pool.k_scale, pool.v_scale, pool.pooled)]
    for array in (*arrays, *old.state.arrays[:4]):
        flat = array.reshape(-1).view(np.uint8)
        flat[:] = rng.integers(0, 100, flat.size, np.uint8)
    old.commit(ids)
    shape = Shape.of(old.windows(1), True, form.state_sizes)
    state = OfferedState(len(ids), lambda: old.capture().arrays, TURN)
    flush(new_store(tmp_path), Kept(IDENTITY, shape, ids, old.windows(len(ids)), [state], len(ids)))
    store, sink = new_store(tmp_path), checkpoint_sink(new)
    hit = store.lookup(IDENTITY, np.append(ids, 5))
    loaded = store.load(hit, hit.states[0].piece.position, shape, new.windows(len(ids)), sink)
    assert (loaded.n_tokens, loaded.state.position) == (702, 702)
    new.rewind(sink.snapshot(ids))
    for mine, theirs in zip(new.windows(len(ids)), old.windows(len(ids)), strict=True):
        for part, size in enumerate(theirs.part_sizes):
            expected, found = np.empty(size, np.uint8), np.empty(size, np.uint8)
            theirs.read(part, 0, expected)
            mine.read(part, 0, found)
            assert np.array_equal(found, expected)
    assert all(map(np.array_equal, new.capture().arrays, old.capture().arrays))


def test_a_full_segment_is_never_written_twice(tmp_path):
    store, ids = new_store(tmp_path), ids_of(3000, 1)
    written = [flush(store, kept(ids[:n], shape=PLAIN)) for n in range(1000, 3001, 250)]
    assert all(0 < turn.n_new_bytes <= 3 * 256 * 10 + 64 for turn in written[1:])
    other = flush(store, kept(ids_of(3000, 2, ids[:2048]), shape=PLAIN))
    assert other.n_new_bytes < 952 * 10 + 64
    again = flush(store, kept(ids, shape=PLAIN))
    assert (again.size_bytes, again.n_new_bytes) == (0, 0)
    assert check_prompt(store, ids, shape=PLAIN)[0] == 3000


def test_cells_held_already_are_not_read_again(tmp_path):
    store, ids = new_store(tmp_path), ids_of(1000, 1)
    flush(store, kept(ids, [1000]))

    class Once:
        def __init__(self, part_sizes):
            self.part_sizes, self.starts = part_sizes, []

        def write(self, part, offset, data):
            self.starts.append((part, offset))

    sinks = [Once(window.part_sizes) for window in empty_windows(SHAPE, 1000)]
    loaded = store.load(store.lookup(IDENTITY, ids), 1000, SHAPE, sinks, StateSink(SHAPE), held=600)
    assert (loaded.n_tokens, loaded.state.position) == (1000, 1000)
    assert min(offset for part, offset in sinks[0].starts if part == 0) == 512 // 4 * SHAPE.layers[0][0]


# --- states


def test_which_states_are_superfluous():
    def rest(held, offered, replay_tokens, root=0):
        states = [State(b"", position, b"", ROOT if position == root else 0) for position in held]
        gone = superfluous(states, [State(b"", position, b"", 0) for position in offered], replay_tokens)
        return {state.position for state in states} - {state.position for state in gone}

    assert rest([300, 800, 900], [1000, 1100], 1000, root=300) == {300}
    assert rest([300, 800, 900], [1000, 1100], 400) == {800}
    assert rest([300, 800, 900], [1000, 1100], 0) == {300, 800, 900}
    assert rest([300, 900, 2000], [900, 2100], 1000) == {900, 2000}
    assert rest([300, 800, 900], [], 1000) == {300, 800, 900}


def test_the_states_of_a_turn_are_replaced_by_those_of_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", 1 << 16)
    store, ids = new_store(tmp_path), ids_of(3000, 1)
    for n_tokens, states in ((900, [300, 800, 900]), (1100, [1000, 1100]), (3000, [2500, 3000])):
        flush(store, kept(ids[:n_tokens], states, shape=BIG, root=300, replay=10**6))
        held = {state.position for file in store.index.files.values() for state in file.head.states}
        assert held == {300, *states}
    assert position(check_prompt(store, ids[:2999], shape=BIG)) == (2999, 2500)


def test_the_states_of_another_branch_stay(tmp_path):
    store, ids = new_store(tmp_path), ids_of(900, 1)
    flush(store, kept(ids, [700, 900], replay=5000))
    branch = ids_of(900, 2, ids[:700])
    flush(store, kept(branch, [900], replay=5000))
    assert position(check_prompt(store, ids)) == (900, 900)
    assert position(check_prompt(store, branch)) == (900, 900)


@pytest.mark.slow
def test_a_chat_of_many_turns_writes_what_is_new_and_keeps_little_else(tmp_path, monkeypatch):
    """A long beginning, then turns with a state each that the next one replaces: written once, copied a little."""
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", 1 << 16)
    store, ids = new_store(tmp_path), ids_of(12000, 1)
    first = flush(store, kept(ids[:8000], [8000], shape=BIG, replay=10**6)).n_new_bytes
    n_cell_bytes = first / 8000 - 7.5
    for n_tokens in range(8400, 12001, 400):
        turn = flush(store, kept(ids[:n_tokens], [n_tokens], shape=BIG, replay=10**6))
        assert turn.n_new_bytes < 60_000 + (400 + 255) * n_cell_bytes
        assert turn.size_bytes - 4 * n_tokens - 2000 < 2 * turn.n_new_bytes
        assert position(check_prompt(store, ids[:n_tokens], shape=BIG)) == (n_tokens, n_tokens)
    used, needed = sum(files(tmp_path).values()), 12_000 * (n_cell_bytes + 4) + 60_000
    assert needed < used < needed + 4 * 60_000
    assert position(check_prompt(new_store(tmp_path), ids, shape=BIG)) == (12000, 12000)


def test_drafts_that_were_computed_later_replace_cells_without(tmp_path):
    store, ids = new_store(tmp_path), ids_of(700, 1)
    flush(store, kept(ids, n_drafted=0))
    assert store.lookup(IDENTITY, ids).n_drafted == 0
    assert flush(store, kept(ids)).size_bytes > 0
    assert store.lookup(IDENTITY, ids).n_drafted == 700
    assert len(files(tmp_path)) == 1
    assert flush(store, kept(ids, n_drafted=0)).size_bytes == 0


def test_kinds_of_states_are_kept(tmp_path):
    store, ids = new_store(tmp_path), ids_of(600, 1)
    flush(store, kept(ids, [300, 600], root=300))
    kinds = {place.piece.position: place.piece.kind for place in new_store(tmp_path).lookup(IDENTITY, ids).states}
    assert kinds == {300: ROOT, 600: 0}


# --- large states

BIG_STATES = Shape(((4, 4, 0, 0, 0),), False, BIG.state_sizes)


@pytest.fixture
def large(monkeypatch):
    """The states of BIG count as large."""
    monkeypatch.setattr(storeflush, "LARGE_BYTES", 50_000)


def n_files_of(store, n_segments: int, n_states: int) -> int:
    heads = [file.head for file in store.index.files.values()]
    return sum((bool(head.segments), len(head.states)) == (bool(n_segments), n_states) for head in heads)


def test_a_large_state_has_a_file_of_its_own_and_goes_with_it(large, tmp_path):
    store, ids = new_store(tmp_path), ids_of(6000, 1)
    first = flush(store, kept(ids[:3000], [300, 1500, 3000], shape=BIG, root=300))
    assert (len(first.names), n_files_of(store, 1, 0), n_files_of(store, 0, 1)) == (4, 1, 3)
    assert sum(files(tmp_path).values()) == first.size_bytes
    turn = flush(store, kept(ids[:5000], [5000], shape=BIG, replay=4000))
    assert turn.size_bytes - turn.n_new_bytes < 4 * 5000, "nothing was copied but what stands in tables"
    assert n_files_of(store, 0, 1) == 2, "those of the system prompt and of the latest turn"
    for again in (store, new_store(tmp_path)):
        assert position(check_prompt(again, ids[:5000], shape=BIG)) == (5000, 5000)
        assert position(check_prompt(again, ids[:4000], shape=BIG)) == (4000, 300)


def test_the_end_of_an_answer_is_left_out_where_it_costs_more_than_the_turn(large, tmp_path):
    """The state before the answer is there, and it serves both what goes on with the answer and what does not."""
    store, ids = new_store(tmp_path), ids_of(3000, 1)
    flush(store, kept(ids[:1000], [900, 1000], shape=BIG, replay=200))
    assert position(check_prompt(store, ids[:1000], shape=BIG)) == (1000, 900)
    flush(store, kept(ids[:1200], [1100, 1200], shape=BIG, replay=50))
    assert position(check_prompt(store, ids[:1200], shape=BIG)) == (1200, 1200), "too much to be read again"
    flush(store, kept(ids, [2900, 3000], shape=SHAPE, replay=10**6, identity=b"\1" * 32))
    hit = store.lookup(b"\1" * 32, ids)
    assert [place.piece.position for place in hit.states] == [3000, 2900], "small ones are all kept"


def test_a_state_that_is_not_written_is_not_asked_for(large, tmp_path):
    what = kept(ids_of(1000, 1), [900, 1000], shape=BIG, replay=200)
    what.states[1] = what.states[1]._replace(arrays=lambda: pytest.fail("it was captured"))
    flush(new_store(tmp_path), what)


@pytest.mark.slow
def test_a_long_conversation_has_few_old_states(large, tmp_path, monkeypatch):
    """A state a turn, none of which may be read again: with distance they become rare, and what is left is enough."""
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", 1 << 16)
    store, ids = new_store(tmp_path), ids_of(10_000, 1)
    for n_tokens in range(200, 10_001, 200):
        flush(store, kept(ids[:n_tokens], [n_tokens], shape=BIG_STATES, replay=150))
    held = sorted(state.position for file in store.index.files.values() for state in file.head.states)
    assert len(held) < 25
    for before, after in itertools.pairwise([0, *held]):
        assert after - before <= 200 + (10_000 - before) * 2 // storeflush.OLD_SHARE


def test_the_state_of_a_system_prompt_outlives_what_goes_on_with_it(large, tmp_path):
    """No file continues its own: without a rule of its own it would go first, being used least of late."""
    store, root = new_store(tmp_path), ids_of(300, 1)
    chats = [ids_of(900, seed, root) for seed in (2, 3, 4)]
    flush(store, kept(chats[0], [300, 900], shape=BIG, root=300))
    for chat in chats[1:]:
        flush(store, kept(chat, [900], shape=BIG))
    n_steps = 0
    while files(tmp_path):
        for chat in chats:
            hit = store.lookup(IDENTITY, chat)
            assert hit.n_tokens <= 300 or 300 in {place.piece.position for place in hit.states}
        store.quota_bytes = sum(files(tmp_path).values()) - 1
        assert store.prune()[0] == 1
        n_steps += 1
    assert n_steps == 7


# --- what is left out, as another piece has it


@pytest.mark.parametrize("n_first", [40, 137, 230, 259, 300, 511])
def test_cells_that_are_kept_are_not_written_once_more(n_first, tmp_path):
    """Pages of four tokens are whole in one piece; a short beginning is written again, as it would cost a file."""
    store, ids = new_store(tmp_path), ids_of(700, 1)
    of_page, of_row = SHAPE.rates(has_draft=True)
    flush(store, kept(ids[:n_first]))
    second = flush(store, kept(ids))
    tail = n_first % 256
    n_again = tail if tail * (1 + storeflush.MOST_LARGER) < 256 else tail % 4
    n_written = 700 - n_first + n_again
    assert abs(second.n_new_bytes - n_written / 4 * (of_page + of_row)) <= of_page + of_row
    for again in (store, new_store(tmp_path)):
        for n_tokens in {700, 699, n_first, max(n_first - 5, 1), n_first + 1, 256, 300}:
            assert check_prompt(again, ids[:n_tokens])[0] == n_tokens
        other = ids_of(700, 2, ids[: n_first + 9])
        assert check_prompt(again, other)[0] == n_first + 9


@pytest.mark.slow
def test_small_turns_take_few_files_and_few_bytes(tmp_path):
    store, ids, written = new_store(tmp_path), ids_of(1500, 1), 0
    for n_tokens in range(300, 1501, 12):
        written += flush(store, kept(ids[:n_tokens], shape=PLAIN)).n_new_bytes
        assert len(files(tmp_path)) <= 2 + 3 * n_tokens // 256
    whole = flush(new_store(tmp_path / "whole"), kept(ids, shape=PLAIN)).n_new_bytes
    assert written < 7 * whole
    assert check_prompt(new_store(tmp_path), ids, shape=PLAIN)[0] == 1500


def test_a_damaged_beginning_is_a_shorter_hit(tmp_path):
    store, ids = new_store(tmp_path), ids_of(500, 1)
    name = flush(store, kept(ids[:400])).names[0]
    flush(store, kept(ids))
    data = bytearray((tmp_path / name).read_bytes())
    data[-30] ^= 1
    (tmp_path / name).write_bytes(data)
    assert check_prompt(store, ids)[0] in (0, 256)
    assert check_prompt(new_store(tmp_path), ids)[0] == 0, "the file is set aside, and all of it is gone"
    flush(store, kept(ids))
    assert check_prompt(new_store(tmp_path), ids)[0] == 500
