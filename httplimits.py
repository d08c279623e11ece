"""Limits on what a peer may make the server wait for, on how many may be connected, and on repeated log lines.

Owns the clock of every connection: the first byte, the head, the body, the reading of the answer; and the cap below the
limit on descriptors. Refuses to know routes and the engine. Invariant: a connection on which nothing is owed by us is
closed after a time that does not depend on how its peer cuts what it sends.

Read next: ``httpfront.py``, whose server runs on this.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from httpfields import ApiError, json_bytes
from httpguard import CROWD_RETRY_S, retry_headers

# Descriptors for the engine's pipes, files, threads of the resolver, and connections that are on their way in or out.
SPARE_DESCRIPTORS = 192
# More clients than any one person has; a queue of that length is of no use to anyone.
MAX_CONNECTIONS = 2048
# Connections that asyncio takes in one go, before the first of them can be refused.
ACCEPT_BATCH = 32
# What is read of a connection in one go. h11 takes 40 us for each chunk of a body, however small, and answers nobody
# meanwhile.
READ_BYTES = 8 << 10
# Bytes for each end of a line in a chunked body, of which each chunk has two; and so many ends are let through anyway.
LEAST_BYTES_A_LINE = 6
FREE_LINES = 20_000
REPEAT_S = 60.0
# Kinds of lines that are remembered; a peer that could make up kinds would fill the memory.
MAX_KINDS = 1000


@dataclass(frozen=True)
class Limits:
    """Seconds that a peer may take, and how many there may be; ``n_connections`` None is what the system leaves."""

    first_byte_s: float = 30.0
    head_s: float = 20.0
    # A body has this long, and a second more for each so many bytes that came: a trickle ends, a slow line does not.
    body_s: float = 20.0
    body_bytes_per_s: int = 4 << 10
    # Idle connections of clients that pool them; the client should be the one that closes first.
    idle_s: int = 75
    # An answer of which nothing was taken for so long has no reader.
    unread_s: float = 60.0
    n_connections: int | None = None


def most_connections(limits: Limits) -> int:
    """How many connections may be open: what was set, or what the limit on descriptors leaves."""
    import resource

    if limits.n_connections is not None:
        return limits.n_connections
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min(soft - SPARE_DESCRIPTORS, MAX_CONNECTIONS), soft // 4, 1)


class LimitedProtocol(H11Protocol):
    """A connection of uvicorn's with a clock; ``tick`` is called a few times a second."""

    def __init__(self, *args, limits: Limits, **options):
        super().__init__(*args, **options)
        self.limits = limits
        now_s = self.loop.time()
        self._due_s: float | None = now_s + limits.first_byte_s  # for a head
        self._head_begun = False
        self._owing_since_s = now_s
        self._body_of = None  # the request whose body is on its way
        self._body_since_s, self._n_body_bytes = now_s, 0
        self._n_lines, self._n_line_bytes = 0, 0
        self._unread_since_s, self._n_unread_bytes = now_s, 0

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES
        # One that is closing has given its place away already.
        others = [one for one in self.connections if one is not self and not one.transport.is_closing()]
        if len(others) >= most_connections(self.limits):
            self._make_room(others)

    def _make_room(self, others: list["LimitedProtocol"]) -> None:
        """Close the connection that has owed us something for longest, or this one, when all are being answered."""
        if owing := [one for one in others if one.owes]:
            min(owing, key=lambda one: one._owing_since_s).close()
        else:
            self.refuse(ApiError(503, "there are too many connections", headers={"Retry-After": str(CROWD_RETRY_S)}))

    @property
    def owes(self) -> bool:
        """Whether the peer has something to send: a head, or the rest of a body that we would take."""
        return self._waits_for_head or (self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused)

    @property
    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits_for_head(self) -> bool:
        return self.conn.their_state is h11.IDLE and self._answered

    def data_received(self, data: bytes) -> None:
        if self._waits_for_head and not self._head_begun:
            self._due_s = self.loop.time() + self.limits.head_s
        self._head_begun = self._waits_for_head
        self._n_body_bytes += len(data)
        self._n_lines, self._n_line_bytes = self._n_lines + data.count(b"\r\n"), self._n_line_bytes + len(data)
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY:
            self._n_lines, self._n_line_bytes = 0, 0
        elif self._body_is_crumbs:
            self.refuse(ApiError(400, "the chunks of the body are too small"))
        if not self._waits_for_head:
            self._head_begun, self._due_s = False, None

    @property
    def _body_is_crumbs(self) -> bool:
        """Whether a body comes in so many tiny chunks that reading it is most of what is done."""
        few = self._n_lines <= FREE_LINES or self._n_line_bytes >= self._n_lines * LEAST_BYTES_A_LINE
        return not few and (b"transfer-encoding", b"chunked") in self.headers

    def on_response_complete(self) -> None:
        self._owing_since_s = self.loop.time()
        super().on_response_complete()

    def tick(self, now_s: float) -> None:
        """Close the connection when its peer has used up its time."""
        if self._answer_is_unread(now_s):
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._due_s is not None and now_s > self._due_s:
            self._refuse_late("the head of the request did not come in time")
        elif self._body_is_late(now_s):
            self._refuse_late("the body of the request did not come in time")

    def _answer_is_unread(self, now_s: float) -> bool:
        n_bytes = self.transport.get_write_buffer_size()
        if n_bytes == 0 or n_bytes < self._n_unread_bytes:
            self._unread_since_s = now_s
        self._n_unread_bytes = n_bytes
        return now_s > self._unread_since_s + self.limits.unread_s

    def _body_is_late(self, now_s: float) -> bool:
        if self.conn.their_state is not h11.SEND_BODY:
            self._body_of = None
        elif self._body_of is not self.cycle or self.flow.read_paused:
            # A body that we do not take is not late.
            self._body_of, self._body_since_s, self._n_body_bytes = self.cycle, now_s, 0
        else:
            earned_s = self._n_body_bytes / self.limits.body_bytes_per_s
            return now_s > self._body_since_s + self.limits.body_s + earned_s
        return False

    def _refuse_late(self, text: str) -> None:
        if self._waits_for_head and not self._head_begun:
            self.close()
        else:
            self.refuse(ApiError(408, text))

    def close(self) -> None:
        """End the connection; a request that was on its way ends as with a hang-up."""
        self._hang_up()
        self.transport.close()

    def refuse(self, error: ApiError) -> None:
        """Answer what was not answered yet, then close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write_refusal(error)
        self.close()

    def _write_refusal(self, error: ApiError) -> None:
        body = json_bytes(error.body)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        headers |= retry_headers(error)
        response = h11.Response(status_code=error.status, headers=list(headers.items()))
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    def _hang_up(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(400, "this is no HTTP request"))

    def _should_upgrade(self) -> bool:
        return False  # and no advice on packages for it in the log


class OncePerMinute:
    """Passes a line on when none of its kind was for a minute, with how many were left out."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._log = log
        self._clock = clock
        self._seen: dict[object, tuple[float, int]] = {}

    def log(self, kind: object, line: str) -> None:
        """Log ``line``, unless one of its kind was logged in the last minute."""
        now_s = self._clock()
        since_s, n_left_out = self._seen.get(kind, (-REPEAT_S, 0))
        if now_s - since_s < REPEAT_S:
            self._seen[kind] = (since_s, n_left_out + 1)
            return
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = (now_s, 0)
        for part in (line + (f" ({n_left_out} more of these meanwhile)" if n_left_out else "")).split("\n"):
            self._log(part)

    def on_loop_error(self, loop, context: dict) -> None:
        """For asyncio, which repeats what it cannot do with a traceback each time."""
        error = context.get("exception")
        if isinstance(error, OSError):
            self.log((context["message"], error.errno), f"{context['message']}: {error!r}")
        else:
            loop.default_exception_handler(context)


class LogHandler(logging.Handler):
    """Hands the warnings of libraries to our log, each kind once a minute."""

    def __init__(self, lines: OncePerMinute):
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._lines.log((record.name, record.msg, repr(error)), self.format(record))
