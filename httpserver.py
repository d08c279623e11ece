"""The server below the routes: a socket, uvicorn with limits and an end of our own, and the terminal.

Owns how a server starts to listen, ticks and ends, and what the person at the terminal sees. Refuses to know routes.
Invariant: the engine ends before the connections do, so that running answers and a save come to theirs.

Read next: ``httplimits.py`` for the clock of connections, ``httpfront.py`` for what is served.
"""

import asyncio
import contextlib
import functools
import logging
import socket

import uvicorn

from httplimits import ACCEPT_BATCH, LimitedProtocol, Limits, LogHandler, OncePerMinute
from httplines import ChildError
from printable import one_line
from tokenizer import TokenizerError

# Connections that wait in the kernel; it lets a crowd in however few are taken in one go.
LISTEN_BACKLOG = 1024
# For answers on their way when the engine has gone already.
LAST_ANSWERS_S = 3


class FrontError(Exception):
    """The front cannot start or had to give up; one line for the terminal."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket for an IPv4 or IPv6 address or a name; port 0 takes any free one."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG)
    # Its connections inherit this; without it, each answer waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class FrontServer(uvicorn.Server):
    """uvicorn, with an end of our own: the engine first, so that running answers and a save come to theirs."""

    def __init__(self, front, limits: Limits | None = None):
        """``front`` has ``app``, ``start``, ``close``, ``child`` and ``log``, as ``httpfront.Front``."""
        limits = limits or Limits()
        super().__init__(
            uvicorn.Config(
                front.app,
                http=functools.partial(LimitedProtocol, limits=limits),
                backlog=ACCEPT_BATCH,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=limits.idle_s,
                timeout_graceful_shutdown=LAST_ANSWERS_S,
            )
        )
        self.failure: Exception | None = None
        self._front = front
        self._ending: asyncio.Task | None = None
        self._lines = OncePerMinute(front.log)

    def capture_signals(self):
        return contextlib.nullcontext()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._lines.on_loop_error)
        handler = LogHandler(self._lines)
        loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            await super().serve(sockets)
        finally:
            for logger in loggers:
                logger.removeHandler(handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(LISTEN_BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        now_s = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            connection.tick(now_s)
        return await super().on_tick(counter)

    async def start_front(self) -> None:
        """Load tokenizer and engine; a server that cannot do that at its start ends."""
        try:
            await self._front.start()
        except Exception as error:  # handed over: `serve` raises it when the server has ended
            if not self._ending:
                known = isinstance(error, ChildError | TokenizerError)
                self.failure = FrontError(str(error)) if known else error
                self.should_exit = True

    def end(self) -> None:
        """End in order; a second call ends at once."""
        if self._ending:
            self._front.texts.kill()
            self._front.child.kill()
            self.force_exit = True
        else:
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self._front.close()
        self.should_exit = True


class Terminal:
    """What the person at the terminal sees: the engine's log, one line an operation, a line of progress meanwhile."""

    def __init__(self, console=None):
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._progress = None
        self._task = None

    def log(self, line: str) -> None:
        self._console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)

    def watch(self, progress) -> None:
        """Draw the progress of a save or restore, None when it is over; nothing where stderr is no terminal."""
        if not self._console.is_terminal:
            return
        if progress is None:
            self._stop()
            return
        if self._progress is None:
            self._start()
        what = one_line(f"{progress.action} {progress.filename} {progress.phase}")
        total = progress.total_bytes or None
        self._progress.update(self._task, description=what, completed=progress.done_bytes, total=total)

    def _start(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def _stop(self) -> None:
        if self._progress:
            self._progress.stop()
        self._progress = None
