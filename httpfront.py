"""The HTTP front: routes, checks, event streams, and the order in which a server starts and ends.

Owns what stands on the wire; refuses to know arrays, file layouts and the engine in its own process: that is a child
behind ``childproc``. Invariant: no GET waits for the child, and every answer but a page is JSON or an event stream.

Read next: ``childproc.py`` for the child, ``chatapi.py`` for bodies and answers, ``sessionfolder.py`` for saved files.
"""

import asyncio
import contextlib
import ipaddress
import os
import re
import signal
import socket
import time
from array import array
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import chatapi
import webpage
from chatapi import AnswerReader, ApiError, ChatDialect, Dialect, GenerationRequest, NativeDialect, TextDialect
from childproc import (
    Busy,
    ChildError,
    Done,
    Ending,
    EngineChild,
    EngineRefused,
    Generation,
    NotLoaded,
    PromptProgress,
    Resume,
    SessionDone,
    SessionRefused,
    Source,
    Token,
)
from httpguard import Access, Guard, Json, OptionRefused, error_response, json_bytes, read_body, read_object
from knowntext import why_read_again
from sessionfolder import NameRefused, NotThere, SessionFolder, check_filename
from textpool import Answer as TextAnswer
from textpool import TextPool
from textworker import request_of
from tokenizer import Tokenizer, TokenizerError

# Room in a body for what is no part of the prompt, and what a byte of text takes at most in JSON (as in \u0000). Bodies
# lie in memory, so there is an end to them, however much text the context could hold.
BODY_ROOM_BYTES = 1 << 20
JSON_BYTES_A_BYTE = 6
MAX_BODY_BYTES = 64 << 20
SLOT_BODY_LIMIT_BYTES = 64 << 10
# Clients and proxies drop a stream that is silent for 15 s to 300 s.
KEEP_ALIVE_S = 10.0
# Idle connections of clients that pool them; the client should be the one that closes first.
IDLE_CONNECTION_S = 75
# What a request that came too early is told to wait, in whole seconds.
RETRY_AFTER_S = 5
# Below the 90 s that systemd waits; a save that is not done by then is given up, and the old file stays.
EXIT_GRACE_S = 80.0
# For answers on their way when the engine has gone already.
LAST_ANSWERS_S = 3
SESSION_STATUS = {"invalid": 400, "storage": 507, "memory": 503, "io": 500}
SLOT_ACTIONS = ("save", "restore", "erase")


class FrontError(Exception):
    """The front cannot start or had to give up; one line for the terminal."""


@dataclass(frozen=True)
class FrontOptions:
    """What the HTTP options of ``--serve`` say, checked."""

    port: int
    model: str
    access: Access = field(default_factory=Access)
    slot_save_path: str | None = None
    restore_at_start: str | None = None
    save_at_exit: str | None = None
    silence_s: float = 300.0

    @classmethod
    def from_flags(cls, model: str, slot_save_path: str | None, **flags: str | int | None) -> "FrontOptions":
        """The options as they stand on the command line; raises OptionRefused."""
        named = {flag: flags[flag] for flag in ("session_restore_at_start", "session_save_at_exit")}
        for flag, name in named.items():
            if name is not None:
                _check_session_flag(f"--{flag.replace('_', '-')}", name, slot_save_path)
        if slot_save_path and any("\ud800" <= char <= "\udfff" for char in slot_save_path):
            raise OptionRefused("--slot-save-path: the folder's name is not UTF-8")
        host, port = _address(flags["http"], flags["host"])
        return cls(
            port=port,
            model=model,
            access=Access.from_flags(host, flags["api_key"], flags["trusted_origin"], flags["allowed_host"]),
            slot_save_path=slot_save_path,
            restore_at_start=flags["session_restore_at_start"],
            save_at_exit=flags["session_save_at_exit"],
            silence_s=flags["engine_silence_s"],
        )

    @property
    def model_id(self) -> str:
        """The file's name without its ending and without the number of a part."""
        return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", os.path.basename(self.model), flags=re.IGNORECASE)


def _check_session_flag(flag: str, name: str, slot_save_path: str | None) -> None:
    if slot_save_path is None:
        raise OptionRefused(f"{flag} needs --slot-save-path")
    try:
        check_filename(name)
    except NameRefused as error:
        raise OptionRefused(f"{flag}: {error}") from error


def _address(http: str, host: str | None) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``; an IPv6 address stands in brackets."""
    given, _, port = http.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16):
        raise OptionRefused(f"--http: {http!r} is not [HOST:]PORT with a port from 0 to 65535")
    if given and host:
        raise OptionRefused(f"--http names the host {given!r} and --host {host!r}; give one of them")
    return (given or host or "127.0.0.1").removeprefix("[").removesuffix("]"), int(port)


# --- Starting and ending ---


def serve(options: FrontOptions, command: Sequence[str], terminal: "Terminal | None" = None) -> int:
    """Serve until SIGTERM or SIGINT and return the exit status; ``command`` starts the engine child.

    Raises FrontError when the address or the model cannot be used.
    """
    try:
        listener = listen(options.access.host, options.port)
    except OSError as error:
        where = f"{options.access.host}:{options.port}"
        raise FrontError(f"cannot listen on {where}: {error.strerror or error}; choose another --http") from error
    return asyncio.run(_serve(options, command, listener, terminal or Terminal()))


def listen(host: str, port: int) -> socket.socket:
    """A bound socket for an IPv4 or IPv6 address or a name; port 0 takes any free one."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=128)
    # Its connections inherit this; without it, each answer waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _serve(options: FrontOptions, command: Sequence[str], listener: socket.socket, terminal: "Terminal") -> int:
    front = Front(options, command, terminal)
    address, port = listener.getsockname()[:2]
    terminal.log(f"listening on http://{f'[{address}]' if ':' in address else address}:{port}")
    if options.access.api_key is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        terminal.log("whoever reaches this address may use the server, as there is no --api-key")
    server = FrontServer(front)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(number, server.end)
    starter = asyncio.create_task(server.start_front())
    await server.serve(sockets=[listener])
    starter.cancel()
    await asyncio.gather(starter, return_exceptions=True)
    await front.close()
    if server.failure:
        raise server.failure
    return 0


class FrontServer(uvicorn.Server):
    """uvicorn, with an end of our own: the engine first, so that running answers and a save come to theirs."""

    def __init__(self, front: "Front"):
        super().__init__(
            uvicorn.Config(
                front.app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=IDLE_CONNECTION_S,
                timeout_graceful_shutdown=LAST_ANSWERS_S,
            )
        )
        self.failure: Exception | None = None
        self._front = front
        self._ending: asyncio.Task | None = None

    def capture_signals(self):
        return contextlib.nullcontext()

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
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def watch(self, progress) -> None:
        """Draw the progress of a save or restore, None when it is over; nothing where stderr is no terminal."""
        if not self._console.is_terminal:
            return
        if progress is None:
            self._stop()
            return
        if self._progress is None:
            self._start()
        what = f"{progress.action} {progress.filename} {progress.phase}"
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


# --- Errors and streams ---


def _api_error(error: ChildError) -> ApiError:
    """What a client is told when the child brought no result."""
    if isinstance(error, SessionRefused):
        extra = {"published": True} if error.published else {}
        return ApiError(SESSION_STATUS[error.kind], str(error), kind=error.kind, **extra)
    if isinstance(error, NotLoaded | Ending):
        return _too_early(str(error))
    if isinstance(error, Busy):
        return ApiError(409, str(error))
    return ApiError(400 if isinstance(error, EngineRefused) else 500, str(error))


def _too_early(text: str) -> ApiError:
    return ApiError(503, text, headers={"Retry-After": str(RETRY_AFTER_S)})


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _on_child_error(request: Request, error: ChildError) -> Response:
    return error_response(_api_error(error))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:200]
    texts = {404: f"there is no {path!r}", 405: f"{request.method} is not possible on {path!r}"}
    text = texts.get(error.status_code, error.detail)
    return error_response(ApiError(error.status_code, text, headers=error.headers))


async def _on_hang_up(request: Request, error: ClientDisconnect) -> Response:
    return error_response(ApiError(400, "the client hung up in the middle of its request"))


async def _on_fault(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the server failed in this request; its log says where"))


@contextlib.asynccontextmanager
async def _stopped_on_hang_up(receive, generation: Generation) -> AsyncIterator[asyncio.Task]:
    """The generation ends with this block at the latest, and when the client hangs up: then the task is done."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.stop()

    watcher = asyncio.create_task(watch())
    try:
        yield watcher
    finally:
        watcher.cancel()
        generation.stop()


async def _unless_hung_up(request: Request, work: Coroutine):
    """What ``work`` comes to; it is given up when the client hangs up meanwhile."""
    job = asyncio.create_task(work)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await job
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
        job.cancel()


class EventStream(Response):
    """A stream of server-sent events; stops the generation when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, blocks: AsyncIterator[bytes], generation: Generation):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._blocks = blocks
        self._generation = generation

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        stopping = _stopped_on_hang_up(receive, self._generation)
        async with stopping as watcher, contextlib.aclosing(self._blocks) as blocks:
            async for block in blocks:
                await send({"type": "http.response.body", "body": block, "more_body": True})
                # A child that is ahead of us would keep the loop here, deaf to hang-ups and to everyone else.
                await asyncio.sleep(0)
                if watcher.done():
                    break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(content: dict) -> bytes:
    return b"data: " + json_bytes(content) + b"\n\n"


# --- Routes ---


class Front:
    """The routes and what they share: the child, the tokenizer, the folder of saved sessions."""

    def __init__(self, options: FrontOptions, command: Sequence[str], terminal: Terminal):
        self._options = options
        self._terminal = terminal
        self._begun = int(time.time())
        self._tokenizer: Tokenizer | None = None
        self._restore_refused = False
        self._identity: tuple[str | None, str | None] = (None, None)
        self._ready = False
        self._closing: asyncio.Future | None = None
        self.child = EngineChild(command, silence_s=options.silence_s, log=terminal.log, watch=terminal.watch)
        self._folder = SessionFolder(options.slot_save_path) if options.slot_save_path else None
        self.texts = TextPool(terminal.log)
        self._restored = False
        self._learning: asyncio.Task | None = None
        self.app = self._make_app()

    def _make_app(self) -> Starlette:
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/", self.page, methods=get),
            Route("/health", self.health, methods=get),
            Route("/v1/health", self.health, methods=get),
            Route("/v1/models", self.models, methods=get),
            Route("/models", self.models, methods=get),
            Route("/v1/models/{model:path}", self.model, methods=get),
            Route("/props", self.props, methods=get),
            Route("/slots", self.slots, methods=get),
            Route("/slots/{slot}", self.slot_action, methods=post),
            Route("/metrics", self.metrics, methods=get),
            Route("/sessions", self.sessions, methods=get),
            Route("/sessions/{name:path}", self.delete_session, methods=["DELETE"]),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.text_completion, methods=post),
            Route("/completion", self.native_completion, methods=post),
            Route("/completions", self.native_completion, methods=post),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/apply-template", self.apply_template, methods=post),
            Route("/load", self.load, methods=post),
            Route("/unload", self.unload, methods=post),
        ]
        handlers = {
            ApiError: _on_api_error,
            ChildError: _on_child_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_hang_up,
            Exception: _on_fault,
        }
        guard = [Middleware(Guard, access=self._options.access)]
        app = Starlette(routes=routes, middleware=guard, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    async def start(self) -> None:
        """Load the tokenizer and the engine, restore if asked; raises TokenizerError or ChildError."""
        await self._sweep()
        await asyncio.gather(self._load_tokenizer(), self.child.load())
        if self._options.restore_at_start:
            await self._restore_at_start(self._options.restore_at_start)
        self._ready = True

    async def _load_tokenizer(self) -> None:
        self._tokenizer = await asyncio.to_thread(Tokenizer.load, self._options.model)
        for line in self._tokenizer.guesses:
            self._terminal.log(line)
        await self.texts.start(self._tokenizer)

    async def _sweep(self) -> None:
        try:
            if self._folder and (n_removed := await asyncio.to_thread(self._folder.sweep)):
                self._terminal.log(f"removed {n_removed} unfinished files of saves that were killed")
        except OSError as error:
            self._terminal.log(f"unfinished files of killed saves stay: {error}")

    async def _restore_at_start(self, name: str) -> None:
        """Restore, or say why not: a server without its old conversation is better than none."""
        if not self._folder.holds(name):
            self._terminal.log(f"nothing to restore: there is no {name!r} yet")
            return
        try:
            await self._run_session("restore", name)
        except ChildError as error:
            self._restore_refused = True
            self._terminal.log(f"{name!r} was not restored: {error}")
        if self.child.state != "ready":
            await self.child.load()

    async def close(self) -> None:
        """Stop the running answer, save if asked, end the child; any number of calls do it once."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await self._closing

    async def _close(self) -> None:
        name = self._options.save_at_exit
        if name and name == self._options.restore_at_start and self._restore_refused:
            # The file that could not be used this time may be worth more than what was talked about since.
            name = f"{name}.new"
        self.texts.kill()
        save = (name, self._folder.path_of(name)) if name else None
        try:
            async with asyncio.timeout(EXIT_GRACE_S):
                done = await self.child.close(save)
            if done:
                self._say_done("save", name, done)
        except TimeoutError:
            self.child.kill()
            self._terminal.log(f"the engine was not done after {EXIT_GRACE_S:g} s and was ended")
        except ChildError as error:
            self._terminal.log(f"not saved at exit: {error}")
        await self.texts.close()

    def _say_done(self, action: str, name: str, done: SessionDone) -> None:
        size_mib, seconds = done.size_bytes / (1 << 20), done.ms / 1000
        self._terminal.log(f"{action} {name!r}: {done.n_tokens} tokens, {size_mib:.1f} MiB in {seconds:.2f} s")

    # What answers at once, whatever the child does.

    async def page(self, request: Request) -> Response:
        return Response(webpage.PAGE, media_type="text/html", headers=webpage.HEADERS)

    async def health(self, request: Request) -> Response:
        if self._closing:
            return Json({"status": "ending"}, 503)
        if not self._ready or self.child.state == "loading":
            body = {"status": "loading model", "error": _too_early("the model is loading").body["error"]}
            return Json(body, 503, {"Retry-After": str(RETRY_AFTER_S)})
        return Json({"status": "ok", "model": self.child.state, "busy": self.child.busy})

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["model"] != self._options.model_id:
            raise ApiError(404, f"there is no such model; this server has {self._options.model_id!r}")
        return Json(self._model())

    def _model(self) -> dict:
        head = {"id": self._options.model_id, "object": "model", "created": self._begun, "owned_by": "strata"}
        return {**head, "meta": {"n_ctx": self.child.n_ctx, "n_vocab": self._tokenizer and self._tokenizer.n_vocab}}

    async def props(self, request: Request) -> Response:
        tokenizer = self._ready_tokenizer()
        marks = {
            name: "" if token_id is None else tokenizer.decode([token_id])
            for name, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }
        settings = {"id": 0, "n_ctx": self.child.n_ctx, "params": {"temperature": 0.0, "n_predict": -1}}
        return Json(
            {
                "default_generation_settings": settings,
                "total_slots": 1,
                "model_path": self._options.model_id,
                "chat_template": tokenizer.chat_template or "",
                "modalities": {"vision": False, "audio": False},
                **marks,
                "build_info": f"strata {self.child.info.get('engine', '')}".strip(),
                "engine": self.child.info,
            }
        )

    async def slots(self, request: Request) -> Response:
        if self.child.n_ctx is None:
            raise _too_early("the model is loading")
        slot = {
            "id": 0,
            "n_ctx": self.child.n_ctx,
            "is_processing": self.child.busy,
            "n_prompt_tokens": self.child.n_held,
            "n_waiting": self.child.n_waiting,
            "model": self.child.state,
            "session": self._progress(),
        }
        return Json([slot])

    def _progress(self) -> dict | None:
        progress = self.child.progress
        if progress is None:
            return None
        names = {"action": progress.action, "filename": progress.filename, "phase": progress.phase}
        return {**names, "n_done": progress.done_bytes, "n_total": progress.total_bytes}

    async def metrics(self, request: Request) -> Response:
        lines = []
        for name, kind, what, value in _metrics(self.child):
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name} {value:.12g}"]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # Saved sessions.

    async def sessions(self, request: Request) -> Response:
        folder, info = self._need_folder(), self.child.info
        identity = (info["model_fp"], info["config_fp"]) if {"model_fp", "config_fp"} <= info.keys() else self._identity
        return Json(await asyncio.to_thread(folder.listing, *identity))

    async def delete_session(self, request: Request) -> Response:
        folder = self._need_folder()
        try:
            name = check_filename(request.path_params["name"])
            n_bytes = await asyncio.to_thread(folder.delete, name)
        except NotThere as error:
            raise ApiError(404, str(error)) from error
        except NameRefused as error:
            raise ApiError(400, str(error)) from error
        except OSError as error:
            raise ApiError(500, f"{name!r} cannot be removed: {error.strerror}") from error
        return Json({"filename": name, "n_deleted": n_bytes})

    async def slot_action(self, request: Request) -> Response:
        actions = [value for key, value in parse_qsl(request.url.query, keep_blank_values=True) if key == "action"]
        body = {}
        if actions != ["erase"] or request.headers.get("content-length", "0") != "0":
            body = await read_object(request, SLOT_BODY_LIMIT_BYTES, unique=True)
        if actions != ["erase"]:
            self._need_folder()
        if request.path_params["slot"] != "0":
            raise ApiError(400, f"there is no slot {request.path_params['slot'][:40]!r}; this server has slot 0")
        if len(actions) != 1 or actions[0] not in SLOT_ACTIONS:
            raise ApiError(400, f"give one action of {', '.join(SLOT_ACTIONS)}, as in /slots/0?action=save")
        if actions == ["erase"]:
            return Json({"id_slot": 0, "n_erased": await self.child.erase()})
        return await self._session_action(actions[0], body.get("filename"))

    async def _session_action(self, action: str, name: object) -> Response:
        try:
            name = check_filename(name)
        except NameRefused as error:
            raise ApiError(400, str(error)) from error
        if action == "restore" and not self._folder.holds(name):
            raise ApiError(404, f"there is no session file {name!r}")
        done = await self._run_session(action, name)
        tokens, size = {"save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read")}[action]
        numbers = {tokens: done.n_tokens, size: done.size_bytes, "timings": {f"{action}_ms": done.ms}}
        return Json({"id_slot": 0, "filename": name, **numbers})

    async def _run_session(self, action: str, name: str) -> SessionDone:
        done = await self.child.run_session(action, name, self._folder.path_of(name))
        self._say_done(action, name, done)
        self._restored |= action == "restore"
        # What the engine wrote or took bears its fingerprints, in case that it does not tell them itself.
        self._identity = await asyncio.to_thread(self._folder.identity_of, name) or self._identity
        return done

    def _need_folder(self) -> SessionFolder:
        if self._folder is None:
            raise ApiError(501, "session files are off: start the server with --slot-save-path DIR")
        return self._folder

    # Loading.

    async def load(self, request: Request) -> Response:
        await self.child.load()
        return Json({"status": "loaded", "n_ctx": self.child.n_ctx})

    async def unload(self, request: Request) -> Response:
        await self.child.unload()
        return Json({"status": "unloaded"})

    # Text.

    async def tokenize(self, request: Request) -> Response:
        return await self._text_answer(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        return await self._text_answer(request, "detokenize")

    async def apply_template(self, request: Request) -> Response:
        return await self._text_answer(request, "apply_template")

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chat", ChatDialect)

    async def text_completion(self, request: Request) -> Response:
        return await self._generate(request, "completion", TextDialect)

    async def native_completion(self, request: Request) -> Response:
        return await self._generate(request, "completion", NativeDialect)

    def _ready_tokenizer(self) -> Tokenizer:
        """The tokenizer of a server that has come up; later loads of the engine are waited for in the queue."""
        if not self._ready:
            raise _too_early("the model is loading")
        return self._tokenizer

    async def _text_job(self, request: Request, task: str, **about) -> TextAnswer:
        """Have a body worked on where that can be ended: it may be long, and a template may not come to an end."""
        n_ctx, longest = self.child.n_ctx, self._ready_tokenizer().longest_token_bytes
        limit = min(JSON_BYTES_A_BYTE * n_ctx * longest + BODY_ROOM_BYTES, MAX_BODY_BYTES)
        body = await read_body(request, limit)
        return await _unless_hung_up(request, self.texts.run(task, body, n_ctx=n_ctx, **about))

    async def _text_answer(self, request: Request, task: str) -> Response:
        answer = await self._text_job(request, task)
        return Response(answer.blobs[0], media_type="application/json")

    async def _generate(self, request: Request, kind: str, make_dialect: type[Dialect]) -> Response:
        await self._learn_held()
        fields, (order, ids) = await self._text_job(request, "generate", reader=kind)
        wanted = request_of(fields, ids)
        dialect, reader = make_dialect(wanted, self._options.model_id), AnswerReader(wanted, self._tokenizer)
        generation = self.child.generate(order.decode())
        if not wanted.stream:
            async with _stopped_on_hang_up(request.receive, generation):
                try:
                    return Json(dialect.whole(await _whole_answer(generation, reader)))
                finally:
                    self._remember(wanted, reader)
        try:
            # What goes wrong at once still gets a status of its own; after that the stream has begun.
            first = await generation.next_event(KEEP_ALIVE_S)
        except BaseException:
            generation.stop()
            raise
        blocks = _blocks(generation, first, wanted, dialect, reader)
        return EventStream(self._remembered(blocks, wanted, reader), generation)

    async def _remembered(
        self, blocks: AsyncIterator[bytes], wanted: GenerationRequest, reader: AnswerReader
    ) -> AsyncIterator[bytes]:
        try:
            async for block in blocks:
                yield block
        finally:
            self._remember(wanted, reader)

    def _remember(self, wanted: GenerationRequest, reader: AnswerReader) -> None:
        """Keep the ids that now stand for prompt and answer, and say why a prompt had to be read again."""
        answer = reader.answer
        if answer.source:
            known = [ids for _, ids, _ in self.texts.conversations]
            if line := why_read_again(answer.source, wanted.ids, known, self._tokenizer.decode):
                self._terminal.log(line)
        shown = answer.ids[: reader.n_shown]
        self.texts.learn(wanted.ids + array("i", shown), whole=bool(shown))

    async def _learn_held(self) -> None:
        """After a restore, ask once for the tokens that the engine holds: their text is known from them."""
        if self._restored:
            self._restored = False
            self._learning = asyncio.create_task(self._ask_held())
        if self._learning:
            await asyncio.shield(self._learning)

    async def _ask_held(self) -> None:
        try:
            ids = await self.child.held_tokens()
        except ChildError as error:
            self._terminal.log(f"the text of the restored conversation is not known: {error}")
            return
        if max(ids, default=0) < self._tokenizer.n_vocab:
            self.texts.learn(array("i", ids))
        else:
            self._terminal.log("the text of the restored conversation is not known: its ids are not of this vocabulary")


async def _whole_answer(generation: Generation, reader: AnswerReader) -> chatapi.Answer:
    while True:
        event = await generation.next_event()
        if isinstance(event, Token):
            _push(event, generation, reader)
        elif isinstance(event, Source):
            reader.answer.source = event
        elif isinstance(event, Done):
            _finish(event, reader)
            return reader.answer


def _push(event: Token, generation: Generation, reader: AnswerReader) -> list[chatapi.Part]:
    try:
        parts = reader.push(event.id)
    except TokenizerError as error:
        raise ApiError(500, f"the engine gave a token that has no text: {error}") from error
    if reader.stopped:
        generation.stop(keep=reader.n_shown)
    return parts


def _finish(done: Done, reader: AnswerReader) -> list[chatapi.Part]:
    if done.finish == "cancel" and not reader.stopped:
        raise ApiError(503, "the answer was cancelled: the server is ending")
    return reader.finish(done)


async def _blocks(
    generation: Generation, event, wanted: GenerationRequest, dialect: Dialect, reader: AnswerReader
) -> AsyncIterator[bytes]:
    """The bytes of a stream, from its first event (or None: still waiting) on; errors are the last event of it."""
    flow = _stream_events(generation, event, wanted, dialect, reader)
    sent_at = time.monotonic()
    try:
        async for block in flow:
            if block or time.monotonic() - sent_at >= KEEP_ALIVE_S:
                yield block or b":\n\n"
                sent_at = time.monotonic()
    except ChildError as error:
        yield _event(_api_error(error).body)
    except ApiError as error:
        yield _event(error.body)


async def _stream_events(
    generation: Generation, event, wanted: GenerationRequest, dialect: Dialect, reader: AnswerReader
) -> AsyncIterator[bytes]:
    """One block for each event of the child, empty where the client gets nothing of it."""
    n_reused, n_ids, begun = 0, 0, time.monotonic()
    while True:
        contents: list[dict] = []
        if isinstance(event, Resume):
            n_reused = event.n_reused
            contents = dialect.first()
        elif isinstance(event, Source):
            reader.answer.source = event
        elif isinstance(event, PromptProgress) and wanted.with_progress:
            contents = dialect.progress(event, n_reused, 1000 * (time.monotonic() - begun))
        elif isinstance(event, Token):
            for part in _push(event, generation, reader):
                contents.append(dialect.part(part, reader.answer.ids[n_ids:]))
                n_ids = len(reader.answer.ids)
        elif isinstance(event, Done):
            contents = [dialect.part(part, []) for part in _finish(event, reader)] + dialect.last(reader.answer)
            yield b"".join(map(_event, contents)) + (b"data: [DONE]\n\n" if dialect.ends_with_done else b"")
            return
        yield b"".join(map(_event, contents))
        event = await generation.next_event(KEEP_ALIVE_S)


def _metrics(child: EngineChild) -> list[tuple[str, str, str, float]]:
    """Name, type, help text and value of every metric."""
    totals, progress = child.totals, child.progress
    prompt_s, decode_s = totals.prompt_ms / 1000, totals.decode_ms / 1000
    read_rate = totals.n_prompt_read / prompt_s if prompt_s else 0
    decode_rate = totals.n_generated / decode_s if decode_s else 0
    counters = [
        ("llamacpp:prompt_tokens_total", "Prompt tokens read.", totals.n_prompt_read),
        ("llamacpp:prompt_seconds_total", "Time spent reading prompts.", prompt_s),
        ("llamacpp:tokens_predicted_total", "Tokens generated.", totals.n_generated),
        ("llamacpp:tokens_predicted_seconds_total", "Time spent generating.", decode_s),
        ("strata:cached_tokens_total", "Prompt tokens that were held already.", totals.n_cached),
        ("strata:engine_starts_total", "Starts of the engine process.", totals.n_starts),
        ("strata:sessions_saved_total", "Sessions saved.", totals.n_saved),
        ("strata:sessions_restored_total", "Sessions restored.", totals.n_restored),
        ("strata:sessions_failed_total", "Saves and restores refused or failed.", totals.n_session_failed),
    ]
    gauges = [
        ("llamacpp:prompt_tokens_seconds", "Prompt tokens read per second.", read_rate),
        ("llamacpp:predicted_tokens_seconds", "Tokens generated per second.", decode_rate),
        ("llamacpp:requests_processing", "Requests that have the turn.", int(child.busy)),
        ("llamacpp:requests_deferred", "Requests waiting for the turn.", child.n_waiting),
        ("strata:engine_ready", "Whether the engine process is loaded.", int(child.state == "ready")),
        ("strata:held_tokens", "Tokens of the live conversation.", child.n_held),
        ("strata:session_running", "Whether a save or restore runs.", int(progress is not None)),
        ("strata:session_done_bytes", "Bytes done of it.", progress.done_bytes if progress else 0),
        ("strata:session_total_bytes", "Bytes of it in all.", progress.total_bytes if progress else 0),
    ]
    rows = [(name, "counter", what, value) for name, what, value in counters]
    return rows + [(name, "gauge", what, value) for name, what, value in gauges]
