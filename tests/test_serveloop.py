"""The stdin verbs: their answer lines, refusals, and input in pieces; the session does what each test says.

Read next: test_serveloop_ends.py.
"""

import json
import random
import re
import threading

import numpy as np
import pytest

import serveloop
from generation import RequestFailed
from given_serveloop import PATIENCE_S, Chunks, ScriptedSession, done_event, echo, finishes, talk, waiter
from serveloop import Commands, LineSplitter
from sessionlayout import SessionError
from verbs import TERMINAL_WORDS, RequestError, Resume, Reused, Source, Token, allowance_s

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


def test_erase_tells_how_many_tokens_were_forgotten():
    session = ScriptedSession()
    code, (erased, refused), _ = talk(b"ERASE\nERASE now\nQUIT\n", session)
    assert (code, erased) == (0, "ERASED 17")
    assert refused.startswith("ERR expected: GEN")
    assert session.calls == [("ERASE",)]


@pytest.mark.parametrize("separator", [",", " ", ", "])
def test_a_million_ids(separator):
    ids = np.random.default_rng(5).integers(0, 250_000, 1_000_000)
    line = b"GEN 1 " + separator.join(map(str, ids.tolist())).encode() + b"\n"
    session = ScriptedSession(generate=lambda request, stopped: iter([done_event(0, len(request.prompt), "length")]))
    code, lines, _ = talk(line, session)
    assert (code, len(lines)) == (0, 1)
    assert np.array_equal(session.calls[0][1].prompt, ids)


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
