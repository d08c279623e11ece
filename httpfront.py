"""The HTTP front: routes, checks, event streams, and the order in which a server starts and ends.

Owns what stands on the wire; refuses to know arrays, file layouts and the engine in its own process: that is a child
behind ``httpchild``. Invariant: no GET but that of the conversation waits for the child, and every answer but a page is
JSON or an event stream.

Read next: ``httpchild.py`` for the child, ``httpchat.py`` for bodies and answers, ``sessionfolder.py`` for saved files.
"""

import asyncio
import contextlib
import ipaddress
import signal
import socket
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import httpchat
import httppage
from httpchat import AnswerReader, ChatDialect, Dialect, GenerationRequest, NativeDialect, TextDialect
from httpchild import EngineChild, Generation
from httpconversation import conversation
from httpfields import ApiError, json_bytes
from httpguard import Access, BodyRoom, Guard, Json, error_response, read_body, read_object
from httpknown import why_read_again
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
    SessionRefused,
)
from httpmodel import FileState, file_state, read_text
from httpoptions import FrontOptions
from httpserver import FrontError, FrontServer, Terminal, listen
from httpsignals import Patience, heard_by_thread
from httpstatus import metrics_text, slot
from httptexts import Answer as TextAnswer
from httptexts import TextPool
from httptextworker import request_of
from printable import one_line
from sessionfolder import NameRefused, NotThere, SessionFolder, check_filename, names_at_exit
from tokenizer import Tokenizer, TokenizerError
from verbs import Done, PromptProgress, Resume, SessionDone, Source, Token

__all__ = [
    "Access",
    "Front",
    "FrontError",
    "FrontOptions",
    "FrontServer",
    "Terminal",
    "listen",
    "serve",
]

# Room in a body for what is no part of the prompt, and what a byte of text takes at most in JSON (as in \u0000). Bodies
# lie in memory, so there is an end to them, however much text the context could hold.
BODY_ROOM_BYTES = 1 << 20
JSON_BYTES_A_BYTE = 6
MAX_BODY_BYTES = 64 << 20
MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES
SLOT_BODY_LIMIT_BYTES = 64 << 10
# Clients and proxies drop a stream that is silent for 15 s to 300 s.
KEEP_ALIVE_S = 10.0
# Threads that still work when all else has ended are left behind after so long.
LAST_THREADS_S = 10.0
# What a request that came too early is told to wait, in whole seconds.
RETRY_AFTER_S = 5
# Below the 90 s that systemd waits; a save that is not done by then is given up, and the old file stays.
EXIT_GRACE_S = 80.0
LATER = {"Retry-After": str(RETRY_AFTER_S)}
# For failures that a client would try again by itself, to the same end.
NEVER = {"x-should-retry": "false"}
SESSION_STATUS = {"invalid": 400, "storage": 507, "memory": 503, "io": 500}
SLOT_ACTIONS = ("save", "restore", "erase")


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
    with contextlib.ExitStack() as last:
        return asyncio.run(_serve(options, command, listener, terminal or Terminal(), last))


async def _serve(
    options: FrontOptions,
    command: Sequence[str],
    listener: socket.socket,
    terminal: Terminal,
    last: contextlib.ExitStack,
) -> int:
    """``last`` is closed when the loop and its threads have ended."""
    front = Front(options, command, terminal)
    server = FrontServer(front)
    loop = asyncio.get_running_loop()
    patience = Patience(lambda: loop.call_soon_threadsafe(server.end), front.child.kill_process)
    last.enter_context(heard_by_thread((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), patience.heard))
    address, port = listener.getsockname()[:2]
    terminal.log(f"listening on http://{f'[{address}]' if ':' in address else address}:{port}")
    if options.access.api_key is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        terminal.log("whoever reaches this address may use the server, as there is no --api-key")
    starter = asyncio.create_task(server.start_front())
    await server.serve(sockets=[listener])
    starter.cancel()
    await asyncio.gather(starter, return_exceptions=True)
    await front.close()
    last.callback(patience.leave_within(LAST_THREADS_S).cancel)
    if server.failure:
        raise server.failure
    return 0


# --- Errors and streams ---


def _api_error(error: ChildError) -> ApiError:
    """What a client is told when the child brought no result."""
    if isinstance(error, SessionRefused):
        extra = {"published": True} if error.published else {}
        headers = LATER if error.kind == "memory" else NEVER
        return ApiError(SESSION_STATUS[error.kind], str(error), headers=headers, kind=error.kind, **extra)
    if isinstance(error, NotLoaded | Ending | ModelChanged):
        return _too_early(str(error))
    if isinstance(error, Busy):
        return ApiError(409, str(error), headers=LATER)
    if isinstance(error, FileGone):
        return ApiError(404, str(error))
    if isinstance(error, FileThere):
        return ApiError(409, str(error), headers=NEVER)
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), headers=NEVER)
    return ApiError(400 if isinstance(error, EngineRefused | GivenUp) else 500, str(error))


def _too_early(text: str) -> ApiError:
    return ApiError(503, text, headers=LATER)


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
    return error_response(ApiError(500, "the server failed in this request; its log says where", headers=NEVER))


@contextlib.asynccontextmanager
async def _told_of_hang_up(receive, tell: Callable[[], None]) -> AsyncIterator[asyncio.Task]:
    """In this block ``tell`` is called when the client hangs up; then the task is done."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        tell()

    watcher = asyncio.create_task(watch())
    try:
        yield watcher
    finally:
        watcher.cancel()


@contextlib.asynccontextmanager
async def _stopped_on_hang_up(receive, generation: Generation) -> AsyncIterator[asyncio.Task]:
    """The generation ends with this block at the latest, and when the client hangs up: then the task is done."""
    try:
        async with _told_of_hang_up(receive, generation.stop) as watcher:
            yield watcher
    finally:
        generation.stop()


async def _unless_hung_up(request: Request, work: Coroutine):
    """What ``work`` comes to; it is given up when the client hangs up meanwhile."""
    job = asyncio.create_task(work)
    try:
        async with _told_of_hang_up(request.receive, job.cancel) as watcher:
            return await job
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnect from None
        raise
    finally:
        job.cancel()


class EventStream(Response):
    """A stream of server-sent events; stops the generation when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, blocks: AsyncIterator[bytes], generation: Generation, headers: dict[str, str]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
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
        self._model_file: FileState | None = None  # what the tokenizer was read from
        self._reading_text = asyncio.Lock()
        self._restore_refused = False
        self._identity: tuple[str | None, str | None] = (None, None)
        self._said: set[str] = set()
        self._ready = False
        self._closing: asyncio.Future | None = None
        self.log = terminal.log
        self.child = EngineChild(
            command,
            silence_s=options.silence_s,
            log=terminal.log,
            watch=terminal.watch,
            identify=lambda: file_state(options.model),
            loaded=self._follow_model,
        )
        self._folder = SessionFolder(options.slot_save_path) if options.slot_save_path else None
        self.texts = TextPool(terminal.log)
        self._body_room = BodyRoom(MAX_BODIES_BYTES)
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
            Route("/props", self._with_text(self.props), methods=get),
            Route("/slots", self.slots, methods=get),
            Route("/slots/{slot}", self.slot_action, methods=post),
            Route("/slots/{slot}/conversation", self.conversation, methods=get),
            Route("/metrics", self.metrics, methods=get),
            Route("/sessions", self.sessions, methods=get),
            Route("/sessions/{name:path}", self.delete_session, methods=["DELETE"]),
            Route("/v1/chat/completions", self._with_text(self.chat), methods=post),
            Route("/chat/completions", self._with_text(self.chat), methods=post),
            Route("/v1/completions", self._with_text(self.text_completion), methods=post),
            Route("/completion", self._with_text(self.native_completion), methods=post),
            Route("/completions", self._with_text(self.native_completion), methods=post),
            Route("/tokenize", self._with_text(self.tokenize), methods=post),
            Route("/detokenize", self._with_text(self.detokenize), methods=post),
            Route("/apply-template", self._with_text(self.apply_template), methods=post),
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
        await asyncio.gather(self._read_text(), self.child.load())
        if self._options.restore_at_start:
            await self._restore_at_start(self._options.restore_at_start)
        self._ready = True

    async def _read_text(self) -> None:
        """Have the tokenizer and the template of the model file as it is now; raises EngineGone where there is none."""
        path = self._options.model
        async with self._reading_text:
            if self._tokenizer and await asyncio.to_thread(file_state, path) == self._model_file:
                return
            try:
                tokenizer, file = await asyncio.to_thread(read_text, path)
            except TokenizerError as error:
                raise EngineGone(one_line(str(error))) from error
            for line in [*tokenizer.guesses, *httpchat.model_defaults(tokenizer.sampling)[1]]:
                self._terminal.log(line)
            await self.texts.start(tokenizer)
            self._tokenizer, self._model_file = tokenizer, file

    async def _follow_model(self, loaded: FileState | None) -> None:
        """An engine has loaded this state of the file: texts are read and written with what belongs to it."""
        if self._tokenizer is None or loaded != self._model_file:
            await self._read_text()
        if loaded != self._model_file:
            raise EngineGone("the model file was replaced while it was loaded")

    def _with_text(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A route that needs the text side of the model: of the file that the next start of the engine will load."""

        async def handle(request: Request) -> Response:
            if self._ready and self.child.state == "unloaded":
                await self._read_text()
            return await handler(request)

        return handle

    def _file_of(self, tokenizer: Tokenizer) -> FileState | None:
        """The state of the model file for which this tokenizer's ids are; raises ModelChanged for one of the past."""
        if tokenizer is not self._tokenizer:
            raise ModelChanged("the model file was replaced meanwhile: send the request again")
        return self._model_file

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
        self.texts.kill()
        try:
            async with asyncio.timeout(EXIT_GRACE_S):
                await self.child.close(self._save_at_exit if self._options.save_at_exit else None)
        except TimeoutError:
            self.child.kill()
            self._terminal.log(f"the engine was not done after {EXIT_GRACE_S:g} s and was ended")
        except ChildError as error:
            self._terminal.log(f"not saved at exit: {error}")
        await self.texts.close()

    async def _save_at_exit(self) -> None:
        """Save to the first name whose file the conversation continues, or that is free."""
        name = self._options.save_at_exit
        # The file that could not be used this time may be worth more than what was talked about since.
        refused = self._restore_refused and name == self._options.restore_at_start
        names = names_at_exit(name)[1 if refused else 0 :]
        for tried, last in zip(names, [*[False] * (len(names) - 1), True], strict=True):
            try:
                done = await self.child.autosave(tried, self._folder.path_of(tried))
            except SessionRefused as error:
                if last or error.kind != "invalid" or not self._folder.holds(tried):
                    raise
                self._terminal.log(f"{tried!r} is left as it is: {error}")
                continue
            self._say_done("save", tried, done)
            return

    def _say_done(self, action: str, name: str, done: SessionDone) -> None:
        size_mib, seconds = done.size_bytes / (1 << 20), done.ms / 1000
        self._terminal.log(f"{action} {name!r}: {done.n_tokens} tokens, {size_mib:.1f} MiB in {seconds:.2f} s")

    # What answers at once, whatever the child does.

    async def page(self, request: Request) -> Response:
        return Response(httppage.PAGE, media_type="text/html", headers=httppage.HEADERS)

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
        params = httpchat.model_defaults(tokenizer.sampling)[0] | {"n_predict": -1}
        settings = {"id": 0, "n_ctx": self.child.n_ctx, "params": params}
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
        return Json([slot(self.child)])

    async def metrics(self, request: Request) -> Response:
        return Response(metrics_text(self.child), media_type="text/plain; version=0.0.4")

    async def conversation(self, request: Request) -> Response:
        """What is held, as messages; it waits for its turn, as the child alone knows."""
        self._check_slot(request)
        self._ready_tokenizer()
        given_up = asyncio.Event()
        async with _told_of_hang_up(request.receive, given_up.set):
            ids, n_changes = await self.child.held_tokens(given_up), self.child.n_changes
        return Json(await asyncio.to_thread(conversation, ids, self._tokenizer) | {"n_changes": n_changes})

    # Saved sessions.

    async def sessions(self, request: Request) -> Response:
        folder, info = self._need_folder(), self.child.info
        identity = (info["model_fp"], info["config_fp"]) if {"model_fp", "config_fp"} <= info.keys() else self._identity
        try:
            return Json(await asyncio.to_thread(folder.listing, *identity))
        except OSError as error:
            raise ApiError(500, f"the folder of sessions cannot be read: {error.strerror}", headers=NEVER) from error

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
            raise ApiError(500, f"{name!r} cannot be removed: {error.strerror}", headers=NEVER) from error
        return Json({"filename": name, "n_deleted": n_bytes})

    async def slot_action(self, request: Request) -> Response:
        actions = [value for key, value in parse_qsl(request.url.query, keep_blank_values=True) if key == "action"]
        body = {}
        if actions != ["erase"] or request.headers.get("content-length", "0") != "0":
            body = await read_object(request, SLOT_BODY_LIMIT_BYTES, unique=True)
        if actions != ["erase"]:
            self._need_folder()
        self._check_slot(request)
        if len(actions) != 1 or actions[0] not in SLOT_ACTIONS:
            raise ApiError(400, f"give one action of {', '.join(SLOT_ACTIONS)}, as in /slots/0?action=save")
        given_up = asyncio.Event()
        async with _told_of_hang_up(request.receive, given_up.set):
            if actions == ["erase"]:
                return Json({"id_slot": 0, "n_erased": await self.child.erase(given_up)})
            return await self._session_action(actions[0], body, given_up)

    def _check_slot(self, request: Request) -> None:
        if (asked := request.path_params["slot"]) != "0":
            raise ApiError(400, f"there is no slot {asked[:40]!r}; this server has slot 0")

    async def _session_action(self, action: str, body: dict, given_up: asyncio.Event) -> Response:
        try:
            name = check_filename(body.get("filename"))
        except NameRefused as error:
            raise ApiError(400, str(error)) from error
        if action == "restore" and not self._folder.holds(name):
            raise ApiError(404, f"there is no session file {name!r}")
        keeps = action == "save" and body.get("overwrite") is False
        try:
            # A save takes nothing away and goes on without its client; a restore that nobody waits for is not begun.
            done = await self._run_session(action, name, given_up if action == "restore" else None, keeps=keeps)
        except EngineGone as error:
            # What was to be saved is lost, and a restore that ended the engine would do so again.
            raise ApiError(500, str(error), headers=NEVER) from error
        tokens, size = {"save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read")}[action]
        numbers = {tokens: done.n_tokens, size: done.size_bytes, "timings": {f"{action}_ms": done.ms}}
        return Json({"id_slot": 0, "filename": name, **numbers})

    async def _run_session(
        self, action: str, name: str, given_up: asyncio.Event | None = None, *, keeps: bool = False
    ) -> SessionDone:
        """Save or restore; ``keeps`` refuses to save over a file that is there when the turn has come."""

        def refusal() -> ChildError | None:
            if action == "restore" and not self._folder.holds(name):
                return FileGone(f"there is no session file {name!r} any more")
            if keeps and self._folder.holds(name):
                return FileThere(f"there is a session file {name!r} already")
            return None

        try:
            done = await self.child.run_session(action, name, self._folder.path_of(name), given_up, refusal)
        except SessionRefused as error:
            raise refusal() or error from error
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
        with self._body_room.share() as hold:
            body = await read_body(request, limit, hold)
            return await _unless_hung_up(request, self.texts.run(task, body, n_ctx=n_ctx, **about))

    async def _text_answer(self, request: Request, task: str) -> Response:
        answer = await self._text_job(request, task)
        return Response(answer.blobs[0], media_type="application/json")

    async def _generate(self, request: Request, kind: str, make_dialect: type[Dialect]) -> Response:
        await self._learn_held()
        tokenizer = self._ready_tokenizer()
        fields, (order, ids) = await self._text_job(request, "generate", reader=kind)
        wanted = request_of(fields, ids)
        dialect, reader = make_dialect(wanted, self._options.model_id), AnswerReader(wanted, tokenizer)
        generation, headers = self.child.generate(order.decode(), self._file_of(tokenizer)), self._notice(wanted)
        if not wanted.stream:
            async with _stopped_on_hang_up(request.receive, generation):
                try:
                    return Json(dialect.whole(await _whole_answer(generation, reader)), headers=headers)
                finally:
                    self._remember(wanted, reader)
        try:
            # What goes wrong at once still gets a status of its own; after that the stream has begun.
            async with _told_of_hang_up(request.receive, generation.stop):
                first = await generation.next_event(KEEP_ALIVE_S)
        except BaseException:
            generation.stop()
            raise
        blocks = _blocks(generation, first, wanted, dialect, reader)
        return EventStream(self._remembered(blocks, wanted, reader), generation, headers)

    def _notice(self, wanted: GenerationRequest) -> dict[str, str]:
        """The header that says what is done otherwise than asked; the log has it once."""
        for notice in set(wanted.notices) - self._said:
            self._terminal.log(notice)
        self._said.update(wanted.notices)
        return {"X-Strata-Notice": "; ".join(wanted.notices)} if wanted.notices else {}

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
            known = [learned.ids for learned in self.texts.conversations]
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


async def _whole_answer(generation: Generation, reader: AnswerReader) -> httpchat.Answer:
    while True:
        event = await generation.next_event()
        if isinstance(event, Token):
            _push(event, generation, reader)
        elif isinstance(event, Source):
            reader.answer.source = event
        elif isinstance(event, Done):
            _finish(event, reader)
            return reader.answer


def _push(event: Token, generation: Generation, reader: AnswerReader) -> list[httpchat.Part]:
    try:
        parts = reader.push(event.id)
    except TokenizerError as error:
        raise ApiError(500, f"the engine gave a token that has no text: {error}") from error
    if reader.stopped:
        generation.stop(keep=reader.n_shown)
    return parts


def _finish(done: Done, reader: AnswerReader) -> list[httpchat.Part]:
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
