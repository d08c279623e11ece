"""What a peer may make the server wait for, how many may be connected, and what a crowd leaves in the log."""

import asyncio
import contextlib
import json
import resource
import select
import socket
import time

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from given_front import RunningFront, write_tokenizer_model
from given_frontprocess import Process
from httplimits import LimitedProtocol, Limits, OncePerMinute

POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
QUICK = Limits(first_byte_s=0.2, head_s=0.2, body_s=0.2, body_bytes_per_s=1 << 20, idle_s=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def quick(model, tmp_path_factory):
    with RunningFront(tmp_path_factory.mktemp("quick"), model, limits=QUICK) as front:
        yield front


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=RunningFront.deadline_s)


def read_all(connection: socket.socket) -> bytes:
    """What the server says until it closes."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer


# --- The clock of one connection, on a real socket ---


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"GET /health HT", b"HTTP/1.1 408"),
        (POST + b"Content-Length: 500\r\n\r\n{}", b"HTTP/1.1 408"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", b"HTTP/1.1 408"),
    ],
    ids=["no byte", "half a head", "two bytes of a body", "half a chunk"],
)
def test_a_peer_that_falls_silent_is_answered_and_let_go(quick, sent, status):
    with connect(quick.port) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert answer[:12] == status
    if status:
        assert b"connection: close" in answer.lower()
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == 408


def test_a_body_of_crumbs_is_refused_and_let_go(model, tmp_path):
    """Each chunk takes time in which nobody else is answered."""
    with RunningFront(tmp_path, model) as front, connect(front.port) as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 10_001)
        answer = read_all(connection)
    assert answer[:12] == b"HTTP/1.1 400"
    assert b"too small" in answer


def test_chunks_of_a_size_that_clients_use_are_taken(model, tmp_path):
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [b'"abc", "defgh",\r\n'] * 12_000)
    body = b'2\r\n{"\r\n9\r\nother": [\r\n' + chunks + b'16\r\n"x"], "content": "ab"}\r\n0\r\n\r\n'
    with RunningFront(tmp_path, model) as front, connect(front.port) as connection:
        connection.sendall(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        answer = read_all(connection)
    assert json.loads(answer.split(b"\r\n\r\n")[1]) == {"tokens": [97, 98]}


def test_large_bodies_have_so_much_memory_in_all_and_small_ones_always_some(model, tmp_path, monkeypatch):
    """Each could be as large as one may be, and a thousand connections send one each."""
    monkeypatch.setattr("httproutes.MAX_BODIES_BYTES", 1 << 20)
    monkeypatch.setattr("httproutes.BODY_ROOM_BYTES", 4 << 20)
    with RunningFront(tmp_path, model) as front, connect(front.port) as first, connect(front.port) as second:
        half = POST + b"Content-Length: 2000000\r\n\r\n" + b" " * 1_900_000
        first.sendall(half)
        second.sendall(half)
        refused, _, _ = select.select([first, second], [], [], front.deadline_s)
        assert refused[0].recv(1 << 16)[:12] == b"HTTP/1.1 503"
        assert front.post("/tokenize", {"content": "ab"}).json() == {"tokens": [97, 98]}


@pytest.mark.parametrize("begun", [b"GET /health HTTP/1.1\r\nX: ", POST + b"Content-Length: 100000\r\n\r\n"])
def test_a_trickle_does_not_hold_a_connection(quick, begun):
    with connect(quick.port) as connection:
        connection.sendall(begun)
        connection.settimeout(0.02)
        deadline = time.monotonic() + quick.deadline_s
        answer = b""
        while not answer:
            assert time.monotonic() < deadline, "a byte now and then held the connection"
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(1 << 16)
            if not answer:
                connection.sendall(b"x")
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_body_that_trickles_behind_a_refusal_is_let_go(quick):
    with connect(quick.port) as connection:
        connection.sendall(POST.replace(b"localhost", b"evil.example") + b"Content-Length: 100000\r\n\r\nx")
        assert read_all(connection).startswith(b"HTTP/1.1 403")


def test_an_idle_connection_is_closed_and_a_used_one_kept(quick):
    with connect(quick.port) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200") == 2


def test_the_server_goes_on_behind_all_of_these(quick):
    assert quick.post("/tokenize", {"content": "hi"}).json() == {"tokens": list(b"hi")}


# --- The same by a clock that the test turns ---


class Clock:
    """The running loop with a time of its own."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def __getattr__(self, name):
        return getattr(self._loop, name)


class Wire:
    """A transport that remembers."""

    def __init__(self):
        self.written = b""
        self.n_unsent = 0
        self.closed = self.aborted = False

    def get_extra_info(self, name):
        return None

    def get_write_buffer_size(self) -> int:
        return self.n_unsent

    def write(self, data) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def on_the_wire(app, play, limits: Limits = Limits()) -> None:  # noqa: B008 - it is frozen
    """Run ``play`` with a connection of ``app``, its transport and its clock."""

    async def run() -> None:
        clock, wire = Clock(), Wire()
        config = uvicorn.Config(app, log_config=None, lifespan="off", access_log=False)
        connection = LimitedProtocol(config, ServerState(), {}, _loop=clock, limits=limits)
        connection.connection_made(wire)

        async def after(seconds: float) -> None:
            clock.now_s += seconds
            connection.tick(clock.now_s)
            for _ in range(5):
                await asyncio.sleep(0)

        await play(connection, wire, after)
        connection.connection_lost(None)

    asyncio.run(run())


async def echo_length(scope, receive, send) -> None:
    """Reads the whole body and says how long it was."""
    n_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        n_bytes, more = n_bytes + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"%5d" % n_bytes})


def test_a_slow_line_that_keeps_sending_is_not_cut():
    async def play(connection, wire, after):
        connection.data_received(POST + b"Content-Length: 9600000\r\n\r\n")
        for _ in range(300):
            connection.data_received(bytes(32_000))  # 32 kB a second for five minutes
            await after(1.0)
        assert wire.written.startswith(b"HTTP/1.1 200")

    on_the_wire(echo_length, play)


def test_a_line_below_the_rate_is_cut():
    async def play(connection, wire, after):
        connection.data_received(POST + b"Content-Length: 9600000\r\n\r\n")
        for _ in range(100):
            if not wire.closed:
                connection.data_received(bytes(1000))
                await after(1.0)
        assert wire.written.startswith(b"HTTP/1.1 408")

    on_the_wire(echo_length, play)


async def never(scope, receive, send) -> None:
    """Takes no body and gives no answer."""
    await asyncio.Event().wait()


def test_a_body_that_we_do_not_take_is_not_late():
    async def play(connection, wire, after):
        connection.data_received(POST + b"Content-Length: 9600000\r\n\r\n" + bytes(70_000))
        await after(1000.0)
        await after(1000.0)
        assert not wire.closed

    on_the_wire(never, play)


def test_a_request_that_is_worked_on_may_take_any_time():
    async def play(connection, wire, after):
        connection.data_received(POST + b"Content-Length: 0\r\n\r\n")
        await after(100_000.0)
        assert not wire.closed

    on_the_wire(never, play)


def test_an_answer_that_nobody_reads_is_cut_and_its_request_ended():
    ended = []

    async def stream(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.append(True)

    async def play(connection, wire, after):
        connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await after(0.1)
        for n_unsent in (90_000, 80_000, 70_000, 60_000):  # slowly, but it is read
            wire.n_unsent = n_unsent
            await after(50.0)
        assert not wire.aborted
        for _ in range(4):
            wire.n_unsent += 1
            await after(20.0)
        assert wire.aborted
        connection.connection_lost(ConnectionAbortedError())
        await asyncio.sleep(0.01)
        assert ended == [True]

    on_the_wire(stream, play)


def test_the_rest_of_an_answer_does_not_hold_a_closed_connection():
    async def play(connection, wire, after):
        connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await after(0.1)
        assert wire.closed
        wire.n_unsent = 5
        await after(1.0)
        await after(100.0)
        assert wire.aborted

    on_the_wire(echo_length, play)


def test_what_is_no_http_is_refused_in_json():
    async def play(connection, wire, after):
        connection.data_received(b"\x16\x03\x01\r\n\r\n")
        assert wire.written.startswith(b"HTTP/1.1 400")
        assert b"application/json" in wire.written
        assert wire.closed
        assert connection.conn.our_state is not h11.ERROR

    on_the_wire(echo_length, play)


# --- A crowd ---


def test_idle_connections_make_room_and_a_running_answer_stays(model, tmp_path):
    with RunningFront(tmp_path, model, limits=Limits(n_connections=8)) as front, contextlib.ExitStack() as open_ones:
        front.script("GEN", "@accept", "@text abc", "@mark begun", "@wait go", "@text def", "@done")
        with front.meanwhile(front.stream) as streams:
            front.wait_mark("begun")
            first = open_ones.enter_context(connect(front.port))
            for _ in range(40):
                open_ones.enter_context(connect(front.port))
            assert front.get("/health").status_code == 200
            assert read_all(first) == b""
            front.mark("go")
        assert streams[0].endswith("data: [DONE]\n\n")


def test_when_all_are_at_work_the_next_is_told_to_come_again(model, tmp_path):
    with RunningFront(tmp_path, model, limits=Limits(n_connections=2)) as front:
        front.script("GEN", "@accept", "@mark begun", "@wait go", "@text x", "@done")
        with front.meanwhile(front.stream), front.meanwhile(front.stream):
            front.wait_mark("begun")
            front.wait_for(lambda: front.front.child.n_waiting == 1, "the second")
            with connect(front.port) as third:
                answer = read_all(third)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 5" in answer.lower()
            front.mark("go")


@pytest.mark.slow
def test_health_answers_behind_more_connections_than_descriptors(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2500:
        pytest.skip("this machine has too few descriptors for a crowd")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2500, hard))
    front = Process(tmp_path, descriptors=1024)
    try:
        front.wait_ready()
        with contextlib.ExitStack() as open_ones:
            for _ in range(1500):
                open_ones.enter_context(connect(front.port))
            assert front.client.get("/health").status_code == 200
            assert front.chat().status_code == 200
        front.signal()
        assert front.wait() == 0
        assert len(front.lines) < 30, front.log[:2000]
    finally:
        front.close()


def test_a_line_is_repeated_once_a_minute():
    lines, now_s = [], [0.0]
    once = OncePerMinute(lines.append, lambda: now_s[0])
    for second in range(150):
        now_s[0] = float(second)
        once.log("accept", "no descriptors")
        once.log(("other", second // 100), "something else")
    assert [line for line in lines if "descriptors" in line] == [
        "no descriptors",
        "no descriptors (59 more of these meanwhile)",
        "no descriptors (59 more of these meanwhile)",
    ]
    assert sum("something else" in line for line in lines) == 3


def test_an_exhausted_accept_is_one_line_without_a_traceback():
    lines = []
    once = OncePerMinute(lines.append)
    for _ in range(1000):
        error = OSError(24, "Too many open files")
        once.on_loop_error(None, {"message": "socket.accept() out of system resource", "exception": error})
    assert lines == ["socket.accept() out of system resource: OSError(24, 'Too many open files')"]
