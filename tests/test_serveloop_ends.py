"""STOP, and the ends of the loop: the end of input, a closed stdout, signals and fatal errors; and in a process."""

import contextlib
import io
import locale
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

import serveloop
from generation import FatalError
from given_serveloop import (
    PATIENCE_S,
    Chunks,
    Lines,
    Options,
    ScriptedEngine,
    ScriptedSession,
    done_event,
    echo,
    finishes,
    talk,
    until,
    waiter,
)
from serveloop import Answers, Loop
from verbs import TERMINAL_WORDS, RequestError, Resume, Token
from verbs import SessionDone as Outcome

# --- STOP ---


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


def start_child(tmp_path, **environment):
    code = "import sys, given_serveloop; sys.exit(given_serveloop.child())"
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
