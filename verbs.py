"""The language of the pipe between an engine and its callers: requests, answers, and the one line that each is.

It owns every word, field, range and limit that both sides know, and needs NumPy and options.py alone; it knows no
process, no model and no HTTP. Invariant: `read` gives back what `line_of` wrote, and a line that is not as the
protocol has it raises ValueError, or RequestError where a caller is at fault. `man/strata-verbs.5` is the same as
tables. Read next: serveloop.py, which answers, and httpchild.py, which asks.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, get_type_hints
from urllib.parse import quote, unquote_to_bytes

import numpy as np

from options import LONGEST_WINDOW

MAX_INT32, MAX_UINT64 = 2**31 - 1, 2**64 - 1
SPARE_CELLS = LONGEST_WINDOW  # cells that stay free behind prompt and answer
SOURCES = ("live", "checkpoint", "parked", "store", "none")
FINISHES = ("stop", "length", "cancel")
ERROR_KINDS = ("invalid", "storage", "memory", "io")
MIN_ALLOWANCE_S, MAX_ALLOWANCE_S = 60, 3600
LOG_WORDS = ("INFO", "WARN")  # lines for the log alone, which may come in the middle of an answer

# The verbs and the form of each.
VERBS = {
    "GEN": "GEN <max_new>[ key=value]... <ids>",
    "SAVE": "SAVE <path>",
    "AUTOSAVE": "AUTOSAVE <path>",
    "RESTORE": "RESTORE <path>",
    "ERASE": "ERASE",
    "STOP": "STOP [<n>]",
    "TOKENS": "TOKENS",
    "STATS": "STATS",
    "QUIT": "QUIT",
}

# The keys of a GEN line with the limits of their ranges; `stop` takes ids, `label` percent-encoded
# UTF-8, and keys that are not known are skipped.
REAL_KEYS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
SWITCHES = {"ckpt": "checkpoint", "cvec": "steered", "source": "source"}  # and the fields that they set
WHOLE_KEYS = {"top_k": (0, MAX_INT32), "repeat_last_n": (0, MAX_INT32), "seed": (0, MAX_UINT64)}
WHOLE_KEYS |= dict.fromkeys(SWITCHES, (0, 1))
MAX_LABEL_BYTES = 512  # of a text that a list of conversations shows
# How the reference engine's server spells some of them.
REFERENCE_KEYS = {
    "penalty_repeat": "repeat_penalty",
    "penalty_freq": "frequency_penalty",
    "penalty_present": "presence_penalty",
    "penalty_last_n": "repeat_last_n",
}


class RequestError(Exception):
    """A request that is refused; nothing has changed."""


def allowance_s(size_bytes: int) -> int:
    """How long a step over so many bytes may be silent: a minute, and a second for every 4 MiB, at most an hour."""
    return min(MAX_ALLOWANCE_S, MIN_ALLOWANCE_S + (size_bytes >> 22))


# --- Requests ---


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; temperature 0 takes the most probable one (the lowest id of equals)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one for each request
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalised(self) -> bool:
        return self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        """Whether the choice is the most probable token as it stands."""
        return self.temperature <= 0 and not (self.penalised and self.repeat_last_n)


class GenRequest(NamedTuple):
    """One generation: prompt int32 [T], the most tokens to emit, and what ends or steers it."""

    prompt: np.ndarray
    max_new: int
    sampling: SamplingOptions = SamplingOptions()
    stop: frozenset[int] = frozenset()
    checkpoint: bool = True  # False: nothing of this request is kept
    steered: bool = True  # whether the control vector is added, where one was loaded
    source: bool = False  # whether the request asks where its start came from
    label: str = ""  # what a list of kept conversations shows of this one


def gen_line(max_new: int, ids: Sequence[int], keys: Mapping[str, object] | None = None) -> str:
    """A GEN line; values of keys are written as they are."""
    words = [f"{name}={value}" for name, value in (keys or {}).items()]
    return " ".join([f"GEN {max_new}", *words, ",".join(map(str, ids))])


def glance(line: str) -> tuple[int, bool]:
    """The prompt's tokens in a line that `gen_line` wrote, and whether the request is to be kept."""
    return line.count(",", line.rindex(" ")) + 1, " ckpt=0 " not in line


def parse_gen(text: bytes) -> GenRequest:
    """The request in a GEN line, from behind the first space; raises RequestError with what is wrong in it."""
    try:
        return _parse_gen(text)
    except RequestError:
        check_utf8(b"GEN " + text)  # the plainer reason
        raise


def _parse_gen(text: bytes) -> GenRequest:
    max_new, _, rest = text.partition(b" ")
    values, ids_at = {}, 0
    while match := _KEY.match(rest, ids_at):
        key, value = match[1].decode(), match[2]
        name = REFERENCE_KEYS.get(key, key)
        if name in REAL_KEYS:
            values[name] = _number(key, value, *REAL_KEYS[name])
        elif name in WHOLE_KEYS:
            values[name] = _whole(key, value, *WHOLE_KEYS[name])
        elif name == "stop":
            values[name] = _ids(key, value).tolist()
        elif name == "label":
            values[name] = _label(value)
        ids_at = match.end()
    ids = rest[ids_at:]
    if not max_new or not ids.strip(b" "):
        raise RequestError(f"expected: {VERBS['GEN']}")
    check_utf8(b"GEN " + text[: len(text) - len(ids)])  # the ids are checked as what they are
    return GenRequest(
        max_new=_whole("max_new", max_new, 0, MAX_INT32),
        stop=frozenset(values.pop("stop", ())),
        label=values.pop("label", ""),
        **{field: bool(values.pop(key)) for key, field in SWITCHES.items() if key in values},
        sampling=SamplingOptions(**values),
        prompt=_ids("ids", ids),
    )


def check_utf8(line: bytes) -> None:
    """Raises RequestError for a line that is no text."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is not UTF-8: byte {error.start} of it, {error.reason}") from None


def _ids(name: str, text: bytes) -> np.ndarray:
    """Token ids separated by one comma or by spaces, as int32; a million of them take a quarter of a second."""
    if bad := _NOT_IN_IDS.search(text):
        start = max(text.rfind(b",", 0, bad.start()), text.rfind(b" ", 0, bad.start())) + 1
        piece = re.split(rb"[, ]", text[start : bad.end() + 40], maxsplit=1)[0]
        raise RequestError(f"{name}: {quoted(piece)} is not a token id, a decimal number")
    if empty := _EMPTY_ID.search(text):
        raise RequestError(f"{name}: a token id is missing at character {empty.start() + 1} of the list")
    ids = np.fromstring(text.replace(b",", b" "), dtype=np.int64, sep=" ")  # saturates at 2^63-1
    if ids.max() > MAX_INT32:
        raise RequestError(f"{name}: a token id is above {MAX_INT32}, so it is in no vocabulary")
    return ids.astype(np.int32)


def _whole(name: str, text: bytes, low: int, high: int) -> int:
    if not (_WHOLE.fullmatch(text) and low <= int(text) <= high):
        raise RequestError(f"{name}: {quoted(text)} is not a whole number from {low} to {high}")
    return int(text)


def label_key(text: str) -> str:
    """A text as the value of the key `label`: cut to what may be, and percent-encoded."""
    return quote(text.encode("utf-8", "replace")[:MAX_LABEL_BYTES].decode("utf-8", "ignore"), safe="")


def _label(value: bytes) -> str:
    text = unquote_to_bytes(value)
    if len(text) > MAX_LABEL_BYTES:
        raise RequestError(f"label: {len(text)} bytes, at most {MAX_LABEL_BYTES}")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise RequestError(f"label: {quoted(value)} is no percent-encoded UTF-8") from None


def _number(name: str, text: bytes, low: float, high: float) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not low <= value <= high:
        raise RequestError(f"{name}: {quoted(text)} is not a number from {low} to {high}")
    return value


def quoted(text: bytes) -> str:
    """A piece of input as an error line shows it: printable, and short."""
    shown = repr(text[:40].decode("utf-8", "replace"))
    return shown if len(text) <= 40 else f"{shown}..."


_KEY = re.compile(rb" *([A-Za-z_][A-Za-z0-9_.-]*)=([^ ]*)")
_NOT_IN_IDS = re.compile(rb"[^0-9, ]")
_EMPTY_ID = re.compile(rb"(?:^|,) *(?:,|$)")
_WHOLE = re.compile(rb"[0-9]{1,20}")
_NUMBER = re.compile(rb"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")


def stop_line(n_kept: int | None = None) -> str:
    """A STOP; with a count, the conversation is to end behind so many tokens of the answer."""
    return "STOP" if n_kept is None else f"STOP {n_kept}"


def stop_count(line: bytes | None) -> int | None:
    """The tokens of the answer that a `STOP <n>` keeps; None for any other line."""
    match = re.fullmatch(rb"STOP ([0-9]{1,10})", line or b"")
    return int(match[1]) if match else None


# --- Kinds of fields in an answer ---


class Kind(NamedTuple):
    """How a field is read, with ValueError for what cannot be one, and written; `rest` takes the rest of its line."""

    name: str
    read: Callable[[str], object]
    write: Callable[[object], str] = str
    rest: bool = False


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError(f"{text[:40]!r} is no count")
    return int(text)


def _real(text: str) -> float:
    if not _REAL.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]!r} is no finite number from 0 on")
    return value


def _word(text: str) -> str:
    if not _LETTERS.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a word of letters")
    return text


def _one_of(*words: str) -> Kind:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text[:40]!r} is none of {', '.join(words)}")
        return text

    return Kind(", ".join(words), read)


def _flag(text: str) -> bool:
    return _one_of("0", "1").read(text) == "1"


def _allowance(text: str) -> int:
    if not 1 <= (seconds := _count(text)) <= MAX_ALLOWANCE_S:
        raise ValueError(f"an allowance outside 1 to {MAX_ALLOWANCE_S} s")
    return seconds


def _context(text: str) -> int:
    """What may follow the size, our own `stop` too, is for callers that know it."""
    if not (n_ctx := _count(text.partition(" ")[0])):
        raise ValueError("a context of 0 tokens")
    return n_ctx


def _counted_ids(text: str) -> list[int]:
    count, _, ids = text.partition(" ")
    n_tokens = _count(count)
    if ids and not _ID_LIST.fullmatch(ids):
        raise ValueError("not a list of token ids")
    held = list(map(int, ids.split(","))) if ids else []
    if len(held) != n_tokens:
        raise ValueError(f"{len(held)} ids where {n_tokens} are announced")
    return held


def _json(text: str) -> dict:
    if not isinstance(values := json.loads(text), dict):
        raise ValueError("not a JSON object")
    return values


def _pairs(text: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in text.split(" "))
    return {key: value for key, equals, value in pairs if equals and key.isidentifier()}


def _value(text: str) -> str:
    """A value without what would end it, or move a terminal's cursor."""
    return "".join(char if char.isprintable() and not char.isspace() else "_" for char in text)


_REAL = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_LETTERS = re.compile(r"[A-Za-z]+")
_ID_LIST = re.compile(r"\d{1,9}(,\d{1,9})*", re.ASCII)

Count = Annotated[int, Kind("count", _count)]
Real = Annotated[float, Kind("number", _real, "{:.1f}".format)]  # a dot, whatever the locale
Word = Annotated[str, Kind("word", _word)]
Flag = Annotated[bool, Kind("0, 1", _flag, lambda flag: str(int(flag)))]
Where = Annotated[str, _one_of(*SOURCES)]
Finish = Annotated[str, _one_of(*FINISHES)]
ErrorKind = Annotated[str, _one_of(*ERROR_KINDS)]
Allowance = Annotated[int, Kind("seconds", _allowance)]
Context = Annotated[int, Kind("count, stop", _context, "{} stop".format, rest=True)]
Text = Annotated[str, Kind("text", str, rest=True)]
Json = Annotated[dict, Kind("JSON", _json, json.dumps, rest=True)]
Ids = Annotated[list[int], Kind("count, ids", _counted_ids,
    lambda ids: f"{len(ids)} {','.join(map(str, ids))}".rstrip(), rest=True)]  # fmt: skip
Pairs = Annotated[dict[str, str], Kind("key=value", _pairs,
    lambda pairs: " ".join(f"{key}={_value(value)}" for key, value in pairs.items()), rest=True)]  # fmt: skip


# --- Answers, their fields in the order of the line ---


class Info(NamedTuple):
    """What the engine says of itself, before READY."""

    pairs: Pairs


class Ready(NamedTuple):
    """Verbs are carried out from now on, in a context of so many tokens."""

    n_ctx: Context


class Resume(NamedTuple):
    """A request was accepted; so many tokens of its prompt are held already."""

    n_reused: Count


class PromptProgress(NamedTuple):
    """A chunk of the prompt was read."""

    position: Count
    n_prompt: Count
    ms: Real
    tokens_per_s: Real


class Reused(NamedTuple):
    """The prompt was read; so many tokens of it were held."""

    n_reused: Count


class Source(NamedTuple):
    """What the reused tokens were taken from, and how many the prompt has in common with anything held."""

    source: Where
    n_tokens: Count
    diverged_at: Count


class Token(NamedTuple):
    """One token of the answer."""

    id: Count


class Held(NamedTuple):
    """The length of the conversation that is held when the request is over; it comes before Done."""

    n_tokens: Count


class Stored(NamedTuple):
    """What the store has done since the engine's start; it comes before Done, from an engine that has one."""

    written_bytes: Count = 0
    n_flushes: Count = 0
    n_failures: Count = 0  # of writing; what was to be kept is not
    n_hits: Count = 0
    n_tokens: Count = 0  # that hits have given back


class Done(NamedTuple):
    """The end of a request."""

    n_generated: Count
    n_prompt: Count
    prompt_ms: Real
    decode_ms: Real
    finish: Finish
    n_drafts_accepted: Count
    n_drafts_offered: Count
    n_reused: Count
    n_cache_hits: Count
    n_cache_lookups: Count
    n_ram_blobs: Count
    n_file_blobs: Count
    file_mb: Real
    n_prompt_read: Count
    n_experts_over_pcie: Count


class Phase(NamedTuple):
    """A step of a save or restore begins that may be silent for so long."""

    phase: Word
    allowance_s: Allowance


class Moved(NamedTuple):
    """How far a save or restore is."""

    done_bytes: Count
    total_bytes: Count


class SessionDone(NamedTuple):
    """A save or a restore that succeeded."""

    n_tokens: Count
    size_bytes: Count
    ms: Real


class Saved(SessionDone):
    """The conversation is in the file."""


class Restored(SessionDone):
    """The file's conversation is held."""


class Erased(NamedTuple):
    """The conversation held is forgotten; it had so many tokens."""

    n_tokens: Count


class Tokens(NamedTuple):
    """The ids of the conversation held."""

    ids: Ids


class Stats(NamedTuple):
    """What is held."""

    stats: Json


class Refusal(NamedTuple):
    """A command was not carried out, or a request cannot go on."""

    reason: Text


class SessionRefusal(NamedTuple):
    """A save or restore that failed; `published` tells that the new file has already replaced the old one."""

    kind: ErrorKind
    published: Flag
    reason: Text


class Fatal(NamedTuple):
    """The state may be wrong: the engine ends."""

    reason: Text


RECORDS = {
    "INFO": Info, "READY": Ready, "RESUME": Resume, "PP": PromptProgress, "REUSED": Reused, "SOURCE": Source,
    "T": Token, "HELD": Held, "STORE": Stored, "DONE": Done, "SWAIT": Phase, "SESSION": Moved, "SAVED": Saved,
    "RESTORED": Restored, "ERASED": Erased, "TOKENS": Tokens, "STATS": Stats, "ERR": Refusal, "SERR": SessionRefusal,
    "FATAL": Fatal,
}  # fmt: skip
WORDS = {record: word for word, record in RECORDS.items()}
KINDS = {record: [hint.__metadata__[0] for hint in get_type_hints(record, include_extras=True).values()]
         for record in WORDS}  # fmt: skip
# The lines of a running GEN; and the verbs that move a conversation to or from a file, with the end of each.
Event = Resume | PromptProgress | Reused | Source | Token | Held | Stored | Done
GENERATION = Event.__args__
TRANSFERS = {"SAVE": Saved, "AUTOSAVE": Saved, "RESTORE": Restored}
# What is behind the last line of a command belongs to the next.
TERMINAL = (Done, Saved, Restored, Erased, Tokens, Stats, Refusal, SessionRefusal, Fatal)
TERMINAL_WORDS = frozenset(WORDS[record] for record in TERMINAL)


def line_of(record: NamedTuple) -> str:
    """The line that a record is, without its end; the writer makes line breaks inside a text spaces."""
    kinds = KINDS[type(record)]
    return " ".join([WORDS[type(record)], *(kind.write(value) for kind, value in zip(kinds, record, strict=True))])


def kind_of(line: str) -> type | None:
    """Which record a line claims to be."""
    return RECORDS.get(line.partition(" ")[0])


def read(line: str, *wanted: type):
    """The record in a line, which must be one of those wanted; raises ValueError."""
    record = kind_of(line)
    if record not in wanted:
        raise ValueError(f"not {' or '.join(WORDS[one] for one in wanted)}")
    kinds, rest = KINDS[record], line.partition(" ")[2]
    fields = rest.split(" ", len(kinds) - 1 if kinds[-1].rest else -1)
    if len(fields) != len(kinds):
        raise ValueError(f"{len(fields)} fields instead of {len(kinds)}")
    found = record(*(kind.read(field) for kind, field in zip(kinds, fields, strict=True)))
    if record is Moved and found.done_bytes > found.total_bytes:
        raise ValueError("more done than there is")
    return found
