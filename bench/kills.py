"""Chats in turn through the HTTP front by an unmodified `openai` client, while engine and front are killed for ever.

Each kill is SIGKILL to both, at a random moment: while a prompt is read, an answer written, a conversation stored, or
the engine loaded. Every answer is held against that of a server that has no store and is never stopped. What was
answered a second or more before a kill has to be reused behind it.

Usage: kills.py [--model PATH] [--kills N] [--chats N] [--seed N]
"""

import argparse
import contextlib
import os
import pathlib
import random
import sys
import tempfile
import threading
import time

import openai
import psutil
from frontserver import REQUEST_S, ROOT, address_of, serving, started
from machine import machine_facts

sys.path.insert(0, str(ROOT))

from declaration import TEXT
from modelfile import embedded_model

GOAL = 0.99
SETTLED_S = 1.0  # before a kill; what was answered later may be lost
LIFE_S = 4.0  # at most, from when a server answers to its end
EARLY = 0.1  # of all kills come while the engine is loaded
START_S = 2.0
N_NEW = 32  # tokens of an answer
MOST_TURNS = 6  # of a chat; then another one takes its place
SYSTEM = "You are a clerk of the congress. You answer from the text alone, in the words of the text, and briefly. " * 8
PARAGRAPHS = [paragraph for paragraph in TEXT.split("\n\n") if len(paragraph) > 200]


class Killed(Exception):
    """The server ended in the middle of a turn."""


class Chat:
    """What a client knows of one chat, and what the server held of it."""

    def __init__(self, number: int):
        self.number = number
        self.messages = [{"role": "system", "content": SYSTEM}]
        self.held: list[tuple[float, int]] = []  # when a turn was answered, and the tokens held then

    @property
    def n_turns(self) -> int:
        return len(self.held)

    def ask(self, client: openai.OpenAI):
        """The answer to the next question; nothing changes here."""
        place = (self.number + 7 * self.n_turns) % len(PARAGRAPHS)
        question = {"role": "user", "content": f"{self.number}: {PARAGRAPHS[place]}"}
        answer = client.chat.completions.create(
            model="any", messages=[*self.messages, question], temperature=0, max_completion_tokens=N_NEW
        )
        return question, answer

    def take(self, question: dict, answer) -> None:
        """Count a question as answered."""
        self.messages += [question, {"role": "assistant", "content": answer.choices[0].message.content}]
        self.held.append((time.monotonic(), answer.usage.prompt_tokens + answer.usage.completion_tokens - 1))


class Server:
    """A front with a store that can be killed together with its engine."""

    def __init__(self, model: str, store: str, port_log: pathlib.Path):
        self._log = port_log.open("w+b")
        self._process = started(model, self._log, f"--store={store}")
        self.killed_at = 0.0

    def address(self) -> str:
        return address_of(self._process, self._log)

    def kill(self) -> None:
        """SIGKILL to the engine, and then to the front, before either can do anything more."""
        self.killed_at = self.killed_at or time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):  # it was killed before
            for child in psutil.Process(self._process.pid).children():
                child.kill()
        self._process.kill()
        self._process.wait()
        self._log.close()


class Trial:
    """The chats, the kills, and what came of them."""

    def __init__(self, control: openai.OpenAI, n_chats: int, seed: int):
        self.control, self.random = control, random.Random(seed)
        self.chats = [Chat(number) for number in range(n_chats)]
        self.n_begun = n_chats
        self.n_answered = self.n_interrupted = self.n_different = self.n_unused = 0
        self.n_due = self.n_reused = 0
        self.due: dict[int, int] = {}  # by chat: tokens to be reused at its next turn

    def run(self, model: str, folder: str, n_kills: int) -> None:
        for number in range(n_kills):
            server = Server(model, os.path.join(folder, "store"), pathlib.Path(folder, "front.log"))
            early = self.random.random() < EARLY
            if early:
                time.sleep(self.random.uniform(0, START_S))
            else:
                self._serve(server)
            server.kill()
            self._expect(server.killed_at)
            if sys.stderr.isatty():
                print(f"\r{number + 1} kills, {self.n_answered} answers", end="", file=sys.stderr, flush=True)
        with serving(model, f"--store={os.path.join(folder, 'store')}") as address:  # what was due at the last kill
            for chat in self.chats:
                self._turn(chat, _client(address))

    def _serve(self, server: Server) -> None:
        """Chats in turn, until the server is killed under one of them."""
        client = _client(server.address())
        killer = threading.Timer(self.random.uniform(0.05, LIFE_S), server.kill)
        killer.start()
        with contextlib.suppress(Killed):
            while True:
                self._turn(self.chats[0], client, server)
                self.chats.append(self.chats.pop(0))
                if self.chats[-1].n_turns >= MOST_TURNS:
                    self.chats[-1] = Chat(self.n_begun)
                    self.n_begun += 1
        killer.join()

    def _turn(self, chat: Chat, client: openai.OpenAI, server: Server | None = None) -> None:
        try:
            question, answer = chat.ask(client)
        except (openai.APIConnectionError, openai.InternalServerError):
            if server is None or not server.killed_at:
                raise
            self.n_interrupted += 1
            raise Killed from None
        timings = answer.model_extra["timings"]
        due = self.due.pop(chat.number, 0)
        self.n_due += due
        self.n_reused += min(due, timings["cache_n"])
        self.n_unused += timings["cache_source"] == "store" and not timings["cache_n"]
        _, right = chat.ask(self.control)
        self.n_different += answer.choices[0].message.content != right.choices[0].message.content
        self.n_answered += 1
        chat.take(question, answer)

    def _expect(self, killed_at: float) -> None:
        """After a kill: of each chat the tokens that were held a second before."""
        for chat in self.chats:
            settled = [n_held for answered_at, n_held in chat.held if killed_at - answered_at >= SETTLED_S]
            self.due[chat.number] = max(settled, default=0)

    def report(self, n_kills: int) -> bool:
        share = self.n_reused / self.n_due if self.n_due else 0.0
        print(f"| | |\n| --- | ---: |\n| kills | {n_kills} |\n| chats | {self.n_begun} |")
        print(f"| answers | {self.n_answered} |\n| turns interrupted by a kill | {self.n_interrupted} |")
        print(f"| tokens to be reused behind kills | {self.n_due} |\n| reused of these | {share:.2%} |")
        print(f"| answers that differ from those of a server never killed | {self.n_different} |")
        print(f"| answers from the store that reused nothing | {self.n_unused} |")
        return share >= GOAL and not self.n_different and not self.n_unused and self.n_answered > 0


def _client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=REQUEST_S, max_retries=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=embedded_model())
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{machine_facts()}\n")
    with tempfile.TemporaryDirectory(prefix="strata-kills-") as folder, serving(args.model) as control:
        trial = Trial(_client(control), args.chats, args.seed)
        trial.run(args.model, folder, args.kills)
    return 0 if trial.report(args.kills) else 1


if __name__ == "__main__":
    sys.exit(main())
