"""Whole processes: a pool that breaks ends the engine and not the front, forks that fail, stdin made to hurt."""

import asyncio
import errno
import os
import pathlib
import subprocess
import sys

import pytest

import broken_engine
from given_engine import ask, ids, new_session
from given_enginefront import QUICK, EngineFront, conversation, refused
from given_engineprocess import PATIENCE_S, command, gen
from given_faults import count
from given_front import RunningFront, write_tokenizer_model
from verbs import TERMINAL_WORDS

pytestmark = pytest.mark.processes

MIB = 1 << 20
MOST_RISE_MIB = 150  # a line of 64 MiB, and room for it to grow


class BreakingFront(EngineFront):
    """A front whose engine breaks in the next RESTORE when it is told to."""

    def __init__(self, folder: pathlib.Path):
        self.saved, self.marker = folder / "saved", folder / "break"
        self.saved.mkdir()
        engine = ["--serve", f"--model={self.MODEL}", f"--slot-save-path={self.saved}", *QUICK]
        environment = ["env", f"PYTHONPATH={os.pathsep.join(map(os.path.abspath, sys.path))}"]
        script = [sys.executable, broken_engine.__file__, str(self.marker)]
        RunningFront.__init__(
            self, folder, self.MODEL, command=[*environment, *script, *engine], slot_save_path=str(self.saved)
        )

    MODEL = str(pathlib.Path(__file__).parent / "data" / "model" / "llama.gguf")


def test_a_pool_that_breaks_ends_the_engine_and_the_front_starts_another(tmp_path):
    with BreakingFront(tmp_path) as front:
        following, n_held = conversation(front, 60)
        front.save("a.bin")
        before = (front.saved / "a.bin").read_bytes()
        first = front.front.child.pid
        front.marker.touch()
        message = refused(front.slot("restore", "a.bin"), 500)
        assert "the pool is broken" in message
        assert not front.marker.exists()
        count("a pool refuses bytes")
        assert front.held() == 0
        assert front.get("/health").status_code == 200
        assert front.post("/load").status_code == 200
        assert front.front.child.pid != first
        assert front.restore("a.bin")["n_restored"] == n_held
        assert (front.saved / "a.bin").read_bytes() == before
        again = front.turn(following)
        assert again["timings"]["cache_n"] == n_held
        front.restart_engine()
        assert front.turn(following)["tokens"] == again["tokens"]


def test_a_pool_that_breaks_ends_the_process_with_1(tmp_path):
    marker = tmp_path / "break"
    arguments = command("qwen4exp", tmp_path / "saved")[2:]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}

    def talk(script):
        return subprocess.run(
            [sys.executable, broken_engine.__file__, str(marker), *arguments],
            input=script.encode(), capture_output=True, env=environment, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    assert talk(gen(ids(40)) + "SAVE a.bin\n").returncode == 0
    good = (tmp_path / "saved" / "a.bin").read_bytes()
    marker.touch()
    broken = talk(gen(ids(20, 5)) + "RESTORE a.bin\n" + gen(ids(20, 5)))
    last = broken.stdout.decode().splitlines()[-1]
    assert (broken.returncode, last.split()[0]) == (1, "FATAL")
    assert "the pool is broken" in last
    assert (tmp_path / "saved" / "a.bin").read_bytes() == good
    assert os.listdir(tmp_path / "saved") == ["a.bin"]
    count("a pool refuses bytes")
    sound = talk("RESTORE a.bin\n" + gen(ids(40)))
    assert sound.returncode == 0
    assert b"RESTORED 55 " in sound.stdout


# --- fork and pipe


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EINTR])
def test_an_engine_that_cannot_be_started_again(code, tmp_path, monkeypatch):
    """fork or pipe fail when the next engine is to be started: told, and tried again by the next request."""
    (tmp_path / "saved").mkdir()
    model = write_tokenizer_model(tmp_path / "tiny.gguf")
    with RunningFront(tmp_path, model, slot_save_path=str(tmp_path / "saved")) as front:
        assert front.chat().status_code == 200
        assert front.post("/unload").status_code == 200
        with monkeypatch.context() as patched:

            async def refuse(*arguments, **named):
                count("fork or pipe fails as the engine is to start")
                raise OSError(code, os.strerror(code))

            patched.setattr(asyncio, "create_subprocess_exec", refuse)
            for request in (front.chat, lambda: front.post("/load")):
                answer = request()
                assert answer.status_code >= 500
                assert os.strerror(code) in answer.json()["error"]["message"]
                assert front.get("/health").status_code == 200
        assert front.chat().status_code == 200
        assert len(front.pids()) == 2


# --- stdin


@pytest.fixture
def engine(tmp_path):
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command("qwen4exp", tmp_path / "saved"), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
    ) as process:
        for line in process.stdout:
            if line.startswith(b"READY "):
                break
        yield process
        process.kill()


def peak_mib(process) -> int:
    for line in pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    raise AssertionError("no VmHWM")


def test_stdin_made_to_hurt(engine):
    """200 MB without a line end, then every byte alone, several commands in a write, bytes that are no text, a cut."""
    before, chunk = peak_mib(engine), b"7" * MIB
    for _ in range(200):
        engine.stdin.write(chunk)
    engine.stdin.write(b"\n")
    engine.stdin.flush()
    assert engine.stdout.readline().startswith(b"ERR the line is longer than 64 MiB")
    assert peak_mib(engine) - before < MOST_RISE_MIB
    count("hostile bytes on stdin", 2)
    for byte in gen(ids(20), 4).encode() + b"STATS\n":
        os.write(engine.stdin.fileno(), bytes([byte]))
        count("hostile bytes on stdin")
    os.write(engine.stdin.fileno(), b"\xff\xfe\n\0\nSAVE \xc3\n\r\nSTATS\r\nSTATS\n" + gen(ids(20), 4).encode()[:-1])
    engine.stdin.close()
    lines = engine.stdout.read().decode().splitlines()
    assert engine.wait(PATIENCE_S) == 0
    words = [line.split()[0] for line in lines]
    terminal = [word for word in words if word in TERMINAL_WORDS]
    assert terminal == ["DONE", "STATS", "ERR", "ERR", "SERR", "ERR", "STATS", "STATS", "DONE"]
    count("hostile bytes on stdin", 5)
    tokens = [int(line[2:]) for line in lines if line.startswith("T ")]
    assert tokens[:4] == tokens[4:] == ask(new_session("qwen4exp"), ids(20), 4).tokens


def test_half_a_command_and_the_end_of_input_do_nothing(engine, tmp_path):
    engine.stdin.write(gen(ids(20), 4).encode() + b"SAVE half")
    engine.stdin.close()
    assert b"the path may be cut; not done" in engine.stdout.read()
    assert engine.wait(PATIENCE_S) == 0
    assert not list((tmp_path / "saved").iterdir())
    count("hostile bytes on stdin")
