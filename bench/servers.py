"""The two servers that tokens.py compares, behind the same calls: strata on its verbs, llama-server on HTTP.

It owns how each is started, asked and ended; it knows nothing of what is measured. Invariant: both get the same ids and
take the most likely token each time; a turn with another number of tokens than asked for, or with other tokens reused
than it says, is an error and no figure. Read next: tokens.py.
"""

import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import demostage
import verbs

START_S = 120  # for a model to be read and the server to warm up
END_S = 30
POLL_S = 0.1
TURN_S = 3600


class ServerError(Exception):
    """A server that does not do what it is asked; one line."""


class Settings(NamedTuple):
    """What both servers get alike; `folder` takes session files and logs."""

    model: str
    context: int
    threads: int
    folder: str


class Turn(NamedTuple):
    """One answered prompt: the client's clock, and what the server itself says of it."""

    tokens: list[int]
    n_reused: int
    seconds: float
    prompt_s: float
    decode_s: float


class Server(Protocol):
    """What tokens.py asks of either."""

    name: str

    def turn(self, ids: Sequence[int], n_new: int, n_reused: int | None = None) -> Turn: ...
    def erase(self) -> None: ...
    def save(self, name: str) -> float: ...
    def restore(self, name: str) -> float: ...


def _checked(server: Server, turn: Turn, n_new: int, n_reused: int | None) -> Turn:
    """A turn that was what it should be; raises ServerError."""
    if len(turn.tokens) == n_new and n_reused in (None, turn.n_reused):
        return turn
    raise ServerError(
        f"{server.name} answered {len(turn.tokens)} tokens and reused {turn.n_reused}, not {n_new} and {n_reused}"
    )


class Strata(demostage.EngineProcess):
    """`strata --serve` as a child."""

    name = "strata"

    def __init__(self, settings: Settings, *options: str):
        command = [*demostage.ENGINE_COMMAND, "--backend", "cpu", "--model", settings.model]
        command += ["--max-context", str(settings.context), "--threads", str(settings.threads)]
        command += ["--slot-save-path", settings.folder, *options]
        command += ["--session-min-free-mib", "0", "--conversation-cache-min-free-mib", "0"]
        command += ["--conversation-cache-mib", "0"]  # as for the rival: no copies of other prompts in RAM
        with open(pathlib.Path(settings.folder, "strata.log"), "wb") as log:
            super().__init__(command, log)

    def turn(self, ids: Sequence[int], n_new: int, n_reused: int | None = None) -> Turn:
        """Answer a prompt of which `n_reused` tokens are held, or any number."""
        started, tokens = time.perf_counter(), []
        self._send(verbs.gen_line(n_new, ids))
        for said in self._answers(verbs.Done, verbs.Token):
            if isinstance(said, verbs.Token):
                tokens.append(said.id)
        seconds = time.perf_counter() - started
        turn = Turn(tokens, said.n_reused, seconds, said.prompt_ms / 1e3, said.decode_ms / 1e3)
        return _checked(self, turn, n_new, n_reused)

    def erase(self) -> None:
        """Hold nothing."""
        self._send("ERASE")
        next(self._answers(verbs.Erased))

    def save(self, name: str) -> float:
        """Seconds of writing what is held."""
        return self.transfer("SAVE", name, lambda done, total: None).seconds

    def restore(self, name: str) -> float:
        """Seconds of reading it back."""
        return self.transfer("RESTORE", name, lambda done, total: None).seconds


class LlamaServer:
    """llama-server as a child: one slot, nothing kept but what the slot holds."""

    name = "llama-server"

    def __init__(self, path: str, settings: Settings, *options: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [path, "--model", settings.model, "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--ctx-size", str(settings.context), "--parallel", "1", *options]
        command += ["--threads", str(settings.threads), "--threads-batch", str(settings.threads)]
        command += ["--cache-ram", "0", "--slot-save-path", settings.folder]  # no copies of other prompts in RAM
        self._log_path = pathlib.Path(settings.folder, "llama-server.log")
        with open(self._log_path, "wb") as log:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "LlamaServer":
        return self

    def __exit__(self, *_) -> None:
        self._child.terminate()
        try:
            self._child.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._child.poll() is None:
            try:
                if self._ask("GET", "/health")[0] == http.HTTPStatus.OK:
                    return
            except ConnectionError:  # it does not listen yet
                pass
            time.sleep(POLL_S)
        code, lines = self._child.poll(), self._log_path.read_text(errors="replace").splitlines()
        what = f"not ready after {START_S} s" if code is None else f"ended with {_exit_text(code)}"
        raise ServerError(f"llama-server {what}; its log ends: {lines[-1] if lines else '(nothing)'}")

    def turn(self, ids: Sequence[int], n_new: int, n_reused: int | None = None) -> Turn:
        """Answer a prompt of which `n_reused` tokens are held, or any number."""
        body = {"prompt": list(map(int, ids)), "n_predict": n_new, "id_slot": 0, "cache_prompt": True}
        # The shortest chain of samplers there is: the most likely token, and no penalty is computed.
        body |= {"samplers": ["top_k"], "top_k": 1, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        started = time.perf_counter()
        answer = self._post("/completion", body)
        seconds, own = time.perf_counter() - started, answer["timings"]
        turn = Turn(answer["tokens"], own["cache_n"], seconds, own["prompt_ms"] / 1e3, own["predicted_ms"] / 1e3)
        return _checked(self, turn, n_new, n_reused)

    def erase(self) -> None:
        """Hold nothing."""
        self._post("/slots/0?action=erase", {})

    def save(self, name: str) -> float:
        """Seconds of writing what is held."""
        return self._transfer("save", name)

    def restore(self, name: str) -> float:
        """Seconds of reading it back."""
        return self._transfer("restore", name)

    def _transfer(self, action: str, name: str) -> float:
        started = time.perf_counter()
        self._post(f"/slots/0?action={action}", {"filename": f"{self.name}-{name}"})
        return time.perf_counter() - started

    def _post(self, path: str, body: dict) -> dict:
        status, answer = self._ask("POST", path, json.dumps(body))
        if status != http.HTTPStatus.OK:
            raise ServerError(f"llama-server answered {status} to {path}: {answer[:200].decode(errors='replace')}")
        return json.loads(answer)

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TURN_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def llama_version(path: str) -> str:
    """What `llama-server --version` says; raises ServerError for a file that is not it."""
    try:
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=END_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"--llama-server {path}: {error}") from error
    if found := re.search(r"^version: (.+)$", ran.stdout + ran.stderr, re.MULTILINE):
        return found[1]
    raise ServerError(f"--llama-server {path}: it does not tell a version, so it is no llama-server")
