"""Calls in the markup of models, as clients get them; marks that are tokens, and marks that are only text."""

import json
import random

import pytest

import given_child
import httpchat
from given_front import TEMPLATE, write_tokenizer_model
from httpanswer import AnswerParser
from tokenizer import Tokenizer
from verbs import Done

N_CTX = 4096
DONE = Done(*[5, 9, 10.0, 20.0, "stop", 0, 0, 4, 1, 2, 0, 0, 0.0, 5, 0])
FUNCTION_TEMPLATE = (
    TEMPLATE + "{# <tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call> #}"
)
KINDS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "thing": {"type": "object"},
    "list": {"type": "array"},
    "none": {"type": "null"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "maybe_text": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    "choice": {"enum": ["1", "2"]},
    "number_choice": {"enum": [1, 2]},
    "referred": {"$ref": "#/$defs/Size"},
    "round": {"$ref": "#/$defs/Round"},
    "lost": {"$ref": "#/$defs/Nowhere"},
    "nested": {"properties": {"a": {}}},
    "broken": {"type": 5, "anyOf": "x"},
    "any": True,
}
SCHEMA = {
    "type": "object",
    "properties": KINDS,
    "$defs": {"Size": {"type": "integer"}, "Round": {"$ref": "#/$defs/Round"}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@pytest.fixture(scope="module", params=["tokens", "texts"])
def tokenizer(request, tmp_path_factory):
    """A vocabulary with the marks of thinking and calls, and one without."""
    folder = tmp_path_factory.mktemp("model")
    n_marks = None if request.param == "tokens" else 3
    return Tokenizer.load(write_tokenizer_model(folder / "tiny.gguf", FUNCTION_TEMPLATE, n_marks=n_marks))


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory):
    return Tokenizer.load(write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny.gguf", FUNCTION_TEMPLATE))


def answer_of(tokenizer, ids: list[int], **fields) -> httpchat.Answer:
    """What a client gets of these tokens."""
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    reader = httpchat.AnswerReader(httpchat.read_chat(body, tokenizer, N_CTX), tokenizer)
    for token_id in ids:
        reader.push(token_id)
        if reader.stopped:
            break
    reader.finish(DONE)
    return reader.answer


def read(tokenizer, text: str, **fields) -> httpchat.Answer:
    return answer_of(tokenizer, tokenizer.encode(text, special=True), **fields)


def spelled(text: str) -> list[int]:
    """The text byte for byte, without any token for a mark."""
    return list(text.encode())


def arguments(answer: httpchat.Answer) -> list[dict]:
    return [json.loads(call.arguments) for call in answer.calls]


def tagged(**values: str) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


# --- The function form ---


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "plain", "plain"),
        ("text", "5", "5"),
        ("text", "true", "true"),
        ("text", "null", "null"),
        ("text", "", ""),
        ("text", "two\nlines\n", "two\nlines\n"),
        ("text", "  indented\n\n  more", "  indented\n\n  more"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "a </parameter> b", "a </parameter> b"),
        ("text", "x </function> y", "x </function> y"),
        ("text", "<b>&amp;</b>", "<b>&amp;</b>"),
        ("count", "5", 5),
        ("count", " -7 ", -7),
        ("count", "5.0", 5),
        ("count", "5.5", "5.5"),
        ("count", "five", "five"),
        ("count", "true", "true"),
        ("count", "9" * 400, int("9" * 400)),
        ("count", "9" * 5000, "9" * 5000),
        ("share", "0.5", 0.5),
        ("share", "5", 5),
        ("share", "1e999", "1e999"),
        ("share", "NaN", "NaN"),
        ("sure", "true", True),
        ("sure", "False", False),
        ("sure", "yes", "yes"),
        ("thing", '{"a": [1, null]}', {"a": [1, None]}),
        ("thing", '{"a": 1e999}', '{"a": 1e999}'),
        ("thing", "{'a': 1}", "{'a': 1}"),
        ("thing", "[" * 100_000, "[" * 100_000),
        ("list", '["a", 1]', ["a", 1]),
        ("list", "a, b", "a, b"),
        ("none", "null", None),
        ("none", "None", None),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "3", 3),
        ("maybe", "x", "x"),
        ("maybe_text", "null", None),
        ("maybe_text", "None", "None"),
        ("maybe_text", "5", "5"),
        ("either", '{"a": 1}', {"a": 1}),
        ("either", "words", "words"),
        ("choice", "1", "1"),
        ("number_choice", "1", 1),
        ("referred", "4", 4),
        ("round", "4", "4"),
        ("lost", "4", "4"),
        ("nested", '{"a": 1}', {"a": 1}),
        ("broken", "4", "4"),
        ("any", "4", "4"),
        ("unknown", "4", "4"),
        ("unknown", "true", "true"),
    ],
)
def test_parameters_have_the_types_of_the_schema(tokenizer, name, text, value):
    answer = read(tokenizer, tagged(**{name: text}))
    assert (answer.content, answer.finish_reason) == ("", "tool_calls")
    assert arguments(answer) == [{name: value}]
    assert type(arguments(answer)[0][name]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "<tool_call><function=f></function></tool_call>",
        "<tool_call><function=f>\n</function>",
        "<function=f></function>",
    ],
)
def test_a_call_without_parameters(tokenizer, text):
    answer = read(tokenizer, text)
    assert ([call.name for call in answer.calls], arguments(answer), answer.content) == (["f"], [{}], "")


def test_calls_in_parallel_and_in_one_block(tokenizer):
    two = "<function=f>\n<parameter=count>\n1\n</parameter>\n</function>\n<function=g>\n</function>"
    answer = read(tokenizer, f"Both.\n{tagged(count='7')}\n<tool_call>\n{two}\n</tool_call>")
    assert [call.name for call in answer.calls] == ["f", "f", "g"]
    assert arguments(answer) == [{"count": 7}, {"count": 1}, {}]
    assert answer.content == "Both."
    assert len({call.id for call in answer.calls}) == 3


def test_a_call_without_the_marks_around_it(tokenizer):
    inner = "<function=f>\n<parameter=text>\nx </function> y\n</parameter>\n</function>"
    for text in (f"So:\n{inner}", f"So:\n{inner}\n</tool_call>", f"So:\n{inner}\n</tool_call>\n"):
        answer = read(tokenizer, text)
        assert (arguments(answer), answer.content) == ([{"text": "x </function> y"}], "So:")
    assert read(tokenizer, f"{inner} and on").content == "and on"


@pytest.fixture(scope="module")
def json_alone(tmp_path_factory):
    """A model whose template knows tools and no marks around calls."""
    template = TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "")
    return Tokenizer.load(write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny.gguf", template))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"count": 1}}', [{"count": 1}]),
        (' {"type": "function", "name": "f", "parameters": {}}\n', [{}]),
        ('{"type": "function", "function": {"name": "f", "arguments": "{}"}}', [{}]),
        ('[{"name": "f", "arguments": {"a": 1}},\n {"name": "f"}]', [{"a": 1}, {}]),
        ('<think>so</think>\n{ "name": "f" }', [{}]),
        ('<tool_call>{"name": "f"}</tool_call>', [{}]),
    ],
)
def test_an_answer_that_is_a_call_in_json(json_alone, text, calls):
    answer = read(json_alone, text)
    assert (arguments(answer), answer.content, answer.finish_reason) == (calls, "", "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann", "age": 5}',
        '{"name": "f"',
        '{"name": "f"} and words',
        '{"weather": "fine"}',
        "{",
        "[",
        "words",
        "[1]",
        "",
    ],
)
def test_json_that_is_no_call_is_content(json_alone, text):
    answer = read(json_alone, text)
    assert (answer.calls, answer.content) == ([], text)
    assert read(json_alone, '{"name": "f"}', tools=None).content == '{"name": "f"}'


def test_json_that_is_no_call_is_streamed(json_alone):
    parser = AnswerParser(tools=True, bare="json")
    assert [part.text for piece in ('{"wea', 'ther"', ': "fi') for part in parser.push(piece)] == [
        '{"wea',
        'ther"',
        ': "fi',
    ]


def test_the_function_form_may_hold_json(tokenizer):
    assert arguments(read(tokenizer, '<function=f>{"count": 1}</function>')) == [{"count": 1}]
    assert read(tokenizer, "<function=f>{count}</function>").calls == []


def test_a_template_of_the_other_form_takes_bare_functions_for_text(tmp_path):
    json_form = Tokenizer.load(write_tokenizer_model(tmp_path / "tiny.gguf"))
    assert read(json_form, "<function=f></function>").calls == []
    assert arguments(read(json_form, tagged(count="1"))) == [{"count": 1}]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n<parameter=text>\nx",
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>x</parameter> words </function>\n</tool_call>",
        "<tool_call>\n<function=f\n</tool_call>",
        "<tool_call>\n<function=f> words </function></tool_call>",
        "<tool_call><function=></function></tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "five"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "\\"five\\""}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        "<tool_call></tool_call>",
        "<function=f>\n<parameter=text>\nx",
    ],
)
def test_a_broken_or_cut_call_is_content(tokenizer, text):
    answer = read(tokenizer, text)
    assert (answer.calls, answer.content, answer.finish_reason) == ([], text, "stop")


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('""', {}),
        ('" "', {}),
        ("null", {}),
        ("{}", {}),
        ('"{}"', {}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_arguments_are_sent_as_an_object(tokenizer, written, sent):
    answer = read(tokenizer, f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>')
    assert arguments(answer) == [sent]
    assert arguments(read(tokenizer, '<tool_call>{"name": "f"}</tool_call>')) == [{}]
    assert len(read(tokenizer, '<tool_call>{"name": "f"}\n{"name": "f"}</tool_call>').calls) == 2


def test_a_call_within_thinking_is_none(tokenizer):
    answer = read(tokenizer, f"<think>\nI could {tagged(count='1')}\n</think>\n\n{tagged(count='2')}")
    assert arguments(answer) == [{"count": 2}]
    assert "<function=f>" in answer.reasoning


@pytest.mark.parametrize("seed", range(5))
def test_calls_do_not_depend_on_where_the_text_is_cut(seed):
    text = (
        f"a\n{tagged(text='b')}\n<function=f>\n<parameter=text>\n</function>\n</parameter></function></tool_call>\nend"
    )
    parser, chosen, parts = AnswerParser(tools=True, bare="function"), random.Random(seed), []
    while text:
        length = chosen.randint(1, 9)
        parts += parser.push(text[:length])
        text = text[length:]
    parts += parser.flush()
    calls = [json.loads(part.call.arguments) for part in parts if part.call]
    assert calls == [{"text": "b"}, {"text": "</function>"}]
    assert "".join(part.text for part in parts) == "aend"


def test_one_call_alone_where_calls_in_parallel_are_not_wanted(tokenizer):
    text = f"Yes.\n{tagged(count='1')}\n{tagged(count='2')}\nand words"
    for wish in ({"parallel_tool_calls": False}, {"tools": None, "functions": [TOOLS[0]["function"]]}):
        answer = read(tokenizer, text, **wish)
        assert (arguments(answer), answer.content, answer.finish_reason) == ([{"count": 1}], "Yes.", "tool_calls")
    assert len(read(tokenizer, text, parallel_tool_calls=True).calls) == 2


# --- Marks that are tokens ---


def test_a_mark_spelled_out_in_thinking_is_text_where_the_vocabulary_has_the_token(with_tokens):
    marks = given_child.MARKS
    think, end = 256 + marks.index("<think>"), 256 + marks.index("</think>")
    quoted = "It ends with </think>, and a call with <tool_call>."
    answer = answer_of(with_tokens, [think, *spelled(f"\n{quoted}\n"), end, *spelled("\n\nyes")])
    assert (answer.reasoning, answer.content) == (quoted, "yes")


def test_marks_spelled_out_in_content_are_text_where_the_vocabulary_has_the_tokens(with_tokens):
    for text in ("<think>so</think>yes", '<tool_call>{"name": "f"}</tool_call> x', "</think>"):
        answer = answer_of(with_tokens, spelled(text))
        assert (answer.content, answer.reasoning, answer.calls) == (text, "", [])


def test_the_end_of_a_call_may_be_quoted_in_it(with_tokens):
    call, end = (256 + given_child.MARKS.index(mark) for mark in ("<tool_call>", "</tool_call>"))
    inner = json.dumps({"name": "f", "arguments": {"text": "write </tool_call> here"}})
    assert arguments(answer_of(with_tokens, [call, *spelled(inner), end])) == [{"text": "write </tool_call> here"}]


def test_tokens_of_marks_inside_a_call_are_text_of_it(with_tokens):
    answer = read(with_tokens, tagged(text="<think>"))
    assert arguments(answer) == [{"text": "<think>"}]


def test_marks_that_the_prompt_spelled_out_are_read_in_either_way(tmp_path):
    plain = Tokenizer.load(write_tokenizer_model(tmp_path / "tiny.gguf", TEMPLATE.replace("tools", "others")))
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert arguments(read(plain, text)) == arguments(answer_of(plain, spelled(text))) == [{}]
    assert answer_of(plain, spelled("<think>a</think>")).reasoning == ""


def test_a_vocabulary_without_the_tokens_has_its_marks_searched_in_the_text(tmp_path):
    without = Tokenizer.load(write_tokenizer_model(tmp_path / "tiny.gguf", n_marks=3))
    answer = answer_of(without, spelled('<think>so</think>\n<tool_call>{"name": "f"}</tool_call>'))
    assert (answer.reasoning, arguments(answer)) == ("so", [{}])


@pytest.mark.parametrize("stop", ["</think>", "think>\n\ny", "\n</thi", ">\n\nyes"])
def test_stop_strings_see_tokens_of_marks_as_their_text(tokenizer, stop):
    text = "<think>\nso\n</think>\n\nyes"
    answer = read(tokenizer, text, stop=[stop], reasoning_format="none")
    assert (answer.content, answer.stop_word) == (text[: text.find(stop)], stop)
    answer = read(tokenizer, text, stop=[stop])
    assert answer.stop_word == stop
    assert answer.reasoning.startswith("so")
    assert "yes" not in answer.content


def test_a_stop_string_that_is_a_mark_of_turns_stops_at_its_token(with_tokens):
    start = given_child.MARKS.index("<|im_start|>") + 256
    ids = [*spelled("one"), start, *spelled("two")]
    answer = answer_of(with_tokens, ids, stop=["<|im_start|>"])
    assert (answer.content, answer.stop_word) == ("one", "<|im_start|>")
    assert answer_of(with_tokens, ids).content == "onetwo"
    assert answer_of(with_tokens, ids, skip_special_tokens=False).content == "one<|im_start|>two"


def test_a_token_that_ends_the_answer_by_its_id_is_not_shown(with_tokens):
    body = {"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [33]}
    assert "stop=33,257,258" in httpchat.read_chat(body, with_tokens, N_CTX).line(with_tokens.end_ids).split(" ")
    assert answer_of(with_tokens, spelled("yes!"), stop_token_ids=[33]).content == "yes"
