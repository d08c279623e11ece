"""Bodies to GEN lines and tokens to answers, without a socket."""

import json
import random

import pytest

import given_child
import httpchat
from given_front import write_tokenizer_model
from httpanswer import AnswerParser, Part, StopStrings
from httpchat import AnswerReader, GenerationRequest
from httpfields import ApiError
from tokenizer import Tokenizer
from verbs import Done

N_CTX = 4096
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<tool_call>"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def pieces(text: str, seed: int) -> list[str]:
    """The text cut at random."""
    chosen, rest = random.Random(seed), text
    cut = []
    while rest:
        length = chosen.randint(1, 6)
        cut.append(rest[:length])
        rest = rest[length:]
    return cut


def joined(parts: list[Part]) -> dict[str, str]:
    texts = {"content": "", "reasoning": "", "calls": []}
    for part in parts:
        if part.call:
            texts["calls"].append((part.call.name, json.loads(part.call.arguments)))
        else:
            texts[part.kind] += part.text
    return texts


def parse(text: str, seed: int = 0, **options) -> dict[str, str]:
    parser = AnswerParser(**options)
    parts = [part for piece in pieces(text, seed) for part in parser.push(piece)] + parser.flush()
    return joined(parts)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "n_calls"),
    [
        ("plain", "plain", "", 0),
        ("  blanks  \n", "  blanks  \n", "", 0),
        ("<think>\nso\n</think>\n\nyes", "yes", "so", 0),
        ("\n<think>so", "", "so", 0),
        ("<think></think>x", "x", "", 0),
        ("<thin", "<thin", "", 0),
        ("no <think>here</think>", "no <think>here</think>", "", 0),
        (f"wait\n{CALL}\n", "wait", "", 1),
        (f"{CALL}\n{CALL}", "", "", 2),
        (f"<think>a</think>\n{CALL}", "", "a", 1),
        ("<tool_call>not JSON</tool_call> x", "<tool_call>not JSON</tool_call>x", "", 0),
        ("<tool_call>{", "<tool_call>{", "", 0),
        ('<tool_call>{"name": "add", "arguments": {}}', "", "", 1),
        ("a < b <tool", "a < b <tool", "", 0),
        ("<tool_call>" + "[" * 5_000, "<tool_call>" + "[" * 5_000, "", 0),
    ],
)
def test_parts_do_not_depend_on_where_the_text_is_cut(text, content, reasoning, n_calls, seed):
    found = parse(text, seed, tools=True)
    assert (found["content"], found["reasoning"], len(found["calls"])) == (content, reasoning, n_calls)


def test_a_call_keeps_its_name_and_arguments():
    assert parse(CALL, tools=True)["calls"] == [("add", {"a": 1, "b": "<tool_call>"})]


def test_without_tools_calls_are_text():
    assert parse(CALL)["content"] == CALL


def test_thinking_that_the_prompt_opened():
    found = parse("so it is\n</think>\n\nyes", thinking=True)
    assert (found["reasoning"], found["content"]) == ("so it is", "yes")


def test_reasoning_can_be_left_in_the_text():
    assert parse("<think>a</think>b", reasoning=False)["content"] == "<think>a</think>b"


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_cut_like_a_search_in_the_whole_text(seed):
    chosen = random.Random(seed)
    text = "".join(chosen.choices("ab\n", k=60))
    stops = ["".join(chosen.choices("ab\n", k=chosen.randint(3, 7))) for _ in range(3)]
    cutter = StopStrings(stops)
    shown = "".join(cutter.push(piece) for piece in pieces(text, seed)) + cutter.flush()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        # The stop that is complete first ends the text.
        stop = next(stop for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends))
        assert (shown, cutter.found in stops) == (text[: text.find(cutter.found)], True)
        assert len(shown) <= text.find(stop)
    else:
        assert (shown, cutter.found) == (text, None)


# --- Requests ---


def gen_words(tokenizer, **body) -> list[str]:
    body.setdefault("messages", [{"role": "user", "content": "hi"}])
    return httpchat.read_chat(body, tokenizer, N_CTX).line(tokenizer.end_ids).split(" ")


def refusal(tokenizer, read=httpchat.read_chat, **body) -> str:
    if read is httpchat.read_chat:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
    with pytest.raises(ApiError) as caught:
        read(body, tokenizer, N_CTX)
    assert caught.value.status == 400
    return str(caught.value)


def test_a_request_without_wishes_is_sampled_and_as_long_as_the_context(tokenizer):
    words = gen_words(tokenizer)
    n_prompt = len(words[-1].split(","))
    assert words[:2] == ["GEN", str(N_CTX - 8 - n_prompt)]
    keys = dict(word.split("=") for word in words[2:-1])
    assert keys.pop("seed").isdigit()
    chosen = {"temperature": "0.8", "top_k": "40", "top_p": "0.95", "min_p": "0.05"}
    assert keys == {**chosen, "stop": "257,258", "label": "hi", "source": "1"}


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"n_predict": 9}, 9),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": None, "n_predict": 0}, 0),
        ({"max_completion_tokens": 0, "max_tokens": 5}, 0),
        ({"max_tokens": -0.0}, 0),
        ({"max_tokens": None}, None),
        ({"max_tokens": 10**9}, None),
        ({"max_tokens": 5.0}, 5),
    ],
)
def test_limits_on_the_answer(tokenizer, fields, limit):
    words = gen_words(tokenizer, **fields)
    assert int(words[1]) == (N_CTX - 8 - len(words[-1].split(",")) if limit is None else limit)


def test_sampling_fields_reach_the_gen_line(tokenizer):
    words = gen_words(
        tokenizer, temperature=0.7, top_p=0.9, top_k=-1, min_p=0, seed=3, repetition_penalty=1.1, repeat_last_n=-1
    )
    assert {"temperature=0.7", "top_p=0.9", "top_k=0", "min_p=0.0", "seed=3"} < set(words)
    assert {"repeat_penalty=1.1", f"repeat_last_n={N_CTX}"} < set(words)


def test_without_a_seed_sampling_differs_from_request_to_request(tokenizer):
    words = [word for _ in range(4) for word in gen_words(tokenizer, temperature=1, seed=-1)]
    seeds = {word for word in words if word.startswith("seed=")}
    assert len(seeds) > 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 2}, "n:"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)
def test_a_refusal_names_the_field(tokenizer, fields, text):
    assert text in refusal(tokenizer, **fields)


def test_unknown_fields_and_empty_ones_are_ignored(tokenizer):
    fields = {
        "cache_prompt": True,
        "id_slot": 0,
        "samplers": ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        "store": False,
        "metadata": {"a": "b"},
        "user": "me",
        "logit_bias": [],
        "grammar": "",
        "logprobs": None,
        "n": 1,
        "stop": None,
        "tools": None,
        "stream_options": None,
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
    }
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": parts}]
    assert gen_words(tokenizer, messages=messages, seed=1, **fields) == gen_words(tokenizer, seed=1)


def test_parts_of_a_message_are_lines_and_developers_are_the_system(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {"role": "user", "content": "x"}]
    text = httpchat.render_chat({"messages": messages}, tokenizer)
    assert text.startswith("<|im_start|>system\na\nb<|im_end|>\n")


def test_tools_and_past_calls_reach_the_template_as_objects(tokenizer):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = httpchat.render_chat({"messages": messages, "tools": [TOOL]}, tokenizer)
    assert json.dumps(TOOL) in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text


def test_thinking_sent_back_reaches_the_template(tokenizer):
    messages = [{"role": "assistant", "content": "yes", "reasoning_content": "so"}]
    assert "<think>\nso\n</think>\n\nyes" in httpchat.render_chat({"messages": messages}, tokenizer)


def test_tool_choice_none_takes_the_tools_away(tokenizer):
    request = httpchat.read_chat(
        {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "none"}, tokenizer, N_CTX
    )
    assert not request.tools


def test_a_prompt_that_opens_a_think_block_is_noticed(tokenizer):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"open_thinking": True}}
    assert httpchat.read_chat(body, tokenizer, N_CTX).thinking
    assert not httpchat.read_chat(body | {"reasoning_format": "none"}, tokenizer, N_CTX).thinking


@pytest.mark.parametrize("n_spare", [8, 9])
def test_the_longest_prompt_leaves_room_for_one_token(tokenizer, n_spare):
    prompt = [65] * (N_CTX - n_spare)
    if n_spare == 9:
        assert httpchat.read_completion({"prompt": prompt}, tokenizer, N_CTX).max_new == 1
        return
    with pytest.raises(ApiError) as caught:
        httpchat.read_completion({"prompt": prompt}, tokenizer, N_CTX)
    error = caught.value.body["error"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", 400)
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (len(prompt), N_CTX)


@pytest.mark.parametrize("prompt", [None, "", [], 5, {}, ["a", "b"], [-1], [263], [1.0], [True], [[1]], [None]])
def test_prompts_that_are_none(tokenizer, prompt):
    assert "prompt" in refusal(tokenizer, httpchat.read_completion, prompt=prompt)


def test_prompts_may_mix_texts_and_ids(tokenizer):
    request = httpchat.read_completion({"prompt": ["ab", 99, "<|im_end|>"]}, tokenizer, N_CTX)
    assert request.ids == [97, 98, 99, given_child.END_ID]


# --- Answers ---

DONE = Done(*[5, 9, 10.0, 20.0, "stop", 0, 0, 4, 1, 2, 0, 0, 0.0, 5, 0])


def read_answer(tokenizer, text: str, **wishes) -> httpchat.Answer:
    reader = AnswerReader(GenerationRequest([1], 9, {}, **wishes), tokenizer)
    for token_id in given_child.to_ids(text):
        reader.push(token_id)
        if reader.stopped:
            break
    reader.finish(DONE)
    return reader.answer


def test_marks_of_turns_are_not_shown_and_marks_of_parts_are_read(tokenizer):
    answer = read_answer(tokenizer, "<think>so</think>yes<|im_end|>", reasoning=True)
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("yes", "so", "stop")


def test_a_stop_string_over_token_borders_is_never_shown(tokenizer):
    answer = read_answer(tokenizer, "one\nUser: two", stops=("\nUser:",))
    assert (answer.content, answer.stop_word, answer.finish_reason) == ("one", "\nUser:", "stop")


def test_a_character_cut_by_the_limit_is_replaced(tokenizer):
    reader = AnswerReader(GenerationRequest([1], 9, {}), tokenizer)
    reader.push("é".encode()[0])
    reader.finish(DONE._replace(finish="length"))
    assert (reader.answer.content, reader.answer.finish_reason) == ("\ufffd", "length")


def test_cached_tokens_stand_in_three_places():
    assert httpchat.usage(DONE)["prompt_tokens_details"]["cached_tokens"] == 4
    assert httpchat.usage(DONE)["cache_read_input_tokens"] == 4
    assert httpchat.usage(DONE)["prompt_tokens"] == 9
    assert (httpchat.timings(DONE)["cache_n"], httpchat.timings(DONE)["prompt_n"]) == (4, 5)
    assert httpchat.timings(DONE)["predicted_per_second"] == 250.0
