"""The text of an answer, as it grows, cut into what a client is to see: content, reasoning, tool calls.

Owns stop strings and the markup that models put around their thinking and their tool calls. Refuses to know tokens,
requests and HTTP. Invariant: joined, the parts are the text, less the markup and the blanks beside it; a text that only
looks like markup is content, and nothing is shown before it is known not to be the start of a mark.

Read next: ``chatapi.py``, which puts the parts into answers.
"""

import json
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
MARKS = (THINK, END_THINK, CALL, END_CALL)


class ToolCall(NamedTuple):
    """A call that the model asks for; ``arguments`` is JSON text, as the OpenAI dialect has it."""

    id: str
    name: str
    arguments: str


class Part(NamedTuple):
    """A piece of an answer: ``kind`` is content, reasoning or tool_call."""

    kind: str
    text: str
    call: ToolCall | None = None


def _held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may be the start of a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(len(text), longest), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class StopStrings:
    """Lets text through up to the first stop string, also one that comes in pieces."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What of the text so far is safe to show; nothing once a stop string was ``found``."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if hits:
            start, self.found = min(hits)
            self._held = ""
            return text[:start]
        cut = len(text) - _held_back(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text that was held back, when nothing follows."""
        text, self._held = self._held, ""
        return text


class ShownTokens:
    """Counts which tokens of an answer lie wholly in what was shown of it."""

    def __init__(self):
        self._ends: list[int] = []
        self._hidden: list[bool] = []
        self._n_decoded = self._n_shown = 0

    def add(self, text: str, *, unfinished: bool, hidden: bool) -> None:
        """One more token: the text that it completed, whether it ends inside a character, whether it has no text."""
        self._n_decoded += len(text)
        # A token that ends inside a character is shown with the one that completes it.
        self._ends.append(self._n_decoded + unfinished)
        self._hidden.append(hidden)

    def show(self, text: str) -> str:
        """This much more is shown."""
        self._n_shown += len(text)
        return text

    def count(self) -> int:
        """How many tokens were wholly shown; those without text belong to what follows them."""
        n_tokens = bisect_right(self._ends, self._n_shown)
        while n_tokens and self._hidden[n_tokens - 1]:
            n_tokens -= 1
        return n_tokens


class AnswerParser:
    """Cuts growing text into parts.

    ``reasoning``: look for a think block at the start; ``thinking``: the prompt has already opened one. ``tools``: look
    for tool calls.
    """

    def __init__(self, *, reasoning: bool = True, thinking: bool = False, tools: bool = False):
        self._state = "thinking" if thinking and reasoning else "start" if reasoning else "content"
        self._tools = tools
        self._skip_blanks = self._state == "thinking"
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """The parts that the text so far is sure to hold."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The parts left when nothing follows; an unfinished tool call is content, unless its JSON is whole."""
        text, self._held = self._held, ""
        if self._state == "call":
            return [_tool_call(text, CALL + text)]
        if self._skip_blanks:
            text = text.lstrip()
        if self._state == "thinking":
            text = text.rstrip()
        kind = "reasoning" if self._state == "thinking" else "content"
        return [Part(kind, text)] if text else []

    def _step(self, parts: list[Part]) -> bool:
        """Go on by one state; False when more text is needed."""
        if self._state == "start":
            return self._begin()
        if self._state == "thinking":
            return self._until(END_THINK, "reasoning", "content", parts)
        if self._state == "content" and self._tools:
            return self._until(CALL, "content", "call", parts)
        if self._state == "content":
            self._show("content", self._held, parts)
            self._held = ""
            return False
        return self._end_call(parts)

    def _begin(self) -> bool:
        """Decide whether the answer starts with a think block."""
        text = self._held.lstrip()
        if THINK.startswith(text[: len(THINK)]) and len(text) < len(THINK):
            return False
        if text.startswith(THINK):
            self._state, self._held, self._skip_blanks = "thinking", text[len(THINK) :], True
        else:
            self._state = "content"
        return True

    def _until(self, mark: str, kind: str, following: str, parts: list[Part]) -> bool:
        """Show text up to ``mark``, without the blanks before it, and go on to the state ``following``."""
        before, found, after = self._held.partition(mark)
        if found:
            self._show(kind, before.rstrip(), parts)
            self._state, self._held, self._skip_blanks = following, after, True
            return True
        cut = len(before) - _held_back(before, (mark,))
        cut = len(before[:cut].rstrip())
        self._show(kind, before[:cut], parts)
        self._held = before[cut:]
        return False

    def _end_call(self, parts: list[Part]) -> bool:
        text, found, after = self._held.partition(END_CALL)
        if not found:
            return False
        parts.append(_tool_call(text, CALL + text + END_CALL))
        self._state, self._held, self._skip_blanks = "content", after, True
        return True

    def _show(self, kind: str, text: str, parts: list[Part]) -> None:
        if self._skip_blanks:
            text = text.lstrip()
        if text:
            self._skip_blanks = False
            parts.append(Part(kind, text))


def _tool_call(text: str, raw: str) -> Part:
    """The call in the JSON between the marks; ``raw`` as content when it is none, so that nothing is hidden."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Part("content", raw)
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Part("tool_call", "", ToolCall(f"call_{secrets.token_hex(12)}", name, arguments))
