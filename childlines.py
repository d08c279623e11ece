"""What the lines of the engine's pipe mean: records of what was heard, failures, and the strict reading of each line.

Owns the words of the pipe, the number of their fields and their ranges, which clients of the verbs rely on as well.
Refuses to know processes, turns and HTTP. Invariant: a line that is not as the protocol writes it raises ValueError.

Read next: ``childproc.py``, which hears these lines.
"""

import contextlib
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from printable import one_line

SOURCES = ("live", "checkpoint", "parked", "store", "none")
SESSION_KINDS = ("invalid", "storage", "memory", "io")
ALLOWANCE_S = range(1, 3601)
# What the child says for the log alone, in the middle of an exchange too.
LOG_WORDS = ("INFO", "WARN")

_REAL = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD = re.compile(r"[A-Za-z]+")
_IDS = re.compile(r"\d{1,9}(,\d{1,9})*", re.ASCII)


class ChildError(Exception):
    """Why a call to the engine child brought no result; ``str()`` is meant for the client."""


class EngineGone(ChildError):
    """The child ended, fell silent, left the protocol or could not be started; what it held is lost."""


class EngineRefused(ChildError):
    """The child answered ``ERR``: the request was not carried out and nothing changed."""


class RequestFailed(ChildError):
    """The child answered ``ERR`` in the middle of a request: nothing is held any more, and the child goes on."""


class GivenUp(ChildError):
    """The caller went before its turn came; nothing was begun."""


class FileGone(ChildError):
    """The file to restore went before the turn came."""


class FileThere(ChildError):
    """There is a file already that the save was not to replace."""


class ModelChanged(ChildError):
    """The request was made for another model file than the one that the child has loaded."""


class NotLoaded(ChildError):
    """The call is not worth loading the model for, and no model is loaded."""


class Ending(ChildError):
    """The server is ending and takes no further request."""


class Busy(ChildError):
    """Another request has the turn."""


class SessionRefused(ChildError):
    """The child answered ``SERR``: the conversation is as before, and the file too unless ``published``."""

    def __init__(self, kind: str, published: bool, reason: str):
        super().__init__(reason)
        self.kind = kind
        self.published = published


class Resume(NamedTuple):
    """A generation was accepted; so many tokens of its prompt are held already."""

    n_reused: int


class PromptProgress(NamedTuple):
    """A chunk of the prompt was read."""

    position: int
    n_prompt: int
    ms: float
    tokens_per_s: float


class Source(NamedTuple):
    """What the held start of a prompt was taken from, and how far anything that is held agrees with the prompt."""

    source: str
    n_tokens: int
    diverged_at: int


class Token(NamedTuple):
    """One token of the answer."""

    id: int


class Held(NamedTuple):
    """The length of the conversation that is held when the request is over; it comes before Done."""

    n_tokens: int


class Done(NamedTuple):
    """The end of a generation, its fields in the order of the DONE line."""

    n_generated: int
    n_prompt: int
    prompt_ms: float
    decode_ms: float
    finish: str
    n_drafts_accepted: int
    n_drafts_offered: int
    n_reused: int
    n_cache_hits: int
    n_cache_lookups: int
    n_ram_blobs: int
    n_file_blobs: int
    file_mb: float
    n_prompt_read: int
    n_experts_over_pcie: int


class SessionDone(NamedTuple):
    """A save or a restore that succeeded."""

    n_tokens: int
    size_bytes: int
    ms: float


@dataclass
class SessionProgress:
    """How far the running save or restore is."""

    action: str
    filename: str
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass
class RequestProgress:
    """How far the latest generation came, and what of its prompt was held already."""

    running: bool = False
    n_prompt: int = 0
    n_read: int = 0
    n_generated: int = 0
    cache_source: str | None = None
    cache_n: int = 0
    diverged_at: int | None = None

    def note(self, event: "Event") -> None:
        """Take in what the child said."""
        match event:
            case Resume(n_reused):
                self.n_read = self.cache_n = n_reused
            case PromptProgress(position, n_prompt):
                self.n_read, self.n_prompt = position, n_prompt
            case Source(source, n_tokens, diverged_at):
                self.cache_source, self.cache_n, self.diverged_at = source, n_tokens, diverged_at
            case Token():
                self.n_generated += 1


@dataclass
class Totals:
    """What the child did since the front started; the counters of ``GET /metrics``."""

    n_starts: int = 0
    n_prompt_read: int = 0
    prompt_ms: float = 0.0
    n_generated: int = 0
    decode_ms: float = 0.0
    n_cached: int = 0
    n_saved: int = 0
    n_restored: int = 0
    n_session_failed: int = 0


def _count(word: str) -> int:
    """A count as the protocol writes it: plain ASCII digits, at most 18 of them."""
    if not (word.isascii() and word.isdigit() and len(word) <= 18):
        raise ValueError(f"{word[:40]!r} is no count")
    return int(word)


def _real(word: str) -> float:
    if not _REAL.fullmatch(word) or not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:40]!r} is no finite number from 0 on")
    return value


def _word(word: str) -> str:
    if not _WORD.fullmatch(word):
        raise ValueError(f"{word[:40]!r} is not a word of letters")
    return word


def _source(word: str) -> str:
    if word not in SOURCES:
        raise ValueError(f"{word[:40]!r} is no source of held tokens")
    return word


def _finish(word: str) -> str:
    if word not in ("stop", "length", "cancel"):
        raise ValueError(f"{word[:40]!r} is no way to finish")
    return word


_DONE_FIELDS = (_count, _count, _real, _real, _finish, *[_count] * 7, _real, _count, _count)
_GEN_LINES = {
    "RESUME": (Resume, (_count,)),
    "PP": (PromptProgress, (_count, _count, _real, _real)),
    "REUSED": (None, (_count,)),
    "SOURCE": (Source, (_source, _count, _count)),
    "T": (Token, (_count,)),
    "HELD": (Held, (_count,)),
    "DONE": (Done, _DONE_FIELDS),
}


Event = Resume | PromptProgress | Source | Token | Held | Done


def parse_generation_line(line: str) -> Event | None:
    """One line of a running generation; None for one that repeats what RESUME said. Raises ValueError."""
    word, _, rest = line.partition(" ")
    if word not in _GEN_LINES:
        raise ValueError("not a line of a generation")
    record, readers = _GEN_LINES[word]
    fields = rest.split(" ")
    if len(fields) != len(readers):
        raise ValueError(f"{len(fields)} fields instead of {len(readers)}")
    values = [read(field) for read, field in zip(readers, fields, strict=True)]
    return record(*values) if record else None


def parse_session_end(line: str, success: str) -> SessionDone:
    """The last line of a save or restore; raises SessionRefused for ``SERR`` and ValueError for anything else."""
    word, _, rest = line.partition(" ")
    if word == "SERR":
        kind, published, reason = rest.split(" ", 2)
        if kind not in SESSION_KINDS or published not in ("0", "1"):
            raise ValueError("unknown kind of failure")
        raise SessionRefused(kind, published == "1", one_line(reason))
    if word != success:
        raise ValueError(f"neither a line of progress nor {success}")
    n_tokens, size_bytes, ms = rest.split(" ")
    return SessionDone(_count(n_tokens), _count(size_bytes), _real(ms))


def parse_tokens(rest: str) -> list[int]:
    """The ids of a TOKENS line; raises ValueError."""
    count, _, ids = rest.partition(" ")
    n_tokens = _count(count)
    if ids and not _IDS.fullmatch(ids):
        raise ValueError("not a list of token ids")
    held = list(map(int, ids.split(","))) if ids else []
    if len(held) != n_tokens:
        raise ValueError(f"{len(held)} ids where {n_tokens} are announced")
    return held


def parse_info(rest: str) -> dict[str, str]:
    """The pairs of an INFO line; a value holds no blank."""
    pairs = (pair.partition("=") for pair in rest.split(" "))
    return {key: one_line(value) for key, equals, value in pairs if equals and key.isidentifier()}


def parse_ready(rest: str) -> int:
    """The tokens of context in a READY line; raises ValueError."""
    n_ctx = _count(rest.partition(" ")[0])
    if not n_ctx:
        raise ValueError("a context of 0 tokens")
    return n_ctx


def parse_erased(line: str) -> int:
    """The tokens that an ERASED line counts; raises ValueError."""
    word, _, rest = line.partition(" ")
    if word != "ERASED":
        raise ValueError("not ERASED")
    return _count(rest)


@contextlib.contextmanager
def in_step(line: str):
    """Whatever cannot be read in ``line`` means that the child left the protocol."""
    try:
        yield
    except ValueError as error:
        raise out_of_step(line, str(error)) from error


def out_of_step(line: str, why: str = "") -> EngineGone:
    """The failure of a child that left the protocol with ``line``."""
    return EngineGone(f"the engine is out of step: {line[:200]!r}" + (f": {why}" if why else ""))


def begin_phase(progress: SessionProgress, rest: str) -> int:
    """Note the phase that begins and return the seconds that it may take."""
    phase, allowance = rest.split(" ")
    allowance_s = _count(allowance)
    if allowance_s not in ALLOWANCE_S:
        raise ValueError("an allowance outside 1 to 3600 s")
    progress.phase = _word(phase)
    return allowance_s


def advance(progress: SessionProgress, rest: str) -> None:
    done, total = map(_count, rest.split(" "))
    if done > total:
        raise ValueError("more done than there is")
    if done < progress.done_bytes:
        raise ValueError("progress that falls")
    progress.done_bytes, progress.total_bytes = done, total
