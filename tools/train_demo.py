"""Trains the demo model: a small `qwen4exp` that speaks the English of 1611, on the CPU, in about an hour on one core.

    apt-get install bible-kjv && pip install -e '.[train]' && python tools/train_demo.py --out models/strata-demo.gguf

Owns the schedule, the optimiser, checkpoints and the export. Knows nothing of layers or of how text is made. Invariant:
what is exported is the running mean of the weights, and no step has seen the chapters it is evaluated on. Next:
train_data.py, then train_model.py. Two processes: `torchrun --nproc-per-node 2 tools/train_demo.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_data as data
import train_model as model
from tokenizers import Tokenizer
from torch import Tensor
from train_draft import chain_loss
from train_gguf import write_gguf
from train_model import Config, Losses, Mode, Weights

N_VOCAB = 2048
NGRAM_ROWS = (8009, 8011, 8017, 8039)  # primes, so that the remainders of one hash are nearly independent
MICRO_TOKENS = 2048  # one forward and backward pass: its activations fit the last-level cache
MICRO_PER_STEP = 2
TEXT_SHARE, DRILL_SHARE = 0.4, 0.2  # of the rows; the rest are conversations
DRAFT_WEIGHT, BALANCE_WEIGHT, INDEX_WEIGHT = 0.2, 0.01, 0.1
SPARSE_FROM = 0.45  # share of the run after which blocks are selected; dense attention teaches the indexer before
DRILL_WEIGHT = 6.0  # of an answer's tokens in a drill: few tokens, and nothing else teaches to look back so soon
MEAN_DECAY = 0.99
CHECKPOINT_EVERY_S = 240
LOG_EVERY = 20
ABOUT = {
    "name": "Strata demo",
    "description": "A small qwen4exp that learned the King James Bible, to demonstrate and test strata",
    "license": "MIT",
    "source.url": "Debian's package bible-kjv-text 4.38",
}


class Phase(NamedTuple):
    """Until `end` (share of the run) rows have one of `lengths` tokens, taken in turn."""

    end: float
    lengths: tuple[int, ...]


CHAIN_STEPS, CHAIN_LENGTH, CHAIN_RATE = 3, 512, 0.5
PHASES = (Phase(0.5, (512,)), Phase(0.82, (1024,)), Phase(1.01, (1024, 2048)))


# --- text into batches -----------------------------------------------------------------------------------------------


class Corpus:
    """Token rows of running text and of conversations, endless and random."""

    def __init__(self, tokenizer: Tokenizer, groups: list[list[data.Verse]], seed: int) -> None:
        self.tokenizer, self.scribe, self.rng = tokenizer, data.Scribe(groups, seed), random.Random(seed)
        self.stream = torch.tensor(self._encode("".join(data.running_text(groups))))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def text_row(self, length: int) -> Tensor:
        start = self.rng.randrange(len(self.stream) - length)
        return self.stream[start : start + length]

    def _packed(self, length: int, write: Callable[[int], str]) -> Tensor:
        ids: list[int] = []
        while len(ids) < length:
            ids += self._encode(write(self.rng.randint(1, length // 64)))
        return torch.tensor(ids[:length])

    def answers(self, ids: Tensor) -> Tensor:
        """Mask of the tokens that an assistant says, its end of turn included."""
        turn_end, header = self.tokenizer.token_to_id(data.TURN_END), self._encode(f"{data.TURN_START}assistant\n")
        speaks, mask, row = False, torch.zeros_like(ids, dtype=torch.bool), ids.tolist()
        for i, token in enumerate(row):
            mask[i] = speaks
            speaks = row[max(0, i + 1 - len(header)) : i + 1] == header or (speaks and token != turn_end)
        return mask

    def chat_row(self, length: int) -> Tensor:
        return self._packed(length, self.scribe.conversation)

    def drill_row(self, length: int) -> Tensor:
        return self._packed(length, self.scribe.drill)

    def batch(self, length: int) -> tuple[Tensor, Tensor]:
        """Rows of one micro-batch and the weight of each token's loss."""
        rows, kinds = max(1, MICRO_TOKENS // length), (self.text_row, self.drill_row, self.chat_row)
        shares = (TEXT_SHARE, DRILL_SHARE, 1 - TEXT_SHARE - DRILL_SHARE)
        made = [(make, make(length)) for make in self.rng.choices(kinds, shares, k=rows)]
        weights = [1 + (DRILL_WEIGHT - 1) * self.answers(ids) * (make == self.drill_row) for make, ids in made]
        return torch.stack([ids for _, ids in made]), torch.stack(weights)


# --- optimiser -------------------------------------------------------------------------------------------------------


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Weights of a product of useful size: computed in bf16 and updated by Muon."""
    small = ("embd", "output.weight", "gate_inp", "ssm_alpha", "ssm_beta", "conv1d", "inject")
    whole = name.endswith(("attn_output.weight",)) or not any(part in name for part in small)
    return tensor.ndim >= 2 and whole


def bf16(weights: Weights) -> Weights:
    """Big weights rounded to bf16 under autograd; selection, decay and embeddings stay in float32."""
    return {
        n: t.bfloat16() if is_matrix(n, t) or n == "output.weight" or "inject" in n else t for n, t in weights.items()
    }


def orthogonalized(grads: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of each (k, rows, cols), by the Newton-Schulz steps of Muon (2024)."""
    x = grads.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Optimizer:
    """Muon for matrices, Adam for the rest."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.first = {n: torch.zeros_like(t) for n, t in weights.items()}
        self.second = {n: torch.zeros_like(t) for n, t in weights.items() if not is_matrix(n, t)}
        self.steps = dict.fromkeys(weights, 0)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        matrices: dict[tuple[int, int], list[str]] = {}
        for name, t in self.weights.items():
            if t.grad is None:
                continue
            self.steps[name] += 1
            if is_matrix(name, t):
                matrices.setdefault(tuple(t.shape[-2:]), []).append(name)
            else:
                self._adam(name, t, rate)
        for names in matrices.values():
            self._muon(names, 0.02 * rate)
        for t in self.weights.values():
            t.grad = None

    def _adam(self, name: str, t: Tensor, rate: float) -> None:
        rate *= 5e-3 if "embd" in name else 2e-3
        n = self.steps[name]
        mean, square = self.first[name].lerp_(t.grad, 0.1), self.second[name].lerp_(t.grad.square(), 0.02)
        t -= rate / (1 - 0.9**n) * mean / ((square / (1 - 0.98**n)).sqrt_() + 1e-10)

    def _muon(self, names: list[str], rate: float) -> None:
        grads = []
        for name in names:
            grad, mean = self.weights[name].grad, self.first[name]
            mean.lerp_(grad, 0.05)
            grads.append(grad.lerp(mean, 0.95).view(-1, *grad.shape[-2:]))
        rows, cols = grads[0].shape[-2:]
        updates = orthogonalized(torch.cat(grads)).split([len(g) for g in grads])
        for name, update in zip(names, updates, strict=True):
            t = self.weights[name]
            t.mul_(1 - 0.05 * rate).sub_(update.view_as(t), alpha=rate * math.sqrt(max(1, rows / cols)))


def learning_rate(step: int, progress: float) -> float:
    """Factor of the peak rate: a short rise, a plateau, then linear down to a fiftieth."""
    return min(1.0, (step + 1) / 50, max(0.02, (1 - progress) / 0.6))


# --- processes that share a run --------------------------------------------------------------------------------------


class Workers:
    """The processes that `torchrun` started for this run; one, when it did not."""

    @staticmethod
    def count() -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @staticmethod
    def is_first() -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    @staticmethod
    def agree(value: float) -> float:
        """The first worker's value: each has a clock of its own, and all must take the same branch."""
        if not dist.is_initialized():
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return shared.item()

    @staticmethod
    def sum_gradients(weights: Weights) -> None:
        if not dist.is_initialized():
            return
        grads = [t.grad for t in weights.values() if t.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """All that a checkpoint keeps."""

    cfg: Config
    weights: Weights
    mean: Weights
    optimizer: Optimizer
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    curve: list[dict] = field(default_factory=list)

    @classmethod
    def start(cls, cfg: Config, seed: int) -> Run:
        weights = model.init_weights(cfg, seed)
        mean = {n: t.clone() for n, t in weights.items()}
        for t in weights.values():
            t.requires_grad_()
        return cls(cfg, weights, mean, Optimizer(weights))

    def save(self, path: Path) -> None:
        state = {k: getattr(self, k) for k in ("step", "tokens", "elapsed_s", "curve", "mean")}
        state["weights"] = {n: t.detach() for n, t in self.weights.items()}
        state["optimizer"] = (self.optimizer.first, self.optimizer.second, self.optimizer.steps)
        temporary = path.with_suffix(".part")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def adopt_mean(self) -> None:
        with torch.no_grad():
            for name, t in self.weights.items():
                t.copy_(self.mean[name])

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, t in self.weights.items():
                t.copy_(state["weights"][name])
        self.optimizer.first, self.optimizer.second, self.optimizer.steps = state["optimizer"]
        for key in ("step", "tokens", "elapsed_s", "curve", "mean"):
            setattr(self, key, state[key])


def losses_of(run: Run, batch: tuple[Tensor, Tensor], mode: Mode, with_draft: bool) -> dict[str, Tensor]:
    ids, token_weights = batch
    weights, cfg, side = bf16(run.weights), run.cfg, Losses()
    residual = model.trunk(weights, cfg, ids, mode, side)
    parts = {"next": ahead_loss(model.logits(weights, cfg, residual), ids, 1, token_weights)}
    if with_draft:
        drafted = model.draft(weights, cfg, residual, F.pad(ids[:, 1:], (0, 1)), mode, side)
        parts["draft"] = ahead_loss(model.draft_logits(weights, cfg, drafted), ids, 2)
    return parts | {"balance": Losses.mean(side.balance), "index": Losses.mean(side.index)}


def ahead_loss(logits: Tensor, ids: Tensor, distance: int, weights: Tensor | None = None) -> Tensor:
    """Weighted mean cross-entropy of each position's guess at the token `distance` further on."""
    targets = F.pad(ids[:, distance:], (0, distance), value=-100)
    if weights is None:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    shifted = F.pad(weights[:, distance:], (0, distance)).flatten()
    return (each * shifted).sum() / shifted.sum()


def whole_step(run: Run, corpus: Corpus, progress: float) -> dict[str, float]:
    """One step of the whole model; the worker's share of the batch, then the sum of all workers."""
    lengths = next(p.lengths for p in PHASES if progress < p.end)
    length = lengths[run.step % len(lengths)]
    mode = Mode(sparse=progress >= SPARSE_FROM, teach_index=run.step % 2 == 0)
    with_draft = progress > 0.5 or run.step % 2 == 1
    sums: dict[str, float] = {}
    share = MICRO_PER_STEP // Workers.count()
    for _ in range(share):
        parts = losses_of(run, corpus.batch(length), mode, with_draft)
        total = parts["next"] + BALANCE_WEIGHT * parts["balance"] + INDEX_WEIGHT * parts["index"]
        (total + DRAFT_WEIGHT * parts.get("draft", torch.zeros(()))).backward()
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value.item() / share
    finish_step(run, learning_rate(run.step, progress))
    return sums


def chain_step(run: Run, corpus: Corpus, progress: float) -> dict[str, float]:
    """Teaches the finished model's draft layer alone to go on from its own output, as a decoder makes it do."""
    total, share = 0.0, MICRO_PER_STEP // Workers.count()
    weights = bf16(run.weights)
    for _ in range(share):
        ids, _ = corpus.batch(CHAIN_LENGTH)
        residual = model.trunk(weights, run.cfg, ids, Mode(), Losses()).detach()
        loss = chain_loss(weights, run.cfg, residual, ids, CHAIN_STEPS)
        loss.backward(retain_graph=share > 1)
        total += loss.item() / share
    for name, t in run.weights.items():
        if not name.startswith(f"blk.{run.cfg.n_trunk}."):
            t.grad = None
    finish_step(run, CHAIN_RATE * max(0.02, 1 - progress))
    return {"chain": total}


def finish_step(run: Run, rate: float) -> None:
    Workers.sum_gradients(run.weights)
    run.optimizer.step(rate)
    with torch.no_grad():
        for name, t in run.mean.items():
            t.lerp_(run.weights[name], 1 - min(MEAN_DECAY, run.step / (run.step + 10)))
    run.step += 1
    run.tokens += MICRO_PER_STEP * MICRO_TOKENS


Step = Callable[..., dict[str, float]]


def train(run: Run, step: Step, minutes: tuple[float, float], on_checkpoint: Callable[[Run], None]) -> None:
    """Takes steps while the run's clock is between two times; the clock goes on from where an earlier run stopped."""
    begun, saved, (start, end) = time.monotonic() - run.elapsed_s, run.elapsed_s, minutes
    while (progress := Workers.agree((run.elapsed_s / 60 - start) / (end - start))) < 1:
        parts = step(run, progress=progress)
        run.elapsed_s = time.monotonic() - begun
        if not Workers.is_first():
            continue
        if run.step % LOG_EVERY == 0:
            where = {"step": run.step, "tokens": run.tokens, "minutes": round(run.elapsed_s / 60, 1)}
            run.curve.append(where | {k: round(v, 3) for k, v in parts.items()})
            print(json.dumps(run.curve[-1]), flush=True)
        if run.elapsed_s - saved > CHECKPOINT_EVERY_S:
            saved = run.elapsed_s
            on_checkpoint(run)
    if Workers.is_first():
        on_checkpoint(run)


def held_out_loss(cfg: Config, weights: Weights, stream: Tensor, length: int, most: int) -> float:
    """Nats a token over windows of held-out text, blocks selected as a decoder selects them."""
    windows = [stream[i : i + length] for i in range(0, len(stream) - length, length)][:most]
    total = 0.0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for ids in windows:
            residual = model.trunk(weights, cfg, ids[None], Mode(), Losses())
            total += ahead_loss(model.logits(weights, cfg, residual), ids[None], 1).item()
    return total / len(windows)


def tokenizer_for(path: Path, groups: list[list[data.Verse]], seed: int) -> Tokenizer:
    """The tokenizer of the run in this folder, trained when the run is new."""
    if not path.exists():
        scribe = data.Scribe(groups, seed)
        sample = [scribe.conversation(8) for _ in range(300)]
        tokenizer = data.train_tokenizer([*data.running_text(groups), *sample], N_VOCAB)
        temporary = path.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(temporary))
        os.replace(temporary, path)
    return Tokenizer.from_file(str(path))


def demo_config(tokenizer: Tokenizer) -> Config:
    rng = random.Random(1611)
    most = (2**63 - 1) // N_VOCAB  # an id times a multiplier stays below 2**63
    offsets = tuple(sum(NGRAM_ROWS[:i]) for i in range(len(NGRAM_ROWS)))
    return Config(
        n_vocab=N_VOCAB, ple_eos=tokenizer.token_to_id(data.END_OF_TEXT), ple_sizes=NGRAM_ROWS, ple_offsets=offsets,
        ple_multipliers=tuple(rng.randrange(most // 2) * 2 + 1 for _ in range(3)),
    )  # fmt: skip


def export(run: Run, tokenizer: Tokenizer, path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return write_gguf(path, run.cfg, run.mean, data.tokenizer_keys(tokenizer, merges), ABOUT)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/strata-demo.gguf"), help="the GGUF to write")
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="folder of the run; one there goes on")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time of the whole run")
    parser.add_argument("--chain-minutes", type=float, default=7.0, help="the last ones, for the draft layer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--bible", default="bible", help="the command of Debian's bible-kjv")
    parser.add_argument("--no-compile", action="store_true", help="do without a C++ compiler, at half the speed")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train_groups, held_groups = data.split_chapters(data.read_verses(args.bible))
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(args.work / "tokenizer.json", train_groups, args.seed)
    run = Run.start(demo_config(tokenizer), args.seed)
    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        run.load(checkpoint)
    rank = dist.get_rank() if dist.is_initialized() else 0
    corpus = Corpus(tokenizer, train_groups, args.seed + run.step + 1_000_003 * rank)
    held_out = torch.tensor(tokenizer.encode("".join(data.running_text(held_groups))).ids)

    def on_checkpoint(run: Run) -> None:
        run.save(checkpoint)
        size_bytes = export(run, tokenizer, args.out)
        loss = held_out_loss(run.cfg, run.mean, held_out, 1024, most=12)
        run.curve.append({"step": run.step, "held_out": round(loss, 4)})
        print(json.dumps(run.curve[-1] | {"size_bytes": size_bytes}), flush=True)

    if not args.no_compile:
        model.fast.compile_all()
    whole_end = args.minutes - args.chain_minutes
    train(run, partial(whole_step, corpus=corpus), (0.0, whole_end), on_checkpoint)
    run.adopt_mean()
    train(run, partial(chain_step, corpus=corpus), (whole_end, args.minutes), on_checkpoint)


if __name__ == "__main__":
    main()
