"""Forward passes against transformers and the float64 reference; cuts, speculation and rewinds to the bit.

Owns: the evidence that a model computes what it should, and the same bits however its tokens arrive. Refuses to know:
sampling, sessions, files of conversations. Invariant: "the same" means every byte that a later token could read:
tokens, running state, cells up to the length, pooled keys. Read next: test_generation.py.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

from cells import EXACT, FORMATS, PAGE
from given_kernels import CPU
from kvcache import Cache
from model import Model
from modelweights import load_model
from reference import ReferenceModel

DATA = Path(__file__).parent / "data" / "model"
MODELS = sorted(path.stem for path in DATA.glob("*.npz"))
HYBRID = ["qwen35", "qwen35moe", "qwen3next", "qwen4exp", "qwen4exp-8layers"]
# The fixtures' logits come from float32 as well; both stray from float64 by up to 3e-5 where small recurrent outputs
# are normed, and logits reach 9.
TOLERANCE = 1e-4
ROOM = 320  # cells


@functools.cache
def load(name: str) -> Model:
    file = load_model(DATA / f"{name}.gguf", CPU, log=lambda line: None)
    return Model(file.config, file.weights, CPU)


@functools.cache
def fixture(name: str):
    """Token ids and the logits of transformers."""
    data = np.load(DATA / f"{name}.npz")
    return data["ids"].astype(np.int32), data["logits"]


def fresh(model: Model, cell_format=EXACT) -> Cache:
    return Cache(model.config.cache_shape(ROOM, cell_format), CPU)


def read(model: Model, cache: Cache, ids, size: int | None = None) -> np.ndarray:
    """Append `ids` in pieces of `size`; the residual of all of them."""
    size = size or len(ids)
    return np.concatenate([model.append(cache, ids[at : at + size]).residual for at in range(0, len(ids), size)])


def cells(pool, n_tokens: int):
    """Bytes of a pool's first cells, [cell, head, ...] for K, V and their scales."""
    for part in (pool.k, pool.v, pool.k_scale, pool.v_scale):
        pages, heads, page_size, size = part.shape
        yield part.swapaxes(1, 2).reshape(pages * page_size, heads, size)[:n_tokens].copy()


def held(cache: Cache) -> list[np.ndarray]:
    """Every byte that reading another token could see, the draft layer's cells apart."""
    n = cache.n_tokens
    arrays = [cache.ids.copy(), *(array.copy() for array in cache.state.arrays)]
    for pool in cache.pools:
        arrays += [*cells(pool, n), pool.pooled[: n // PAGE + 1].copy()]
    return arrays


def assert_same(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# --- against other implementations --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    model, (ids, expected) = load(name), fixture(name)
    logits = model.logits(read(model, fresh(model), ids))
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", HYBRID)
def test_what_a_pass_leaves_behind_is_that_of_the_reference(name):
    model, (ids, _) = load(name), fixture(name)
    cache = fresh(model)
    residual = read(model, cache, ids)
    run = ReferenceModel(DATA / f"{name}.gguf").run(ids)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE)
    close(residual, run.residual)
    for index, layer in enumerate(run.gdn):
        close(cache.state.recurrent(index), run.gdn[layer])
        close(cache.state.conv(index), run.conv[layer])
    for pool, layer in zip(cache.pools, run.keys, strict=True):
        keys, values, *_ = cells(pool, len(ids))
        close(keys.view(np.float32), run.keys[layer])
        close(values.view(np.float32), run.values[layer])
    for index, layer in enumerate(run.pooled):
        close(cache.pools[index].pooled[: len(ids) // PAGE], run.pooled[layer])
        close(cache.state.tail(index)[: len(ids) % PAGE], run.raw_keys[layer][len(ids) // PAGE * PAGE :])
    if run.ple_history is not None:
        close(cache.state.ple, run.ple_history.reshape(-1))


def test_a_context_of_several_segments_is_that_of_the_reference():
    model = load("qwen4exp")
    ids = np.random.default_rng(1).integers(0, 96, 300).astype(np.int32)
    logits = model.logits(read(model, fresh(model), ids, 77))
    # Recurrent states have folded four times as many tokens as in the fixtures.
    assert np.abs(logits - ReferenceModel(DATA / "qwen4exp.gguf").logits(ids)).max() < 2 * TOLERANCE


# A K or V that float32 and float64 put on two sides of a rounding boundary would differ by a whole step of the format.
# None of these tokens has one, so the bound is the one of exact K/V, below what any of the formats costs.
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("name", ["qwen35", "qwen4exp"])
def test_logits_over_a_stored_format_are_those_of_the_reference_with_its_rounding(name, kv):
    model, (ids, _) = load(name), fixture(name)
    logits = model.logits(read(model, fresh(model, FORMATS[kv]), ids))
    assert np.abs(logits - ReferenceModel(DATA / f"{name}.gguf", kv=kv).logits(ids)).max() < TOLERANCE


@pytest.mark.parametrize("factors", [None, np.linspace(1, 3, 8, dtype=np.float32)])
def test_scaled_rotary_positions(factors, monkeypatch):
    plain, (ids, _) = load("llama"), fixture("llama")
    config = dataclasses.replace(plain.config, rope_factor=2.5)
    weights = dataclasses.replace(plain.weights, rope_factors=factors)
    model, divisor = Model(config, weights, CPU), 2.5 * (1 if factors is None else factors.astype(np.float64))
    assert config.n_rot == 16

    def rope(self, x, positions):
        angle = positions[..., None] * self.rope_base ** (-np.arange(8) / 8) / divisor
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    monkeypatch.setattr(ReferenceModel, "_rope", rope)
    expected = ReferenceModel(DATA / "llama.gguf").logits(ids)
    assert np.abs(model.logits(read(model, fresh(model), ids)) - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3", "qwen4exp"])
def test_a_control_vector_is_added_behind_each_layer(name, monkeypatch):
    plain, (ids, _) = load(name), fixture(name)
    directions = (
        np.random.default_rng(2).standard_normal((plain.config.n_layers, plain.config.n_embd)).astype(np.float32)
    )
    model, block = Model(plain.config, plain.weights, CPU, directions), ReferenceModel._block

    def steered(self, run, layer, mixer):
        block(self, run, layer, mixer)
        run.residual = run.residual + directions[layer]

    monkeypatch.setattr(ReferenceModel, "_block", steered)
    expected = ReferenceModel(DATA / f"{name}.gguf").logits(ids)
    assert np.abs(model.logits(read(model, fresh(model), ids)) - expected).max() < TOLERANCE


# --- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_may_be_cut_anywhere(name):
    model, (ids, _) = load(name), fixture(name)
    whole = fresh(model)
    residual = read(model, whole, ids)
    for size in (1, 3, 4, 7):
        cache = fresh(model)
        np.testing.assert_array_equal(read(model, cache, ids, size), residual)
        assert_same(held(cache), held(whole))


@pytest.mark.parametrize("kv", FORMATS)
def test_a_prompt_may_be_cut_in_every_format(kv):
    model, (ids, _) = load("qwen4exp"), fixture("qwen4exp")
    whole, cache = (fresh(model, FORMATS[kv]) for _ in range(2))
    residual = read(model, whole, ids[:45])
    np.testing.assert_array_equal(read(model, cache, ids[:45], 4), residual)
    assert_same(held(cache), held(whole))


@pytest.mark.parametrize("name", ["qwen4exp", "qwen3moe"])
def test_a_token_behind_several_segments_has_the_bits_of_a_prompt(name):
    model = load(name)
    ids = np.random.default_rng(3).integers(0, 96, 275).astype(np.int32)
    whole, cache = fresh(model), fresh(model)
    residual = read(model, whole, ids)
    read(model, cache, ids[:250])
    np.testing.assert_array_equal(read(model, cache, ids[250:], 1), residual[250:])
    assert_same(held(cache), held(whole))


@pytest.mark.parametrize("start", [0, 1, 30, 35])
@pytest.mark.parametrize("name", ["llama", "qwen3next", "qwen4exp"])
def test_committing_some_of_a_window_is_reading_just_those(name, start):
    model, (ids, _) = load(name), fixture(name)
    plain = fresh(model)
    if start:
        read(model, plain, ids[:start])
    before = held(plain)
    for n_window in range(1, 6):
        for n_keep in range(n_window + 1):
            cache = fresh(model)
            if start:
                read(model, cache, ids[:start])
            window = ids[start : start + n_window].copy()
            window[n_keep:] = (window[n_keep:] + 17) % 90
            speculated = model.speculate(cache, window)
            assert cache.n_tokens == start
            assert_same(held(cache)[: 1 + len(cache.state.arrays)], before[: 1 + len(cache.state.arrays)])
            model.commit(cache, speculated, n_keep)
            expected = fresh(model)
            residual = read(model, expected, ids[: start + n_keep]) if start + n_keep else speculated.residual[:0]
            np.testing.assert_array_equal(speculated.residual[:n_keep], residual[start:])
            assert_same(held(cache), held(expected))


def test_windows_one_after_the_other_are_plain_decoding():
    for name in HYBRID:
        model, (ids, _) = load(name), fixture(name)
        plain, cache, keeps = fresh(model), fresh(model), [2, 1, 4, 3, 5, 1, 1, 3, 2]
        expected = read(model, plain, ids[: sum(keeps)], 1)
        for at, n_keep in zip(np.cumsum([0, *keeps]), keeps, strict=False):
            window = ids[at : at + 5].copy()
            window[n_keep:] = (window[n_keep:] + 29) % 90
            speculated = model.speculate(cache, window)
            np.testing.assert_array_equal(speculated.residual[:n_keep], expected[at : at + n_keep])
            model.commit(cache, speculated, n_keep)
        assert_same(held(cache), held(plain))


@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen4exp", "qwen4exp-8layers"])
def test_a_rewind_at_any_place_in_a_page_is_a_fresh_run(name):
    model, (ids, _) = load(name), fixture(name)
    others = (ids[::-1].copy() + 1) % 90
    for position in (1, 2, 3, 4, 33, 34, 35, 36):
        cache, plain = fresh(model), fresh(model)
        read(model, cache, ids[:position])
        snapshot = cache.capture()
        read(model, cache, ids[position : position + 11])
        cache.rewind(snapshot)
        assert cache.n_tokens == position
        expected = read(model, plain, np.concatenate([ids[:position], others[:9]]))
        np.testing.assert_array_equal(read(model, cache, others[:9]), expected[position:])
        assert_same(held(cache), held(plain))


def test_a_snapshot_serves_more_than_once_and_so_does_an_older_one():
    model, (ids, _) = load("qwen4exp"), fixture("qwen4exp")
    cache = fresh(model)
    snapshots = []
    for first in range(0, 36, 9):
        read(model, cache, ids[first : first + 9])
        snapshots.append((cache.capture(), held(cache)))
    for snapshot, expected in reversed(snapshots):
        for _ in range(2):
            cache.rewind(snapshot)
            assert_same(held(cache), expected)
            read(model, cache, (ids[40:47] + 3) % 90)


def test_an_emptied_cache_is_a_new_one():
    model, (ids, _) = load("qwen4exp"), fixture("qwen4exp")
    used, new = fresh(model), fresh(model)
    read(model, used, ids[::-1].copy())
    used.zero()
    assert used.n_tokens == len(used.ids) == 0
    np.testing.assert_array_equal(read(model, used, ids), read(model, new, ids))
    assert_same(held(used), held(new))


def test_tokens_that_do_not_fit_are_refused_and_nothing_changes():
    model, (ids, _) = load("qwen4exp"), fixture("qwen4exp")
    cache = Cache(model.config.cache_shape(22, EXACT), CPU)
    assert cache.shape.n_cells == 24
    read(model, cache, ids[:20])
    before = held(cache)
    for one_pass in (model.append, model.speculate):
        with pytest.raises(ValueError, match="20 \\+ 5 tokens do not fit a cache of 24 cells"):
            one_pass(cache, ids[20:25])
        assert_same(held(cache), before)
    read(model, cache, ids[20:24])


# --- the draft layer ----------------------------------------------------------------------------------------------


def test_drafts_are_those_of_the_reference_and_of_any_cut():
    model, (ids, _) = load("qwen4exp"), fixture("qwen4exp")
    cache = fresh(model)
    residual = read(model, cache, ids)
    drafted = model.draft(cache, residual[:-1], ids[1:], 0)
    expected = ReferenceModel(DATA / "qwen4exp.gguf").draft(residual[:-1], ids[1:])
    np.testing.assert_allclose(drafted, expected.residual, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(model.draft_logits(drafted), expected.logits, rtol=0, atol=TOLERANCE)
    in_pieces, n = fresh(model), len(ids) - 1
    pieces = [
        model.draft(in_pieces, residual[a : min(a + 7, n)], ids[a + 1 : min(a + 8, n + 1)], a) for a in range(0, n, 7)
    ]
    np.testing.assert_array_equal(np.concatenate(pieces), drafted)
    for one, other in zip(cells(in_pieces.draft_pool, n), cells(cache.draft_pool, n), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_chain_of_drafts_goes_on_from_its_own_residual():
    model, (ids, _) = load("qwen4exp"), fixture("qwen4exp")
    cache, oracle = fresh(model), ReferenceModel(DATA / "qwen4exp.gguf")
    trunk = read(model, cache, ids[:30])
    rows, following = model.draft(cache, trunk, ids[1:31], 0), ids[1:31]
    inputs = trunk.astype(np.float64)
    for cell in range(30, 34):
        token = model.draft_logits(rows[-1:])[0].argmax().astype(np.int32)
        expected = oracle.draft(inputs, following)
        assert token == expected.logits[-1].argmax()
        inputs, following = np.concatenate([inputs, expected.residual[-1:]]), np.append(following, token)
        rows = model.draft(cache, rows[-1:], following[-1:], cell)
    np.testing.assert_allclose(rows, oracle.draft(inputs, following).residual[-1:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kv", FORMATS)
def test_drafting_never_touches_the_trunk(kv):
    model, (ids, _) = load("qwen4exp"), fixture("qwen4exp")
    cache = fresh(model, FORMATS[kv])
    residual = read(model, cache, ids[:41])
    assert cache.draft_pool.format == FORMATS["int8" if kv == "k8v4" else kv]
    before, written = held(cache), [part.copy() for part in cells(cache.draft_pool, 41)]
    rows = model.draft(cache, residual, ids[1:42], 0)
    for cell in range(41, 45):
        rows = model.draft(cache, rows[-1:], ids[cell : cell + 1], cell)
    assert_same(held(cache), before)
    assert not any(part.any() for part in written)
    assert all(part.any() for part in cells(cache.draft_pool, 45) if part.size)
    drafted = [part.copy() for part in cells(cache.draft_pool, 45)]
    read(model, cache, ids[41:50])
    assert_same(list(cells(cache.draft_pool, 45)), drafted)


@pytest.mark.parametrize("kv", ["fp16", "int8", "k8v4"])
def test_drafts_over_a_stored_format_are_those_of_the_reference(kv):
    model, (ids, _) = load("qwen4exp"), fixture("qwen4exp")
    cache = fresh(model, FORMATS[kv])
    residual = read(model, cache, ids)
    logits = model.draft_logits(model.draft(cache, residual[:-1], ids[1:], 0))
    expected = ReferenceModel(DATA / "qwen4exp.gguf", kv=kv).draft(residual[:-1], ids[1:]).logits
    assert np.abs(logits - expected).max() < TOLERANCE
