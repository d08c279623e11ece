"""How fast prompts are read and tokens decoded, beside llama-server with the same model, threads, context and ids.

Both servers are children that are asked over their own public ways, one stream, greedy, in turn; the clock is the
client's and every figure the median of its rounds. Decoding is timed with a prompt of which all but one token is held.
Then how decoding grows with the context, and what int8 activations cost in perplexity on the demo's text.

Usage: tokens.py --model PATH [--llama-server PATH [--llama-version TEXT]] [--threads N] [--rounds N] [--longest N]
                 [--json FILE]
"""

import argparse
import contextlib
import functools
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
from machine import machine_facts, write_figures
from servers import LlamaServer, Server, ServerError, Settings, Strata, llama_version

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from declaration import TEXT
from engine import Engine
from modelfile import embedded_model
from options import EngineOptions
from tokenizer import Tokenizer

DEPTHS, N_DECODED = (64, 4000), 128
PROMPTS = (512, 2048, 6000)
N_SAVED, N_FOLLOWING = 6000, 32
GROWTH, GROWTH_DEMO, N_GROWTH = (1000, 2000, 4000, 8000), (1000, 2000, 4000, 8000, 16000, 32000), 64
CONTEXT, CONTEXT_DEMO = 8192, 32768
N_TRIAL, N_TRIAL_DECODED = 2048, 32
PERPLEXITY_CHUNK = 256
WITHIN = 0.995  # int8 activations may cost half a per cent of perplexity
# What may be faster on one machine and slower, or not there, on another: each pair is tried, the best one kept.
RIVAL_OPTIONS = ((("--flash-attn", "on"), ("--flash-attn", "off")), ((), ("--no-repack",)))


class Figures:
    """The rows and curves of this run; each is printed as it comes."""

    def __init__(self, rival: str | None, rounds: int):
        self.rows: list[dict] = []
        self.growth: dict[str, list] = {}
        self._rival, self._rounds = rival, rounds

    def add(self, work: str, unit: str, ours: float, rival_value: float | None = None, *, more=True, **change):
        """A row: the ratio is above 1 where ours is better; `more` says whether that is the greater value."""
        ratio = None
        if rival_value is not None:
            ratio = round(ours / rival_value if more else rival_value / ours, 4)
        row = {"work": work, "rival": self._rival, "ours": _significant(ours), "rival_value": _significant(rival_value)}
        row |= {"unit": unit, "ratio": ratio, "target": 1.0, "rounds": self._rounds} | change
        self.rows.append(row)
        beside = f"; {row['rival']} {row['rival_value']:g}, ratio {ratio:.3f}" if ratio is not None else ""
        print(f"{work}: {row['ours']:g} {unit}".rstrip() + beside, flush=True)


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


class Comparison:
    """The servers that are up, strata first, and what they are asked to read."""

    def __init__(self, servers: list[Server], ids: np.ndarray, rounds: int, figures: Figures):
        self.servers, self.ids, self.rounds, self.figures = servers, ids, rounds, figures

    def medians(self, measure: Callable[[Server], float]) -> list[float]:
        """One for each server; they are measured in turn."""
        values = [[measure(server) for server in self.servers] for _ in range(self.rounds)]
        return [statistics.median(column) for column in zip(*values, strict=True)]

    def cold_s(self, server: Server, n_tokens: int) -> float:
        """Seconds to the first token of a prompt of which nothing is held."""
        server.erase()
        return server.turn(self.ids[:n_tokens], 1, 0).seconds

    def decode_s(self, server: Server, depth: int, n_new: int) -> float:
        """Seconds a token behind a prompt that is held but for its last token."""
        if n_new > depth:  # an answer that is worth more than its prompt stays held, and the prompt is read beside it
            self.cold_s(server, depth)
        return server.turn(self.ids[:depth], n_new, depth - 1).seconds / n_new

    def restored_s(self, server: Server) -> float:
        """Seconds to the first token of the next turn, of reading the file and the turn's own tokens."""
        server.erase()
        seconds = server.restore("held.bin")
        return seconds + server.turn(self.ids[: N_SAVED + N_FOLLOWING], 1, N_SAVED).seconds

    # Work.

    def read(self, n_tokens: int) -> None:
        rates = self.medians(lambda server: n_tokens / self.cold_s(server, n_tokens))
        self.figures.add(f"a prompt of {n_tokens:,} tokens read", "tokens/s", *rates)

    def decode(self, depth: int) -> None:
        for server in self.servers:
            self.cold_s(server, depth)
        rates = self.medians(lambda server: 1 / self.decode_s(server, depth, N_DECODED))
        self.figures.add(f"decoding at {depth:,} tokens of context", "tokens/s", *rates)

    def restore(self) -> None:
        for server in self.servers:
            self.cold_s(server, N_SAVED)
            server.save("held.bin")
        cold = self.medians(lambda server: self.cold_s(server, N_SAVED + N_FOLLOWING))
        restored = self.medians(self.restored_s)
        what = f"{N_SAVED:,} tokens restored and {N_FOLLOWING} read, to the first token"
        self.figures.add(what, "s", *restored, more=False, target=None)
        gains = [seconds / sooner for seconds, sooner in zip(cold, restored, strict=True)]
        self.figures.add(f"how much sooner than {N_SAVED + N_FOLLOWING:,} tokens read cold", "x", *gains)

    def grow(self, title: str, depths: tuple[int, ...]) -> None:
        """Milliseconds a token against the tokens of context, and what growth in proportion would have led to."""
        curves: list[list] = [[] for _ in self.servers]
        for depth in depths:
            for server in self.servers:
                server.turn(self.ids[:depth], 1)
            medians = self.medians(functools.partial(self.decode_s, depth=depth, n_new=N_GROWTH))
            for server, curve, median in zip(self.servers, curves, medians, strict=True):
                curve.append([depth, _significant(1e3 * median)])
                print(f"{title}, {server.name}, a token at {depth:,} of context: {1e3 * median:.2f} ms", flush=True)
        for server, curve in zip(self.servers, curves, strict=True):
            self.figures.growth[f"{title}, {server.name}"] = curve
        (first, at_first), (last, at_last) = curves[0][0], curves[0][-1]
        work, rival = f"{title}, a token at {last:,} tokens of context", f"{last / first:g} x that at {first:,}"
        self.figures.add(work, "ms", at_last, at_first * last / first, more=False, rival=rival)


def trial_s(server: Server, ids: np.ndarray) -> float:
    """Seconds of a prompt and a few tokens, on which the rival's options are chosen."""
    server.turn(ids[:64], 4)
    server.erase()
    return server.turn(ids[:N_TRIAL], N_TRIAL_DECODED, 0).seconds


def best_options(path: str, settings: Settings, ids: np.ndarray) -> tuple[str, ...]:
    """The options with which llama-server is fastest here; some it may not survive."""
    found = {}
    for parts in itertools.product(*RIVAL_OPTIONS):
        options = tuple(itertools.chain(*parts))
        try:
            with LlamaServer(path, settings, *options) as server:
                found[options] = trial_s(server, ids)
            print(f"llama-server {' '.join(options)}: {found[options]:.2f} s for the trial", flush=True)
        except ServerError as error:
            print(f"llama-server {' '.join(options)}: left out, {error}", flush=True)
    if not found:
        raise ServerError("llama-server runs with none of the options tried")
    return min(found, key=found.get)


@contextlib.contextmanager
def running(settings: Settings, llama_server: str | None, options: tuple[str, ...]) -> Iterator[list[Server]]:
    """Both servers, or ours alone."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = [stack.enter_context(Strata(settings))]
        if llama_server:
            servers.append(stack.enter_context(LlamaServer(llama_server, settings, *options)))
        yield servers


def perplexity(model: str, activations: str, threads: int, ids: np.ndarray) -> float:
    """e to the mean negative log-likelihood of every token after the first."""
    options = EngineOptions(model=model, activations=activations, max_context=len(ids), threads=threads, backend="cpu")
    engine = Engine.load(options)
    cache, total = engine.new_cache(), 0.0
    for first in range(0, len(ids) - 1, PERPLEXITY_CHUNK):
        part, following = ids[first : first + PERPLEXITY_CHUNK], ids[first + 1 : first + PERPLEXITY_CHUNK + 1]
        logits = engine.model.logits(engine.model.append(cache, part).residual)[: len(following)].astype(np.float64)
        peak = logits.max(axis=1, keepdims=True)
        log_sum = peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1))
        total += float((log_sum - logits[np.arange(len(following)), following]).sum())
    return float(np.exp(total / (len(ids) - 1)))


def up_to(longest: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= longest)


def text_ids(model: str, n_tokens: int) -> np.ndarray:
    """The text, over and over, as so many ids."""
    return np.resize(np.array(Tokenizer.load(model).encode(TEXT), np.int32), n_tokens)


def compare(args: argparse.Namespace, figures: Figures) -> dict[str, str]:
    """All that the two servers are asked, then all that is ours alone; returns what is to be told of the rival."""
    rival, ids = {}, text_ids(args.model, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        settings, options = Settings(args.model, CONTEXT, args.threads, folder), ()
        if args.llama_server:
            options = best_options(args.llama_server, settings, ids[: args.longest])
            rival = {
                "llama-server": llama_version(args.llama_server),
                "llama-server options": " ".join(options).replace("--", ""),
            }
        with running(settings, args.llama_server, options) as servers:
            for server in servers:
                trial_s(server, ids[: args.longest])
            both = Comparison(servers, ids, args.rounds, figures)
            for depth in up_to(args.longest, DEPTHS):
                both.decode(depth)
            for n_tokens in up_to(args.longest, PROMPTS):
                both.read(n_tokens)
            if args.longest >= N_SAVED + N_FOLLOWING:
                both.restore()
            if depths := up_to(args.longest, GROWTH):
                both.grow("decoding", depths)
        if depths := up_to(args.longest, GROWTH_DEMO):
            demo = embedded_model()
            settings = settings._replace(model=demo, context=CONTEXT_DEMO)
            with Strata(settings, "--spec", "1") as server:  # a token a pass: how many drafts are accepted varies
                ours = Comparison([server], text_ids(demo, CONTEXT_DEMO), args.rounds, figures)
                ours.grow("decoding with the embedded model", depths)
    return rival


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama-server", metavar="PATH", help="the rival's binary (default: ours is measured alone)")
    parser.add_argument("--llama-version", metavar="TEXT", help="its name where the binary does not know it")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=CONTEXT_DEMO, help="tokens; longer work is left out")
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    args = parser.parse_args()
    machine = machine_facts() | {"threads": args.threads}
    print("machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()))
    if not args.llama_server:
        print("llama-server: not named with --llama-server, so strata is measured alone")
    figures = Figures("llama-server" if args.llama_server else None, args.rounds)
    try:
        machine |= compare(args, figures)
    except ServerError as error:
        sys.exit(f"tokens.py: {error}")
    ids = text_ids(args.model, min(len(Tokenizer.load(args.model).encode(TEXT)), args.longest))
    cost = [perplexity(args.model, activations, args.threads, ids) for activations in ("int8", "float")]
    change = {"rival": "float activations", "target": WITHIN, "rounds": 1}
    figures.add(f"perplexity of {len(ids):,} tokens of text, int8 activations", "", *cost, more=False, **change)
    if args.json:
        axes = ("tokens of context", "ms a token")
        write_figures(args.json, machine, figures.rows, figures.growth, axes)


if __name__ == "__main__":
    main()
