"""The processes that work on texts, as the front has them: at most two, started when needed, killed when they overrun.

Owns who does which job, what happens to a process that takes too long or too much, and that each knows what was said
before. Refuses to know HTTP and what the jobs are. Invariant: a job ends with an answer or an ApiError, whatever its
process does, and one that nobody waits for any longer is ended with its process.

Read next: ``httptextworker.py``, the process itself.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from array import array
from collections.abc import Callable
from typing import NamedTuple

import httptextworker
from httpfields import ApiError
from httpknown import latest
from httptextworker import LENGTH, LIMITS_S, frame
from tokenizer import Tokenizer

MAX_WORKERS = 2
# How long a job waits for the first process before a second one is started, and how long that is kept for others.
PATIENCE_S = 0.25
SPARE_S = 60.0
# The last resort: a process that waits for something takes no time of the processor.
JOB_LIMIT_S = 600.0
# A job that has not begun is given to so many processes, one after the other, when they end.
MAX_TRIES = 3
LEAVE_GRACE_S = 5.0
PIPE_BYTES = 1 << 20
TOO_MUCH_MEMORY = (signal.SIGABRT, signal.SIGKILL)


class Answer(NamedTuple):
    """What a job came to: fields, and the bytes beside them."""

    fields: dict
    blobs: list[bytes]


class Learned(NamedTuple):
    """A conversation that processes are to know; ``number`` counts up, and tells what one of them has heard."""

    number: int
    ids: array
    whole: bool


class WorkerLost(Exception):
    """A process is gone before its job was done."""


class _Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._killed = False
        self.n_learned = 0
        self.n_jobs = 0

    @classmethod
    async def spawn(cls) -> "_Worker":
        pipe = asyncio.subprocess.PIPE
        # One thread: the library's own would take memory of theirs, and processors from the engine.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, httptextworker.__file__]
        # A session of its own keeps the terminal's Ctrl-C from it.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True, limit=PIPE_BYTES
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        return self._killed or self._process.returncode is not None

    def post(self, head: dict, blob: bytes = b"") -> None:
        self._process.stdin.write(frame(head | {"sizes": [len(blob)]}))
        self._process.stdin.write(blob)

    async def answer(self) -> tuple[str, dict, list[bytes]]:
        """The step that was begun last, and the answer's fields and bytes; raises WorkerLost with the step."""
        phase = ""
        try:
            await self._process.stdin.drain()
            while True:
                head, blobs = await self._read()
                phase = head.get("phase", phase)
                if head.keys() & {"done", "refused", "fault", "memory_mib"}:
                    return phase, head, blobs
        except (OSError, EOFError):  # asyncio.IncompleteReadError is the latter
            raise WorkerLost(phase) from None

    async def _read(self) -> tuple[dict, list[bytes]]:
        stream = self._process.stdout
        head = json.loads(await stream.readexactly(LENGTH.unpack(await stream.readexactly(LENGTH.size))[0]))
        return head, [await stream.readexactly(size) for size in head["sizes"]]

    async def ended(self) -> int:
        """The exit status of a process that closed its pipe, or was killed."""
        self._killed = True
        with contextlib.suppress(TimeoutError):
            # Killed while it ends by itself, its status would be lost.
            async with asyncio.timeout(LEAVE_GRACE_S):
                return await self.left()
        self.kill()
        return await self.left()

    async def left(self) -> int:
        """The exit status, once it has ended."""
        return await self._process.wait()

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()


class TextPool:
    """Jobs on texts, for any number of callers; ``log`` gets a line for what went wrong here."""

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._metadata = b""
        self._turns = asyncio.Semaphore(MAX_WORKERS)
        self._changed = asyncio.Event()
        self._idle: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._starts: set[asyncio.Task] = set()
        self._running: set[asyncio.Task] = set()
        self._start_failure: str | None = None
        self._closed = False
        self._n_learned = 0
        self.conversations: list[Learned] = []

    async def start(self, tokenizer: Tokenizer) -> None:
        """Take a model's tokenizer, in place of an earlier one; the first process starts meanwhile."""
        self._metadata = await asyncio.to_thread(lambda: json.dumps(tokenizer.metadata).encode())
        self.conversations.clear()
        self._end_all()
        self._start_worker()

    def kill(self) -> None:
        """End every process at once; whoever waits for one is refused."""
        self._closed = True
        self._end_all()

    async def close(self) -> None:
        """End every process and wait until it is gone."""
        self.kill()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*self._running)

    def _end_all(self) -> None:
        for start in self._starts:
            start.cancel()
        for worker in self._workers:
            worker.kill()
        self._workers, self._idle = [], []
        self._changed.set()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def run(self, task: str, body: bytes, **about) -> Answer:
        """Have a job done; raises ApiError. Whoever is cancelled here takes a running job's process along."""
        async with self._turns:
            for n_left in reversed(range(MAX_TRIES)):
                worker = await self._take()
                try:
                    async with asyncio.timeout(JOB_LIMIT_S):
                        return self._read_answer(*await self._answer(worker, {"task": task, **about}, body))
                except WorkerLost as lost:
                    status = await worker.ended()
                    # One that ended before it began, as when it was idle, has not met this job; one that was dismissed
                    # with its model did nothing wrong.
                    if self._closed or not n_left or (str(lost) and worker in self._workers):
                        raise self._why(status, str(lost)) from None
                    self._log(f"a process that works on texts ended with status {status}; it is started again")
                except TimeoutError:
                    worker.kill()
                    raise ApiError(500, f"the work on this text was not done after {JOB_LIMIT_S:g} s") from None
                except ApiError:
                    raise
                except BaseException:
                    worker.kill()  # nobody knows what it would say next
                    raise
                finally:
                    self._give_back(worker)

    async def _answer(self, worker: _Worker, head: dict, body: bytes) -> tuple[str, dict, list[bytes]]:
        self._tell(worker)
        worker.post(head, body)
        phase, head, blobs = await worker.answer()
        if "memory_mib" in head:
            worker.kill()  # it is leaving
        return phase, head, blobs

    def learn(self, ids: array, *, whole: bool = True) -> None:
        """Let every process know the ids of a conversation, in place of one that it goes on."""
        if not ids:
            return
        self._n_learned += 1
        self.conversations = latest(self.conversations, Learned(self._n_learned, ids, whole))
        for worker in self._idle:
            self._tell(worker)

    def _tell(self, worker: _Worker) -> None:
        for learned in self.conversations:
            if learned.number > worker.n_learned:
                worker.post({"task": "learn", "whole": learned.whole}, learned.ids.tobytes())
        worker.n_learned = self._n_learned

    def _read_answer(self, phase: str, head: dict, blobs: list[bytes]) -> Answer:
        if "refused" in head:
            refused = head["refused"]
            error = ApiError(refused["status"], refused["body"]["error"]["message"], headers=refused["headers"])
            error.body = refused["body"]
            raise error
        if "memory_mib" in head:
            raise ApiError(400, f"{phase} took more than {head['memory_mib']} MiB of memory; it was given up")
        if "fault" in head:
            self._log(f"the front failed in a request: {head['fault']}")
            raise ApiError(500, "the server failed in this request; its log says where")
        return Answer(head["done"], blobs)

    def _why(self, status: int, phase: str) -> ApiError:
        """What a client is told whose job ended its process."""
        if self._closed:
            return ApiError(503, "the server is ending")
        if status == -signal.SIGPROF:
            return ApiError(400, f"{phase} took more than {LIMITS_S[phase]:g} s of processor time; it was given up")
        if -status in TOO_MUCH_MEMORY:
            return ApiError(400, f"{phase} took more memory than there is for it; it was given up")
        self._log(f"a process that works on texts ended with status {status} ({phase}); it is started again")
        return ApiError(400 if phase else 500, f"{phase or 'the work on this text'} failed: its process ended")

    # Who does what.

    async def _take(self) -> _Worker:
        """A process that is free: the oldest, or after a while another one."""
        while True:
            self._workers = [worker for worker in self._workers if not worker.gone]
            self._idle = [worker for worker in self._idle if not worker.gone]
            if self._idle:
                return self._idle.pop(0)
            if self._closed:
                raise ApiError(503, "the server is ending")
            failure, self._start_failure = self._start_failure, None
            if failure and not self._workers:
                raise ApiError(500, failure)
            if not self._workers and not self._starts:
                self._start_worker()
            self._changed.clear()
            may_start = len(self._workers) == 1 and not self._starts and not failure
            try:
                async with asyncio.timeout(PATIENCE_S if may_start else None):
                    await self._changed.wait()
            except TimeoutError:
                self._start_worker()

    def _give_back(self, worker: _Worker) -> None:
        worker.n_jobs += 1
        if not worker.gone:
            self._tell(worker)
            self._idle = [one for one in self._workers if one is worker or one in self._idle]
            if worker is not self._workers[0]:
                asyncio.get_running_loop().call_later(SPARE_S, self._dismiss, worker, worker.n_jobs)
        elif worker in self._workers:
            self._workers.remove(worker)
            if not self._workers and not self._closed:
                self._start_worker()
        self._changed.set()

    def _dismiss(self, worker: _Worker, n_jobs: int) -> None:
        """End a further process that had nothing to do since it had done so many jobs."""
        if worker in self._idle and worker.n_jobs == n_jobs and len(self._workers) > 1:
            self._idle.remove(worker)
            self._workers.remove(worker)
            worker.kill()

    def _start_worker(self) -> None:
        task = asyncio.create_task(self._started())
        self._starts.add(task)
        task.add_done_callback(self._start_ended)

    def _start_ended(self, task: asyncio.Task) -> None:
        self._starts.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._start_failure = f"the process that works on texts did not start: {error}"
            self._log(self._start_failure)
        self._changed.set()

    async def _started(self) -> None:
        worker = await _Worker.spawn()
        running = asyncio.create_task(worker.left())
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            worker.post({"task": "start", "limits_s": LIMITS_S}, self._metadata)
            self._read_answer(*await worker.answer())
        except BaseException:
            worker.kill()
            raise
        self._workers.append(worker)
        self._idle.append(worker)
