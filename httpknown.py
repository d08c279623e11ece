"""Texts whose token ids are known, since an engine has read or written them.

Many ids stand for one text, and a model writes others than its tokenizer would. It owns the texts of the latest
conversations beside their ids, and finds the ids for the start of a new prompt; it knows no tokenizer, but for what a
token stands for. Invariant: the ids that are given stand for the text that was asked for, marks for marks and words
for words. Read next: httptextworker.py, which asks.
"""

import datetime
import json
import re
from array import array
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from typing import NamedTuple

# The latest conversations, and their tokens in all: 12 bytes for each, and its characters.
MAX_TEXTS = 32
MAX_TOKENS = 1 << 21
# A mark is spelled by three lone surrogates, which no text holds: its id in digits of ten bits.
MARK_CHARACTER = re.compile("[\ud800-\udfff]")
# What stands beside a cut decides whether words may be cut there; no word is longer than that.
BESIDE = 256
# Places for a cut that are tried before the next mark is taken.
MAX_TRIES = 32
# How much longer another time may be, as with the name of a month, and how much behind it is compared to find its end.
CLOCK_SLACK = 16
BEHIND_CLOCK = 64
# What a line of the log shows of two texts that part.
SHOWN_TOKENS, SHOWN_CHARACTERS = 8, 60

INSIDE, CUT = 1, 2

Pieces = list[str | int]


def spell(pieces: Iterable[str | int]) -> str:
    """Words and marks as one text, in which no word can look like a mark."""
    return "".join(piece if isinstance(piece, str) else _mark(piece) for piece in pieces)


def unspell(text: str) -> Pieces:
    """What `spell` made a text of; words come in one piece."""
    pieces: Pieces = []
    end = 0
    for found in re.finditer("[\ud800-\udfff]{3}", text):
        if found.start() > end:
            pieces.append(text[end : found.start()])
        high, middle, low = (ord(char) - 0xD800 for char in found[0])
        pieces.append(high << 20 | middle << 10 | low)
        end = found.end()
    return [*pieces, text[end:]] if end < len(text) else pieces


def _mark(token_id: int) -> str:
    return "".join(chr(0xD800 + (token_id >> shift & 0x3FF)) for shift in (20, 10, 0))


class KnownText(NamedTuple):
    """The ids of a conversation, the text that they stand for, and where in it each of them ends.

    ``open`` says of each id whether it ends inside a character, and whether that was CUT off there, as by a mark.
    ``whole`` says that an answer stands at the end.
    """

    ids: array
    text: str
    ends: array
    open: bytearray
    whole: bool


class KnownTexts:
    """The latest conversations; ``bytes_of`` gives what a token stands for, None for a mark.

    ``may_cut`` says of two texts whether their ids, one behind the other, are those of both in one.
    """

    def __init__(self, bytes_of: Callable[[int], bytes | None], may_cut: Callable[[str, str], bool]):
        self._bytes_of = bytes_of
        self._may_cut = may_cut
        self._texts: list[KnownText] = []

    def learn(self, ids: Iterable[int], *, whole: bool = True) -> None:
        """Keep a conversation, in place of one that it goes on; `whole` where an answer stands at its end."""
        ids = array("i", ids)
        if not ids:
            return
        begun = max(((common_start(ids, known.ids), known) for known in self._texts), default=None, key=lambda x: x[0])
        grown = self._grown(ids, whole, *(begun or (0, None)))
        self._texts = latest(self._texts, grown)

    def _grown(self, ids: array, whole: bool, n_same: int, known: KnownText | None) -> KnownText:
        """The text of ids of which the first `n_same` are those of `known`."""
        # The last character may have been a part of one, and is another one with what follows.
        n_same = min(n_same, len(known.ids) - 1) if known else 0
        while n_same and known.open[n_same - 1]:
            n_same -= 1
        length = known.ends[n_same - 1] if n_same else 0
        parts = [known.text[:length]] if n_same else []
        ends, unfinished = (known.ends[:n_same], known.open[:n_same]) if n_same else (array("q"), bytearray())
        decoder, inside = getincrementaldecoder("utf-8")("replace"), 0
        for token_id in ids[n_same:]:
            raw = self._bytes_of(token_id)
            if raw is None:
                length, inside = _close(decoder, parts, ends, unfinished, length), 0
                parts.append(_mark(token_id))
            elif not inside and raw.isascii():  # the most of them, and 250,000 are many
                parts.append(raw.decode())
            else:
                parts.append(decoder.decode(raw))
                inside = INSIDE if decoder.getstate()[0] else 0
            length += len(parts[-1])
            ends.append(length)
            unfinished.append(inside)
        _close(decoder, parts, ends, unfinished, length)
        return KnownText(ids, "".join(parts), ends, unfinished, whole)

    def match(self, text: str) -> tuple[array, int]:
        """The known ids for the longest start of a spelled text that may be cut off, and its length."""
        best, length, n_ids = None, 0, 0
        for known in reversed(self._texts):
            shared = common_start(text, known.text)
            if shared > length:
                count = self._last_cut(known, text, shared)
                end = known.ends[count - 1] if count else 0
                if end > length:
                    best, length, n_ids = known, end, count
        if best is None:
            return array("i"), 0
        self._texts.remove(best)
        self._texts.append(best)
        return best.ids[:n_ids], length

    def _last_cut(self, known: KnownText, text: str, shared: int) -> int:
        """How many ids of a known text stand for a start of `text`, of which `shared` characters are the same."""
        count, tries = bisect_right(known.ends, shared), MAX_TRIES
        while count:
            end = known.ends[count - 1]
            if known.open[count - 1] != INSIDE and _beside_mark(text, end):
                break
            if not known.open[count - 1]:
                if known.whole and count == len(known.ids):
                    break
                if tries:
                    tries -= 1
                    if self._may_cut(*_beside(text, end)):
                        break
            count -= 1
        return count

    def length_known(self, text: str) -> int:
        """How many characters of a spelled text some conversation begins with."""
        return max((common_start(text, known.text) for known in self._texts), default=0)

    def earlier_clock(self, text: str, clock: dict[str, str]) -> dict[str, str]:
        """The times, by their formats, that were told to the conversation which a spelled text goes on with.

        `clock` has the times that were told now. Empty where no conversation differs in the time alone.
        """
        longest, earlier = 0, {}
        for known in reversed(self._texts):
            length, told = _with_its_times(text, known.text, clock)
            if told and length > longest:
                longest, earlier = length, told
        return earlier


def latest(known: list, newest) -> list:
    """Conversations with one more, in place of those that it goes on; the first go where there are too many.

    Each has its ``ids``.
    """
    kept = [one for one in known if common_start(newest.ids, one.ids) < len(one.ids)]
    kept = [*kept, newest][-MAX_TEXTS:]
    while len(kept) > 1 and sum(len(one.ids) for one in kept) > MAX_TOKENS:
        del kept[0]
    return kept


def common_start(a, b) -> int:
    """How many elements two sequences have in common from their start on."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    step = 64
    while a[low : low + step] == b[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _close(decoder, parts: list[str], ends: array, unfinished: bytearray, length: int) -> int:
    """End a character that will not become whole; returns the length of the text."""
    if rest := decoder.decode(b"", final=True):
        parts.append(rest)
        length += len(rest)
        ends[-1], unfinished[-1] = length, CUT
    return length


def _beside_mark(text: str, end: int) -> bool:
    """Whether a text ends here, or a mark ends or begins: words are never joined over it."""
    return end == len(text) or bool(MARK_CHARACTER.match(text[end]) or MARK_CHARACTER.match(text[end - 1]))


def _beside(text: str, end: int) -> tuple[str, str]:
    """The words on both sides of a place in a spelled text."""
    left = MARK_CHARACTER.split(text[max(0, end - BESIDE) : end])[-1]
    return left, MARK_CHARACTER.split(text[end : end + BESIDE], maxsplit=1)[0]


# --- Why a prompt is read again ---


def why_read_again(source, prompt: array, known: Iterable[array], text_of: Callable[[array], str]) -> str | None:
    """A line for a prompt of which the engine could not use all that was said before; None where it could.

    ``source`` is what the engine said: where the tokens came from, how many, and where the prompt parts from all held.
    """
    n_reused, parts_at = source.n_tokens, source.diverged_at
    told, n_told = max(((ids, common_start(ids, prompt)) for ids in known), default=(array("i"), 0), key=lambda x: x[1])
    reasons = []
    if parts_at < n_told - 1:
        reasons.append(f"nothing that is held goes on like it behind token {parts_at}")
    elif n_told < min(len(told), len(prompt)):
        new, old = (_quoted(text_of(ids[n_told : n_told + SHOWN_TOKENS])) for ids in (prompt, told))
        reasons.append(f"the prompt parts from what was held at token {n_told}: {new} in place of {old}")
    elif not parts_at:
        reasons.append("nothing that is held begins like it")
    if n_reused < min(parts_at, len(prompt) - 1):
        reasons.append(f"what was held can be gone back to at token {n_reused}, and not between there and {parts_at}")
    if not reasons:
        return None
    return f"{n_reused} of {len(prompt)} prompt tokens reused ({source.source}); {'; '.join(reasons)}"


def _quoted(text: str) -> str:
    return json.dumps(text[:SHOWN_CHARACTERS], ensure_ascii=False)


# --- The clock of a conversation stands still ---


def _with_its_times(text: str, known: str, clock: dict[str, str]) -> tuple[int, dict[str, str]]:
    """How long a text is a start of `known` when it is told the times that stand there; and these times."""
    told: dict[str, str] = {}
    while (shared := common_start(text, known)) < len(text):
        for form, value in clock.items():
            begin, other = _other_time(text, known, shared, form, value)
            if other and told.setdefault(form, other) == other:
                text = text[:begin] + other + text[begin + len(value) :]
                break
        else:
            break
    return shared, told


def _other_time(text: str, known: str, shared: int, form: str, value: str) -> tuple[int, str]:
    """Where `text` holds `value`, and the other time that `known` holds there; empty if they part elsewhere."""
    begin = text.find(value, max(0, shared - len(value) + 1), shared + len(value))
    if begin < 0 or begin > shared:
        return 0, ""
    behind = text[begin + len(value) :][:BEHIND_CLOCK]
    same, other = 0, ""
    for length in range(1, len(value) + CLOCK_SLACK):
        end = begin + length
        n_same = common_start(behind, known[end : end + BEHIND_CLOCK]) if behind else 1
        if n_same > same and _is_time(known[begin:end], form):
            same, other = n_same, known[begin:end]
    return begin, other


def _is_time(text: str, form: str) -> bool:
    """Whether `strftime` could have written a text in this form."""
    # What the C library has beside what Python reads: without a leading zero, and compounds.
    plain = re.sub(r"%[-_^#]", "%", form)
    for short, long in (("%e", "%d"), ("%k", "%H"), ("%l", "%I"), ("%P", "%p"), ("%F", "%Y-%m-%d"), ("%T", "%H:%M:%S")):
        plain = plain.replace(short, long)
    plain = plain.replace("%R", "%H:%M").replace("%D", "%m/%d/%y").replace("%h", "%b")
    try:
        datetime.datetime.strptime(text.strip(), plain.strip())
    except (ValueError, re.error):
        return False
    return True
