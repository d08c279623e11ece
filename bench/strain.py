"""What a server answers while it is thrown at: how long `/health` takes, and whether a running answer goes on.

One after the other, each beside a streamed answer: a chat of 28 MB of text, a body of 25 MB of small JSON objects, a
template that never ends, a thousand connections that say nothing, and nothing at all. The model is the embedded one,
with a template that loops for ever when a message says so.

Usage: strain.py [--model PATH] [--idle N]
"""

import argparse
import contextlib
import itertools
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import gguf
import httpx
from frontserver import REQUEST_S, ROOT, serving
from ggufcopy import write_copy
from machine import machine_facts

sys.path.insert(0, str(ROOT))

from modelfile import embedded_model

TEXT_BYTES, JSON_BYTES = 28 << 20, 25 << 20
CONTEXT = 262144  # in which such bodies could have a place, so that they are read before they are refused
LOOP = "{% if messages[-1].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
LOOP += "{% endfor %}{% endif %}"
POLL_S, LEAST_S, WITHIN_S = 0.02, 3.0, 0.2
N_NEW = 3000


class Seen(NamedTuple):
    """What one throw did to the others: seconds of `/health`, tokens meanwhile and the longest wait for one."""

    outcome: str
    health_s: list[float]
    n_tokens: int
    gap_s: float


class Watch:
    """Asks for `/health` and reads a streamed answer, each in a thread of its own, until it is over."""

    def __init__(self, address: str):
        self.address, self.over = address, threading.Event()
        self.health_s: list[float] = []
        self.tokens_at: list[float] = []
        self.threads = [threading.Thread(target=work) for work in (self._ask, self._read)]

    def _ask(self) -> None:
        with httpx.Client(base_url=self.address, timeout=REQUEST_S) as client:
            while not self.over.wait(POLL_S):
                begun = time.monotonic()
                client.get("/health").raise_for_status()
                self.health_s.append(time.monotonic() - begun)

    def _read(self) -> None:
        with httpx.Client(base_url=self.address, timeout=REQUEST_S) as client:
            for seed in itertools.count():
                body = {"prompt": "In the beginning", "n_predict": N_NEW, "stream": True, "seed": seed}
                with client.stream("POST", "/completion", json=body) as answer:
                    for line in answer.iter_lines():
                        if line:
                            self.tokens_at.append(time.monotonic())
                        if self.over.is_set():
                            return

    def during(self, throw: Callable[[], str]) -> Seen:
        """What is seen while `throw` runs, and for a few seconds at the least."""
        for thread in self.threads:
            thread.start()
        while not self.tokens_at:
            time.sleep(POLL_S)
        begun = time.monotonic()
        outcome = throw()
        time.sleep(max(0.0, begun + LEAST_S - time.monotonic()))
        ended = time.monotonic()
        self.over.set()
        for thread in self.threads:
            thread.join()
        times = [begun, *(at for at in self.tokens_at if begun <= at <= ended), ended]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Seen(outcome, self.health_s, len(times) - 2, max(gaps))


def posted(address: str, path: str, raw: bytes) -> str:
    """What the server says to a body."""
    answer = httpx.post(address + path, content=raw, headers={"Content-Type": "application/json"}, timeout=REQUEST_S)
    return f"{answer.status_code} after {answer.elapsed.total_seconds():.2f} s"


def large_chat(address: str) -> str:
    text = b"word " * (TEXT_BYTES // 5)
    return posted(address, "/v1/chat/completions", b'{"messages":[{"role":"user","content":"%s"}]}' % text)


def large_json(address: str) -> str:
    return posted(address, "/v1/chat/completions", b'{"a":[%s{}]}' % (b"{}," * (JSON_BYTES // 3)))


def looping_template(address: str) -> str:
    return posted(address, "/v1/chat/completions", b'{"messages":[{"role":"user","content":"loop"}]}')


def idle_connections(address: str, n_wanted: int) -> str:
    """Connections that send no byte, as many as are asked for or can be had."""
    where, n_open = (urlsplit(address).hostname, urlsplit(address).port), 0
    with contextlib.ExitStack() as opened:
        for _ in range(n_wanted):
            with contextlib.suppress(OSError):
                opened.enter_context(socket.create_connection(where, timeout=1))
                n_open += 1
        time.sleep(LEAST_S)
    return f"{n_open} connections were open"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="is not used: the template has to be this script's own")
    parser.add_argument("--idle", type=int, default=1000)
    args = parser.parse_args()
    print("machine: " + ", ".join(f"{name} {value}" for name, value in machine_facts().items()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    throws = {
        "nothing": lambda address: "idle",
        "a chat of 28 MB": large_chat,
        "25 MB of JSON objects": large_json,
        "a template that loops": looping_template,
        f"{args.idle} idle connections": lambda address: idle_connections(address, args.idle),
    }
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        reader = gguf.GGUFReader(embedded_model())
        template = LOOP + reader.fields["tokenizer.chat_template"].contents()
        model = write_copy(os.path.join(folder, "loop.gguf"), reader, {"tokenizer.chat_template": template}, {})
        with serving(model, f"--max-context={CONTEXT}") as address:
            for name, throw in throws.items():
                seen = Watch(address).during(lambda throw=throw: throw(address))
                worst, median = max(seen.health_s), statistics.median(seen.health_s)
                print(f"{name}: {seen.outcome}")
                print(f"  /health: median {1e3 * median:.1f} ms, longest {1e3 * worst:.1f} ms of {len(seen.health_s)}")
                print(f"  running answer: {seen.n_tokens} tokens meanwhile, longest wait {1e3 * seen.gap_s:.0f} ms")
                missed += [name] if worst > WITHIN_S or not seen.n_tokens else []
    sys.exit(f"slower than {WITHIN_S} s, or an answer that stood still: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
