"""Every operation of the backends as a case that runs on either, for comparing them.

It owns inputs, sizes and tolerances; it does not know which backend it runs on. A case takes the backend, a random
generator and the sizes, and returns NumPy arrays; the same seed gives both backends the same inputs. Read next:
gpu_check.py (real sizes on a device), cuda_kernels.py (what the compiler makes of the kernels).
"""

import math
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import packs
from cells import FORMATS, PAGE, Residency, head_bytes, scale_bytes

EPS = np.float32(1e-6)
KINDS = tuple(packs.NUMBERS)
FLOATS = tuple(name for name, number in packs.NUMBERS.items() if not packs.CODED[number])
STORAGES = {name: form[1:] for name, form in FORMATS.items()}


class Sizes(NamedTuple):
    """`n` is what a case varies (tokens, rows or cells); the others are those of a layer."""

    n: int
    columns: int = 256  # of weights and rows
    rows: int = 33  # of weights
    kv_heads: int = 2
    group: int = 3  # query heads of a K/V head
    head_dim: int = 64
    state: int = 16  # of a gated delta net head
    experts: int = 7
    vocab: int = 301


SMALL = Sizes(1)
REAL = Sizes(64, columns=2560, rows=2048, group=12, head_dim=256, state=128, experts=16, vocab=248_320)
MANY_CELLS = 4099  # for what reads a long conversation: several segments of attention


class Case(NamedTuple):
    """`tolerance` is relative to the largest value of an output; 0: the same bits."""

    name: str
    run: Callable
    tolerance: float


CASES: list[Case] = []


def case(tolerance: float = 0.0, **variants):
    """Register a case, or one for each value of a keyword."""

    def register(run):
        name = run.__name__
        if not variants:
            CASES.append(Case(name, run, tolerance))
        for key, values in variants.items():
            for value in values:
                bound = lambda *args, key=key, value=value: run(*args, **{key: value})  # noqa: E731
                CASES.append(Case(f"{name}[{value}]", bound, tolerance))
        return run

    return register


def normal(rng, *shape) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def random_weights(rng, kind: str, matrices: int, rows: int, columns: int) -> np.ndarray:
    """Matrices as they stand in a file: floats, or blocks of random bits with finite scales."""
    if kind in FLOATS:
        values = normal(rng, matrices, rows, columns)
        halves = values.astype(np.float16) if kind == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        return values if kind == "F32" else halves
    layout = packs.KINDS[packs.NUMBERS[kind]]
    blocks = rng.integers(0, 256, (matrices, rows, columns // layout.columns, layout.file_bytes), np.uint8)
    for first in layout.file_halves:  # other bits would be infinite or no number there
        scales = (rng.standard_normal((*blocks.shape[:3], 1)) * 0.1).astype(np.float16)
        blocks[..., first : first + 2] = scales.view(np.uint8).reshape(*blocks.shape[:3], 2)
    return blocks.reshape(matrices, rows, -1)


def pack(ops, rng, kind: str, matrices: int, rows: int, columns: int):
    return ops.pack(packs.NUMBERS[kind], random_weights(rng, kind, matrices, rows, columns), columns)


def in_place(ops, operation, x: np.ndarray, *args) -> list[np.ndarray]:
    """Run operation(x, *args) on a copy of x and return it; NumPy arguments are brought to the backend."""
    array = ops.from_host(x.copy())
    operation(array, *(ops.from_host(a) if isinstance(a, np.ndarray) else a for a in args))
    return [ops.to_host(array)]


def into(ops, operation, shape, *args, dtype=np.float32) -> list[np.ndarray]:
    """Run operation(*args, out) and return out."""
    out = ops.empty(shape, dtype)
    operation(*(ops.from_host(a) if isinstance(a, np.ndarray) else a for a in args), out)
    return [ops.to_host(out)]


# --- weights ------------------------------------------------------------------------------------------------------


@case(kind=KINDS)
def gather_rows(ops, rng, s: Sizes, kind: str):
    weights = pack(ops, rng, kind, 1, s.rows, s.columns)
    return into(ops, ops.gather_rows, (s.n, s.columns), weights, rng.integers(0, s.rows, s.n).astype(np.int32))


@case(2e-6, kind=KINDS)
def matmul(ops, rng, s: Sizes, kind: str):
    weights = pack(ops, rng, kind, 1, s.rows, s.columns)
    return into(ops, ops.matmul, (s.n, s.rows), weights, normal(rng, s.n, s.columns))


@case(2e-6, kind=("F16", "Q4_0", "Q4_K"))
def expert_matmul(ops, rng, s: Sizes, kind: str):
    """Some experts without a row, one with most of them."""
    weights = pack(ops, rng, kind, s.experts, min(s.rows, 640), s.columns)
    chosen = np.sort(np.minimum(rng.integers(0, 2 * s.experts, s.n), s.experts - 2))
    offsets = np.searchsorted(chosen, np.arange(s.experts + 1)).astype(np.int64)
    return into(ops, ops.expert_matmul, (s.n, weights.n_rows), weights, normal(rng, s.n, s.columns), offsets)


# --- rows and heads -----------------------------------------------------------------------------------------------


@case(2e-6)
def rms_norm(ops, rng, s: Sizes):
    x, weight = normal(rng, 2 * s.n, s.columns + 3), normal(rng, 2, s.columns + 3)
    return into(ops, ops.rms_norm, x.shape, x, weight, EPS)


@case(2e-6)
def silu_mul(ops, rng, s: Sizes):
    return into(ops, ops.silu_mul, (s.n, 16), normal(rng, s.n, 16) * 4, normal(rng, s.n, 16))


@case(2e-6)
def sigmoid_mul(ops, rng, s: Sizes):
    gate, x = normal(rng, s.n, 16), normal(rng, s.n, 16)
    return in_place(ops, lambda x, gate: ops.sigmoid_mul(gate, x), x, gate)


@case(2e-6)
def silu_scaled(ops, rng, s: Sizes):
    return in_place(ops, ops.silu_scaled, normal(rng, s.n, 16), np.float32(0.25))


@case()
def add_rows(ops, rng, s: Sizes):
    return in_place(ops, ops.add_rows, normal(rng, s.n, 16), normal(rng, s.n, 16))


@case(2e-6)
def add_scaled_rows(ops, rng, s: Sizes):
    return in_place(ops, ops.add_scaled_rows, normal(rng, s.n, 20), normal(rng, s.n, 1), normal(rng, s.n, 20))


@case()
def add_bias(ops, rng, s: Sizes):
    return in_place(ops, ops.add_bias, normal(rng, 3, s.n), normal(rng, s.n))


@case()
def split_gate(ops, rng, s: Sizes):
    both, shape = ops.from_host(normal(rng, s.n, 3, 2 * s.head_dim)), (s.n, 3, s.head_dim)
    q, gate = ops.empty(shape), ops.empty(shape)
    ops.split_gate(both, q, gate)
    return [ops.to_host(q), ops.to_host(gate)]


def _rope(ops, positions: np.ndarray, half: int):
    tables = [ops.empty((len(positions), half)) for _ in range(2)]
    ops.rope_table(ops.from_host(positions), ops.from_host(1e7 ** (-np.arange(half) / half)), *tables)
    return tables


@case(1e-6)
def rope_table(ops, rng, s: Sizes):
    return [ops.to_host(table) for table in _rope(ops, rng.integers(0, 262_144, s.n), s.head_dim // 8)]


@case(3e-6, paired=(False, True))
def norm_rope_heads(ops, rng, s: Sizes, paired: bool):
    tables = _rope(ops, rng.integers(0, 262_144, s.n), s.head_dim // 8)
    x, weight = normal(rng, s.n, 3, s.head_dim), normal(rng, 1, s.head_dim)
    with_norm = in_place(ops, ops.norm_rope_heads, x, weight, EPS, *tables, paired)
    return with_norm + in_place(ops, ops.norm_rope_heads, x, weight[:0], EPS, *tables, paired)


@case()
def hadamard_heads(ops, rng, s: Sizes):
    return in_place(ops, ops.hadamard_heads, normal(rng, s.n, 3, s.head_dim))


# --- cells and attention ------------------------------------------------------------------------------------------


def layer_cells(ops, s: Sizes, storages, n_cells: int, residency=None):
    """Pools k, k_scale, v, v_scale for n_cells cells."""
    sizes = []
    for storage in storages:
        sizes += [head_bytes(storage, s.head_dim), scale_bytes(storage, s.head_dim)]
    return ops.cells(-(-n_cells // PAGE), s.kv_heads, sizes, residency)


def pool_bytes(ops, pool) -> np.ndarray:
    out = np.empty(math.prod(pool.shape), np.uint8)
    ops.read_bytes(pool, 0, out)
    return out


def fill(ops, rng, storages, pools, first: int, x_shape) -> None:
    for storage, (codes, scales) in zip(storages, (pools[:2], pools[2:]), strict=True):
        ops.append_cells(storage, ops.from_host(normal(rng, *x_shape)), first, codes, scales)


@case(name=("fp16", "int8", "q4_0"))
def append_cells(ops, rng, s: Sizes, name: str):
    """Values of many sizes, zeros, and ties between a largest and a smallest value."""
    storage = STORAGES[name][0]
    sizes = (10.0 ** rng.integers(-6, 3, (s.n, s.kv_heads, 1))).astype(np.float32)
    x = normal(rng, s.n, s.kv_heads, s.head_dim) * sizes
    x[0, 0, :2], x[-1, -1] = (3, -3), 0
    codes, scales = layer_cells(ops, s, STORAGES[name], s.n + 3)[:2]
    ops.append_cells(storage, ops.from_host(x), 3, codes, scales)
    return [pool_bytes(ops, codes), pool_bytes(ops, scales)]


@case(1e-5, name=STORAGES)
def attention(ops, rng, s: Sizes, name: str):
    """The last token alone, then the last five together, over n cells."""
    storages, results = STORAGES[name], []
    pools = layer_cells(ops, s, storages, s.n)
    fill(ops, rng, storages, pools, 0, (s.n, s.kv_heads, s.head_dim))
    q = normal(rng, min(s.n, 5), s.kv_heads * s.group, s.head_dim) * 2
    for queries in (q[-1:], q):
        results += into(ops, lambda q, out: ops.attention(
            *storages, pools[0], pools[1], pools[2], pools[3], q, s.n - q.shape[0], np.float32(s.head_dim**-0.5), out
        ), queries.shape, queries)  # fmt: skip
    return results


@case(1e-5, name=("fp16", "k8v4"))
def attention_selected(ops, rng, s: Sizes, name: str):
    storages = STORAGES[name]
    pools = layer_cells(ops, s, storages, s.n)
    fill(ops, rng, storages, pools, 0, (s.n, s.kv_heads, s.head_dim))
    n_tokens = min(s.n, 3)
    pages = [_some_pages(rng, position) for position in range(s.n - n_tokens, s.n)]
    blocks = np.zeros((n_tokens, max(map(len, pages))), np.int32)
    for token, chosen in enumerate(pages):
        blocks[token, : len(chosen)] = chosen
    counts = np.array([len(chosen) for chosen in pages], np.int64)
    return into(ops, lambda q, blocks, counts, out: ops.attention_selected(
        *storages, pools[0], pools[1], pools[2], pools[3], q, s.n - n_tokens, np.float32(s.head_dim**-0.5), blocks,
        counts, out,
    ), (n_tokens, s.kv_heads * s.group, s.head_dim), normal(rng, n_tokens, s.kv_heads * s.group, s.head_dim), blocks,
        counts)  # fmt: skip


def _some_pages(rng, position: int) -> np.ndarray:
    """Half of the complete pages before a token, and its own."""
    complete = np.flatnonzero(rng.random((position + 1) // PAGE) < 0.5)
    own = [(position + 1) // PAGE] if (position + 1) % PAGE else []
    return np.append(complete, own).astype(np.int32) if len(complete) or own else np.zeros(1, np.int32)


@case(3e-6)
def pool_keys(ops, rng, s: Sizes):
    """From the start, then on from the middle of a block."""
    width = 32
    frequency, weight = ops.from_host(1e7 ** (-np.arange(8) / 8)), ops.from_host(normal(rng, 1, width))
    tail, dead, pooled = ops.zeros((3, width)), ops.zeros(width), ops.zeros((s.n // 4 + 3, width))
    for first, n_tokens in ((0, s.n), (s.n, 5)):
        raw = ops.from_host(normal(rng, n_tokens, width))
        ops.pool_keys(raw, first, tail, dead, weight, EPS, frequency, pooled)
    return [ops.to_host(array) for array in (tail, dead, pooled)]


@case()
def select_blocks(ops, rng, s: Sizes):
    """Whole numbers, so that scores are exact whatever the order of a sum, and equal often."""
    width, keep, n_tokens = 16, 5, 3
    position = 4 * s.n - n_tokens
    queries = rng.integers(-2, 3, (n_tokens, 2, width)).astype(np.float32)
    pooled = rng.integers(-1, 2, (s.n + 1, width)).astype(np.float32)
    blocks, counts = ops.zeros((n_tokens, keep + 1), np.int32), ops.empty(n_tokens, np.int64)
    ops.select_blocks(ops.from_host(queries), ops.from_host(pooled), position, keep, blocks, counts)
    blocks, counts = ops.to_host(blocks), ops.to_host(counts)
    return [counts, *(row[:count] for row, count in zip(blocks, counts, strict=True))]


# --- gated delta net ----------------------------------------------------------------------------------------------


@case(2e-6)
def conv_silu(ops, rng, s: Sizes):
    x, history, weight = normal(rng, s.n, 40), ops.from_host(normal(rng, 3, 40)), normal(rng, 4, 40)
    return [*into(ops, ops.conv_silu, x.shape, x, history, weight), ops.to_host(history)]


@case()
def push_rows(ops, rng, s: Sizes):
    return in_place(ops, ops.push_rows, normal(rng, 9, 33), normal(rng, s.n, 33))


@case(1e-5, grouped=(False, True))
def delta_net(ops, rng, s: Sizes, grouped: bool):
    k_heads, v_heads, size = 2, 4, s.state
    n_tokens = min(s.n, 33)
    mixed = normal(rng, n_tokens, (2 * k_heads + v_heads) * size)
    alpha, beta = normal(rng, n_tokens, v_heads), normal(rng, n_tokens, v_heads)
    a, dt_bias = -np.exp(normal(rng, v_heads)), normal(rng, v_heads)
    state = ops.from_host(normal(rng, v_heads, size, size))
    args = (mixed, alpha, beta, a, dt_bias, k_heads, grouped, state)
    return [*into(ops, ops.delta_net, (n_tokens, v_heads, size), *args), ops.to_host(state)]


@case(3e-6, silu=(False, True))
def norm_gate_heads(ops, rng, s: Sizes, silu: bool):
    x, weight, z = normal(rng, s.n, 3, s.state), normal(rng, 1, s.state), normal(rng, s.n, 3 * s.state)
    return in_place(ops, ops.norm_gate_heads, x, weight, EPS, z, silu)


# --- hyper-connections --------------------------------------------------------------------------------------------


@case(2e-6)
def mix_streams(ops, rng, s: Sizes):
    return into(ops, ops.mix_streams, (s.n, 33), normal(rng, s.n, 4 * 33), normal(rng, s.n, 4 * 33))


@case(2e-6)
def inject_streams(ops, rng, s: Sizes):
    return in_place(ops, ops.inject_streams, normal(rng, s.n, 4, 33), normal(rng, s.n, 4), normal(rng, s.n, 33))


@case()
def repeat_streams(ops, rng, s: Sizes):
    return into(ops, ops.repeat_streams, (s.n, 4, 33), normal(rng, s.n, 33))


@case()
def add_to_streams(ops, rng, s: Sizes):
    each = in_place(ops, ops.add_to_streams, normal(rng, s.n, 4, 33), normal(rng, s.n, 33))
    return each + in_place(ops, ops.add_to_streams, normal(rng, s.n, 4, 33), normal(rng, 1, 33))


# --- experts ------------------------------------------------------------------------------------------------------


@case(2e-6)
def route(ops, rng, s: Sizes):
    """Two experts with equal logits among them: the lower one comes first."""
    logits, used = normal(rng, s.n, s.experts), min(s.experts, 3)
    logits[:, 1] = logits[:, s.experts - 1]
    weights, experts = ops.empty((s.n, used)), ops.empty((s.n, used), np.int32)
    ops.route(ops.from_host(logits), weights, experts)
    return [ops.to_host(weights), ops.to_host(experts)]


@case()
def order_by_expert(ops, rng, s: Sizes):
    experts = ops.from_host(rng.integers(0, s.experts - 1, (s.n, 3)).astype(np.int32))
    order, offsets = ops.empty(3 * s.n, np.int64), ops.empty(s.experts + 1, np.int64)
    ops.order_by_expert(experts, s.experts, order, offsets)
    return [ops.to_host(order), ops.to_host(offsets)]


@case()
def gather_assigned(ops, rng, s: Sizes):
    return into(ops, ops.gather_assigned, (3 * s.n, 33), normal(rng, s.n, 33), rng.permutation(3 * s.n))


@case(2e-6)
def combine_experts(ops, rng, s: Sizes):
    y, order, weights = normal(rng, 3 * s.n, 33), rng.permutation(3 * s.n), normal(rng, s.n, 3)
    return into(ops, ops.combine_experts, (s.n, 33), y, order, weights)


# --- n-gram embeddings, the choice of a token ---------------------------------------------------------------------


@case(3e-6)
def ngram_gate(ops, rng, s: Sizes):
    key, query, value = normal(rng, s.n, 4, 48), normal(rng, s.n, 4, 48), normal(rng, s.n, 48)
    key[0, 0] = 0
    return into(ops, ops.ngram_gate, key.shape, key, query, value)


@case(2e-6)
def ngram_conv(ops, rng, s: Sizes):
    history, residual = ops.from_host(normal(rng, 9, 40)), ops.from_host(normal(rng, s.n, 40))
    normed, weight, gated = (ops.from_host(normal(rng, *shape)) for shape in ((s.n, 40), (4, 40), (s.n, 40)))
    ops.ngram_conv(normed, history, weight, 3, gated, residual)
    return [ops.to_host(residual), ops.to_host(history)]


@case(2e-6)
def greedy(ops, rng, s: Sizes):
    """Rows of rounded logits, so that several are the largest."""
    logits = np.round(normal(rng, min(s.n, 33), s.vocab) * 4) / 4
    ids, shares = ops.greedy_with_share(ops.from_host(logits))
    return [ops.greedy(ops.from_host(logits)), ids, shares]


@case(2e-6)
def greedy_of_no_number(ops, rng, s: Sizes):
    """Rows that hold NaN or an infinity, alone or everywhere, give -1; one of greatest finite values does not."""
    logits = normal(rng, 7, s.vocab)
    logits[0, s.vocab // 2], logits[1, -1], logits[2, 0] = np.nan, np.inf, -np.inf
    logits[3:6] = np.array([np.nan, np.inf, -np.inf], np.float32)[:, None]
    logits[6, 3] = 2.9e38
    ids, shares = ops.greedy_with_share(ops.from_host(logits[:6]))
    return [ops.greedy(ops.from_host(logits)), ids, shares]


# --- running ------------------------------------------------------------------------------------------------------


def largest_error(expected: list[np.ndarray], found: list[np.ndarray], tolerance: float) -> float:
    """The largest difference relative to an output's largest value; whole numbers that differ are infinitely wrong."""
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return math.inf
        if a.dtype.kind != "f" or not tolerance:
            worst = max(worst, 0.0 if np.array_equal(a, b) else math.inf)
        elif a.size:
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30)))
    return worst


def run_case(item: Case, ops, sizes: Sizes, seed: int = 0) -> list[np.ndarray]:
    """The outputs of a case on a backend."""
    return item.run(ops, np.random.default_rng([seed, *item.name.encode()]), sizes)


def residency_round(ops, rng, s: Sizes, ring: bool) -> None:
    """Append, read densely and by lists, and settle a layer that keeps 4 of its 12 pages on the device."""
    storages = STORAGES["int8"]
    pools = layer_cells(ops, s, storages, 48, Residency(4, ring))
    fill(ops, rng, storages, pools, 0, (41, s.kv_heads, s.head_dim))
    fill(ops, rng, storages, pools, 41, (2, s.kv_heads, s.head_dim))
    q, out = (ops.from_host(normal(rng, 2, s.kv_heads * s.group, s.head_dim)) for _ in range(2))
    ops.attention(*storages, *pools, q, 41, EPS, out)
    lists = ops.from_host(np.array([[0, 10], [3, 10]], np.int32)), ops.from_host(np.array([2, 2], np.int64))
    ops.attention_selected(*storages, *pools, q, 41, EPS, *lists, out)
    ops.write_bytes(pools[0], 0, np.zeros(16, np.uint8))
    ops.settle(pools[0], 43)
