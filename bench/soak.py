"""Saves and restores by the dozen in one process, then random verbs held against a plain account of what must be held.

First thirty of each, and how much the resident set rose. Then, for the given time, turns, saves, restores, forgetting
and what must be refused, at random; after each the account, which has tokens and file names and nothing else, must
agree with the session, and every answer with that of a session that reads its whole prompt. A disagreement ends it.

Usage: soak.py --model PATH [--seconds N] [--seed N]
"""

import argparse
import collections
import os
import pathlib
import platform
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
import psutil

from engine import Engine, Session
from options import EngineOptions
from sessionlayout import SessionError
from verbs import GenRequest, RequestError, Token

CONTEXT = 256
N_NEW = 6
MOST_TOKENS = 180  # of a conversation that goes on; the next turn begins another one
N_ROUNDS, N_WARM = 30, 3
NAMES = ("a.bin", "b.bin", "c.bin")


class Disagreement(Exception):
    """The session does not hold what it must, or answers otherwise."""


def load(model: str) -> Engine:
    """An engine that refuses nothing for want of room."""
    floors = {"session_min_free_mib": 0, "conversation_cache_min_free_mib": 0}
    return Engine.load(EngineOptions(model=model, max_context=CONTEXT, backend="cpu", **floors))


def answer(session: Session, prompt: list[int]) -> list[int]:
    """The greedy tokens behind a prompt."""
    events = session.generate(GenRequest(np.array(prompt, np.int32), N_NEW))
    return [event.id for event in events if isinstance(event, Token)]


class Soak:
    """A session, the account of what it must hold, and another session that holds nothing between its answers."""

    def __init__(self, engine: Engine, folder: str, seed: int):
        self.draw = random.Random(seed)
        self.session, self.control = Session(engine), Session(engine)
        self.n_vocab = engine.n_vocab
        self.folder = folder
        self.live: list[int] = []  # the tokens held
        self.last: list[int] = []  # all tokens of the conversation: the last one of an answer is not consumed
        self.files: dict[str, tuple[list[int], list[int]]] = {}
        self.n_done: collections.Counter[str] = collections.Counter()

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def step(self) -> None:
        """One verb at random, and all that must hold behind it."""
        verbs = (self.turn, self.turn, self.turn, self.save, self.restore, self.erase, self.damaged, self.refused)
        verb = self.draw.choice(verbs)
        verb()
        self.n_done[verb.__name__] += 1
        self.agree(verb.__name__)

    def agree(self, after: str) -> None:
        if self.session.n_tokens != len(self.live) or self.session.held_ids().tolist() != self.live:
            raise Disagreement(f"after {after} {self.session.n_tokens} tokens are held, not {len(self.live)}")
        if set(os.listdir(self.folder)) != set(self.files):
            raise Disagreement(f"after {after} the folder holds {sorted(os.listdir(self.folder))}")

    # The verbs.

    def some_ids(self) -> list[int]:
        return self.draw.choices(range(6, min(90, self.n_vocab)), k=self.draw.randrange(3, 25))

    def turn(self) -> None:
        prompt = (self.last if len(self.last) < MOST_TOKENS and self.draw.random() < 0.7 else []) + self.some_ids()
        tokens = answer(self.session, prompt)
        self.control.erase()
        if tokens != answer(self.control, prompt):
            raise Disagreement(f"another answer behind {len(prompt)} tokens, of which {len(self.live)} were held")
        self.last = prompt + tokens
        self.live = self.last[:-1]

    def save(self) -> None:
        name = self.draw.choice(NAMES)
        if self.live:
            self.session.save(self.path(name))
            self.files[name] = (self.live, self.last)
        else:
            self.must_refuse(lambda: self.session.save(self.path(name)))

    def restore(self) -> None:
        name = self.draw.choice(NAMES)
        if name in self.files:
            self.session.restore(self.path(name))
            self.live, self.last = self.files[name]
        else:
            self.must_refuse(lambda: self.session.restore(self.path(name)))

    def erase(self) -> None:
        if self.session.erase() != len(self.live):
            raise Disagreement("another number of tokens was forgotten")
        self.live, self.last = [], []

    def damaged(self) -> None:
        """A file with a changed byte or a cut is refused, and goes."""
        name = self.draw.choice(NAMES)
        if name not in self.files:
            return
        data = bytearray(pathlib.Path(self.path(name)).read_bytes())
        if self.draw.random() < 0.5:
            data[self.draw.randrange(len(data))] ^= self.draw.randrange(1, 256)
        else:
            del data[self.draw.randrange(len(data)) :]
        spoiled = pathlib.Path(self.path("spoiled.bin"))
        spoiled.write_bytes(data)
        self.must_refuse(lambda: self.session.restore(str(spoiled)))
        spoiled.unlink()

    def refused(self) -> None:
        """What does not fit, is no token, or has no folder."""
        ids = np.array(self.draw.choice(([self.n_vocab], [-1], [7] * CONTEXT, [])), np.int32)
        self.must_refuse(lambda: list(self.session.generate(GenRequest(ids, N_NEW))))
        self.must_refuse(lambda: self.session.save(self.path("none/a.bin")))

    def must_refuse(self, operation) -> None:
        try:
            operation()
        except (RequestError, SessionError):
            return
        raise Disagreement("something was done that had to be refused")


def resident_rise_mib(soak: Soak) -> float:
    """How much the resident set rises in thirty saves and restores, after a few that allocate what stays."""
    soak.turn()
    process, path = psutil.Process(), soak.path(NAMES[0])
    soak.files[NAMES[0]] = (soak.live, soak.last)
    for number in range(N_WARM + N_ROUNDS):
        if number == N_WARM:
            before = process.memory_info().rss
        soak.session.save(path)
        soak.session.restore(path)
        soak.agree("a save and a restore")
    return (process.memory_info().rss - before) / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(load(args.model), folder, args.seed)
        print(f"machine: {platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}")
        print(f"resident set, {N_ROUNDS} saves and restores: {resident_rise_mib(soak):+.1f} MiB")
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            soak.step()
        for verb, n_done in sorted(soak.n_done.items()):
            print(f"{verb}: {n_done} times")
        print(f"verbs that agree with the account: {soak.n_done.total()} in {args.seconds:g} s")


if __name__ == "__main__":
    main()
