"""Retention and choice of held prefixes, without a model; random requests against a plain account of what is held."""

import random

import numpy as np
import pytest

import generation
from engine import Session
from kvcache import FORMATS, Cache, CacheShape, Snapshot
from promptcache import Checkpoints, ParkingLot, is_prefix
from tinyengine import TURN, ask, new_session, trunk

EMPTY = np.empty(0, np.float32)


def snapshot(prompt) -> Snapshot:
    return Snapshot(np.array(prompt, np.int32), EMPTY, EMPTY, EMPTY, EMPTY, np.empty(0, np.int32))


def chain(limit, *entries) -> Checkpoints:
    """Checkpoints of these (length, stamp) or (length, stamp, root), of one text."""
    checkpoints = Checkpoints(limit)
    for length, used, *root in entries:
        checkpoints.add(snapshot(range(length)), used, root=bool(root))
    return checkpoints


def lengths(checkpoints) -> list[int]:
    return [checkpoint.n_tokens for checkpoint in checkpoints.chain]


# --- prefixes


@pytest.mark.parametrize(
    ("held", "prompt", "expected"),
    [
        ([], [1], True),
        ([1], [1, 2], True),
        ([1, 2], [1, 2], False),
        ([1, 2, 3], [1, 2], False),
        ([2], [1, 2], False),
        ([1, 3], [1, 2, 3], False),
    ],
)
def test_a_prefix_leaves_at_least_one_token_to_read(held, prompt, expected):
    assert is_prefix(np.array(held, np.int32), np.array(prompt, np.int32)) is expected


# --- checkpoints


def test_a_chain_is_in_order_of_length_whatever_came_first():
    assert lengths(chain(9, (30, 1), (10, 2), (20, 3))) == [10, 20, 30]


def test_the_least_recently_used_goes_even_if_it_has_just_come():
    assert lengths(chain(2, (10, 5), (20, 3), (30, 4))) == [10, 30]
    assert lengths(chain(2, (10, 5), (20, 6), (30, 4))) == [10, 20]


def test_the_root_stays():
    assert lengths(chain(2, (10, 1, "root"), (20, 2), (30, 3), (40, 4))) == [10, 40]


def test_two_roots_give_way_to_each_other_before_the_chain_overflows():
    with_two = chain(3, (10, 1, "root"), (20, 2, "root"), (30, 3), (40, 4))
    assert lengths(with_two) == [10, 20, 40]


def test_a_single_place_pins_nothing():
    assert lengths(chain(1, (10, 1, "root"), (20, 2))) == [20]


def test_one_of_the_same_length_is_stamped_anew_and_may_become_the_root():
    checkpoints = chain(2, (10, 1), (20, 2), (10, 3, "root"))
    assert [(c.n_tokens, c.used, c.root) for c in checkpoints.chain] == [(10, 3, True), (20, 2, False)]
    checkpoints.add(snapshot(range(10)), 4)
    assert checkpoints.chain[0].root


def test_the_longest_exact_start_serves():
    checkpoints = chain(9, (10, 1), (20, 2), (30, 3))
    text = list(range(40))
    for prompt, expected in ((text, 30), (text[:30], 20), (text[:21], 20), (text[:20], 10), (text[:10], None)):
        found = checkpoints.longest_prefix(np.array(prompt, np.int32))
        assert (found.n_tokens if found else None) == expected
    other = np.array([*text[:25], 99, *text[26:]], np.int32)
    assert checkpoints.longest_prefix(other).n_tokens == 20
    assert checkpoints.deepest().n_tokens == 30
    assert Checkpoints(3).deepest() is None


def test_a_cut_leaves_what_is_not_longer():
    checkpoints = chain(9, (10, 1), (20, 2), (30, 3))
    checkpoints.cut(20)
    assert lengths(checkpoints) == [10, 20]


# --- the parking lot, over a cache without a model

SHAPE = CacheShape(
    geometry=(8, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 64, 0, 0, 0, 0, 0, 8),
    n_attention=1,
    n_recurrent=0,
    has_draft=False,
    n_head_kv=1,
    head_dim=64,
    index_dim=0,
    history_bytes=0,
    n_cells=64,
    cell_format=FORMATS["fp16"],
    draft_format=FORMATS["fp16"],
)


def lot_of(budget_bytes=10**6, n_slots=3, floor_bytes=0, available=lambda: 10**9) -> ParkingLot:
    return ParkingLot(budget_bytes, n_slots, floor_bytes, available)


def filled_cache(n_tokens: int, seed: int = 0) -> Cache:
    """A cache whose cells and tokens are arbitrary bytes."""
    cache, rng = Cache(SHAPE), np.random.default_rng(seed)
    cache.commit(rng.integers(0, 99, n_tokens, dtype=np.int32))
    for window in cache.windows(n_tokens):
        for part, size in enumerate(window.part_sizes):
            window.write(part, 0, rng.integers(0, 256, size, dtype=np.uint8))
    return cache


def cell_bytes(cache: Cache) -> list[bytes]:
    found = []
    for window in cache.windows(cache.n_tokens):
        for part, size in enumerate(window.part_sizes):
            out = np.empty(size, np.uint8)
            window.read(part, 0, out)
            found.append(out.tobytes())
    return found


NONE = Checkpoints(0)


def test_a_parked_conversation_is_a_copy():
    cache, lot = filled_cache(30), lot_of()
    text, before = cache.ids.copy(), cell_bytes(cache)
    assert lot.park(cache, NONE, 7)
    for window in cache.windows(30):
        window.write(0, 0, np.zeros(window.part_sizes[0], np.uint8))
    cache.zero()
    entry, record = lot.best(np.append(text, 1), 0)
    entry.unpark(cache)
    cache.rewind(record.snapshot)
    assert cell_bytes(cache) == before
    assert cache.ids.tolist() == text.tolist()
    assert (record.used, record.n_tokens) == (7, 30)


def test_a_parked_conversation_counts_all_its_bytes():
    cache, lot = filled_cache(30), lot_of()
    checkpoints = Checkpoints(4)
    checkpoints.add(snapshot(cache.ids[:10]), 1)
    lot.park(cache, checkpoints, 2)
    assert lot.size_bytes == sum(map(len, cell_bytes(cache))) + 30 * 4 + 10 * 4


def test_the_oldest_go_until_places_and_bytes_suffice():
    one = lot_of()
    one.park(filled_cache(32), NONE, 1)
    size = one.size_bytes
    lot = lot_of(budget_bytes=3 * size, n_slots=9)
    for seed in range(5):
        assert lot.park(filled_cache(32, seed), NONE, seed)
    assert [entry.live.used for entry in lot.entries] == [2, 3, 4]
    assert lot.park(filled_cache(40, 9), NONE, 9)  # a larger one needs the places of two
    assert [entry.live.used for entry in lot.entries] == [4, 9]
    assert lot.size_bytes <= lot.budget_bytes


def test_what_does_not_fit_pushes_nothing_out():
    lot = lot_of()
    lot.park(filled_cache(32), NONE, 1)
    lot.budget_bytes = lot.size_bytes
    assert not lot.park(filled_cache(40, 1), NONE, 2)
    lot.budget_bytes = 10**6
    lot.floor_bytes = 10**9
    assert not lot.park(filled_cache(40, 1), NONE, 2)
    assert [entry.live.used for entry in lot.entries] == [1]


def test_ram_that_the_oldest_give_back_counts_as_free():
    lot = lot_of(n_slots=1)
    lot.park(filled_cache(32), NONE, 1)
    lot.floor_bytes = 10**9  # nothing is left above it
    assert lot.park(filled_cache(32, 1), NONE, 2)
    assert not lot.park(filled_cache(36, 2), NONE, 3)
    assert [entry.live.used for entry in lot.entries] == [2]


def test_a_start_of_the_newcomer_is_superseded_and_a_branch_is_not():
    lot, cache = lot_of(), filled_cache(32)
    lot.park(cache, NONE, 1)
    text = cache.ids.copy()
    branch = filled_cache(32, 1)
    lot.park(branch, NONE, 2)
    cache.commit(np.array([3, 4, 5], np.int32))
    lot.park(cache, NONE, 3)
    assert [entry.live.used for entry in lot.entries] == [2, 3]
    cache.rewind(snapshot(text))
    lot.park(cache, NONE, 4)  # shorter than what lies there: no reason to drop that
    assert [entry.live.used for entry in lot.entries] == [2, 3, 4]
    entry = lot.entries[1]
    lot.remove(entry)
    assert entry not in lot.entries
    assert len(lot.entries) == 2


def test_the_longest_match_serves_and_the_newest_of_equals():
    lot, cache = lot_of(n_slots=9), filled_cache(32)
    text = np.append(cache.ids, [7, 7, 7, 7]).astype(np.int32)
    for used, extra in ((1, [8]), (2, [7]), (3, [9])):
        cache.rewind(snapshot(text[:32]))
        checkpoints = Checkpoints(9)
        checkpoints.add(snapshot(text[:20]), used)
        cache.commit(np.array(extra, np.int32))
        lot.park(cache, checkpoints, used)
    entry, record = lot.best(text, 0)
    assert (entry.live.used, record.n_tokens) == (2, 33)
    entry, record = lot.best(text[:30], 0)
    assert (entry.live.used, record.n_tokens) == (3, 20)
    assert lot.best(text[:30], 20) is None
    assert lot.best(text, 33) is None


# --- random requests against a plain account of what is held

CHUNK, EVERY, ROOT, KEPT, SLOTS = 8, 16, 10, 3, 2


class Account:
    """What a session must hold, in lists: no cell, no state, only tokens, stamps and the rules of the protocol."""

    def __init__(self):
        self.live, self.live_used, self.chain, self.parked, self.now = None, 0, [], [], 0

    def tick(self):
        self.now += 1
        return self.now

    @staticmethod
    def starts(held, prompt):
        return len(held) < len(prompt) and prompt[: len(held)] == held

    def resume(self, prompt) -> int:
        states = [mark for mark in self.chain if self.starts(mark["ids"], prompt)]
        best = max(states, key=lambda mark: len(mark["ids"]), default=None)
        n_own = len(best["ids"]) if best else 0
        if self.live is not None and self.starts(self.live, prompt):
            best, n_own = None, len(self.live)
        source, most = None, n_own
        for entry in reversed(self.parked):
            for mark in [*entry["chain"], entry["live"]]:
                if self.starts(mark["ids"], prompt) and len(mark["ids"]) > most:
                    source, most = (entry, mark), len(mark["ids"])
        if source:
            self.parked.remove(source[0])
            self.park()
            self.chain = list(source[0]["chain"])
            source[1]["used"] = self.tick()
        elif not n_own:
            self.park()
            self.chain = []
        elif best:
            self.park()
            best["used"] = self.tick()
        self.live = None
        self.chain = [mark for mark in self.chain if len(mark["ids"]) <= most]
        return most

    def park(self):
        if self.live is None:
            return
        self.parked = [p for p in self.parked if p["live"]["ids"] != self.live[: len(p["live"]["ids"])]]
        self.parked = self.parked[-(SLOTS - 1) :]
        live = {"ids": self.live, "used": self.live_used, "root": False}
        self.parked.append({"live": live, "chain": list(self.chain)})

    def mark(self, held, root=False):
        same = [mark for mark in self.chain if len(mark["ids"]) == len(held)]
        if same:
            same[0]["used"], same[0]["root"] = self.tick(), same[0]["root"] or root
            return
        self.chain.append({"ids": held, "used": self.tick(), "root": root})
        self.chain.sort(key=lambda mark: len(mark["ids"]))
        if len(self.chain) > KEPT:
            self.chain.remove(min((m for m in self.chain if not m["root"]), key=lambda m: m["used"]))

    def read(self, prompt, n_resumed, keep, n_chunks) -> bool:
        """Read at most `n_chunks` chunks; whether that was the whole prompt."""
        turns = [place for place in range(1, len(prompt)) if prompt[place] == TURN]
        ends = {turns[-1] if turns else len(prompt) - 1: False} if keep else {}
        if keep and turns and not n_resumed and turns[0] >= ROOT:
            ends[turns[0]] = True
        at = n_resumed
        while at < len(prompt):
            if not n_chunks:
                if keep and at:
                    self.mark(prompt[:at])
                return False
            n_chunks -= 1
            first, at = at, min([at + CHUNK, len(prompt), *(end for end in ends if end > at)])
            if keep and (at in ends or first // EVERY < at // EVERY):
                self.mark(prompt[:at], ends.get(at, False))
        return True

    def generate(self, prompt, answer, keep, n_chunks) -> int:
        n_resumed = self.resume(prompt)
        whole = self.read(prompt, n_resumed, keep, n_chunks)
        self.live = (prompt + answer[:-1] if answer else prompt) if whole and keep else None
        self.live_used = self.tick()
        return n_resumed

    def saved(self):
        deepest = [dict(self.chain[-1], root=False)] if self.chain else []
        return {"live": self.live, "used": self.live_used, "chain": deepest}

    def restore(self, file):
        self.live, self.live_used, self.chain = file["live"], file["used"], [dict(mark) for mark in file["chain"]]
        self.now = max(self.now, self.live_used, *(mark["used"] for mark in self.chain))


def next_prompt(chance, texts) -> list[int]:
    """Something new, or a start of something said before with a few tokens or a turn behind it."""
    if not texts or chance.random() < 0.15:
        return [
            TURN,
            *chance.choices(range(6, 96), k=chance.randrange(1, 30)),
            TURN,
            *chance.choices(range(6, 96), k=5),
        ]
    text = chance.choice(texts[-8:])
    start = text[: chance.choice([len(text), len(text), chance.randrange(1, len(text) + 1)])]
    turn = [TURN] if chance.random() < 0.7 else []
    return (start + turn + chance.choices(range(6, 96), k=chance.randrange(1, 9)))[:150]


@pytest.mark.parametrize(("name", "seed"), [("qwen4exp", 1), ("qwen35", 2), ("llama", 3)])
def test_random_requests_hold_what_a_plain_account_says(name, seed, tmp_path, monkeypatch):
    """Every answer is that of a session that knows nothing else, bit for bit, whatever served its start."""
    monkeypatch.setattr(generation, "CHUNK", CHUNK)
    session = new_session(
        name,
        prompt_cache=KEPT,
        prompt_cache_every=EVERY,
        prompt_cache_root=ROOT,
        conversation_cache_mib=100,
        conversation_cache_slots=SLOTS,
    )
    account, chance, texts, files, sources = Account(), random.Random(seed), [], [], set()
    for number in range(150):
        verb = chance.random()
        if verb < 0.08 and account.live is not None:
            path = str(tmp_path / f"{number}.bin")
            session.save(path)
            files.append((path, account.saved()))
        elif verb < 0.16 and files:
            path, file = chance.choice(files)
            session.restore(path)
            account.restore(file)
        elif verb < 0.18:
            session.erase()
            account.live, account.chain = None, []
        else:
            sources.add(_request(session, account, chance, texts))
        assert session.n_tokens == len(account.live or [])
        assert session.cache.ids[: session.n_tokens].tolist() == (account.live or [])
        chain = [(c.snapshot.ids.tolist(), c.root) for c in session.checkpoints.chain]
        assert chain == [(mark["ids"], mark["root"]) for mark in account.chain]
        parked = [entry.live.snapshot.ids.tolist() for entry in session.parking.entries]
        assert parked == [entry["live"]["ids"] for entry in account.parked]
    assert sources == {"nothing", "live", "checkpoint", "parked"}


def _request(session, account, chance, texts) -> str:
    """One request, held against the account and a fresh session; says what served it."""
    prompt, max_new = next_prompt(chance, texts), chance.randrange(7)
    keep, n_chunks = chance.random() > 0.08, chance.choice([10**6] * 9 + [chance.randrange(4)])
    live, n_live = account.live, len(account.live or [])
    n_own = max([len(m["ids"]) for m in account.chain if account.starts(m["ids"], prompt)], default=0)
    from_live = live is not None and account.starts(live, prompt)
    looks = iter(range(10**9))
    fresh = Session(session.engine)
    expected = ask(fresh, prompt, max_new).tokens
    reply = ask(session, prompt, max_new, checkpoint=keep, stopped=lambda: next(looks) >= n_chunks)
    n_resumed = account.generate(prompt, reply.tokens, keep, n_chunks)
    assert reply.reused == n_resumed
    assert reply.tokens == expected[: len(reply.tokens)]
    if reply.done.finish != "cancel":
        assert reply.tokens == expected
        assert trunk(session) == trunk(fresh)
    texts.append([*prompt, *reply.tokens])
    if not n_resumed:
        return "nothing"
    return "live" if from_live and n_resumed == n_live else "checkpoint" if n_resumed == n_own else "parked"
