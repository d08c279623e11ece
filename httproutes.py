"""The routes of the HTTP front: what each answers, and from where.

Owns what stands on the wire; refuses to know how the server starts and ends. Invariant: no GET but that of the
conversation waits for the child, and every answer but a page is JSON or an event stream. A new route is a line in
`_make_app` and a method.

Read next: httpstream.py for answers on their way, httpchat.py for bodies and dialects, httpfront.py for the server.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import httpchat
import httppage
from httpchat import AnswerReader, ChatDialect, Dialect, GenerationRequest, NativeDialect, TextDialect
from httpconversation import conversation
from httperrors import HANDLERS, NEVER, RETRY_AFTER_S, too_early
from httpfields import ApiError
from httpguard import BodyRoom, Guard, Json, read_body, read_object
from httpknown import MAX_TEXTS, MAX_TOKENS, why_read_again
from httplines import ChildError, EngineGone
from httpstatus import metrics_text, slot
from httpstream import AnswerStream, EventStream, stopped_on_hang_up, told_of_hang_up, unless_hung_up
from httptexts import Answer as TextAnswer
from httptextworker import request_of
from sessionfolder import MAX_LISTED, NameRefused, NotThere, SessionFolder, check_filename
from storelayout import StoreError
from storeview import StoreView, entry
from tokenizer import Tokenizer

# Room in a body for what is no part of the prompt, and what a byte of text takes at most in JSON (as in \u0000). Bodies
# lie in memory, so there is an end to them, however much text the context could hold.
BODY_ROOM_BYTES = 1 << 20
JSON_BYTES_A_BYTE = 6
MAX_BODY_BYTES = 64 << 20
MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES
SLOT_BODY_LIMIT_BYTES = 64 << 10
SLOT_ACTIONS = ("save", "restore", "erase")


class Routes:
    """The routes of a `httpfront.Front`, whose child, texts and folder they use."""

    def __init__(self, front):
        self._front = front
        self._begun = int(time.time())
        self._said: set[str] = set()
        self._body_room = BodyRoom(MAX_BODIES_BYTES)
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
            Route("/sessions/{id}/conversation", self._with_text(self.stored_conversation), methods=get),
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
        guard = [Middleware(Guard, access=self._front.options.access)]
        app = Starlette(routes=routes, middleware=guard, exception_handlers=HANDLERS)
        app.router.redirect_slashes = False
        return app

    def _with_text(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A route that needs the text side of the model: of the file that the next start of the engine will load."""

        async def handle(request: Request) -> Response:
            if self._front.ready and self._front.child.state == "unloaded":
                await self._front.read_text()
            return await handler(request)

        return handle

    async def page(self, request: Request) -> Response:
        return Response(httppage.PAGE, media_type="text/html", headers=httppage.HEADERS)

    async def health(self, request: Request) -> Response:
        if self._front.closing:
            return Json({"status": "ending"}, 503)
        if not self._front.ready or self._front.child.state == "loading":
            body = {"status": "loading model", "error": too_early("the model is loading").body["error"]}
            return Json(body, 503, {"Retry-After": str(RETRY_AFTER_S)})
        return Json({"status": "ok", "model": self._front.child.state, "busy": self._front.child.busy})

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["model"] != self._front.options.model_id:
            raise ApiError(404, f"there is no such model; this server has {self._front.options.model_id!r}")
        return Json(self._model())

    def _model(self) -> dict:
        head = {"id": self._front.options.model_id, "object": "model", "created": self._begun, "owned_by": "strata"}
        n_vocab = self._front.tokenizer and self._front.tokenizer.n_vocab
        return {**head, "meta": {"n_ctx": self._front.child.n_ctx, "n_vocab": n_vocab}}

    async def props(self, request: Request) -> Response:
        tokenizer = self._ready_tokenizer()
        marks = {
            name: "" if token_id is None else tokenizer.decode([token_id])
            for name, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }
        params = httpchat.model_defaults(tokenizer.sampling)[0] | {"n_predict": -1}
        settings = {"id": 0, "n_ctx": self._front.child.n_ctx, "params": params}
        return Json(
            {
                "default_generation_settings": settings,
                "total_slots": 1,
                "model_path": self._front.options.model_id,
                "chat_template": tokenizer.chat_template or "",
                "modalities": {"vision": False, "audio": False},
                **marks,
                "build_info": f"strata {self._front.child.info.get('engine', '')}".strip(),
                "engine": self._front.child.info,
            }
        )

    async def slots(self, request: Request) -> Response:
        if self._front.child.n_ctx is None:
            raise too_early("the model is loading")
        return Json([slot(self._front.child)])

    async def metrics(self, request: Request) -> Response:
        return Response(metrics_text(self._front.child), media_type="text/plain; version=0.0.4")

    async def conversation(self, request: Request) -> Response:
        """What is held, as messages; it waits for its turn, as the child alone knows."""
        self._check_slot(request)
        self._ready_tokenizer()
        given_up = asyncio.Event()
        async with told_of_hang_up(request.receive, given_up.set):
            ids, n_changes = await self._front.child.held_tokens(given_up), self._front.child.n_changes
        words = await asyncio.to_thread(conversation, ids, self._front.tokenizer)
        return Json({"id_slot": 0} | words | {"n_changes": n_changes})

    async def sessions(self, request: Request) -> Response:
        """Session files and stored conversations, last used first."""
        if self._front.folder is None and self._front.store is None:
            raise ApiError(501, "nothing is kept: start the server with --store DIR or --slot-save-path DIR")
        try:
            return Json(await asyncio.to_thread(self._listing))
        except OSError as error:
            raise ApiError(500, f"the folder of sessions cannot be read: {error.strerror}", headers=NEVER) from error
        except StoreError as error:
            raise ApiError(500, str(error), headers=NEVER) from error

    def _listing(self) -> dict:
        info, data, kinds, complete = self._front.child.info, [], [], True
        if self._front.folder:
            files = self._front.folder.listing(info.get("model_fp"), info.get("config_fp"))
            data, kinds, complete = files["data"], ["file"], files["complete"]
        if self._front.store:
            kept = self._front.store.conversations()
            kinds, complete = [*kinds, "conversation"], complete and len(kept) <= MAX_LISTED
            data = data + [entry(one, self._front.store_identities) for one in kept[:MAX_LISTED]]
            data.sort(key=lambda one: one["modified"], reverse=True)
        return {"object": "list", "data": data, "kinds": kinds, "complete": complete}

    async def stored_conversation(self, request: Request) -> Response:
        """The messages of a stored conversation; a prompt that goes on with them finds its tokens from now on."""
        tokenizer = self._ready_tokenizer()
        found = await self._of_store(lambda store: store.find(request.path_params["id"]))
        if not found.is_whole or found.ids.max() >= tokenizer.n_vocab:
            raise ApiError(409, "this conversation cannot be shown: a part is missing, or it is of another model")
        ids = array("i", found.ids.tobytes())
        self._front.texts.learn(ids)
        return Json({"id": found.id} | await asyncio.to_thread(conversation, ids, tokenizer))

    async def _of_store(self, work: Callable[[StoreView], Any]) -> Any:
        """Something of the store, found or done in a thread."""
        if self._front.store is None:
            raise ApiError(501, "the store is off: start the server with --store DIR")
        try:
            return await asyncio.to_thread(work, self._front.store)
        except StoreError as error:
            status = 404 if error.reason == "id" else 500
            raise ApiError(status, str(error), headers=NEVER if status == 500 else None) from error

    async def delete_session(self, request: Request) -> Response:
        """Remove a session file of this name, else the stored conversation of this id."""
        name = request.path_params["name"]
        if self._front.store and not (self._front.folder and self._front.folder.holds(name)):
            n_bytes = await self._of_store(lambda store: store.remove(name))
            return Json({"id": name, "n_deleted": n_bytes})
        folder = self._need_folder()
        try:
            name = check_filename(name)
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
        async with told_of_hang_up(request.receive, given_up.set):
            if actions == ["erase"]:
                return Json({"id_slot": 0, "n_erased": await self._front.child.erase(given_up)})
            return await self._session_action(actions[0], body, given_up)

    def _check_slot(self, request: Request) -> None:
        if (asked := request.path_params["slot"]) != "0":
            raise ApiError(400, f"there is no slot {asked[:40]!r}; this server has slot 0")

    async def _session_action(self, action: str, body: dict, given_up: asyncio.Event) -> Response:
        try:
            name = check_filename(body.get("filename"))
        except NameRefused as error:
            raise ApiError(400, str(error)) from error
        if action == "restore" and not self._front.folder.holds(name):
            raise ApiError(404, f"there is no session file {name!r}")
        keeps = action == "save" and body.get("overwrite") is False
        try:
            # A save takes nothing away and goes on without its client; a restore that nobody waits for is not begun.
            done = await self._front.run_session(action, name, given_up if action == "restore" else None, keeps=keeps)
        except EngineGone as error:
            # What was to be saved is lost, and a restore that ended the engine would do so again.
            raise ApiError(500, str(error), headers=NEVER) from error
        tokens, size = {"save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read")}[action]
        numbers = {tokens: done.n_tokens, size: done.size_bytes, "timings": {f"{action}_ms": done.ms}}
        return Json({"id_slot": 0, "filename": name, **numbers})

    def _need_folder(self) -> SessionFolder:
        if self._front.folder is None:
            raise ApiError(501, "session files are off: start the server with --slot-save-path DIR")
        return self._front.folder

    async def load(self, request: Request) -> Response:
        await self._front.child.load()
        return Json({"status": "loaded", "n_ctx": self._front.child.n_ctx})

    async def unload(self, request: Request) -> Response:
        await self._front.child.unload()
        return Json({"status": "unloaded"})

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
        if not self._front.ready:
            raise too_early("the model is loading")
        return self._front.tokenizer

    async def _text_job(self, request: Request, task: str, **about) -> TextAnswer:
        """Have a body worked on where that can be ended: it may be long, and a template may not come to an end."""
        n_ctx, longest = self._front.child.n_ctx, self._ready_tokenizer().longest_token_bytes
        limit = min(JSON_BYTES_A_BYTE * n_ctx * longest + BODY_ROOM_BYTES, MAX_BODY_BYTES)
        with self._body_room.share() as hold:
            body = await read_body(request, limit, hold)
            return await unless_hung_up(request, self._front.texts.run(task, body, n_ctx=n_ctx, **about))

    async def _text_answer(self, request: Request, task: str) -> Response:
        answer = await self._text_job(request, task)
        return Response(answer.blobs[0], media_type="application/json")

    async def _generate(self, request: Request, kind: str, make_dialect: type[Dialect]) -> Response:
        await self._learn_held()
        tokenizer = self._ready_tokenizer()
        fields, (line, ids) = await self._text_job(request, "generate", reader=kind)
        wanted = request_of(fields, ids)
        dialect, reader = make_dialect(wanted, self._front.options.model_id), AnswerReader(wanted, tokenizer)
        generation = self._front.child.generate(line.decode(), self._front.file_of(tokenizer))
        headers = self._notice(wanted)
        answer = AnswerStream(generation, wanted, dialect, reader)
        if not wanted.stream:
            async with stopped_on_hang_up(request.receive, generation):
                try:
                    return Json(await answer.whole(), headers=headers)
                finally:
                    self._remember(wanted, reader)
        first = await answer.first_event(request.receive)
        return EventStream(self._remembered(answer.blocks(first), wanted, reader), generation, headers)

    def _notice(self, wanted: GenerationRequest) -> dict[str, str]:
        """The header that says what is done otherwise than asked; the log has it once."""
        for notice in set(wanted.notices) - self._said:
            self._front.log(notice)
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
            known = [learned.ids for learned in self._front.texts.conversations]
            if line := why_read_again(answer.source, wanted.ids, known, self._front.tokenizer.decode):
                self._front.log(line)
        shown = answer.ids[: reader.n_shown]
        self._front.texts.learn(wanted.ids + array("i", shown), whole=bool(shown))

    def begin_learning(self) -> None:
        """Take in once the tokens of what was restored, and of what the store keeps: texts are known from them."""
        if self._front.restored or self._front.unread_store:
            restored, unread_store = self._front.restored, self._front.unread_store
            self._learning = asyncio.create_task(self._learn_all(self._learning, restored, unread_store))
            self._front.restored = self._front.unread_store = False

    async def _learn_held(self) -> None:
        self.begin_learning()
        if self._learning:
            await asyncio.shield(self._learning)

    async def _learn_all(self, before: asyncio.Task | None, restored: bool, unread_store: bool) -> None:
        if before:
            await before
        if unread_store:
            await self._read_store()
        if restored:
            await self._ask_held()

    async def _read_store(self) -> None:
        """Learn the latest conversations of the store that the engine can resume, the last used one last."""
        identities, n_vocab, n_left = self._front.store_identities, self._front.tokenizer.n_vocab, MAX_TOKENS
        try:
            kept = await asyncio.to_thread(self._front.store.conversations)
        except StoreError as error:
            self._front.log(f"the texts of the store are not known: {error}")
            return
        latest = []
        for one in kept:
            mine = one.is_whole and one.last.file.head.identity.hex() in identities and one.ids.max() < n_vocab
            if mine and len(latest) < MAX_TEXTS and one.n_tokens <= n_left:
                latest.append(one)
                n_left -= one.n_tokens
        for one in reversed(latest):
            self._front.texts.learn(array("i", one.ids.tobytes()))

    async def _ask_held(self) -> None:
        try:
            ids = await self._front.child.held_tokens()
        except ChildError as error:
            self._front.log(f"the text of the restored conversation is not known: {error}")
            return
        if max(ids, default=0) < self._front.tokenizer.n_vocab:
            self._front.texts.learn(array("i", ids))
        else:
            self._front.log("the text of the restored conversation is not known: its ids are not of this vocabulary")
