"""One answer on its way to a client: as a whole, or as a stream of server-sent events.

It owns the order of an answer's events and what happens when the client hangs up; it knows neither routes nor what a
dialect writes. Invariant: a generation never outlives its client by more than one event, and what goes wrong in a
stream is its last event. Read next: httpchat.py for the dialects, httpanswer.py for the reader of an answer.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from httpchat import AnswerReader, Dialect, GenerationRequest, Part
from httpchild import Generation
from httperrors import api_error
from httpfields import ApiError, json_bytes
from httplines import ChildError
from tokenizer import TokenizerError
from verbs import Done, PromptProgress, Resume, Source, Token

# Clients and proxies drop a stream that is silent for 15 s to 300 s.
KEEP_ALIVE_S = 10.0


@contextlib.asynccontextmanager
async def told_of_hang_up(receive, tell: Callable[[], None]) -> AsyncIterator[asyncio.Task]:
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
async def stopped_on_hang_up(receive, generation: Generation) -> AsyncIterator[asyncio.Task]:
    """The generation ends with this block at the latest, and when the client hangs up: then the task is done."""
    try:
        async with told_of_hang_up(receive, generation.stop) as watcher:
            yield watcher
    finally:
        generation.stop()


async def unless_hung_up(request: Request, work: Coroutine):
    """What ``work`` comes to; it is given up when the client hangs up meanwhile."""
    job = asyncio.create_task(work)
    try:
        async with told_of_hang_up(request.receive, job.cancel) as watcher:
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
        stopping = stopped_on_hang_up(receive, self._generation)
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


class AnswerStream:
    """The events of one generation as what its client gets."""

    def __init__(self, generation: Generation, wanted: GenerationRequest, dialect: Dialect, reader: AnswerReader):
        self.generation, self._wanted, self._dialect, self._reader = generation, wanted, dialect, reader

    async def whole(self) -> dict:
        """The answer in one piece."""
        while True:
            event = await self.generation.next_event()
            if isinstance(event, Token):
                self._push(event)
            elif isinstance(event, Source):
                self._reader.answer.source = event
            elif isinstance(event, Done):
                self._finish(event)
                return self._dialect.whole(self._reader.answer)

    async def first_event(self, receive):
        """What goes wrong at once still gets a status of its own; behind this event the stream has begun."""
        try:
            async with told_of_hang_up(receive, self.generation.stop):
                return await self.generation.next_event(KEEP_ALIVE_S)
        except BaseException:
            self.generation.stop()
            raise

    async def blocks(self, event) -> AsyncIterator[bytes]:
        """The bytes of a stream from its first event (None: still waiting) on; an error is the last event of it."""
        sent_at = time.monotonic()
        try:
            async for block in self._blocks(event):
                if block or time.monotonic() - sent_at >= KEEP_ALIVE_S:
                    yield block or b":\n\n"
                    sent_at = time.monotonic()
        except ChildError as error:
            yield _event(api_error(error).body)
        except ApiError as error:
            yield _event(error.body)

    async def _blocks(self, event) -> AsyncIterator[bytes]:
        """One block for each event of the child, empty where the client gets nothing of it."""
        dialect, reader = self._dialect, self._reader
        n_reused, n_ids, begun = 0, 0, time.monotonic()
        while True:
            contents: list[dict] = []
            if isinstance(event, Resume):
                n_reused = event.n_reused
                contents = dialect.first()
            elif isinstance(event, Source):
                reader.answer.source = event
            elif isinstance(event, PromptProgress) and self._wanted.with_progress:
                contents = dialect.progress(event, n_reused, 1000 * (time.monotonic() - begun))
            elif isinstance(event, Token):
                for part in self._push(event):
                    contents.append(dialect.part(part, reader.answer.ids[n_ids:]))
                    n_ids = len(reader.answer.ids)
            elif isinstance(event, Done):
                contents = [dialect.part(part, []) for part in self._finish(event)] + dialect.last(reader.answer)
                yield b"".join(map(_event, contents)) + (b"data: [DONE]\n\n" if dialect.ends_with_done else b"")
                return
            yield b"".join(map(_event, contents))
            event = await self.generation.next_event(KEEP_ALIVE_S)

    def _push(self, event: Token) -> list[Part]:
        try:
            parts = self._reader.push(event.id)
        except TokenizerError as error:
            raise ApiError(500, f"the engine gave a token that has no text: {error}") from error
        if self._reader.stopped:
            self.generation.stop(keep=self._reader.n_shown)
        return parts

    def _finish(self, done: Done) -> list[Part]:
        if done.finish == "cancel" and not self._reader.stopped:
            raise ApiError(503, "the answer was cancelled: the server is ending")
        return self._reader.finish(done)
