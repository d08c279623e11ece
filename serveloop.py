"""The stdin verbs: one command line in, its answer lines out, with STOP seen while a request runs.

It owns stdin and stdout, and which answer follows which command; it knows nothing of HTTP, of text, of how a line is
spelled, nor of what a session holds. Invariant: every command gets exactly one terminal line, in the order of the
commands, and nothing goes on after an error that may have left a wrong state. Read next: verbs.py for the lines,
engine.py, which does what is asked here.
"""

import contextlib
import io
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import verbs
from engine import Engine, Session
from generation import FatalError, RequestFailed
from options import EngineOptions
from sessionfolder import sweep
from sessionlayout import SessionError
from verbs import RequestError, line_of

MAX_LINE_BYTES = 64 << 20  # nine million ids; a longer line is a mistake, and must not cost memory
MAX_READ_AHEAD_BYTES = 64 << 20  # of commands that wait; beyond it the writer has to wait, and a STOP with it
COMMAND_BYTES = 256  # a waiting command costs about so much beside its line
READ_BYTES = 1 << 16  # what a pipe of Linux holds
VERB_BYTES = 16  # the start of a line that any verb is in
EXPECTED = f"expected: {' | '.join(verbs.VERBS.values())}"
TERMINAL_NOTE = (
    f"stdin is a terminal: verbs are read here, one a line ({', '.join(verbs.VERBS)});"
    " --http PORT starts the HTTP front"
)


def serve_verbs(
    options: EngineOptions,
    stdin: BinaryIO | None = None,
    stdout: BinaryIO | None = None,
    log: Callable[[str], None] | None = None,
) -> int:
    """Load the engine, carry out the verbs of stdin until QUIT, its end or a signal, and return the exit code.

    Raises engine.ModelError where the engine cannot be loaded; nothing is on stdout then.
    """
    stdin = _unbuffered(stdin or sys.stdin.buffer)
    answers = Answers(_unbuffered(stdout or sys.stdout.buffer))
    log = log or _log_to_stderr
    with contextlib.redirect_stdout(sys.stderr):  # a stray print must not come between the answers
        engine = Engine.load(options, log)
        if options.slot_save_path:
            sweep_folder(options.slot_save_path, log)
        session = Session(engine)
        session.warm_up()
        try:
            for key, value in session.info().items():
                answers.line(line_of(verbs.Info({key: value})))
            answers.line(line_of(verbs.Ready(engine.max_context)))
            if stdin.isatty():
                log(TERMINAL_NOTE)
            return Loop(session, stdin, answers, log, slot_save_path=options.slot_save_path).run()
        finally:
            session.close()


def sweep_folder(folder: str, log: Callable[[str], None]) -> None:
    """Remove what killed saves left in the folder; what cannot be removed stays and is told."""
    try:
        if n_removed := sweep(folder):
            log(f"removed {n_removed} unfinished files of saves that were killed")
    except OSError as error:
        log(f"unfinished files of killed saves stay: {error}")


def _unbuffered(stream: BinaryIO) -> BinaryIO:
    """The raw file below a buffered one.

    A thread that waits in a buffered read holds its lock, which breaks the interpreter's exit; and what a buffered
    writer could not write, it would try to write once more at exit.
    """
    raw = getattr(stream, "raw", stream)
    if isinstance(raw, io.FileIO):
        os.set_blocking(raw.fileno(), True)  # a terminal may be left non-blocking by another program
    return raw


def _log_to_stderr(text: str) -> None:
    with contextlib.suppress(OSError):  # a lost log must not end the engine
        print(text, file=sys.stderr, flush=True)


class Loop:
    """Carries out commands one at a time on anything that has the methods of engine.Session."""

    def __init__(
        self,
        session: Session,
        stdin: BinaryIO,
        answers: "Answers",
        log: Callable[[str], None],
        *,
        slot_save_path: str | None = None,
    ):
        self._session = session
        self._commands = Commands(stdin)
        self._answers = answers
        self._log = log
        self._folder = slot_save_path or ""

    def run(self) -> int:
        """Carry out commands until QUIT, the end of stdin or a signal (0), a closed stdout or a fatal error (1)."""
        with _signals_call(self._commands.end):
            self._commands.start()
            while not self._answers.closed and (command := self._commands.next()) is not None:
                try:
                    answer = self._carry_out(command)
                except RequestError as error:
                    text, moves = str(error), command.verb in verbs.TRANSFERS  # whose failures are SERR
                    answer = line_of(verbs.SessionRefusal("invalid", False, text) if moves else verbs.Refusal(text))
                except RequestFailed as error:
                    answer = line_of(verbs.Refusal(str(error)))
                except Exception as error:  # the state may be wrong, so nothing goes on
                    self._log(traceback.format_exc())
                    reason = error if isinstance(error, FatalError) else f"internal: {type(error).__name__}: {error}"
                    last = verbs.Refusal if command.verb == "GEN" else verbs.Fatal  # who reads an answer knows no FATAL
                    self._answer(command, line_of(last(str(reason))))
                    return 1
                if answer is None:
                    break
                if answer:
                    self._answer(command, answer)
                self._session.rest(self._commands.has_next)
        if self._answers.closed:
            self._log("stdout was closed by its reader")
        if self._commands.failure is not None:
            self._log(f"stdin cannot be read any more: {self._commands.failure}")
        return int(self._answers.closed or self._commands.failure is not None)

    def _answer(self, command: "Command", line: str) -> None:
        """Write a terminal line; the command is over first, so that a STOP sent on reading it finds the next one."""
        self._commands.finish(command)
        self._answers.line(line)

    def _carry_out(self, command: "Command") -> str | None:
        """The terminal line of one command, None for QUIT, "" for a STOP; raises RequestError where it is refused."""
        if command.line is None:
            raise RequestError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB and was skipped")
        verb, (_, space, rest) = command.verb, command.line.partition(b" ")
        if verb == "GEN":
            return self._generate(command, verbs.parse_gen(rest))
        verbs.check_utf8(command.line)
        if verb in verbs.TRANSFERS:
            return self._transfer(verb, self._path(verb, rest, whole=command.ended))
        match verb:
            case "STOP" if (n_answer := verbs.stop_count(command.line)) is not None:
                self._session.keep(n_answer)
                return ""  # as a STOP in time, it has no line of its own
            case "TOKENS" if not space:
                return line_of(verbs.Tokens(self._session.held_ids().tolist()))
            case "ERASE" if not space:
                return line_of(verbs.Erased(self._session.erase()))
            case "STATS" if not space:
                return line_of(verbs.Stats(self._session.stats()))
            case "QUIT" if not space:
                return None
        raise RequestError(f"{EXPECTED}; got {verbs.quoted(command.line)}")

    def _generate(self, command: "Command", request: verbs.GenRequest) -> str:
        """Write the lines of a running request and return its DONE."""

        def stopped() -> bool:
            return command.stopped or self._commands.ending or self._answers.closed

        started, done = False, None
        try:
            for event in self._session.generate(request, stopped):
                started = True
                if isinstance(event, verbs.Done):
                    done = event  # not written before the session has ended its work on the request
                elif isinstance(event, verbs.GENERATION):
                    self._answers.line(line_of(event))
                else:
                    raise FatalError(f"internal: unknown event {event!r}")
        except RequestError as error:
            if started:
                raise FatalError(f"internal: refused while it ran: {error}") from error
            raise
        if done is None:
            raise FatalError("internal: the request ended without a result")
        self._commands.finish(command)
        if command.n_kept is not None:
            self._session.keep(command.n_kept)
        if request.source:
            self._answers.line(line_of(verbs.Held(self._session.n_tokens)))
            if stored := self._session.stored:
                self._answers.line(line_of(stored))
        return line_of(done)

    def _path(self, verb: str, path: bytes, *, whole: bool) -> str:
        """The file that such a verb names; its bytes are kept, whatever the locale's encoding."""
        if not path:
            raise RequestError(f"expected: {verb} <path>")
        if not whole:
            raise RequestError(f"{verb}: the input ended before the end of the line, so the path may be cut; not done")
        if b"\0" in path:
            raise RequestError(f"{verb}: a path cannot hold a NUL byte")
        return os.path.join(self._folder, os.fsdecode(path))

    def _transfer(self, verb: str, path: str) -> str:
        """SAVE, AUTOSAVE or RESTORE; a closed stdout does not stop it, as its progress lines are then dropped."""
        session = self._session
        actions = {"SAVE": session.save, "AUTOSAVE": session.autosave, "RESTORE": session.restore}
        try:
            done = actions[verb](path, progress=self._session_line, phase=self._wait_line)
        except SessionError as error:
            return line_of(verbs.SessionRefusal(error.kind, error.published, str(error)))
        return line_of(verbs.TRANSFERS[verb](*done))

    def _session_line(self, done_bytes: int, total_bytes: int) -> None:
        self._answers.line(line_of(verbs.Moved(done_bytes, total_bytes)))

    def _wait_line(self, phase: str, size_bytes: int) -> None:
        self._answers.line(line_of(verbs.Phase(phase, verbs.allowance_s(size_bytes))))


@contextlib.contextmanager
def _signals_call(end: Callable[[], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP call `end` meanwhile; one that is ignored stays so."""
    previous = {}
    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # none on Windows
            if number not in previous and signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda *_: end())
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# --- Answers ---


class Answers:
    """The answer lines on stdout, each written at once.

    When the reader has gone, `closed` says so and further lines are dropped: an exception out of a progress line would
    go through the middle of a save.
    """

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.closed = False

    def line(self, text: str) -> None:
        """Write one line; line breaks inside the text (of an error message, say) become spaces."""
        rest = memoryview((" ".join(text.splitlines()) + "\n").encode("utf-8", "backslashreplace"))
        try:
            while rest and not self.closed:
                rest = rest[self._stream.write(rest) :]  # a raw file may take only a part
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: a file object that was closed in this process
            self.closed = True


# --- Commands ---


@dataclass(eq=False)
class Command:
    """One line of stdin without its end; None in place of a line that was too long."""

    line: bytes | None
    ended: bool = True  # False: stdin ended before the line did
    stopped: bool = False  # a STOP came for it
    n_kept: int | None = None  # tokens of the answer that the STOP wants kept, None for all

    @property
    def verb(self) -> str:
        return (self.line or b"")[:VERB_BYTES].partition(b" ")[0].decode("utf-8", "replace")

    @property
    def size_bytes(self) -> int:
        return len(self.line or b"") + COMMAND_BYTES


class LineSplitter:
    """Cuts a stream of bytes into commands and holds at most one unfinished line of MAX_LINE_BYTES."""

    def __init__(self):
        self._held = bytearray()
        self._skipping = False

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    def feed(self, chunk: bytes) -> Iterator[Command]:
        """The commands that end in this chunk."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._hold(chunk[start:end])
            yield self._cut(ended=True)
            start = end + 1
        self._hold(chunk[start:])

    def last(self) -> Iterator[Command]:
        """The command that the end of stdin left without a line end, if there is one."""
        if self._held or self._skipping:
            yield self._cut(ended=False)

    def _hold(self, piece: bytes) -> None:
        if self._skipping or len(self._held) + len(piece) > MAX_LINE_BYTES:
            self._skipping = True
            self._held = bytearray()
        else:
            self._held += piece

    def _cut(self, *, ended: bool) -> Command:
        line = None if self._skipping else bytes(self._held.removesuffix(b"\r"))
        self._held, self._skipping = bytearray(), False
        return Command(line, ended)


class Commands:
    """The commands of stdin in order, read ahead by a thread, which takes the STOPs out of them.

    A STOP belongs to the oldest GEN before it in the input that has no terminal line yet, and to nothing where there is
    none. So it can never reach a request that was sent after it, whichever thread is ahead. A STOP with a count of
    tokens that comes too late for that is a command in the line: what the answer was cut to still holds.
    """

    def __init__(self, stdin: BinaryIO):
        self._read = getattr(stdin, "read1", stdin.read)
        self._ready: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # may be put into by a signal handler
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._unfinished: deque[Command] = deque()  # GENs without a terminal line, oldest first
        self.ending = False
        self.failure: Exception | None = None  # why reading ended before the end of stdin

    def start(self) -> None:
        threading.Thread(target=self._read_all, name="stdin", daemon=True).start()

    def next(self) -> Command | None:
        """Wait for the next command; None at the end of stdin and after `end`."""
        command = self._ready.get()
        if self.ending or command is None:
            return None
        with self._changed:
            self._waiting_bytes -= command.size_bytes
            self._changed.notify()
        return command

    def has_next(self) -> bool:
        """Whether a command waits, or the end."""
        return self.ending or not self._ready.empty()

    def finish(self, command: Command) -> None:
        """From now on a STOP is for the request after this command."""
        with self._changed:
            if self._unfinished and self._unfinished[0] is command:
                self._unfinished.popleft()

    def end(self) -> None:
        """No further command is carried out and a running request stops; for signal handlers: takes no lock."""
        self.ending = True
        self._ready.put(None)

    def _read_all(self) -> None:
        splitter = LineSplitter()
        try:
            while chunk := self._read(READ_BYTES):
                for command in splitter.feed(chunk):
                    self._take(command)
            for command in splitter.last():
                self._take(command)
        except Exception as error:  # handed over: the loop reports it and the process ends with 1
            self.failure = error
        self._ready.put(None)

    def _take(self, command: Command) -> None:
        with self._changed:
            n_kept = verbs.stop_count(command.line)
            if command.line == b"STOP" or (n_kept is not None and self._unfinished):
                if self._unfinished:
                    self._unfinished[0].stopped, self._unfinished[0].n_kept = True, n_kept
                return
            self._changed.wait_for(lambda: self._waiting_bytes < MAX_READ_AHEAD_BYTES)
            self._waiting_bytes += command.size_bytes
            if command.line is not None and command.line.startswith(b"GEN "):
                self._unfinished.append(command)
        self._ready.put(command)
