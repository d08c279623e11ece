"""Conversations kept without being asked for, and resumed by any prompt that begins like them, to the same bits."""

import os
import subprocess
import time

import numpy as np
import pytest

import disksystem
import storekeeper
from engine import ModelError, Session
from generation import RequestFailed
from given_engine import TURN, ask, ids, joined, next_turn, storing_session, trunk
from given_engineprocess import command, gen

MODELS = [("llama", {}), ("qwen35", {"kv": "k8v4"}), ("qwen4exp", {"kv": "int8", "spec": 4}), ("qwen3next", {})]
N = 300  # tokens of a first prompt


def session(tmp_path, name="llama", **options) -> Session:
    return storing_session(tmp_path / "store", name, **options)


def never() -> bool:
    return False


def talk(chat: Session, turns: int, seed: int = 0, prompt=None) -> np.ndarray:
    """Turns with time to rest behind each; returns the prompt of the turn behind them."""
    prompt = joined(TURN, ids(N - 1, seed)) if prompt is None else prompt
    for turn in range(turns):
        prompt = next_turn(prompt, ask(chat, prompt, 6), seed + turn + 1)
        chat.rest(never)
    return prompt


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_a_conversation_goes_on_in_another_engine_as_if_it_had_never_stopped(name, options, tmp_path):
    """No SAVE and no end: the first session is dropped as a killed process drops it."""
    first = session(tmp_path, name, **options)
    prompt = talk(first, 2)
    n_held = first.n_tokens
    expected = ask(first, prompt, 12)
    again = session(tmp_path, name, **options)
    reply = ask(again, prompt, 12)
    assert (reply.tokens, reply.reused) == (expected.tokens, n_held)
    assert again.keeper.counters.n_hits == 1
    assert trunk(again) == trunk(first)


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_a_conversation_that_another_one_overwrote_is_there_again(name, options, tmp_path):
    """Nothing is parked here, so that the store alone can have it."""
    places = {"conversation_cache_mib": 0}, {"store": None}
    chat, control = (session(tmp_path, name, **options, **place) for place in places)
    first, second = talk(chat, 1, 0), talk(chat, 1, 70)
    expected = [ask(control, p, 8).tokens for p in (first, second)]
    replies = [ask(chat, p, 8) for p in (first, second)]
    assert [reply.tokens for reply in replies] == expected
    assert all(reply.reused >= N for reply in replies)


def test_what_is_not_written_yet_is_written_before_it_is_overwritten(tmp_path):
    chat = session(tmp_path, conversation_cache_mib=0)
    prompt = joined(TURN, ids(N - 1))
    following = next_turn(prompt, ask(chat, prompt, 6), 1)  # and no rest
    ask(chat, joined(TURN, ids(N - 1, 50)), 6)
    assert ask(session(tmp_path), following, 2).reused >= N


def test_a_beginning_is_shared_and_a_turn_costs_a_turn(tmp_path):
    chat = session(tmp_path, conversation_cache_mib=0)
    prompt = talk(chat, 1)
    first = chat.keeper.counters.written_bytes
    talk(chat, 1, prompt=prompt)
    grown = chat.keeper.counters.written_bytes - first
    assert 0 < grown < first
    root = joined(TURN, ids(N - 1))[:256]
    assert ask(chat, joined(root, ids(60, 99)), 3).reused == 256


@pytest.mark.parametrize("broken", ["cut", "flipped", "gone"])
def test_damage_is_a_shorter_hit_and_the_answer_is_right(broken, tmp_path):
    first = session(tmp_path)
    prompt = talk(first, 1)
    expected = ask(first, prompt, 8).tokens
    again = session(tmp_path)
    (path,) = (tmp_path / "store").glob("*.store")
    data = bytearray(path.read_bytes())
    if broken == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if broken == "flipped" else data[: len(data) // 2])
    reply = ask(again, prompt, 8)
    assert (reply.tokens, reply.reused) == (expected, 0)


def test_what_leads_to_numbers_that_are_not_finite_is_set_aside(tmp_path):
    """Its checksums are right, as it was written so: without that the same prompt would fail for ever."""
    chat = session(tmp_path, "qwen35")
    prompt = joined(TURN, ids(N - 1))
    following = next_turn(prompt, ask(chat, prompt, 6), 1)
    chat.cache.state.gdn[:] = np.nan
    chat.rest(never)
    lines, again = [], session(tmp_path, "qwen35")
    again.keeper.store.log = lines.append
    with pytest.raises(RequestFailed, match="send the request again"):
        ask(again, following, 6)
    assert "not finite" in lines[0]
    reply = ask(again, following, 6)
    assert (reply.tokens, reply.reused) == (ask(session(tmp_path, "qwen35", store=None), following, 6).tokens, 0)
    again.rest(never)
    assert ask(session(tmp_path, "qwen35"), next_turn(following, reply, 2), 2).reused > N


def test_nothing_is_kept_of_short_ones_nor_where_nothing_is_to_be_kept(tmp_path):
    chat = session(tmp_path)
    ask(chat, joined(TURN, ids(100)), 4)
    chat.rest(never)
    ask(chat, joined(TURN, ids(N, 3)), 4, checkpoint=False)
    chat.rest(never)
    assert list((tmp_path / "store").glob("*.store")) == []


def test_a_full_disk_costs_a_line_and_no_answer(tmp_path, monkeypatch):
    lines = []
    chat = session(tmp_path)
    chat.keeper._log = lines.append
    monkeypatch.setattr(disksystem.PosixSystem, "write", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    prompt = talk(chat, 1)
    assert chat.keeper.counters.n_failures == 1
    assert "a conversation is not kept" in lines[0]
    monkeypatch.undo()
    assert ask(chat, prompt, 4).reused >= N
    assert list((tmp_path / "store").glob("*.store")) == []


def test_another_context_and_another_release_find_it_and_another_format_does_not(tmp_path, monkeypatch):
    prompt = talk(session(tmp_path, "qwen35", kv="int8"), 1)
    assert ask(session(tmp_path, "qwen35", kv="int8", max_context=2048), prompt, 2).reused >= N
    assert ask(session(tmp_path, "qwen35", kv="k8v4"), prompt, 2).reused == 0
    monkeypatch.setattr(storekeeper, "ARITHMETIC", storekeeper.ARITHMETIC + 1)
    assert ask(session(tmp_path, "qwen35", kv="int8"), prompt, 2).reused == 0


def test_the_label_of_a_conversation_is_that_of_its_latest_request(tmp_path):
    chat = session(tmp_path)
    ask(chat, joined(TURN, ids(N - 1)), 6, label="first words")
    chat.rest(never)
    (kept,) = chat.keeper.store.index.conversations()
    assert (kept.last.file.head.label, kept.n_tokens, kept.is_whole) == ("first words", chat.n_tokens, True)


def test_a_folder_that_cannot_be_used_ends_the_start_with_one_line(tmp_path):
    (tmp_path / "store").write_bytes(b"a file")
    with pytest.raises(ModelError, match="--store: "):
        session(tmp_path)


class Process:
    """`strata --serve --store` in a process of its own."""

    def __init__(self, folder):
        flags = (f"--store={folder / 'store'}", "--store-replay-s=0", "--max-context=1024")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._run = subprocess.Popen(command("qwen4exp", folder, *flags), bufsize=0, **pipes)
        self._until("READY")

    def _until(self, *words: str) -> list[list[str]]:
        lines = []
        while not lines or lines[-1][0] not in words:
            lines.append(self._run.stdout.readline().decode().split())
            assert lines[-1], "the engine ended"
        return lines

    def ask(self, prompt, max_new: int) -> tuple[list[int], list[str]]:
        """The tokens, and the fields of SOURCE."""
        self._run.stdin.write(gen(prompt, max_new, "source=1 ").encode())
        lines = self._until("DONE", "ERR")
        (source,) = (line[1:] for line in lines if line[0] == "SOURCE")
        return [int(line[1]) for line in lines if line[0] == "T"], source

    def kill(self) -> None:
        self._run.kill()
        self._run.communicate()


@pytest.mark.kills
def test_conversations_in_turn_go_on_after_kill_9(tmp_path):
    """Two in turn, each turn in a process that is killed once the one before it is on the disk."""
    folder, control = tmp_path / "store", session(tmp_path, "qwen4exp", store=None, threads=1)
    prompts = [joined(TURN, ids(N - 1, seed)) for seed in (0, 70)]
    for turn in range(3):
        for chat, prompt in enumerate(prompts):
            before = set(folder.glob("*.store")) if folder.exists() else set()
            process = Process(tmp_path)
            tokens, (where, n_tokens, _) = process.ask(prompt, 6)
            assert (where, int(n_tokens) >= N - 1) == (("store", True) if turn else ("none", False))
            reply = ask(control, prompt, 6)
            assert tokens == reply.tokens
            prompts[chat] = next_turn(prompt, reply, 10 * chat + turn)
            deadline = time.monotonic() + 60
            while not set(folder.glob("*.store")) - before and time.monotonic() < deadline:
                time.sleep(0.02)
            process.kill()
    assert not list(folder.glob("*.damaged"))
