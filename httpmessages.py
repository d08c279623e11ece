"""The messages and tools of a chat in the form that templates are written for, and where the answer goes on.

Owns what a message may hold, the older names of tools, and the last message that is continued. Refuses to know tokens
and sampling. Invariant: what this server writes into an answer is accepted when it comes back as a message.

Read next: ``httpchat.py``, which renders what is read here; ``httptools.py`` for the markup of calls.
"""

import itertools
import json
import secrets
from typing import NamedTuple

from httpanswer import END_THINK, THINK
from httpfields import BadField, optional, shown
from httptools import call_text, description, load_json

# The kinds of parts whose text is a message's, and the field that holds it.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Fields of a message that are written anew where there is something in them.
OWN_FIELDS = ("tool_calls", "function_call")
DESCRIBED = "tools: the chat template of this model has no place for them, so the system text describes them"


class Tools(NamedTuple):
    """The tools that the model may call."""

    offered: list[dict]
    one_call: bool = False  # no more than one call in an answer
    legacy: bool = False  # the client knows `functions` and `function_call`
MAX_SAID, MAX_WORDS = 400, 80  # characters that are looked at for a label, and those of one


class Chat(NamedTuple):
    """What the template is given, and how its text ends."""

    messages: list[dict]
    tools: list[dict] | None  # for the template
    begins: bool  # the template opens a new turn
    mark: str = ""  # stands where the last message is to be continued
    thinking: bool = False  # in its thinking
    notices: tuple[str, ...] = ()

    def cut(self, rendered):
        """The tokenizer's Prompt up to where it is to be continued; raises BadField."""
        if not self.mark:
            return rendered
        before = rendered.before(self.mark)
        if before is None:
            last = len(self.messages) - 1
            raise BadField(f"messages[{last}]", "the chat template of this model does not show what is to be continued")
        return before


def read_chat_body(body: dict, template: str) -> Chat:
    """Messages and tools of a body for a template; raises BadField."""
    tools, messages, notices = read_tools(body).offered, _messages(body), ()
    if "tools" not in template:
        messages = _with_tools_as_text(messages, tools)
        tools, notices = [], (DESCRIBED,) if tools else ()
    continued, begins = _end(body, messages)
    if continued and len(messages) > 1 and not (messages[-1]["content"] or messages[-1].get("reasoning_content")):
        # An answer of which nothing is there yet is a turn that begins.
        messages, continued, begins = messages[:-1], False, True
    chat = Chat(messages, tools or None, begins, notices=notices)
    return _continued(chat, template) if continued else chat


# --- Tools ---


def read_tools(body: dict) -> Tools:
    """The tools that the model may call; raises BadField where a call would have to be forced."""
    tools, functions = optional(body, "tools", list, []), optional(body, "functions", list, [])
    legacy = bool(functions)
    if tools and legacy:
        raise BadField("functions", "it is the older name of tools; give one of them")
    for name in ("tool_choice", "function_call"):
        if body.get(name) not in (None, "auto", "none"):
            raise BadField(name, "only 'auto' and 'none' are supported; a call cannot be forced")
    if not all(isinstance(tool, dict) for tool in tools + functions):
        raise BadField("functions" if legacy else "tools", "expected a list of objects")
    one_call = legacy or not optional(body, "parallel_tool_calls", bool, True)
    tools = [{"type": "function", "function": function} for function in functions] if legacy else tools
    chosen = body.get("function_call" if legacy else "tool_choice")
    return Tools([] if chosen == "none" else tools, one_call, legacy)


def _with_tools_as_text(messages: list[dict], tools: list[dict]) -> list[dict]:
    """The same chat for a template that has no place for tools, calls and their results."""
    written: list[dict] = []
    for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
        if role == "tool":
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            written.append({"role": "user", "content": "\n".join(results)})
        else:
            written += map(_with_calls_as_text, group)
    if not tools:
        return written
    has_system = written[0]["role"] == "system"
    first = written[0] if has_system else {"role": "system", "content": ""}
    text = f"{first['content']}\n\n{description(tools)}".lstrip()
    return [first | {"content": text}, *written[has_system:]]


def _with_calls_as_text(message: dict) -> dict:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    texts = [call_text(function["name"], function["arguments"]) for function in functions]
    if not texts:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": "\n".join([message["content"], *texts] if message["content"] else texts)}


# --- Messages ---


def first_words(messages: list[dict]) -> str:
    """The start of what a user said first, on one line: by this a person knows a conversation again."""
    return label_of(next((message["content"] for message in messages if message["role"] == "user"), ""))


def label_of(text: str) -> str:
    """The start of a text on one line, cut between two words."""
    words = " ".join(text[:MAX_SAID].split())
    return words if len(words) <= MAX_WORDS else words[:MAX_WORDS].rsplit(" ", 1)[0] + "…"


def _messages(body: dict) -> list[dict]:
    """The messages in the form that templates are written for: text content, tool arguments as objects."""
    messages = optional(body, "messages", list, [])
    if not messages:
        raise BadField("messages", "expected a list of messages that is not empty")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: object) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadField(name, "expected an object with a role")
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    calls, content = _calls(name, message), message.get("content")
    if content is None and role not in ("assistant", "tool") and not calls:
        raise BadField(f"{name}.content", "it is missing")
    text = _result if role == "tool" else _text
    # A field that is null is left out, as templates ask whether a field is there.
    message = {key: value for key, value in message.items() if value is not None and key not in OWN_FIELDS}
    message |= {"role": role, "content": text(f"{name}.content", content)}
    if isinstance(message.get("refusal"), str) and not message["content"]:
        message["content"] = message["refusal"]
    if thinking := _thinking(name, message):
        message["reasoning_content"] = thinking
    return message | ({"tool_calls": calls} if calls else {})


def _thinking(name: str, message: dict) -> str:
    """The thinking that is sent back, under either of its names."""
    for field in ("reasoning_content", "reasoning"):
        if field in message:
            value = message.pop(field)
            if isinstance(value, str):
                return value
            if field == "reasoning_content":
                raise BadField(f"{name}.{field}", f"expected a text, found {shown(value)}")
    return ""


def _text(name: str, content: object) -> str:
    """The text of a message, from a text or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(name, "expected a text or a list of parts")
    return "\n".join(_part(name, part) for part in content)


def _part(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise BadField(name, f"a part of type {shown(kind)}: only text is supported by this engine")
    return text


def _result(name: str, content: object) -> str:
    """What a tool gave back: text, parts, or any other JSON, which the model reads as such."""
    is_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    if content is None or isinstance(content, str) or is_parts:
        return _text(name, content)
    try:
        return json.dumps(content, ensure_ascii=False)
    except RecursionError:
        raise BadField(name, "it is too deep") from None


def _calls(name: str, message: dict) -> list[dict]:
    """The calls of an earlier turn, under either of their names."""
    calls, call = optional(message, "tool_calls", list, []), optional(message, "function_call", dict, None)
    if call and not calls:
        calls = [{"type": "function", "function": call}]
    return [_call(f"{name}.tool_calls", call) for call in calls]


def _call(name: str, call: object) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadField(name, "expected objects with a function that has a name")
    arguments = _past_arguments(function.get("arguments"))
    return call | {"function": {"name": function["name"], "arguments": arguments}}


def _past_arguments(arguments: object) -> dict:
    """Arguments are JSON text on the wire and an object in templates, which name each; others get a name here."""
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            pass  # a text that is no JSON stays one
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


# --- Where the answer goes on ---


def _end(body: dict, messages: list[dict]) -> tuple[bool, bool]:
    """Whether the last message is continued, and whether a new turn is opened; raises BadField for both at once."""
    continued = optional(body, "continue_final_message", bool, None)
    begins = optional(body, "add_generation_prompt", bool, None)
    is_answer = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if continued and begins:
        raise BadField("continue_final_message", "it excludes add_generation_prompt, which opens another turn")
    if continued and not is_answer:
        raise BadField("continue_final_message", "the last message is no text of the assistant, so none goes on")
    if continued is None:
        continued = is_answer and not begins
    return continued, not continued and begins is not False


def _continued(chat: Chat, template: str) -> Chat:
    """The chat with a mark at the end of its last message: templates close each turn, and the text is cut there."""
    *before, last = chat.messages
    # No message holds the mark, as it is new.
    mark, content, thinking = f"[cut {secrets.token_hex(16)}]", last["content"], last.get("reasoning_content", "")
    if not thinking and content.lstrip().startswith(THINK) and END_THINK not in content:
        content, thinking = "", content.lstrip().removeprefix(THINK).lstrip("\n")
    in_thinking = bool(thinking) and not content
    if not in_thinking:
        last = last | {"content": content + mark}
    elif "reasoning_content" in template:
        last = last | {"content": "", "reasoning_content": thinking + mark}
    else:  # the template knows no thinking, so the answer held it as the model wrote it
        last = last | {"content": f"{THINK}\n{thinking}{mark}"}
    return chat._replace(messages=[*before, last], mark=mark, thinking=in_thinking)
