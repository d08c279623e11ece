"""Messages as clients send them: tools for templates without a place for them, our own answers, an unfinished one."""

import itertools
import json

import pytest

import httpchat
from given_front import TEMPLATE, write_tokenizer_model
from httpfields import ApiError
from httpmessages import first_words
from tokenizer import Tokenizer
from verbs import Done

N_CTX = 4096
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "why?"}
PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "[{{ message.role }}]{{ message.content | trim }}</s>{% endfor %}"
)
# Thinking apart from the content, which is trimmed; arguments by their names; no field that is asked for unguarded.
THINKING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% set words = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "<think>\n{{ (message.reasoning_content or '').strip('\\n') }}\n</think>\n\n{{ words.strip() }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TEMPLATES = {"tools": TEMPLATE, "plain": PLAIN_TEMPLATE, "thinking": THINKING_TEMPLATE}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    templates = TEMPLATES | {"strict": STRICT_TEMPLATE}
    return {
        name: Tokenizer.load(write_tokenizer_model(folder / f"{name}.gguf", template))
        for name, template in templates.items()
    }


def render(tokenizer, *messages: dict, **fields) -> str:
    return httpchat.render_chat({"messages": list(messages), **fields}, tokenizer)


def refusal(tokenizer, *messages: dict, **fields) -> str:
    with pytest.raises(ApiError) as caught:
        httpchat.read_chat({"messages": list(messages), **fields}, tokenizer, N_CTX)
    assert caught.value.status == 400
    return str(caught.value)


# --- Tools and a template without a place for them ---


def test_tools_are_described_to_a_template_without_a_place_for_them(tokenizers):
    for messages in ([USER], [{"role": "system", "content": "Be brief."}, USER]):
        text = render(tokenizers["plain"], *messages, tools=[TOOL])
        assert text.count("<|im_start|>system\n") == 1
        assert json.dumps(TOOL) in text
        assert "<tool_call>" in text
        assert ("Be brief." in text) == (len(messages) == 2)
    request = httpchat.read_chat({"messages": [USER], "tools": [TOOL]}, tokenizers["plain"], N_CTX)
    assert request.tools
    assert len(request.notices) == 1
    assert request.notices[0].startswith("tools: ")
    assert request.notices[0].isascii()


@pytest.mark.parametrize("wish", [{"tools": []}, {"tools": None}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_to_call_nothing_is_described(tokenizers, wish):
    assert render(tokenizers["plain"], USER, **wish) == render(tokenizers["plain"], USER)
    assert httpchat.read_chat({"messages": [USER], **wish}, tokenizers["plain"], N_CTX).notices == ()


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "add"}}, 1, ""])
@pytest.mark.parametrize("name", ["tool_choice", "function_call"])
def test_a_call_that_is_forced_stays_an_error(tokenizers, name, choice):
    for tokenizer in tokenizers.values():
        assert f"{name}: " in refusal(tokenizer, USER, tools=[TOOL], **{name: choice})


def test_calls_and_results_of_earlier_turns_are_text_for_a_plain_template(tokenizers):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": "1", "content": "3"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call, call]}, result, result, USER]
    text = render(tokenizers["plain"], *messages)
    assert text.count('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>') == 2
    assert (
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>" in text
    )
    assert "<|im_start|>tool" not in text
    assert "<tool_response>" in render(tokenizers["strict"], *messages[:-1])


def test_functions_are_the_older_name_of_tools(tokenizers):
    old = {"functions": [TOOL["function"]], "function_call": "auto"}
    assert render(tokenizers["tools"], USER, **old) == render(tokenizers["tools"], USER, tools=[TOOL])
    assert render(tokenizers["tools"], USER, **old | {"function_call": "none"}) == render(tokenizers["tools"], USER)
    assert "functions: " in refusal(tokenizers["tools"], USER, tools=[TOOL], functions=[TOOL["function"]])
    assert "functions: " in refusal(tokenizers["tools"], USER, functions=["add"])


# --- What we send we accept ---


def answers() -> list[httpchat.Answer]:
    done = Done(*[5, 9, 10.0, 20.0, "stop", 0, 0, 4, 1, 2, 0, 0, 0.0, 5, 0])
    calls = [[], [httpchat.ToolCall("call_1", "add", "{}")], [httpchat.ToolCall("call_1", "", '{"a": [null]}')] * 2]
    kinds = itertools.product(["", "yes", "<tool_call>{"], ["", "so"], calls, ["stop", "length"])
    return [
        httpchat.Answer(content, reasoning, called, [], None, done._replace(finish=finish))
        for content, reasoning, called, finish in kinds
    ]


def streamed(dialect: httpchat.ChatDialect, answer: httpchat.Answer) -> dict:
    """The message that a client puts together from the deltas of a stream."""
    parts = [httpchat.Part("reasoning", answer.reasoning)] if answer.reasoning else []
    parts += [httpchat.Part("content", answer.content)] if answer.content else []
    parts += [httpchat.Part("tool_call", "", call) for call in answer.calls]
    events = [*dialect.first(), *(dialect.part(part, []) for part in parts), *dialect.last(answer)]
    message: dict = {}
    for event in events:
        for name, value in event["choices"][0]["delta"].items():
            joins = name in message and name not in ("role", "function_call")
            message[name] = message[name] + value if joins else value
    return message


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("legacy", [False, True])
def test_every_answer_is_accepted_as_a_message(tokenizers, template, legacy):
    request = httpchat.GenerationRequest([1], 9, {}, legacy_call=legacy)
    for answer in answers():
        dialect = httpchat.ChatDialect(request, "tiny")
        whole, other = dialect.whole(answer)["choices"][0]["message"], streamed(dialect, answer)
        # The openai package adds its own fields, empty.
        typed = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None} | whole
        for message in (whole, other, typed, json.loads(json.dumps(typed))):
            results = [{"role": "tool", "content": "3"}] * bool(answer.calls)
            for messages in ([USER, message], [USER, message, *results, USER]):
                for tools in ([], [TOOL]):
                    body = {"messages": messages, "tools": tools}
                    assert httpchat.read_chat(body, tokenizers[template], N_CTX).ids


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ("", {}),
        ("  ", {}),
        (None, {}),
        ("null", {}),
        ("{}", {}),
        ({}, {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("[1]", {"arguments": [1]}),
        ([1], {"arguments": [1]}),
        ('"five"', {"arguments": "five"}),
        ("five", {"arguments": "five"}),
        ("5", {"arguments": 5}),
        (5, {"arguments": 5}),
        ("{", {"arguments": "{"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
        ("NaN", {"arguments": "NaN"}),
        (False, {"arguments": False}),
    ],
)
def test_arguments_of_every_kind_reach_the_template_as_an_object(tokenizers, template, arguments, seen):
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    text = render(tokenizers[template], USER, called, USER)
    if template == "thinking":
        assert all(f"<parameter={name}>" in text for name in seen)
        assert ("<parameter=" in text) == bool(seen)
    else:
        assert json.dumps({"name": "add", "arguments": seen}) in text
    without = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    assert "add" in render(tokenizers[template], USER, without, USER)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant", "content": ""}, ""),
        ({"role": "assistant", "content": []}, ""),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "assistant", "content": None, "tool_calls": None, "function_call": None}, ""),
        ({"role": "assistant", "content": None, "refusal": "I will not."}, "I will not."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}, "Yes."),
        ({"role": "assistant", "content": "Yes.", "reasoning_content": None}, "Yes."),
        ({"role": "assistant", "content": "Yes.", "reasoning_content": ""}, "Yes."),
        ({"role": "assistant", "content": "Yes.", "name": None, "audio": None}, "Yes."),
        ({"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": ""}}, "add"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, "b"]}, "a\nb"),
        ({"role": "user", "content": [{"text": "a"}], "name": "Ann"}, "a"),
        ({"role": "tool", "content": None}, ""),
        ({"role": "tool"}, ""),
        ({"role": "tool", "content": {"sum": 3}}, '{"sum": 3}'),
        ({"role": "tool", "content": [1, "é"]}, '[1, "é"]'),
        ({"role": "tool", "content": []}, ""),
        ({"role": "tool", "content": 3}, "3"),
        ({"role": "tool", "content": False}, "false"),
        ({"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": None}, "a"),
        ({"role": "function", "name": "add", "content": "3"}, "3"),
    ],
)
def test_messages_of_every_kind_are_read(tokenizers, template, message, shown):
    assert shown in render(tokenizers[template], USER, message, USER)


def test_thinking_under_its_other_name_reaches_the_template(tokenizers):
    message = {"role": "assistant", "content": "yes", "reasoning": "so"}
    assert "<think>\nso\n</think>\n\nyes" in render(tokenizers["tools"], USER, message, USER)


def test_images_and_calls_without_names_are_refused(tokenizers):
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for role in ("user", "assistant", "tool"):
        assert "image_url" in refusal(tokenizers["tools"], USER, {"role": role, "content": [image]})
    for call in ({}, {"function": {}}, {"function": {"name": 5}}, 5, None):
        assert "tool_calls" in refusal(tokenizers["tools"], USER, {"role": "assistant", "tool_calls": [call]})
    for value in (5, "x", {"a": 1}):
        assert "tool_calls" in refusal(tokenizers["tools"], USER, {"role": "assistant", "tool_calls": value})
    for value in (5, ["so"], False):
        message = {"role": "assistant", "content": "yes", "reasoning_content": value}
        assert "messages[1].reasoning_content" in refusal(tokenizers["tools"], USER, message)


# --- An answer that goes on ---

BEGUN = {"role": "assistant", "content": "Because it"}


@pytest.mark.parametrize("template", [*TEMPLATES, "strict"])
@pytest.mark.parametrize("wish", [{}, {"continue_final_message": True}, {"add_generation_prompt": False}])
def test_a_last_message_of_the_assistant_is_continued(tokenizers, template, wish):
    text = render(tokenizers[template], USER, BEGUN, **wish)
    assert text.endswith("Because it")
    closed = render(tokenizers[template], USER, BEGUN, continue_final_message=False, add_generation_prompt=False)
    assert closed.startswith(text)
    assert closed != text


@pytest.mark.parametrize("content", ["Because ", "Because\n\n", "  code:\n    ", "a</think>b", "{% raw %}", "[cut"])
def test_what_is_continued_keeps_its_last_blanks(tokenizers, content):
    for template, tokenizer in tokenizers.items():
        text = render(tokenizer, USER, BEGUN | {"content": content})
        last = content.split("</think>")[-1] if template == "thinking" else content
        assert text.endswith(last.lstrip() if template not in ("tools", "plain") else last)


def test_a_new_turn_where_it_is_asked_for(tokenizers):
    opened = "Because it<|im_end|>\n<|im_start|>assistant\n"
    for wish in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert render(tokenizers["plain"], USER, BEGUN, **wish).endswith(opened)


def test_an_answer_of_which_nothing_is_there_begins(tokenizers):
    for template in TEMPLATES:
        for content in ("", None, []):
            empty = {"role": "assistant", "content": content}
            assert render(tokenizers[template], USER, empty) == render(tokenizers[template], USER)


def test_a_call_is_no_answer_that_goes_on(tokenizers):
    called = {"role": "assistant", "content": "Yes.", "tool_calls": [{"function": {"name": "add"}}]}
    assert render(tokenizers["tools"], USER, called).endswith("<|im_start|>assistant\n")


def test_thinking_goes_on_where_it_was_cut(tokenizers):
    apart = {"role": "assistant", "content": "", "reasoning_content": "first, "}
    inside = {"role": "assistant", "content": "<think>\nfirst, "}
    for template, message in itertools.product(TEMPLATES, (apart, inside)):
        body = {"messages": [USER, message]}
        assert render(tokenizers[template], *body["messages"]).endswith("<think>\nfirst, ")
        request = httpchat.read_chat(body, tokenizers[template], N_CTX)
        reader = httpchat.AnswerReader(request, tokenizers[template])
        for token_id in tokenizers[template].encode(" so\n</think>\n\nyes", special=True):
            reader.push(token_id)
        reader.finish(Done(*[5, 9, 10.0, 20.0, "stop", 0, 0, 4, 1, 2, 0, 0, 0.0, 5, 0]))
        assert (reader.answer.reasoning, reader.answer.content) == (" so", "yes")


@pytest.mark.parametrize(
    ("messages", "wish", "name"),
    [
        ([USER, BEGUN], {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ([USER], {"continue_final_message": True}, "continue_final_message"),
        ([USER, BEGUN | {"tool_calls": [{"function": {"name": "f"}}]}], {"continue_final_message": True}, "continue_f"),
        ([USER, BEGUN], {"continue_final_message": "yes"}, "continue_final_message"),
        ([USER, BEGUN], {"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_wishes_that_exclude_each_other_are_refused(tokenizers, messages, wish, name):
    assert name in refusal(tokenizers["tools"], *messages, **wish)


def test_a_template_that_hides_the_last_message_is_named(tmp_path):
    hiding = Tokenizer.load(write_tokenizer_model(tmp_path / "tiny.gguf", "{{ messages[0].content }}"))
    assert "messages[1]" in refusal(hiding, USER, BEGUN)


@pytest.mark.parametrize(
    ("said", "label"),
    [
        ("hi", "hi"),
        ("  two\nlines\t here ", "two lines here"),
        ("word " * 40, "word " * 15 + "word…"),
        ("x" * 300, "x" * 80 + "…"),
        ("", ""),
    ],
)
def test_a_conversation_is_known_by_what_was_said_first(said, label):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": said}]
    assert first_words([*messages, {"role": "user", "content": "more"}]) == label
