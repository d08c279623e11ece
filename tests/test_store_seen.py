"""What went wrong in other stores of conversations, tried on this one: each test is a defect that somebody met."""

import os
import subprocess

import numpy as np
import pytest

import blockfile
from engine import Session
from given_engine import TURN, ask, ids, joined, next_turn, storing_session
from given_engineprocess import command, gen
from storefolder import survey
from verbs import SOURCES

MODELS = [("llama", {}), ("qwen35", {}), ("qwen3next", {}), ("qwen4exp", {"kv": "int8", "spec": 4})]
N = 300  # tokens of a first prompt
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", 1 << 16)


def session(folder, name="llama", quota_bytes=None, **options) -> Session:
    """A session with a store, in which nothing is parked: what comes back comes from there."""
    chat = storing_session(folder, name, **({"max_context": 2048, "conversation_cache_mib": 0} | options))
    if quota_bytes:
        chat.keeper.store.quota_bytes = quota_bytes
    return chat


def rest(chat: Session) -> None:
    chat.rest(lambda: False)


def turn(chat: Session, prompt, seed: int, n: int = 9) -> np.ndarray:
    """An answered and stored turn; returns the prompt of the next one."""
    reply = ask(chat, prompt, 6)
    rest(chat)
    return next_turn(prompt, reply, seed, n)


def first_prompt(seed: int, start=()) -> np.ndarray:
    return joined(start, TURN, ids(N - 1 - len(start), seed)) if len(start) else joined(TURN, ids(N - 1, seed))


def used(folder) -> int:
    return sum(file.size_bytes for file in survey(str(folder))[0].files.values())


@pytest.mark.slow
def test_the_newest_file_is_evicted_at_once(tmp_path):
    """With room for two conversations, the one that was answered last is always there."""
    turn(session(tmp_path), first_prompt(0), 1)
    chat = session(tmp_path, quota_bytes=2 * used(tmp_path) + 4096)
    for seed in range(10, 15):
        following = turn(chat, first_prompt(seed), seed)
        assert ask(session(tmp_path), following, 2).reused >= N


def test_nested_copies_evict_each_other(tmp_path):
    """A conversation that grows by turns takes the room of one, and never costs an older one its place."""
    chat = session(tmp_path)
    other = turn(chat, first_prompt(1), 2)
    grown = first_prompt(3)
    chat.keeper.store.quota_bytes = 4 * used(tmp_path)
    for number in range(20):
        grown = turn(chat, grown, number + 10, n=20)
    again = session(tmp_path)
    assert ask(again, other, 2).reused >= N
    assert ask(again, grown, 2).reused >= len(grown) - 30


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), MODELS)
def test_small_shared_beginnings_die_first(name, options, tmp_path):
    """The system prompt is the oldest file, and all that is newer goes before it."""
    system = joined(TURN, ids(280, 5))
    chat = session(tmp_path, name, **options)
    turn(chat, joined(system, TURN, ids(40, 6)), 7)
    chat.keeper.store.quota_bytes = 3 * used(tmp_path)
    for seed in range(10, 18):
        turn(chat, joined(system, TURN, ids(200, seed)), seed)
    reply = ask(session(tmp_path, name, **options), joined(system, TURN, ids(30, 99)), 2)
    assert reply.reused >= 256


def test_a_store_evicts_what_is_about_to_be_loaded(tmp_path):
    """To come back costs the live conversation its place in the pools: writing that must not cost what is wanted."""
    chat = session(tmp_path)
    wanted = turn(chat, first_prompt(0), 1)
    chat.keeper.store.quota_bytes = used(tmp_path) + used(tmp_path) // 2
    chat.keeper.store.quota_bytes *= 2
    following = next_turn(first_prompt(2), ask(chat, first_prompt(2), 6), 3)  # not written yet
    assert ask(chat, wanted, 2).reused >= N
    rest(chat)
    assert ask(session(tmp_path), following, 2).reused >= N


def test_the_copy_at_shutdown_is_never_found_again(tmp_path):
    chat = session(tmp_path)
    following = next_turn(first_prompt(0), ask(chat, first_prompt(0), 6), 1)
    chat.close()  # nothing was written before
    assert ask(session(tmp_path), following, 2).reused == len(first_prompt(0)) + 5


@pytest.mark.processes
def test_a_second_process_computes_other_keys(tmp_path):
    """Python seeds its own hashes anew in each process; a name on disk must not follow from these."""
    prompt = first_prompt(0)
    told = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        words = command("llama", tmp_path / "files", f"--store={tmp_path / 'store'}", "--max-context=1024")
        asked = gen(prompt, 4, "source=1 ").encode()
        ran = subprocess.run(words, input=asked, env=environment, capture_output=True, check=True, timeout=600)
        told.append([line for line in ran.stdout.decode().splitlines() if line.startswith("SOURCE")])
    assert told == [["SOURCE none 0 0"], [f"SOURCE store {N - 1} {N - 1}"]]


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_an_answer_that_is_stored_but_never_used(name, options, tmp_path):
    """What is said to have come from the store was not read again: the counts of the request agree."""
    following = turn(session(tmp_path, name, **options), first_prompt(0), 1)
    reply = ask(session(tmp_path, name, **options), following, 4, source=True)
    assert (reply.source.source, reply.source.n_tokens) == ("store", N + 5)
    assert reply.done.n_prompt_read == len(following) - (N + 5)


def test_a_title_request_replaces_the_long_chat(tmp_path):
    """Behind each answer a short request of another kind: the chat goes on with all its tokens, here and elsewhere."""
    chat, prompt = session(tmp_path), first_prompt(0)
    for number in range(4):
        reply = ask(chat, prompt, 6)
        n_held = chat.n_tokens
        ask(chat, joined(TURN, ids(40, 50 + number)), 6)  # at once, without time to write
        prompt = next_turn(prompt, reply, number)
        again = ask(chat, prompt, 1)
        assert again.reused == n_held
    rest(chat)
    assert ask(session(tmp_path), prompt, 2).reused >= n_held


def test_a_chat_is_resumed_silently_by_another_users_similar_prompt(tmp_path):
    """Whoever asks is told what was resumed and how far it went along; else the log has a line."""
    chat = session(tmp_path)
    turn(chat, first_prompt(0), 1)
    similar = joined(first_prompt(0)[:280], ids(60, 9))
    reply = ask(session(tmp_path), similar, 2, source=True)
    assert reply.source == ("store", 280, 280)
    assert reply.source.source in SOURCES
    again = session(tmp_path)
    lines = []
    again.engine.log = lines.append
    ask(again, first_prompt(70), 2)
    ask(again, joined(first_prompt(0)[:290], ids(60, 10)), 2)
    assert any("prompt tokens are reused (store)" in line for line in lines)


@pytest.mark.parametrize(("name", "options"), MODELS[:2])
def test_seven_million_files_in_one_folder(name, options, tmp_path):
    """An agent's run of many small turns leaves no file for each: what a later turn replaces goes with its file."""
    chat, prompt, most = session(tmp_path, name, store_replay_s=3600, **options), first_prompt(0), 0
    for number in range(60):
        prompt = turn(chat, prompt, number, n=12)
        most = max(most, len(survey(str(tmp_path))[0].files))
    assert most <= 12
    assert ask(session(tmp_path, name, **options), prompt, 2).reused >= len(prompt) - 30


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_writes_done_twice(name, options, tmp_path):
    """The same again writes nothing; and of what two engines hold alike, the second writes nothing that is full."""
    chat = session(tmp_path, name, **options)
    for _ in range(3):
        ask(chat, first_prompt(0), 6)
        rest(chat)
        written = chat.keeper.counters
    assert written.n_flushes == 1
    other = session(tmp_path, name, **options)
    ask(other, joined(first_prompt(0)[:280], ids(200, 3)), 6)
    rest(other)
    assert 0 < other.keeper.counters.written_bytes < written.written_bytes
    segments = [segment.key for file in survey(str(tmp_path))[0].files.values() for segment in file.head.segments]
    assert len(segments) == len(set(segments))


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_a_boundary_at_the_prompts_end_that_the_next_turn_never_matches(name, options, tmp_path):
    """The client leaves out what the model thought: the next turn parts from the answer, and goes on before it."""
    prompt = first_prompt(0)
    chat = session(tmp_path, name, **options)
    reply = ask(chat, joined(prompt, TURN), 12)
    rest(chat)
    shortened = joined(prompt, TURN, reply.tokens[6:], TURN, ids(9, 5))
    assert ask(session(tmp_path, name, **options), shortened, 2).reused >= len(prompt)


def test_an_answer_that_was_cut_is_gone_on_with(tmp_path):
    """The last token of an answer is not held yet; where the next turn has another one there, all before it counts."""
    chat, prompt = session(tmp_path), first_prompt(0)
    reply = ask(chat, prompt, 8)
    rest(chat)
    cut = joined(prompt, reply.tokens[:-1], 7 if reply.tokens[-1] != 7 else 8, ids(5, 3))
    assert ask(session(tmp_path), cut, 2).reused == len(prompt) + 7
