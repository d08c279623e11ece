"""Parked conversations: what is displaced comes back whole, in the memory that it may take; what is told and forgotten.

Read next: test_reuse.py.
"""

import pytest

import resources
from engine import Session
from given_engine import (
    FORMATS,
    KINDS,
    TURN,
    ask,
    assert_like_fresh,
    conversation,
    ids,
    joined,
    marks,
    new_session,
    next_turn,
    shared_engine,
    trunk,
)

# --- parked conversations


def parking_session(**options):
    return new_session(**({"conversation_cache_mib": 100} | options))


def parked(session) -> list[int]:
    return [entry.live.n_tokens for entry in session.parking.entries]


@pytest.mark.parametrize("name", KINDS)
def test_a_parked_conversation_comes_back_whole(name):
    session = parking_session() if name == "qwen4exp" else new_session(name, conversation_cache_mib=100)
    prompt, reply = conversation(session)
    n_held, before = session.n_tokens, trunk(session)
    checkpoints = marks(session)
    title = ask(session, ids(50, 5), 4)
    assert (title.reused, parked(session)) == (0, [n_held])
    prompt = next_turn(prompt, reply, 8)
    back = ask(session, prompt, 9)
    assert back.reused == n_held
    assert marks(session)[: len(checkpoints)] == checkpoints
    assert parked(session) == [53]
    assert_like_fresh(session, prompt, back, 9)
    assert before[0] == prompt[:n_held].tolist()


@pytest.mark.parametrize("kv", FORMATS)
def test_parking_and_coming_back_changes_no_bit(kv):
    session = parking_session(kv=kv)
    prompt, reply = conversation(session)
    prompt = next_turn(prompt, reply, 8)
    stayed = new_session(kv=kv)
    assert ask(stayed, prompt[:30], 1)
    ask(session, ids(50, 5), 4)
    back = ask(session, prompt, 9)
    assert back.reused > 40
    assert_like_fresh(session, prompt, back, 9)


def test_a_branch_is_parked_before_a_rewind_leaves_it():
    session = parking_session()
    prompt, reply = conversation(session)
    n_held = session.n_tokens
    ask(session, joined(prompt[:-8], ids(12, 40)), 5)
    assert parked(session) == [n_held]
    back = next_turn(prompt, reply, 8)
    reply = ask(session, back, 5)
    assert reply.reused == n_held
    assert_like_fresh(session, back, reply, 5)


def test_a_request_that_goes_on_parks_nothing():
    session = parking_session()
    conversation(session, turns=4)
    assert parked(session) == []


def test_a_parked_conversation_serves_only_if_it_offers_strictly_more():
    session = parking_session()
    common = joined(TURN, ids(29))
    ask(session, joined(common, TURN, ids(9, 1)), 4)
    ask(session, joined(common, TURN, ids(9, 2)), 4)  # from the checkpoint at 30, which both now hold
    assert parked(session) == [43]
    reply = ask(session, joined(common, TURN, ids(9, 3)), 4)
    assert reply.reused == 30
    assert parked(session) == [43, 43]  # the first was left where it is, the second joined it


def test_a_parked_conversation_gives_its_checkpoints_too():
    session = parking_session()
    prompt, _ = conversation(session)
    before = marks(session)
    ask(session, ids(50, 5), 4)
    other = joined(prompt[: before[-1] + 1], ids(7, 60))
    reply = ask(session, other, 5)
    assert reply.reused == before[-1]
    assert_like_fresh(session, other, reply, 5)


def test_the_oldest_parked_conversation_gives_way():
    session = parking_session(conversation_cache_slots=2)
    for seed, n in enumerate((31, 32, 33, 34)):
        ask(session, ids(n, seed), 1)
    assert parked(session) == [32, 33]
    assert ask(session, joined(ids(31, 0), ids(5)), 1).reused == 0
    assert parked(session) == [33, 34]


def test_the_budget_holds(monkeypatch):
    session = parking_session()
    for seed in range(3):
        ask(session, ids(200, seed), 1)
    one = session.parking.entries[0].size_bytes
    session.parking.budget_bytes = 2 * one
    ask(session, ids(200, 9), 1)
    assert len(parked(session)) == 2
    assert session.parking.size_bytes <= 2 * one
    session.parking.budget_bytes = one - 1
    ask(session, ids(200, 10), 1)
    assert len(parked(session)) == 2  # one that fits nowhere pushes nothing out


def test_too_little_ram_above_the_floor_parks_nothing(monkeypatch):
    free = 1000 << 20
    monkeypatch.setattr(resources, "available_bytes", lambda: free)
    engine = shared_engine("qwen4exp", conversation_cache_mib=100, conversation_cache_min_free_mib=1000)
    session = Session(engine)
    first = ask(session, ids(40), 4)
    reply = ask(session, ids(60, 1), 4)
    assert parked(session) == []
    assert_like_fresh(session, ids(60, 1), reply, 4)
    free += 1 << 20
    ask(session, joined(ids(40), first.tokens), 4)
    assert parked(session) == [63]


@pytest.mark.parametrize("free", [1 << 10, 900 << 20])
def test_a_short_request_displaces_nothing_even_below_the_floor(free, monkeypatch):
    monkeypatch.setattr(resources, "available_bytes", lambda: free)
    session = Session(shared_engine("qwen4exp", conversation_cache_mib=100, conversation_cache_min_free_mib=1000))
    ask(session, ids(120), 4)
    ask(session, ids(20, 1), 4)
    assert (parked(session), session.live.n_tokens) == ([], 123 if free > 1 << 20 else 23)  # of which nothing is left


def test_parking_can_be_off():
    session = parking_session(conversation_cache_mib=0)
    for seed in range(3):
        ask(session, ids(30, seed), 1)
    assert parked(session) == []


def test_what_a_newly_parked_conversation_contains_is_not_kept_twice():
    """A start of it that was parked before it grew is superseded; a stranger stays."""
    session = parking_session()
    first = ask(session, ids(40), 4)
    ask(session, ids(30, 1), 4)
    assert parked(session) == [43]
    session.erase()
    copies = list(session.parking.entries)
    ask(session, joined(ids(40), first.tokens, ids(10, 2)), 4)
    assert parked(session) == []
    session.parking.entries = copies
    ask(session, ids(30, 1), 4)
    assert parked(session) == [57]
    ask(session, ids(20, 3), 1)
    assert parked(session) == [57, 33]


# --- counters


def test_stats_tell_what_is_held():
    session = parking_session()
    prompt, reply = conversation(session)
    ask(session, ids(50, 5), 4)
    stats = session.stats()
    assert stats["held_tokens"] == 53
    assert [c["tokens"] for c in stats["checkpoints"]] == marks(session)
    assert [p["tokens"] for p in stats["parked"]] == [len(prompt) + len(reply.tokens) - 1]
    assert stats["counters"] == {"requests": 4, "hits": 2, "saves": 0, "restores": 0}
    assert stats["pool_bytes"] == session.cache.size_bytes
    session.erase()
    assert (session.n_tokens, session.stats()["held_tokens"], marks(session)) == (0, 0, [])


def test_erase_forgets_the_live_conversation_alone():
    session = parking_session()
    prompt, reply = conversation(session)
    n_held = session.n_tokens
    ask(session, ids(50, 5), 4)
    assert session.erase() == 53
    assert session.erase() == 0
    assert ask(session, next_turn(prompt, reply, 8), 2).reused == n_held
