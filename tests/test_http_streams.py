"""Streams byte by byte, and through the clients that people use."""

import json
import re

import openai
import pytest

import given_child
import httpstream
from given_front import RunningFront, events, write_tokenizer_model

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    folder = tmp_path_factory.mktemp("front")
    with RunningFront(folder, write_tokenizer_model(folder / "tiny.gguf")) as front:
        yield front


def answer_with(front, text: str) -> None:
    front.script("GEN", "@accept", f"@ids {','.join(map(str, given_child.to_ids(text)))}", "@done")


def deltas(text: str) -> list[dict]:
    return [event["choices"][0]["delta"] for event in events(text) if event["choices"]]


def content(text: str) -> str:
    return "".join(delta.get("content") or "" for delta in deltas(text))


# --- Bytes ---


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_bytes_of_a_stream(front, path):
    body = {**CHAT, "prompt": "x"}
    with front.client.stream("POST", path, json=body) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert b"\r" not in raw
    blocks = raw.split(b"\n\n")
    assert (blocks[-1], blocks[-2]) == (b"", b"data: [DONE]")
    parsed = []
    for block in blocks[:-2]:
        assert re.fullmatch(rb"data: \{[^\n]*\}", block)
        parsed.append(json.loads(block[6:]))
    assert all(len(event["choices"]) == 1 for event in parsed)
    reasons = [event["choices"][0]["finish_reason"] for event in parsed]
    assert reasons == [None] * (len(parsed) - 1) + ["stop"]
    assert all("usage" not in event for event in parsed)
    assert len({(event["id"], event["created"], event["model"]) for event in parsed}) == 1
    assert parsed[-1]["timings"]["predicted_n"] == len(given_child.to_ids(given_child.ANSWER)) + 1


def test_the_role_comes_first_and_once(front):
    got = deltas(front.stream())
    assert got[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in got[1:])
    assert got[-1] == {}


def test_usage_comes_on_request_only(front):
    got = events(front.stream(stream_options={"include_usage": True}))
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["total_tokens"] == got[-1]["usage"]["prompt_tokens"] + 30
    assert all("usage" not in event for event in got[:-1])
    for options in ({"include_usage": False}, {}, None):
        assert all("usage" not in event for event in events(front.stream(stream_options=options)))


def test_progress_of_the_prompt_on_request(front):
    got = events(front.stream(messages=[{"role": "user", "content": "x" * 1200}], return_progress=True))
    progress = [event["prompt_progress"] for event in got if "prompt_progress" in event]
    assert [one["processed"] for one in progress][:2] == [512, 1024]
    assert progress[-1]["processed"] == progress[-1]["total"]
    assert all(event["choices"] for event in got)
    assert all("prompt_progress" not in event for event in events(front.stream()))


def test_characters_are_whole(front):
    pieces = [delta["content"] for delta in deltas(front.stream()) if delta.get("content")]
    assert "".join(pieces) == given_child.ANSWER
    assert "🙂" in pieces


def test_keep_alives_while_nothing_is_said(front, monkeypatch):
    monkeypatch.setattr(httpstream, "KEEP_ALIVE_S", 0.02)
    front.script("GEN", "@accept", "@text a", "@wait later", "@text b", "@done")
    with front.client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        text, chunks = "", answer.iter_text()
        while text.count("\n:\n\n") < 3:
            text += next(chunks)
        front.mark("later")
        text += "".join(chunks)
    assert content(text) == "ab"
    assert {line for line in text.split("\n") if not line.startswith("data: ")} == {"", ":"}


def test_an_error_in_a_stream_is_its_last_event(front):
    front.script("GEN", "@accept", "@text ab", "HELLO")
    got = front.stream()
    assert content(got.rsplit("data: ", 1)[0]) == "ab"
    error = json.loads(got.rsplit("data: ", 1)[1])["error"]
    assert (error["code"], error["type"]) == (500, "server_error")
    assert "out of step" in error["message"]


# --- Stop strings, reasoning, tools ---


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_over_token_borders(front, stream):
    for stop, shown in (("the", "Grüße from "), (["zzz", " e", "from the x"], "Grüße from the"), ("ß", "Grü")):
        if stream:
            assert content(front.stream(stop=stop)) == shown
        else:
            choice = front.chat(stop=stop).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (shown, "stop")


def test_reasoning_is_apart_in_answer_and_stream(front):
    text = "<think>\nlet me see\n</think>\n\nyes<|im_end|>"
    answer_with(front, text)
    message = front.chat().json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "let me see"}
    answer_with(front, text)
    got = deltas(front.stream())
    assert "".join(delta.get("reasoning_content", "") for delta in got) == "let me see"
    assert "".join(delta.get("content", "") for delta in got) == "yes"
    answer_with(front, text)
    assert content(front.stream(reasoning_format="none")) == text.removesuffix("<|im_end|>")


def test_thinking_that_the_template_opened(front):
    answer_with(front, "so\n</think>\n\nyes<|im_end|>")
    message = front.chat(chat_template_kwargs={"open_thinking": True}).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "so")


def test_tool_calls_in_answer_and_stream(front):
    answer_with(front, f"Let me add.\n{CALL}\n{CALL}<|im_end|>")
    (choice,) = front.chat(tools=[TOOL]).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me add.")
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert calls[0]["id"] != calls[1]["id"]
    answer_with(front, f"{CALL}\n{CALL}<|im_end|>")
    text = front.stream(tools=[TOOL])
    called = [delta["tool_calls"][0] for delta in deltas(text) if "tool_calls" in delta]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in called] == [
        (0, "function", "add"),
        (1, "function", "add"),
    ]
    assert events(text)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert content(text) == ""


def test_call_markup_is_text_when_no_tools_were_given(front):
    answer_with(front, f"{CALL}<|im_end|>")
    (choice,) = front.chat().json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)


def test_a_call_cut_by_the_limit_is_text(front):
    answer_with(front, CALL)
    (choice,) = front.chat(tools=[TOOL], max_tokens=12).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("<tool_call>")


# --- Thinking and what is reused ---


def test_reuse_with_and_without_the_thinking_sent_back(front):
    """With the thinking sent back, all is held; without it, the engine is asked for what diverges."""
    front.slot("erase")
    text = "<think>\nso\n</think>\n\nyes<|im_end|>"
    answer_with(front, text)
    first = front.chat("why?").json()
    n_held = first["usage"]["total_tokens"] - 1
    message = first["choices"][0]["message"]
    ask, turn = {"role": "user", "content": "why?"}, {"role": "user", "content": "and?"}
    with_it = front.chat(messages=[ask, message, turn], max_tokens=1).json()
    assert with_it["timings"]["cache_n"] == n_held
    answer_with(front, text)
    front.chat("why?")
    without = front.chat(messages=[ask, {"role": "assistant", "content": "yes"}, turn], max_tokens=1).json()
    assert without["timings"]["cache_n"] == 0


# --- The openai package ---


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def test_openai_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "strata"


def test_openai_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=CHAT["messages"], temperature=0.5, seed=1)
    assert answer.choices[0].message.content == given_child.ANSWER
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.timings["cache_n"]


def test_openai_stream(client):
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT["messages"], stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == given_child.ANSWER
    assert chunks[-1].usage.completion_tokens == 30
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_openai_completions(client):
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == given_child.ANSWER
    stream = client.completions.create(model="tiny", prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == given_child.ANSWER


def test_openai_tools(front, client):
    answer_with(front, f"{CALL}<|im_end|>")
    answer = client.chat.completions.create(model="tiny", messages=CHAT["messages"], tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1}
    # The call and its result go back in, as an agent sends them.
    messages = [
        *CHAT["messages"],
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    assert client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL]).choices[0].message.content


def test_openai_errors(front, client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
    assert caught.value.body["type"] == "exceed_context_size_error"
    assert caught.value.body["n_ctx"] == given_child.N_CTX
    front.script("GEN", "@accept", "@text ab", "@die")
    with pytest.raises(openai.APIError, match="signal 9"):
        list(client.chat.completions.create(model="tiny", messages=CHAT["messages"], stream=True))
    assert client.chat.completions.create(model="tiny", messages=CHAT["messages"]).choices


def test_openai_key(tmp_path):
    with RunningFront(tmp_path, write_tokenizer_model(tmp_path / "tiny.gguf"), api_key="sesame") as front:
        good = openai.OpenAI(base_url=f"{front.url}/v1", api_key="sesame", max_retries=0)
        bad = openai.OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0)
        with good, bad:
            assert good.models.list().data
            with pytest.raises(openai.AuthenticationError):
                bad.models.list()


# --- How other clients read a stream ---


def read_like_a_web_page(raw: bytes) -> tuple[str, bool]:
    """Lines that start with `data: `, [DONE] compared exactly, choices read without asking."""
    text, complete = "", False
    for line in raw.decode().split("\n"):
        if not line.startswith("data: "):
            continue
        if line[6:] == "[DONE]":
            complete = True
            continue
        text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return text, complete


def read_in_buffers(raw: bytes, size: int) -> tuple[str, bool]:
    """Buffers of any size; a comment with words counts as the end; data with or without a blank."""
    text, held = "", ""
    for start in range(0, len(raw), size):
        held += raw[start : start + size].decode(errors="surrogateescape")
        *lines, held = held.split("\n")
        for line in lines:
            if line.startswith(": "):
                return text, True
            if not line.startswith("data:"):
                continue
            value = line[5:].strip()
            if value == "[DONE]":
                return text, True
            event = json.loads(value)
            assert "error" not in event
            text += event["choices"][0]["delta"].get("content") or ""
    return text, False


def test_other_readers_get_the_same_text(front):
    answer_with(front, "ascii only, so that any cut is a character<|im_end|>")
    with front.client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        raw = b"".join(answer.iter_raw())
    want = ("ascii only, so that any cut is a character", True)
    assert read_like_a_web_page(raw) == want
    for size in (1, 7, 100, len(raw)):
        assert read_in_buffers(raw, size) == want
