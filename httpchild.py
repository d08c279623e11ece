"""The engine as a child process: started, spoken to in verbs, checked line by line, ended, started again.

Owns the turn (one request at a time, in order of arrival), the limits on silence, and what the child was
last heard to hold. Refuses to know HTTP, text and the engine itself: it sees lines only.

Invariant: there is never more than one child, and one caught out of step is ended before anyone else is served.

Read next: ``verbs.py`` for the lines, ``httplines.py`` for failures, ``httpfront.py``, which makes these calls.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

import verbs
from httplines import (
    Busy,
    ChildError,
    Ending,
    EngineGone,
    EngineRefused,
    FileGone,
    FileThere,
    GivenUp,
    ModelChanged,
    NotLoaded,
    RequestFailed,
    RequestProgress,
    SessionProgress,
    SessionRefused,
    Totals,
    in_step,
    out_of_step,
)
from httppipes import LEAVE_GRACE_S, ChildPipes
from printable import one_line

# Loading says nothing before READY, and a large model on a slow disk takes minutes.
LOAD_LIMIT_S = 3600.0
# A model file that changes while it is loaded is loaded again; one that changes each time cannot be used.
LOAD_TRIES = 3
# Failures after which the child is where it was: nothing was begun, or what was begun is over.
UNHARMED = (Ending, EngineRefused, RequestFailed, GivenUp, FileGone, FileThere, ModelChanged, NotLoaded, SessionRefused)


class Generation:
    """One generation request on its way through the queue and the child."""

    def __init__(self):
        self._events: asyncio.Queue = asyncio.Queue()
        self.given_up = asyncio.Event()
        self.n_kept: int | None = None
        self.told = False  # the child was asked to stop, in time or not

    def stop(self, keep: int | None = None) -> None:
        """Nobody wants the rest: a child that has begun is told, a turn that has not come is skipped.

        With ``keep``, the conversation held afterwards ends behind so many tokens of the answer.
        """
        if not self.stopped:
            self.n_kept = keep
        self.given_up.set()

    @property
    def stopped(self) -> bool:
        return self.given_up.is_set()

    def put(self, event: verbs.Event | ChildError) -> None:
        self._events.put_nowait(event)

    async def next_event(self, limit_s: float | None = None) -> verbs.Event | None:
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
    changed. ``identify`` tells one state of the model file from another; ``loaded`` is awaited after each start, with
    what it said, before anything is asked of the new child.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        silence_s: float = 300.0,
        log: Callable[[str], None] = print,
        watch: Callable[[SessionProgress | None], None] = lambda progress: None,
        identify: Callable[[], object] = lambda: None,
        loaded: Callable[[object], Awaitable[None]] | None = None,
    ):
        self._command = command
        self._silence_s = silence_s
        self._log = log
        self._watch = watch
        self._identify = identify
        self._loaded = loaded
        self._model: object = None
        self._turn = asyncio.Lock()
        self._pipes: ChildPipes | None = None
        self._loading = False
        self._closing = False
        self._current: Generation | None = None
        self._jobs: set[asyncio.Task] = set()
        self._n_held = 0
        self.n_waiting = 0
        self.n_changes = 0
        self.n_ctx: int | None = None
        self.info: dict[str, str] = {}
        self.progress: SessionProgress | None = None
        self.request = RequestProgress()
        self.totals = Totals()
        self.stored = verbs.Stored()  # what the store of the running engine has done, as it last said

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
    def phase(self) -> str:
        """What is done now: ``idle``, ``waiting``, ``reading``, ``answering``, ``saving`` or ``restoring``."""
        if self.progress:
            return "restoring" if self.progress.action == "restore" else "saving"
        if self.request.running:
            return "answering" if self.request.n_generated else "reading"
        return "waiting" if self.busy else "idle"

    @property
    def n_held(self) -> int:
        """Tokens of the live conversation, as the child last said."""
        return self._n_held if self.state == "ready" else 0

    @property
    def pid(self) -> int | None:
        return self._pipes.pid if self._pipes and not self._pipes.gone else None

    # What takes the turn.

    def generate(self, line: str, model: object = None) -> Generation:
        """Queue a ``GEN`` line; a child that is not running is started for it.

        With ``model``, the line is for that state of the model file alone, else it ends with ModelChanged.
        """
        generation = Generation()
        self._start_job(self._run_generation(generation, line, model))
        return generation

    async def run_session(
        self,
        action: str,
        filename: str,
        path: str,
        given_up: asyncio.Event | None = None,
        refusal: Callable[[], ChildError | None] = lambda: None,
    ) -> verbs.SessionDone:
        """Save to or restore from ``path``; once it has begun it goes on to its end, whoever goes.

        What ``refusal`` gives when the turn has come is raised. Raises NotLoaded, SessionRefused, EngineGone, and
        GivenUp when ``given_up`` was set before the turn came.
        """
        return await asyncio.shield(self._start_job(self._run_session(action, filename, path, given_up, refusal)))

    async def erase(self, given_up: asyncio.Event | None = None) -> int:
        """Forget the live conversation; returns its number of tokens. Raises NotLoaded, EngineGone or GivenUp."""
        return await asyncio.shield(self._start_job(self._run_erase(given_up)))

    async def held_tokens(self, given_up: asyncio.Event | None = None) -> list[int]:
        """The ids of the live conversation, none without a child. Raises EngineGone, EngineRefused or GivenUp."""
        return await asyncio.shield(self._start_job(self._run_held_tokens(given_up)))

    async def load(self) -> None:
        """Start the child if it does not run; raises EngineGone when it does not come up."""
        await asyncio.shield(self._start_job(self._run_load()))

    async def unload(self) -> None:
        """End the child, what it holds is lost; raises Busy when a request has the turn."""
        if self.busy:
            raise Busy("the engine is working: try again when the running request has ended")
        async with self._turn:
            await self._end(LEAVE_GRACE_S)

    async def close(self, last: Callable[[], Coroutine] | None = None) -> None:
        """Refuse further calls, stop the running answer, have the ``last`` work done, end the child."""
        self._closing = True
        if self._loading:
            self.kill()
        if self._current:
            self._current.stop()
        async with self._turn:
            try:
                if last and self.state == "ready":
                    await last()
            finally:
                await self._end(LEAVE_GRACE_S)

    async def autosave(self, filename: str, path: str) -> verbs.SessionDone:
        """Save what continues the file at ``path``, as the last work of a child that is being closed."""
        return await self._session_turn("autosave", filename, path)

    def kill(self) -> None:
        """End the child at once, whatever it does."""
        if self._pipes:
            self._pipes.kill()

    def kill_process(self) -> None:
        """The same from another thread, for a loop that does nothing any more."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

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
    async def _my_turn(self, given_up: asyncio.Event | None = None) -> AsyncIterator[None]:
        """Wait in line as long as nobody gives up; whatever leaves the child in the middle of an answer ends it."""
        self._refuse_at_the_end()
        self.n_waiting += 1
        try:
            await self._wait_for_turn(given_up)
        finally:
            self.n_waiting -= 1
        try:
            self._refuse_at_the_end()
            yield
        except UNHARMED:
            raise
        except BaseException:
            await self._end()
            raise
        finally:
            self._turn.release()

    async def _wait_for_turn(self, given_up: asyncio.Event | None) -> None:
        if given_up is None:
            await self._turn.acquire()
            return
        turn, gone = asyncio.create_task(self._turn.acquire()), asyncio.create_task(given_up.wait())
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not turn.done():
                turn.cancel()
        if given_up.is_set():
            if turn.done() and not turn.cancelled():
                self._turn.release()
            raise GivenUp("the request was given up before its turn came")

    def _refuse_at_the_end(self) -> None:
        if self._closing:
            raise Ending("the server is ending")

    async def _ready_pipes(self) -> ChildPipes:
        """The running child, or a new one; one that died, or spoke unasked while idle, is replaced."""
        if self._pipes and self._pipes.ahead:
            self._log(f"{await self._pipes.unasked()}, while it was idle; it is started again")
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
        self._loading = True
        try:
            await self._load_model()
            if self._loaded:
                await self._loaded(self._model)
        except BaseException:
            await self._end()
            raise
        finally:
            self._loading = False

    async def _load_model(self) -> None:
        """Start a child that has loaded one state of the model file from its first byte to its last."""
        for _ in range(LOAD_TRIES):
            await self._end()
            self._model = await asyncio.to_thread(self._identify)
            self._pipes = await ChildPipes.spawn(self._command, self._log)
            self.totals.n_starts += 1
            self._refuse_at_the_end()
            await self._read_start(self._pipes)
            if self._model == await asyncio.to_thread(self._identify):
                return
            self._log("the model file changed while it was loaded; it is loaded again")
        raise EngineGone("the model file changes each time that it is loaded")

    async def _read_start(self, pipes: ChildPipes) -> None:
        info: dict[str, str] = {}
        while (kind := verbs.kind_of(line := await pipes.read_line(LOAD_LIMIT_S))) is not verbs.Ready:
            if kind is verbs.Info:
                info |= {key: one_line(value) for key, value in verbs.read(line, verbs.Info).pairs.items()}
            elif kind is verbs.Fatal:
                raise await self._gave_up(line)
            elif line.partition(" ")[0] in verbs.LOG_WORDS:
                self._log(line)
            else:
                raise EngineGone(f"the engine is out of step at its start: {line[:200]!r}")
        with in_step(line):
            self.n_ctx, self.info, self.stored = verbs.read(line, verbs.Ready).n_ctx, info, verbs.Stored()
        pipes.forget_words()

    async def _say(self, pipes: ChildPipes, line: str) -> None:
        """Begin an exchange: what was logged before is not why it fails."""
        pipes.forget_words()
        await pipes.write_line(line, self._silence_s)

    async def _hear(self, pipes: ChildPipes, limit_s: float | None = None) -> str:
        """The next answer line within the limit; lines for the log are passed on, FATAL ends the child."""
        limit_s = limit_s or self._silence_s
        begun = asyncio.get_running_loop().time()
        while True:
            # A line for the log is no sign of life: what was asked for has to come within the limit all the same.
            left_s = begun + limit_s - asyncio.get_running_loop().time()
            line = await pipes.read_line(max(left_s, 0.0), limit_s)
            if verbs.kind_of(line) is verbs.Fatal:
                raise await self._gave_up(line)
            if line.partition(" ")[0] not in verbs.LOG_WORDS:
                return line
            self._log(line)

    async def _gave_up(self, line: str) -> EngineGone:
        await self._end(LEAVE_GRACE_S)
        return EngineGone(f"the engine gave up: {one_line(verbs.read(line, verbs.Fatal).reason)}")

    def _now_holds(self, n_tokens: int) -> None:
        self._n_held = n_tokens
        self.n_changes += 1

    async def _end(self, grace_s: float = 0.0) -> None:
        pipes, self._pipes = self._pipes, None
        self._now_holds(0)
        if pipes:
            await pipes.end(grace_s)

    async def _run_load(self) -> None:
        async with self._my_turn():
            await self._ready_pipes()

    async def _run_generation(self, generation: Generation, line: str, model: object) -> None:
        try:
            async with self._my_turn(generation.given_up):
                self._current = generation
                pipes = await self._ready_pipes()
                if generation.stopped:
                    raise GivenUp("the request was given up before its turn came")
                if model is not None and model != self._model:
                    raise ModelChanged("the model file was replaced meanwhile: send the request again")
                n_prompt, keeps = verbs.glance(line)
                self.request = RequestProgress(running=True, n_prompt=n_prompt)
                await self._say(pipes, line)
                await self._read_generation(pipes, generation, keeps=keeps)
        except ChildError as error:
            generation.put(error)
        except BaseException:
            generation.put(EngineGone("the front failed in this request; its log says how"))
            raise
        finally:
            self._current = None
            self.request.running = False

    async def _read_generation(self, pipes: ChildPipes, generation: Generation, *, keeps: bool) -> None:
        stopper, held = None, None
        try:
            while True:
                line = await self._hear(pipes)
                event = self._generation_event(line, begun=stopper is not None)
                if isinstance(event, verbs.Resume) != (stopper is None):
                    raise out_of_step(line, "RESUME comes first and once")
                if stopper is None:
                    # Not before: a STOP that arrives ahead of its request is dropped as stale.
                    stopper = asyncio.create_task(self._pass_stop(pipes, generation))
                if isinstance(event, verbs.Held):
                    held = event
                if isinstance(event, verbs.Done):
                    self._count_generation(event)
                    if held or keeps:
                        self._now_holds(_held_after(event, held, generation))
                if isinstance(event, verbs.Stored):
                    self.stored = event
                elif not isinstance(event, verbs.Reused):  # which repeats what RESUME said
                    self.request.note(event)
                    generation.put(event)
                if isinstance(event, verbs.Done):
                    return
        finally:
            if stopper:
                stopper.cancel()

    def _generation_event(self, line: str, *, begun: bool) -> verbs.Event:
        with in_step(line):
            event = verbs.read(line, *verbs.GENERATION, verbs.Refusal)
        if not isinstance(event, verbs.Refusal):
            return event
        if begun:
            self._now_holds(0)
        raise (RequestFailed if begun else EngineRefused)(one_line(event.reason))

    async def _pass_stop(self, pipes: ChildPipes, generation: Generation) -> None:
        await generation.given_up.wait()
        # When the child cannot take it, the reader of its lines finds out how it ended.
        with contextlib.suppress(EngineGone):
            generation.told = True
            await pipes.write_line(verbs.stop_line(generation.n_kept), self._silence_s)

    def _count_generation(self, done: verbs.Done) -> None:
        self.totals.n_prompt_read += done.n_prompt_read
        self.totals.prompt_ms += done.prompt_ms
        self.totals.n_generated += done.n_generated
        self.totals.decode_ms += done.decode_ms
        self.totals.n_cached += done.n_reused

    async def _run_session(
        self,
        action: str,
        filename: str,
        path: str,
        given_up: asyncio.Event | None,
        refusal: Callable[[], ChildError | None],
    ) -> verbs.SessionDone:
        async with self._my_turn(given_up):
            if error := refusal():
                raise error
            return await self._session_turn(action, filename, path)

    async def _session_turn(self, action: str, filename: str, path: str) -> verbs.SessionDone:
        pipes, verb = self._loaded_pipes(), action.upper()
        self.progress = SessionProgress(action, filename)
        self._watch(self.progress)
        try:
            await self._say(pipes, f"{verb} {path}")
            done = await self._read_session(pipes, self.progress, verbs.TRANSFERS[verb])
        except ChildError:
            self.totals.n_session_failed += 1
            raise
        finally:
            self.progress = None
            self._watch(None)
        if action == "restore":
            self._now_holds(done.n_tokens)
            self.totals.n_restored += 1
        else:
            self.totals.n_saved += 1
        return done

    async def _read_session(self, pipes: ChildPipes, progress: SessionProgress, success: type) -> verbs.SessionDone:
        limit_s = self._silence_s
        while True:
            line = await self._hear(pipes, limit_s)
            limit_s = self._silence_s
            with in_step(line):
                said = verbs.read(line, verbs.Phase, verbs.Moved, success, verbs.SessionRefusal)
                if isinstance(said, verbs.SessionRefusal):
                    raise SessionRefused(said.kind, said.published, one_line(said.reason))
                if isinstance(said, success):
                    return said
                progress.note(said)
            if isinstance(said, verbs.Phase):
                limit_s = max(limit_s, said.allowance_s)
            self._watch(progress)

    async def _run_erase(self, given_up: asyncio.Event | None) -> int:
        async with self._my_turn(given_up):
            erased = await self._ask(self._loaded_pipes(), "ERASE", verbs.Erased)
            self._now_holds(0)
            return erased.n_tokens

    async def _run_held_tokens(self, given_up: asyncio.Event | None) -> list[int]:
        async with self._my_turn(given_up):
            if self.state != "ready":
                return []
            return (await self._ask(self._loaded_pipes(), "TOKENS", verbs.Tokens)).ids

    async def _ask(self, pipes: ChildPipes, verb: str, success: type):
        """The answer to a verb of one line; raises EngineRefused and EngineGone."""
        await self._say(pipes, verb)
        line = await self._hear(pipes)
        with in_step(line):
            answer = await asyncio.to_thread(verbs.read, line, success, verbs.Refusal)  # it may be a million ids
        if isinstance(answer, verbs.Refusal):
            raise EngineRefused(one_line(answer.reason))
        return answer


def _held_after(done: verbs.Done, held: verbs.Held | None, generation: Generation) -> int:
    """Tokens held behind a request: as many as the child says, else what it read, and wrote but for its last token."""
    if held:
        n_held = held.n_tokens
    elif done.n_generated:
        n_held = done.n_prompt + done.n_generated - 1
    else:
        return done.n_reused + done.n_prompt_read
    if generation.told and generation.n_kept is not None:
        # One that came too late for the child's words cuts the conversation all the same.
        n_held = min(n_held, done.n_prompt + generation.n_kept)
    return n_held
