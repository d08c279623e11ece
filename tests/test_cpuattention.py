"""Cells and attention on the CPU, each against its plain float64 form; neither cuts nor threads change a bit.

Owns: the evidence for cells.py, cpuattention.py and the block indexer. Refuses to know: layers, files, whole models.
Invariant: a plain form stands beside its test or comes from reference.py, and shares nothing with the kernel.
"""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

import cpuattention
import kernels_cpu
import reference
from cells import CELL_F16, CELL_F32, CELL_INT8, CELL_Q4_0, FORMATS, PAGE, SCALE_GROUP, head_bytes, scale_bytes
from given_kernels import normal, rng_for

EPS = np.float32(1e-6)


# --- K/V cells ----------------------------------------------------------------------------------------------------

STORAGES = {"fp16": CELL_F16, "int8": CELL_INT8, "q4_0": CELL_Q4_0, "exact": CELL_F32}


class Cells:
    """One pool of K or V, and what a reader of its bytes finds in it, by NumPy and the gguf library."""

    def __init__(self, storage: int, n_cells: int, heads: int, width: int):
        pages = -(-n_cells // PAGE)
        self.storage, self.width = storage, width
        self.codes = np.zeros((pages, heads, PAGE, head_bytes(storage, width)), np.uint8)
        self.scales = np.zeros((pages, heads, PAGE, scale_bytes(storage, width)), np.uint8)

    def append(self, x: np.ndarray, first: int = 0) -> "Cells":
        cpuattention.append_cells(self.storage, x, first, self.codes, self.scales)
        return self

    def values(self) -> np.ndarray:
        """float32 [cells, heads, D]."""
        codes = self.codes.reshape(-1, self.codes.shape[-1])
        if self.storage == CELL_F16:
            flat = codes.view(np.float16).astype(np.float32)
        elif self.storage == CELL_F32:
            flat = codes.view(np.float32)
        elif self.storage == CELL_INT8:
            scales = self.scales.reshape(len(codes), -1).view(np.float16).astype(np.float32)
            flat = codes.view(np.int8) * np.repeat(scales, SCALE_GROUP, axis=1)
        else:
            flat = dequantize(codes, GGMLQuantizationType.Q4_0)
        pages, heads = self.codes.shape[:2]
        return flat.reshape(pages, heads, PAGE, self.width).swapaxes(1, 2).reshape(-1, heads, self.width)


def awkward(rng, n_cells: int, heads: int, width: int) -> np.ndarray:
    """K or V of many sizes, with zeros, ties between a largest and a smallest value, and tiny groups."""
    x = normal(rng, n_cells, heads, width) * (10.0 ** rng.integers(-8, 3, (n_cells, heads, 1))).astype(np.float32)
    x[0] = 0
    x[1, :, :2] = [3, -3]
    x[2, :, 0], x[2, :, 1:] = 0.5, np.float32(0.25)
    return x


def as_stored(x: np.ndarray, name: str) -> np.ndarray:
    """`x` as the reference rounds it, without the rotation, which is another kernel's."""
    if name == "exact":
        return x
    if name == "q4_0":
        return reference.round_q4_0(x.reshape(-1, 32)).reshape(x.shape)
    return reference.round_kv(x, name)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", STORAGES)
def test_cells_read_back_exactly_as_the_format_rounds_them(name, width):
    x = awkward(rng_for(name, width), 11, 2, width)
    cells = Cells(STORAGES[name], 14, 2, width).append(x, 3)
    values = cells.values()
    np.testing.assert_array_equal(values[3:14], as_stored(x, name))
    assert not values[:3].any()
    assert not values[14:].any()


@pytest.mark.parametrize("name", STORAGES)
def test_cells_may_be_appended_in_any_pieces_and_over_older_ones(name):
    rng = rng_for(name, "pieces")
    x, older = awkward(rng, 13, 2, 64), awkward(rng, 13, 2, 64)
    whole = Cells(STORAGES[name], 13, 2, 64).append(x)
    pieces = Cells(STORAGES[name], 13, 2, 64).append(older)
    for first, last in ((0, 1), (1, 6), (6, 8), (8, 13)):
        pieces.append(x[first:last], first)
    np.testing.assert_array_equal(pieces.codes, whole.codes)
    np.testing.assert_array_equal(pieces.scales, whole.scales)


@pytest.mark.parametrize("name", STORAGES)
def test_attention_over_one_cell_is_its_value_to_the_bit(name):
    rng = rng_for(name, "single")
    x, q = awkward(rng, 8, 3, 64), normal(rng, 1, 6, 64)
    for cell in x:
        pool, out = Cells(STORAGES[name], 4, 3, 64).append(cell[None]), np.empty_like(q)
        cpuattention.attention(
            pool.storage, pool.storage, pool.codes, pool.scales, pool.codes, pool.scales, q, 0, np.float32(1), out
        )
        np.testing.assert_array_equal(out[0], np.repeat(pool.values()[0], 2, axis=0))


# --- attention ----------------------------------------------------------------------------------------------------

GROUPS = [(2, 1), (2, 3), (1, 8)]  # kv heads, query heads a kv head
WIDTH = 64
SCALE = np.float32(WIDTH**-0.5)
# Score errors of a few 1e-7 times |score| pass through the exponential into weights that sum to 1.
ATTENTION_ERROR = 3e-6


class Attended:
    """Random K and V of `n_cells` cells in one format, and queries of every cell."""

    def __init__(self, name: str, n_cells: int, n_kv: int, group: int):
        rng = rng_for(name, n_cells, n_kv, group)
        storages = (CELL_F32, CELL_F32) if name == "exact" else FORMATS[name][1:]
        self.k, self.v = (Cells(s, n_cells, n_kv, WIDTH).append(normal(rng, n_cells, n_kv, WIDTH)) for s in storages)
        self.q = normal(rng, n_cells, n_kv * group, WIDTH) * 2
        self.group = group
        self.pools = (*storages, self.k.codes, self.k.scales, self.v.codes, self.v.scales)

    def dense(self, first: int, last: int) -> np.ndarray:
        """The kernel's result for the tokens first..last-1 in one call."""
        out = np.full_like(self.q[first:last], np.nan)
        cpuattention.attention(*self.pools, self.q[first:last], first, SCALE, out)
        return out

    def selected(self, first: int, last: int, pages: list[np.ndarray]) -> np.ndarray:
        blocks, counts = np.full((last - first, max(map(len, pages))), 9999, np.int32), np.empty(last - first, np.int64)
        for t, chosen in enumerate(pages):
            blocks[t, : len(chosen)], counts[t] = chosen, len(chosen)
        out = np.full_like(self.q[first:last], np.nan)
        cpuattention.attention_selected(*self.pools, self.q[first:last], first, SCALE, blocks, counts, out)
        return out

    def plain(self, token: int, cells: np.ndarray) -> np.ndarray:
        """One token's attention over `cells` in float64."""
        keys, values = (
            np.repeat(pool.values()[cells].astype(np.float64), self.group, axis=1) for pool in (self.k, self.v)
        )
        scores = np.einsum("hd,chd->hc", self.q[token].astype(np.float64), keys) * SCALE
        return np.einsum("hc,chd->hd", reference.softmax(scores), values)


@pytest.mark.parametrize("n_cells", [1, 3, 4, 5, 255, 256, 257, 1025])
@pytest.mark.parametrize(("n_kv", "group"), GROUPS)
def test_dense_attention(n_kv, group, n_cells, threads):
    case = Attended("exact", n_cells, n_kv, group)
    first = max(0, n_cells - 9)
    together = case.dense(first, n_cells)
    for token in range(first, n_cells):
        expected = case.plain(token, np.arange(token + 1))
        np.testing.assert_allclose(together[token - first], expected, rtol=0, atol=ATTENTION_ERROR)
        np.testing.assert_array_equal(case.dense(token, token + 1)[0], together[token - first])


@pytest.mark.parametrize("name", [*FORMATS, "exact"])
def test_attention_reads_every_format(name):
    case = Attended(name, 70, 2, 3)
    together = case.dense(0, 70)
    for token in range(70):
        expected = case.plain(token, np.arange(token + 1))
        np.testing.assert_allclose(together[token], expected, rtol=0, atol=ATTENTION_ERROR)
        np.testing.assert_array_equal(case.dense(token, token + 1)[0], together[token])


@pytest.mark.parametrize("name", ["fp16", "k8v4"])
def test_attention_is_the_same_bits_however_a_prompt_is_cut(name, threads):
    case = Attended(name, 530, 2, 3)
    whole = case.dense(230, 530)
    for size in (1, 3, 7, 8, 9, 16, 33):
        parts = [case.dense(first, min(first + size, 530)) for first in range(230, 530, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("n_cells", [1, 3, 4, 5, 255, 256, 257, 1025])
@pytest.mark.parametrize(("n_kv", "group"), GROUPS)
def test_attention_over_chosen_pages(n_kv, group, n_cells, threads):
    case, rng = Attended("exact", n_cells, n_kv, group), rng_for(n_cells)
    first = max(0, n_cells - 5)
    pages = []
    for token in range(first, n_cells):
        open_page, complete = (token + 1) // 4, rng.random((token + 1) // 4) < 0.4
        chosen = np.flatnonzero(complete).tolist() + ([open_page] if (token + 1) % 4 else [])
        pages.append(np.array(chosen or [0], np.int32))
    together = case.selected(first, n_cells, pages)
    for token, chosen in zip(range(first, n_cells), pages, strict=True):
        cells = (chosen[:, None] * 4 + np.arange(4)).reshape(-1)
        expected = case.plain(token, cells[cells <= token])
        np.testing.assert_allclose(together[token - first], expected, rtol=0, atol=ATTENTION_ERROR)
        np.testing.assert_array_equal(case.selected(token, token + 1, [chosen])[0], together[token - first])


@pytest.mark.parametrize("name", ["exact", "int8"])
def test_choosing_every_page_is_dense_attention_to_the_bit(name):
    case = Attended(name, 522, 2, 3)
    pages = [np.arange(token // 4 + 1, dtype=np.int32) for token in range(500, 522)]
    np.testing.assert_array_equal(case.selected(500, 522, pages), case.dense(500, 522))


def test_cells_behind_a_token_are_never_read():
    case = Attended("exact", 300, 2, 3)
    before = case.dense(250, 257)
    case.k.codes[65:], case.v.codes[65:] = 255, 255  # float32 of all ones is not a number
    case.k.codes[64, :, 1:], case.v.codes[64, :, 1:] = 255, 255
    np.testing.assert_array_equal(case.dense(250, 257), before)
    pages = [np.array([3, token // 4], np.int32) for token in range(250, 257)]
    assert np.isfinite(case.selected(250, 257, pages)).all()


def test_large_scores_do_not_overflow():
    case = Attended("exact", 300, 1, 8)
    case.q *= 1e4
    together = case.dense(295, 300)
    for token in range(295, 300):
        np.testing.assert_allclose(together[token - 295], case.plain(token, np.arange(token + 1)), rtol=0, atol=2e-3)


# --- the block indexer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 32, 128])
def test_pooled_keys(width):
    rng, half = rng_for("pool", width), 8
    raw, weight, frequency = normal(rng, 23, width), normal(rng, 1, width), 1e7 ** (-np.arange(half) / half)
    tail, dead, pooled = np.zeros((3, width), np.float32), np.zeros(width, np.float32), np.zeros((7, width), np.float32)
    kernels_cpu.pool_keys(raw, 0, tail, dead, weight, EPS, frequency, pooled)
    means = raw[:20].astype(np.float64).reshape(5, 4, width).mean(axis=1)
    expected = reference.rms(means, weight[0], EPS)
    turned = (expected[:, :half] + 1j * expected[:, half : 2 * half]) * np.exp(
        1j * np.arange(0, 20, 4)[:, None] * frequency
    )
    expected[:, : 2 * half] = np.concatenate([turned.real, turned.imag], axis=1)
    np.testing.assert_allclose(pooled[:5], expected, rtol=0, atol=2e-6)
    assert not pooled[5:].any()
    np.testing.assert_array_equal(tail, raw[20:])
    np.testing.assert_allclose(dead, reference.rms(raw[0].astype(np.float64), weight[0], EPS), rtol=1e-6)
    for size in (1, 2, 3, 5, 22):
        again = np.zeros_like(tail), np.zeros_like(dead), np.zeros_like(pooled)
        for first in range(0, 23, size):
            piece, (tails, deads, pools) = raw[first : first + size], again
            kernels_cpu.pool_keys(piece, first, tails, deads, weight, EPS, frequency, pools)
        for got, whole in zip(again, (tail, dead, pooled), strict=True):
            np.testing.assert_array_equal(got, whole)


def chosen_blocks(queries, pooled, position, keep):
    blocks, counts = np.full((len(queries), keep + 1), -1, np.int32), np.empty(len(queries), np.int64)
    cpuattention.select_blocks(queries, pooled, position, keep, blocks, counts)
    return [row[:count].tolist() for row, count in zip(blocks, counts, strict=True)]


def expected_blocks(queries, pooled, position, keep):
    """Scores in float64 of whole numbers are exact, and so are those of the kernel: ties are real ones."""
    for t in range(len(queries)):
        complete, open_block = divmod(position + t + 1, 4)
        scores = np.maximum(queries[t].astype(np.float64) @ pooled[:complete].T.astype(np.float64), 0).sum(axis=0)
        yield reference.top_blocks(scores, keep).tolist() + ([complete] if open_block else [])


@pytest.mark.parametrize("levels", [1, 2, 5, 100])
@pytest.mark.parametrize("keep", [1, 4, 33])
def test_best_blocks_are_exact_and_ties_go_to_the_lowest(keep, levels, threads):
    rng = rng_for(keep, levels)
    queries = rng.integers(-levels, levels, (4 * keep + 40, 3, 32)).astype(np.float32)
    pooled = rng.integers(-levels, levels, (keep + 12, 32)).astype(np.float32)
    expected = list(expected_blocks(queries, pooled, 0, keep))
    assert chosen_blocks(queries, pooled, 0, keep) == expected
    for first in (0, 4 * keep - 2, 4 * keep + 3, 4 * keep + 37):
        part = queries[first : first + 3]
        assert chosen_blocks(part, pooled, first, keep) == expected[first : first + 3]


def test_equal_scores_keep_the_first_blocks_beside_the_open_one():
    queries, pooled = np.zeros((1, 2, 16), np.float32), np.ones((10, 16), np.float32)
    for position, expected in ((0, [0]), (3, [0]), (4, [0, 1]), (15, [0, 1, 2]), (16, [0, 1, 2, 4]), (19, [0, 1, 2])):
        assert chosen_blocks(queries, pooled, position, 3) == [expected]
