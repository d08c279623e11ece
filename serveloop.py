"""The stdin verbs: one command line in, its answer lines out, with STOP seen while a request runs.

It owns the wire words of stdin and stdout, their order and their number formats; it knows nothing of HTTP, of text, nor
of what a session holds. Invariant: every command gets exactly one terminal line, in the order of the commands, and
nothing goes on after an error that may have left a wrong state. Read next: engine.py, which does what is asked here.
"""

import contextlib
import io
import json
import math
import os
import queue
import re
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from engine import Engine, Session
from generation import (
    Done,
    FatalError,
    GenRequest,
    PromptProgress,
    RequestError,
    RequestFailed,
    Resume,
    Reused,
    Source,
    Token,
)
from options import EngineOptions
from sampling import SamplingOptions
from sessionfile import SessionError
from sessionfolder import sweep

MAX_LINE_BYTES = 64 << 20  # nine million ids; a longer line is a mistake, and must not cost memory
MAX_READ_AHEAD_BYTES = 64 << 20  # of commands that wait; beyond it the writer has to wait, and a STOP with it
COMMAND_BYTES = 256  # a waiting command costs about so much beside its line
TRANSFERS = (b"SAVE", b"AUTOSAVE", b"RESTORE")  # a refusal of these is SERR, as every failure of theirs
READ_BYTES = 1 << 16  # what a pipe of Linux holds
MAX_INT32, MAX_UINT64 = 2**31 - 1, 2**64 - 1
MAX_ALLOWANCE_S = 3600
MIN_ALLOWANCE_S = 60

GEN_FORM = "GEN <max_new>[ key=value]... <ids>"
EXPECTED = (
    f"expected: {GEN_FORM} | SAVE <path> | AUTOSAVE <path> | RESTORE <path> | ERASE | STOP [<n>] | TOKENS | STATS |"
    " QUIT"
)
TERMINAL_NOTE = (
    "stdin is a terminal: verbs are read here, one a line (GEN, SAVE, AUTOSAVE, RESTORE, ERASE, STOP, TOKENS, STATS,"
    " QUIT);"
    " --http PORT starts the HTTP front"
)


def serve(
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
                answers.line(f"INFO {key}={_word(value)}")
            answers.line(f"READY {engine.max_context} stop")
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
                    answer = f"SERR invalid 0 {error}" if command.verb in TRANSFERS else f"ERR {error}"
                except RequestFailed as error:
                    answer = f"ERR {error}"
                except Exception as error:  # the state may be wrong, so nothing goes on
                    self._log(traceback.format_exc())
                    reason = error if isinstance(error, FatalError) else f"internal: {type(error).__name__}: {error}"
                    word = "ERR" if command.verb == b"GEN" else "FATAL"  # whoever reads an answer knows no FATAL
                    self._answer(command, f"{word} {reason}")
                    return 1
                if answer is None:
                    break
                if answer:
                    self._answer(command, answer)
                self._session.settle(self._commands.has_next)
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
        try:
            command.line.decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"the line is not UTF-8: byte {error.start} of it, {error.reason}") from None
        _, space, rest = command.line.partition(b" ")
        match command.verb:
            case b"GEN":
                return self._generate(command, parse_gen(rest))
            case b"SAVE" | b"AUTOSAVE" | b"RESTORE" as verb:
                return self._transfer(verb.decode(), self._path(verb.decode(), rest, whole=command.ended))
            case b"STOP" if (n_answer := _stop_count(command.line)) is not None:
                self._session.keep(n_answer)
                return ""  # as a STOP in time, it has no line of its own
            case b"TOKENS" if not space:
                held = self._session.held_ids()
                return f"TOKENS {len(held)} {','.join(map(str, held.tolist()))}".rstrip()
            case b"ERASE" if not space:
                return f"ERASED {self._session.erase()}"
            case b"STATS" if not space:
                return f"STATS {json.dumps(self._session.stats())}"
            case b"QUIT" if not space:
                return None
        raise RequestError(f"{EXPECTED}; got {_quoted(command.line)}")

    def _generate(self, command: "Command", request: GenRequest) -> str:
        """Write the lines of a running request and return its DONE."""

        def stopped() -> bool:
            return command.stopped or self._commands.ending or self._answers.closed

        started, done = False, None
        try:
            for event in self._session.generate(request, stopped):
                started = True
                if isinstance(event, Done):
                    done = event  # not written before the session has ended its work on the request
                else:
                    self._answers.line(_event_line(event))
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
            self._answers.line(f"HELD {self._session.n_tokens}")
        return _done_line(done)

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
        word = "RESTORED" if verb == "RESTORE" else "SAVED"
        try:
            outcome = actions[verb](path, progress=self._session_line, phase=self._wait_line)
        except SessionError as error:
            return f"SERR {error.kind} {int(error.published)} {error}"
        return f"{word} {outcome.n_tokens} {outcome.size_bytes} {outcome.ms:.1f}"

    def _session_line(self, done_bytes: int, total_bytes: int) -> None:
        self._answers.line(f"SESSION {done_bytes} {total_bytes}")

    def _wait_line(self, phase: str, size_bytes: int) -> None:
        self._answers.line(f"SWAIT {phase} {allowance_s(size_bytes)}")


def allowance_s(size_bytes: int) -> int:
    """How long a step over so many bytes may be silent: a minute, and a second for every 4 MiB, at most an hour."""
    return min(MAX_ALLOWANCE_S, MIN_ALLOWANCE_S + (size_bytes >> 22))


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


def _word(text: str) -> str:
    """A value of an INFO line: without what would end it, or move a terminal's cursor."""
    return "".join(char if char.isprintable() and not char.isspace() else "_" for char in text)


def _event_line(event: Resume | PromptProgress | Reused | Source | Token) -> str:
    """What is written while a request runs; Python's formats write a dot whatever the locale."""
    match event:
        case Token(token):
            return f"T {token}"
        case PromptProgress(position, n_prompt, ms, tokens_per_s):
            return f"PP {position} {n_prompt} {ms:.1f} {tokens_per_s:.1f}"
        case Resume(n_reused):
            return f"RESUME {n_reused}"
        case Reused(n_reused):
            return f"REUSED {n_reused}"
        case Source(source, n_tokens, diverged_at):
            return f"SOURCE {source} {n_tokens} {diverged_at}"
    raise FatalError(f"internal: unknown event {event!r}")


def _done_line(done: Done) -> str:
    return (
        f"DONE {done.generated} {done.n_prompt} {done.prompt_ms:.1f} {done.decode_ms:.1f} {done.finish}"
        f" {done.drafts_accepted} {done.drafts_offered} {done.reused} {done.cache_hits} {done.cache_lookups}"
        f" {done.ram_blobs} {done.file_blobs} {done.file_mb:.1f} {done.n_prompt_read} {done.experts_over_pcie}"
    )


# --- Commands ---


@dataclass(eq=False)
class Command:
    """One line of stdin without its end; None in place of a line that was too long."""

    line: bytes | None
    ended: bool = True  # False: stdin ended before the line did
    stopped: bool = False  # a STOP came for it
    n_kept: int | None = None  # tokens of the answer that the STOP wants kept, None for all

    @property
    def verb(self) -> bytes:
        return (self.line or b"").partition(b" ")[0]

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
            n_kept = _stop_count(command.line)
            if command.line == b"STOP" or (n_kept is not None and self._unfinished):
                if self._unfinished:
                    self._unfinished[0].stopped, self._unfinished[0].n_kept = True, n_kept
                return
            self._changed.wait_for(lambda: self._waiting_bytes < MAX_READ_AHEAD_BYTES)
            self._waiting_bytes += command.size_bytes
            if command.line is not None and command.line.startswith(b"GEN "):
                self._unfinished.append(command)
        self._ready.put(command)


def _stop_count(line: bytes | None) -> int | None:
    """The tokens of the answer that a `STOP <n>` keeps; None for any other line."""
    match = re.fullmatch(rb"STOP ([0-9]{1,10})", line or b"")
    return int(match[1]) if match else None


# --- The GEN line ---


def parse_gen(text: bytes) -> GenRequest:
    """The request in a GEN line, from behind the first space; raises RequestError with what is wrong in it."""
    max_new, _, rest = text.partition(b" ")
    values, ids_at = {}, 0
    while match := _KEY.match(rest, ids_at):
        key, value = match[1].decode(), match[2]
        if key in _KEYS:
            convert, *limits = _KEYS[key]
            values[_REFERENCE_KEYS.get(key, key)] = convert(key, value, *limits)
        ids_at = match.end()
    if not max_new or not rest[ids_at:].strip(b" "):
        raise RequestError(f"expected: {GEN_FORM}")
    return GenRequest(
        max_new=_whole("max_new", max_new, 0, MAX_INT32),
        stop=frozenset(values.pop("stop", ())),
        checkpoint=bool(values.pop("ckpt", 1)),
        steered=bool(values.pop("cvec", 1)),
        source=bool(values.pop("source", 0)),
        sampling=SamplingOptions(**values),
        prompt=_ids("ids", rest[ids_at:]),
    )


def _ids(name: str, text: bytes) -> np.ndarray:
    """Token ids separated by one comma or by spaces, as int32; a million of them take a quarter of a second."""
    if bad := _NOT_IN_IDS.search(text):
        start = max(text.rfind(b",", 0, bad.start()), text.rfind(b" ", 0, bad.start())) + 1
        piece = re.split(rb"[, ]", text[start : bad.end() + 40], maxsplit=1)[0]
        raise RequestError(f"{name}: {_quoted(piece)} is not a token id, a decimal number")
    if empty := _EMPTY_ID.search(text):
        raise RequestError(f"{name}: a token id is missing at character {empty.start() + 1} of the list")
    ids = np.fromstring(text.replace(b",", b" "), dtype=np.int64, sep=" ")  # saturates at 2^63-1
    if ids.max() > MAX_INT32:
        raise RequestError(f"{name}: a token id is above {MAX_INT32}, so it is in no vocabulary")
    return ids.astype(np.int32)


def _stop_ids(name: str, text: bytes) -> list[int]:
    return _ids(name, text).tolist()


def _whole(name: str, text: bytes, low: int, high: int) -> int:
    if not (_WHOLE.fullmatch(text) and low <= int(text) <= high):
        raise RequestError(f"{name}: {_quoted(text)} is not a whole number from {low} to {high}")
    return int(text)


def _number(name: str, text: bytes, low: float, high: float) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not low <= value <= high:
        raise RequestError(f"{name}: {_quoted(text)} is not a number from {low} to {high}")
    return value


def _quoted(text: bytes) -> str:
    """A piece of input as an error line shows it: printable, and short."""
    shown = repr(text[:40].decode("utf-8", "replace"))
    return shown if len(text) <= 40 else f"{shown}..."


_KEY = re.compile(rb" *([A-Za-z_][A-Za-z0-9_.-]*)=([^ ]*)")
_NOT_IN_IDS = re.compile(rb"[^0-9, ]")
_EMPTY_ID = re.compile(rb"(?:^|,) *(?:,|$)")
_WHOLE = re.compile(rb"[0-9]{1,20}")
_NUMBER = re.compile(rb"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")

# The keys of a GEN line: how the value is read, and the limits of its range. Others are skipped.
_KEYS = {
    "temperature": (_number, 0.0, 100.0),
    "top_p": (_number, 0.0, 1.0),
    "top_k": (_whole, 0, MAX_INT32),
    "min_p": (_number, 0.0, 1.0),
    "seed": (_whole, 0, MAX_UINT64),
    "repeat_penalty": (_number, 0.01, 100.0),
    "repeat_last_n": (_whole, 0, MAX_INT32),
    "presence_penalty": (_number, -100.0, 100.0),
    "frequency_penalty": (_number, -100.0, 100.0),
    "ckpt": (_whole, 0, 1),
    "cvec": (_whole, 0, 1),
    "source": (_whole, 0, 1),
    "stop": (_stop_ids,),
}
# How the reference engine's server spells some of them.
_REFERENCE_KEYS = {
    "penalty_repeat": "repeat_penalty",
    "penalty_freq": "frequency_penalty",
    "penalty_present": "presence_penalty",
    "penalty_last_n": "repeat_last_n",
}
_KEYS |= {theirs: _KEYS[ours] for theirs, ours in _REFERENCE_KEYS.items()}
