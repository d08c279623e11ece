"""The text of an answer, as it grows, cut into what a client is to see: content, reasoning, tool calls.

Owns stop strings and the marks around thinking and tool calls. Refuses to know tokens, requests and HTTP. Invariant:
joined, the parts are the text, less the markup and the blanks beside it; a text that only looks like markup is content,
and nothing is shown before it is known not to be the start of a mark.

A mark that the model's vocabulary has as a token of its own counts only where that token came: a model may quote it in
its text. Other marks are searched in the text.

Read next: ``httptools.py``, which reads what stands in a call; ``httpchat.py``, which puts the parts into answers.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from httptools import CALL, END_CALL, END_FUNCTION, FUNCTION, JSON_STARTS, ToolCall, read_calls

THINK, END_THINK = "<think>", "</think>"
CALL_MARKS = (CALL, END_CALL)
MARKS = (THINK, END_THINK, *CALL_MARKS)
# What stands for the token of a mark in the text that the parser holds: lone surrogates, which no decoded text has.
TOKENS = {mark: chr(0xDC80 + index) for index, mark in enumerate(MARKS)}
_SPELLED = str.maketrans({char: mark for mark, char in TOKENS.items()})


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


class MarkPlaces:
    """Remembers which pieces of a text were tokens of marks, while stop strings hold parts of it back."""

    def __init__(self):
        self._places: deque[tuple[int, int]] = deque()
        self._n_in = self._n_out = 0
        self._held = ""

    def add(self, text: str, *, is_mark: bool) -> None:
        """More text of the answer, before the stop strings are looked for."""
        if is_mark:
            self._places.append((self._n_in, self._n_in + len(text)))
        self._n_in += len(text)

    def take(self, text: str) -> list[tuple[str, bool]]:
        """The text that may be shown in pieces, each with whether it is a mark; one that is not whole waits."""
        self._held += text
        pieces = []
        while self._held:
            start, end = self._places[0] if self._places else (self._n_in, self._n_in)
            is_mark = start == self._n_out and start < end
            if is_mark and len(self._held) < end - start:
                break
            pieces.append((self._out(end - start if is_mark else start - self._n_out), is_mark))
            if is_mark:
                self._places.popleft()
        return pieces

    def flush(self) -> str:
        """The part of a mark that is left of one that a stop string cut."""
        return self._out(len(self._held))

    def _out(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._n_out += len(text)
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

    ``reasoning``: look for a think block at the start; ``thinking``: the prompt has already opened one; ``continued``:
    it has begun to fill it as well. ``tools``: look for tool calls; ``schemas``: those of their arguments by the name
    of the tool; ``bare``: the form in which a call may come without the marks around it, function or json, of which the
    latter is the whole answer. ``token_marks``: the marks that count as tokens only.
    """

    def __init__(
        self,
        *,
        reasoning: bool = True,
        thinking: bool = False,
        continued: bool = False,
        tools: bool = False,
        schemas: Mapping[str, object] | None = None,
        bare: str = "",
        token_marks: Collection[str] = (),
    ):
        self._content = "opening" if tools and bare == "json" else "content"
        self._state = "thinking" if thinking and reasoning else "start" if reasoning else self._content
        self._schemas = schemas or {}
        self._forms = {mark: TOKENS[mark] if mark in token_marks else mark for mark in MARKS}
        self._call_starts = {self._forms[CALL]: "call"} if tools else {}
        if tools and bare == "function":
            self._call_starts[FUNCTION] = "bare call"
        self._skip_blanks = self._state == "thinking" and not continued
        self._held = ""
        self._n_tried = 0

    def push(self, text: str, *, is_mark: bool = False) -> list[Part]:
        """The parts that the text so far is sure to hold; ``is_mark``: it is one of MARKS, and came as its token."""
        self._held += TOKENS[text] if is_mark else text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The parts left when nothing follows; an unfinished tool call is content, unless what it holds is whole."""
        text, self._held = self._held.translate(_SPELLED), ""
        if self._state == "call":
            return self._calls(text, CALL + text)
        if self._state == "JSON":
            parts = self._calls(text, text)
            # Other answers may be JSON as well.
            return parts if all(part.call and part.call.name in self._schemas for part in parts) else self._plain(text)
        return self._plain(text)

    def _plain(self, text: str) -> list[Part]:
        if self._skip_blanks:
            text = text.lstrip()
        if self._state == "thinking":
            text = text.rstrip()
        kind = "reasoning" if self._state == "thinking" else "content"
        return [Part(kind, text)] if text else []

    def _step(self, parts: list[Part]) -> bool:
        """Go on by one state; False when more text is needed."""
        if self._state == "start":
            return self._skip_mark(THINK, "thinking", otherwise=self._content)
        if self._state == "thinking":
            return self._until({self._forms[END_THINK]: self._content}, "reasoning", parts)
        if self._state in ("opening", "JSON"):
            return self._state == "opening" and self._open()
        if self._state == "content" and self._call_starts:
            return self._until(self._call_starts, "content", parts)
        if self._state == "content":
            self._show("content", self._held, parts)
            self._held = ""
            return False
        if self._state == "call":
            return self._end_call(parts)
        if self._state == "bare call":
            return self._end_bare_call(parts)
        return self._skip_mark(END_CALL, "content", otherwise="content")

    def _open(self) -> bool:
        """Decide whether the answer is a call in JSON, which is read when it is whole."""
        begun = "".join(self._held.split())
        if len(begun) < len(JSON_STARTS[-1]) and any(start.startswith(begun) for start in JSON_STARTS):
            return False
        self._state = "JSON" if begun.startswith(JSON_STARTS) else "content"
        return True

    def _skip_mark(self, mark: str, following: str, *, otherwise: str) -> bool:
        """Go on to the state ``following`` behind a mark that stands here, to ``otherwise`` where none does."""
        mark, text = self._forms[mark], self._held.lstrip()
        if len(text) < len(mark) and mark.startswith(text):
            return False
        self._state = otherwise
        if text.startswith(mark):
            self._state, self._held, self._skip_blanks = following, text[len(mark) :], True
        return True

    def _until(self, marks: dict[str, str], kind: str, parts: list[Part]) -> bool:
        """Show text up to the first of the marks, without the blanks before it, and go on to the state it leads to."""
        found = [(self._held.find(mark), mark) for mark in marks if mark in self._held]
        if found:
            start, mark = min(found)
            self._show(kind, self._held[:start].rstrip(), parts)
            self._state, self._skip_blanks = marks[mark], True
            self._held = self._held[start if mark == FUNCTION else start + len(mark) :]
            return True
        cut = len(self._held) - _held_back(self._held, tuple(marks))
        cut = len(self._held[:cut].rstrip())
        self._show(kind, self._held[:cut], parts)
        self._held = self._held[cut:]
        return False

    def _end_call(self, parts: list[Part]) -> bool:
        text, found, after = self._held.partition(self._forms[END_CALL])
        if not found:
            return False
        parts += self._calls(text, CALL + text + END_CALL)
        self._state, self._held, self._skip_blanks = "content", after, True
        return True

    def _end_bare_call(self, parts: list[Part]) -> bool:
        """End a call without marks at the first end of a function that makes it whole; each is tried once."""
        start = self._held.find(END_FUNCTION, self._n_tried)
        if start < 0:
            return False
        self._n_tried = start + len(END_FUNCTION)
        if calls := read_calls(self._held[: self._n_tried].translate(_SPELLED), self._schemas):
            parts += [Part("tool_call", "", call) for call in calls]
            self._held, self._n_tried = self._held[self._n_tried :], 0
            self._state, self._skip_blanks = "behind a bare call", True
        return True

    def _calls(self, text: str, raw: str) -> list[Part]:
        """The calls in a text; ``raw`` as content when it holds none, so that nothing is hidden."""
        calls = read_calls(text.translate(_SPELLED), self._schemas)
        return [Part("tool_call", "", call) for call in calls] or [Part("content", raw.translate(_SPELLED))]

    def _show(self, kind: str, text: str, parts: list[Part]) -> None:
        if self._skip_blanks:
            text = text.lstrip()
        if text:
            self._skip_blanks = False
            parts.append(Part(kind, text.translate(_SPELLED)))
