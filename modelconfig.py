"""The hyper-parameters of a model file, and what sets one architecture apart from another.

It owns metadata keys, their defaults and their limits; it knows no tensor but the embedding, whose rows are the
vocabulary. Invariant: a configuration that is returned is one that every kernel can run; every refusal is a
`ModelError` that names the file and what was expected. Read next: modelweights.py for the tensors, model.py for their
use.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import kvcache
from cells import PAGE, CellFormat, draft_format

NGRAM_DILATION = 3  # fixed in the architecture, absent from the file


class ModelError(Exception):
    """A model file that cannot be used; one line that names the file, the part and what was expected."""


class Family(NamedTuple):
    """What the name of an architecture says and no key of its files does."""

    recurrent: bool = False  # most layers are gated delta nets
    gated_attention: bool = False  # attention layers have an output gate
    paired_rope: bool = False  # rotates (2i, 2i + 1) instead of (i, i + n_rot / 2)
    grouped_heads: bool = False  # delta net: value head v reads key head v // (Hv / Hk) instead of v mod Hk
    silu_gate: bool = False  # delta net: silu gates its normed output, not sigmoid


FAMILIES = {
    "llama": Family(paired_rope=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3moe": Family(),
    "qwen3next": Family(recurrent=True, gated_attention=True, grouped_heads=True, silu_gate=True),
    "qwen35": Family(recurrent=True, gated_attention=True, silu_gate=True),
    "qwen35moe": Family(recurrent=True, gated_attention=True, silu_gate=True),
    "qwen4exp": Family(recurrent=True, gated_attention=True),
}


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
    def family(self) -> Family:
        return FAMILIES[self.arch]

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

    def cache_shape(self, max_context: int, cell_format: CellFormat) -> kvcache.CacheShape:
        """The cache for `max_context` tokens (rounded up to whole pages); the draft layer never keeps hybrid cells."""
        n_attention = sum(self.attention_layers)
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
            n_cells=-(-max_context // PAGE) * PAGE,
            cell_format=cell_format,
            draft_format=draft_format(cell_format),
        )


class Keys:
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


def _layer_kinds(keys: Keys, n_layers: int) -> tuple[tuple[bool, ...], int]:
    """Which trunk layers are attention, and the interval between them (0 where all are)."""
    if not FAMILIES[keys.arch].recurrent:
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


def _indexed(keys: Keys, attention_layers: tuple[bool, ...]) -> bool:
    """Whether attention reads chosen blocks of cells; a page is such a block, so no other size will do."""
    sizes = keys.array("attention.compress_ratios", int, [])
    found = {size for size, attention in zip(sizes, attention_layers, strict=False) if attention}
    if sizes and (len(sizes) < len(attention_layers) or found not in ({0}, {PAGE})):
        raise ModelError(
            f"{keys.path}: {keys.arch}.attention.compress_ratios gives attention layers {sorted(found)[:9]}, "
            f"expected 0 or {PAGE}, the same in all {sum(attention_layers)}"
        )
    return found == {PAGE}


def _ngrams(keys: Keys, n_vocab: int) -> Ngrams | None:
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


def _rope_factor(keys: Keys) -> float:
    """By what positions are divided; `rope.scale_linear` is the key of older files."""
    kind = keys.text(f"{keys.arch}.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ModelError(f"{keys.path}: rope scaling {kind[:40]!r} is not supported (none, linear)")
    return keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0)) if kind == "linear" else 1.0


def read_config(path, fields, tensors) -> ModelConfig:
    """Hyper-parameters from a file's metadata; `tensors` maps names to the library's tensors.

    A key without a default here is needed; the defaults are those of llama.cpp (`load_hparams`).
    """
    keys = Keys(path, fields)
    if keys.arch not in FAMILIES:
        raise ModelError(f"{path}: architecture {keys.arch[:40]!r} is not supported ({', '.join(FAMILIES)})")
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
        page, text = PAGE, f"an indexer of {c.idx_heads} heads, {c.idx_dim} wide, for {c.idx_top_k} cells"
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
