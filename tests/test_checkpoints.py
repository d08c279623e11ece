"""What a prompt reuses of what is held: checkpoints, where they are taken, how long they stay.

Nothing here reads a file; see test_sessionstate.py for SAVE and RESTORE. Read next: test_reuse.py.
"""

import numpy as np
import pytest

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
)
from promptcache import is_prefix

# --- what is reused


@pytest.mark.parametrize("name", KINDS)
def test_the_next_turn_reuses_all_that_is_held(name):
    session = new_session(name)
    prompt, reply = conversation(session)
    n_held = session.n_tokens
    assert n_held == len(prompt) + len(reply.tokens) - 1
    prompt = next_turn(prompt, reply, 9)
    reply = ask(session, prompt, 12)
    assert reply.reused == n_held
    assert reply.done.n_prompt_read == len(prompt) - n_held
    assert_like_fresh(session, prompt, reply, 12)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_rewind_lands_on_the_same_bits_at_every_place_of_a_page(name, cut):
    """A prompt that diverges behind a checkpoint goes back to it; cut moves the checkpoint through a page.

    Where nothing is folded, it goes back to where it diverges, one token later.
    """
    session = new_session(name)
    prompt = joined(TURN, ids(27 + cut), TURN, ids(12))
    ask(session, prompt, 9)
    other = joined(prompt[: 28 + cut], TURN, ids(20, 5))
    reply = ask(session, other, 9)
    assert reply.reused == 28 + cut + session.cache.shape.folds_nothing
    assert_like_fresh(session, other, reply, 9)


@pytest.mark.parametrize("kv", FORMATS)
def test_a_rewind_lands_on_the_same_bits_in_every_cell_format(kv):
    session = new_session(kv=kv)
    prompt = joined(TURN, ids(29), TURN, ids(12))
    ask(session, prompt, 9)
    other = joined(prompt[:30], TURN, ids(20, 5))
    reply = ask(session, other, 9)
    assert reply.reused == 30
    assert_like_fresh(session, other, reply, 9)


def test_exactly_the_same_prompt_is_answered_from_its_last_checkpoint():
    session = new_session()
    prompt, first = conversation(session)
    again = ask(session, prompt, 7)
    assert again.reused == int(np.flatnonzero(prompt == TURN)[-1])
    assert again.tokens == first.tokens
    assert_like_fresh(session, prompt, again, 7)


def test_a_prompt_without_turns_comes_back_but_for_its_last_token():
    session = new_session()
    first = ask(session, ids(40), 7)
    assert marks(session) == [39]
    again = ask(session, ids(40), 7)
    assert (again.reused, again.tokens) == (39, first.tokens)


def test_a_prompt_that_is_a_start_of_what_is_held_goes_back_as_well():
    session = new_session()
    prompt, reply = conversation(session)
    whole = joined(prompt, reply.tokens)
    for shorter in (whole[:-1], whole[:-3]):  # exactly what is held, and less: the last token must be read
        answer = ask(session, shorter, 5)
        assert answer.reused == int(np.flatnonzero(prompt == TURN)[-1])
        assert_like_fresh(session, shorter, answer, 5)


def test_a_foreign_prompt_forgets_everything_and_reads_from_the_start():
    session = new_session()
    conversation(session)
    reply = ask(session, ids(33, 77), 9)
    assert reply.reused == 0
    assert marks(session) == [32]
    assert_like_fresh(session, ids(33, 77), reply, 9)


@pytest.mark.parametrize("place", range(24, 43, 2))
def test_a_prompt_that_diverges_anywhere_reuses_the_longest_checkpoint_before(place, chunks_of):
    chunks_of(4)
    session = new_session(prompt_cache=20, prompt_cache_every=8)
    ask(session, ids(44), 6)
    assert marks(session) == [8, 16, 24, 32, 40, 43]
    other = ids(44)
    other[place] = TURN + 85  # diverges at `place`
    assert other[place] != ids(44)[place]
    reply = ask(session, other, 6)
    assert reply.reused == place // 8 * 8
    assert marks(session) == [8, 16, 24, 32, 40, 43]
    assert all(is_prefix(checkpoint.snapshot.ids, other) for checkpoint in session.checkpoints.chain)
    assert_like_fresh(session, other, reply, 6)


# --- checkpoints: where


def test_checkpoints_are_taken_at_the_last_two_turn_starts_and_behind_the_system_prompt():
    session = new_session(prompt_cache_root=20)
    system, turns = joined(TURN, ids(24)), [joined(TURN, ids(9, seed)) for seed in (1, 2, 3)]
    reply = ask(session, joined(system, *turns), 5)
    assert marks(session) == [25, 35, 45]
    assert [checkpoint.root for checkpoint in session.checkpoints.chain] == [True, False, False]
    prompt = next_turn(joined(system, *turns), reply, 4)
    ask(session, prompt, 5)
    assert marks(session) == [25, 35, 45, len(prompt) - 9]


@pytest.mark.parametrize(("n_system", "roots"), [(19, [False, False]), (20, [True, False]), (21, [True, False])])
def test_the_root_needs_a_system_prompt_of_its_least_length(n_system, roots):
    session = new_session(prompt_cache_root=20)
    ask(session, joined(TURN, ids(n_system - 1), TURN, ids(9), TURN, ids(9)), 5)
    assert [checkpoint.root for checkpoint in session.checkpoints.chain] == roots


def test_a_root_is_found_only_when_reading_from_the_start():
    session = new_session(prompt_cache_root=20)
    reply = ask(session, ids(30), 5)
    ask(session, next_turn(ids(30), reply, 1), 5)
    assert not any(checkpoint.root for checkpoint in session.checkpoints.chain)


def test_checkpoints_come_periodically_at_the_end_of_chunks(chunks_of):
    chunks_of(6)
    session = new_session(prompt_cache=20, prompt_cache_every=10)
    ask(session, ids(50), 5)
    assert marks(session) == [12, 24, 30, 33, 45, 49, 50]  # the first chunk end at or behind every tenth token, and 33


def test_no_periodic_checkpoints(chunks_of):
    chunks_of(6)
    session = new_session(prompt_cache_every=10**6)
    ask(session, ids(50), 5)
    assert marks(session) == [33, 49]


def test_a_prompt_has_a_checkpoint_shortly_before_its_end_where_that_saves_enough():
    """A chat that is quoted in a message grows there, and so does a date at the end of a system prompt."""
    session = new_session()
    ask(session, joined(TURN, ids(69), TURN, ids(79), TURN, ids(2)), 5)
    assert marks(session) == [54, 70, 134, 150]
    ask(session, joined(TURN, ids(39, 5), TURN, ids(47), TURN, ids(2)), 5)
    assert marks(session) == [40, 88]  # 24 and 72 are no more than 32 tokens behind what is kept before


def test_a_checkpoint_is_the_state_of_a_session_that_read_so_far():
    session, short = new_session(), new_session()
    prompt = joined(TURN, ids(29), TURN, ids(12))
    ask(session, prompt, 5)
    ask(short, prompt[:30], 0)
    snapshot = session.checkpoints.chain[0].snapshot
    assert snapshot.ids.tolist() == prompt[:30].tolist()
    assert [array.tobytes() for array in snapshot.arrays] == [array.tobytes() for array in short.cache.state.arrays]


# --- checkpoints: how long


def test_over_the_limit_the_least_recently_used_checkpoint_goes_but_never_the_root():
    session = new_session(prompt_cache=3, prompt_cache_root=10)
    prompt = joined(TURN, ids(14), TURN, ids(9))
    reply = ask(session, prompt, 4)
    assert marks(session) == [15]  # the root is the last turn start as well
    for turn in (1, 2):
        prompt = next_turn(prompt, reply, turn)
        reply = ask(session, prompt, 4)
    second, third = marks(session)[1:]
    ask(session, joined(prompt[:second], ids(9, 50)), 4)  # uses the second and cuts the third
    assert marks(session)[:2] == [15, second]
    assert third not in marks(session)
    for turn in (3, 4, 5):
        reply = ask(session, prompt, 4)
        prompt = next_turn(prompt, reply, turn)
    assert marks(session)[0] == 15
    assert len(marks(session)) == 3


def test_with_room_for_one_checkpoint_the_root_gives_way():
    session = new_session(prompt_cache=1, prompt_cache_root=10)
    prompt = joined(TURN, ids(14), TURN, ids(9), TURN, ids(9))
    ask(session, prompt, 4)
    assert marks(session) == [25]


def test_divergence_cuts_the_checkpoints_behind_it():
    session = new_session()
    prompt, _ = conversation(session, turns=4)
    before = marks(session)
    place = before[1] + 2
    ask(session, joined(prompt[:place], ids(3, 40), TURN, ids(9, 41)), 4)
    assert marks(session) == [*before[:2], place + 3]  # its own, in place of the two behind


def test_no_checkpoint_of_a_request_that_asks_for_none():
    session = new_session()
    prompt, reply = conversation(session)
    before, n_held = marks(session), session.n_tokens
    prompt = next_turn(prompt, reply, 8)
    silent = ask(session, prompt, 5, checkpoint=False)
    assert silent.reused == n_held
    assert session.n_tokens == n_held
    assert marks(session) == before
    again = ask(session, prompt, 5)
    assert (again.tokens, again.reused) == (silent.tokens, n_held)
    assert_like_fresh(session, prompt, again, 5)


def test_a_cache_of_no_checkpoints_turns_everything_off():
    session = new_session(prompt_cache=0, conversation_cache_mib=100)
    prompt, reply = conversation(session)
    prompt = next_turn(prompt, reply, 8)
    reply = ask(session, prompt, 5)
    assert (reply.reused, reply.done.n_cache_hits, marks(session)) == (0, 0, [])
    assert session.parking.entries == []
    assert_like_fresh(session, ids(20, 3), ask(session, ids(20, 3), 5), 5)
