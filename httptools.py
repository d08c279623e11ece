"""The markup that models put around their calls of tools, and calls with arguments of the types that a tool asks for.

Owns the forms of a call: a JSON object with name and arguments, and `<function=NAME>` with `<parameter=NAME>` or JSON
inside, both between `<tool_call>` and `</tool_call>`; and which of them a template lets come without these marks.
Refuses to know streams, requests and HTTP. Invariant: the arguments of a call are a JSON object; markup that cannot be
read as such is no call, and the caller shows it as it is.

Read next: ``httpanswer.py``, which finds the markup in a growing answer; ``httpmessages.py``, which reads past calls.
"""

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import NamedTuple

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
# How an answer that is a call in JSON begins, less its blanks.
JSON_STARTS = tuple(f'{bracket}{{"{word}"' for bracket in ("", "[") for word in ("name", "type", "function"))
# An end mark counts where nothing else may follow, so that a value may quote one.
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*(?=<function=|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_JSON_TYPES = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    str: ("string",),
    type(None): ("null",),
}
# How a model is told to call tools whose own template has no place for them.
_ADVICE = """# Tools

You may call functions. Each line between <tools> and </tools> describes one, with a JSON Schema of its arguments:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as one JSON object between these marks:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
The result comes back between <tool_response> and </tool_response>. Where no function helps, answer in plain words."""


class ToolCall(NamedTuple):
    """A call that the model asks for; ``arguments`` is JSON text, as the OpenAI dialect has it."""

    id: str
    name: str
    arguments: str


def read_calls(text: str, schemas: Mapping[str, object]) -> list[ToolCall]:
    """The calls in the text between the marks, none if it cannot be read; ``schemas`` are those of the arguments."""
    try:
        if text.lstrip().startswith(FUNCTION):
            calls = [(name, _arguments(body, schemas.get(name))) for name, body in _pieces(_FUNCTION, text)]
        else:
            values = [one for value in _json_values(text) for one in (value if isinstance(value, list) else [value])]
            calls = [_json_call(value) for value in values]
        return [ToolCall(f"call_{secrets.token_hex(12)}", name, _to_json(arguments)) for name, arguments in calls]
    except (ValueError, RecursionError):
        return []


def bare_form(template: str) -> str:
    """The form in which models of this template write calls without marks around them, if they do.

    Those of the function form leave the marks out at times. The template of others asks for nothing but JSON.
    """
    if FUNCTION in template:
        return "function"
    return "json" if "tools" in template and CALL not in template else ""


def schemas_of(tools: list[dict]) -> dict[str, object]:
    """The schema of its arguments for each tool that has one."""
    functions = [tool.get("function", tool) for tool in tools]
    return {
        function["name"]: function.get("parameters")
        for function in functions
        if isinstance(function, dict) and isinstance(function.get("name"), str)
    }


def description(tools: list[dict]) -> str:
    """Tools in plain words, with the form of a call that is read here."""
    return _ADVICE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def call_text(name: str, arguments: object) -> str:
    """A call in the markup that the description asks for."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL}\n{call}\n{END_CALL}"


# --- JSON ---


def _json_call(value: object) -> tuple[str, dict]:
    """Name and arguments of a call; ValueError if it is none."""
    value = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = load_json(arguments) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("arguments that have no names")
    return value["name"], arguments


def _json_values(text: str) -> Iterator[object]:
    """The JSON values that stand one behind the other in a text, at least one."""
    decoder, text = json.JSONDecoder(parse_float=_finite, parse_constant=_refused), text.strip()
    while True:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip()
        if not text:
            return


def load_json(text: str) -> object:
    """A JSON value of finite numbers; raises ValueError or RecursionError."""
    return json.loads(text, parse_float=_finite, parse_constant=_refused)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"no float can hold {text[:40]}")
    return value


def _refused(word: str):
    raise ValueError(f"{word} is not JSON")


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- Functions and parameters ---


def _pieces(pattern: re.Pattern, text: str) -> Iterator[tuple[str, str]]:
    """Name and body of each piece of markup; ValueError if the text is not made of these alone."""
    at = 0
    while at < len(text) or not at:
        piece = pattern.match(text, at)
        if not piece:
            raise ValueError("markup that is broken or cut")
        yield piece[1].strip(), piece[2]
        at = piece.end()


def _arguments(body: str, schema: object) -> dict[str, object]:
    """The parameters of a call, each in the type that the tool's schema gives it."""
    if body.lstrip().startswith("{"):
        return _json_call({"name": "", "arguments": body})[1]
    if not body.strip():
        return {}
    kinds = schema.get("properties") if isinstance(schema, dict) else None
    kinds = kinds if isinstance(kinds, dict) else {}
    return {name: _typed(_value(text), _types(kinds.get(name), schema)) for name, text in _pieces(_PARAMETER, body)}


def _value(text: str) -> str:
    """The text of a parameter without the line breaks that stand beside its marks."""
    return text.removeprefix("\n").removesuffix("\n")


def _typed(text: str, types: set[str]) -> object:
    """The value that a text stands for; the text itself where no type fits it or none is known."""
    word = text.strip()
    if not types - {"string"}:
        return text
    if "null" in types and (word == "null" or (word == "None" and "string" not in types)):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        value = load_json(word)
    except (ValueError, RecursionError):
        return text
    if type(value) is float and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    return value if type(value) is not str and types.intersection(_JSON_TYPES[type(value)]) else text


def _types(schema: object, root: object) -> set[str]:
    """The JSON types that a schema admits; empty where it says nothing of them."""
    waiting, seen, types = [schema], set(), set()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        kind = one.get("type")
        types.update(word for word in (kind if isinstance(kind, list) else [kind]) if isinstance(word, str))
        for word in ("anyOf", "oneOf", "allOf"):
            waiting += one[word] if isinstance(one.get(word), list) else []
        waiting.append(_referred(one.get("$ref"), root))
        if kind is None:
            types |= _implied(one)
    return types


def _implied(schema: dict) -> set[str]:
    """The types that follow from other words of a schema than ``type``."""
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    types = {_JSON_TYPES[type(value)][0] for value in values}
    return types | {kind for word, kind in (("properties", "object"), ("items", "array")) if word in schema}


def _referred(reference: object, root: object) -> object:
    """What a reference into the same schema names; None where it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        root = root.get(step) if isinstance(root, dict) else None
    return root
