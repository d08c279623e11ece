"""The tensors of a model file as the weights of a forward pass.

It owns tensor names, shape checks and the two repackings that the family's files need; it knows no order of operations.
Invariant: what it returns is complete and consistent, so a forward pass never meets a missing or misshapen tensor;
every refusal is a `ModelError` that names the file and the tensor. Read next: model.py.

Shapes: C residual streams, N width, H query heads, K kv heads, D head width, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

import packs
from modelconfig import Keys, ModelConfig, ModelError, read_config
from modelfile import GgufError, end_token_ids, open_gguf, tokenizer_metadata, turn_start_id


class Loader:
    """Tensors of one model, by name, checked and packed; `tensors` maps names to the gguf library's tensors."""

    def __init__(self, path, tensors, ops, log, round_x):
        self.path, self.tensors, self.ops, self.log, self.round_x = path, tensors, ops, log, round_x
        self.widened: dict[str, int] = {}  # type name -> bytes of the float32 that replaced it
        self.used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in NumPy's order, rows first."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def tensor(self, name: str, shape: tuple[int, ...]):
        """The library's tensor, once its shape is found to be `shape`."""
        if self.shape(name) != shape:
            raise ModelError(f"{self.path}: tensor {name} has shape {self.shape(name)}, expected {shape}")
        self.used.add(name)
        return self.tensors[name]

    def check_all_used(self, spared: str | None) -> None:
        """Refuse tensors that nothing reads: leaving them out would compute another model, and say nothing."""
        unknown = sorted(n for n in self.tensors.keys() - self.used if spared is None or not n.startswith(spared))
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ModelError(f"{self.path}: tensor {unknown[0]}{more} has no meaning in this architecture")

    def floats(self, name: str, data, tensor_type) -> np.ndarray:
        """Values of a tensor, or of some of its rows, as float32."""
        try:
            return dequantize(np.asarray(data), tensor_type).astype(np.float32)
        except NotImplementedError as error:
            type_name = tensor_type.name
            raise ModelError(f"{self.path}: tensor {name} has type {type_name}, which cannot be read") from error

    def vector(self, name: str, *shape: int) -> np.ndarray:
        """A small tensor as float32 of `shape`; its own shape may lack leading ones."""
        found, flat = self.shape(name), (math.prod(shape),)
        same_values = math.prod(found) == flat[0] and (shape[0] == 1 or len(found) == 1)
        tensor = self.tensor(name, found if same_values else shape)
        return self.floats(name, tensor.data, tensor.tensor_type).reshape(shape)

    def matrix(self, name: str, *shape: int):
        """A packed matrix (rows, columns), or matrices (n, rows, columns)."""
        tensor = self.tensor(name, shape)
        return self._pack(name, tensor.data, tensor.tensor_type, shape)

    def _pack(self, name, data, tensor_type, shape):
        kind = packs.NUMBERS.get(tensor_type.name)
        raw = np.asarray(data)
        if kind is None:
            raw, kind = self.floats(name, raw, tensor_type), packs.F32
            self.widened[tensor_type.name] = self.widened.get(tensor_type.name, 0) + raw.nbytes
        elif tensor_type == GGMLQuantizationType.BF16:
            raw = raw.view(np.uint16)
        pack = self.ops.pack
        if len(shape) == 2:
            raw = raw[None]
        else:
            pack = self.ops.pack_experts
        try:
            return pack(kind, raw.reshape(*raw.shape[:2], -1), shape[-1], round_x=self.round_x)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name}: {error}") from error

    def columns(self, name: str, rows: int, width: int, first: int, last: int):
        """Columns first..last of a (rows, width) matrix as its own pack."""
        tensor = self.tensor(name, (rows, width))
        row_bytes = tensor.data.shape[-1]
        if row_bytes * first % width or row_bytes * last % width:
            raise ModelError(f"{self.path}: tensor {name} cannot be split at column {first or last}")
        part = np.ascontiguousarray(tensor.data[:, row_bytes * first // width : row_bytes * last // width])
        return self._pack(name, part, tensor.tensor_type, (rows, last - first))

    def rows(self, name: str, shape: tuple[int, int, int], first: int, last: int):
        """Rows first..last of each of several matrices (n, rows, columns) as their own packs (fused projections)."""
        n, _, columns = shape
        tensor = self.tensor(name, shape)
        part = np.ascontiguousarray(tensor.data[:, first:last])
        return self._pack(name, part, tensor.tensor_type, (n, last - first, columns))

    def report(self) -> None:
        for name, size_bytes in self.widened.items():
            self.log(f"weights of type {name} have no kernel here: widened to float32, {size_bytes >> 20} MiB of RAM")


@dataclass
class PlainResidual:
    """One residual stream: a norm before each part, its output added."""

    norm: np.ndarray  # [1, N]


@dataclass
class HyperConnection:
    """Several residual streams: a gated mean is read, and what comes back is injected into each with its own weight."""

    norm: np.ndarray  # [C, N]
    down: object
    up: object
    inject: object | None


@dataclass
class Attention:
    """Weights of one attention layer; indexer parts are None in dense layers."""

    index: int  # among the attention layers
    qkv: object  # three packs together
    out: object
    q_norm: np.ndarray
    k_norm: np.ndarray
    biases: tuple[np.ndarray, ...] | None
    index_kq: object = None  # two packs together
    index_q_norm: np.ndarray | None = None
    index_k_norm: np.ndarray | None = None


@dataclass
class DeltaNet:
    """Weights of one gated delta net layer."""

    index: int  # among the recurrent layers
    inputs: object  # the packs of q, k, v in one, alpha, beta and gate together
    conv: np.ndarray  # [taps, channels]
    dt_bias: np.ndarray
    a: np.ndarray
    norm: np.ndarray
    out: object


@dataclass
class FeedForward:
    """A dense SwiGLU (router None), or experts with an optional shared one."""

    gate_up: object  # two packs together
    down: object
    router: object = None
    shared: "FeedForward | None" = None
    shared_gate: object = None


@dataclass
class NgramLayer:
    """Weights of the n-gram embedding; the table stays in the mapped file."""

    table: object
    key: object
    value: object
    norm_key: np.ndarray
    norm_query: np.ndarray
    norm_conv: np.ndarray
    conv: np.ndarray  # [taps, C * N]


@dataclass
class Layer:
    """One block: how it reads and writes the residual, its mixer and its feed-forward part."""

    before_mixer: PlainResidual | HyperConnection
    mixer: Attention | DeltaNet
    before_ffn: PlainResidual | HyperConnection
    ffn: FeedForward


@dataclass
class Draft:
    """The draft block: predicts the token after the next from the trunk's residual and the next token."""

    on_token: object
    on_hidden: object
    token_norm: np.ndarray
    hidden_norm: np.ndarray
    layer: Layer
    final: PlainResidual | HyperConnection


class LoadedModel(NamedTuple):
    """A model: hyper-parameters, weights, the files they came from, and the tokens that steer a conversation."""

    config: ModelConfig
    weights: "Weights | None"  # None where only the rest was asked for
    paths: list[str]
    end_ids: frozenset[int]
    turn_start_id: int | None


@dataclass
class Weights:
    """All of a model."""

    embedding: object
    head: object
    layers: list[Layer]
    final: PlainResidual | HyperConnection
    ngrams: NgramLayer | None
    draft: Draft | None
    rope_factors: np.ndarray | None  # [n_rot / 2], each divides a rotary frequency

    @property
    def expert_parts(self) -> list[FeedForward]:
        """The feed-forward parts that have experts, the draft layer's last."""
        layers = [*self.layers, self.draft.layer] if self.draft else self.layers
        return [layer.ffn for layer in layers if layer.ffn.router is not None]


# --- files to weights ---------------------------------------------------------------------------------------------


def describe_model(path) -> LoadedModel:
    """What a GGUF file, or all parts of a split one whose first is named, say of a model; no weight is read."""
    return _read_description(path)[0]


def _read_description(path) -> tuple[LoadedModel, dict]:
    """The same, and the tensors by name."""
    try:
        readers, paths = _open_parts(path)
    except GgufError as error:
        raise ModelError(str(error)) from error
    tensors = _tensors(path, readers)
    config = read_config(path, readers[0].fields, tensors)
    return LoadedModel(config, None, paths, *_conversation_ids(path, readers[0].fields)), tensors


def load_model(path, ops, log, *, round_x: bool = False) -> LoadedModel:
    """Load a GGUF file, or all parts of a split one whose first is named.

    `ops` is the backend that will multiply; `log` gets one line a note.
    `round_x` lets products with integer codes round their input to int8.
    """
    described, tensors = _read_description(path)
    config = described.config
    loader = Loader(path, tensors, ops, log, round_x)
    try:
        weights = _load_weights(config, loader)
    except (ValueError, IndexError) as error:
        raise ModelError(f"{path}: its tensors cannot be read: {error}") from error
    # The draft block may hold what its use here has no need of: an indexer, an embedding of its own.
    loader.check_all_used(f"blk.{config.n_layers}." if config.n_draft else None)
    loader.report()
    return described._replace(weights=weights)


def _conversation_ids(path, fields) -> tuple[frozenset[int], int | None]:
    """The tokens that end an answer, and the one that starts a turn."""
    try:
        metadata = tokenizer_metadata(fields)
        return end_token_ids(metadata), turn_start_id(metadata)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: its tokenizer's metadata cannot be used: {error}") from error


def _open_parts(path):
    """Readers of a file, or of all files of a split one whose first part is named."""
    first = open_gguf(path)
    count = Keys(path, first.fields).whole("split.count", 1)
    if count <= 1:
        return [first], [str(path)]
    stem = str(path)
    ending = f"-00001-of-{count:05d}.gguf"
    if not stem.endswith(ending):
        raise ModelError(f"{path}: one of {count} parts; name the first one, which ends in {ending}")
    readers, paths = [first], [stem]
    for part in range(2, count + 1):
        paths.append(f"{stem[: -len(ending)]}-{part:05d}-of-{count:05d}.gguf")
        readers.append(open_gguf(paths[-1]))
    return readers, paths


def _tensors(path, readers) -> dict:
    """Tensors of all parts by name."""
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    found = sum(len(reader.tensors) for reader in readers)
    expected = Keys(path, readers[0].fields).whole("split.tensors.count", found)
    if not len(tensors) == found == expected:
        raise ModelError(f"{path}: {len(tensors)} tensors of {expected}; its parts are not those of one model")
    return tensors


def _load_weights(c: ModelConfig, load: Loader) -> Weights:
    layers = []
    for layer in range(c.n_layers):
        kinds = c.attention_layers[:layer]
        index = sum(kinds) if c.attention_layers[layer] else layer - sum(kinds)
        mixer = _attention if c.attention_layers[layer] else _delta_net
        layers.append(_layer(c, load, f"blk.{layer}.", lambda block, m=mixer, i=index: m(c, load, block, i)))
    embedding = load.matrix("token_embd.weight", c.n_vocab, c.n_embd)
    tied = not load.has("output.weight")
    factors = "rope_freqs.weight"
    return Weights(
        embedding=embedding,
        head=embedding if tied else load.matrix("output.weight", c.n_vocab, c.n_embd),
        layers=layers,
        final=_connection(c, load, "output_hc_", "output_norm.weight"),
        ngrams=_ngram_layer(c, load) if c.ngrams else None,
        draft=_draft(c, load) if c.n_draft else None,
        rope_factors=load.vector(factors, c.n_rot // 2) if load.has(factors) else None,
    )


def _connection(c: ModelConfig, load: Loader, prefix: str, norm: str):
    if c.hc <= 1:
        return PlainResidual(load.vector(norm, 1, c.n_embd))
    flat = c.hc * c.n_embd
    inject = prefix + "inject.weight"
    return HyperConnection(
        load.vector(prefix + "norm.weight", 1, flat).reshape(c.hc, c.n_embd),
        load.matrix(prefix + "down.weight", c.hc_rank, flat),
        load.matrix(prefix + "up.weight", flat, c.hc_rank),
        load.matrix(inject, c.hc, flat) if load.has(inject) else None,
    )


def _layer(c: ModelConfig, load: Loader, block: str, mixer) -> Layer:
    second = "post_attention_norm" if load.has(block + "post_attention_norm.weight") else "ffn_norm"
    layer = Layer(
        _connection(c, load, block + "hc_attn_", block + "attn_norm.weight"),
        mixer(block),
        _connection(c, load, block + "hc_ffn_", f"{block}{second}.weight"),
        _experts(c, load, block) if c.n_expert else _dense(load, block, "", c.n_ff, c.n_embd),
    )
    for connection, part in ((layer.before_mixer, "attn"), (layer.before_ffn, "ffn")):
        if isinstance(connection, HyperConnection) and connection.inject is None:
            raise ModelError(f"{load.path}: tensor {block}hc_{part}_inject.weight is missing")
    return layer


def _attention(c: ModelConfig, load: Loader, block: str, index: int, indexed: bool = True) -> Attention:
    q_rows, kv_rows = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
    q_rows_in_file = 2 * q_rows if c.family.gated_attention else q_rows
    normed = any(load.has(f"{block}attn_{part}_norm.weight") for part in "qk")
    none = np.empty((0, c.head_dim), np.float32)
    biases = None
    if any(load.has(f"{block}attn_{part}.bias") for part in "qkv"):
        rows = {"q": q_rows_in_file, "k": kv_rows, "v": kv_rows}
        biases = tuple(load.vector(f"{block}attn_{part}.bias", n) for part, n in rows.items())
    attention = Attention(
        index,
        load.ops.together(
            load.matrix(block + "attn_q.weight", q_rows_in_file, c.n_embd),
            load.matrix(block + "attn_k.weight", kv_rows, c.n_embd),
            load.matrix(block + "attn_v.weight", kv_rows, c.n_embd),
        ),
        load.matrix(block + "attn_output.weight", c.n_embd, q_rows),
        load.vector(block + "attn_q_norm.weight", 1, c.head_dim) if normed else none,
        load.vector(block + "attn_k_norm.weight", 1, c.head_dim) if normed else none,
        biases,
    )
    if indexed and c.idx_dim:
        attention.index_kq = load.ops.together(
            load.matrix(block + "indexer.k_proj.weight", c.idx_dim, c.n_embd),
            load.matrix(block + "indexer.q_proj.weight", c.idx_heads * c.idx_dim, c.n_embd),
        )
        attention.index_q_norm = load.vector(block + "indexer.q_norm.weight", 1, c.idx_dim)
        attention.index_k_norm = load.vector(block + "indexer.k_norm.weight", 1, c.idx_dim)
    return attention


def _delta_net(c: ModelConfig, load: Loader, block: str, index: int) -> DeltaNet:
    heads, values = c.gdn_v_heads, c.gdn_v_heads * c.gdn_state
    return DeltaNet(
        index,
        load.ops.together(
            load.matrix(block + "attn_qkv.weight", c.conv_channels, c.n_embd),
            *_alpha_beta(c, load, block),
            load.matrix(block + "attn_gate.weight", values, c.n_embd),
        ),
        np.ascontiguousarray(load.vector(block + "ssm_conv1d.weight", c.conv_channels, c.gdn_taps).T),
        load.vector(block + "ssm_dt.bias", heads),
        load.vector(block + "ssm_a", heads),
        load.vector(block + "ssm_norm.weight", 1, c.gdn_state),
        load.matrix(block + "ssm_out.weight", c.n_embd, values),
    )


def _alpha_beta(c: ModelConfig, load: Loader, block: str):
    heads = c.gdn_v_heads
    if not load.has(block + "ssm_ba.weight"):
        return tuple(load.matrix(f"{block}ssm_{name}.weight", heads, c.n_embd) for name in ("alpha", "beta"))
    # One matrix, per key head the betas of its value heads, then their alphas; float32 keeps its few rows simple.
    packed = load.vector(block + "ssm_ba.weight", 2 * heads, c.n_embd)
    parts = packed.reshape(c.gdn_k_heads, 2, heads // c.gdn_k_heads, c.n_embd)
    rows = (np.ascontiguousarray(parts[:, part]).reshape(1, heads, c.n_embd) for part in (1, 0))
    return tuple(load.ops.pack(packs.F32, part, c.n_embd) for part in rows)


def _dense(load: Loader, block: str, suffix: str, n_ff: int, n_embd: int) -> FeedForward:
    return FeedForward(
        load.ops.together(
            *(load.matrix(f"{block}ffn_{part}{suffix}.weight", n_ff, n_embd) for part in ("gate", "up"))
        ),
        load.matrix(f"{block}ffn_down{suffix}.weight", n_embd, n_ff),
    )


def _experts(c: ModelConfig, load: Loader, block: str) -> FeedForward:
    fused = block + "ffn_gate_up_exps.weight"
    if load.has(fused):
        shape = (c.n_expert, 2 * c.n_ff, c.n_embd)
        gate, up = (load.rows(fused, shape, i * c.n_ff, (i + 1) * c.n_ff) for i in range(2))
    else:
        gate, up = (
            load.matrix(f"{block}ffn_{part}_exps.weight", c.n_expert, c.n_ff, c.n_embd) for part in ("gate", "up")
        )
    shared_gate = block + "ffn_gate_inp_shexp.weight"
    shared = load.has(shared_gate) or load.has(block + "ffn_up_shexp.weight")
    row = load.vector(shared_gate, 1, c.n_embd)[None] if shared else None
    return FeedForward(
        load.ops.together(gate, up),
        load.matrix(block + "ffn_down_exps.weight", c.n_expert, c.n_embd, c.n_ff),
        load.matrix(block + "ffn_gate_inp.weight", c.n_expert, c.n_embd),
        _dense(load, block, "_shexp", c.n_ff_shared, c.n_embd) if shared else None,
        load.ops.pack(packs.F32, row, c.n_embd) if shared else None,
    )


def _ngram_layer(c: ModelConfig, load: Loader) -> NgramLayer:
    n, block = c.ngrams, f"blk.{c.ngrams.layer}."
    flat, entry = c.streams * c.n_embd, len(n.vocab_sizes) * n.row_width
    name = "per_layer_token_embd.weight"
    n_rows = max(int(size) + int(first) for size, first in zip(n.vocab_sizes, n.head_offsets, strict=True))
    shape = load.shape(name)
    if len(shape) != 2 or shape[0] < n_rows:
        raise ModelError(f"{load.path}: tensor {name} has shape {shape}, expected {n_rows} rows or more")
    table = load.tensor(name, (shape[0], n.row_width))
    load.floats(name, table.data[:1], table.tensor_type)  # a type that cannot be read shows now, not at the first token
    norms = (
        load.vector(f"{block}ple_norm_{name}.weight", 1, flat).reshape(c.streams, c.n_embd)
        for name in ("key", "query", "conv")
    )
    return NgramLayer(
        table,
        load.matrix(block + "ple_key.weight", flat, entry),
        load.matrix(block + "ple_value.weight", c.n_embd, entry),
        *norms,
        np.ascontiguousarray(load.vector(block + "ple_conv1d.weight", flat, n.n_taps).T),
    )


def _draft(c: ModelConfig, load: Loader) -> Draft:
    block, n = f"blk.{c.n_layers}.", c.n_embd
    prefix = block + "nextn."
    # Files without hyper-connections may leave the final norm out and mean the trunk's.
    norm = prefix + "shared_head_norm.weight"
    return Draft(
        load.columns(prefix + "eh_proj.weight", n, 2 * n, 0, n),
        load.columns(prefix + "eh_proj.weight", n, 2 * n, n, 2 * n),
        load.vector(prefix + "enorm.weight", 1, n),
        load.vector(prefix + "hnorm.weight", 1, c.streams * n),
        _layer(c, load, block, lambda name: _attention(c, load, name, 0, indexed=False)),
        _connection(c, load, prefix + "hc_head_", norm if load.has(norm) else "output_norm.weight"),
    )
