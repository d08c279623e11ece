"""One forward pass of the model family, written against a backend.

It owns the order of operations and what a pass leaves to be committed; it knows no sampling and no session. Invariant:
every token's result is what reading it alone would give, since each operation treats tokens one by one (see
kernels_cpu.py); so a prompt may be cut anywhere. Arrays are the backend's own (`ops.empty`), token ids NumPy ones.
Read next: kernels_cpu.py for the arithmetic, engine.py for the use.

Shapes: T tokens, C residual streams, N width, H query heads, K kv heads, D head width, V vocabulary.
"""

import dataclasses
from dataclasses import dataclass, field

import numpy as np
from gguf.quants import dequantize

import kvcache
from modelconfig import ModelConfig
from modelweights import Attention, DeltaNet, FeedForward, HyperConnection, PlainResidual, Weights


@dataclass
class Window:
    """What the recurrent parts of a pass have read, kept until it is known how many of its tokens stay."""

    ids: np.ndarray
    residual: object = None  # [T, C, N] after the last layer
    delta: dict = field(default_factory=dict)  # index -> (convolution input, alpha, beta)
    index_keys: dict = field(default_factory=dict)  # index -> raw keys [T, D]
    ngrams: object = None  # normed rows [T, C * N]


def _placed(part, ops):
    """The same weights with every plain array where the backend computes (it has placed the packs itself)."""
    if isinstance(part, np.ndarray):
        return ops.from_host(part)
    if dataclasses.is_dataclass(part):
        parts = {entry.name: _placed(getattr(part, entry.name), ops) for entry in dataclasses.fields(part)}
        return dataclasses.replace(part, **parts)
    if type(part) in (list, tuple):
        return type(part)(_placed(item, ops) for item in part)
    return part


class Model:
    """Weights and backend; holds no conversation."""

    def __init__(self, config: ModelConfig, weights: Weights, ops, directions: np.ndarray | None = None):
        """`directions` float32 [layers, N] is a control vector: a row is added to every stream behind its layer."""
        self.config, self.weights, self.ops = config, _placed(weights, ops), ops
        self.directions = None if directions is None else ops.from_host(directions)
        half = np.arange(config.n_rot // 2)
        rope = config.rope_base ** (-half / len(half)) / config.rope_factor
        if weights.rope_factors is not None:
            rope = rope / weights.rope_factors
        self.rope = ops.from_host(rope)

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
            tail, dead = state.tail(index), state.dead_key(index)
            self._pool_keys(layer, raw[:n_keep], cache.n_tokens, tail, dead, cache.pools[index])
        if window.ngrams is not None:
            self.ops.push_rows(self._ngram_history(cache), window.ngrams[:n_keep])
        cache.commit(window.ids[:n_keep])

    def logits(self, residual):
        """Logits float32 [T, V], the backend's array, of residual rows [T, C, N]."""
        return self._head(self.weights.final, residual)

    def draft(self, cache: kvcache.Cache, residual, next_ids: np.ndarray, first_cell: int):
        """Run the draft layer over cells first_cell..: returns its residual [T, C, N]; writes its own K/V only.

        Cell i pairs the trunk's (or, in a chain, the draft's own) residual of token i with token i + 1.
        """
        ops, draft, n_tokens = self.ops, self.weights.draft, len(next_ids)
        streams, width = residual.shape[1:]
        embedded = self._embed(next_ids)
        normed = ops.empty(embedded.shape)
        ops.rms_norm(embedded, draft.token_norm, self._eps, normed)
        on_token = self._matmul(draft.on_token, normed)
        hidden = ops.empty((n_tokens, streams * width))
        ops.rms_norm(residual.reshape(n_tokens, streams * width), draft.hidden_norm, self._eps, hidden)
        out = self._matmul(draft.on_hidden, hidden.reshape(n_tokens * streams, width))
        out = out.reshape(n_tokens, streams, width)
        ops.add_to_streams(out, on_token)
        tables = self._rope_tables(first_cell, n_tokens)
        layer = draft.layer
        x, inject = self._read(layer.before_mixer, out)
        mixed = self._attention(layer.mixer, x, cache.draft_pool, first_cell, tables, None)
        self._write(layer.before_mixer, out, inject, mixed)
        x, inject = self._read(layer.before_ffn, out)
        self._write(layer.before_ffn, out, inject, self._feed_forward(layer.ffn, x))
        return out

    def draft_logits(self, residual):
        """Logits [T, V], the backend's array, of the draft layer's residual rows."""
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
        residual = self.ops.empty((n_tokens, self.config.streams, self.config.n_embd))
        self.ops.repeat_streams(self._embed(window.ids), residual)
        tables = self._rope_tables(first, n_tokens)
        for number, layer in enumerate(self.weights.layers):
            if self.config.ngrams and number == self.config.ngrams.layer:
                self._ngrams(cache, window, residual, hold)
            x, inject = self._read(layer.before_mixer, residual)
            mixer = layer.mixer
            if isinstance(mixer, DeltaNet):
                mixed = self._delta_net(mixer, x, cache, window, hold)
            else:
                blocks = self._index(mixer, x, cache, window, tables, hold) if mixer.index_kq else None
                mixed = self._attention(mixer, x, cache.pools[mixer.index], first, tables, blocks)
            self._write(layer.before_mixer, residual, inject, mixed)
            x, inject = self._read(layer.before_ffn, residual)
            self._write(layer.before_ffn, residual, inject, self._feed_forward(layer.ffn, x))
            if self.directions is not None and cache.steered:
                self.ops.add_to_streams(residual, self.directions[number : number + 1])
        window.residual = residual

    def _embed(self, ids: np.ndarray):
        out = self.ops.empty((len(ids), self.config.n_embd))
        self.ops.gather_rows(self.weights.embedding, self.ops.from_host(ids), out)
        return out

    def _matmul(self, weights, x):
        out = self.ops.empty((x.shape[0], weights.n_rows))
        self.ops.matmul(weights, x, out)
        return out

    def _rope_tables(self, first: int, n_tokens: int):
        cos, sin = (self.ops.empty((n_tokens, self.rope.shape[0])) for _ in range(2))
        self.ops.rope_table(self.ops.from_host(np.arange(first, first + n_tokens)), self.rope, cos, sin)
        return cos, sin

    def _head(self, final, residual):
        x, _ = self._read(final, residual)
        return self._matmul(self.weights.head, x)

    # --- the residual

    def _read(self, connection: PlainResidual | HyperConnection, residual):
        """Input [T, N] of a part, and how its output is injected (None: added)."""
        n_tokens, streams, width = residual.shape
        normed, per_stream = self.ops.empty((n_tokens, streams * width)), (n_tokens * streams, width)
        self.ops.rms_norm(residual.reshape(*per_stream), connection.norm, self._eps, normed.reshape(*per_stream))
        if isinstance(connection, PlainResidual):
            return normed, None
        low = self._matmul(connection.down, normed)
        self.ops.silu_scaled(low, np.float32(1 / streams))
        gates = self._matmul(connection.up, low)
        x = self.ops.empty((n_tokens, width))
        self.ops.mix_streams(gates, normed, x)
        return x, self._matmul(connection.inject, normed) if connection.inject else None

    def _write(self, connection, residual, inject, y) -> None:
        if isinstance(connection, PlainResidual):
            self.ops.add_rows(residual, y)
        else:
            self.ops.inject_streams(residual, inject, y)

    # --- attention

    def _attention(self, layer: Attention, x, pool: kvcache.LayerPool, first: int, tables, blocks):
        c, ops, n_tokens = self.config, self.ops, x.shape[0]
        q, gate, k, v = self._projections(layer, x)
        f, cells = pool.format, (pool.k, pool.k_scale, pool.v, pool.v_scale)
        storages, rotated = (f.k_storage, f.v_storage), (f.rotate_k, f.rotate_v)
        cos, sin = tables
        ops.store_heads(
            q, k, v, layer.q_norm, layer.k_norm, self._eps, cos, sin, c.family.paired_rope,
            rotated, storages, first, *cells,
        )  # fmt: skip
        out, scale = ops.empty(q.shape), np.float32(c.head_dim**-0.5)
        if blocks is None:
            ops.attention(*storages, *cells, q, first, scale, out)
        else:
            ops.attention_selected(*storages, *cells, q, first, scale, *blocks, out)
        if f.rotate_v:
            ops.hadamard_heads(out)
        out = out.reshape(n_tokens, c.n_head * c.head_dim)
        if gate is not None:
            ops.sigmoid_mul(gate.reshape(*out.shape), out)
        return self._matmul(layer.out, out)

    def _projections(self, layer: Attention, x):
        """Query and output gate (None without one) [T, H, D], key and value [T, K, D]."""
        c, ops, n_tokens = self.config, self.ops, x.shape[0]
        q, k, v = ops.matmul_each(layer.qkv, x)
        for projected, bias in zip((q, k, v), layer.biases or (), strict=False):
            ops.add_bias(projected, bias)
        gate, both = None, q
        if c.family.gated_attention:
            q, gate = (ops.empty((n_tokens, c.n_head, c.head_dim)) for _ in range(2))
            ops.split_gate(both.reshape(n_tokens, c.n_head, 2 * c.head_dim), q, gate)
        k, v = (part.reshape(n_tokens, c.n_head_kv, c.head_dim) for part in (k, v))
        return q.reshape(n_tokens, c.n_head, c.head_dim), gate, k, v

    def _index(self, layer: Attention, x, cache: kvcache.Cache, window: Window, tables, hold: bool):
        """Fold the tokens' index keys and choose the pages that each of them reads."""
        c, ops, n_tokens = self.config, self.ops, x.shape[0]
        raw, queries = ops.matmul_each(layer.index_kq, x)
        tail, dead = cache.state.tail(layer.index), cache.state.dead_key(layer.index)
        if hold:
            window.index_keys[layer.index] = raw
            tail, dead = ops.copy(tail), ops.copy(dead)
        self._pool_keys(layer, raw, cache.n_tokens, tail, dead, cache.pools[layer.index])
        queries = queries.reshape(n_tokens, c.idx_heads, c.idx_dim)
        ops.norm_rope_heads(queries, layer.index_q_norm, self._eps, *tables, False)
        keep = c.idx_top_k // kvcache.PAGE
        blocks, counts = ops.empty((n_tokens, keep + 1), np.int32), ops.empty(n_tokens, np.int64)
        ops.select_blocks(queries, cache.pools[layer.index].pooled, cache.n_tokens, keep, blocks, counts)
        return blocks, counts

    def _pool_keys(self, layer: Attention, raw, first: int, tail, dead, pool: kvcache.LayerPool) -> None:
        self.ops.pool_keys(raw, first, tail, dead, layer.index_k_norm, self._eps, self.rope, pool.pooled)

    # --- gated delta net

    def _delta_net(self, layer: DeltaNet, x, cache: kvcache.Cache, window: Window, hold: bool):
        raw, alpha, beta, gate = self.ops.matmul_each(layer.inputs, x)
        conv, recurrent = cache.state.conv(layer.index), cache.state.recurrent(layer.index)
        if hold:
            window.delta[layer.index] = raw, alpha, beta
            conv, recurrent = self.ops.copy(conv), self.ops.copy(recurrent)
        out = self._delta_scan(layer, raw, alpha, beta, conv, recurrent)
        self.ops.norm_gate_heads(out, layer.norm, self._eps, gate, self.config.family.silu_gate)
        return self._matmul(layer.out, out.reshape(*gate.shape))

    def _delta_scan(self, layer: DeltaNet, raw, alpha, beta, conv, recurrent):
        """Convolution and recurrence over T tokens; mutates both states; returns [T, value heads, S_value]."""
        c, mixed = self.config, self.ops.empty(raw.shape)
        self.ops.conv_silu(raw, conv, layer.conv, mixed)
        out = self.ops.empty((raw.shape[0], c.gdn_v_heads, c.gdn_state))
        heads = c.gdn_k_heads, c.family.grouped_heads
        self.ops.delta_net(mixed, alpha, beta, layer.a, layer.dt_bias, *heads, recurrent, out)
        return out

    # --- feed-forward

    def _feed_forward(self, ffn: FeedForward, x):
        if ffn.router is None:
            return self._swiglu(ffn, x)
        y = self._experts(ffn, x)
        if ffn.shared is not None:
            self.ops.add_scaled_rows(y, self._matmul(ffn.shared_gate, x), self._swiglu(ffn.shared, x))
        return y

    def _swiglu(self, ffn: FeedForward, x):
        out = self.ops.empty(x.shape)
        self.ops.swiglu(ffn.gate_up, ffn.down, x, out)
        return out

    def _experts(self, ffn: FeedForward, x):
        c, ops = self.config, self.ops
        chosen = (x.shape[0], c.n_expert_used)
        n_rows = x.shape[0] * c.n_expert_used
        share, experts = ops.empty(chosen), ops.empty(chosen, np.int32)
        ops.route(self._matmul(ffn.router, x), share, experts)
        order, offsets = ops.empty(n_rows, np.int64), ops.empty(c.n_expert + 1, np.int64)
        ops.order_by_expert(experts, c.n_expert, order, offsets)
        rows = ops.empty((n_rows, c.n_embd))
        ops.gather_assigned(x, order, rows)
        gate, up = ops.expert_matmul_each(ffn.gate_up, rows, offsets)
        ops.silu_mul(gate, up, gate)
        down, y = ops.empty(rows.shape), ops.empty(x.shape)
        ops.expert_matmul(ffn.down, gate, offsets, down)
        ops.combine_experts(down, order, share, y)
        return y

    # --- n-gram embeddings

    def _ngram_history(self, cache: kvcache.Cache):
        width = self.config.streams * self.config.n_embd
        return cache.state.ple.reshape(cache.state.ple.shape[0] // width, width)

    def _ngrams(self, cache: kvcache.Cache, window: Window, residual, hold: bool) -> None:
        ops, layer, n_tokens = self.ops, self.weights.ngrams, len(window.ids)
        streams, width = residual.shape[1:]
        rows, per_stream, flat = (n_tokens * streams, width), (n_tokens, streams, width), (n_tokens, streams * width)
        entry = self._ngram_entries(cache, window.ids)
        key, query, normed, gated = (ops.empty(rows) for _ in range(4))
        ops.rms_norm(self._matmul(layer.key, entry).reshape(*rows), layer.norm_key, self._eps, key)
        ops.rms_norm(residual.reshape(*rows), layer.norm_query, self._eps, query)
        value = self._matmul(layer.value, entry)
        ops.ngram_gate(key.reshape(*per_stream), query.reshape(*per_stream), value, gated.reshape(*per_stream))
        ops.rms_norm(gated, layer.norm_conv, self._eps, normed)
        normed, history = normed.reshape(*flat), self._ngram_history(cache)
        if hold:
            window.ngrams, history = normed, ops.copy(history)
        dilation = history.shape[0] // (layer.conv.shape[0] - 1)
        ops.ngram_conv(normed, history, layer.conv, dilation, gated.reshape(*flat), residual.reshape(*flat))

    def _ngram_entries(self, cache: kvcache.Cache, ids: np.ndarray):
        """The table rows of every token's n-grams, side by side [T, heads * row width]; the table stays on disk."""
        n, table = self.config.ngrams, self.weights.ngrams.table
        previous = np.full(len(n.multipliers) - 1, -1, np.int64)
        held = cache.ids[::-1][: len(previous)]
        previous[: len(held)] = held
        rows = np.empty((len(ids), len(n.vocab_sizes)), np.int64)
        self.ops.ngram_rows(ids, previous, n.eos, n.multipliers, n.vocab_sizes, n.head_offsets, rows)
        entries = dequantize(np.asarray(table.data[rows.reshape(-1)]), table.tensor_type)
        return self.ops.from_host(np.ascontiguousarray(entries, np.float32).reshape(len(ids), -1))
