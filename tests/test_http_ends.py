"""How a front starts and ends as a process: signals, saving at exit, restoring at start, addresses in use."""

import contextlib
import json
import os
import signal
import socket

import httpx
import pytest

import httpfront
import httpguard
import httpsignals
from given_front import DEADLINE_S, RunningFront, Silent, events, write_tokenizer_model
from given_frontprocess import Process, running
from sessionfolder import names_at_exit

pytestmark = pytest.mark.processes


@pytest.fixture
def make(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(**options) -> Process:
            process = Process(tmp_path, **options)
            stack.callback(process.close)
            return process

        yield start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_front_and_child(make, number):
    front = make().wait_ready()
    front.chat()
    front.signal(number)
    assert front.wait() == 0
    assert not running(front.pids()[0])


def test_an_idle_keep_alive_connection_does_not_hold_up_the_end(make):
    front = make().wait_ready()
    with socket.create_connection(("127.0.0.1", front.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        front.signal()
        assert front.wait() == 0


def test_a_stream_is_told_that_the_server_ends(make):
    front = make().wait_ready()
    front.script("GEN", "@accept", "@text abc", "@mark begun", "@wait-stop", "@done")
    with front.client.stream("POST", "/completion", json={"prompt": "x", "stream": True}) as answer:
        front.wait_mark("begun")
        front.signal()
        got = events("".join(answer.iter_text()))
    assert "ending" in got[-1]["error"]["message"]
    assert front.wait() == 0
    assert front.verbs()[-1] == "STOP"


def test_a_running_save_is_finished_and_answered(make):
    front = make().wait_ready()
    front.chat()
    front.script("SAVE", "SWAIT capture 60", "@mark begun", "@wait go", "@default")
    with front.meanwhile(lambda: front.slot("save", "a.bin")) as answers:
        front.wait_mark("begun")
        front.signal()
        with httpx.Client(base_url=front.client.base_url) as other:
            front.wait_for(lambda: other.get("/health").json()["status"] == "ending", "the end to begin")
            refused = other.post("/completion", json={"prompt": "x", "stream": True}, timeout=0.5)
            assert "ending" in refused.text
        front.mark("go")
    assert answers[0].status_code == 200
    assert front.wait() == 0
    assert json.loads((front.saved / "a.bin").read_text())


def test_a_second_signal_ends_at_once_and_the_old_file_stays(make):
    front = make(save_at_exit="a.bin").wait_ready()
    front.chat()
    front.slot("save", "a.bin")
    before = (front.saved / "a.bin").read_bytes()
    front.script("AUTOSAVE", "SWAIT capture 60", "@mark begun", "@deaf")
    front.signal()
    front.wait_mark("begun")
    front.signal()
    assert front.wait() == 0
    assert (front.saved / "a.bin").read_bytes() == before
    assert "not saved at exit" in front.log


def test_a_signal_while_loading(make, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "START").write_text("@mark begun\n@deaf\n")
    front = make(save_at_exit="a.bin")
    front.wait_mark("begun")
    front.signal()
    assert front.wait() == 0


def test_a_conversation_survives_the_server(make):
    names = {"restore_at_start": "a.bin", "save_at_exit": "a.bin"}
    front = make(**names).wait_ready()
    assert "nothing to restore" in front.log
    n_held = front.chat("remember this").json()["usage"]["total_tokens"] - 1
    front.signal()
    assert front.wait() == 0
    assert f"save 'a.bin': {n_held} tokens" in front.log
    front = make(**names).wait_ready()
    assert front.client.get("/slots").json()[0]["n_prompt_tokens"] == n_held
    assert f"restore 'a.bin': {n_held} tokens" in front.log


def test_nothing_held_saves_nothing_at_exit(make):
    front = make(save_at_exit="a.bin").wait_ready()
    front.signal()
    assert front.wait() == 0
    assert not os.listdir(front.saved)
    assert "nothing complete is held" in front.log


def test_a_file_that_was_refused_at_start_is_not_overwritten_at_exit(make, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "a.bin").write_text("another model's conversation")
    front = make(restore_at_start="a.bin", save_at_exit="a.bin").wait_ready()
    front.wait_for(lambda: "'a.bin' was not restored" in front.log, "the line in the log")
    front.chat()
    front.signal()
    assert front.wait() == 0
    assert (front.saved / "a.bin").read_text() == "another model's conversation"
    assert json.loads((front.saved / "a.bin.new").read_text())


def test_a_conversation_that_does_not_continue_the_file_takes_another_name(make):
    long, other = "the long one", "Generate tags for: this"
    front = make(save_at_exit="a.bin").wait_ready()
    front.chat(long)
    front.slot("save", "a.bin")
    before = (front.saved / "a.bin").read_bytes()
    front.chat(other)
    front.signal()
    assert front.wait() == 0
    assert (front.saved / "a.bin").read_bytes() == before
    assert "'a.bin' is left as it is: nothing that is held continues this file" in front.log
    assert "save 'a.bin.new'" in front.log
    for text, name in (("a third", "a.bin.new2"), ("a fourth", "a.bin.new3")):
        front = make(save_at_exit="a.bin").wait_ready()
        front.chat(text)
        front.signal()
        assert front.wait() == 0
        assert f"save '{name}'" in front.log
    assert (front.saved / "a.bin").read_bytes() == before
    front = make(save_at_exit="a.bin", restore_at_start="a.bin.new").wait_ready()
    front.signal()
    assert front.wait() == 0
    assert "save 'a.bin.new'" in front.log, "what continues the second name goes there"
    assert sorted(os.listdir(front.saved)) == ["a.bin", "a.bin.new", "a.bin.new2", "a.bin.new3"]


def test_a_conversation_that_continues_the_file_replaces_it(make):
    front = make(save_at_exit="a.bin", restore_at_start="a.bin").wait_ready()
    answer = front.chat("one").json()["choices"][0]["message"]
    front.slot("save", "a.bin")
    short = json.loads((front.saved / "a.bin").read_text())
    messages = [{"role": "user", "content": "one"}, answer, {"role": "user", "content": "two"}]
    front.chat(messages=messages)
    front.signal()
    assert front.wait() == 0
    long = json.loads((front.saved / "a.bin").read_text())
    assert long[: len(short)] == short
    assert len(long) > len(short)
    assert os.listdir(front.saved) == ["a.bin"]


def test_the_names_at_the_end_are_bounded(make, tmp_path):
    (tmp_path / "saved").mkdir()
    for name in names_at_exit("a.bin"):
        (tmp_path / "saved" / name).write_text("[7]")
    front = make(save_at_exit="a.bin").wait_ready()
    front.chat()
    front.signal()
    assert front.wait() == 0
    assert "not saved at exit" in front.log
    assert {path.read_text() for path in (tmp_path / "saved").iterdir()} == {"[7]"}


def test_a_save_at_the_end_that_fails_otherwise_tries_no_other_name(make):
    front = make(save_at_exit="a.bin").wait_ready()
    front.chat()
    front.slot("save", "a.bin")
    front.script("AUTOSAVE", "SERR storage 0 disk full")
    front.signal()
    assert front.wait() == 0
    assert "not saved at exit: disk full" in front.log
    assert os.listdir(front.saved) == ["a.bin"]


HANGS = """
import pathlib, time, sessionfolder
def hang(*args, **options):
    pathlib.Path({mark!r}).touch()
    while True:
        time.sleep(0.001)
async def hang_loop(*args):
    hang()
"""


@pytest.mark.parametrize(
    ("hung", "method", "path"),
    [
        ("sessionfolder.SessionFolder.listing = hang", "GET", "/sessions"),
        ("httproutes.Routes.models = hang_loop", "GET", "/v1/models"),
    ],
    ids=["a thread", "the loop"],
)
def test_the_second_signal_ends_whatever_hangs(make, tmp_path, hung, method, path):
    front = make(before=HANGS.format(mark=str(tmp_path / "scripts" / "hung")) + hung).wait_ready()
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 16\r\n\r\n".encode() + b'{"content": "x"}')
        front.wait_mark("hung")
        front.signal()
        front.signal(signal.SIGINT)
        assert front.wait() == httpsignals.EXIT_FORCED
    assert not running(front.pids()[0])


def test_a_restore_that_kills_the_child_at_start_leaves_a_working_server(make, tmp_path):
    for folder in ("saved", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "saved" / "a.bin").write_text("[1]")
    (tmp_path / "scripts" / "RESTORE").write_text("FATAL a pool was half written\n@exit 1\n")
    front = make(restore_at_start="a.bin").wait_ready()
    assert front.chat().status_code == 200
    assert len(front.pids()) == 2


def test_a_killed_front_leaves_no_child(make):
    front = make().wait_ready()
    front.chat()
    front.signal(signal.SIGKILL)
    assert front.wait() == -signal.SIGKILL
    front.wait_for(lambda: not running(front.pids()[0]), "the child to end")


def test_an_engine_that_cannot_start_ends_the_front_with_its_words(make, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "START").write_text("@stderr tiny.gguf: no such tensor\n@exit 1\n")
    front = make()
    assert front.wait() == 1
    assert "strata: the engine ended with exit status 1: tiny.gguf: no such tensor" in front.log


def test_a_model_without_a_tokenizer_ends_the_front(make, tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"not a model")
    front = make()
    assert front.wait() == 1
    assert "tiny.gguf" in front.log


def test_an_address_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = httpfront.FrontOptions(port=port, model="none.gguf")
        with pytest.raises(httpfront.FrontError, match=f"127.0.0.1:{port}.*in use"):
            httpfront.serve(options, ["false"])


def test_an_address_that_is_none():
    options = httpfront.FrontOptions(port=1, model="none.gguf", access=httpguard.Access(host="no such host"))
    with pytest.raises(httpfront.FrontError, match="no such host"):
        httpfront.serve(options, ["false"])


def test_a_program_that_is_none(tmp_path):
    model = write_tokenizer_model(tmp_path / "tiny.gguf")
    front = RunningFront(tmp_path, model, command=["/nonexistent/engine"], wait=False)
    front._thread.join(DEADLINE_S)
    assert "could not be started" in str(front.server.failure)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 in this Python")
def test_ipv6():
    try:
        listener = httpfront.listen("::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    with listener:
        assert listener.family == socket.AF_INET6


def test_who_reads_that_the_server_listens_may_end_it(tmp_path):
    """Signals are heard before the line is written, as scripts wait for it."""
    handlers = []

    class Recorder(Silent):
        def log(self, line: str) -> None:
            if line.startswith("listening on"):
                handlers.append(signal.getsignal(signal.SIGTERM))

    with pytest.raises(httpfront.FrontError):
        httpfront.serve(httpfront.FrontOptions(port=0, model=str(tmp_path / "none.gguf")), ["false"], Recorder())
    assert len(handlers) == 1
    assert handlers[0] is not signal.SIG_DFL
