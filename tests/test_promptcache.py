"""Retention and choice of held prefixes, without a model; random requests against a plain account of what is held."""

import random

import numpy as np
import pytest

import generation
from cells import FORMATS
from engine import Session
from given_engine import TURN, ask, new_session, trunk
from given_kernels import CPU
from kvcache import Cache, CacheShape, Snapshot
from promptcache import Checkpoints, ParkingLot, Timeline, best_offer, is_prefix

EMPTY = np.empty(0, np.float32)


def snapshot(prompt) -> Snapshot:
    return Snapshot(np.array(prompt, np.int32), (EMPTY, EMPTY, EMPTY, EMPTY, np.empty(0, np.int32)))


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


def test_among_many_the_one_goes_that_costs_least_to_read_again_unless_it_is_new():
    """The last three stay; of the others the one with the fewest tokens behind its neighbour goes."""
    assert lengths(chain(4, (100, 1), (110, 2), (150, 3), (160, 4), (165, 5))) == [100, 150, 160, 165]
    assert lengths(chain(4, (100, 1), (110, 5), (150, 2), (160, 4), (165, 3))) == [100, 110, 160, 165]
    with_root = chain(5, (90, 1, "root"), (91, 2), (150, 3), (160, 4), (165, 5), (170, 6))
    assert lengths(with_root) == [90, 150, 160, 165, 170]


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


def filled(n_tokens: int, seed: int = 0, used: int = 0) -> Timeline:
    """A conversation whose cells and tokens are arbitrary bytes."""
    cache, rng = Cache(SHAPE, CPU), np.random.default_rng(seed)
    cache.commit(rng.integers(0, 99, n_tokens, dtype=np.int32))
    for window in cache.windows(n_tokens):
        for part, size in enumerate(window.part_sizes):
            window.write(part, 0, rng.integers(0, 256, size, dtype=np.uint8))
    timeline = Timeline(cache, 4)
    timeline.complete, timeline.used = True, used
    return timeline


def cell_bytes(cache: Cache) -> list[bytes]:
    found = []
    for window in cache.windows(cache.n_tokens):
        for part, size in enumerate(window.part_sizes):
            out = np.empty(size, np.uint8)
            window.read(part, 0, out)
            found.append(out.tobytes())
    return found


def used(lot: ParkingLot) -> list[int]:
    """The stamps of what is parked, which tests take for names."""
    return [entry.live.used for entry in lot.entries]


def test_a_parked_conversation_is_a_copy():
    timeline, lot = filled(30, used=7), lot_of()
    cache = timeline.cache
    text, before = cache.ids.copy(), cell_bytes(cache)
    assert lot.park(timeline)
    for window in cache.windows(30):
        window.write(0, 0, np.zeros(window.part_sizes[0], np.uint8))
    timeline.forget()
    offer, _ = best_offer(lot.entries, np.append(text, 1), True)
    assert (offer.source, offer.n_tokens, offer.record.used) == ("parked", 30, 7)
    timeline.take(offer, 8)
    assert cell_bytes(cache) == before
    assert cache.ids.tolist() == text.tolist()
    assert offer.record.used == 8


def test_a_parked_conversation_counts_all_its_bytes():
    timeline, lot = filled(30), lot_of()
    timeline.checkpoints.add(snapshot(timeline.ids[:10]), 1)
    lot.park(timeline)
    assert lot.size_bytes == sum(map(len, cell_bytes(timeline.cache))) + 30 * 4 + 10 * 4


def test_the_oldest_go_until_places_and_bytes_suffice():
    one = lot_of()
    one.park(filled(32))
    size = one.size_bytes
    lot = lot_of(budget_bytes=3 * size, n_slots=9)
    for seed in range(5):
        assert lot.park(filled(32, seed, seed))
    assert used(lot) == [2, 3, 4]
    assert lot.park(filled(40, 9, 9))  # a larger one needs the places of two
    assert used(lot) == [4, 9]
    assert lot.size_bytes <= lot.budget_bytes


def test_a_short_conversation_never_takes_the_place_of_a_longer_one():
    lot = lot_of(n_slots=2)
    for seed, n_tokens in ((1, 40), (2, 12), (3, 11), (4, 13), (5, 39), (6, 12)):
        lot.park(filled(n_tokens, seed, seed))
    assert used(lot) == [1, 5]
    assert not lot.park(filled(38, 7, 7))
    assert lot.park(filled(48, 8, 8))
    assert used(lot) == [5, 8]


def test_a_long_conversation_that_is_not_asked_for_gives_way_in_the_end():
    lot = lot_of(n_slots=2)
    lot.park(filled(44, 1, 1))
    for seed in range(2, 6):
        lot.park(filled(44, seed, seed))
    assert used(lot) == [4, 5]


def test_of_two_branches_only_what_they_do_not_share_counts():
    lot, branch = lot_of(n_slots=2), filled(40, 1, 1)
    text = branch.ids.copy()
    lot.park(branch)
    branch.cache.rewind(snapshot([*text[:30], *range(10)]))
    branch.used = 2
    lot.park(branch)
    assert used(lot) == [1, 2]
    assert lot.park(filled(20, 3, 3))  # shorter than both, but another branch costs ten tokens alone
    assert used(lot) == [1, 3]


def test_what_does_not_fit_pushes_nothing_out():
    lot = lot_of()
    lot.park(filled(32, used=1))
    lot.budget_bytes = lot.size_bytes
    assert not lot.park(filled(40, 1, 2))
    lot.budget_bytes = 10**6
    lot.floor_bytes = 10**9
    assert not lot.park(filled(40, 1, 2))
    assert used(lot) == [1]


def test_ram_that_the_oldest_give_back_counts_as_free():
    lot = lot_of(n_slots=1)
    lot.park(filled(32, used=1))
    lot.floor_bytes = 10**9  # nothing is left above it
    assert lot.park(filled(32, 1, 2))
    assert not lot.park(filled(36, 2, 3))
    assert used(lot) == [2]


def test_a_start_of_the_newcomer_is_superseded_and_a_branch_is_not():
    lot, timeline = lot_of(n_slots=9), filled(32, used=1)
    cache = timeline.cache
    lot.park(timeline)
    text = cache.ids.copy()
    lot.park(filled(32, 1, 2))
    cache.commit(np.array([3, 4, 5], np.int32))
    timeline.used = 3
    lot.park(timeline)
    assert used(lot) == [2, 3]
    cache.rewind(snapshot(text))
    timeline.used = 4
    lot.park(timeline)  # shorter than what lies there: no reason to drop that
    assert used(lot) == [2, 3, 4]
    entry = lot.entries[1]
    lot.remove(entry)
    assert entry not in lot.entries
    assert len(lot.entries) == 2


def test_the_longest_match_serves_and_the_newest_of_equals():
    lot, timeline = lot_of(n_slots=9), filled(32)
    text = np.append(timeline.ids, [7, 7, 7, 7]).astype(np.int32)
    for stamp, extra in ((1, [8]), (2, [7]), (3, [9])):
        timeline.cache.rewind(snapshot(text[:32]))
        timeline.cache.commit(np.array(extra, np.int32))
        timeline.used = stamp
        lot.park(timeline)

    def best(prompt, steered=True):
        offer, diverged_at = best_offer(reversed(lot.entries), np.array(prompt, np.int32), steered)
        return offer.parked and offer.parked.live.used, offer.n_tokens, diverged_at

    assert best(text) == (2, 33, 33)
    assert best(text[:30]) == (3, 29, 30)
    assert best([*text[:20], 99]) == (3, 20, 20)
    assert best([98, *text]) == (None, 0, 0)
    assert best(text, steered=False) == (None, 0, 0)  # computed with another setting of the control vector


# --- random requests against a plain account of what is held

CHUNK, EVERY, ROOT, KEPT, SLOTS = 8, 16, 10, 3, 2


def common(one, other) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Account:
    """What a session must hold, in lists: no cell, no state, only tokens, stamps and the rules of the protocol."""

    def __init__(self, stateless: bool):
        self.stateless = stateless
        self.live, self.live_used, self.chain = None, 0, []
        self.parked, self.beside, self.now, self.level, self.given_up = [], None, 0, 0, 0

    def tick(self):
        self.now += 1
        return self.now

    @staticmethod
    def starts(held, prompt):
        return len(held) < len(prompt) and prompt[: len(held)] == held

    def offer(self, live, chain, prompt, whole_first):
        """(tokens, record or None) of one conversation."""
        if whole_first and live is not None and self.starts(live["ids"], prompt):
            return len(live["ids"]), None
        if self.stateless and live is not None:
            return min(common(live["ids"], prompt), len(prompt) - 1), None if whole_first else live
        records = [*chain, *([] if whole_first or live is None else [live])]
        best = max((r for r in records if self.starts(r["ids"], prompt)), key=lambda r: len(r["ids"]), default=None)
        return (len(best["ids"]), best) if best else (0, None)

    def resume(self, prompt, keep):
        """Tokens reused, where the prompt parts from anything held, and whether the request runs beside."""
        live = None if self.live is None else {"ids": self.live}
        source, most, record, diverged = None, 0, None, 0
        places = [*([self.beside] if self.beside else []), {"live": live, "chain": self.chain}, *reversed(self.parked)]
        for place in places:
            n_tokens, candidate = self.offer(place["live"], place["chain"], prompt, place["live"] is live)
            if n_tokens > most:
                source, most, record = place if place["live"] is not live else None, n_tokens, candidate
            diverged = max(diverged, common(place["live"]["ids"], prompt) if place["live"] else 0)
        n_source = len(source["live"]["ids"]) if source else 0
        whole = source and 32 * (n_source - most) <= n_source
        if self.beside and keep:
            ran = self.beside["live"]
            if not (source is self.beside and whole) and not self.park(ran["ids"], ran["used"], self.beside["chain"]):
                self.given_up += len(ran["ids"])
            self.beside = None
        if keep and whole and source in self.parked:
            self.parked.remove(source)
        loss = len(self.live or []) - (0 if source else most)
        beside = False
        if loss and not keep:
            beside = True
        elif loss and 32 * loss > len(self.live) and not self.park():
            beside = len(prompt) < loss
            self.given_up += 0 if beside else loss
        if beside and not source:
            most, record = 0, None
        if record:
            record["used"] = self.tick()
        chain = source["chain"] if source else self.chain if most else []
        chain = [mark for mark in chain if len(mark["ids"]) <= most]
        return most, diverged, beside, chain

    def loss(self, ids, others):
        return len(ids) - max((common(ids, other) for other in others), default=0)

    def park(self, ids=None, used=None, chain=None):
        ids, used = (self.live, self.live_used) if ids is None else (ids, used)
        chain = self.chain if chain is None else chain
        kept = [e for e in self.parked if e["live"]["ids"] != ids[: len(e["live"]["ids"])]]
        loss, level, given_up = self.loss(ids, [e["live"]["ids"] for e in kept]), self.level, self.given_up

        def at_most(most):
            others = [(e, [ids, *(o["live"]["ids"] for o in kept if o is not e)]) for e in kept]
            return [e for e, rest in others if self.loss(e["live"]["ids"], rest) <= most]

        while len(kept) >= SLOTS:
            if not (cheap := at_most(loss)):
                cheap, given_up = at_most(loss + given_up), 0
            if not cheap:
                return False
            victim = min(cheap, key=lambda e: e["priority"])
            kept.remove(victim)
            level = max(level, victim["priority"])
        self.level, self.given_up = level, given_up
        live = {"ids": ids, "used": used, "root": False}
        self.parked = [*kept, {"live": live, "chain": list(chain), "priority": level + loss}]
        return True

    def mark(self, chain, held, root=False):
        same = [mark for mark in chain if len(mark["ids"]) == len(held)]
        if same:
            same[0]["used"], same[0]["root"] = self.tick(), same[0]["root"] or root
            return
        chain.append({"ids": held, "used": self.tick(), "root": root})
        chain.sort(key=lambda mark: len(mark["ids"]))
        if len(chain) > KEPT:
            chain.remove(min((m for m in chain if not m["root"]), key=lambda m: m["used"]))

    def read(self, chain, prompt, n_resumed, diverged, keep, n_chunks) -> int:
        """Read at most `n_chunks` chunks; how far that comes."""
        turns = [place for place in range(1, len(prompt)) if prompt[place] == TURN]
        ends = dict.fromkeys(turns[-2:] or [len(prompt) - 1], False) if keep else {}
        if keep and turns and not n_resumed:
            ends[turns[0]] = turns[0] >= ROOT
        if keep and not self.stateless:
            guesses = [turns[0] - 16 if turns else 0, max(ends) - 16]
            for place, least in [(diverged, 16), *((guess, 32) for guess in guesses)]:
                if place not in ends and place - max([n_resumed, *(end for end in ends if end < place)]) > least:
                    ends[place] = False
        at = n_resumed
        while at < len(prompt):
            if not n_chunks:
                if keep and at:
                    self.mark(chain, prompt[:at])
                return at
            n_chunks -= 1
            first, at = at, min([at + CHUNK, len(prompt), *(end for end in ends if end > at)])
            if keep and (at in ends or first // EVERY < at // EVERY):
                self.mark(chain, prompt[:at], ends.get(at, False))
        return at

    def generate(self, prompt, answer, keep, n_chunks) -> int:
        n_resumed, diverged, beside, chain = self.resume(prompt, keep)
        n_read = self.read(chain, prompt, n_resumed, diverged, keep, n_chunks)
        held = (prompt + answer[:-1])[: n_read if n_read < len(prompt) else None] or None
        now = self.tick()
        if beside:
            if keep and held:
                self.beside = {"live": {"ids": held, "used": now, "root": False}, "chain": chain, "priority": 0}
        elif keep:
            self.live, self.live_used, self.chain = held, now, chain
        elif self.live is not None and n_resumed == len(self.live):
            self.live_used = now
        else:
            self.live, self.chain, self.live_used = None, [], now
        return n_resumed

    @property
    def held(self):
        return self.beside["live"]["ids"] if self.beside else self.live

    def saved(self):
        chain = self.beside["chain"] if self.beside else self.chain
        used = self.beside["live"]["used"] if self.beside else self.live_used
        return {"live": self.held, "used": used, "chain": [dict(chain[-1], root=False)] if chain else []}

    def erase(self):
        if self.beside:
            self.beside = None
        else:
            self.live, self.chain = None, []

    def restore(self, file):
        self.beside = None
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


@pytest.mark.soak
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
    account, chance, texts, files, sources = Account(name == "llama"), random.Random(seed), [], [], set()
    for number in range(150):
        verb = chance.random()
        if verb < 0.08 and account.held is not None:
            path = str(tmp_path / f"{number}.bin")
            session.save(path)
            files.append((path, account.saved()))
        elif verb < 0.16 and files:
            path, file = chance.choice(files)
            session.restore(path)
            account.restore(file)
        elif verb < 0.18:
            session.erase()
            account.erase()
        else:
            sources.add(_request(session, account, chance, texts))
        assert session.n_tokens == len(account.held or [])
        assert session.held_ids().tolist() == (account.held or [])
        assert session.live.n_tokens == len(account.live or [])
        chain = [(c.snapshot.ids.tolist(), c.root) for c in session.checkpoints.chain]
        assert chain == [(mark["ids"], mark["root"]) for mark in account.chain]
        parked = [entry.live.snapshot.ids.tolist() for entry in session.parking.entries]
        assert parked == [entry["live"]["ids"] for entry in account.parked]
    assert sources == {"none", "live", "parked"} | (set() if name == "llama" else {"checkpoint"})


def _request(session, account, chance, texts) -> str:
    """One request, held against the account and a fresh session; says what served it."""
    prompt, max_new = next_prompt(chance, texts), chance.randrange(7)
    keep, n_chunks = chance.random() > 0.08, chance.choice([10**6] * 9 + [chance.randrange(4)])
    looks = iter(range(10**9))
    fresh = Session(session.engine)
    expected = ask(fresh, prompt, max_new).tokens
    reply = ask(session, prompt, max_new, checkpoint=keep, source=True, stopped=lambda: next(looks) >= n_chunks)
    n_resumed = account.generate(prompt, reply.tokens, keep, n_chunks)
    assert reply.reused == n_resumed
    assert reply.tokens == expected[: len(reply.tokens)]
    if reply.done.finish != "cancel":
        assert reply.tokens == expected
        if session.held is session.live and session.held_ids().tolist() == fresh.held_ids().tolist():
            assert trunk(session) == trunk(fresh)
    texts.append([*prompt, *reply.tokens])
    return reply.source.source
