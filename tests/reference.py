"""The whole model family in float64 NumPy: the oracle that kernels, model and engine are held to.

Owns: the plain mathematics of every architecture, token by token where a state is carried, from a GGUF file to logits.
Refuses to know: speed, caches, batches, sessions; every call starts at position 0 with empty state. Invariant: nothing
here is shared with the engine, so an error would have to be made twice to go unseen. Read next: test_reference.py,
where this file is held to logits that transformers computed from the same weights.

Shapes: T tokens, C residual streams (1 without hyper-connections), N embedding width, H query heads, K kv heads, D head
width, V vocabulary.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

GATED_ATTENTION = {"qwen3next", "qwen35", "qwen35moe", "qwen4exp"}
ARCHITECTURES = {"llama", "qwen2", "qwen3", "qwen3moe", *GATED_ATTENTION}
KV_FORMATS = {"fp16": ("fp16", "fp16"), "int8": ("int8", "int8"), "q4_0": ("q4_0", "q4_0"), "k8v4": ("int8", "q4_0")}
DRAFT_KV_FORMATS = KV_FORMATS | {"k8v4": ("int8", "int8")}
PLE_DILATION = 3
L2_EPS = 1e-6


class ReferenceModelError(Exception):
    """The file, the ids or the options are outside what this reference computes."""


@dataclass
class Run:
    """What one pass over T tokens computes and leaves behind; every dictionary is keyed by layer.

    `gdn` and `conv` are states after the last token: (value heads, S_key, S_value), and the last (kernel - 1, channels)
    inputs of the convolution, zeros before token 0. `keys` and `values` (T, K, D) are what attention reads: rotated,
    and rounded where the model has a `kv` format. Of the indexer there are `raw_keys` (T, idx_dim), neither normed nor
    rotated, `pooled` (T // block, idx_dim), and per token the `scores` of the complete blocks and the ascending ids of
    those `selected`; the open tail block is always seen and not listed. `router` (T, experts) holds probabilities and
    `experts` (T, used) those taken, best first. `ple_rows` (T, heads) are rows of the n-gram table, `ple_history` the
    last (dilation · (kernel - 1), C · N) normalised rows of its convolution, zeros before token 0.
    """

    residual: np.ndarray  # (T, C, N), in the end as it enters the final mixer or norm
    logits: np.ndarray | None = None  # (T, V)
    gdn: dict = field(default_factory=dict)
    conv: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)
    raw_keys: dict = field(default_factory=dict)
    pooled: dict = field(default_factory=dict)
    scores: dict = field(default_factory=dict)
    selected: dict = field(default_factory=dict)
    router: dict = field(default_factory=dict)
    experts: dict = field(default_factory=dict)
    ple_rows: np.ndarray | None = None
    ple_history: np.ndarray | None = None


class ReferenceModel:
    """One GGUF file, dequantised where it is used; `kv` rounds K and V as a cache of that format stores them."""

    def __init__(self, path: str | Path, kv: str | None = None):
        reader = GGUFReader(path)
        self.meta = {name: entry.contents() for name, entry in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.arch = self.meta["general.architecture"]
        if self.arch not in ARCHITECTURES:
            raise ReferenceModelError(f"architecture {self.arch!r} is none of {', '.join(sorted(ARCHITECTURES))}")
        if kv is not None and kv not in KV_FORMATS:
            raise ReferenceModelError(f"kv {kv!r} is none of {', '.join(KV_FORMATS)}")
        self.kv = kv
        self._read_sizes()

    def logits(self, ids) -> np.ndarray:
        """Logits (T, V) after each of the tokens."""
        return self.run(ids).logits

    def run(self, ids) -> Run:
        """One pass over `ids` from an empty state."""
        ids = self._checked(ids)
        run = Run(np.repeat(self.weight("token_embd.weight", ids)[:, None, :], self.streams, axis=1))
        for layer in range(self.n_layers):
            if layer in self.ple_layers:
                run.residual = run.residual + self._ple(run, layer, ids)
            mixer = self._attention if self.is_attention[layer] else self._gated_delta_net
            self._block(run, layer, mixer)
        run.logits = self._head(run.residual, "output_hc_")
        return run

    def draft(self, residual, next_ids, window: int | None = None) -> Run:
        """One pass of the draft layer over cells 0..T-1, a Run whose only layer is the one after the trunk.

        Cell i pairs row i of `residual` (T, C, N), the trunk's, with the token after it and predicts the one after
        that. A chain of drafts appends the residual of the last cell and the drafted token, and calls again. `window`
        keeps only the last so many cells in sight.
        """
        if not self.n_draft or self.arch != "qwen4exp":
            raise ReferenceModelError("the file has no draft layer of the qwen4exp kind")
        block = f"blk.{self.n_layers}.nextn."
        residual = np.asarray(residual, np.float64)
        embedded = self.weight("token_embd.weight", self._checked(next_ids))
        token = rms(embedded, self.weight(block + "enorm.weight"), self.eps)
        # One norm over all streams together, as the model's trainers have it; other engines norm each stream.
        hidden = rms(residual.reshape(len(residual), -1), self.weight(block + "hnorm.weight"), self.eps)
        on_token, on_hidden = np.split(self.weight(block + "eh_proj.weight"), 2, axis=1)
        run = Run(hidden.reshape(residual.shape) @ on_hidden.T + (token @ on_token.T)[:, None, :])
        self._block(run, self.n_layers, lambda *args: self._dense_attention(*args, window))
        run.logits = self._head(run.residual, block + "hc_head_")
        return run

    def _checked(self, ids) -> list[int]:
        ids = [int(i) for i in ids]
        if not ids or min(ids) < 0 or max(ids) >= self.n_vocab:
            raise ReferenceModelError(f"expected one token id or more, each from 0 to {self.n_vocab - 1}")
        return ids

    def _block(self, run: Run, layer: int, mixer):
        """One layer: mixer, then feed-forward, each added to the residual."""
        for part, compute in (("attn", mixer), ("ffn", self._feed_forward)):
            x, inject = self._read(run.residual, f"blk.{layer}.", part)
            run.residual = run.residual + inject[:, :, None] * compute(run, layer, x)[:, None, :]

    # ---- the file

    def weight(self, name: str, rows=None) -> np.ndarray:
        """A tensor in float64, or only the rows (first axis) asked for."""
        if name not in self.tensors:
            raise ReferenceModelError(f"tensor {name} is missing")
        tensor = self.tensors[name]
        data = tensor.data if rows is None else tensor.data[rows]
        return dequantize(data, tensor.tensor_type).astype(np.float64)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """x · Wᵀ, plus the bias where the file has one."""
        y = x @ self.weight(name + ".weight").T
        return y + self.weight(name + ".bias") if name + ".bias" in self.tensors else y

    def key(self, name: str, default=None):
        """A metadata value below the architecture's prefix."""
        value = self.meta.get(f"{self.arch}.{name}", default)
        if value is None:
            raise ReferenceModelError(f"metadata key {self.arch}.{name} is missing")
        return value

    def _read_sizes(self):
        self.n_vocab = len(self.tensors["token_embd.weight"].data)
        self.n_embd = self.key("embedding_length")
        self.n_draft = self.key("nextn_predict_layers", 0)
        self.n_layers = self.key("block_count") - self.n_draft
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.n_head = self.key("attention.head_count")
        kv_heads = self.key("attention.head_count_kv", self.n_head)
        self.n_head_kv = max(kv_heads) if isinstance(kv_heads, list) else kv_heads
        self.head_dim = self.key("attention.key_length", self.n_embd // self.n_head)
        self.n_rot = self.key("rope.dimension_count", self.head_dim)
        self.rope_base = self.key("rope.freq_base", 10000.0)
        if self.key("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in self.tensors:
            raise ReferenceModelError("scaled rotary positions are not computed here")
        self.streams = self.key("hyper_connection.count", 1)
        self.ple_layers = self.key("ple.layers", [])
        self.block_sizes = self.key("attention.compress_ratios", [0] * (self.n_layers + self.n_draft))
        self.is_attention = self._layer_kinds()

    def _layer_kinds(self) -> list[bool]:
        recurrent = self.key("attention.recurrent_layers", [])
        if recurrent:
            return [not flag for flag in recurrent]
        if self.arch not in GATED_ATTENTION:
            return [True] * self.n_layers
        interval = self.key("full_attention_interval", 4)
        return [(layer + 1) % interval == 0 for layer in range(self.n_layers)]

    # ---- the residual

    def _read(self, residual, block: str, part: str):
        """Input (T, N) of a mixer or feed-forward and the weight (T, C) of its output on each stream."""
        if self.streams > 1:
            return self._mix(residual, f"{block}hc_{part}_")
        name = "attn_norm" if part == "attn" else "ffn_norm"
        if part == "ffn" and block + "post_attention_norm.weight" in self.tensors:
            name = "post_attention_norm"
        x = rms(residual[:, 0], self.weight(f"{block}{name}.weight"), self.eps)
        return x, np.ones((len(residual), 1))

    def _mix(self, residual, prefix: str):
        """Gated hyper-connection read: streams to one vector, and the injection weights where the file has them."""
        streams = self.streams
        norm = self.weight(prefix + "norm.weight").reshape(streams, self.n_embd)
        normed = rms(residual, norm, self.eps)
        flat = normed.reshape(len(residual), -1)
        low = silu(self.linear(flat, prefix + "down") / streams)
        gate = sigmoid(self.linear(low, prefix + "up")).reshape(normed.shape)
        mixed = (gate * normed).mean(axis=1)
        if prefix + "inject.weight" not in self.tensors:
            return mixed, None
        return mixed, 2 * sigmoid(self.linear(flat, prefix + "inject") / streams)

    def _head(self, residual, prefix: str) -> np.ndarray:
        if self.streams > 1:
            x, _ = self._mix(residual, prefix)
        else:
            x = rms(residual[:, 0], self.weight("output_norm.weight"), self.eps)
        return self.linear(x, "output" if "output.weight" in self.tensors else "token_embd")

    # ---- attention

    def _queries_keys_values(self, run: Run, layer: int, x, formats):
        """Rotated queries (T, H, D), keys and values (T, K, D) as stored, and the output gate (T, H, D) or None."""
        block, n_tokens, gate = f"blk.{layer}.", len(x), None
        query = self.linear(x, block + "attn_q").reshape(n_tokens, self.n_head, -1)
        if self.arch in GATED_ATTENTION:
            query, gate = np.split(query, 2, axis=-1)
        key = self.linear(x, block + "attn_k").reshape(n_tokens, self.n_head_kv, -1)
        value = self.linear(x, block + "attn_v").reshape(n_tokens, self.n_head_kv, -1)
        if block + "attn_q_norm.weight" in self.tensors:
            query = rms(query, self.weight(block + "attn_q_norm.weight"), self.eps)
            key = rms(key, self.weight(block + "attn_k_norm.weight"), self.eps)
        positions = np.arange(n_tokens)[:, None]
        query, key = self._rope(query, positions), self._rope(key, positions)
        if formats:
            key, value = round_kv(key, formats[0]), round_kv(value, formats[1])
        run.keys[layer], run.values[layer] = key, value
        return query, key, value, gate

    def _rope(self, x, positions):
        """Rotate the first n_rot values: pairs (i, i + n_rot/2), or (2i, 2i + 1) in `llama` files."""
        half = self.n_rot // 2
        angle = positions[..., None] * self.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angle), np.sin(angle)
        if self.arch == "llama":
            first, second = slice(0, self.n_rot, 2), slice(1, self.n_rot, 2)
        else:
            first, second = slice(0, half), slice(half, self.n_rot)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def _attention(self, run: Run, layer: int, x):
        visible = np.tril(np.ones((len(x), len(x)), bool))
        if self.block_sizes[layer]:
            visible &= self._select(run, layer, x)
        formats = KV_FORMATS[self.kv] if self.kv else None
        return self._attend(layer, self._queries_keys_values(run, layer, x, formats), visible)

    def _dense_attention(self, run: Run, layer: int, x, window: int | None):
        distance = np.arange(len(x))[:, None] - np.arange(len(x))[None, :]
        visible = (distance >= 0) & (distance < (window or len(x)))
        formats = DRAFT_KV_FORMATS[self.kv] if self.kv else None
        return self._attend(layer, self._queries_keys_values(run, layer, x, formats), visible)

    def _attend(self, layer: int, states, visible):
        query, key, value, gate = states
        group = self.n_head // self.n_head_kv
        out = np.empty((len(query), self.n_head, value.shape[-1]))
        for head in range(self.n_head):
            scores = query[:, head] @ key[:, head // group].T / np.sqrt(self.head_dim)
            out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ value[:, head // group]
        if gate is not None:
            out = out * sigmoid(gate)
        return self.linear(out.reshape(len(out), -1), f"blk.{layer}.attn_output")

    def _select(self, run: Run, layer: int, x):
        """Cells (T, T) the indexer lets each token see: its best complete blocks and the open tail block."""
        block, size = f"blk.{layer}.", self.block_sizes[layer]
        n_tokens = len(x)
        n_heads = self.key("attention.indexer.head_count")
        raw = self.linear(x, block + "indexer.k_proj")
        means = raw[: n_tokens // size * size].reshape(-1, size, raw.shape[-1]).mean(axis=1)
        pooled = rms(means, self.weight(block + "indexer.k_norm.weight"), self.eps)
        pooled = self._rope(pooled, np.arange(len(pooled)) * size)
        query = self.linear(x, block + "indexer.q_proj").reshape(n_tokens, n_heads, -1)
        query = rms(query, self.weight(block + "indexer.q_norm.weight"), self.eps)
        query = self._rope(query, np.arange(n_tokens)[:, None])
        run.raw_keys[layer], run.pooled[layer] = raw, pooled
        run.scores[layer], run.selected[layer] = [], []
        visible = np.zeros((n_tokens, n_tokens), bool)
        for token in range(n_tokens):
            n_complete = (token + 1) // size
            scores = np.maximum(query[token] @ pooled[:n_complete].T, 0).sum(axis=0)
            chosen = top_blocks(scores, self.key("attention.indexer.top_k") // size)
            for index in chosen:
                visible[token, index * size : (index + 1) * size] = True
            visible[token, n_complete * size :] = True
            run.scores[layer].append(scores)
            run.selected[layer].append(chosen)
        return visible

    # ---- the recurrent layer

    def _gated_delta_net(self, run: Run, layer: int, x):
        block = f"blk.{layer}."
        n_tokens = len(x)
        width, k_heads = self.key("ssm.state_size"), self.key("ssm.group_count")
        v_heads = self.key("ssm.time_step_rank")
        mixed = self._short_conv(run, layer, self.linear(x, block + "attn_qkv"))
        query, key, value = np.split(silu(mixed), [k_heads * width, 2 * k_heads * width], axis=1)
        query = l2_normalise(query.reshape(n_tokens, k_heads, width)) / np.sqrt(width)
        key = l2_normalise(key.reshape(n_tokens, k_heads, width))
        value = value.reshape(n_tokens, v_heads, -1)
        key_head = np.arange(v_heads) % k_heads
        if self.arch == "qwen3next":
            key_head = np.arange(v_heads) // (v_heads // k_heads)
        query, key = query[:, key_head], key[:, key_head]
        beta, alpha = self._beta_alpha(block, x, k_heads, v_heads)
        decay = np.exp(self.weight(block + "ssm_a") * softplus(alpha + self.weight(block + "ssm_dt.bias")))
        out, run.gdn[layer] = delta_rule(query, key, value, sigmoid(beta), decay)
        out = rms(out, self.weight(block + "ssm_norm.weight"), self.eps).reshape(n_tokens, -1)
        gate = self.linear(x, block + "attn_gate")
        gate = sigmoid(gate) if self.arch == "qwen4exp" else silu(gate)
        return self.linear(out * gate, block + "ssm_out")

    def _short_conv(self, run: Run, layer: int, rows):
        kernel = self.weight(f"blk.{layer}.ssm_conv1d.weight")
        before = kernel.shape[1] - 1
        padded = np.concatenate([np.zeros((before, rows.shape[1])), rows])
        run.conv[layer] = padded[len(rows) :]
        return sum(padded[tap : tap + len(rows)] * kernel[:, tap] for tap in range(before + 1))

    def _beta_alpha(self, block: str, x, k_heads: int, v_heads: int):
        if block + "ssm_ba.weight" not in self.tensors:
            return self.linear(x, block + "ssm_beta"), self.linear(x, block + "ssm_alpha")
        packed = self.linear(x, block + "ssm_ba").reshape(len(x), k_heads, 2, v_heads // k_heads)
        return packed[:, :, 0].reshape(len(x), v_heads), packed[:, :, 1].reshape(len(x), v_heads)

    # ---- feed-forward

    def _feed_forward(self, run: Run, layer: int, x):
        block = f"blk.{layer}."
        if block + "ffn_gate_inp.weight" not in self.tensors:
            return self._swiglu(block, x, "")
        probability = softmax(self.linear(x, block + "ffn_gate_inp"))
        order = np.argsort(-probability, axis=1, kind="stable")[:, : self.key("expert_used_count")]
        share = np.take_along_axis(probability, order, axis=1)
        share /= share.sum(axis=1, keepdims=True)
        run.router[layer], run.experts[layer] = probability, order
        out = np.zeros_like(x)
        for expert in np.unique(order):
            token, rank = np.nonzero(order == expert)
            out[token] += share[token, rank, None] * self._expert(block, x[token], expert)
        if block + "ffn_gate_inp_shexp.weight" in self.tensors:
            gate = sigmoid(x @ self.weight(block + "ffn_gate_inp_shexp.weight").reshape(-1, 1))
            out += gate * self._swiglu(block, x, "_shexp")
        return out

    def _swiglu(self, block: str, x, suffix: str):
        gate, up = self.linear(x, f"{block}ffn_gate{suffix}"), self.linear(x, f"{block}ffn_up{suffix}")
        return self.linear(silu(gate) * up, f"{block}ffn_down{suffix}")

    def _expert(self, block: str, x, expert: int):
        if block + "ffn_gate_up_exps.weight" in self.tensors:
            gate, up = np.split(self.weight(block + "ffn_gate_up_exps.weight", expert), 2)
        else:
            gate, up = (self.weight(f"{block}ffn_{part}_exps.weight", expert) for part in ("gate", "up"))
        return (silu(x @ gate.T) * (x @ up.T)) @ self.weight(block + "ffn_down_exps.weight", expert).T

    # ---- per-layer n-gram embedding

    def _ple(self, run: Run, layer: int, ids):
        """What the n-gram table adds to the residual (T, C, N)."""
        block, n_tokens = f"blk.{layer}.", len(ids)
        per_stream = (self.streams, self.n_embd)
        run.ple_rows = self.ple_rows(ids)
        entry = self.weight("per_layer_token_embd.weight", run.ple_rows).reshape(n_tokens, -1)
        key = self.linear(entry, block + "ple_key").reshape(n_tokens, *per_stream)
        key = rms(key, self.weight(block + "ple_norm_key.weight").reshape(per_stream), self.eps)
        query = rms(run.residual, self.weight(block + "ple_norm_query.weight").reshape(per_stream), self.eps)
        score = (key * query).sum(axis=-1) / np.sqrt(self.n_embd)
        gate = sigmoid(np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6)))
        value = gate[:, :, None] * self.linear(entry, block + "ple_value")[:, None, :]
        normed = rms(value, self.weight(block + "ple_norm_conv.weight").reshape(per_stream), self.eps)
        kernel = self.weight(block + "ple_conv1d.weight")
        before = PLE_DILATION * (kernel.shape[1] - 1)
        padded = np.concatenate([np.zeros((before, kernel.shape[0])), normed.reshape(n_tokens, -1)])
        run.ple_history = padded[n_tokens:]
        taps = ((tap, tap * PLE_DILATION) for tap in range(kernel.shape[1]))
        convolved = sum(padded[start : start + n_tokens] * kernel[:, tap] for tap, start in taps)
        return value + silu(convolved).reshape(value.shape)

    def ple_rows(self, ids) -> np.ndarray:
        """Rows (T, heads) of the n-gram table that each token reads, in Python's exact integers."""
        n_gram, per_order = self.key("ple.ngram_size"), self.key("ple.heads_per_ngram")
        multipliers, eos = self.key("ple.layer_multipliers"), self.key("ple.eos_token_id")
        vocab_sizes, offsets = self.key("ple.head_vocab_sizes"), self.key("ple.head_offsets")
        rows = []
        for position in range(len(ids)):
            context = ngram_context(ids, position, n_gram, eos)
            row = []
            for order in range(2, n_gram + 1):
                mixed = 0
                for token, multiplier in zip(context[:order], multipliers[:order], strict=True):
                    mixed ^= token * int(multiplier)
                for head in range((order - 2) * per_order, (order - 1) * per_order):
                    row.append(mixed % int(vocab_sizes[head]) + int(offsets[head]))
            rows.append(row)
        return np.array(rows, np.int64)


def ngram_context(ids, position: int, n_gram: int, eos: int) -> list[int]:
    """The token and its predecessors, newest first; from the first EOS or missing one on, all of them are EOS."""
    context = [int(ids[position])]
    for distance in range(1, n_gram):
        before = int(ids[position - distance]) if position >= distance else eos
        cut = before == eos or (distance > 1 and context[-1] == eos)
        context.append(eos if cut else before)
    return context


def top_blocks(scores: np.ndarray, budget: int) -> np.ndarray:
    """Ascending indices of the `budget` highest scores; equal scores go to the lowest index."""
    return np.sort(np.argsort(-scores, kind="stable")[:budget])


def delta_rule(query, key, value, beta, decay):
    """Gated delta rule, token after token: outputs (T, heads, S_value) and the last state (heads, S_key, S_value)."""
    n_tokens, n_heads, width = key.shape
    state = np.zeros((n_heads, width, value.shape[-1]))
    out = np.empty_like(value)
    for token in range(n_tokens):
        state = state * decay[token][:, None, None]
        recalled = np.einsum("hk,hkv->hv", key[token], state)
        correction = beta[token][:, None] * (value[token] - recalled)
        state = state + key[token][:, :, None] * correction[:, None, :]
        out[token] = np.einsum("hk,hkv->hv", query[token], state)
    return out, state


# ---- rounding of K and V


def round_kv(x: np.ndarray, kind: str) -> np.ndarray:
    """K or V (T, K, D) as it reads back from a cache that stores `kind`."""
    x = x.astype(np.float32)
    if kind == "fp16":
        return x.astype(np.float16).astype(np.float64)
    if x.shape[-1] % 64:
        raise ReferenceModelError(f"a head of {x.shape[-1]} values cannot be stored in groups of 64")
    if kind == "int8":
        return round_int8(x.reshape(-1, 64)).reshape(x.shape)
    rotation = hadamard(x.shape[-1])
    rotated = (x @ rotation).astype(np.float32)
    return round_q4_0(rotated.reshape(-1, 32)).reshape(x.shape) @ rotation


def round_int8(groups: np.ndarray) -> np.ndarray:
    """Each group of 64: one fp16 scale, codes from -127 to 127."""
    scale = (np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    divisor = np.where(scale == 0, np.float32(1), scale)
    return np.clip(np.rint(groups / divisor), -127, 127).astype(np.float64) * scale


def round_q4_0(blocks: np.ndarray) -> np.ndarray:
    """Each block of 32: the value furthest from zero becomes code 0 or the end of the scale, as ggml rounds q4_0."""
    furthest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = furthest / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.minimum(15, np.floor(blocks * inverse + np.float32(8.5)))
    return (codes - 8).astype(np.float64) * scale.astype(np.float16).astype(np.float64)


def hadamard(width: int) -> np.ndarray:
    """The orthonormal Walsh-Hadamard matrix in natural order, its own inverse."""
    if width & (width - 1):
        raise ReferenceModelError(f"a head of {width} values is not a power of two and cannot be rotated")
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(width)


# ---- element by element


def rms(x, weight, eps: float):
    """Root-mean-square norm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def l2_normalise(x):
    """Unit length over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def sigmoid(x):
    """Logistic function without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x):
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x):
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(0, x)


def softmax(x):
    """Softmax over the last axis."""
    weight = np.exp(x - x.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)
