"""Stored conversations over HTTP: nobody asks for anything, and after a kill every chat goes on with all its tokens."""

import os
import re
import subprocess
import sys

import openai
import pytest

from declaration import TEXT
from given_enginefront import ROOT, EngineFront
from given_front import RunningFront, error_of, held, write_tokenizer_model
from modelfile import embedded_model
from storefolder import survey

PARAGRAPHS = TEXT.split("\n\n")
SYSTEM = "Answer as a clerk of the congress would, and keep to what was written. " * 12


def new_front(tmp_path, **options) -> EngineFront:
    (tmp_path / "front").mkdir(exist_ok=True)
    store = tmp_path / "store"
    return EngineFront(tmp_path / "front", "--store-min-tokens=64", model=embedded_model(), store=store, **options)


class Chat:
    """One chat of an unmodified client, which sends all its messages each time."""

    def __init__(self, front, topic: int):
        self.client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", timeout=600)
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PARAGRAPHS[topic]}]
        self.n_held = 0

    def turn(self) -> dict:
        """The next answer; returns the timings behind it."""
        answer = self.client.chat.completions.create(
            model="any", messages=self.messages, temperature=0, max_completion_tokens=24
        )
        said = answer.choices[0].message.content
        self.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And what else?"}]
        self.n_held = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        return answer.model_extra["timings"]

    def moved_to(self, front) -> "Chat":
        self.client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", timeout=600)
        return self


def stored(front) -> list[dict]:
    return [entry for entry in front.get("/sessions").json()["data"] if entry["kind"] == "conversation"]


def wait_until_stored(front, *chats: Chat) -> None:
    wanted = sorted(chat.n_held for chat in chats)
    front.wait_for(lambda: sorted(one["n_tokens"] for one in stored(front)) == wanted, f"{wanted} tokens in the store")


def metric(front, name: str) -> float:
    (line,) = (line for line in front.get("/metrics").text.splitlines() if line.startswith(f"strata:{name} "))
    return float(line.split()[1])


@pytest.mark.processes
def test_chats_go_on_in_another_front_over_another_engine(tmp_path):
    with new_front(tmp_path) as front:
        chats, control = [Chat(front, 1), Chat(front, 3)], [Chat(front, 1), Chat(front, 3)]
        for _ in range(2):
            for chat in chats:
                chat.turn()
        wait_until_stored(front, *chats)
        os.kill(front.front.child.pid, 9)
    with new_front(tmp_path) as front:
        held_before = [chat.n_held for chat in chats]
        timings = [chat.moved_to(front).turn() for chat in chats]
        assert [one["cache_source"] for one in timings] == ["store", "store"]
        assert [one["cache_n"] for one in timings] == held_before
        assert metric(front, "store_hits_total") == 2
        assert metric(front, "store_tokens_total") == sum(held_before)
        wait_until_stored(front, *chats)
        chats[0].turn()
        assert metric(front, "store_flushes_total") >= 2
        assert metric(front, "store_written_bytes_total") > 0
        assert metric(front, "store_failures_total") == 0
    (tmp_path / "store").rename(tmp_path / "aside")
    with new_front(tmp_path) as front:
        for chat in control:
            chat.moved_to(front)
        for _ in range(3):
            for chat in control:
                chat.turn()
    assert [one.messages[: len(two.messages)] for one, two in zip(chats, control, strict=True)] == [
        chat.messages for chat in control
    ]


@pytest.mark.processes
def test_the_list_shows_files_and_conversations(tmp_path):
    with new_front(tmp_path) as front:
        chat = Chat(front, 1)
        chat.turn()
        front.save("a.bin")
        wait_until_stored(front, chat)
        listing = front.get("/sessions").json()
        assert listing["kinds"] == ["file", "conversation"]
        assert [entry["match"] for entry in listing["data"]] == [True, True]
        (entry,) = stored(front)
        assert entry["label"] == " ".join(PARAGRAPHS[1].split())
        assert entry["n_bytes"] == sum(path.stat().st_size for path in (tmp_path / "store").glob("*.store"))
        told = front.get(f"/sessions/{entry['id']}/conversation").json()
        assert [message["role"] for message in told["messages"]] == ["system", "user", "assistant"]
        assert told["messages"][1]["content"] == PARAGRAPHS[1]
        error_of(front.get("/sessions/0123456789abcdef/conversation"), 404)
        error_of(front.get("/sessions/a.bin/conversation"), 404)


@pytest.mark.processes
def test_a_conversation_that_is_opened_is_gone_on_with_to_the_token(tmp_path):
    """Its words come from the tokens, and its tokens are found again by the words."""
    with new_front(tmp_path) as front:
        chat = Chat(front, 3)
        chat.turn()
        wait_until_stored(front, chat)
    with new_front(tmp_path) as front:
        (entry,) = stored(front)
        messages = front.get(f"/sessions/{entry['id']}/conversation").json()["messages"]
        body = {"messages": [*messages, {"role": "user", "content": "Go on."}], "temperature": 0, "max_tokens": 4}
        timings = front.post("/v1/chat/completions", body).json()["timings"]
        assert (timings["cache_source"], timings["cache_n"]) == ("store", chat.n_held)


@pytest.mark.processes
def test_a_deleted_conversation_leaves_the_one_that_begins_like_it(tmp_path):
    with new_front(tmp_path) as front:
        chats = [Chat(front, 1), Chat(front, 3)]
        for chat in chats:
            chat.turn()
        wait_until_stored(front, *chats)
        by_size = {entry["n_tokens"]: entry["id"] for entry in stored(front)}
        answer = front.client.delete(f"/sessions/{by_size[chats[0].n_held]}")
        assert answer.status_code == 200
        assert answer.json()["n_deleted"] > 0
        wait_until_stored(front, chats[1])
        error_of(front.client.delete(f"/sessions/{by_size[chats[0].n_held]}"), 404)
        front.save("a.bin")
        assert front.client.delete("/sessions/a.bin").json()["filename"] == "a.bin"
    with new_front(tmp_path) as front:
        n_held = chats[1].n_held
        assert chats[1].moved_to(front).turn()["cache_n"] == n_held
        assert 0 < chats[0].moved_to(front).turn()["cache_n"] < n_held, "what the other one shares"


@pytest.mark.processes
def test_a_request_of_which_nothing_is_kept_is_not_stored(tmp_path):
    with new_front(tmp_path) as front:
        body = {"messages": Chat(front, 1).messages, "max_tokens": 4, "cache_prompt": False}
        assert front.post("/v1/chat/completions", body).status_code == 200
        assert front.post("/unload").status_code == 200
        assert stored(front) == []
        assert survey(str(tmp_path / "store"))[0].files == {}


@pytest.mark.processes
def test_what_is_not_written_yet_is_written_before_the_engine_is_unloaded(tmp_path):
    with new_front(tmp_path) as front:
        chat = Chat(front, 2)
        chat.turn()
        assert front.post("/unload").status_code == 200
        assert held(front) == 0
        assert [entry["n_tokens"] for entry in stored(front)] == [chat.n_held]
        n_held = chat.n_held
        assert chat.turn()["cache_n"] == n_held


@pytest.mark.kills
def test_chats_go_on_however_often_engine_and_front_are_killed():
    """A few of the kills of `bench/kills.py`, which fails where a token or an answer is lost."""
    command = [sys.executable, "bench/kills.py", "--kills=4", "--chats=3", "--seed=5"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    n_due = int(re.search(r"to be reused behind kills \| (\d+)", ran.stdout)[1])
    assert n_due > 1000
    assert "| reused of these | 100.00% |" in ran.stdout


# --- without an engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_a_store_alone_lists_conversations_and_has_no_files(model, tmp_path):
    with RunningFront(tmp_path, model, store=str(tmp_path / "store")) as front:
        assert front.get("/sessions").json() == {
            "object": "list", "data": [], "kinds": ["conversation"], "complete": True,
        }  # fmt: skip
        error_of(front.slot("save", "a.bin"), 501)
        error_of(front.client.delete("/sessions/0123456789abcdef"), 404)


def test_without_a_store_and_a_folder_nothing_is_listed(model, tmp_path):
    with RunningFront(tmp_path, model) as front:
        assert "--store DIR" in error_of(front.get("/sessions"), 501)["message"]
        error_of(front.get("/sessions/0123456789abcdef/conversation"), 501)
        error_of(front.client.delete("/sessions/0123456789abcdef"), 501)


def test_a_folder_that_cannot_be_read_is_told(model, tmp_path):
    (tmp_path / "store").write_text("no folder")
    with RunningFront(tmp_path, model, store=str(tmp_path / "store" / "below")) as front:
        assert front.get("/sessions").json()["data"] == []
        error_of(front.client.delete("/sessions/0123456789abcdef"), 500)
