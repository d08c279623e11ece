"""The lines of the pipe: each record comes back from its line, and a line that is none is refused."""

import math
import random
import re

import numpy as np
import pytest

import httperrors
import serveloop
import verbs
from verbs import KINDS, RECORDS, RequestError, SamplingOptions, line_of, parse_gen, read

RNG = random.Random(11)
LETTERS = "abcXYZ"
# A value of each kind of field, as its record holds it.
VALUES = {
    "count": lambda: RNG.choice([0, 7, 10**RNG.randrange(18)]),
    "number": lambda: RNG.randrange(10**9) / 10,
    "word": lambda: "".join(RNG.choices(LETTERS, k=5)),
    "0, 1": lambda: RNG.random() < 0.5,
    "seconds": lambda: RNG.randint(1, verbs.MAX_ALLOWANCE_S),
    "count, stop": lambda: RNG.randint(1, 1 << 20),
    "text": lambda: " ".join(RNG.choices(["", "why", "é=1", "0"], k=RNG.randrange(4))),
    "JSON": lambda: {"held_tokens": 3, "pools": {"k v": RNG.random()}},
    "count, ids": lambda: RNG.choices(range(10**9), k=RNG.randrange(4)),
    "key=value": lambda: {"".join(RNG.choices(LETTERS, k=3)): "a/b=c" for _ in range(3)},
    **{", ".join(words): lambda words=words: RNG.choice(words) for words in (
        verbs.SOURCES, verbs.FINISHES, verbs.ERROR_KINDS)},
}  # fmt: skip


def some(record: type):
    """Such a record with values at random."""
    values = [VALUES[kind.name]() for kind in KINDS[record]]
    return record(*sorted(values)) if record is verbs.Moved else record(*values)


@pytest.mark.parametrize("word", RECORDS)
def test_each_record_comes_back_from_its_line(word):
    record = RECORDS[word]
    for _ in range(200):
        written = some(record)
        line = line_of(written)
        assert line.partition(" ")[0] == word
        assert verbs.kind_of(line) is record
        found = read(line, record)
        assert (type(found), found, line_of(found)) == (record, written, line)


def test_a_line_with_a_field_too_many_or_too_few_is_none():
    for record in RECORDS.values():
        line = line_of(some(record))
        if not KINDS[record][-1].rest:
            for bad in (f"{line} 1", f"{line} ", line.rpartition(" ")[0], line.replace(" ", "  ", 1)):
                with pytest.raises(ValueError, match=" "):
                    read(bad, record)


BAD_LINES = [
    "", "T", "T 1 2", "T 1.0", "T x", "T +1", "T -1", "T 1_0", "T \u0663", "T 9999999999999999999", "t 1", " T 1",
    "PP 1 2 nan 1",
    "PP 1 2 inf 1", "PP 1 2 -1 1", "PP 1 2 +3 1", "PP 1 2 1_0 1", "PP 1 2 1e400 1", "PP 1 2 .5 1",
    "SOURCE file 1 1", "HELD x", "DONE 5 9 10.0 20.0 ended 0 0 4 1 2 0 0 0.0 5 0", "SESSION 5 4", "SWAIT flush 0",
    "SWAIT flush 3601", "SWAIT flush 1.5", "SWAIT fl:sh 5", "SWAIT  5", "SERR odd 0 text", "SERR invalid 2 text",
    "SERR invalid", "SERR invalid 0", "READY 0 stop", "READY stop", "READY", "TOKENS", "TOKENS 2 1", "TOKENS 1 a",
    "TOKENS 1 1,2", "TOKENS 0 1", "TOKENS 2 1 2", "TOKENS 2 1,,2", "TOKENS 1 1234567890", "STATS", "STATS 5", "STATS {",
    "ERASED", "ERASED x", "WARN hot", "HELLO", "RESUME", "RESUME 1 2", "PP 1 2 3", "DONE 1", "DONE 1 2 3",
    "SESSION x 4",
    "SESSION +1 4", "SESSION 1", "SESSION -1 10", "SESSION 1_0 20", "SWAIT flush", "SWAIT flush x", "SWAIT flush -1",
    "SWAIT flush 5 extra", "SAVED 1 2 inf", "SAVED 1 2 +3", "SAVED 1 2 1_0", "SAVED +1 2 3", "SAVED x y z",
    "SAVED 1 2 nan", "SAVED 1 2 -1", "SAVED 1 2", "SAVED -1 2 3", "SAVED 1 2 3 4", "RESTORED 1 2", "saved 1 2 3",
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_is_not_as_the_protocol_has_it_is_refused(line):
    with pytest.raises(ValueError, match=r"."):
        read(line, *RECORDS.values())


def test_the_done_line_has_its_fields_in_order():
    done = read("DONE 1 2 3.5 4.5 stop 6 7 8 9 10 11 12 13.5 14 15", verbs.Done)
    assert done == (1, 2, 3.5, 4.5, "stop", 6, 7, 8, 9, 10, 11, 12, 13.5, 14, 15)
    assert (done.n_drafts_accepted, done.n_reused, done.n_prompt_read) == (6, 8, 14)


def test_a_record_that_nobody_waits_for_is_refused():
    with pytest.raises(ValueError, match="not SAVED or SERR"):
        read("T 5", verbs.Saved, verbs.SessionRefusal)
    assert read("SAVED 1 2 3.0", verbs.Saved) == (1, 2, 3.0)


def test_what_another_engine_may_add_is_passed_over():
    assert read("READY 4096", verbs.Ready) == read("READY 4096 stop drafts", verbs.Ready) == (4096,)
    assert read("INFO a=1 b c=x=y =z 5=6", verbs.Info).pairs == {"a": "1", "c": "x=y"}
    assert read("ERR", verbs.Refusal).reason == ""


def some_keys() -> dict[str, object]:
    """Keys of a GEN line with values inside their ranges."""
    reals = {name: round(RNG.uniform(*limits), 6) for name, limits in verbs.REAL_KEYS.items()}
    keys = reals | {name: RNG.randint(*limits) for name, limits in verbs.WHOLE_KEYS.items()}
    chosen = RNG.sample(sorted(keys), RNG.randrange(len(keys) + 1))
    return {name: keys[name] for name in chosen}


def test_each_request_comes_back_from_its_line():
    theirs = {ours: name for name, ours in verbs.REFERENCE_KEYS.items()}
    for _ in range(300):
        keys, ids, max_new = some_keys(), RNG.choices(range(2**31), k=RNG.randint(1, 9)), RNG.randrange(2**31)
        spelled = {theirs.get(name, name): value for name, value in keys.items()} if RNG.random() < 0.5 else keys
        line = verbs.gen_line(max_new, ids, {**spelled, "unknown": "x", "stop": "5,6"})
        request = parse_gen(line.removeprefix("GEN ").encode())
        assert (request.prompt.dtype, request.prompt.tolist(), request.max_new) == (np.int32, ids, max_new)
        assert request.stop == {5, 6}
        for name, value in keys.items():
            holder = request if name in verbs.SWITCHES else request.sampling
            assert getattr(holder, verbs.SWITCHES.get(name, name)) == value
        unnamed = verbs.SamplingOptions(**{name: keys[name] for name in keys if name not in verbs.SWITCHES})
        assert request.sampling == unnamed
        assert verbs.glance(line) == (len(ids), keys.get("ckpt") != 0)


@pytest.mark.parametrize("name", [*verbs.REAL_KEYS, *verbs.WHOLE_KEYS])
def test_each_key_has_the_ends_of_its_range_and_nothing_beyond(name):
    low, high = (verbs.REAL_KEYS | verbs.WHOLE_KEYS)[name]
    beyond = (-1, high + 1)
    if name in verbs.REAL_KEYS:
        beyond = (math.nextafter(low, -math.inf), math.nextafter(high, math.inf))
    for value in (low, high):
        parse_gen(f"1 {name}={value} 3".encode())
    for value in beyond:
        with pytest.raises(RequestError, match=f"^{name}: "):
            parse_gen(f"1 {name}={value} 3".encode())


@pytest.mark.parametrize("text", [b"1 x=\xff 2", b"1 2,\xff", b"\xff 2", b"x \xff", b"1 stop=\xff 2"])
def test_bytes_that_are_no_text_are_named_by_their_place_in_the_line(text):
    with pytest.raises(RequestError, match=f"^the line is not UTF-8: byte {4 + text.index(0xFF)} of it"):
        parse_gen(text)


def test_a_stop_comes_back_from_its_line():
    assert verbs.stop_line() == "STOP"
    for n_kept in (0, 5, 10**10 - 1):
        assert verbs.stop_count(verbs.stop_line(n_kept).encode()) == n_kept
    for line in (None, b"STOP", b"STOP ", b"STOP -1", b"STOP 1 2", b"STOP x", b"STOP 12345678901"):
        assert verbs.stop_count(line) is None


def test_the_last_line_of_each_command_is_known():
    assert {
        "DONE", "SAVED", "RESTORED", "ERASED", "TOKENS", "STATS", "ERR", "SERR", "FATAL",
    } == verbs.TERMINAL_WORDS  # fmt: skip
    assert not {verbs.WORDS[record] for record in verbs.GENERATION} & verbs.TERMINAL_WORDS - {"DONE"}
    assert verbs.TRANSFERS.keys() <= verbs.VERBS.keys()
    assert all(len(verb) < serveloop.VERB_BYTES for verb in verbs.VERBS)


def test_each_kind_of_failure_has_its_status_over_http():
    assert tuple(httperrors.SESSION_STATUS) == verbs.ERROR_KINDS


def test_an_allowance_is_one_that_a_reader_takes():
    for size_bytes in (0, 1 << 22, 2**63):
        phase = verbs.Phase("capture", verbs.allowance_s(size_bytes))
        assert read(line_of(phase), verbs.Phase) == phase


# --- The GEN line ---


def test_keys_of_a_request():
    request = parse_gen(
        b"7 temperature=0.5 top_p=.9 top_k=40 min_p=5e-2 seed=18446744073709551615 repeat_penalty=1.1 mirostat=2"
        b" repeat_last_n=32 presence_penalty=-0.5 frequency_penalty=+1. ckpt=0 stop=5,6,5 x.y-z=a=b 1 2, 3  4 ,5 "
    )
    assert request.max_new == 7
    assert request.sampling == SamplingOptions(0.5, 0.9, 40, 0.05, 2**64 - 1, 1.1, 32, -0.5, 1.0)
    assert (request.stop, request.checkpoint) == (frozenset({5, 6}), False)
    assert request.prompt.dtype == np.int32
    assert request.prompt.tolist() == [1, 2, 3, 4, 5]


def test_a_request_without_keys_has_the_defaults():
    request = parse_gen(b"0 007,2147483647")
    assert request.prompt.tolist() == [7, 2**31 - 1]
    assert request[1:] == (0, SamplingOptions(), frozenset(), True, True, False, "")


def test_the_keys_of_the_reference_do_what_they_say():
    """Spelled as its own server spells them; the last of two spellings holds."""
    request = parse_gen(
        b"7 penalty_repeat=1.1 penalty_freq=0.25 penalty_present=-0.5 penalty_last_n=32 cvec=0 source=1 3"
    )
    assert request.sampling == SamplingOptions(
        repeat_penalty=1.1, frequency_penalty=0.25, presence_penalty=-0.5, repeat_last_n=32
    )
    assert (request.steered, request.source) == (False, True)
    assert parse_gen(b"7 repeat_penalty=1.2 penalty_repeat=1.1 3").sampling.repeat_penalty == 1.1
    assert parse_gen(b"7 penalty_repeat=1.1 3").sampling.repeat_last_n == 64
    for bad in (b"penalty_repeat=0", b"penalty_last_n=-1", b"penalty_freq=x", b"cvec=2", b"source=yes"):
        with pytest.raises(RequestError, match=bad.decode().partition("=")[0]):
            parse_gen(b"7 " + bad + b" 3")


def plain_ids(text):
    """The plain form of the id list: split at commas, then at blanks; None where it is refused."""
    pieces = [piece.split() for piece in text.split(",")]
    if not all(pieces) or not all(re.fullmatch("[0-9]+", word) for piece in pieces for word in piece):
        return None
    ids = [int(word) for piece in pieces for word in piece]
    return ids if max(ids) < 2**31 else None


def test_id_lists_are_read_as_by_the_plain_form():
    rng = random.Random(7)
    accepted = 0
    for _ in range(5000):
        alphabet = rng.choice(["0123456789, ", "19, ", "12345,-+x=.", "9" * 10 + ","])
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 30)))
        expected = plain_ids(text)
        try:
            found = parse_gen(b"1 " + text.encode()).prompt.tolist()
            accepted += 1
        except RequestError:
            found = None
        assert found == expected, text
    assert 500 < accepted < 4500


@pytest.mark.parametrize("text", ["", "Hello, wörld = 100 %", "a b\nc", "\U0001f600" * 128])
def test_a_label_comes_back_from_its_line(text):
    line = verbs.gen_line(1, [1], {"label": verbs.label_key(text)})
    assert parse_gen(line.removeprefix("GEN ").encode()).label == text


@pytest.mark.parametrize(("value", "why"), [("%ff", "no percent-encoded UTF-8"), ("x" * 513, "at most 512")])
def test_a_label_that_cannot_be_is_refused(value, why):
    with pytest.raises(RequestError, match=why):
        parse_gen(f"1 label={value} 1".encode())
    assert len(verbs.label_key("ä" * 400)) == 3 * 2 * 256, "a longer text is cut between two characters"
