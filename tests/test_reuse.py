"""How much of a prompt is reused: where it parts from what is held, what other requests leave of it, and what is said.

The models stand for the three ways: `llama` has attention alone and is cut anywhere, `qwen35` and `qwen4exp` fold their
tokens and go back to states. Tokens are always those of a session that knows nothing else.
"""

import os

import numpy as np
import pytest

import generation
from engine import Session
from given_engine import TURN, ask, ids, joined, marks, new_engine, new_session, trunk
from sessionfile import inspect_session
from sessionlayout import SessionError

KINDS = ["llama", "qwen35", "qwen4exp"]
FOLDING = ["qwen35", "qwen4exp"]


def chat(session, turns: int = 3, seed: int = 0, n_system: int = 40, max_new: int = 6, **options):
    """A conversation with a system prompt; its last prompt, which ends in the header of an answer, and its reply."""
    prompt = joined(TURN, ids(n_system - 1, 50 + seed), TURN, ids(9, seed), TURN, ids(2, 99))
    reply = ask(session, prompt, max_new, **options)
    for turn in range(1, turns):
        prompt = joined(prompt, reply.tokens, TURN, ids(9, seed + turn), TURN, ids(2, 99))
        reply = ask(session, prompt, max_new, **options)
    return prompt, reply


def assert_like_fresh(session, prompt, reply, max_new):
    fresh = Session(session.engine)
    assert reply.tokens == ask(fresh, prompt, max_new).tokens
    assert trunk(session) == trunk(fresh)


# --- where prompts part


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 90, 119])
def test_cells_alone_are_cut_at_the_first_difference(place):
    session = new_session("llama")
    ask(session, ids(120), 4)
    other = joined(ids(120)[:place], (ids(120)[place] + 1) % 90 + 6, ids(3, 9))
    reply = ask(session, other, 6, source=True)
    assert reply.source == ("live", place, place)
    assert_like_fresh(session, other, reply, 6)


@pytest.mark.parametrize("name", KINDS)
def test_another_answer_is_given_from_before_the_answer(name):
    session = new_session(name)
    prompt, first = chat(session)
    again = ask(session, prompt, 6)
    assert again.reused >= len(prompt) - 3  # its header is read again
    assert again.tokens == first.tokens
    assert_like_fresh(session, prompt, again, 6)


@pytest.mark.parametrize("name", KINDS)
def test_another_last_message_is_read_from_its_own_start(name):
    session = new_session(name)
    prompt, _ = chat(session)
    start = len(prompt) - 13  # of the turn of nine tokens before the header of three
    assert prompt[start] == TURN
    edited = joined(prompt[: start + 1], ids(11, 44), TURN, ids(2, 99))
    reply = ask(session, edited, 6)
    assert start <= reply.reused <= start + 1
    assert_like_fresh(session, edited, reply, 6)


@pytest.mark.parametrize("name", KINDS)
def test_a_client_that_drops_the_oldest_exchange_keeps_the_system_prompt(name):
    session = new_session(name, prompt_cache_root=32)
    prompt, reply = chat(session, turns=4)
    turns = np.flatnonzero(prompt == TURN)
    shorter = joined(prompt[: turns[1]], prompt[turns[3] :], reply.tokens, TURN, ids(9, 70), TURN, ids(2, 99))
    answer = ask(session, shorter, 6)
    assert turns[1] <= answer.reused <= turns[1] + 1
    assert_like_fresh(session, shorter, answer, 6)


@pytest.mark.parametrize("name", FOLDING)
def test_the_third_question_to_a_document_is_read_from_where_the_first_two_parted(name):
    """Without turns nobody can tell where a document ends; the second question shows it."""
    session, document = new_session(name), ids(150)
    reused = [ask(session, joined(document, ids(20, seed)), 4).reused for seed in (1, 2, 3)]
    assert reused == [0, 0, 150]
    question = joined(document, ids(20, 4))
    assert_like_fresh(session, question, ask(session, question, 4), 4)


@pytest.mark.parametrize("name", KINDS)
def test_an_answer_that_comes_back_changed_is_read_from_before_it(name):
    """As thinking that a client leaves out, or a text that becomes other tokens."""
    session = new_session(name)
    prompt, reply = chat(session, max_new=20)
    changed = joined(prompt, reply.tokens[:8], ids(5, 81), TURN, ids(9, 82), TURN, ids(2, 99))
    answer = ask(session, changed, 6)
    assert answer.reused >= (len(prompt) + 8 if name == "llama" else len(prompt) - 3)
    assert_like_fresh(session, changed, answer, 6)


# --- an answer of which less was shown than was computed


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("n_shown", [0, 1, 13, 18])
def test_a_conversation_ends_where_its_answer_was_cut(name, n_shown):
    session = new_session(name)
    prompt, reply = chat(session, max_new=20)
    session.keep(n_shown)
    assert session.n_tokens == len(prompt) + n_shown
    shown = joined(prompt, reply.tokens[:n_shown])
    assert session.held_ids().tolist() == shown.tolist()
    following = joined(shown, ids(4, 83), TURN, ids(9, 84), TURN, ids(2, 99))
    answer = ask(session, following, 6)
    assert answer.reused == len(shown)
    assert_like_fresh(session, following, answer, 6)


@pytest.mark.parametrize("name", FOLDING)
def test_what_is_read_again_behind_a_cut_may_stop_at_every_chunk(name, monkeypatch, tmp_path):
    """The next request finds what was read so far; a save waits for the rest."""
    monkeypatch.setattr("conversations.CHUNK", 4)
    for n_chunks in range(4):
        session = new_session(name)
        prompt, reply = chat(session, max_new=20)
        session.keep(15)
        looks = iter(range(10**6))
        session.settle(lambda looks=looks, n_chunks=n_chunks: next(looks) >= n_chunks)
        before = session.cache.n_tokens
        assert session.n_tokens == len(prompt) + 15
        following = joined(prompt, reply.tokens[:15], TURN, ids(9, 84), TURN, ids(2, 99))
        if n_chunks == 3:
            assert session.save(str(tmp_path / "a.bin")).n_tokens == len(prompt) + 15
            before = len(prompt) + 15
        answer = ask(session, following, 6)
        assert answer.reused == before
        assert_like_fresh(session, following, answer, 6)


def test_a_cut_of_nothing_changes_nothing():
    session = new_session()
    session.keep(3)
    assert session.n_tokens == 0
    prompt, reply = chat(session)
    n_held = session.n_tokens
    session.keep(len(reply.tokens) + 5)
    assert session.n_tokens == n_held
    session.erase()
    session.keep(1)
    assert session.n_tokens == 0
    ask(session, prompt, 4, checkpoint=False)
    session.keep(1)
    assert session.n_tokens == 0


# --- other requests in between


@pytest.mark.parametrize("name", KINDS)
def test_a_title_request_costs_the_chat_nothing(name):
    """With the defaults, as a chat front end sends it after each answer."""
    session = new_session(name)
    prompt, reply = chat(session)
    for seed in range(6):
        n_held = session.n_tokens
        assert ask(session, ids(22, 300 + seed), 4).reused == 0
        assert ask(session, ids(12, 400 + seed), 4).reused == 0
        prompt = joined(prompt, reply.tokens, TURN, ids(5, seed), TURN, ids(2, 99))
        reply = ask(session, prompt, 3)
        assert reply.reused == n_held
    assert_like_fresh(session, prompt, reply, 3)


@pytest.mark.parametrize("name", KINDS)
def test_two_chats_in_turn_with_title_requests_keep_all_they_have(name):
    session = new_session(name)
    said = [joined(prompt, reply.tokens) for prompt, reply in (chat(session, seed=seed, turns=1) for seed in (0, 100))]
    for turn in range(1, 6):
        for which in (0, 1):
            prompt = joined(said[which], TURN, ids(6, turn), TURN, ids(2, 99))
            reply = ask(session, prompt, 4)
            assert reply.reused == len(said[which]) - 1
            said[which] = joined(prompt, reply.tokens)
            for seed in (1, 2, 3):
                ask(session, ids(20, 1000 * turn + 10 * which + seed), 3)


@pytest.mark.parametrize("name", KINDS)
def test_what_cannot_be_parked_is_not_displaced_by_a_shorter_request(name, tmp_path):
    """The short one runs beside it, can itself go on and be saved, and leaves it as it was."""
    session = new_session(name, conversation_cache_mib=0)
    prompt, reply = chat(session)
    n_held, before = session.n_tokens, trunk(session)
    title = ask(session, ids(22, 7), 4)
    assert trunk(session) == before
    assert session.held_ids().tolist() == joined(ids(22, 7), title.tokens[:-1]).tolist()
    longer = joined(ids(22, 7), title.tokens, ids(5, 8))
    again = ask(session, longer, 4)
    assert again.reused == 25
    assert again.tokens == ask(Session(session.engine), longer, 4).tokens
    path = str(tmp_path / "title.bin")
    assert session.save(path).n_tokens == len(longer) + 3
    assert inspect_session(path).image.live.n_tokens == len(longer) + 3
    restored = new_session(name)
    restored.restore(path)
    assert restored.held_ids().tolist() == session.held_ids().tolist()
    prompt = joined(prompt, reply.tokens, TURN, ids(5, 2), TURN, ids(2, 99))
    reply = ask(session, prompt, 4)
    assert reply.reused == n_held
    assert_like_fresh(session, prompt, reply, 4)


def test_a_longer_request_displaces_what_cannot_be_parked_and_that_is_said():
    lines = []
    engine = new_engine("qwen4exp", conversation_cache_mib=0)
    engine.log = lines.append
    session = Session(engine)
    ask(session, ids(40), 4)
    ask(session, ids(90, 1), 4)
    assert session.live.n_tokens == 93
    assert any("43 tokens of the conversation held are given up" in line for line in lines)


@pytest.mark.parametrize("name", KINDS)
def test_a_new_chat_finds_room_among_longer_ones_that_nobody_goes_on_with(name):
    """Every place is taken by something longer, and a longer title request follows each of its answers."""
    lines = []
    engine = new_engine(name, conversation_cache_slots=3)
    engine.log = lines.append
    session = Session(engine)
    old = [joined(TURN, ids(90, seed)) for seed in (1, 2, 4)]
    for prompt in (*old, joined(TURN, ids(20, 3))):
        ask(session, prompt, 3)
    prompt, reused = joined(TURN, ids(20, 3)), []
    for turn in range(9):
        reply = ask(session, prompt, 3)
        reused.append(reply.reused > 15)
        prompt = joined(prompt, reply.tokens, TURN, ids(4, 10 + turn))
        ask(session, joined(TURN, ids(30, 50), prompt[1:], ids(3, 60 + turn)), 3)
    given_up = sum(int(line.split()[0]) for line in lines if "what is parked is worth more" in line)
    assert reused[-2:] == [True] * 2
    assert 94 - 22 < given_up < 4 * 94
    assert max(ask(session, joined(one, ids(3, 9)), 3).reused for one in old) >= 90  # not all had to go


@pytest.mark.parametrize("name", KINDS)
def test_a_request_of_which_nothing_is_kept_leaves_everything(name):
    session = new_session(name)
    prompt, reply = chat(session)
    before, kept, n_held = trunk(session), marks(session), session.n_tokens
    n_parked = len(session.parking.entries)
    going_on = joined(prompt, reply.tokens, TURN, ids(9, 3))
    for other in (going_on, ids(30, 5), prompt[:20], ids(120, 6)):
        expected = ask(Session(session.engine), other, 5).tokens
        assert ask(session, other, 5, checkpoint=False).tokens == expected
        assert (trunk(session), marks(session), len(session.parking.entries)) == (before, kept, n_parked)
    assert session.beside is None
    assert ask(session, going_on, 5).reused == n_held


def test_a_parked_branch_stays_where_only_its_start_is_taken():
    session = new_session("llama")
    prompt, reply = chat(session, turns=4)
    n_held = session.n_tokens
    ask(session, ids(30, 1), 2)
    ask(session, joined(prompt[:50], ids(60, 2)), 2)  # from the parked one, which goes on to hold its own end
    whole = joined(prompt, reply.tokens, ids(3, 9))
    assert ask(session, whole, 2).reused == n_held


# --- a prompt that was not read to its end


@pytest.mark.parametrize("name", KINDS)
def test_a_stop_in_a_prompt_leaves_what_was_held_and_what_was_read(name, monkeypatch, tmp_path):
    monkeypatch.setattr(generation, "CHUNK", 16)
    session = new_session(name)
    prompt, reply = chat(session)
    n_before = session.n_tokens
    prompt = joined(prompt, reply.tokens, TURN, ids(60, 3), TURN, ids(2, 99))
    looks = iter(range(100))
    stopped = ask(session, prompt, 4, stopped=lambda: next(looks) >= 3)
    assert stopped.done.finish == "cancel"
    n_read = stopped.reused + stopped.done.n_prompt_read
    assert n_before < n_read < len(prompt)
    assert session.n_tokens == n_read
    assert session.save(str(tmp_path / "a.bin")).n_tokens == n_read
    restored = new_session(name)
    restored.restore(str(tmp_path / "a.bin"))
    for one in (restored, session):
        again = ask(one, prompt, 4)
        assert again.reused == n_read
        assert_like_fresh(one, prompt, again, 4)


# --- what is said of it


def test_a_request_is_told_where_its_start_came_from():
    session = new_session()
    prompt, reply = chat(session)
    n_held = session.n_tokens
    following = joined(prompt, reply.tokens, TURN, ids(9, 5))
    assert ask(session, following, 3, source=True).source == ("live", n_held, n_held)
    assert ask(session, ids(20, 8), 3, source=True).source == ("none", 0, 0)
    edited = joined(prompt[:-2], ids(5, 9))
    start = int(np.flatnonzero(prompt == TURN)[-1])
    assert ask(session, edited, 3, source=True).source == ("parked", start, len(prompt) - 2)
    assert ask(session, joined(edited[:-1], ids(6, 12)), 3, source=True).source.source == "checkpoint"


def test_one_line_tells_why_a_prompt_was_not_reused():
    lines = []
    engine = new_engine("qwen4exp")
    engine.log = lines.append
    session = Session(engine)
    prompt, _ = chat(session)
    assert lines == []
    changed = joined(prompt[:30], (prompt[30] + 1) % 90 + 6, prompt[31:])
    ask(session, changed, 3)
    assert lines == [
        f"0 of {len(prompt)} prompt tokens are reused (none); the prompt parts from what was held at token 30:"
        f" {changed[30]} in place of {prompt[30]}; no state was kept closer to there"
    ]
    ask(session, joined(changed, ids(3)), 3, source=True)
    assert len(lines) == 1  # whoever asks for the source says it himself


# --- saves that nobody chose


def test_an_automatic_save_writes_what_continues_the_file(tmp_path):
    """The chat that was saved goes on and is parked by a request for tags: the file gets the chat."""
    path = str(tmp_path / "chat.bin")
    session = new_session()
    prompt, reply = chat(session)
    session.save(path)
    prompt = joined(prompt, reply.tokens, TURN, ids(9, 5), TURN, ids(2, 99))
    reply = ask(session, prompt, 6)
    n_held = session.n_tokens
    ask(session, ids(26, 8), 4)
    before = session.stats()["parked"], session.n_tokens
    assert session.autosave(path).n_tokens == n_held
    assert (session.stats()["parked"], session.n_tokens) == before
    assert os.listdir(tmp_path) == ["chat.bin"]
    restored = new_session()
    restored.restore(path)
    following = joined(prompt, reply.tokens, TURN, ids(4, 6))
    answer = ask(restored, following, 6)
    assert answer.reused == n_held
    assert_like_fresh(restored, following, answer, 6)


@pytest.mark.parametrize("kind", ["nothing goes on", "another model", "no session", "damaged", "empty"])
def test_an_automatic_save_never_replaces_what_it_does_not_continue(kind, tmp_path):
    path = tmp_path / "chat.bin"
    session, other = new_session(), new_session("qwen35" if kind == "another model" else "qwen4exp")
    chat(other, seed=7)
    other.save(str(path))
    if kind in ("no session", "empty"):
        path.write_bytes(b"letters to a friend" if kind == "no session" else b"")
    elif kind == "damaged":
        path.write_bytes(path.read_bytes()[:-3])
    before = path.read_bytes()
    chat(session)
    with pytest.raises(SessionError) as caught:
        session.autosave(str(path))
    assert (caught.value.kind, path.read_bytes(), os.listdir(tmp_path)) == ("invalid", before, ["chat.bin"])


def test_a_longer_conversation_that_does_not_continue_the_file_goes_beside_it(tmp_path):
    path, lines = str(tmp_path / "chat.bin"), []
    engine = new_engine("qwen4exp")
    engine.log = lines.append
    session = Session(engine)
    chat(session, turns=1)
    session.save(path)
    n_first = session.n_tokens
    chat(session, seed=9, turns=4)
    n_second = session.n_tokens
    assert session.autosave(path).n_tokens == n_first
    assert inspect_session(path).image.live.n_tokens == n_first
    assert inspect_session(f"{path}.new").image.live.n_tokens == n_second
    assert f"{n_second} tokens of another conversation than that of '{path}' are in '{path}.new'" in lines


@pytest.mark.parametrize("taken", ["another chat", "no session", "damaged"])
def test_a_longer_conversation_goes_to_the_next_name_where_that_beside_is_taken(taken, tmp_path):
    path = str(tmp_path / "chat.bin")
    session, other = new_session(), new_session()
    chat(other, seed=7)
    other.save(f"{path}.new")
    if taken != "another chat":
        data = (tmp_path / "chat.bin.new").read_bytes()
        (tmp_path / "chat.bin.new").write_bytes(data[:-3] if taken == "damaged" else b"letters to a friend")
    before = (tmp_path / "chat.bin.new").read_bytes()
    chat(session, turns=1)
    session.save(path)
    n_first = session.n_tokens
    for turns in (4, 5):
        chat(session, seed=9, turns=turns)
        assert session.autosave(path).n_tokens == n_first
        assert (tmp_path / "chat.bin.new").read_bytes() == before
        assert inspect_session(f"{path}.new2").image.live.n_tokens == session.n_tokens
        assert sorted(os.listdir(tmp_path)) == ["chat.bin", "chat.bin.new", "chat.bin.new2"]


def test_names_of_automatic_saves_do_not_pile_up(tmp_path):
    """The file whose conversation goes on is itself one beside another."""
    path = str(tmp_path / "chat.bin")
    session = new_session()
    chat(session, turns=1)
    session.save(f"{path}.new")
    chat(session, seed=9, turns=4)
    session.autosave(f"{path}.new")
    assert sorted(os.listdir(tmp_path)) == ["chat.bin.new", "chat.bin.new2"]


def test_an_automatic_save_to_a_new_name_takes_the_longest_conversation(tmp_path):
    session = new_session()
    chat(session)
    n_held = session.n_tokens
    ask(session, ids(26, 8), 4)
    assert session.autosave(str(tmp_path / "chat.bin")).n_tokens == n_held
    with pytest.raises(SessionError, match="nothing to save"):
        new_session().autosave(str(tmp_path / "other.bin"))
    assert os.listdir(tmp_path) == ["chat.bin"]
