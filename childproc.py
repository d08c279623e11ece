"""The engine as a child process: started, spoken to in verbs, checked line by line, ended, started again.

Owns the pipes, the turn (one request at a time, in order of arrival), the limits on silence, and what the child was
last heard to hold. Refuses to know HTTP, text and the engine itself: it sees lines only.

Invariant: there is never more than one child, and one caught out of step is ended before anyone else is served.

Read next: ``httpfront.py``, which turns requests into these calls.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The longest answer line: TOKENS of a million ids.
LINE_LIMIT_BYTES = 16 << 20
LOG_LINE_LIMIT_BYTES = 1 << 20
# Lines that a child may be ahead of us; beyond that the pipe blocks it.
LINES_AHEAD = 1024
# Loading says nothing before READY, and a large model on a slow disk takes minutes.
LOAD_LIMIT_S = 3600.0
# How long a child may take to leave after QUIT, or after it said FATAL.
LEAVE_GRACE_S = 5.0
SOURCES = ("live", "checkpoint", "parked", "store", "none")
SESSION_KINDS = ("invalid", "storage", "memory", "io")
ALLOWANCE_S = range(1, 3601)

_INFO_PAIR = re.compile(r"(?:^| )(\w+)=(.*?)(?= \w+=|$)")


class ChildError(Exception):
    """Why a call to the engine child brought no result; ``str()`` is meant for the client."""


class EngineGone(ChildError):
    """The child ended, fell silent, left the protocol or could not be started; what it held is lost."""


class EngineRefused(ChildError):
    """The child answered ``ERR``: the request was not carried out and nothing changed."""


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


class Source(NamedTuple):
    """Where the tokens that are held came from, and where the prompt parts from everything that was held."""

    source: str
    n_tokens: int
    diverged_at: int


class PromptProgress(NamedTuple):
    """A chunk of the prompt was read."""

    position: int
    n_prompt: int
    ms: float
    tokens_per_s: float


class Token(NamedTuple):
    """One token of the answer."""

    id: int


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
    value = float(word)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{word[:40]!r} is no finite number from 0 on")
    return value


def _finish(word: str) -> str:
    if word not in ("stop", "length", "cancel"):
        raise ValueError(f"{word[:40]!r} is no way to finish")
    return word


def _source(word: str) -> str:
    if word not in SOURCES:
        raise ValueError(f"{word[:40]!r} is no source of held tokens")
    return word


_DONE_FIELDS = (_count, _count, _real, _real, _finish, *[_count] * 7, _real, _count, _count)
_GEN_LINES = {
    "RESUME": (Resume, (_count,)),
    "PP": (PromptProgress, (_count, _count, _real, _real)),
    "REUSED": (None, (_count,)),
    "SOURCE": (Source, (_source, _count, _count)),
    "T": (Token, (_count,)),
    "DONE": (Done, _DONE_FIELDS),
}


def parse_generation_line(line: str) -> Resume | Source | PromptProgress | Token | Done | None:
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
        raise SessionRefused(kind, published == "1", reason)
    if word != success:
        raise ValueError(f"neither a line of progress nor {success}")
    n_tokens, size_bytes, ms = rest.split(" ")
    return SessionDone(_count(n_tokens), _count(size_bytes), _real(ms))


class ChildPipes:
    """One run of the engine process: lines out, lines in, its last words, its end."""

    def __init__(self, process: asyncio.subprocess.Process, log: Callable[[str], None]):
        self._process = process
        self._log = log
        self._lines: asyncio.Queue[str | EngineGone] = asyncio.Queue(LINES_AHEAD)
        self._last_words = ""
        self.gone = False
        self._pumps = [asyncio.create_task(self._pump_stdout()), asyncio.create_task(self._pump_stderr())]

    @classmethod
    async def spawn(cls, command: Sequence[str], log: Callable[[str], None]) -> "ChildPipes":
        """Start the process; a session of its own keeps the terminal's Ctrl-C from ending it before it has saved."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_LIMIT_BYTES, start_new_session=True
            )
        except OSError as error:
            raise EngineGone(f"the engine could not be started: {error}") from error
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ahead(self) -> bool:
        """The child said something that nobody asked for."""
        return not self._lines.empty()

    async def _pump_stdout(self) -> None:
        stream = self._process.stdout
        while True:
            try:
                raw = await stream.readuntil(b"\n")
                line = raw[:-1].removesuffix(b"\r").decode()
            except asyncio.IncompleteReadError:
                break
            except (asyncio.LimitOverrunError, UnicodeDecodeError) as error:
                await self._lines.put(EngineGone(f"the engine is out of step: a line that cannot be read ({error})"))
                return
            await self._lines.put(line)
        self.gone = True
        await self._lines.put(EngineGone("the engine ended"))

    async def _pump_stderr(self) -> None:
        rest = b""
        while chunk := await self._process.stderr.read(1 << 16):
            *lines, rest = (rest + chunk)[-LOG_LINE_LIMIT_BYTES:].split(b"\n")
            for line in lines:
                self._hear(line)
        self._hear(rest)

    def _hear(self, raw: bytes) -> None:
        line = raw.decode(errors="replace")
        if line.strip():
            self._last_words = line.strip()[:500]
            self._log(line)

    async def read_line(self, limit_s: float) -> str:
        """The next line; raises EngineGone when the child ended, wrote garbage or was silent for ``limit_s``."""
        try:
            async with asyncio.timeout(limit_s):
                line = await self._lines.get()
        except TimeoutError:
            raise EngineGone(f"the engine was silent for {limit_s:g} s") from None
        if isinstance(line, EngineGone):
            raise await self._how_it_ended(line)
        return line

    async def _how_it_ended(self, error: EngineGone) -> EngineGone:
        """``error`` with the exit status and the last words, where the child has left."""
        if not self.gone:
            return error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_GRACE_S):
                await asyncio.gather(self._process.wait(), asyncio.shield(self._pumps[1]))
        status = self._process.returncode
        how = "" if status is None else f" by signal {-status}" if status < 0 else f" with exit status {status}"
        return EngineGone(f"{error}{how}" + (f": {self._last_words}" if self._last_words else ""))

    async def write_line(self, text: str, limit_s: float) -> None:
        """Hand over one line; raises EngineGone when the child does not take it within ``limit_s``."""
        try:
            self._process.stdin.write(text.encode() + b"\n")
            async with asyncio.timeout(limit_s):
                await self._process.stdin.drain()
        except TimeoutError:
            raise EngineGone(f"the engine took no input for {limit_s:g} s") from None
        except OSError:
            raise await self._how_it_ended(EngineGone("the engine ended")) from None

    async def end(self, grace_s: float = 0.0) -> None:
        """Close its stdin, wait ``grace_s`` for it to leave, then kill it; returns when it is gone for good."""
        self.gone = True
        self._process.stdin.close()
        if grace_s and self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        self.kill()
        await self._process.wait()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL: session files are published by a rename, so that no moment is a bad one."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()


class Generation:
    """One generation request on its way through the queue and the child."""

    def __init__(self):
        self._events: asyncio.Queue = asyncio.Queue()
        self._stop = asyncio.Event()
        self.n_kept: int | None = None

    def stop(self, keep: int | None = None) -> None:
        """Nobody wants the rest: a child that has begun is told, a turn that has not come is skipped.

        With ``keep``, the conversation that is held afterwards ends behind so many tokens of its answer.
        """
        if not self.stopped:
            self.n_kept = keep
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    async def wait_stopped(self) -> None:
        await self._stop.wait()

    def put(self, event: Resume | PromptProgress | Token | Done | ChildError) -> None:
        self._events.put_nowait(event)

    async def next_event(self, limit_s: float | None = None) -> Resume | PromptProgress | Token | Done | None:
        """The next event, None when there was none for ``limit_s``; after Done there is no further one.

        Raises the ChildError that ended the request.
        """
        try:
            async with asyncio.timeout(limit_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, ChildError):
            raise event
        return event


class EngineChild:
    """The engine behind pipes, for any number of callers: they queue, one has the turn.

    ``command`` starts the engine; ``log`` gets each line of its stderr, ``watch`` is called whenever ``progress``
    changed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        silence_s: float = 300.0,
        log: Callable[[str], None] = print,
        watch: Callable[[SessionProgress | None], None] = lambda progress: None,
    ):
        self._command = command
        self._silence_s = silence_s
        self._log = log
        self._watch = watch
        self._turn = asyncio.Lock()
        self._pipes: ChildPipes | None = None
        self._loading = False
        self._closing = False
        self._current: Generation | None = None
        self._jobs: set[asyncio.Task] = set()
        self._n_held = 0
        self.n_waiting = 0
        self.n_ctx: int | None = None
        self.info: dict[str, str] = {}
        self.progress: SessionProgress | None = None
        self.totals = Totals()

    # What can be asked at any time: none of these waits for the turn.

    @property
    def state(self) -> str:
        """``ready``, ``loading`` or ``unloaded`` (also when the child died)."""
        if self._loading:
            return "loading"
        return "ready" if self._pipes and not self._pipes.gone else "unloaded"

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    @property
    def n_held(self) -> int:
        """Tokens of the live conversation, as the child last said."""
        return self._n_held if self.state == "ready" else 0

    @property
    def pid(self) -> int | None:
        return self._pipes.pid if self._pipes and not self._pipes.gone else None

    # What takes the turn.

    def generate(self, order: str) -> Generation:
        """Queue a ``GEN`` line; a child that is not running is started for it."""
        generation = Generation()
        self._start_job(self._run_generation(generation, order))
        return generation

    async def run_session(self, action: str, filename: str, path: str) -> SessionDone:
        """Save to or restore from ``path``; goes on to its end when the caller is cancelled.

        Raises NotLoaded, SessionRefused or EngineGone.
        """
        return await asyncio.shield(self._start_job(self._run_session(action, filename, path)))

    async def erase(self) -> int:
        """Forget the live conversation; returns its number of tokens. Raises NotLoaded or EngineGone."""
        return await asyncio.shield(self._start_job(self._run_erase()))

    async def held_tokens(self) -> list[int]:
        """The ids of the live conversation; raises NotLoaded, EngineRefused or EngineGone."""
        return await asyncio.shield(self._start_job(self._run_held_tokens()))

    async def load(self) -> None:
        """Start the child if it does not run; raises EngineGone when it does not come up."""
        await asyncio.shield(self._start_job(self._run_load()))

    async def unload(self) -> None:
        """End the child, what it holds is lost; raises Busy when a request has the turn."""
        if self.busy:
            raise Busy("the engine is working: try again when the running request has ended")
        async with self._turn:
            await self._end(LEAVE_GRACE_S)

    async def close(self, save: tuple[str, str] | None = None) -> SessionDone | None:
        """Refuse further calls, stop the running answer, save to (filename, path) if asked, end the child."""
        self._closing = True
        if self._loading:
            self.kill()
        if self._current:
            self._current.stop()
        async with self._turn:
            try:
                if save and self.state == "ready":
                    return await self._session_turn("save", *save)
                return None
            finally:
                await self._end(LEAVE_GRACE_S)

    def kill(self) -> None:
        """End the child at once, whatever it does."""
        if self._pipes:
            self._pipes.kill()

    def _start_job(self, work) -> asyncio.Task:
        """Run ``work`` in a task of its own: a client that hangs up must not cut a conversation with the child."""
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._job_done)
        return job

    def _job_done(self, job: asyncio.Task) -> None:
        self._jobs.discard(job)
        error = None if job.cancelled() else job.exception()
        if error and not isinstance(error, ChildError):
            self._log(f"the front failed in a request: {error!r}")

    @contextlib.asynccontextmanager
    async def _my_turn(self) -> AsyncIterator[None]:
        """Wait in line; whatever leaves the child in the middle of an answer ends it."""
        self._refuse_at_the_end()
        self.n_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.n_waiting -= 1
        try:
            self._refuse_at_the_end()
            yield
        except (Ending, EngineRefused, NotLoaded, SessionRefused):
            raise
        except BaseException:
            await self._end()
            raise
        finally:
            self._turn.release()

    def _refuse_at_the_end(self) -> None:
        if self._closing:
            raise Ending("the server is ending")

    async def _ready_pipes(self) -> ChildPipes:
        """The running child, or a new one; one that died, or spoke unasked while idle, is replaced."""
        if self._pipes and self._pipes.ahead:
            self._log("the engine ended or spoke unasked while it was idle; it is started again")
            await self._end()
        if self.state != "ready":
            await self._start()
        return self._pipes

    def _loaded_pipes(self) -> ChildPipes:
        if self.state != "ready":
            raise NotLoaded("no model is loaded: it is loaded by the next generation request or by POST /load")
        if self._pipes.ahead:
            raise EngineGone("the engine is out of step: it spoke unasked")
        return self._pipes

    async def _start(self) -> None:
        await self._end()
        self._loading = True
        try:
            self._pipes = await ChildPipes.spawn(self._command, self._log)
            self.totals.n_starts += 1
            self._refuse_at_the_end()
            await self._read_start(self._pipes)
        except BaseException:
            await self._end()
            raise
        finally:
            self._loading = False

    async def _read_start(self, pipes: ChildPipes) -> None:
        info: dict[str, str] = {}
        while True:
            line = await pipes.read_line(LOAD_LIMIT_S)
            word, _, rest = line.partition(" ")
            if word == "INFO":
                info.update(_INFO_PAIR.findall(rest))
            elif word == "READY":
                break
            else:
                raise EngineGone(f"the engine is out of step at its start: {line[:200]!r}")
        with _in_step(line):
            n_ctx = _count(rest.split(" ")[0])
            if not n_ctx:
                raise ValueError("a context of 0 tokens")
        self.n_ctx, self.info = n_ctx, info

    async def _end(self, grace_s: float = 0.0) -> None:
        pipes, self._pipes = self._pipes, None
        self._n_held = 0
        if pipes:
            await pipes.end(grace_s)

    async def _run_load(self) -> None:
        async with self._my_turn():
            await self._ready_pipes()

    async def _run_generation(self, generation: Generation, order: str) -> None:
        try:
            async with self._my_turn():
                if generation.stopped:
                    raise EngineRefused("the request was given up before its turn came")
                self._current = generation
                pipes = await self._ready_pipes()
                await pipes.write_line(order, self._silence_s)
                await self._read_generation(pipes, generation)
        except ChildError as error:
            generation.put(error)
        except BaseException:
            generation.put(EngineGone("the front failed in this request; its log says how"))
            raise
        finally:
            self._current = None

    async def _read_generation(self, pipes: ChildPipes, generation: Generation) -> None:
        stopper = None
        try:
            while True:
                line = await pipes.read_line(self._silence_s)
                event = await self._generation_event(pipes, line)
                if isinstance(event, Resume) != (stopper is None):
                    raise EngineGone(f"the engine is out of step: {line[:200]!r}, and RESUME comes first and once")
                if stopper is None:
                    # Not before: a STOP that arrives ahead of its request is dropped as stale.
                    stopper = asyncio.create_task(self._pass_stop(pipes, generation))
                if isinstance(event, Done):
                    self._count_generation(event)
                if event is not None:
                    generation.put(event)
                if isinstance(event, Done):
                    return
        finally:
            if stopper:
                stopper.cancel()

    async def _generation_event(self, pipes: ChildPipes, line: str) -> Resume | PromptProgress | Token | Done | None:
        word, _, rest = line.partition(" ")
        if word == "ERR":
            raise EngineRefused(rest)
        if word == "FATAL":
            await self._end(LEAVE_GRACE_S)
            raise EngineGone(f"the engine gave up: {rest}")
        with _in_step(line):
            return parse_generation_line(line)

    async def _pass_stop(self, pipes: ChildPipes, generation: Generation) -> None:
        await generation.wait_stopped()
        # When the child cannot take it, the reader of its lines finds out how it ended.
        with contextlib.suppress(EngineGone):
            stop = "STOP" if generation.n_kept is None else f"STOP {generation.n_kept}"
            await pipes.write_line(stop, self._silence_s)

    def _count_generation(self, done: Done) -> None:
        if done.n_generated:
            self._n_held = done.n_prompt + done.n_generated - 1
        else:
            self._n_held = done.n_reused + done.n_prompt_read
        self.totals.n_prompt_read += done.n_prompt_read
        self.totals.prompt_ms += done.prompt_ms
        self.totals.n_generated += done.n_generated
        self.totals.decode_ms += done.decode_ms
        self.totals.n_cached += done.n_reused

    async def _run_session(self, action: str, filename: str, path: str) -> SessionDone:
        async with self._my_turn():
            return await self._session_turn(action, filename, path)

    async def _session_turn(self, action: str, filename: str, path: str) -> SessionDone:
        verb, success = {"save": ("SAVE", "SAVED"), "restore": ("RESTORE", "RESTORED")}[action]
        pipes = self._loaded_pipes()
        self.progress = SessionProgress(action, filename)
        self._watch(self.progress)
        try:
            await pipes.write_line(f"{verb} {path}", self._silence_s)
            done = await self._read_session(pipes, self.progress, success)
        except ChildError:
            self.totals.n_session_failed += 1
            raise
        finally:
            self.progress = None
            self._watch(None)
        if action == "restore":
            self._n_held = done.n_tokens
            self.totals.n_restored += 1
        else:
            self.totals.n_saved += 1
        return done

    async def _read_session(self, pipes: ChildPipes, progress: SessionProgress, success: str) -> SessionDone:
        limit_s = self._silence_s
        while True:
            line = await pipes.read_line(limit_s)
            limit_s = self._silence_s
            word, _, rest = line.partition(" ")
            if word == "FATAL":
                await self._end(LEAVE_GRACE_S)
                raise EngineGone(f"the engine gave up: {rest}")
            with _in_step(line):
                if word == "SWAIT":
                    limit_s = max(limit_s, _begin_phase(progress, rest))
                elif word == "SESSION":
                    _advance(progress, rest)
                else:
                    return parse_session_end(line, success)
            self._watch(progress)

    async def _run_erase(self) -> int:
        async with self._my_turn():
            pipes = self._loaded_pipes()
            await pipes.write_line("ERASE", self._silence_s)
            line = await pipes.read_line(self._silence_s)
            word, _, rest = line.partition(" ")
            n_erased = self._n_held
            if word == "ERR":
                # An engine without this verb: a new one holds nothing either.
                await self._start()
                return n_erased
            with _in_step(line):
                if word != "ERASED":
                    raise ValueError("not ERASED")
                n_erased = _count(rest)
            self._n_held = 0
            return n_erased


    async def _run_held_tokens(self) -> list[int]:
        async with self._my_turn():
            pipes = self._loaded_pipes()
            await pipes.write_line("TOKENS", self._silence_s)
            line = await pipes.read_line(self._silence_s)
            word, _, rest = line.partition(" ")
            if word == "ERR":
                raise EngineRefused(rest)
            with _in_step(line):
                count, _, words = rest.partition(" ")
                if word != "TOKENS" or not re.fullmatch(r"(\d{1,9}(,\d{1,9})*)?", words, re.ASCII):
                    raise ValueError("not the ids of a conversation")
                ids = [int(one) for one in words.split(",")] if words else []
                if len(ids) != _count(count):
                    raise ValueError(f"{len(ids)} ids")
            return ids


@contextlib.contextmanager
def _in_step(line: str):
    """Whatever cannot be read in ``line`` means that the child left the protocol."""
    try:
        yield
    except ValueError as error:
        raise EngineGone(f"the engine is out of step: {line[:200]!r}: {error}") from error


def _begin_phase(progress: SessionProgress, rest: str) -> int:
    """Note the phase that begins and return the seconds that it may take."""
    phase, allowance = rest.split(" ")
    allowance_s = _count(allowance)
    if allowance_s not in ALLOWANCE_S:
        raise ValueError("an allowance outside 1 to 3600 s")
    progress.phase = phase
    return allowance_s


def _advance(progress: SessionProgress, rest: str) -> None:
    done, total = map(_count, rest.split(" "))
    if done > total:
        raise ValueError("more done than there is")
    if done < progress.done_bytes:
        raise ValueError("progress that falls")
    progress.done_bytes, progress.total_bytes = done, total
