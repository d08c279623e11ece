"""A long conversation in a store, resumed at many places: is each answer that of an engine that has read everything?

For each model and each K/V format that fits it, a conversation of random tokens is held in some turns and kept. Then
prompts that share some of its tokens and part there are asked in sessions of their own: at places chosen at random, at
the border of a segment, shortly behind a state, and at the end. The models are those of the tests, tiny ones of every
architecture, unless others are named. Exits with 1 where an answer differs or nothing was resumed.

Usage: try_store.py [--tokens N] [--model PATH]... [--kv FORMAT,...] [--places N] [--seed N]
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cells
from engine import Engine, Session
from modelweights import describe_model
from options import EngineOptions
from storelayout import SEGMENT_TOKENS
from verbs import GenRequest, Source, Token

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ROOT / "tests/data/model"  # its types.gguf is no model
N_TURNS, N_ANSWERED, N_NEW = 5, 8, 40  # turns of the conversation, tokens of an answer, and those behind a place
TURN_START = 5  # begins a turn; the tiny models have no tokenizer that would name one
LEAST = 256  # tokens that the store keeps


class Answer(NamedTuple):
    """What a request answered, and where the start of its prompt came from."""

    tokens: list[int]
    source: Source


class Place(NamedTuple):
    """A prompt that shares so many tokens: how many of them came from the store, and whether the answer was right."""

    n_shared: int
    n_resumed: int
    right: bool


def ask(session: Session, prompt: np.ndarray) -> Answer:
    """A greedy answer, and time for the store behind it."""
    events = list(session.generate(GenRequest(prompt, N_ANSWERED, source=True)))
    session.rest(lambda: False)
    source = next(event for event in events if isinstance(event, Source))
    return Answer([event.id for event in events if isinstance(event, Token)], source)


class Trial:
    """One model in one format."""

    def __init__(self, path: pathlib.Path, kv: str, n_tokens: int, seed: int, folder: str):
        options = EngineOptions(
            model=str(path), kv=kv, max_context=n_tokens + 1024, backend="cpu", store=folder, store_min_tokens=LEAST,
            session_min_free_mib=0, conversation_cache_min_free_mib=0,
        )  # fmt: skip
        self.engine = Engine.load(options)
        self.engine.turn_start_id = TURN_START
        self.without = dataclasses.replace(self.engine, options=dataclasses.replace(options, store=None))
        self.n_tokens, self.random = n_tokens, np.random.default_rng(seed)

    def ids(self, n: int) -> np.ndarray:
        return self.random.integers(TURN_START + 1, min(self.engine.n_vocab, 1 << 15), n, dtype=np.int32)

    def hold(self) -> np.ndarray:
        """A conversation of some turns, kept; returns its tokens."""
        session, prompt = Session(self.engine), np.empty(0, np.int32)
        for _ in range(N_TURNS):
            n_read = self.n_tokens // N_TURNS - N_ANSWERED
            prompt = np.concatenate([prompt, [TURN_START], self.ids(n_read - 1)]).astype(np.int32)
            prompt = np.concatenate([prompt, ask(session, prompt).tokens]).astype(np.int32)
        ids = session.held_ids().copy()
        session.close()
        return ids

    def places(self, held: np.ndarray, n_places: int) -> list[int]:
        """How many tokens of a conversation the prompts share."""
        starts = np.flatnonzero(held == TURN_START)
        border = len(held) // 2 // SEGMENT_TOKENS * SEGMENT_TOKENS
        chosen = self.random.integers(LEAST, len(held), n_places).tolist()
        return sorted({*chosen, border, int(starts[-1]) + 3, len(held)})

    def resume(self, held: np.ndarray, n_shared: int) -> Place:
        """Ask a prompt in a session that knows the store, and in one that reads everything."""
        behind = np.concatenate([[TURN_START], self.ids(N_NEW - 1)])
        if n_shared < len(held) and behind[0] == held[n_shared]:
            behind = behind[1:]
        prompt = np.concatenate([held[:n_shared], behind]).astype(np.int32)
        found, right = ask(Session(self.engine), prompt), ask(Session(self.without), prompt)
        n_resumed = found.source.n_tokens if found.source.source == "store" else 0
        return Place(n_shared, n_resumed, found.tokens == right.tokens)


def run(path: pathlib.Path, kv: str, n_tokens: int, n_places: int, seed: int) -> bool:
    """Print a row; whether all answers were right and something was resumed at each place."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="strata-store-") as folder:
        trial = Trial(path, kv, n_tokens, seed, folder)
        held = trial.hold()
        places = [trial.resume(held, n_shared) for n_shared in trial.places(held, n_places)]
    shown = ", ".join(f"{place.n_resumed:,} of {place.n_shared:,}" for place in places)
    n_right = sum(place.right for place in places)
    seconds = time.perf_counter() - begun
    print(f"| {path.stem} | {kv} | {len(held):,} | {shown} | {n_right} of {len(places)} | {seconds:.0f} |", flush=True)
    first_turn = trial.n_tokens // N_TURNS  # in which a model that folds its tokens may have no state yet
    return all(place.right and (place.n_resumed or place.n_shared <= first_turn) for place in places)


def main(arguments: list[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--model", action="append", type=pathlib.Path, help="a GGUF file; may be given more than once")
    parser.add_argument("--kv", default=",".join(cells.NAMES), help="formats of K and V, where they fit")
    parser.add_argument("--places", type=int, default=3, help="at random, beside the chosen ones")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    print("| model | K/V | tokens | resumed from the store, of those shared | answers right | s |")
    print("| --- | --- | ---: | --- | ---: | ---: |")
    results = []
    for path in args.model or sorted(path for path in TINY.glob("*.gguf") if path.stem != "types"):
        fitting = cells.formats_for(describe_model(path).config.head_dim)
        for kv in (name for name in fitting if name in args.kv.split(",")):
            results.append(run(path, kv, args.tokens, args.places, args.seed))
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
