"""What the store writes as a conversation grows, beside session files of the same conversation, and how it opens.

Store, keeper, flushes and cache are those of the engine, with its default options; only the model is missing, so all
cells and states are zeros. A conversation begins with a system prompt of 500 tokens, each answer has 400, and prompts
are read at 500 tokens/s, so that 1,000 tokens may as well be read again. Bytes are those that the keeper counts,
compaction included, of files that are really written, 13 GB at once at the most. A session file holds the cells, the
state at the end and that of the deepest checkpoint; the size of each is computed, and none is written.

The shapes, in bytes: SmolLM2 135M (30 layers of 3 K/V heads of 64, fp16: 23,040 a token), Llama 3.2 1B (16 layers of 8
K/V heads of 64, fp16: 32,768 a token), and a large hybrid, the reference engine's model (12 attention layers and a
draft layer of 2 K/V heads of 256, int8, an indexer, 36 recurrent layers: 15,264 a token, and 118,063,152 a state).

Opened is a store of files with the first tokens of as many conversations, 64 (10,000 such files are about what
--store-mib allows) or a turn; heads are in the page cache, cells are holes. The seconds for an empty folder are taken
off, and the median of the rounds is shown.

Usage: store.py [--model PATH] [--folder DIR] [--rounds N] [--scale SHARE] [--json FILE]
"""

import argparse
import functools
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
from machine import machine_facts, write_figures
from report import HEADING, line_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import backend
import sessionstate
from cells import FORMATS, PAGE
from kvcache import Cache, CacheShape
from options import EngineOptions
from promptcache import Timeline
from sessionfile import session_bytes
from storeflush import Kept, segments_of
from storefolder import Store
from storekeeper import Keeper
from storelayout import Head, Shape, pack_head

FP16, INT8 = FORMATS["fp16"], FORMATS["int8"]
NO_GEOMETRY = (0,) * 18  # nothing of it counts where nothing is recurrent
GEOMETRY = (2560, 48, 4, 128, 16, 48, 4, 10_240, 6144, 24, 2, 256, 4, 128, 4, 320, 512, 640)
HISTORY_BYTES = 9 * 4 * 2560 * 4  # rows of the n-gram layer's convolution, four streams of float32
SMOLLM2, LLAMA, HYBRID = "SmolLM2 135M", "Llama 3.2 1B", "a large hybrid"
MODELS = {
    SMOLLM2: CacheShape(NO_GEOMETRY, 30, 0, False, 3, 64, 0, 0, 0, FP16, FP16),
    LLAMA: CacheShape(NO_GEOMETRY, 16, 0, False, 8, 64, 0, 0, 0, FP16, FP16),
    HYBRID: CacheShape(GEOMETRY, 12, 36, True, 2, 256, 128, HISTORY_BYTES, 0, INT8, INT8),
}
LENGTHS = (8000, 63_000, 199_000)
TURN, SYSTEM, ANSWER = 2000, 500, 400  # tokens
N_RUN, RUN_TURN = 50, 1260  # turns of an agent's run, and tokens of each
READ_PER_S = 500  # prompt tokens
N_FILES, FILE_TOKENS = 10_000, 64
TARGETS = {(HYBRID, 63_000): 8.0, (HYBRID, 199_000): 22.0}  # how many times fewer bytes
MOST_RUN_GB, MOST_OPENING_S = 8.0, 1.0
IDENTITY = bytes(32)
MIB = 1 << 20


def refuse(line: str) -> None:
    """The log of store and keeper: whatever they have to tell, the figure would not be one."""
    raise SystemExit(f"store.py: {line}")


class Conversation:
    """A conversation without a model, kept in a store from its first answer on."""

    def __init__(self, folder: str, shape: CacheShape, n_most: int):
        """`n_most` is how many tokens it may get."""
        options = EngineOptions()
        self.cache = Cache(shape._replace(n_cells=-(-n_most // PAGE) * PAGE), backend.load("cpu", 1, print))
        self.timeline = Timeline(self.cache, 2)  # checkpoints: the root and the latest are all that is ever offered
        store = Store(folder, options.store_mib * MIB, 0, refuse)  # free disk is not kept: it can only refuse
        self.keeper = Keeper(
            store, lambda steered: IDENTITY, drafts=True, min_tokens=1, replay_s=options.store_replay_s, log=refuse
        )
        self.keeper.read_prompt(READ_PER_S, 1.0)
        self._ids = np.random.default_rng(0).integers(0, 32_000, n_most, np.int32)
        self._clock = itertools.count(1)

    def _read(self, end: int) -> None:
        if end > self.cache.n_tokens:
            self.cache.commit(self._ids[self.cache.n_tokens : end])

    def _checkpoint(self, *, root: bool = False) -> None:
        self.timeline.checkpoints.add(self.cache.capture(), next(self._clock), root=root)

    def system(self, n_tokens: int) -> None:
        """The prompt begins with a system prompt, whose state stays."""
        self._read(n_tokens)
        self._checkpoint(root=True)

    def turn(self, end: int, n_answer: int) -> int:
        """Go on to so many tokens, the last of them an answer; returns the bytes that the store wrote for it."""
        before = self.keeper.counters.written_bytes
        self._read(end - n_answer)
        self._checkpoint()
        self._read(end)
        self.timeline.complete = True
        self.keeper.changed(self.timeline, self.cache)
        self.keeper.finish()
        return self.keeper.counters.written_bytes - before

    def session_bytes(self) -> int:
        """Size of its session file."""
        image = sessionstate.image_of(self.timeline, self.cache.shape, 0, loaded=False)
        return session_bytes(image, sessionstate.sources_of(self.timeline, self.cache))


class Figures:
    """The rows of this run, each printed as it comes; of all sizes the share `scale` is measured."""

    def __init__(self, scale: float, n_rounds: int):
        self.scale, self.n_rounds = scale, n_rounds
        self.rows: list[dict] = []
        print("\n".join(HEADING))

    def scaled(self, number: int) -> int:
        return max(round(number * self.scale), 1)

    def shape(self, name: str) -> CacheShape:
        shape = MODELS[name]
        return shape._replace(n_recurrent=round(shape.n_recurrent * self.scale))

    def add(self, work: str, ours: float, rival: str, rival_value: float, target: float | None, unit: str) -> None:
        """Less is better in all rows, and targets are those of whole sizes."""
        ratio, target = rival_value / ours, target if self.scale == 1 else None
        row = {"work": work, "unit": unit, "rival": rival, "ratio": ratio, "target": target}
        row["rounds"] = self.n_rounds if unit == "s" else 1
        self.rows.append(row | {"ours": ours, "rival_value": rival_value})
        print(line_of(self.rows[-1]), flush=True)


def measure_turns(figures: Figures, name: str, folder: str) -> None:
    """The last turn of each length; what is before it is in the store already, the most of it as one prompt."""
    n_turn, n_answer = figures.scaled(TURN), figures.scaled(ANSWER)
    conversation = Conversation(folder, figures.shape(name), figures.scaled(LENGTHS[-1]))
    conversation.system(figures.scaled(SYSTEM))
    for length in LENGTHS:
        end = figures.scaled(length)
        conversation.turn(end - n_turn, n_answer)
        written, whole = conversation.turn(end, n_answer), conversation.session_bytes()
        work = f"the last {n_turn:,} of {end:,} tokens stored, {name}"
        figures.add(work, written / 1e6, "its session file", whole / 1e6, TARGETS.get((name, length)), "MB")


def measure_run(figures: Figures, folder: str) -> None:
    """The sum over all turns of a run, from its first token on."""
    n_turn, n_answer = figures.scaled(RUN_TURN), figures.scaled(ANSWER)
    conversation = Conversation(folder, figures.shape(HYBRID), N_RUN * n_turn)
    conversation.system(figures.scaled(SYSTEM))
    written = whole = 0
    for number in range(1, N_RUN + 1):
        written += conversation.turn(number * n_turn, n_answer)
        whole += conversation.session_bytes()
    work = f"{N_RUN} turns of {n_turn:,} tokens stored, {HYBRID}"
    figures.add(work, written / 1e9, "a session file each turn", whole / 1e9, whole / 1e9 / MOST_RUN_GB, "GB")


def write_heads(folder: str, n_files: int, n_tokens: int) -> None:
    """Files of as many conversations, each with the cells of its first tokens as a hole."""
    cache = Cache(MODELS[SMOLLM2]._replace(n_cells=PAGE), backend.load("cpu", 1, print))
    shape, rng = Shape.of(cache.windows(1), False, cache.shape.state_sizes), np.random.default_rng(0)
    for number in range(n_files):
        ids = rng.integers(0, 32_000, n_tokens, np.int32)
        head = Head(IDENTITY, shape, tuple(segments_of(Kept(IDENTITY, shape, ids, ()))), ())
        with open(os.path.join(folder, f"{number:016x}-00000000.store"), "wb") as file:
            file.write(pack_head(head))
            file.truncate(head.file_bytes)


def opened_s(folder: str) -> float:
    begin = time.perf_counter()
    Store(folder, EngineOptions().store_mib * MIB, 0, refuse)
    return time.perf_counter() - begin


def measure_opening(figures: Figures, folder: str, n_tokens: int) -> None:
    n_files, full, empty = figures.scaled(N_FILES), os.path.join(folder, "full"), os.path.join(folder, "empty")
    os.mkdir(full)
    write_heads(full, n_files, n_tokens)
    rounds = [opened_s(full) - opened_s(empty) for _ in range(figures.n_rounds)]
    work = f"a store of {n_files:,} files of {n_tokens:,} tokens opened"
    figures.add(work, statistics.median(rounds), "at most", MOST_OPENING_S, 1.0, "s")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="not used: every bench takes it")
    parser.add_argument("--folder", help="where the temporary folders go, to choose the disk")
    parser.add_argument("--rounds", type=int, default=5, help="of opening a store; bytes are the same each time")
    parser.add_argument("--scale", type=float, default=1.0, help="share of all tokens, states and files, for a trial")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    machine = machine_facts()
    print(f"machine: {', '.join(f'{name} {value}' for name, value in machine.items())}\n")
    figures = Figures(args.scale, args.rounds)
    measures = [functools.partial(measure_turns, figures, name) for name in MODELS]
    measures.append(functools.partial(measure_run, figures))
    measures += [functools.partial(measure_opening, figures, n_tokens=n) for n in (FILE_TOKENS, TURN)]
    for measure in measures:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure(folder)
    if args.json:
        write_figures(args.json, machine, figures.rows, {}, ("", ""))


if __name__ == "__main__":
    main()
