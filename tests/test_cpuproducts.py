"""Packs and products with them, each against its plain form; neither tiling nor threads change a bit.

Owns: the evidence for packs.py, cpudecode.py and cpuproducts.py. Refuses to know: layers, files, whole models.
Invariant: a plain form is made by the gguf library or stands beside its test, and shares nothing with the kernel.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_cases import FLOATS, KINDS, random_weights
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

import backend
import cpuproducts as ops
import cpuunits
import kernels_cpu
import packs
from cpuproducts import Pack
from given_kernels import ROUNDING, normal, rng_for
from modelfile import open_gguf

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "model"


def plain(kind: str, raw: np.ndarray) -> np.ndarray:
    """Matrices as they stand in a file in float32, by the gguf library."""
    matrices = raw.reshape(-1, raw.shape[-1])
    stored = matrices.view(np.uint8) if kind == "BF16" else matrices
    return dequantize(stored, GGMLQuantizationType[kind]).astype(np.float32).reshape(*raw.shape[:2], -1)


def packed(kind: str, raw: np.ndarray, columns: int, round_x: bool = False) -> Pack:
    return ops.pack(packs.NUMBERS[kind], raw, columns, round_x=round_x)


def all_rows(weights: Pack, ids=None) -> np.ndarray:
    ids = np.arange(weights.n_rows) if ids is None else ids
    out = np.full((len(ids), weights.n_cols), np.nan, np.float32)
    ops.gather_rows(weights, ids, out)
    return out


# --- packs --------------------------------------------------------------------------------------------------------


IN_A_FILE = {tensor.tensor_type.name: tensor for tensor in open_gguf(DATA / "types.gguf").tensors}


@pytest.mark.parametrize("kind", sorted(IN_A_FILE.keys() & set(KINDS)))
def test_rows_of_a_pack_are_exactly_those_of_the_file(kind):
    tensor = IN_A_FILE[kind]
    raw = tensor.data.view(np.uint16) if kind == "BF16" else tensor.data
    weights = packed(kind, np.asarray(raw)[None], 512)
    np.testing.assert_array_equal(all_rows(weights), dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks_are_exact_at_any_number_of_rows(kind, rows):
    raw = random_weights(rng_for(kind, rows), kind, 1, rows, 512)
    np.testing.assert_array_equal(all_rows(packed(kind, raw, 512)), plain(kind, raw)[0])


@pytest.mark.parametrize("columns", [4, 28, 36, 100])
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_may_have_any_width_of_whole_quads(kind, columns):
    raw = random_weights(rng_for(kind, columns), kind, 1, 17, columns)
    np.testing.assert_array_equal(all_rows(packed(kind, raw, columns)), plain(kind, raw)[0])


def test_gathered_rows_come_in_the_order_asked_for():
    raw = random_weights(rng_for("gather"), "Q5_K", 1, 40, 256)
    ids = np.array([39, 0, 17, 17, 16], np.int32)
    np.testing.assert_array_equal(all_rows(packed("Q5_K", raw, 256), ids), plain("Q5_K", raw)[0][ids])


@pytest.mark.parametrize(("kind", "columns"), [("F32", 30), ("F16", 2), ("Q8_0", 48), ("Q4_K", 128), ("Q6_K", 288)])
def test_a_width_that_cannot_be_cut_into_blocks_is_refused(kind, columns):
    with pytest.raises(ValueError, match=f"width of {columns} cannot"):
        ops.pack(packs.NUMBERS[kind], np.zeros((1, 4, 64), np.uint8), columns)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_is_no_larger_than_its_file_but_for_what_has_no_width_of_its_own(kind):
    raw = random_weights(rng_for(kind), kind, 2, 32, 512)
    weights = packed(kind, raw, 512)
    assert weights.data.nbytes == 2 * 2 * weights.group_bytes
    # Scales and minima of six bits have whole bytes; what four bits stand for has a byte, and three bits have four.
    extra = {"Q4_K": 4, "Q5_K": 4, "IQ4_NL": 128, "IQ4_XS": 130, "Q3_K": 36}.get(kind, 0)
    assert weights.data.nbytes == raw.nbytes + 2 * 32 * 2 * extra


# --- matrix products ----------------------------------------------------------------------------------------------


def product_bound(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Largest float32 error of x times weights.T: 8 fused steps, 2 sums, and one sum a block of 32 columns."""
    steps = 10 + -(-x.shape[1] // 32)
    return steps * ROUNDING * (np.abs(x.astype(np.float64)) @ np.abs(weights.astype(np.float64)).T) + 1e-30


def matmul(weights: Pack, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), weights.n_rows), np.nan, np.float32)
    ops.matmul(weights, x, out)
    return out


PRODUCTS = [(kind, 17, 512) for kind in KINDS] + [("F32", 5, 36), ("F16", 40, 100), ("BF16", 16, 4), ("Q8_0", 33, 96)]


@pytest.mark.parametrize(("kind", "rows", "columns"), PRODUCTS)
def test_product_is_right_and_the_same_for_any_number_of_tokens(kind, rows, columns, threads):
    rng = rng_for(kind, rows, columns)
    raw, x = random_weights(rng, kind, 1, rows, columns), normal(rng, 65, columns)
    weights, exact = packed(kind, raw, columns), plain(kind, raw)[0]
    whole = matmul(weights, x)
    error = np.abs(whole - x.astype(np.float64) @ exact.astype(np.float64).T)
    assert (error <= product_bound(x, exact)).all()
    for n_tokens in (1, 3, 4, 5, 64):
        np.testing.assert_array_equal(matmul(weights, x[:n_tokens]), whole[:n_tokens])
        np.testing.assert_array_equal(matmul(weights, x[65 - n_tokens :]), whole[65 - n_tokens :])


@pytest.mark.parametrize("kind", ["F32", "Q4_K", "Q8_0"])
def test_product_does_not_depend_on_threads(kind):
    rng = rng_for(kind, "threads")
    raw, x = random_weights(rng, kind, 1, 130, 512), normal(rng, 67, 512)
    weights, results = packed(kind, raw, 512), []
    for n_threads in range(1, 5):
        loaded = backend.load("cpu", n_threads, print)
        out = np.empty((len(x), 130), np.float32)
        loaded.matmul(weights, x, out)
        loaded.close()
        results.append(out)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("counts", [[3, 0, 1, 70, 0], [0, 0, 0, 0, 4], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize(("kind", "rows", "columns"), [("F16", 20, 36), ("Q4_0", 17, 64), ("Q6_K", 5, 256)])
def test_each_expert_multiplies_its_own_rows(kind, rows, columns, counts, threads):
    rng = rng_for(kind, counts)
    raw, x = random_weights(rng, kind, 5, rows, columns), normal(rng, sum(counts), columns)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    out = np.full((len(x), rows), np.nan, np.float32)
    ops.expert_matmul(packed(kind, raw, columns), x, offsets, out)
    for expert in range(5):
        part = slice(offsets[expert], offsets[expert + 1])
        np.testing.assert_array_equal(out[part], matmul(packed(kind, raw[expert : expert + 1], columns), x[part]))


# --- products of rounded activations ------------------------------------------------------------------------------

CODED = KINDS[3:]


def rounded(x: np.ndarray) -> np.ndarray:
    """x in float64 as blocks of 32 are rounded to int8: codes -127..127 times largest / 127, both taken in float32."""
    blocks = x.reshape(-1, 32)
    peak = np.abs(blocks).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.rint(blocks * inverse)
    assert np.abs(codes).max() <= 127
    return (codes.astype(np.float64) * (peak / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("kind", CODED)
def test_product_of_rounded_activations(kind, rows, threads):
    rng, columns = rng_for(kind, rows, "int8"), 512
    raw, x = random_weights(rng, kind, 1, rows, columns), normal(rng, 65, columns)
    x[3], x[4, :32], x[5, 7] = 0, 0, 1000  # nothing to scale by, in all of a row or in a block; one value far off
    weights, exact = packed(kind, raw, columns, round_x=True), plain(kind, raw)[0].astype(np.float64)
    whole, seen = matmul(weights, x), rounded(x)
    # Dots are exact integers; what rounds is scale times code, once a block or half a block, and each running sum.
    bound = (2 * 2 * columns // 32 + 4) * ROUNDING * (np.abs(seen) @ np.abs(exact).T)
    assert (np.abs(whole - seen @ exact.T) <= bound + 1e-30).all()
    assert not whole[3].any()
    for n_tokens in (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 64):
        np.testing.assert_array_equal(matmul(weights, x[:n_tokens]), whole[:n_tokens])
        np.testing.assert_array_equal(matmul(weights, x[65 - n_tokens :]), whole[65 - n_tokens :])


@pytest.mark.skipif(not cpuunits.has_tiles, reason="this processor has no tiles of bytes")
@pytest.mark.parametrize("kind", CODED)
def test_tiles_of_bytes_change_no_bit(kind, threads, monkeypatch):
    rng, columns = rng_for(kind, "tiles"), 768
    raw, x = random_weights(rng, kind, 1, 50, columns), normal(rng, 43, columns)
    weights = packed(kind, raw, columns, round_x=True)
    with_tiles = matmul(weights, x)
    monkeypatch.setattr(cpuunits, "has_tiles", False)
    np.testing.assert_array_equal(matmul(weights, x), with_tiles)


@pytest.mark.parametrize("n_tokens", [1, 5, 33])
@pytest.mark.parametrize("round_x", [False, True])
def test_packs_together_are_multiplied_as_each_alone(n_tokens, round_x, threads):
    rng, columns = rng_for(n_tokens, round_x, "together"), 256
    parts = [
        packed(kind, random_weights(rng, kind, 3, rows, columns), columns, round_x)
        for kind, rows in (("Q4_1", 40), ("F32", 3), ("Q6_K", 17))
    ]
    single = [dataclasses.replace(part, n_matrices=1) for part in parts]
    x, offsets = normal(rng, n_tokens, columns), np.array([0, n_tokens // 2, n_tokens // 2, n_tokens])
    for part, found in zip(single, ops.matmul_each(ops.together(*single), x), strict=True):
        np.testing.assert_array_equal(found, matmul(part, x))
    for part, found in zip(parts, ops.expert_matmul_each(ops.together(*parts), x, offsets), strict=True):
        expected = np.full_like(found, np.nan)
        ops.expert_matmul(part, x, offsets, expected)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n_tokens", [1, 20])
def test_swiglu_is_two_products_and_a_gate(n_tokens, threads):
    rng = rng_for(n_tokens, "swiglu")
    gate, up = (packed("Q4_1", random_weights(rng, "Q4_1", 1, 96, 64), 64, True) for _ in range(2))
    down, x = packed("Q8_0", random_weights(rng, "Q8_0", 1, 64, 96), 96, True), normal(rng, n_tokens, 64)
    out, gated = np.full_like(x, np.nan), matmul(gate, x)
    kernels_cpu.swiglu(ops.together(gate, up), down, x, out)
    kernels_cpu.silu_mul(gated, matmul(up, x), gated)
    np.testing.assert_array_equal(out, matmul(down, gated))


@pytest.mark.parametrize("kind", CODED)
def test_each_expert_multiplies_its_own_rounded_rows(kind, threads):
    rng, counts = rng_for(kind, "int8 experts"), [3, 0, 1, 70, 0]
    raw, x = random_weights(rng, kind, 5, 20, 256), normal(rng, sum(counts), 256)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    out = np.full((len(x), 20), np.nan, np.float32)
    ops.expert_matmul(packed(kind, raw, 256, round_x=True), x, offsets, out)
    for expert in range(5):
        part, alone = slice(offsets[expert], offsets[expert + 1]), packed(kind, raw[expert : expert + 1], 256, True)
        np.testing.assert_array_equal(out[part], matmul(alone, x[part]))


@pytest.mark.parametrize("kind", FLOATS)
def test_activations_of_float_weights_are_never_rounded(kind):
    rng = rng_for(kind, "int8")
    raw, x = random_weights(rng, kind, 1, 20, 100), normal(rng, 5, 100)
    np.testing.assert_array_equal(matmul(packed(kind, raw, 100, True), x), matmul(packed(kind, raw, 100), x))


FREED_MEMORY = """
import numpy as np, sys
import backend, cuda_cases, packs
rng = np.random.default_rng(0)
ops = backend.load("cpu", 2, print)
weights = ops.pack(packs.NUMBERS["Q8_0"], cuda_cases.random_weights(rng, "Q8_0", 1, 48, 512), 512, round_x=True)
x = cuda_cases.normal(rng, 700, 512)
out = np.empty((700, 48), np.float32)
ops.matmul(weights, x, out)
sys.stdout.buffer.write(out.tobytes())
ops.close()
"""


@pytest.mark.slow
def test_an_operation_reads_no_memory_that_it_has_freed():
    def product(fill: str) -> bytes:
        environment = os.environ | {"MALLOC_PERTURB_": fill, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}"}
        command = [sys.executable, "-c", FREED_MEMORY]
        return subprocess.run(command, env=environment, capture_output=True, check=True).stdout

    # glibc overwrites what is freed with this byte; other libraries ignore it.
    clean = product("0")
    assert len(clean) == 700 * 48 * 4
    assert product("165") == product("90") == clean
