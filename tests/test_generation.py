"""A request on its way: the same bits however a prompt came in and whatever was guessed, STOP, and where it ends.

Where bits are compared it is everything that the next logits depend on: tokens, running state, cells and pooled keys of
the trunk. Read next: test_checkpoints.py.
"""

import random

import numpy as np
import pytest

import generation
from engine import Session
from given_engine import (
    CONTEXT,
    FORMATS,
    KINDS,
    ask,
    assert_like_fresh,
    conversation,
    draft_cells,
    held,
    ids,
    joined,
    marks,
    new_engine,
    new_session,
    next_turn,
    trunk,
)
from verbs import SPARE_CELLS, GenRequest, RequestError

PENALISED = {"repeat_penalty": 1.3, "presence_penalty": 0.5, "repeat_last_n": 20}
STEERED = {"temperature": 0.9, "seed": 11, "top_k": 40, "repeat_penalty": 1.2, "frequency_penalty": 0.1}


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
