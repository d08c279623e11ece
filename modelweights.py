"""A GGUF file as hyper-parameters and weights.

It owns metadata keys, tensor names, shape checks and the two repackings that the family's files need; it knows no
order of operations. Invariant: what it returns is complete and consistent, so a forward pass never meets a missing or
misshapen tensor; every refusal is a `ModelError` that names the file and the part. Read next: model.py.

Shapes: C residual streams, N width, H query heads, K kv heads, D head width, V vocabulary.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

import kvcache
import packs
from modelfile import GgufError, end_token_ids, open_gguf, tokenizer_metadata, turn_start_id

RECURRENT = {"qwen3next", "qwen35", "qwen35moe", "qwen4exp"}  # gated attention among gated delta nets
PAIRED_ROPE = {"llama"}  # rotates (2i, 2i + 1); the others rotate (i, i + n_rot / 2)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp")
NGRAM_DILATION = 3  # fixed in the architecture, absent from the file


class ModelError(Exception):
    """A model file that cannot be used; one line that names the file, the part and what was expected."""


# --- hyper-parameters ---------------------------------------------------------------------------------------------


class Ngrams(NamedTuple):
    """The per-layer n-gram embedding: one layer, heads of hashed 2-grams up to n-grams."""

    layer: int
    eos: int
    n_taps: int
    row_width: int
    multipliers: np.ndarray  # int64 [n]
    vocab_sizes: np.ndarray  # int64 [heads]
    head_offsets: np.ndarray  # int64 [heads]


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of one file, zero where a part is absent."""

    arch: str
    name: str
    n_embd: int
    n_layers: int  # of the trunk
    n_draft: int
    n_vocab: int
    n_ctx: int
    attention_layers: tuple[bool, ...]
    interval: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    rope_base: float
    rope_factor: float
    rms_eps: float
    gdn_state: int
    gdn_k_heads: int
    gdn_v_heads: int
    gdn_taps: int
    idx_heads: int
    idx_dim: int
    idx_top_k: int
    hc: int
    hc_rank: int
    n_expert: int
    n_expert_used: int
    n_ff: int
    n_ff_shared: int
    ngrams: Ngrams | None

    @property
    def gated(self) -> bool:
        """Whether attention layers carry an output gate."""
        return self.arch in RECURRENT

    @property
    def streams(self) -> int:
        return max(self.hc, 1)

    @property
    def conv_channels(self) -> int:
        return (2 * self.gdn_k_heads + self.gdn_v_heads) * self.gdn_state

    @property
    def geometry(self) -> tuple[int, ...]:
        """The 18 numbers of a session file, in the order of kvcache.GEOMETRY_SLOTS."""
        return (
            self.n_embd, self.n_layers, self.interval, self.gdn_state, self.gdn_k_heads, self.gdn_v_heads,
            self.gdn_taps, self.conv_channels, self.gdn_v_heads * self.gdn_state, self.n_head, self.n_head_kv,
            self.head_dim, self.idx_heads, self.idx_dim, self.hc, self.hc_rank, self.n_expert, self.n_ff,
        )  # fmt: skip

    def cache_shape(self, max_context: int, cell_format: kvcache.CellFormat) -> kvcache.CacheShape:
        """The cache for `max_context` tokens (rounded up to whole pages); the draft layer never keeps hybrid cells."""
        n_attention = sum(self.attention_layers)
        hybrid = cell_format == kvcache.FORMATS["k8v4"]
        history_rows = (self.ngrams.n_taps - 1) * NGRAM_DILATION if self.ngrams else 0
        return kvcache.CacheShape(
            geometry=self.geometry,
            n_attention=n_attention,
            n_recurrent=self.n_layers - n_attention,
            has_draft=bool(self.n_draft),
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim,
            index_dim=self.idx_dim,
            history_bytes=4 * history_rows * self.streams * self.n_embd,
            n_cells=-(-max_context // kvcache.PAGE) * kvcache.PAGE,
            cell_format=cell_format,
            draft_format=kvcache.FORMATS["int8"] if hybrid else cell_format,
        )


class _Keys:
    """Metadata of a file below its architecture's prefix, with one error for what is missing or of another type."""

    def __init__(self, path, fields):
        self.path, self.fields = path, fields
        self.arch = self._value("general.architecture", str, None)

    def _contents(self, key):
        """A key's value, None where the file has no such key."""
        try:
            return self.fields[key].contents() if key in self.fields else None
        except ValueError as error:
            raise ModelError(f"{self.path}: {key} cannot be read: {error}") from error

    def _value(self, key, kind, default):
        value = self._contents(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.path}: the key {key} is missing")
            return default
        wanted = (int, float) if kind is float else kind
        if (isinstance(value, bool) and kind is not bool) or not isinstance(value, wanted):
            raise ModelError(f"{self.path}: {key} is {str(value)[:40]!r}, expected {kind.__name__}")
        return kind(value)

    def whole(self, key, default=None) -> int:
        """A count, at most 2^31 (nothing in a model is larger, and a product of two must stay in range)."""
        value = self._value(key, int, default)
        if not 0 <= value < 1 << 31:
            raise ModelError(f"{self.path}: {key} is {value}, expected 0 to {(1 << 31) - 1}")
        return value

    def number(self, name, default=None) -> int:
        """A count below the architecture's prefix."""
        return self.whole(f"{self.arch}.{name}", default)

    def real(self, name, default=None) -> float:
        return self._value(f"{self.arch}.{name}", float, default)

    def text(self, name, default=None) -> str:
        return self._value(name, str, default)

    def array(self, name, kind, default=None) -> list:
        """An array of booleans (kind bool) or of whole numbers that an int64 holds and that are not negative (int)."""
        values = self._value(f"{self.arch}.{name}", list, default)
        for value in values:
            if type(value) is not kind or (kind is int and not 0 <= value < 1 << 63):
                wanted = "booleans" if kind is bool else "numbers from 0 to 2^63 - 1"
                raise ModelError(f"{self.path}: {self.arch}.{name} holds {str(value)[:40]!r}, expected {wanted}")
        return values

    def number_or_largest(self, name, default=None) -> int:
        """A key that is one number for all layers, or an array of one a layer (of which absent layers are 0)."""
        if not isinstance(self._contents(f"{self.arch}.{name}"), list):
            return self.number(name, default)
        values = set(self.array(name, int)) - {0}
        if len(values) != 1:
            raise ModelError(f"{self.path}: {self.arch}.{name} differs between layers, which is not supported")
        return values.pop()


def _layer_kinds(keys: _Keys, n_layers: int) -> tuple[tuple[bool, ...], int]:
    """Which trunk layers are attention, and the interval between them (0 where all are)."""
    if keys.arch not in RECURRENT:
        return (True,) * n_layers, 0
    interval = keys.number("full_attention_interval", 4)
    flags = keys.array("attention.recurrent_layers", bool, [])
    if flags:
        if len(flags) < n_layers:
            name = f"{keys.arch}.attention.recurrent_layers"
            raise ModelError(f"{keys.path}: {name} lists {len(flags)} layers, expected {n_layers}")
        return tuple(not flag for flag in flags[:n_layers]), interval
    if interval < 1:
        raise ModelError(f"{keys.path}: {keys.arch}.full_attention_interval is 0")
    return tuple((layer + 1) % interval == 0 for layer in range(n_layers)), interval


def _indexed(keys: _Keys, attention_layers: tuple[bool, ...]) -> bool:
    """Whether attention reads chosen blocks of cells; a page is such a block, so no other size will do."""
    sizes = keys.array("attention.compress_ratios", int, [])
    found = {size for size, attention in zip(sizes, attention_layers, strict=False) if attention}
    if sizes and (len(sizes) < len(attention_layers) or found not in ({0}, {kvcache.PAGE})):
        raise ModelError(
            f"{keys.path}: {keys.arch}.attention.compress_ratios gives attention layers {sorted(found)[:9]}, "
            f"expected 0 or {kvcache.PAGE}, the same in all {sum(attention_layers)}"
        )
    return found == {kvcache.PAGE}


def _ngrams(keys: _Keys, n_vocab: int) -> Ngrams | None:
    layers = keys.array("ple.layers", int, [])
    if not layers:
        return None
    if len(layers) != 1:
        raise ModelError(f"{keys.path}: {keys.arch}.ple.layers names {len(layers)} layers, expected one")
    arrays = (keys.array(f"ple.{name}", int) for name in ("layer_multipliers", "head_vocab_sizes", "head_offsets"))
    multipliers, sizes, offsets = arrays
    n, per_order = keys.number("ple.ngram_size"), keys.number("ple.heads_per_ngram")
    fits = n > 1 and per_order > 0 and len(multipliers) == n and len(sizes) == len(offsets) == (n - 1) * per_order
    if not fits or not all(sizes):
        raise ModelError(f"{keys.path}: the n-gram arrays do not fit ple.ngram_size {n} x {per_order} heads")
    # A product beyond int64 would change sign, and its remainder with it.
    if max(multipliers) * n_vocab >= 1 << 63:
        raise ModelError(f"{keys.path}: {keys.arch}.ple.layer_multipliers are too large for a vocabulary of {n_vocab}")
    eos, taps = keys.number("ple.eos_token_id"), keys.number("ple.conv_kernel")
    if eos >= n_vocab or taps < 2:
        raise ModelError(f"{keys.path}: n-grams end at token {eos} of {n_vocab} and fold {taps} taps, which cannot be")
    width = keys.number("embedding_length_per_layer_input")
    return Ngrams(layers[0], eos, taps, width, *(np.array(part, np.int64) for part in (multipliers, sizes, offsets)))


def _rope_factor(keys: _Keys) -> float:
    kind = keys.text(f"{keys.arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"{keys.path}: rope scaling {kind[:40]!r} is not supported (none, linear)")
    return keys.real("rope.scaling.factor", 1.0) if kind == "linear" else 1.0


def read_config(path, fields, tensors) -> ModelConfig:
    """Hyper-parameters from a file's metadata; `tensors` maps names to the library's tensors."""
    keys = _Keys(path, fields)
    if keys.arch not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {keys.arch[:40]!r} is not supported ({', '.join(ARCHITECTURES)})")
    n_draft = keys.number("nextn_predict_layers", 0)
    n_layers = keys.number("block_count") - n_draft
    if n_layers < 1 or n_draft > 1:
        raise ModelError(f"{path}: {n_layers} layers and {n_draft} draft layers; expected at least 1 and at most 1")
    if n_layers > len(tensors):
        raise ModelError(f"{path}: {n_layers} layers, but {len(tensors)} tensors")
    attention_layers, interval = _layer_kinds(keys, n_layers)
    if not any(attention_layers):
        raise ModelError(f"{path}: none of {n_layers} layers is an attention layer, expected at least one")
    n_head, n_embd = keys.number("attention.head_count"), keys.number("embedding_length")
    if not n_head or not n_embd:
        raise ModelError(f"{path}: {n_head} heads and a width of {n_embd}; neither can be 0")
    n_vocab = _vocabulary(path, tensors)
    head_dim = keys.number("attention.key_length", n_embd // n_head)
    recurrent, indexed = not all(attention_layers), _indexed(keys, attention_layers)
    moe = keys.number("expert_count", 0) > 0
    config = ModelConfig(
        arch=keys.arch,
        name=keys.text("general.name", Path(path).stem),
        n_embd=n_embd,
        n_layers=n_layers,
        n_draft=n_draft,
        n_vocab=n_vocab,
        n_ctx=keys.number("context_length"),
        attention_layers=attention_layers,
        interval=interval,
        n_head=n_head,
        n_head_kv=keys.number_or_largest("attention.head_count_kv", n_head),
        head_dim=head_dim,
        n_rot=keys.number("rope.dimension_count", head_dim),
        rope_base=keys.real("rope.freq_base", 10000.0),
        rope_factor=_rope_factor(keys),
        rms_eps=keys.real("attention.layer_norm_rms_epsilon"),
        gdn_state=keys.number("ssm.state_size") if recurrent else 0,
        gdn_k_heads=keys.number("ssm.group_count") if recurrent else 0,
        gdn_v_heads=keys.number("ssm.time_step_rank") if recurrent else 0,
        gdn_taps=keys.number("ssm.conv_kernel") if recurrent else 0,
        idx_heads=keys.number("attention.indexer.head_count") if indexed else 0,
        idx_dim=keys.number("attention.indexer.key_length") if indexed else 0,
        idx_top_k=keys.number("attention.indexer.top_k") if indexed else 0,
        hc=keys.number("hyper_connection.count", 0),
        hc_rank=keys.number("hyper_connection.low_rank", 0),
        n_expert=keys.number("expert_count", 0),
        n_expert_used=keys.number("expert_used_count") if moe else 0,
        n_ff=keys.number_or_largest("expert_feed_forward_length" if moe else "feed_forward_length"),
        n_ff_shared=keys.number("expert_shared_feed_forward_length", 0),
        ngrams=_ngrams(keys, n_vocab),
    )
    _check_config(path, config, indexed)
    return config


def _vocabulary(path, tensors) -> int:
    """Rows of the embedding: no key is sure to hold their number."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path}: tensor token_embd.weight is {'missing' if embedding is None else 'no matrix'}")
    return int(embedding.shape[1])


def _check_config(path, c: ModelConfig, indexed: bool) -> None:
    """Relations that the kernels rely on; each breach is one line."""
    vector_widths = (c.n_embd, c.n_ff, c.n_ff_shared, c.hc_rank, c.idx_dim)
    reals = (c.rope_base, c.rope_factor, c.rms_eps)
    checks = [
        (c.n_head_kv > 0 and c.n_head % max(c.n_head_kv, 1) == 0, f"{c.n_head} heads over {c.n_head_kv} kv heads"),
        (c.head_dim > 0 and c.head_dim % 16 == 0, f"a head width of {c.head_dim}; expected a multiple of 16"),
        (0 < c.n_rot <= c.head_dim and c.n_rot % 2 == 0, f"{c.n_rot} rotated of {c.head_dim} dimensions"),
        (all(0 < x < math.inf for x in reals), f"rope base, rope factor and epsilon of {reals}"),
        (not any(width % 16 for width in vector_widths), f"widths {vector_widths}; expected multiples of 16"),
        (c.n_ff > 0 and (c.hc <= 1 or c.hc_rank > 0), f"a feed-forward width of {c.n_ff} and a rank of {c.hc_rank}"),
        (min(c.n_expert, 1) <= c.n_expert_used <= c.n_expert, f"{c.n_expert_used} experts used of {c.n_expert}"),
        (c.n_vocab > 0 and c.n_ctx > 0, f"a vocabulary of {c.n_vocab} and a context of {c.n_ctx}"),
    ]
    if indexed:
        page, text = kvcache.PAGE, f"an indexer of {c.idx_heads} heads, {c.idx_dim} wide, for {c.idx_top_k} cells"
        checks.append((c.idx_heads > 0 and c.n_rot <= c.idx_dim and c.idx_top_k >= page, text))
        checks.append((c.idx_top_k % page == 0, f"{c.idx_top_k} indexed cells in pages of {page}"))
    if not all(c.attention_layers):
        heads = c.gdn_k_heads > 0 and c.gdn_v_heads > 0 and c.gdn_v_heads % max(c.gdn_k_heads, 1) == 0
        checks.append((heads and c.gdn_state > 0, f"{c.gdn_v_heads} value heads over {c.gdn_k_heads} key heads"))
        checks.append((c.gdn_taps > 1, f"a convolution of {c.gdn_taps} taps"))
    if c.ngrams:
        layer = c.ngrams.layer
        checks.append((0 <= layer < c.n_layers and c.hc > 1, f"n-gram embeddings on layer {layer} of {c.n_layers}"))
    for holds, text in checks:
        if not holds:
            raise ModelError(f"{path}: {text} cannot be")


# --- weights ------------------------------------------------------------------------------------------------------


class Loader:
    """Tensors of one model, by name, checked and packed; `tensors` maps names to the gguf library's tensors."""

    def __init__(self, path, tensors, backend, log, round_x):
        self.path, self.tensors, self.backend, self.log, self.round_x = path, tensors, backend, log, round_x
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
        pack = self.backend.pack
        if len(shape) == 2:
            raw = raw[None]
        else:  # a backend that cannot hold all experts where it computes says where they wait
            pack = getattr(self.backend, "pack_experts", pack)
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
    eps: float


@dataclass
class HyperConnection:
    """Several residual streams: a gated mean is read, and what comes back is injected into each with its own weight."""

    norm: np.ndarray  # [C, N]
    down: object
    up: object
    inject: object | None
    eps: float


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


class ModelFile(NamedTuple):
    """A loaded model: hyper-parameters, weights, the files they came from, and the tokens that steer a conversation."""

    config: ModelConfig
    weights: "Weights"
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


def load_model(path, backend, log, *, round_x: bool = False) -> ModelFile:
    """Load a GGUF file, or all parts of a split one whose first is named.

    `backend` is a kernels module (its pack kinds are named like ggml's types); `log` gets one line a note.
    `round_x` lets products with integer codes round their input to int8.
    """
    try:
        readers, paths = _open_parts(path)
    except GgufError as error:
        raise ModelError(str(error)) from error
    tensors = _tensors(path, readers)
    config = read_config(path, readers[0].fields, tensors)
    loader = Loader(path, tensors, backend, log, round_x)
    try:
        weights = _load_weights(config, loader)
    except (ValueError, IndexError) as error:
        raise ModelError(f"{path}: its tensors cannot be read: {error}") from error
    # The draft block may hold what its use here has no need of: an indexer, an embedding of its own.
    loader.check_all_used(f"blk.{config.n_layers}." if config.n_draft else None)
    loader.report()
    return ModelFile(config, weights, paths, *_conversation_ids(path, readers[0].fields))


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
    count = _Keys(path, first.fields).whole("split.count", 1)
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
    expected = _Keys(path, readers[0].fields).whole("split.tensors.count", found)
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
        return PlainResidual(load.vector(norm, 1, c.n_embd), c.rms_eps)
    flat = c.hc * c.n_embd
    inject = prefix + "inject.weight"
    return HyperConnection(
        load.vector(prefix + "norm.weight", 1, flat).reshape(c.hc, c.n_embd),
        load.matrix(prefix + "down.weight", c.hc_rank, flat),
        load.matrix(prefix + "up.weight", flat, c.hc_rank),
        load.matrix(inject, c.hc, flat) if load.has(inject) else None,
        c.rms_eps,
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
    q_rows_in_file = 2 * q_rows if c.gated else q_rows
    normed = any(load.has(f"{block}attn_{part}_norm.weight") for part in "qk")
    none = np.empty((0, c.head_dim), np.float32)
    biases = None
    if any(load.has(f"{block}attn_{part}.bias") for part in "qkv"):
        rows = {"q": q_rows_in_file, "k": kv_rows, "v": kv_rows}
        biases = tuple(load.vector(f"{block}attn_{part}.bias", n) for part, n in rows.items())
    attention = Attention(
        index,
        load.backend.together(
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
        attention.index_kq = load.backend.together(
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
        load.backend.together(
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
    return tuple(load.backend.pack(packs.F32, part, c.n_embd) for part in rows)


def _dense(load: Loader, block: str, suffix: str, n_ff: int, n_embd: int) -> FeedForward:
    return FeedForward(
        load.backend.together(
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
        load.backend.together(gate, up),
        load.matrix(block + "ffn_down_exps.weight", c.n_expert, c.n_embd, c.n_ff),
        load.matrix(block + "ffn_gate_inp.weight", c.n_expert, c.n_embd),
        _dense(load, block, "_shexp", c.n_ff_shared, c.n_embd) if shared else None,
        load.backend.pack(packs.F32, row, c.n_embd) if shared else None,
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
