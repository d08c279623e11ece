"""Measures a demo GGUF as it will be served: rounded to Q8_0, blocks selected, on chapters that training never saw.

    python tools/train_report.py --model models/strata-demo.gguf --json tools/train_demo.json

Owns the measures and the sample texts. Knows nothing of training. Invariant: every number comes from the file alone and
from held-out text. Next: train_draft.py.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import train_data as data
import train_model as model
from torch import Tensor
from train_draft import accepted
from train_gguf import read_gguf, read_keys
from train_model import Losses, Mode

SAMPLE_PROMPTS = ("Hello", "Tell me of Moses.", "What is written of mercy?", "In the beginning God", "John 3:16")


class Served:
    """A model file and its tokenizer."""

    def __init__(self, path: Path) -> None:
        self.cfg, self.weights = read_gguf(path)
        keys = read_keys(path)
        self.tokenizer = data.tokenizer_of(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.merges"])
        self.turn_end = self.tokenizer.token_to_id(data.TURN_END)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    @torch.no_grad()
    def logits(self, ids: Tensor, mode: Mode = Mode()) -> Tensor:  # noqa: B008  (an immutable tuple)
        return model.logits(self.weights, self.cfg, model.trunk(self.weights, self.cfg, ids, mode, Losses()))

    def answer(self, prompts: list[str], most: int, temperature: float = 0.0) -> list[list[int]]:
        """Tokens that follow each prompt, up to the end of the turn or `most`.

        Rows are padded on the right, which no earlier position can see.
        """
        rows = [self.encode(prompt) for prompt in prompts]
        starts, open_rows = [len(row) for row in rows], set(range(len(rows)))
        for _ in range(most):
            order = sorted(open_rows)
            length = max(len(rows[i]) for i in order)
            batch = torch.tensor([rows[i] + [0] * (length - len(rows[i])) for i in order])
            for i, scores in zip(order, self.logits(batch), strict=True):
                token = pick(scores[len(rows[i]) - 1], temperature)
                rows[i].append(token)
                if token == self.turn_end:
                    open_rows.discard(i)
            if not open_rows:
                break
        return [row[start:] for row, start in zip(rows, starts, strict=True)]


def pick(scores: Tensor, temperature: float) -> int:
    if temperature == 0:
        return int(scores.argmax())
    return int(torch.multinomial((scores / temperature).softmax(-1), 1))


def windows(ids: list[int], length: int) -> list[Tensor]:
    return [torch.tensor(ids[i : i + length])[None] for i in range(0, len(ids) - length + 1, length)]


# --- measures --------------------------------------------------------------------------------------------------------


def token_losses(served: Served, ids: Tensor, mode: Mode) -> Tensor:
    """Nats of each token but the first, given those before it."""
    guess = served.logits(ids, mode)[0, :-1].log_softmax(-1)
    return -guess.gather(-1, ids[0, 1:, None])[:, 0]


def text_loss(served: Served, ids: list[int], length: int, mode: Mode) -> dict[str, float]:
    parts = windows(ids, length)
    nats = torch.cat([token_losses(served, part, mode) for part in parts])
    size_bytes = sum(len(served.tokenizer.decode(p[0, 1:].tolist(), skip_special_tokens=False).encode()) for p in parts)
    return {
        "window": length, "tokens": len(nats), "nats_per_token": round(nats.mean().item(), 4),
        "bits_per_byte": round(nats.sum().item() / size_bytes / math.log(2), 4),
    }  # fmt: skip


def loss_by_position(served: Served, ids: list[int], length: int) -> dict[str, float]:
    """Mean loss in stretches of one long context: it should fall, and must not rise beyond the trained length."""
    nats = torch.stack([token_losses(served, part, Mode()) for part in windows(ids, length)]).mean(0)
    edges = [0] + [2**i for i in range(8, length.bit_length())]
    return {f"{a}-{b}": round(nats[a:b].mean().item(), 4) for a, b in pairwise(edges)}


def acceptance(served: Served, rows: list[Tensor]) -> list[float]:
    """Share of accepted drafts at each step of a chain of three, greedy; later steps where the earlier ones held."""
    sums = [[0, 0] for _ in range(3)]
    for ids in rows:
        for total, counts in zip(sums, accepted(served.weights, served.cfg, ids), strict=True):
            total[0] += counts[0]
            total[1] += counts[1]
    return [round(good / max(1, offered), 4) for good, offered in sums]


@torch.no_grad()
def index_recall(served: Served, rows: list[Tensor]) -> list[dict[str, float]]:
    """Per attention layer: share of dense attention mass in the selected cells, for queries in the second half.

    Beside it the share of the best possible choice of as many blocks, of the latest blocks, and of blocks at random.
    """
    cfg, report = served.cfg, []
    for layer in (i for i in range(cfg.n_trunk) if cfg.is_attention(i)):
        shares = torch.stack([_recall_of(served, ids, layer) for ids in rows]).mean(0).tolist()
        names = ("indexer", "best", "latest", "random")
        report.append({"layer": layer} | {n: round(v, 4) for n, v in zip(names, shares, strict=True)})
    return report


def _recall_of(served: Served, ids: Tensor, layer: int) -> Tensor:
    cfg, w, length = served.cfg, served.weights, ids.shape[1]
    residual = model.trunk(w, replace(cfg, n_trunk=layer), ids, Mode(), Losses())
    p = model.part(w, f"blk.{layer}.")
    x, _ = model.fast.read(model.part(p, "hc_attn_"), cfg, residual)
    table, rows = model.rope_table(cfg, length), torch.arange(length // 2, length)
    q, k, _, _ = model.fast.qkv(p, cfg, x, table)
    mass = model.block_mass(cfg, q, k, rows)[0]
    scores = model.index_scores(p, cfg, x, table, rows)[0]
    complete = scores > -torch.inf
    mass = mass * complete
    n_kept = cfg.top_k // cfg.idx_block
    chosen = mass.gather(-1, scores.topk(n_kept).indices).sum(-1)
    latest = mass.gather(-1, (complete.sum(-1, keepdim=True) - 1 - torch.arange(n_kept))).sum(-1)
    chance = n_kept / complete.sum(-1)
    total = mass.sum(-1)
    best = mass.topk(n_kept).values.sum(-1)
    return torch.stack([(v / total).mean() for v in (chosen, best, latest)] + [chance.mean()])


def says(served: Served, prompt: str, answer: str) -> bool:
    """Whether greedy decoding after `prompt` gives exactly `answer` and then ends the turn.

    One pass tells: each token that would be chosen has to be the next one of the answer.
    """
    head, tail = served.encode(prompt), [*served.encode(answer), served.turn_end]
    ids = torch.tensor(head + tail)[None]
    return served.logits(ids)[0, len(head) - 1 : -1].argmax(-1).tolist() == tail


def memory(served: Served, groups: list[list[data.Verse]], n: int) -> dict[str, float]:
    """Share of names and words said back exactly, by the number of other exchanges since they were told."""
    scribe = data.Scribe(groups, seed=4)
    right = {between: 0 for between in (1, 3, 10)}
    for between in right:
        right[between] = sum(says(served, *scribe.memory_test(between)) for _ in range(n))
    return {f"after_{between}": round(count / n, 3) for between, count in right.items()}


def ending(served: Served, groups: list[list[data.Verse]], n: int, most: int = 120) -> float:
    """Share of sampled answers to a first question that end within `most` tokens."""
    scribe, header = data.Scribe(groups, seed=5), f"{data.TURN_START}assistant\n"
    prompts = [(text := scribe.conversation(1))[: text.index(header)] + header for _ in range(n)]
    torch.manual_seed(7)
    return sum(a[-1] == served.turn_end for a in served.answer(prompts, most, temperature=0.7)) / n


def samples(served: Served) -> list[dict[str, str]]:
    torch.manual_seed(7)
    prompts = [data.turn("user", text) + f"{data.TURN_START}assistant\n" for text in SAMPLE_PROMPTS]
    answers = served.answer(prompts, most=120, temperature=0.6)
    talks = [{"user": p, "assistant": served.tokenizer.decode(a)} for p, a in zip(SAMPLE_PROMPTS, answers, strict=True)]
    text = served.answer(["Psalms 151\n"], most=160, temperature=0.6)[0]
    return [*talks, {"text": "Psalms 151\n" + served.tokenizer.decode(text)}]


def generated_rows(served: Served, n: int, length: int) -> list[Tensor]:
    """Text that the model writes itself, greedily, after a held-in heading."""
    prompts = [f"{data.BOOKS[3 * i].replace('_', ' ')} {2 * i + 2}\n" for i in range(n)]
    torch.manual_seed(7)
    answers = served.answer(prompts, most=length, temperature=0.6)
    return [torch.tensor(served.encode(p) + a)[None] for p, a in zip(prompts, answers, strict=True)]


def measure(path: Path, bible: str) -> dict:
    served = Served(path)
    _, held = data.split_chapters(data.read_verses(bible))
    ids = served.encode("".join(data.running_text(held)))
    talk = data.Scribe(held, seed=3)
    chat = [torch.tensor(served.encode(talk.conversation(10))[:1024])[None] for _ in range(12)]
    return {
        "size_bytes": path.stat().st_size,
        "parameters": sum(t.numel() for t in served.weights.values()),
        "held_out_chapters": len(held),
        "loss": [text_loss(served, ids, n, Mode()) for n in (1024, 4096)],
        "loss_dense": text_loss(served, ids, 4096, Mode(sparse=False)),
        "loss_by_position": loss_by_position(served, ids, 4096),
        "accepted_on_text": acceptance(served, windows(ids, 1024)[:16]),
        "accepted_on_conversations": acceptance(served, chat),
        "accepted_on_own_text": acceptance(served, generated_rows(served, 6, 200)),
        "index_recall": index_recall(served, windows(ids, 2048)[:4]),
        "memory": memory(served, held, 40),
        "answers_that_end_within_120_tokens": ending(served, held, 20),
        "samples": samples(served),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/strata-demo.gguf"))
    parser.add_argument("--json", type=Path, help="where to write the measures")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bible", default="bible", help="the command of Debian's bible-kjv")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = json.dumps(measure(args.model, args.bible), indent=1, ensure_ascii=False)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
