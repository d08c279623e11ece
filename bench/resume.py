"""What the store gives back behind a restart, beside RESTORE of the same conversation, and what it costs an answer.

The time to the first token of the next turn is the client's, in an engine that has just said READY: with the store from
the prompt to the token, else from RESTORE to the token. What an answer costs is measured with two engines in turn, one
with a store, which are asked the same turns without a pause, so that all writing falls into the answers.

Usage: resume.py --model PATH [--tokens N,N] [--rounds N] [--json FILE]
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
from files import cat, evict
from machine import machine_facts, write_figures
from servers import Settings, Strata

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import resources
from declaration import TEXT
from tokenizer import Tokenizer

N_TOKENS = (2000, 6000)
N_FOLLOWING = 32  # tokens of the next turn
PART = 4  # a prompt that shares this part of what is kept
N_TURNS, N_ASKED, N_ANSWERED = 12, 100, 32  # of the answers that are timed
CONTEXT = 8192
GOALS = {"whole": 1 / 1.3, "part": 1.0, "cost": 1 / 1.02}


class Bench:
    """One model, its engines, and the rows so far."""

    def __init__(self, model: str, folder: str, rounds: int, context: int):
        self.folder, self.rounds = folder, rounds
        self.settings = Settings(model, context, resources.usable_cores(), folder)
        self.store = os.path.join(folder, "store")
        self.rows: list[dict] = []
        words = Tokenizer.load(model).encode(TEXT)
        self.ids = np.resize(words, 4 * context)
        self._n_prompts = 0

    @contextlib.contextmanager
    def engine(self, *options: str) -> Iterator[Strata]:
        with Strata(self.settings, *options) as engine:
            yield engine

    def add(self, work: str, ours: float, rival: str, rival_value: float, target: float) -> None:
        """A row in seconds; the ratio is above 1 where the store is sooner."""
        ratio = rival_value / ours
        row = {"work": work, "unit": "s", "rival": rival, "ours_s": ours, "rival_s": rival_value, "ratio": ratio}
        self.rows.append(row | {"target": target, "rounds": self.rounds})
        print(f"{work}: {ours:.3f} s; {rival} {rival_value:.3f} s, ratio {ratio:.2f}, target {target:.2f}", flush=True)

    # --- behind a restart

    def keep(self, n_tokens: int) -> None:
        """A conversation of so many tokens in the store and in a file."""
        with self.engine("--store", self.store) as engine:
            engine.turn(self.ids[:n_tokens], 1, 0)
            engine.save("held.bin")

    def _touch(self, *, warm: bool) -> None:
        """Have the files in the page cache, or not."""
        for path in [*pathlib.Path(self.store).glob("*.store"), pathlib.Path(self.folder, "held.bin")]:
            (cat if warm else evict)(str(path))

    def first_token_s(self, n_shared: int, *, whole: bool, stored: bool, warm: bool) -> float:
        """Seconds in a new engine, from its READY, for a prompt that begins with so many tokens of what is kept."""
        self._touch(warm=warm)
        self._n_prompts += 1  # another one each time, as what is asked is kept as well
        new = self.ids[n_shared : n_shared + N_FOLLOWING] + self._n_prompts
        prompt = np.concatenate([self.ids[:n_shared], new])
        with self.engine(*(("--store", self.store) if stored else ())) as engine:
            seconds = 0.0 if stored else engine.restore("held.bin")
            # Of a part, nothing may be reused: where no state was kept, or where what was restored is worth more.
            return seconds + engine.turn(prompt, 1, n_shared if whole else None).seconds

    def restarts(self, n_tokens: int) -> None:
        for what, n_shared in (("whole", n_tokens), ("part", n_tokens // PART)):
            for state in ("cold", "warm"):
                stored, restored = (
                    statistics.median(
                        self.first_token_s(n_shared, whole=what == "whole", stored=stored, warm=state == "warm")
                        for _ in range(self.rounds)
                    )
                    for stored in (True, False)
                )
                work = f"{n_shared:,} of {n_tokens:,} tokens from the store to the first token, {state}"
                self.add(work, stored, "RESTORE and GEN", restored, GOALS[what])

    # --- what it costs

    def cost(self) -> None:
        """Medians of the turns of conversations that grow, two engines in turn."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        with self.engine("--store", self.store) as with_store, self.engine() as without:
            for round_number in range(self.rounds):
                start = self.ids[round_number * N_ASKED :]
                prompts = {True: start[: 3 * N_ASKED].tolist(), False: start[: 3 * N_ASKED].tolist()}
                for turn, (stored, engine) in itertools.product(
                    range(N_TURNS), ((True, with_store), (False, without))
                ):
                    answer = engine.turn(prompts[stored], N_ANSWERED)
                    if turn:  # the first one begins anew, and is longer
                        seconds[stored].append(answer.seconds)
                    at = (turn + 3) * N_ASKED
                    prompts[stored] += [*answer.tokens, *start[at : at + N_ASKED].tolist()]
        ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
        ours = statistics.median(seconds[False]) * statistics.median(ratios)
        work = f"a turn of {N_ASKED} tokens and {N_ANSWERED} of answer, with the store (paired)"
        self.add(work, ours, "without", statistics.median(seconds[False]), GOALS["cost"])


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", default=",".join(map(str, N_TOKENS)), help="lengths of the conversations")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    machine, rows = machine_facts(), []
    print(f"machine: {', '.join(f'{name} {value}' for name, value in machine.items())}")
    for n_tokens in map(int, args.tokens.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(args.model, folder, args.rounds, args.context)
            bench.keep(n_tokens)
            bench.restarts(n_tokens)
            rows += bench.rows
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.model, folder, args.rounds, args.context)
        bench.cost()
        rows += bench.rows
    if args.json:
        write_figures(args.json, machine, rows, {}, ("", ""))


if __name__ == "__main__":
    main()
