"""The `qwen4exp` decoder in PyTorch, written for training on few CPU cores.

Owns the forward pass of the whole family (hyper-connections, gated delta net, gated attention with its block indexer,
mixture of experts, n-gram embedding, draft layer) and the initial weights. Knows nothing of text or optimisers.
Invariant: weights are one flat dict keyed by GGUF tensor name and hold what a GGUF holds, but for `ssm_a`, kept as
`A_log` so that it stays a free parameter. A weight's dtype decides the dtype of its product. Next: train_draft.py.

Shapes: B sequences, T tokens, N hidden width, C residual streams, H heads, D head width, S state width, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
GDN_CHUNK = 64  # tokens solved at once by the delta rule: cost grows with it, the number of sequential steps falls
INDEX_ROWS = 64  # queries a sequence and layer on which the indexer is compared with dense attention in training


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, under the names of the GGUF keys where those are short."""

    n_vocab: int
    n_ctx: int = 8192
    n_embd: int = 128
    n_trunk: int = 6
    n_draft: int = 1
    interval: int = 3
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_rot: int = 16
    rope_sections: tuple[int, ...] = (3, 3, 2, 0)
    rope_base: float = 1e7
    eps: float = 1e-6
    idx_heads: int = 4
    idx_dim: int = 32
    idx_block: int = 4
    top_k: int = 128
    gdn_k_heads: int = 2
    gdn_v_heads: int = 4
    gdn_state: int = 32
    gdn_conv: int = 4
    hc: int = 4
    hc_rank: int = 32
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff: int = 64
    n_ff_shared: int = 128
    ple_layer: int = 1
    ple_ngram: int = 3
    ple_heads: int = 2
    ple_row: int = 32
    ple_conv: int = 4
    ple_eos: int = 0
    ple_multipliers: tuple[int, ...] = ()
    ple_sizes: tuple[int, ...] = ()
    ple_offsets: tuple[int, ...] = field(default=(), repr=False)

    def is_attention(self, layer: int) -> bool:
        return layer >= self.n_trunk or (layer + 1) % self.interval == 0

    @property
    def conv_channels(self) -> int:
        return (2 * self.gdn_k_heads + self.gdn_v_heads) * self.gdn_state

    @property
    def value_dim(self) -> int:
        return self.gdn_v_heads * self.gdn_state


class Mode(NamedTuple):
    """How a pass runs: `sparse` selects blocks as a decoder does, `teach_index` adds the indexer's loss."""

    sparse: bool = True
    teach_index: bool = False


class Losses:
    """Side losses and measures that layers of one pass add to."""

    def __init__(self) -> None:
        self.balance: list[Tensor] = []
        self.index: list[Tensor] = []

    @staticmethod
    def mean(values: list[Tensor]) -> Tensor:
        return torch.stack(values).mean() if values else torch.zeros(())


# --- initial weights -------------------------------------------------------------------------------------------------


def init_weights(cfg: Config, seed: int) -> Weights:
    """Fresh weights for every tensor of the file; residual writers start at zero, so each layer starts as a no-op."""
    torch.manual_seed(seed)
    n, wide = cfg.n_embd, cfg.hc * cfg.n_embd
    w = {"token_embd.weight": torch.randn(cfg.n_vocab, n) * 0.5, "output.weight": torch.randn(cfg.n_vocab, n) * 0.02}
    w["per_layer_token_embd.weight"] = torch.randn(ple_rows(cfg), cfg.ple_row) * 0.02
    _init_read(w, cfg, "output_hc_", inject=False)
    for layer in range(cfg.n_trunk + cfg.n_draft):
        _init_block(w, cfg, layer)
    if cfg.n_draft:
        pre = f"blk.{cfg.n_trunk}.nextn."
        w[pre + "eh_proj.weight"] = _linear(n, 2 * n)
        w[pre + "enorm.weight"], w[pre + "hnorm.weight"] = torch.ones(n), torch.ones(wide)
        _init_read(w, cfg, pre + "hc_head_", inject=False)
    return w


def ple_rows(cfg: Config) -> int:
    return -(-sum(cfg.ple_sizes) // 8) * 8


def _linear(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols) * cols**-0.5


def _init_read(w: Weights, cfg: Config, pre: str, inject: bool = True) -> None:
    wide = cfg.hc * cfg.n_embd
    w[pre + "norm.weight"] = torch.ones(wide)
    w[pre + "down.weight"], w[pre + "up.weight"] = _linear(cfg.hc_rank, wide), _linear(wide, cfg.hc_rank)
    if inject:
        w[pre + "inject.weight"] = _linear(cfg.hc, wide)


def _init_block(w: Weights, cfg: Config, layer: int) -> None:
    pre, n = f"blk.{layer}.", cfg.n_embd
    _init_read(w, cfg, pre + "hc_attn_")
    _init_read(w, cfg, pre + "hc_ffn_")
    (_init_attention if cfg.is_attention(layer) else _init_gdn)(w, cfg, pre)
    if layer == cfg.ple_layer:
        wide = cfg.hc * n
        w[pre + "ple_key.weight"], w[pre + "ple_value.weight"] = _linear(wide, n), _linear(n, n)
        for name in ("key", "query", "conv"):
            w[pre + f"ple_norm_{name}.weight"] = torch.ones(wide)
        w[pre + "ple_conv1d.weight"] = torch.zeros(wide, cfg.ple_conv)
    w[pre + "ffn_gate_inp.weight"] = torch.randn(cfg.n_expert, n) * 0.02
    for name in ("gate", "up"):
        w[pre + f"ffn_{name}_exps.weight"] = torch.randn(cfg.n_expert, cfg.n_ff, n) * n**-0.5
        w[pre + f"ffn_{name}_shexp.weight"] = _linear(cfg.n_ff_shared, n)
    w[pre + "ffn_down_exps.weight"] = torch.zeros(cfg.n_expert, n, cfg.n_ff)
    w[pre + "ffn_down_shexp.weight"] = torch.zeros(n, cfg.n_ff_shared)
    w[pre + "ffn_gate_inp_shexp.weight"] = torch.zeros(n)


def _init_attention(w: Weights, cfg: Config, pre: str) -> None:
    n, d = cfg.n_embd, cfg.head_dim
    w[pre + "attn_q.weight"] = _linear(2 * cfg.n_head * d, n)
    w[pre + "attn_k.weight"], w[pre + "attn_v.weight"] = _linear(cfg.n_head_kv * d, n), _linear(cfg.n_head_kv * d, n)
    w[pre + "attn_output.weight"] = torch.zeros(n, cfg.n_head * d)
    w[pre + "attn_q_norm.weight"], w[pre + "attn_k_norm.weight"] = torch.ones(d), torch.ones(d)
    w[pre + "indexer.q_proj.weight"] = _linear(cfg.idx_heads * cfg.idx_dim, n)
    w[pre + "indexer.k_proj.weight"] = _linear(cfg.idx_dim, n)
    w[pre + "indexer.q_norm.weight"] = torch.full((cfg.idx_dim,), 0.5)
    w[pre + "indexer.k_norm.weight"] = torch.full((cfg.idx_dim,), 0.5)


def _init_gdn(w: Weights, cfg: Config, pre: str) -> None:
    n, heads = cfg.n_embd, cfg.gdn_v_heads
    w[pre + "attn_qkv.weight"], w[pre + "attn_gate.weight"] = _linear(cfg.conv_channels, n), _linear(cfg.value_dim, n)
    taps = torch.randn(cfg.conv_channels, cfg.gdn_conv) * 0.2
    taps[:, -1] += 1.0  # starts near the identity
    w[pre + "ssm_conv1d.weight"] = taps
    step = torch.exp(torch.linspace(math.log(0.002), math.log(0.1), heads))
    w[pre + "ssm_dt.bias"] = step + torch.log(-torch.expm1(-step))  # inverse of softplus
    w[pre + "ssm_a"] = torch.log(torch.linspace(1.0, 8.0, heads))
    w[pre + "ssm_alpha.weight"], w[pre + "ssm_beta.weight"] = 0.1 * _linear(heads, n), _linear(heads, n)
    w[pre + "ssm_norm.weight"] = torch.ones(cfg.gdn_state)
    w[pre + "ssm_out.weight"] = torch.zeros(n, cfg.value_dim)


# --- residual streams ------------------------------------------------------------------------------------------------


def part(w: Weights, prefix: str) -> Weights:
    """The weights below `prefix`, under the rest of their names."""
    return {name[len(prefix) :]: t for name, t in w.items() if name.startswith(prefix)}


def only(w: Weights, *prefixes: str) -> Weights:
    """The weights whose names start so: compiled code is specialised on the names it is given."""
    return {name: t for name, t in w.items() if name.startswith(prefixes)}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight).float()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def stream_rms(residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises each stream of (..., C, N) by itself; `weight` is (C·N)."""
    return rms(residual, weight.view(residual.shape[-2:]), eps)


def _read(p: Weights, cfg: Config, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mixes (..., C, N) to (..., N), and gives the C write strengths where the reader has them."""
    x = stream_rms(residual, p["norm.weight"], cfg.eps)
    flat = x.flatten(-2).to(p["down.weight"].dtype)
    gate = torch.sigmoid(linear(F.silu(linear(flat, p["down.weight"]) / cfg.hc), p["up.weight"])).view(x.shape)
    mixed = (gate * x).mean(-2)
    if "inject.weight" not in p:
        return mixed, None
    return mixed, 2 * torch.sigmoid(linear(flat, p["inject.weight"]) / cfg.hc)


def _write(residual: Tensor, strength: Tensor, y: Tensor) -> Tensor:
    return residual + strength.unsqueeze(-1) * y.unsqueeze(-2)


# --- gated delta net -------------------------------------------------------------------------------------------------


def causal_taps(x: Tensor, taps: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise causal convolution of (B, T, channels); the last tap is the current token."""
    n_taps, length = taps.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, (n_taps - 1) * dilation, 0))
    return sum(padded[:, i * dilation : i * dilation + length] * taps[:, i] for i in range(n_taps))


def _gdn_inputs(p: Weights, cfg: Config, x: Tensor):
    """q, k, v as (B, H, T, S) and log decay, beta as (B, H, T); value head v reads key head v % key heads."""
    batch, length, _ = x.shape
    mixed = F.silu(causal_taps(linear(x, p["attn_qkv.weight"]), p["ssm_conv1d.weight"]))
    key_dim = cfg.gdn_k_heads * cfg.gdn_state
    q, k, v = mixed.split([key_dim, key_dim, cfg.value_dim], dim=-1)
    q, k, v = (t.reshape(batch, length, -1, cfg.gdn_state).transpose(1, 2) for t in (q, k, v))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    share = (1, cfg.gdn_v_heads // cfg.gdn_k_heads, 1, 1)
    step = F.softplus(F.linear(x, p["ssm_alpha.weight"]) + p["ssm_dt.bias"])
    log_decay = (-torch.exp(p["ssm_a"]) * step).transpose(1, 2)
    beta = torch.sigmoid(F.linear(x, p["ssm_beta.weight"])).transpose(1, 2)
    return (q * cfg.gdn_state**-0.5).repeat(share), k.repeat(share), v.contiguous(), log_decay, beta


def _chunk_terms(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor):
    """Everything of the delta rule that does not need the state, for chunks (B·H·chunks, GDN_CHUNK, S).

    The updates of a chunk depend on each other through a unit lower triangular system; it is solved once for the values
    and for what the chunk's start state contributes (Gated Delta Networks, arXiv 2412.06464, section 3).
    """
    total = log_decay.cumsum(-1)
    upper = torch.ones(GDN_CHUNK, GDN_CHUNK, dtype=torch.bool).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(upper, -torch.inf).exp()
    scaled_k = k * beta.unsqueeze(-1)
    system = (scaled_k @ k.transpose(-1, -2)) * decay
    within = (q @ k.transpose(-1, -2)) * decay
    right = torch.cat([v * beta.unsqueeze(-1), scaled_k * total.exp().unsqueeze(-1)], dim=-1)
    q_in = q * total.exp().unsqueeze(-1)
    k_out = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    return system, right, within, q_in, k_out, total[..., -1].exp()[..., None, None]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Decay, delta update, read, for every token in order; all (B, H, T, S), result too."""
    batch, heads, length, width = v.shape
    pad = -length % GDN_CHUNK
    q, k, v = (F.pad(t, (0, 0, 0, pad)).view(batch, heads, -1, GDN_CHUNK, width) for t in (q, k, v))
    log_decay, beta = (F.pad(t, (0, pad)).view(batch, heads, -1, GDN_CHUNK) for t in (log_decay, beta))
    flat = fast.chunk_terms(*(t.flatten(0, 2) for t in (q, k, v, log_decay, beta)))
    system, right, within, q_in, k_out, chunk_decay = (t.unflatten(0, (batch, heads, -1)) for t in flat)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    state, outs = torch.zeros(batch, heads, width, width), []
    values, from_state = (t.unbind(2) for t in solved.split(width, dim=-1))
    parts = zip(values, from_state, *(t.unbind(2) for t in (within, q_in, k_out, chunk_decay)), strict=True)
    for value, seen, inner, query, key, decayed in parts:
        new = value - seen @ state
        outs.append(query @ state + inner @ new)
        state = state * decayed + key.transpose(-1, -2) @ new
    return torch.stack(outs, 2).view(batch, heads, -1, width)[:, :, :length]


def _gdn_output(p: Weights, cfg: Config, x: Tensor, out: Tensor) -> Tensor:
    gate = torch.sigmoid(linear(x, p["attn_gate.weight"]))
    y = rms(out.transpose(1, 2), p["ssm_norm.weight"], cfg.eps).flatten(-2)
    return linear(y * gate, p["ssm_out.weight"])


def gdn(p: Weights, cfg: Config, x: Tensor) -> Tensor:
    return fast.gdn_output(p, cfg, x, delta_rule(*fast.gdn_inputs(p, cfg, x)))


# --- attention and its indexer ---------------------------------------------------------------------------------------


def rope_table(cfg: Config, length: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(length, dtype=torch.float64)[:, None] * cfg.rope_base ** (
        -torch.arange(0, cfg.n_rot, 2, dtype=torch.float64) / cfg.n_rot
    )
    return torch.cos(angle).float(), torch.sin(angle).float()


def rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pairs (i, i + n_rot/2) of the first n_rot dims of (..., T, D)."""
    cos, sin = table
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _qkv(p: Weights, cfg: Config, x: Tensor, table: tuple[Tensor, Tensor]):
    """Query (B, H, T, D), key, value (B, K, T, D) and the output gate (B, T, H·D)."""
    batch, length, _ = x.shape
    q, gate = linear(x, p["attn_q.weight"]).view(batch, length, cfg.n_head, -1).chunk(2, dim=-1)
    k = linear(x, p["attn_k.weight"]).view(batch, length, cfg.n_head_kv, -1)
    v = linear(x, p["attn_v.weight"]).view(batch, length, cfg.n_head_kv, -1)
    q = rope(rms(q, p["attn_q_norm.weight"], cfg.eps).transpose(1, 2), table)
    k = rope(rms(k, p["attn_k_norm.weight"], cfg.eps).transpose(1, 2), table)
    return q, k, v.transpose(1, 2), torch.sigmoid(gate.flatten(-2))


def index_scores(p: Weights, cfg: Config, x: Tensor, table: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
    """Scores (B, rows, blocks) of the blocks complete at each of `rows`; blocks not complete yet are -inf."""
    batch, block = x.shape[0], cfg.idx_block
    n_blocks = x.shape[1] // block
    raw = linear(x[:, : n_blocks * block], p["indexer.k_proj.weight"])
    pooled = rms(raw.view(batch, n_blocks, block, -1).mean(2), p["indexer.k_norm.weight"], cfg.eps)
    pooled = rope(pooled, tuple(t[: n_blocks * block : block] for t in table))
    q = linear(x[:, rows], p["indexer.q_proj.weight"]).view(batch, len(rows), cfg.idx_heads, -1).transpose(1, 2)
    q = rope(rms(q, p["indexer.q_norm.weight"], cfg.eps), tuple(t[rows] for t in table))
    dtype = p["indexer.q_proj.weight"].dtype
    dots = q.to(dtype) @ pooled[:, None].transpose(-1, -2).to(dtype)
    score = torch.relu(dots.float()).sum(1) / math.sqrt(cfg.idx_dim)
    open_blocks = torch.arange(n_blocks) * block + block - 1 > rows[:, None]
    return score.masked_fill(open_blocks, -torch.inf)


def selected_cells(cfg: Config, scores: Tensor, rows: Tensor, length: int) -> Tensor:
    """Mask (B, rows, T) of the cells a query attends to: its best complete blocks and the open tail block."""
    block, n_blocks = cfg.idx_block, scores.shape[-1]
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep.scatter_(-1, scores.topk(min(cfg.top_k // block, n_blocks), dim=-1).indices, True)
    keep &= scores > -torch.inf
    cells = F.pad(keep.repeat_interleave(block, dim=-1), (0, length - n_blocks * block))
    position = torch.arange(length)
    tail = (position <= rows[:, None]) & (position >= ((rows + 1) // block * block)[:, None])
    return cells | tail


def block_mass(cfg: Config, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Dense attention of `rows`, mean over heads, summed over each whole block: (B, rows, blocks)."""
    share = q.shape[1] // k.shape[1]
    dots = q[:, :, rows] @ k.repeat_interleave(share, dim=1).transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.arange(k.shape[2]) > rows[:, None]
    mass = dots.masked_fill(future, -torch.inf).softmax(-1).mean(1)
    n_blocks = k.shape[2] // cfg.idx_block
    return mass[..., : n_blocks * cfg.idx_block].unflatten(-1, (n_blocks, -1)).sum(-1)


def _index_loss(cfg: Config, scores: Tensor, mass: Tensor) -> Tensor:
    """KL of the indexer's softmax over complete blocks from the dense attention mass on them."""
    known = scores > -torch.inf
    target = mass * known
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_guess = scores.log_softmax(-1).masked_fill(~known, 0.0)
    return (target * (target.clamp_min(1e-9).log() - log_guess)).sum(-1).mean()


def _teach_index(p: Weights, cfg: Config, x: Tensor, q: Tensor, k: Tensor, table) -> Tensor:
    """Indexer loss on random queries; only the indexer's own weights get a gradient."""
    rows = torch.randperm(x.shape[1] - cfg.idx_block)[:INDEX_ROWS] + cfg.idx_block
    with torch.no_grad():
        mass = block_mass(cfg, q, k, rows)
    return _index_loss(cfg, index_scores(p, cfg, x.detach(), table, rows), mass)


def attend(cfg: Config, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    share = cfg.n_head // cfg.n_head_kv
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(-2).float()


def attention(p: Weights, cfg: Config, x: Tensor, mode: Mode, losses: Losses | None) -> Tensor:
    """Gated attention; blocks are selected, and the indexer taught, where there are `losses` to add to."""
    length, indexed = x.shape[1], losses is not None
    table = rope_table(cfg, length)
    q, k, v, gate = fast.qkv(only(p, "attn_"), cfg, x, table)
    half = (t.to(p["attn_q.weight"].dtype) for t in (q, k, v))
    mask = None
    if indexed and mode.teach_index:
        losses.index.append(_teach_index(p, cfg, x, q.detach(), k.detach(), table))
    if indexed and mode.sparse and length > cfg.top_k:
        with torch.no_grad():
            rows = torch.arange(length)
            mask = selected_cells(cfg, index_scores(p, cfg, x, table, rows), rows, length)[:, None]
    return linear(attend(cfg, *half, mask) * gate, p["attn_output.weight"])


# --- experts ---------------------------------------------------------------------------------------------------------


def _experts(p: Weights, cfg: Config, x: Tensor) -> tuple[Tensor, Tensor]:
    """Routed and shared experts for (..., N), and the load-balance loss (Switch: E · Σ share · probability).

    Every expert is computed and weighted by zero where it was not chosen: at these widths three large products are
    cheaper than sorting tokens by expert.
    """
    probs = F.linear(x, p["gate_inp.weight"]).softmax(-1)
    top = probs.topk(cfg.n_expert_used, dim=-1)
    weight = torch.zeros_like(probs).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    share = torch.zeros_like(probs).scatter(-1, top.indices, 1.0).flatten(0, -2).mean(0) / cfg.n_expert_used
    balance = cfg.n_expert * (share * probs.flatten(0, -2).mean(0)).sum()
    gate, up = (p[f"{name}_exps.weight"].flatten(0, 1) for name in ("gate", "up"))
    hidden = (F.silu(linear(x, gate)) * linear(x, up)).unflatten(-1, (cfg.n_expert, cfg.n_ff)) * weight.unsqueeze(-1)
    routed = linear(hidden.flatten(-2), p["down_exps.weight"].transpose(0, 1).flatten(1))
    shared = F.silu(linear(x, p["gate_shexp.weight"])) * linear(x, p["up_shexp.weight"])
    gated = torch.sigmoid((x * p["gate_inp_shexp.weight"]).sum(-1, keepdim=True))
    return routed + gated * linear(shared, p["down_shexp.weight"]), balance


# --- n-gram embedding ------------------------------------------------------------------------------------------------


def ngram_rows(cfg: Config, ids: Tensor) -> Tensor:
    """Table rows (B, T, heads) of the n-grams that end at each token; an end of text hides itself and all before it."""
    context, hidden = [ids], torch.zeros_like(ids, dtype=torch.bool)
    for back in range(1, cfg.ple_ngram):
        older = F.pad(ids, (back, 0), value=cfg.ple_eos)[:, : ids.shape[1]]
        hidden = hidden | (older == cfg.ple_eos)
        context.append(torch.where(hidden, cfg.ple_eos, older))
    rows, mixed = [], context[0] * cfg.ple_multipliers[0]
    for order in range(1, cfg.ple_ngram):
        mixed = mixed ^ (context[order] * cfg.ple_multipliers[order])
        for head in range((order - 1) * cfg.ple_heads, order * cfg.ple_heads):
            rows.append(mixed % cfg.ple_sizes[head] + cfg.ple_offsets[head])
    return torch.stack(rows, dim=-1)


def _ple_mix(p: Weights, cfg: Config, residual: Tensor, e: Tensor) -> Tensor:
    key = stream_rms(linear(e, p["key.weight"]).view(residual.shape), p["norm_key.weight"], cfg.eps)
    query = stream_rms(residual, p["norm_query.weight"], cfg.eps)
    score = (key * query).sum(-1, keepdim=True) / math.sqrt(cfg.n_embd)
    gate = torch.sigmoid(score.sign() * score.abs().clamp_min(1e-6).sqrt())
    value = gate * linear(e, p["value.weight"]).unsqueeze(-2)
    normed = stream_rms(value, p["norm_conv.weight"], cfg.eps).flatten(-2)
    smooth = F.silu(causal_taps(normed, p["conv1d.weight"], dilation=cfg.ple_ngram))
    return residual + value + smooth.view(residual.shape)


# --- blocks and passes -----------------------------------------------------------------------------------------------


def block(w: Weights, cfg: Config, layer: int, residual: Tensor, mode: Mode, losses: Losses) -> Tensor:
    """One layer on (B, T, C, N); what works token by token sees B·T rows, one shape for every length."""
    p, batch = part(w, f"blk.{layer}."), residual.shape[:2]
    rows = residual.flatten(0, 1)
    x, strength = fast.read(part(p, "hc_attn_"), cfg, rows)
    x = x.unflatten(0, batch)
    if cfg.is_attention(layer):
        pass_losses = losses if layer < cfg.n_trunk else None  # the draft layer attends densely
        y = attention(p, cfg, x, mode, pass_losses)
    else:
        y = gdn(only(p, "attn_", "ssm_"), cfg, x)
    rows = fast.write(rows, strength, y.flatten(0, 1))
    x, strength = fast.read(part(p, "hc_ffn_"), cfg, rows)
    y, balance = fast.experts(part(p, "ffn_"), cfg, x)
    losses.balance.append(balance)
    return fast.write(rows, strength, y).unflatten(0, batch)


def trunk(w: Weights, cfg: Config, ids: Tensor, mode: Mode, losses: Losses) -> Tensor:
    """Residual (B, T, C, N) after the last trunk layer for token ids (B, T)."""
    residual = F.embedding(ids, w["token_embd.weight"]).unsqueeze(2).expand(-1, -1, cfg.hc, -1)
    for layer in range(cfg.n_trunk):
        if layer == cfg.ple_layer:
            e = F.embedding(ngram_rows(cfg, ids), w["per_layer_token_embd.weight"]).flatten(-2)
            residual = fast.ple_mix(part(w, f"blk.{layer}.ple_"), cfg, residual, e)
        residual = block(w, cfg, layer, residual, mode, losses)
    return residual


def draft(w: Weights, cfg: Config, residual: Tensor, next_ids: Tensor, mode: Mode, losses: Losses) -> Tensor:
    """Residual of the draft layer: cell i joins residual i with the token after it and predicts the next one."""
    p = part(w, f"blk.{cfg.n_trunk}.nextn.")
    from_embed, from_hidden = p["eh_proj.weight"].split(cfg.n_embd, dim=1)
    embed = rms(F.embedding(next_ids, w["token_embd.weight"]), p["enorm.weight"], cfg.eps)
    hidden = rms(residual.flatten(-2), p["hnorm.weight"], cfg.eps).view(residual.shape)
    joined = linear(hidden, from_hidden) + linear(embed, from_embed).unsqueeze(2)
    return block(w, cfg, cfg.n_trunk, joined, mode, losses)


def logits(w: Weights, cfg: Config, residual: Tensor) -> Tensor:
    return _head(w, cfg, "output_hc_", residual)


def draft_logits(w: Weights, cfg: Config, residual: Tensor) -> Tensor:
    return _head(w, cfg, f"blk.{cfg.n_trunk}.nextn.hc_head_", residual)


def _head(w: Weights, cfg: Config, mixer: str, residual: Tensor) -> Tensor:
    mixed, _ = fast.read(part(w, mixer), cfg, residual.flatten(0, 1))
    return linear(mixed, w["output.weight"]).unflatten(0, residual.shape[:2])


class _Fast:
    """The memory-bound functions; `compile_all` swaps them for fused ones."""

    def __init__(self) -> None:
        self.read, self.write, self.experts, self.ple_mix = _read, _write, _experts, _ple_mix
        self.gdn_inputs, self.gdn_output, self.chunk_terms, self.qkv = _gdn_inputs, _gdn_output, _chunk_terms, _qkv

    def compile_all(self) -> None:
        torch._dynamo.config.recompile_limit = 64  # one version for each sequence length and kind of layer
        for name, function in vars(self).items():
            setattr(self, name, torch.compile(function, dynamic=False))


fast = _Fast()
