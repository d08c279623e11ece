"""One run of the engine process: lines in, lines out, its last words, its end.

Owns the process and its three pipes; refuses to know what a line means. Invariant: whatever the process does, a reader
gets a line, or EngineGone with how it ended, within the limit that it gave.

Read next: ``httpchild.py``, which speaks over these pipes.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

from httplines import EngineGone
from printable import one_line

# The longest answer line: a million token ids of the live conversation.
LINE_LIMIT_BYTES = 16 << 20
LOG_LINE_LIMIT_BYTES = 1 << 20
# Lines that a child may be ahead of us; beyond that the pipe blocks it.
LINES_AHEAD = 1024
# How long a child may take to leave after QUIT, or after it said FATAL.
LEAVE_GRACE_S = 5.0
# What the environment of the front may hold and a child has no use for.
SECRETS = ("STRATA_API_KEY",)


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
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                limit=LINE_LIMIT_BYTES,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name not in SECRETS},
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

    def forget_words(self) -> None:
        """What the child has logged so far is not about what comes now."""
        self._last_words = ""

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
            self._last_words = one_line(line.strip())[:500]
            self._log(line)

    async def read_line(self, left_s: float, limit_s: float | None = None) -> str:
        """The next line, in ``left_s`` seconds of a limit of ``limit_s``.

        Raises EngineGone when the child ended, wrote garbage or was silent.
        """
        try:
            async with asyncio.timeout(left_s):
                line = await self._lines.get()
        except TimeoutError:
            raise EngineGone(f"the engine was silent for {limit_s or left_s:g} s") from None
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

    async def unasked(self) -> str:
        """What the child said when nobody had asked; it has said something."""
        line = self._lines.get_nowait()
        if isinstance(line, EngineGone):
            return str(await self._how_it_ended(line))
        return f"the engine spoke unasked: {line[:200]!r}"

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
