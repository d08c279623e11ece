"""One forward pass of the model family, written against a backend.

It owns the order of operations and what a pass leaves to be committed; it knows no sampling and no session. Invariant:
every token's result is what reading it alone would give, since each operation treats tokens one by one (see
kernels_cpu.py); so a prompt may be cut anywhere. Read next: kernels_cpu.py for the arithmetic, engine.py for the use.

Shapes: T tokens, C residual streams, N width, H query heads, K kv heads, D head width, V vocabulary.
"""

from dataclasses import dataclass, field

import numpy as np
from gguf.quants import dequantize

import kvcache
from weights import (
    PAIRED_ROPE,
    Attention,
    DeltaNet,
    FeedForward,
    HyperConnection,
    ModelConfig,
    PlainResidual,
    Weights,
)


@dataclass
class Window:
    """What the recurrent parts of a pass have read, kept until it is known how many of its tokens stay."""

    ids: np.ndarray
    residual: np.ndarray | None = None  # [T, C, N] after the last layer
    delta: dict = field(default_factory=dict)  # index -> (convolution input, alpha, beta)
    index_keys: dict = field(default_factory=dict)  # index -> raw keys [T, D]
    ngrams: np.ndarray | None = None  # normed rows [T, C * N]


class Model:
    """Weights and backend; holds no conversation."""

    def __init__(self, config: ModelConfig, weights: Weights, ops, directions: np.ndarray | None = None):
        """`directions` float32 [layers, N] is a control vector: a row is added to every stream behind its layer."""
        self.config, self.weights, self.ops, self.directions = config, weights, ops, directions
        half = np.arange(config.n_rot // 2)
        self.rope = config.rope_base ** (-half / len(half)) / config.rope_factor
        if weights.rope_factors is not None:
            self.rope = self.rope / weights.rope_factors

    # --- passes

    def append(self, cache: kvcache.Cache, ids: np.ndarray) -> Window:
        """Read T tokens behind those that `cache` holds and commit them all."""
        window = Window(ids)
        self._trunk(cache, window, hold=False)
        cache.commit(ids)
        return window

    def speculate(self, cache: kvcache.Cache, ids: np.ndarray) -> Window:
        """Read T tokens whose number to keep is not known yet: the running state stays, `commit` moves it."""
        window = Window(ids)
        self._trunk(cache, window, hold=True)
        return window

    def commit(self, cache: kvcache.Cache, window: Window, n_keep: int) -> None:
        """Fold the first `n_keep` tokens of a speculated window into the running state, exactly as `append` would."""
        state = cache.state
        for index, (raw, alpha, beta) in window.delta.items():
            layer = self._mixers(DeltaNet)[index]
            inputs = (part[:n_keep] for part in (raw, alpha, beta))
            self._delta_scan(layer, *inputs, state.conv(index), state.recurrent(index))
        for index, raw in window.index_keys.items():
            layer = self._mixers(Attention)[index]
            tail, dead = state.tail(index), state.spare_key(index)
            self._pool_keys(layer, raw[:n_keep], cache.n_tokens, tail, dead, cache.pools[index])
        if window.ngrams is not None:
            history = self._ngram_history(cache)
            history[:] = np.concatenate([history, window.ngrams[:n_keep]])[n_keep:]
        cache.commit(window.ids[:n_keep])

    def logits(self, residual: np.ndarray) -> np.ndarray:
        """Logits float32 [T, V] of residual rows [T, C, N]."""
        return self._head(self.weights.final, residual)

    def draft(self, cache: kvcache.Cache, residual: np.ndarray, next_ids: np.ndarray, first_cell: int):
        """Run the draft layer over cells first_cell..: returns its residual [T, C, N]; writes its own K/V only.

        Cell i pairs the trunk's (or, in a chain, the draft's own) residual of token i with token i + 1.
        """
        ops, draft, n_tokens = self.ops, self.weights.draft, len(next_ids)
        streams, width = residual.shape[1:]
        embedded = self._embed(next_ids)
        normed = np.empty_like(embedded)
        ops.rms_norm(embedded, draft.token_norm, self._eps, normed)
        on_token = self._matmul(draft.on_token, normed)
        hidden = np.empty((n_tokens, streams * width), np.float32)
        ops.rms_norm(residual.reshape(n_tokens, -1), draft.hidden_norm, self._eps, hidden)
        out = self._matmul(draft.on_hidden, hidden.reshape(-1, width)).reshape(residual.shape)
        for stream in range(streams):
            out[:, stream] += on_token
        tables = self._rope_tables(first_cell, n_tokens)
        layer = draft.layer
        x, inject = self._read(layer.before_mixer, out)
        mixed = self._attention(layer.mixer, x, cache.draft_pool, first_cell, tables, None)
        self._write(layer.before_mixer, out, inject, mixed)
        x, inject = self._read(layer.before_ffn, out)
        self._write(layer.before_ffn, out, inject, self._feed_forward(layer.ffn, x))
        return out

    def draft_logits(self, residual: np.ndarray) -> np.ndarray:
        """Logits [T, V] of the draft layer's residual rows."""
        return self._head(self.weights.draft.final, residual)

    # --- the trunk

    @property
    def _eps(self):
        return np.float32(self.config.rms_eps)

    def _mixers(self, kind):
        return [layer.mixer for layer in self.weights.layers if isinstance(layer.mixer, kind)]

    def _trunk(self, cache: kvcache.Cache, window: Window, hold: bool) -> None:
        first, n_tokens = cache.n_tokens, len(window.ids)
        if first + n_tokens > cache.shape.n_cells:
            raise ValueError(f"{first} + {n_tokens} tokens do not fit a cache of {cache.shape.n_cells} cells")
        embedded = self._embed(window.ids)
        residual = np.ascontiguousarray(np.repeat(embedded[:, None, :], self.config.streams, axis=1))
        tables = self._rope_tables(first, n_tokens)
        for number, layer in enumerate(self.weights.layers):
            if self.config.ngrams and number == self.config.ngrams.layer:
                self._ngrams(cache, window, residual, hold)
            x, inject = self._read(layer.before_mixer, residual)
            mixer = layer.mixer
            if isinstance(mixer, DeltaNet):
                mixed = self._delta_net(mixer, x, cache, window, hold)
            else:
                blocks = self._index(mixer, x, cache, window, tables, hold) if mixer.index_k else None
                mixed = self._attention(mixer, x, cache.pools[mixer.index], first, tables, blocks)
            self._write(layer.before_mixer, residual, inject, mixed)
            x, inject = self._read(layer.before_ffn, residual)
            self._write(layer.before_ffn, residual, inject, self._feed_forward(layer.ffn, x))
            if self.directions is not None:
                residual += self.directions[number]
        window.residual = residual

    def _embed(self, ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), self.config.n_embd), np.float32)
        self.ops.gather_rows(self.weights.embedding, ids, out)
        return out

    def _matmul(self, weights, x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), weights.n_rows), np.float32)
        self.ops.matmul(weights, x, out)
        return out

    def _rope_tables(self, first: int, n_tokens: int):
        cos, sin = np.empty((2, n_tokens, len(self.rope)), np.float32)
        self.ops.rope_table(np.arange(first, first + n_tokens), self.rope, cos, sin)
        return cos, sin

    def _head(self, final, residual: np.ndarray) -> np.ndarray:
        x, _ = self._read(final, residual)
        return self._matmul(self.weights.head, x)

    # --- the residual

    def _read(self, connection: PlainResidual | HyperConnection, residual: np.ndarray):
        """Input [T, N] of a part, and how its output is injected (None: added)."""
        n_tokens, streams, width = residual.shape
        normed = np.empty((n_tokens, streams * width), np.float32)
        self.ops.rms_norm(residual.reshape(-1, width), connection.norm, self._eps, normed.reshape(-1, width))
        if isinstance(connection, PlainResidual):
            return normed, None
        low = self._matmul(connection.down, normed)
        self.ops.silu_scaled(low, np.float32(1 / streams))
        gates = self._matmul(connection.up, low)
        x = np.empty((n_tokens, width), np.float32)
        self.ops.mix_streams(gates, normed, x)
        return x, self._matmul(connection.inject, normed) if connection.inject else None

    def _write(self, connection, residual: np.ndarray, inject, y: np.ndarray) -> None:
        if isinstance(connection, PlainResidual):
            self.ops.add_rows(residual, y)
        else:
            self.ops.inject_streams(residual, inject, y)

    # --- attention

    def _attention(self, layer: Attention, x, pool: kvcache.LayerPool, first: int, tables, blocks) -> np.ndarray:
        c, ops, n_tokens = self.config, self.ops, len(x)
        q, k, v = (self._matmul(weights, x) for weights in (layer.q, layer.k, layer.v))
        if layer.biases:
            q, k, v = (projected + bias for projected, bias in zip((q, k, v), layer.biases, strict=True))
        gate = None
        q = q.reshape(n_tokens, c.n_head, -1)
        if c.gated:
            q, gate = (np.ascontiguousarray(part) for part in np.split(q, 2, axis=2))
        k, v = (part.reshape(n_tokens, c.n_head_kv, c.head_dim) for part in (k, v))
        paired = c.arch in PAIRED_ROPE
        ops.norm_rope_heads(q, layer.q_norm, self._eps, *tables, paired)
        ops.norm_rope_heads(k, layer.k_norm, self._eps, *tables, paired)
        self._store(pool, q, k, v, first)
        out = np.empty_like(q)
        f, scale = pool.format, np.float32(c.head_dim**-0.5)
        pools = (f.k_storage, f.v_storage, pool.k, pool.k_scale, pool.v, pool.v_scale)
        if blocks is None:
            ops.attention(*pools, q, first, scale, out)
        else:
            ops.attention_selected(*pools, q, first, scale, *blocks, out)
        if f.rotate_v:
            ops.hadamard_heads(out)
        out = out.reshape(n_tokens, -1)
        if gate is not None:
            ops.sigmoid_mul(gate.reshape(n_tokens, -1), out)
        return self._matmul(layer.out, out)

    def _store(self, pool: kvcache.LayerPool, q, k, v, first: int) -> None:
        """Append K and V in the pool's format; q is rotated with K, since only their product is used."""
        ops, f = self.ops, pool.format
        if f.rotate_k:
            ops.hadamard_heads(q)
            ops.hadamard_heads(k)
        if f.rotate_v:
            ops.hadamard_heads(v)
        ops.append_cells(f.k_storage, k, first, pool.k, pool.k_scale)
        ops.append_cells(f.v_storage, v, first, pool.v, pool.v_scale)

    def _index(self, layer: Attention, x, cache: kvcache.Cache, window: Window, tables, hold: bool):
        """Fold the tokens' index keys and choose the pages that each of them reads."""
        c, ops, n_tokens = self.config, self.ops, len(x)
        raw = self._matmul(layer.index_k, x)
        tail, dead = cache.state.tail(layer.index), cache.state.spare_key(layer.index)
        if hold:
            window.index_keys[layer.index] = raw
            tail, dead = tail.copy(), dead.copy()
        self._pool_keys(layer, raw, cache.n_tokens, tail, dead, cache.pools[layer.index])
        queries = self._matmul(layer.index_q, x).reshape(n_tokens, c.idx_heads, c.idx_dim)
        ops.norm_rope_heads(queries, layer.index_q_norm, self._eps, *tables, False)
        keep = c.idx_top_k // kvcache.PAGE
        blocks, counts = np.empty((n_tokens, keep + 1), np.int32), np.empty(n_tokens, np.int64)
        ops.select_blocks(queries, cache.pools[layer.index].pooled, cache.n_tokens, keep, blocks, counts)
        return blocks, counts

    def _pool_keys(self, layer: Attention, raw, first: int, tail, dead, pool: kvcache.LayerPool) -> None:
        self.ops.pool_keys(raw, first, tail, dead, layer.index_k_norm, self._eps, self.rope, pool.pooled)

    # --- gated delta net

    def _delta_net(self, layer: DeltaNet, x, cache: kvcache.Cache, window: Window, hold: bool) -> np.ndarray:
        raw, alpha, beta = (self._matmul(weights, x) for weights in (layer.qkv, layer.alpha, layer.beta))
        conv, recurrent = cache.state.conv(layer.index), cache.state.recurrent(layer.index)
        if hold:
            window.delta[layer.index] = raw, alpha, beta
            conv, recurrent = conv.copy(), recurrent.copy()
        out = self._delta_scan(layer, raw, alpha, beta, conv, recurrent)
        gate = self._matmul(layer.gate, x)
        self.ops.norm_gate_heads(out, layer.norm, self._eps, gate, self.config.arch != "qwen4exp")
        return self._matmul(layer.out, out.reshape(len(x), -1))

    def _delta_scan(self, layer: DeltaNet, raw, alpha, beta, conv, recurrent) -> np.ndarray:
        """Convolution and recurrence over T tokens; mutates both states; returns [T, value heads, S_value]."""
        c, mixed = self.config, np.empty_like(raw)
        self.ops.conv_silu(raw, conv, layer.conv, mixed)
        out = np.empty((len(raw), c.gdn_v_heads, c.gdn_state), np.float32)
        grouped = c.arch == "qwen3next"
        self.ops.delta_net(mixed, alpha, beta, layer.a, layer.dt_bias, c.gdn_k_heads, grouped, recurrent, out)
        return out

    # --- feed-forward

    def _feed_forward(self, ffn: FeedForward, x: np.ndarray) -> np.ndarray:
        if ffn.router is None:
            return self._swiglu(ffn, x)
        y = self._experts(ffn, x)
        if ffn.shared is not None:
            self.ops.add_scaled_rows(y, self._matmul(ffn.shared_gate, x), self._swiglu(ffn.shared, x))
        return y

    def _swiglu(self, ffn: FeedForward, x: np.ndarray) -> np.ndarray:
        gate = self._matmul(ffn.gate, x)
        self.ops.silu_mul(gate, self._matmul(ffn.up, x), gate)
        return self._matmul(ffn.down, gate)

    def _experts(self, ffn: FeedForward, x: np.ndarray) -> np.ndarray:
        c, ops, n_tokens = self.config, self.ops, len(x)
        share = np.empty((n_tokens, c.n_expert_used), np.float32)
        experts = np.empty((n_tokens, c.n_expert_used), np.int32)
        ops.route(self._matmul(ffn.router, x), share, experts)
        order, offsets = np.empty(experts.size, np.int64), np.empty(c.n_expert + 1, np.int64)
        ops.order_by_expert(experts, c.n_expert, order, offsets)
        rows = x[order // c.n_expert_used]
        gate, up = np.empty((2, experts.size, c.n_ff), np.float32)
        ops.expert_matmul(ffn.gate, rows, offsets, gate)
        ops.expert_matmul(ffn.up, rows, offsets, up)
        ops.silu_mul(gate, up, gate)
        down, y = np.empty_like(rows), np.empty_like(x)
        ops.expert_matmul(ffn.down, gate, offsets, down)
        ops.combine_experts(down, order, share, y)
        return y

    # --- n-gram embeddings

    def _ngram_history(self, cache: kvcache.Cache) -> np.ndarray:
        return cache.state.ple.reshape(-1, self.config.streams * self.config.n_embd)

    def _ngrams(self, cache: kvcache.Cache, window: Window, residual: np.ndarray, hold: bool) -> None:
        ops, layer, n_tokens = self.ops, self.weights.ngrams, len(window.ids)
        streams, width = residual.shape[1:]
        entry = self._ngram_entries(cache, window.ids)
        key, query, normed, gated = np.empty((4, n_tokens * streams, width), np.float32)
        ops.rms_norm(self._matmul(layer.key, entry).reshape(-1, width), layer.norm_key, self._eps, key)
        ops.rms_norm(residual.reshape(-1, width), layer.norm_query, self._eps, query)
        per_stream, flat = (n_tokens, streams, width), (n_tokens, streams * width)
        value = self._matmul(layer.value, entry)
        ops.ngram_gate(key.reshape(per_stream), query.reshape(per_stream), value, gated.reshape(per_stream))
        ops.rms_norm(gated, layer.norm_conv, self._eps, normed)
        history = self._ngram_history(cache)
        if hold:
            window.ngrams, history = normed.reshape(flat), history.copy()
        dilation = len(history) // (len(layer.conv) - 1)
        ops.ngram_conv(
            normed.reshape(flat), history, layer.conv, dilation, gated.reshape(flat), residual.reshape(flat)
        )

    def _ngram_entries(self, cache: kvcache.Cache, ids: np.ndarray) -> np.ndarray:
        """The table rows of every token's n-grams, side by side [T, heads * row width]; the table stays on disk."""
        n, table = self.config.ngrams, self.weights.ngrams.table
        previous = np.full(len(n.multipliers) - 1, -1, np.int64)
        held = cache.ids[::-1][: len(previous)]
        previous[: len(held)] = held
        rows = np.empty((len(ids), len(n.vocab_sizes)), np.int64)
        self.ops.ngram_rows(ids, previous, n.eos, n.multipliers, n.vocab_sizes, n.head_offsets, rows)
        entries = dequantize(np.asarray(table.data[rows.reshape(-1)]), table.tensor_type)
        return np.ascontiguousarray(entries, np.float32).reshape(len(ids), -1)
