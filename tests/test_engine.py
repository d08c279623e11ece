"""The timeline of a session: the same bits however a prompt came in, what is reused, and where a request ends.

Nothing here reads a file; see test_sessionstate.py for SAVE and RESTORE. Where bits are compared it is everything that
the next logits depend on: tokens, running state, cells and pooled keys of the trunk.
"""

import random

import numpy as np
import pytest

import engine as engine_module
import generation
import resources
from engine import Engine, Session
from given_engine import (
    CONTEXT,
    MODELS,
    TURN,
    ask,
    draft_cells,
    held,
    ids,
    joined,
    marks,
    new_engine,
    new_session,
    next_turn,
    shared_engine,
    trunk,
)
from modelconfig import ModelError
from options import EngineOptions
from promptcache import is_prefix
from verbs import SPARE_CELLS, GenRequest, RequestError

KINDS = ["llama", "qwen35", "qwen3next", "qwen35moe", "qwen4exp", "qwen4exp-8layers"]
FORMATS = ["fp16", "int8", "q4_0", "k8v4"]
PENALISED = {"repeat_penalty": 1.3, "presence_penalty": 0.5, "repeat_last_n": 20}
STEERED = {"temperature": 0.9, "seed": 11, "top_k": 40, "repeat_penalty": 1.2, "frequency_penalty": 0.1}


@pytest.fixture
def chunks_of(monkeypatch):
    """Sets how many prompt tokens are read between two looks at STOP."""
    return lambda n: monkeypatch.setattr(generation, "CHUNK", n)


class ScriptedDrafter:
    """Guesses `n_guesses` tokens of a true conversation for every window; those at `wrong(window)` are not true."""

    def __init__(self, truth, n_guesses, wrong=lambda window: []):
        self._truth, self._n_guesses, self._wrong = truth, n_guesses, wrong
        self._windows = iter(range(10**6))

    def guess(self, context, n_most, cache, rows, cell):
        guesses = self._truth[len(context) :][: min(self._n_guesses, n_most)].copy()
        places = [place for place in self._wrong(next(self._windows)) if place < len(guesses)]
        guesses[places] = (guesses[places] + 1) % 96
        return guesses


def drafting(session, *script):
    """The session with scripted guesses."""
    session.drafter = ScriptedDrafter(*script)
    return session


def stop_at(look: int):
    """A STOP that is seen at the `look`-th look (from 1) and ever after."""
    looks = iter(range(1, 10**6))
    return lambda: next(looks) >= look


def conversation(session, turns=3, n=30, max_new=7):
    """The last prompt and reply of a conversation of some turns."""
    prompt, reply = joined(TURN, ids(n - 1)), None
    for turn in range(turns):
        if reply:
            prompt = next_turn(prompt, reply, turn)
        reply = ask(session, prompt, max_new)
    return prompt, reply


def assert_like_fresh(session, prompt, reply, max_new, **sampling):
    """Hold tokens and bits of an answered request to those of a session that knows nothing else."""
    fresh = Session(session.engine)
    expected = ask(fresh, prompt, max_new, **sampling)
    assert reply.tokens == expected.tokens
    assert trunk(session) == trunk(fresh)


# --- the same bits


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_a_prompt_may_be_cut_anywhere(name, chunk, chunks_of):
    whole = new_session(name)
    expected = ask(whole, ids(45), 6)
    chunks_of(chunk)
    cut = new_session(name)
    reply = ask(cut, ids(45), 6)
    assert len(reply.events) - len(expected.events) == -(-44 // chunk) - 1  # the last token is a chunk of its own
    assert reply.tokens == expected.tokens
    assert trunk(cut) == trunk(whole)


@pytest.mark.parametrize("kv", FORMATS)
def test_a_prompt_may_be_cut_anywhere_in_every_cell_format(kv, chunks_of):
    whole, cut = new_session("qwen4exp", kv=kv), new_session("qwen4exp", kv=kv)
    expected = ask(whole, ids(45), 6)
    chunks_of(1)
    assert ask(cut, ids(45), 6).tokens == expected.tokens
    assert trunk(cut) == trunk(whole)
    assert draft_cells(cut) == draft_cells(whole)


def test_threads_do_not_change_a_bit():
    one, two = new_session(), new_session(threads=2)
    assert ask(one, ids(60), 20).tokens == ask(two, ids(60), 20).tokens
    assert trunk(one) == trunk(two)


@pytest.mark.parametrize("name", ["qwen4exp", "qwen35", "llama"])
@pytest.mark.parametrize(("n_guesses", "n_right"), [(t, k) for t in (1, 3, 7) for k in range(t + 1)])
def test_a_window_keeps_its_right_guesses_and_leaves_no_trace_of_the_others(name, n_guesses, n_right):
    """k of T guesses are right, for every k: tokens, trunk and draft cells are those of one token at a time."""
    plain = drafting(new_session(name), ids(0), 0)
    expected = ask(plain, ids(31), 25)
    truth = joined(ids(31), expected.tokens)
    session = drafting(new_session(name), truth, n_guesses, lambda window: range(n_right, n_guesses))
    reply = ask(session, ids(31), 25)
    assert reply.tokens == expected.tokens
    assert trunk(session) == trunk(plain)
    if session.cache.draft_pool:
        assert draft_cells(session) == draft_cells(plain)
    n_windows = -(-24 // (n_right + 1))
    assert reply.done.n_drafts_accepted == 24 - n_windows
    assert reply.done.n_drafts_offered >= reply.done.n_drafts_accepted
    assert expected.done.n_drafts_offered == 0


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("sampling", [{}, PENALISED, STEERED], ids=["greedy", "penalised", "steered"])
def test_guesses_right_and_wrong_by_chance_change_nothing(kv, sampling):
    plain = new_session("qwen4exp", kv=kv, spec=1)
    expected = ask(plain, ids(31), 40, **sampling)
    chance = random.Random(3)
    truth = joined(ids(31), expected.tokens)

    def wrong(window):
        return [place for place in range(7) if chance.random() < 0.3]

    session = drafting(new_session("qwen4exp", kv=kv), truth, 7, wrong)
    reply = ask(session, ids(31), 40, **sampling)
    assert 0 < reply.done.n_drafts_accepted < reply.done.n_drafts_offered
    assert reply.tokens == expected.tokens
    assert trunk(session) == trunk(plain)


@pytest.mark.parametrize("sampling", [{}, STEERED], ids=["greedy", "steered"])
def test_the_draft_layer_changes_nothing(sampling, monkeypatch):
    """The layer's own guesses, all of them offered; and the next turn goes on from them."""
    monkeypatch.setattr(generation, "DRAFT_FLOOR", 0.0)
    sessions = [new_session(spec=spec) for spec in (1, 2, 4, 8)]
    first = [ask(session, ids(40), 30, **sampling) for session in sessions]
    prompt = next_turn(ids(40), first[0], 1)
    second = [ask(session, prompt, 30, **sampling) for session in sessions]
    for session, *replies in zip(sessions[1:], first[1:], second[1:], strict=True):
        assert all(reply.done.n_drafts_offered > 0 for reply in replies)
        assert [reply.tokens for reply in replies] == [first[0].tokens, second[0].tokens]
        assert trunk(session) == trunk(sessions[0])
    assert first[0].done.n_drafts_offered == 0
    assert draft_cells(sessions[1]) == draft_cells(sessions[2]) == draft_cells(sessions[3])


def test_an_improbable_guess_is_not_offered(monkeypatch):
    monkeypatch.setattr(generation, "DRAFT_FLOOR", 1.1)
    assert ask(new_session(), ids(40), 20).done.n_drafts_offered == 0


def test_an_answer_ends_inside_a_window():
    """A stop token or the last place among right guesses: nothing behind it is emitted or kept."""
    expected = ask(new_session(), ids(31), 20).tokens
    stop = next(token for place, token in enumerate(expected) if place in (5, 6) and expected.index(token) == place)
    end = expected.index(stop) + 1
    for options in ({"max_new": 20, "stop": [stop]}, {"max_new": end}):
        session, plain = drafting(new_session(), joined(ids(31), expected), 7), new_session(spec=1)
        reply = ask(session, ids(31), **options)
        assert reply.tokens == expected[:end]
        assert reply.done.finish == ("stop" if "stop" in options else "length")
        ask(plain, ids(31), end)
        assert trunk(session) == trunk(plain)


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


# --- STOP


def test_stop_in_the_prompt_keeps_what_was_read(chunks_of):
    chunks_of(8)
    session = new_session()
    reply = ask(session, ids(60), 5, stopped=stop_at(4))
    assert (reply.done.finish, reply.tokens, reply.done.n_prompt_read) == ("cancel", [], 24)
    assert (session.n_tokens, marks(session)) == (24, [24])
    again = ask(session, ids(60), 5)
    assert again.reused == 24
    assert_like_fresh(session, ids(60), again, 5)


def test_stop_before_the_first_chunk_loses_nothing():
    session = new_session()
    prompt, reply = conversation(session)
    n_held = session.n_tokens
    prompt = next_turn(prompt, reply, 8)
    stopped = ask(session, prompt, 5, stopped=lambda: True)
    assert (stopped.done.finish, stopped.done.n_prompt_read, stopped.reused) == ("cancel", 0, n_held)
    again = ask(session, prompt, 5)
    assert again.reused == n_held
    assert_like_fresh(session, prompt, again, 5)


def test_stop_before_anything_was_read_leaves_no_checkpoint():
    session = new_session()
    assert ask(session, ids(20), 5, stopped=lambda: True).done.finish == "cancel"
    assert marks(session) == []
    assert_like_fresh(session, ids(20), ask(session, ids(20), 5), 5)


def test_stop_in_the_prompt_of_a_request_without_checkpoints_leaves_none(chunks_of):
    chunks_of(8)
    session = new_session()
    ask(session, ids(60), 5, stopped=stop_at(4), checkpoint=False)
    assert (session.n_tokens, marks(session)) == (0, [])


@pytest.mark.parametrize("look", [2, 3, 9])
def test_stop_in_the_answer_keeps_a_whole_conversation(look):
    session = new_session(spec=1)
    whole = ask(new_session(), ids(30), 20).tokens
    reply = ask(session, ids(30), 20, stopped=stop_at(look + 1))  # two looks at the prompt: its last token apart
    assert reply.done.finish == "cancel"
    assert reply.tokens == whole[: look - 1]
    assert session.n_tokens == 30 + len(reply.tokens) - 1
    prompt = next_turn(ids(30), reply, 1)
    after = ask(session, prompt, 9)
    assert after.reused == 30 + len(reply.tokens) - 1
    assert_like_fresh(session, prompt, after, 9)


def test_a_request_that_is_abandoned_leaves_what_it_has_read(chunks_of):
    """The consumer of the events goes away, in the prompt and in the answer."""
    chunks_of(8)
    session = new_session()
    prompt, reply = conversation(session)
    n_before = session.n_tokens
    prompt = next_turn(prompt, reply, 8, n=30)
    for n_events, n_held in ((1, n_before), (3, n_before + 9), (9, len(prompt))):
        events = session.generate(GenRequest(prompt, 9))
        for _ in range(n_events):
            next(events)
        events.close()
        assert n_held <= session.n_tokens <= n_held + 3  # drafts
        assert session.held_ids()[:n_held].tolist() == prompt[:n_held].tolist()
    reply = ask(session, prompt, 9)
    assert_like_fresh(session, prompt, reply, 9)


# --- limits


@pytest.mark.parametrize(("n_prompt", "max_new"), [(40, 16), (1, 55), (56, 0)])
@pytest.mark.parametrize("context", [61, 62, 63, 64])
def test_a_request_may_fill_the_context_to_the_last_place(context, n_prompt, max_new):
    n_prompt -= 64 - context if n_prompt > 10 else 0
    max_new -= 64 - context if n_prompt < 10 else 0
    plain = new_session(max_context=context)
    expected = ask(plain, ids(n_prompt), max_new)
    assert len(expected.tokens) == max_new
    assert plain.n_tokens == n_prompt + max(max_new - 1, 0)
    script = joined(ids(n_prompt), expected.tokens), 7, lambda window: [6]
    reply = ask(drafting(new_session(max_context=context), *script), ids(n_prompt), max_new)
    assert reply.tokens == expected.tokens
    large = ask(drafting(new_session(), *script), ids(n_prompt), max_new)
    assert large.tokens == expected.tokens
    with pytest.raises(RequestError, match=rf"{n_prompt} prompt tokens \+ {max_new + 1} .*context of {context}"):
        plain.generate(GenRequest(ids(n_prompt), max_new + 1))


@pytest.mark.parametrize(
    ("prompt", "max_new", "stop", "text"),
    [
        ([], 4, [], "the prompt is empty"),
        ([6, 96], 4, [], "a prompt id is outside the vocabulary of 96"),
        ([6, -1], 4, [], "a prompt id is outside the vocabulary of 96"),
        ([6, 7], 4, [3, 96], "a stop id is outside the vocabulary of 96"),
        ([6] * (CONTEXT - SPARE_CELLS), 1, [], "do not fit the context of 256"),
    ],
)
def test_a_refused_request_leaves_all_as_it_was(prompt, max_new, stop, text):
    session = new_session(conversation_cache_mib=100)
    last, reply = conversation(session)
    before = held(session)
    with pytest.raises(RequestError, match=text):
        session.generate(GenRequest(np.array(prompt, np.int32), max_new, stop=frozenset(stop)))
    assert held(session) == before
    assert ask(session, next_turn(last, reply, 8), 3).reused == before["live"][0]


@pytest.mark.parametrize("n_prompt", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("max_new", [0, 1, 2])
def test_the_shortest_chats(n_prompt, max_new):
    session = new_session()
    reply = ask(session, ids(n_prompt), max_new)
    assert reply.done.finish == "length"
    assert session.n_tokens == n_prompt + max(max_new - 1, 0)
    prompt = joined(ids(n_prompt), reply.tokens, ids(3, 1))
    answer = ask(session, prompt, 4)
    assert answer.reused == n_prompt + max(max_new - 1, 0)
    assert_like_fresh(session, prompt, answer, 4)


def test_a_stop_token_is_emitted_and_ends_the_answer():
    whole = ask(new_session(), ids(30), 20).tokens
    stop = whole[4]
    end = whole.index(stop) + 1
    session = new_session()
    reply = ask(session, ids(30), 20, stop=[stop, 95])
    assert (reply.tokens, reply.done.finish) == (whole[:end], "stop")
    assert session.n_tokens == 30 + end - 1


def test_the_models_own_end_ids_end_an_answer():
    engine = new_engine("qwen4exp")
    whole = ask(Session(engine), ids(30), 20).tokens
    engine.end_ids = frozenset([whole[3]])
    reply = ask(Session(engine), ids(30), 20)
    assert (reply.tokens, reply.done.finish) == (whole[: whole.index(whole[3]) + 1], "stop")


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


# --- loading


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("llama", {"kv": "int8"}, "head width of 16 can hold fp16"),
        ("qwen4exp-8layers", {"kv": "k8v4"}, "head width of 32 can hold fp16, q4_0"),
        ("qwen4exp", {"backend": "cuda"}, "no CUDA backend"),
        ("qwen4exp", {"kv_resident": 20480}, "--kv-resident"),
        ("qwen4exp", {"threads": 10**6}, "--threads 1000000"),
        ("no such model", {}, "no such model.gguf"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(name, options, text):
    with pytest.raises(ModelError, match=text) as caught:
        Engine.load(EngineOptions(model=str(MODELS / f"{name}.gguf"), **options))
    assert "\n" not in str(caught.value)


def test_threads_follow_what_the_process_may_use(monkeypatch):
    """The default, and a number that is more than can run at once, which is told."""
    monkeypatch.setattr(engine_module.resources, "usable_cores", lambda: 1)
    monkeypatch.setattr(engine_module.resources, "allowed_processors", lambda: 1)
    monkeypatch.setattr(engine_module.resources, "all_processors", lambda: 8)
    log = []
    engine = Engine.load(EngineOptions(model=str(MODELS / "llama.gguf"), backend="cpu"), log.append)
    assert (engine.ops.n_threads, log) == (1, [])
    engine = Engine.load(EngineOptions(model=str(MODELS / "llama.gguf"), backend="cpu", threads=3), log.append)
    assert engine.ops.n_threads == 1
    assert log == ["--threads 3 is taken as 1: this process's affinity lets no more run at once"]
    with pytest.raises(ModelError, match="--threads 9: this machine runs at most 8"):
        Engine.load(EngineOptions(model=str(MODELS / "llama.gguf"), backend="cpu", threads=9))


def test_the_window_of_a_model_without_a_draft_layer_is_one():
    lines = []
    options = EngineOptions(model=str(MODELS / "qwen35.gguf"), spec=4, threads=1, backend="cpu")
    engine = Engine.load(options, lines.append)
    assert engine.spec == 1
    assert lines == ["--spec 4 has no effect: this model has no draft layer"]


@pytest.mark.parametrize(("name", "why"), [("qwen3moe", "the CPU computes"), ("qwen35", "this model has no experts")])
def test_options_for_experts_on_a_device_say_that_they_have_no_effect(name, why, tmp_path):
    lines, path = [], tmp_path / "profile"
    options = EngineOptions(
        model=str(MODELS / f"{name}.gguf"), threads=1, backend="cpu", expert_cache_mib=9, expert_profile_save=str(path)
    )
    Session(Engine.load(options, lines.append)).close()
    assert [line.split(" has no effect: ")[0] for line in lines] == ["--expert-cache-mib", "--expert-profile-save"]
    assert all(why in line for line in lines)
    assert not path.exists()


def test_info_has_what_the_start_prints_in_its_order():
    info = new_engine("qwen4exp", kv="int8", spec=3).info()
    first = ["context", "kv", "kv_resident", "backend", "model", "n_vocab", "spec", "conversation_cache_mib"]
    assert list(info)[:8] == first
    assert list(info)[-1] == "engine"
    expected = ("256", "int8", "cpu", "96", "3")
    assert tuple(info[key] for key in ("context", "kv", "backend", "n_vocab", "spec")) == expected
