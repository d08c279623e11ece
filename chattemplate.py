"""Messages to the text that a model was trained on, through the chat template in its file.

It owns the names that templates are written against, and the seal: what a request says never becomes a mark of the
template, however the two are put together. It knows no token ids. Invariant: the same messages give the same text, but
for the clock, and which times the clock told is said. Read next: tokenizer.py, which cuts the text at its marks.
"""

import datetime
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# One of these stands inside what would be a mark in a string of the request, until the marks are found.
PRIVATE_USE = range(0xE000, 0xF900)
# Templates spell marks with these, as in '<|' + role + '|>'.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "observation"})
SEED = 0


class TemplateFault(Exception):
    """A template that cannot be compiled, or that refused the messages; one line."""


class Rendered(NamedTuple):
    """What a template wrote. ``seal`` stands in ``text`` inside of what only looks like a mark; it may be empty.

    ``clock`` has the time that was told for each format.
    """

    text: str
    seal: str
    clock: dict[str, str]


class ChatTemplate:
    """A compiled template; ``marks`` are the spellings that the template alone may write."""

    def __init__(self, source: str, marks: Iterable[str]):
        environment = _chat_environment()
        environment.globals["strftime_now"] = self._tell_time
        environment.filters["tojson"] = self._to_json
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateFault(f"the model's chat template cannot be compiled: {error}") from error
        self._source = source
        self._sealer = Sealer(marks, tree)
        self._seal = ""
        self._clock: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def render(self, trusted: dict, asked: dict, *, kept: tuple[str, ...] = (), clock: dict | None = None) -> Rendered:
        """The text for the names in ``asked``, which come from a request, and in ``trusted``, which do not.

        ``kept`` are marks that the assistant's own words may hold; ``clock`` has times to tell instead of the present.
        """
        try:
            asked, self._seal = self._sealer.seal(asked, self._source, kept)
            self._clock, self._told = clock or {}, {}
            with _SameChances():
                text = self._template.render(trusted | asked)
        except (TemplateFault, MemoryError):
            raise
        except Exception as error:  # a template is a program of its own and fails in its own ways
            raise TemplateFault(f"the model's chat template refused these messages: {error}") from error
        return Rendered(text, self._seal, self._told)

    def _tell_time(self, form: str) -> str:
        value = self._clock.get(form)
        self._told[form] = datetime.datetime.now().strftime(form) if value is None else value
        return self._told[form]

    def _to_json(self, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        """JSON as it is: jinja2's own filter escapes it for HTML pages, which no model was trained on."""
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        if not ensure_ascii:
            return text
        return re.sub(f"[^\x00-\x7f{self._seal}]", lambda found: json.dumps(found[0])[1:-1], text)


class _SameChances:
    """The `random` filter and `lipsum` choose alike in every rendering, or no prompt would go on with the last one."""

    def __enter__(self) -> None:
        self._state = random.getstate()
        random.seed(SEED)

    def __exit__(self, *_) -> None:
        random.setstate(self._state)


# --- The seal ---


class Sealer:
    """Puts a character into strings of a request wherever a mark could begin, so that none is spelled by them.

    What the template itself looks for in messages is left whole, unless it could be part of a mark.
    """

    def __init__(self, marks: Iterable[str], tree: nodes.Template):
        self._marks = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._literals = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        firsts = "".join(sorted({mark[0] for mark in self._marks}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else None
        self._looked_for = [word for word in self._literals if self._harmless(word)]
        written = self._literals | {node.data for node in tree.find_all(nodes.TemplateData)}
        self._tails = self._open_tails(written)
        self._tail_starts = {tail[:length] for tail in self._tails for length in range(1, len(tail) + 1)}
        self._patterns: dict[tuple[str, ...], re.Pattern] = {}

    def _harmless(self, word: str) -> bool:
        """A mark could begin in it, to judge by its characters, and does not."""
        if not self._first:
            return False
        starts = [word[found.start() :] for found in self._first.finditer(word)]
        related = (mark.startswith(start) or start.startswith(mark) for start in starts for mark in self._marks)
        return bool(starts) and not any(related)

    def _open_tails(self, written: set[str]) -> tuple[str, ...]:
        """The rests of marks whose beginning ends a piece of the template, as '<|' does in '<|' + role + '|>'."""
        longest = max(map(len, self._marks), default=0)
        endings = {text[-length:] for text in written for length in range(1, min(len(text), longest) + 1)}
        cuts = ((mark[:length], mark[length:]) for mark in self._marks for length in range(1, len(mark)))
        return tuple({rest for beginning, rest in cuts if beginning in endings})

    def seal(self, asked: dict, source: str, kept: tuple[str, ...]) -> tuple[dict, str]:
        """The same values with the seal in their strings, and the seal: empty where no string needed one."""
        if not self._first or not any(self._needs_seal(text) for text in _strings(asked)):
            return asked, ""
        seal = _free_character(source, asked)
        plain = lambda text: self._sealed(text, seal, ())  # noqa: E731
        sealed = {_map_strings(name, plain): _map_strings(value, plain) for name, value in asked.items()}
        if isinstance(asked.get("messages"), list):
            sealed["messages"] = [self._message(message, seal, kept, plain) for message in asked["messages"]]
        return sealed, seal

    def _needs_seal(self, text: str) -> bool:
        return bool(self._first.search(text)) or self._goes_on(text)

    def _goes_on(self, text: str) -> bool:
        return text in self._tail_starts or text.startswith(self._tails)

    def _message(self, message: dict, seal: str, kept: tuple[str, ...], plain: Callable[[str], str]) -> dict:
        sealed = _map_strings(message, plain)
        role, content = message.get("role"), message.get("content")
        if role in ROLES or role in self._literals:
            sealed["role"] = role
        if role == "assistant" and isinstance(content, str):
            sealed["content"] = self._sealed(content, seal, kept)
        return sealed

    def _sealed(self, text: str, seal: str, kept: tuple[str, ...]) -> str:
        if kept not in self._patterns:
            words = sorted([*self._looked_for, *kept], key=len, reverse=True)
            self._patterns[kept] = re.compile("|".join([*map(re.escape, words), self._first.pattern]))
        body = self._patterns[kept].sub(
            lambda found: found[0] + (seal if len(found[0]) == 1 and found[0] not in kept else ""), text
        )
        return seal + body if self._goes_on(text) else body


def _strings(value: object) -> Iterator[str]:
    """Every string in a JSON value, keys too."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


def _map_strings(value, change: Callable[[str], str]):
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(one, change) for one in value]
    return value


def _free_character(source: str, asked: dict) -> str:
    """A character that occurs nowhere in the template and the request."""
    used = {char for char in source if ord(char) in PRIVATE_USE}
    for text in _strings(asked):
        if not text.isascii():
            used.update(re.findall(f"[{chr(PRIVATE_USE[0])}-{chr(PRIVATE_USE[-1])}]", text))
    free = next((char for char in map(chr, PRIVATE_USE) if char not in used), None)
    if free is None:
        raise TemplateFault("the messages use every character for private use; leave out one of them")
    return free


# --- The names and settings that templates are written against ---


def _chat_environment() -> ImmutableSandboxedEnvironment:
    """A sandbox, since a template is a program that came with a model file."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _raise_exception(message: str):
    raise TemplateFault(f"the model's chat template refused these messages: {message}")
