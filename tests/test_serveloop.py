"""The stdin verbs, driven by a session that does what each test wrote down."""

import contextlib
import io
import json
import locale
import os
import pty
import random
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import serveloop
from generation import FatalError, RequestFailed
from serveloop import Answers, Commands, LineSplitter, Loop
from sessionfile import SessionError
from verbs import (
    TERMINAL_WORDS,
    Done,
    PromptProgress,
    RequestError,
    Resume,
    Reused,
    SamplingOptions,
    Source,
    Token,
    allowance_s,
    parse_gen,
)
from verbs import SessionDone as Outcome

PATIENCE_S = 30  # for events that come at once; only a broken loop waits so long


def done_event(generated, n_prompt, finish):
    return Done(generated, n_prompt, 12.345, 6.78, finish, 3, 4, 1, 5, 6, 7, 8, 9.25, n_prompt - 1, 0)


def echo(request, stopped):
    """Answers a request with the start of its prompt."""
    n_prompt = len(request.prompt)
    yield Resume(1)
    yield PromptProgress(n_prompt, n_prompt, 12.345, 1234.56)
    yield Reused(1)
    sent = 0
    for token in request.prompt[: request.max_new]:
        if stopped():
            yield done_event(sent, n_prompt, "cancel")
            return
        yield Token(int(token))
        sent += 1
    yield done_event(sent, n_prompt, "length")


def copy_blocks(path, progress, phase):
    phase("capture", 4 << 20)
    for done_bytes in (0, 16 << 20, 20_000_000):
        progress(done_bytes, 20_000_000)
    phase("publish", 20_000_000)
    return Outcome(42, 20_000_000, 1234.5678)


class ScriptedSession:
    """The methods of engine.Session; what they do is given as functions, what came in is in `calls`."""

    def __init__(self, generate=echo, transfer=copy_blocks, stats=lambda: {"held_tokens": 3}):
        self._generate, self._transfer, self._stats = generate, transfer, stats
        self.calls, self.closed = [], False

    def generate(self, request, stopped):
        self.calls.append(("GEN", request))
        return self._generate(request, stopped)

    def save(self, path, *, progress=None, phase=None):
        self.calls.append(("SAVE", path))
        return self._transfer(path, progress, phase)

    def autosave(self, path, *, progress=None, phase=None):
        self.calls.append(("AUTOSAVE", path))
        return self._transfer(path, progress, phase)

    def restore(self, path, *, progress=None, phase=None):
        self.calls.append(("RESTORE", path))
        return self._transfer(path, progress, phase)

    def stats(self):
        self.calls.append(("STATS",))
        return self._stats()

    def erase(self):
        self.calls.append(("ERASE",))
        return 17

    n_tokens = 5

    def info(self):
        return {"context": "4096", "model": "a  b\n=x\x1b[2J\u2028ü.gguf", "engine": "1.2.3"}

    def held_ids(self):
        return np.array([7, 8, 9], np.int32)

    def keep(self, n_answer):
        self.calls.append(("KEEP", n_answer))

    def settle(self, interrupted):
        self.settled_early = interrupted()

    def warm_up(self) -> None:
        self.calls.append(("warm up",))

    def close(self):
        self.closed = True


class Chunks:
    """A stdin that gives these chunks, one a read; a function among them is called before the read goes on.

    By then every chunk before it has been taken in, which makes the order of events between the threads certain.
    """

    def __init__(self, *steps):
        self._steps = list(steps)

    def read(self, _size):
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, bytes):
                return step
            step()
        return b""


class Lines(io.RawIOBase):
    """A stdout that keeps its lines and calls `on_line` with each of them."""

    def __init__(self, on_line=lambda line: None):
        self.written, self._on_line, self.flushed = b"", on_line, True

    def write(self, data):
        self.written += bytes(data)
        self.flushed = False
        self._on_line(bytes(data))
        return len(data)

    def flush(self):
        self.flushed = True

    def readable(self):
        return False


def talk(stdin, session=None, on_line=lambda line: None, **options):
    """The exit code, the answer lines and the log of one run of the loop."""
    stdout, log = Lines(on_line), []
    stdin = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
    code = Loop(session or ScriptedSession(), stdin, Answers(stdout), log.append, **options).run()
    assert stdout.flushed
    assert stdout.written.endswith(b"\n") or not stdout.written
    return code, stdout.written.decode().splitlines(), log


def waiter(event):
    """A step that waits for an event and fails the test where it does not come."""

    def wait():
        assert event.wait(PATIENCE_S)

    return wait


# --- Verbs and their lines ---


def test_generate_lines_are_exact():
    code, lines, log = talk(b"GEN 2 11,12,13\n")
    assert (code, log) == (0, [])
    assert lines == [
        "RESUME 1",
        "PP 3 3 12.3 1234.6",
        "REUSED 1",
        "T 11",
        "T 12",
        "DONE 2 3 12.3 6.8 length 3 4 1 5 6 7 8 9.2 2 0",
    ]
    assert len(lines[-1].split()) == 16  # the word and 15 fields


@pytest.mark.parametrize(("verb", "last"), [("SAVE", "SAVED"), ("RESTORE", "RESTORED")])
def test_transfer_lines_are_exact(verb, last):
    session = ScriptedSession()
    code, lines, _ = talk(f"{verb} /tmp/a b \n".encode(), session)
    assert code == 0
    assert session.calls == [(verb, "/tmp/a b ")]
    assert lines == [
        "SWAIT capture 61",
        "SESSION 0 20000000",
        "SESSION 16777216 20000000",
        "SESSION 20000000 20000000",
        "SWAIT publish 64",
        f"{last} 42 20000000 1234.6",
    ]


def test_stats_is_one_line_of_json():
    _, lines, _ = talk(b"STATS\n", ScriptedSession(stats=lambda: {"held_tokens": 3, "pools": {"kv": 1.5}}))
    word, text = lines[0].split(" ", 1)
    assert (word, json.loads(text)) == ("STATS", {"held_tokens": 3, "pools": {"kv": 1.5}})


def test_quit_ends_before_later_commands():
    session = ScriptedSession()
    assert talk(b"STATS\nQUIT\nSTATS\n", session)[0] == 0
    assert session.calls == [("STATS",)]


@pytest.mark.parametrize(
    ("size_bytes", "seconds"),
    [(0, 60), (2 << 20, 60), (1_198_691_396, 345), (3540 << 22, 3600), (2**63, 3600)],
)
def test_allowance(size_bytes, seconds):
    assert allowance_s(size_bytes) == seconds


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.bin", "D/a.bin"), (" two  blanks", "D/ two  blanks"), ("/abs/a.bin", "/abs/a.bin"), ("日本", "D/日本")],
)
def test_relative_paths_are_below_the_folder(path, expected):
    session = ScriptedSession()
    talk(f"SAVE {path}\r\nRESTORE {path}\n".encode(), session, slot_save_path="D")
    assert session.calls == [("SAVE", expected), ("RESTORE", expected)]


def test_relative_paths_without_a_folder_stay():
    session = ScriptedSession()
    talk(b"SAVE chat.bin\n", session)
    assert session.calls == [("SAVE", "chat.bin")]


# --- Refusals ---

REFUSED = [
    (b"", "expected: GEN <max_new>"),
    (b"HELLO", "got 'HELLO'"),
    (b"gen 1 1", "expected: GEN"),
    (b" STATS", "expected: GEN"),
    (b"STATS now", "expected: GEN"),
    (b"QUIT now", "expected: GEN"),
    (b"STOP now", "expected: GEN"),
    (b"QUIT ", "expected: GEN"),
    (b"\x1b[A" + b"x" * 1000, r"got '\\x1b\[Ax+'\.\.\.$"),
    (b"SAVE", "expected: SAVE <path>"),
    (b"SAVE ", "expected: SAVE <path>"),
    (b"RESTORE", "expected: RESTORE <path>"),
    (b"SAVE a\0b", "NUL"),
    (b"SAVE \xff", "not UTF-8: byte 5"),
    (b"GEN 1 \xc3", "not UTF-8: byte 6"),
    (b"GEN", "expected: GEN <max_new>"),
    (b"GEN ", "expected: GEN <max_new>"),
    (b"GEN 5", "expected: GEN <max_new>"),
    (b"GEN 5 ", "expected: GEN <max_new>"),
    (b"GEN 5 seed=1", "expected: GEN <max_new>"),
    (b"GEN x 1", "max_new: 'x' is not a whole number"),
    (b"GEN -1 1", "max_new: '-1'"),
    (b"GEN 99999999999 1", "max_new: '99999999999'"),
    (b"GEN 1,2 3", "max_new: '1,2'"),
    (b"GEN 1 1,-2", "ids: '-2' is not a token id"),
    (b"GEN 1 +1", r"ids: '\+1'"),
    (b"GEN 1 0x10 3", "ids: '0x10'"),
    (b"GEN 1 1.0", "ids: '1.0'"),
    (b"GEN 1 1e3", "ids: '1e3'"),
    (b"GEN 1 1\t2", r"ids: '1\\t2'"),
    (b"GEN 1 1_000", "ids: '1_000'"),
    (b"GEN 1 \xd9\xa1", "ids: '١' is not a token id"),
    (b"GEN 1 1 seed=2", "ids: 'seed=2'"),
    (b"GEN 1 1,,2", "missing at character 2"),
    (b"GEN 1 1, ,2", "missing at character 2"),
    (b"GEN 1 ,1", "missing at character 1"),
    (b"GEN 1 1,", "missing at character 2"),
    (b"GEN 1 2147483648", "above 2147483647"),
    (b"GEN 1 1," + b"9" * 400, "above 2147483647"),
    (b"GEN 1 temperature=hot 1", "temperature: 'hot' is not a number from 0.0 to 100.0"),
    (b"GEN 1 temperature=-1 1", "temperature: '-1'"),
    (b"GEN 1 temperature=nan 1", "temperature: 'nan'"),
    (b"GEN 1 temperature=inf 1", "temperature: 'inf'"),
    (b"GEN 1 temperature=0,5 1", "temperature: '0,5'"),
    (b"GEN 1 temperature= 1", "temperature: ''"),
    (b"GEN 1 temperature=1e999 1", "temperature: '1e999'"),
    (b"GEN 1 temperature=" + b"1" * 100_000 + b"x 1", "temperature: '1+'"),
    (b"GEN 1 top_p=1.5 1", "top_p: '1.5'"),
    (b"GEN 1 top_k=-1 1", "top_k: '-1'"),
    (b"GEN 1 top_k=2.5 1", "top_k: '2.5'"),
    (b"GEN 1 min_p=2 1", "min_p: '2'"),
    (b"GEN 1 seed=18446744073709551616 1", "seed: '18446744073709551616'"),
    (b"GEN 1 seed=" + b"1" * 5000 + b" 1", "seed: '1+'"),
    (b"GEN 1 repeat_penalty=0 1", "repeat_penalty: '0'"),
    (b"GEN 1 repeat_last_n=-1 1", "repeat_last_n: '-1'"),
    (b"GEN 1 presence_penalty=1_0 1", "presence_penalty: '1_0'"),
    (b"GEN 1 frequency_penalty=200 1", "frequency_penalty: '200'"),
    (b"GEN 1 ckpt=2 1", "ckpt: '2' is not a whole number from 0 to 1"),
    (b"GEN 1 ckpt=yes 1", "ckpt: 'yes'"),
    (b"GEN 1 stop=a 1", "stop: 'a' is not a token id"),
    (b"GEN 1 stop= 1", "stop: a token id is missing"),
    (b"GEN 1 stop=1,,2 1", "stop: a token id is missing"),
]


@pytest.mark.parametrize(("line", "text"), REFUSED, ids=[str(line[:24]) for line, _ in REFUSED])
def test_refusals_are_one_line_and_stay_in_step(line, text):
    session = ScriptedSession()
    code, lines, log = talk(line + b"\nSTATS\n", session)
    assert (code, log) == (0, [])
    assert len(lines) == 2
    word = "SERR invalid 0" if line.startswith((b"SAVE", b"RESTORE", b"AUTOSAVE")) else "ERR"
    assert re.match(f"{word} .*{text}", lines[0])
    assert lines[0].isprintable()
    assert lines[1].startswith("STATS ")
    assert session.calls == [("STATS",)]


def test_a_refused_request_has_one_line():
    def refuse(request, stopped):
        raise RequestError("prompt of 9 tokens\nis over\r\nthe context\u2028of 8")
        yield

    code, lines, _ = talk(b"GEN 1 1\nSTATS\n", ScriptedSession(generate=refuse))
    assert (code, lines) == (0, ["ERR prompt of 9 tokens is over the context of 8", 'STATS {"held_tokens": 3}'])


def test_the_tokens_held_are_one_line():
    session = ScriptedSession()
    assert talk(b"TOKENS\n", session)[1] == ["TOKENS 3 7,8,9"]
    session.held_ids = lambda: np.empty(0, np.int32)
    assert talk(b"TOKENS\n", session)[1] == ["TOKENS 0"]
    assert talk(b"TOKENS 3\n", session)[1][0].startswith("ERR expected: ")


def test_an_automatic_save_has_the_lines_of_a_save():
    session = ScriptedSession()
    code, lines, _ = talk(b"AUTOSAVE a b.bin\n", session, slot_save_path="D")
    assert (code, session.calls) == (0, [("AUTOSAVE", "D/a b.bin")])
    assert lines == talk(b"SAVE a b.bin\n", ScriptedSession(), slot_save_path="D")[1]


def test_a_request_that_asks_is_told_where_its_start_came_from_and_what_is_held():
    def told(request, stopped):
        yield Resume(1)
        yield Reused(1)
        yield Source("parked", 1, 3)
        yield done_event(0, 4, "length")

    lines = talk(b"GEN 0 source=1 1,2,3,4\n", ScriptedSession(generate=told))[1]
    assert [line.rpartition(" length")[0] or line for line in lines] == [
        "RESUME 1", "REUSED 1", "SOURCE parked 1 3", "HELD 5", "DONE 0 4 12.3 6.8",
    ]  # fmt: skip


def test_a_request_that_fails_on_its_way_ends_with_one_line_and_the_loop_goes_on():
    def failing(request, stopped):
        yield Resume(1)
        raise RequestFailed("no number\nin sight")

    code, lines, log = talk(b"GEN 4 1,2\nSTATS\n", ScriptedSession(generate=failing))
    assert (code, log) == (0, [])
    assert lines == ["RESUME 1", "ERR no number in sight", 'STATS {"held_tokens": 3}']


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_with_a_count_keeps_so_many_tokens_of_the_answer(late):
    """In time it ends the request; too late, it still cuts what the request left."""
    session, read = ScriptedSession(), threading.Event()

    def on_line(line):
        if line.startswith(b"DONE" if late else b"T 2"):
            read.set()

    if late:
        lines = talk(Chunks(b"GEN 3 1,2,3\n", waiter(read), b"STOP 2\nSTATS\n"), session, on_line)[1]
        assert finishes(lines) == ["length"]
    else:
        seen = threading.Event()

        def waiting(request, stopped):
            for event in echo(request, stopped):
                yield event
                if event == Token(2):
                    assert seen.wait(PATIENCE_S)

        session = ScriptedSession(generate=waiting)
        stdin = Chunks(b"GEN 9 1,2,3,4,5\n", waiter(read), b"STOP 2\n", seen.set, b"STATS\n")
        lines = talk(stdin, session, on_line)[1]
        assert finishes(lines) == ["cancel"]
    assert [call for call in session.calls if call[0] != "GEN"] == [("KEEP", 2), ("STATS",)]
    assert lines[-1] == 'STATS {"held_tokens": 3}'
    assert not any(line.startswith(("ERR", "STOP")) for line in lines)


@pytest.mark.parametrize("line", [b"STOP -1", b"STOP x", b"STOP 1 2", b"STOP ", b"STOP 12345678901"])
def test_a_stop_with_anything_else_is_no_verb(line):
    session = ScriptedSession()
    assert talk(line + b"\n", session)[1][0].startswith("ERR expected: ")
    assert session.calls == []


@pytest.mark.parametrize("kind", ["invalid", "storage", "memory", "io"])
@pytest.mark.parametrize("published", [False, True])
def test_a_session_error_gives_its_kind_digit_and_text(kind, published):
    error = SessionError(kind, "reason", "disk space:\nneeds 9 MiB", published=published)

    def fail(path, progress, phase):
        progress(0, 100)
        raise error

    code, lines, _ = talk(b"SAVE x\nSTATS\n", ScriptedSession(transfer=fail))
    assert code == 0
    assert lines[0] == "SESSION 0 100"
    assert lines[1].startswith(f"SERR {kind} {int(published)} ")
    assert lines[1].endswith(" ".join(str(error).splitlines()))
    assert lines[2:] == ['STATS {"held_tokens": 3}']


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
    assert request[1:] == (0, SamplingOptions(), frozenset(), True, True, False)


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


@pytest.mark.parametrize("separator", [",", " ", ", "])
def test_a_million_ids(separator):
    ids = np.random.default_rng(5).integers(0, 250_000, 1_000_000)
    line = b"GEN 1 " + separator.join(map(str, ids.tolist())).encode() + b"\n"
    session = ScriptedSession(generate=lambda request, stopped: iter([done_event(0, len(request.prompt), "length")]))
    code, lines, _ = talk(line, session)
    assert (code, len(lines)) == (0, 1)
    assert np.array_equal(session.calls[0][1].prompt, ids)


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


# --- Input in pieces ---

CONVERSATION = b"GEN 2 11,12,13\r\n\nSAVE a b\nGEN 1 x\nSTATS\r\nRESTORE a b\r\nHELLO\nGEN 9 seed=3 1 2\nSTATS\n"


def test_any_cut_of_the_input_gives_the_same_lines():
    whole = talk(CONVERSATION)
    assert talk(Chunks(*(CONVERSATION[i : i + 1] for i in range(len(CONVERSATION))))) == whole
    rng = random.Random(3)
    for _ in range(50):
        cuts = sorted(rng.choices(range(1, len(CONVERSATION)), k=6))
        pieces = [CONVERSATION[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert talk(Chunks(*filter(None, pieces))) == whole


def test_one_terminal_line_a_command():
    rng = random.Random(4)
    commands = rng.choices(CONVERSATION.splitlines(keepends=True), k=300)
    _, lines, _ = talk(b"".join(commands))
    assert sum(line.split()[0] in TERMINAL_WORDS for line in lines) == 300


def test_only_one_carriage_return_is_dropped():
    session = ScriptedSession()
    talk(b"SAVE a\r\r\nSAVE b\rc\n", session)
    assert session.calls == [("SAVE", "a\r"), ("SAVE", "b\rc")]


def test_a_line_of_70_mib_is_refused_without_being_held():
    splitter, chunk, most = LineSplitter(), b"7" * (1 << 20), 0
    for _ in range(70):
        assert list(splitter.feed(chunk)) == []
        most = max(most, splitter.held_bytes)
    assert most == 64 << 20
    assert splitter.held_bytes == 0
    assert [command.line for command in splitter.feed(b"7\nSTATS\n")] == [None, b"STATS"]


def test_a_reader_without_a_limit_is_found(monkeypatch):
    monkeypatch.setattr(serveloop, "MAX_LINE_BYTES", 1 << 40)
    with pytest.raises(AssertionError):
        test_a_line_of_70_mib_is_refused_without_being_held()


def test_an_overlong_line_is_answered_in_its_turn(monkeypatch):
    monkeypatch.setattr(serveloop, "MAX_LINE_BYTES", 8)
    _, lines, _ = talk(Chunks(b"STATS\n123456789\n1234", b"56789", b"0\nSTATS\n12345678\n123456789"))
    assert [" ".join(line.split()[:4]) for line in lines] == [
        'STATS {"held_tokens": 3}',
        "ERR the line is",
        "ERR the line is",
        'STATS {"held_tokens": 3}',
        "ERR expected: GEN <max_new>[",  # eight bytes are not too long, but no verb
        "ERR the line is",
    ]


def test_the_reader_waits_when_too_much_is_unread(monkeypatch):
    monkeypatch.setattr(serveloop, "MAX_READ_AHEAD_BYTES", 600)
    blocked, end_read = threading.Event(), threading.Event()

    class Watched(threading.Condition):
        def wait(self, timeout=None):
            blocked.set()
            return super().wait(timeout)

    commands = Commands(Chunks(b"a" * 88 + b"\n", b"\n", b"c\n", end_read.set))
    commands._changed = Watched()
    commands.start()
    waiter(blocked)()
    assert not end_read.is_set()
    assert [commands.next().line[:1] for _ in range(3)] == [b"a", b"", b"c"]
    waiter(end_read)()
    assert commands.next() is None


# --- STOP ---


def until(event):
    """A request that sends one token and goes on when the event has come."""

    def generate(request, stopped):
        yield Token(1)
        waiter(event)()
        yield from echo(request, stopped)

    return generate


def finishes(lines):
    return [line.split()[5] for line in lines if line.startswith("DONE")]


def test_stop_ends_the_running_request_and_no_other():
    running, taken = threading.Event(), threading.Event()
    stdin = Chunks(b"GEN 2 1 2\nGEN 2 3 4\n", waiter(running), b"STOP\r\n", taken.set, b"STATS\n")
    session = ScriptedSession(generate=until(taken))
    _, lines, _ = talk(stdin, session, lambda line: running.set() if line == b"T 1\n" else None)
    assert finishes(lines) == ["cancel", "length"]
    assert lines[-1].startswith("STATS")


def test_stop_before_a_request_in_one_write_is_dropped():
    assert finishes(talk(b"STOP\nGEN 2 1 2\nSTATS\n")[1]) == ["length"]


def test_stop_right_behind_a_request_ends_it_though_it_has_not_begun():
    taken = threading.Event()
    stdin = Chunks(b"SAVE x\nGEN 2 1 2\nSTOP\nGEN 2 3 4\n", taken.set)

    def save(path, progress, phase):
        waiter(taken)()
        return Outcome(1, 2, 3.0)

    _, lines, _ = talk(stdin, ScriptedSession(transfer=save))
    assert finishes(lines) == ["cancel", "length"]


def test_stop_between_requests_is_stale():
    done = threading.Event()
    stdin = Chunks(b"GEN 2 1 2\n", waiter(done), b"STOP\nGEN 2 3 4\nSTATS\n")
    _, lines, _ = talk(stdin, on_line=lambda line: done.set() if line.startswith(b"DONE") else None)
    assert finishes(lines) == ["length", "length"]


def test_stop_after_a_done_line_reaches_the_next_request_that_was_sent_before_it():
    done, taken = threading.Event(), threading.Event()
    stdin = Chunks(b"GEN 1 1 2\nGEN 2 3 4\n", waiter(done), b"STOP\n", taken.set)

    def answer_done(line):
        if line.startswith(b"DONE"):
            done.set()
            waiter(taken)()  # a client may be this quick: its STOP is here while the loop still writes

    _, lines, _ = talk(stdin, on_line=answer_done)
    assert finishes(lines) == ["length", "cancel"]


@pytest.mark.parametrize("refused", [b"GEN 1 x\n", b"GEN 1 \xff\n", b"SAVE \n", b"HELLO\n"])
def test_stop_for_a_refused_command_reaches_no_later_one(refused):
    answered = threading.Event()
    stdin = Chunks(refused, waiter(answered), b"STOP\nGEN 2 3 4\n")
    _, lines, _ = talk(stdin, on_line=lambda line: answered.set())
    assert finishes(lines) == ["length"]


def test_stop_does_not_touch_a_save():
    taken = threading.Event()

    def save(path, progress, phase):
        waiter(taken)()
        return Outcome(1, 2, 3.0)

    _, lines, _ = talk(Chunks(b"SAVE x\nSTOP\n", taken.set, b"GEN 1 1\n"), ScriptedSession(transfer=save))
    assert lines[0] == "SAVED 1 2 3.0"
    assert finishes(lines) == ["length"]


# --- The ends: EOF, a closed stdout, signals, fatal errors ---


def test_an_empty_input_ends_with_0():
    assert talk(b"") == (0, [], [])


def test_an_unterminated_last_line_is_carried_out():
    assert finishes(talk(b"GEN 1 5")[1]) == ["length"]
    assert talk(b"STATS\r")[1] == ['STATS {"held_tokens": 3}']
    assert talk(b"STATS\nQUIT")[0] == 0


@pytest.mark.parametrize("line", [b"SAVE chat1.b", b"RESTORE chat1.bin", b"SAVE chat1.bin\r", b"SAVE"])
def test_an_unterminated_save_or_restore_is_refused(line):
    session = ScriptedSession()
    code, lines, _ = talk(b"STATS\n" + line, session)
    assert (code, len(lines), session.calls) == (0, 2, [("STATS",)])
    assert lines[1].startswith("SERR invalid 0 ")


def test_a_running_request_ends_after_the_end_of_input():
    at_end = threading.Event()
    code, lines, _ = talk(Chunks(b"GEN 2 1 2\n", at_end.set), ScriptedSession(generate=until(at_end)))
    assert (code, finishes(lines)) == (0, ["length"])


def test_a_stdin_that_fails_ends_with_1():
    def fail():
        raise OSError(5, "Input/output error")

    code, lines, log = talk(Chunks(b"STATS\n", fail))
    assert (code, lines) == (1, ['STATS {"held_tokens": 3}'])
    assert "Input/output error" in log[0]


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "wb", buffering=0)


def test_a_closed_stdout_stops_a_request_and_ends_with_1():
    seen = []

    def generate(request, stopped):
        seen.append(stopped())
        yield Token(1)
        seen.append(stopped())
        yield done_event(1, 1, "cancel")

    session, log = ScriptedSession(generate=generate), []
    with pipe_without_reader() as stdout:
        assert Loop(session, io.BytesIO(b"GEN 9 1\nSAVE x\n"), Answers(stdout), log.append).run() == 1
    assert seen == [False, True]
    assert [call[0] for call in session.calls] == ["GEN"]
    assert log == ["stdout was closed by its reader"]


def test_a_closed_stdout_does_not_tear_a_save(tmp_path):
    def save(path, progress, phase):
        with open(path, "wb") as file:
            for done_bytes in range(4):
                progress(done_bytes, 3)
                file.write(b"x")
        return Outcome(1, 4, 1.0)

    session = ScriptedSession(transfer=save)
    stdin = io.BytesIO(b"SAVE whole\nSAVE never\n")
    with pipe_without_reader() as stdout:
        code = Loop(session, stdin, Answers(stdout), [].append, slot_save_path=str(tmp_path)).run()
    assert code == 1
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("whole", b"xxxx")]


def test_a_raw_stdout_that_takes_only_a_part_gets_everything():
    class Slow(Lines):
        def write(self, data):
            return super().write(data[:3])

    stdout = Slow()
    Answers(stdout).line("SESSION 16777216 20000000")
    assert stdout.written == b"SESSION 16777216 20000000\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_a_save_ends_after_it(number):
    def save(path, progress, phase):
        signal.raise_signal(number)
        progress(7, 7)
        return Outcome(1, 7, 1.0)

    before = signal.getsignal(number)
    code, lines, _ = talk(b"SAVE x\nSTATS\n", ScriptedSession(transfer=save))
    assert (code, lines) == (0, ["SESSION 7 7", "SAVED 1 7 1.0"])
    assert signal.getsignal(number) is before


def test_a_signal_stops_a_running_request_and_ends():
    def generate(request, stopped):
        signal.raise_signal(signal.SIGTERM)
        return echo(request, stopped)

    code, lines, _ = talk(b"GEN 2 1 2\nSTATS\n", ScriptedSession(generate=generate))
    assert (code, finishes(lines), lines[-1][:4]) == (0, ["cancel"], "DONE")


def test_a_signal_ends_the_wait_for_a_command():
    ended = threading.Event()
    stdin = Chunks(b"STATS\n", lambda: os.kill(os.getpid(), signal.SIGTERM), waiter(ended))
    code, lines, _ = talk(stdin)
    ended.set()
    assert code == 0
    assert lines in ([], ['STATS {"held_tokens": 3}'])  # the signal may come before the first command is taken


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        session = ScriptedSession(stats=lambda: {"raised": signal.raise_signal(signal.SIGINT)})
        assert len(talk(b"STATS\nSTATS\n", session)[1]) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def late_refusal(request, stopped):
    yield Resume(0)
    raise RequestError("too late")


def broken_at_once(request, stopped):
    raise ZeroDivisionError("first\nsecond")


def broken_later(request, stopped):
    yield Resume(0)
    raise ZeroDivisionError("x")


def half_written(*_):
    raise FatalError("restore: a pool was half written")


def broken(*_):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("line", "session", "reason"),
    [
        (b"GEN 1 1", ScriptedSession(generate=broken_at_once), "internal: ZeroDivisionError: first second"),
        (b"GEN 1 1", ScriptedSession(generate=broken_later), "internal: ZeroDivisionError: x"),
        (b"GEN 1 1", ScriptedSession(generate=late_refusal), "internal: refused while it ran: too late"),
        (b"GEN 1 1", ScriptedSession(generate=lambda *_: iter([])), "internal: the request ended without a result"),
        (b"GEN 1 1", ScriptedSession(generate=lambda *_: iter(["T 1"])), "internal: unknown event 'T 1'"),
        (b"SAVE x", ScriptedSession(transfer=broken), "internal: KeyError: 'x'"),
        (b"STATS", ScriptedSession(stats=broken), "internal: KeyError: 'x'"),
        (b"RESTORE x", ScriptedSession(transfer=half_written), "restore: a pool was half written"),
    ],
)
def test_what_may_leave_a_wrong_state_is_fatal(line, session, reason):
    code, lines, log = talk(line + b"\nSTATS\n", session)
    assert code == 1
    assert lines[-1] == f"{'ERR' if line.startswith(b'GEN') else 'FATAL'} {reason}"  # and the process ends
    assert sum(word.split()[0] in TERMINAL_WORDS for word in lines) == 1
    assert len(session.calls) == 1
    assert [text.split()[0] for text in log] == ["Traceback"]


# --- serve_verbs(): the start, and the loop in a process of its own ---


class ScriptedEngine:
    max_context = 4096

    @classmethod
    def load(cls, options, log):
        print("a library's stray print")
        log(f"loading {options.model}")
        return cls()


class Options:
    model, slot_save_path = "m.gguf", None


@pytest.fixture
def scripted(monkeypatch):
    session = ScriptedSession()
    monkeypatch.setattr(serveloop, "Engine", ScriptedEngine)
    monkeypatch.setattr(serveloop, "Session", lambda engine: session)
    return session


def test_serve_starts_with_info_and_ready(scripted):
    stdout, log = Lines(), []
    assert serveloop.serve_verbs(Options, io.BytesIO(b"STATS\n"), stdout, log.append) == 0
    assert stdout.written.decode().splitlines() == [
        "INFO context=4096",
        "INFO model=a__b_=x_[2J_ü.gguf",
        "INFO engine=1.2.3",
        "READY 4096 stop",
        'STATS {"held_tokens": 3}',
    ]
    assert log == ["loading m.gguf"]
    assert scripted.closed


def test_a_terminal_gets_one_line_that_says_what_is_read(scripted):
    controller, terminal = pty.openpty()
    log = []
    with open(terminal, "rb", buffering=0) as stdin, contextlib.closing(open(controller, "wb", buffering=0)) as keys:
        keys.write(b"QUIT\n")
        assert serveloop.serve_verbs(Options, stdin, Lines(), log.append) == 0
    assert log == ["loading m.gguf", serveloop.TERMINAL_NOTE]


def child():
    """What the processes below run: the loop on real stdin and stdout; a SAVE writes a file."""

    def write_file(path, progress, phase):
        with open(path, "wb") as file:
            file.write(b"x" * 1000)
        return Outcome(1, 1000, 0.25)

    serveloop.Engine, serveloop.Session = ScriptedEngine, lambda engine: ScriptedSession(transfer=write_file)
    return serveloop.serve_verbs(Options)


def start_child(tmp_path, **environment):
    code = "import sys, test_serveloop; sys.exit(test_serveloop.child())"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))} | environment,
    )


def test_a_process_whose_reader_goes_ends_quietly_with_1(tmp_path):
    with start_child(tmp_path) as process:
        while process.stdout.readline() != b"READY 4096 stop\n":
            assert process.poll() is None
        process.stdout.close()
        process.stdin.write(b"SAVE chat\nSAVE other\n")
        process.stdin.flush()  # and left open: the end does not come from stdin
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr.read().splitlines()[2:] == [b"stdout was closed by its reader"]
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("chat", 1000)]


def test_a_process_is_ended_by_sigterm_while_it_waits(tmp_path):
    with start_child(tmp_path) as process:
        process.stdin.write(b"STATS\n")
        process.stdin.flush()
        while not process.stdout.readline().startswith(b"STATS"):
            assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert b"Traceback" not in process.stderr.read()


def test_the_bytes_of_a_path_do_not_depend_on_the_locale(tmp_path):
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with start_child(tmp_path, **ascii_locale) as process:
        out, _ = process.communicate("SAVE 日本 é.bin\nGEN 1 1\n".encode(), PATIENCE_S)
    assert b"\nSAVED 1 1000 0.2\n" in out
    assert os.listdir(os.fsencode(tmp_path)) == ["日本 é.bin".encode()]


def test_numbers_have_a_dot_in_a_locale_with_a_comma():
    before = locale.setlocale(locale.LC_NUMERIC)
    try:
        for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "ru_RU.UTF-8", "de_DE.utf8"):
            with contextlib.suppress(locale.Error):
                locale.setlocale(locale.LC_NUMERIC, name)
                break
        else:
            pytest.skip("no locale with a decimal comma is installed")
        _, lines, _ = talk(b"GEN 1 temperature=0.5 1\nSAVE x\n")
        assert "DONE 1 1 12.3 6.8 length 3 4 1 5 6 7 8 9.2 0 0" in lines
        assert lines[-1] == "SAVED 42 20000000 1234.6"
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)


def test_erase_tells_how_many_tokens_were_forgotten():
    session = ScriptedSession()
    code, (erased, refused), _ = talk(b"ERASE\nERASE now\nQUIT\n", session)
    assert (code, erased) == (0, "ERASED 17")
    assert refused.startswith("ERR expected: GEN")
    assert session.calls == [("ERASE",)]
