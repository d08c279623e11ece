"""The draft layer as a decoder runs it: a chain of drafts, each reading the one before, from every position at once.

Owns the mask of parallel chains, their loss, and the count of accepted drafts. Knows nothing of text or files.
Invariant: step 1 of a chain is `train_model.draft`, the same computation bit for bit. Next: train_model.py.

Cell i joins the trunk's residual i with token i+1 and guesses token i+2. A decoder that goes on from its own guess
makes cell i+1 out of the draft layer's output residual, and so on; it sees the true cells up to i and the chain's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import train_model as model
from torch import Tensor
from train_model import Config, Losses, Weights, fast, linear, only, part


def joined(w: Weights, cfg: Config, residual: Tensor, next_ids: Tensor) -> Tensor:
    p = part(w, f"blk.{cfg.n_trunk}.nextn.")
    from_embed, from_hidden = p["eh_proj.weight"].split(cfg.n_embd, dim=1)
    embed = model.rms(F.embedding(next_ids, w["token_embd.weight"]), p["enorm.weight"], cfg.eps)
    hidden = model.rms(residual.flatten(-2), p["hnorm.weight"], cfg.eps).view(residual.shape)
    return linear(hidden, from_hidden) + linear(embed, from_embed).unsqueeze(2)


def chain_mask(length: int, n_steps: int) -> Tensor:
    """Cells (T, n_steps·T) that the chain from position i sees: true ones up to i, then its own."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    own = torch.eye(length, dtype=torch.bool)
    return torch.cat([causal] + [own] * (n_steps - 1), dim=1)


def chain(w: Weights, cfg: Config, residual: Tensor, ids: Tensor, n_steps: int) -> Iterator[Tensor]:
    """Logits (B, T, vocabulary) of each step, given the true tokens in place of the drafted ones.

    Step s of the chain from position i guesses token i+1+s; the last positions, whose tokens are unknown, are padding.
    """
    p, batch, length = part(w, f"blk.{cfg.n_trunk}."), ids.shape, ids.shape[1]
    table = model.rope_table(cfg, length + n_steps)
    keys, values = [], []
    for step in range(n_steps):
        rows = joined(w, cfg, residual, F.pad(ids[:, 1 + step :], (0, 1 + step))).flatten(0, 1)
        x, strength = fast.read(part(p, "hc_attn_"), cfg, rows)
        here = tuple(t[step : step + length] for t in table)
        q, k, v, gate = fast.qkv(only(p, "attn_"), cfg, x.unflatten(0, batch), here)
        keys.append(k)
        values.append(v)
        half = (t.to(p["attn_q.weight"].dtype) for t in (q, torch.cat(keys, 2), torch.cat(values, 2)))
        y = model.attend(cfg, *half, chain_mask(length, step + 1) if step else None)
        rows = fast.write(rows, strength, linear(y * gate, p["attn_output.weight"]).flatten(0, 1))
        x, strength = fast.read(part(p, "hc_ffn_"), cfg, rows)
        residual = fast.write(rows, strength, fast.experts(part(p, "ffn_"), cfg, x)[0]).unflatten(0, batch)
        yield model.draft_logits(w, cfg, residual)


def chain_loss(w: Weights, cfg: Config, residual: Tensor, ids: Tensor, n_steps: int) -> Tensor:
    """Mean cross-entropy against what the trunk says next; later steps weigh less, as they are reached less often."""
    with torch.no_grad():
        wanted = model.logits(w, cfg, residual).log_softmax(-1)
    total, weight = torch.zeros(()), 1.0
    for step, guess in enumerate(chain(w, cfg, residual, ids, n_steps), start=1):
        target = wanted[:, step:].exp()
        total = total - weight * (target * guess[:, :-step].log_softmax(-1)).sum(-1).mean()
        weight *= 0.7
    return total


@torch.no_grad()
def accepted(w: Weights, cfg: Config, ids: Tensor, n_steps: int = 3) -> list[tuple[int, int]]:
    """(accepted, offered) at each step of the chains over `ids` (B, T), greedy: the trunk has to agree.

    A step is offered only where every earlier draft of its chain was accepted and is the token that follows in `ids`.
    """
    residual = model.trunk(w, cfg, ids, model.Mode(), Losses())
    choice = model.logits(w, cfg, residual).argmax(-1)
    alive, counts = torch.ones_like(ids, dtype=torch.bool), []
    for step, guess in enumerate(chain(w, cfg, residual, ids, n_steps), start=1):
        drafted, wanted = guess[:, :-step].argmax(-1), choice[:, step:]
        offered = alive[:, :-step]
        good = offered & (drafted == wanted)
        counts.append((int(good.sum()), int(offered.sum())))
        follows = F.pad(ids[:, step + 1 :], (0, 1), value=-1) == drafted
        alive = F.pad(good & follows, (0, step))
    return counts
