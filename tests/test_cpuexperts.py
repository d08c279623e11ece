"""Products of experts on the host: right, and the same bits however they are cut and shared out.

That these bits are the device's is shown in simulated_experts.py.
"""

import dataclasses

import cuda_cases
import numpy as np
import pytest

import cpuexperts
import cpuproducts
import packs
from cputeam import Team

ROWS, COUNTS = 37, [3, 0, 1, 21, 0]  # rows of a matrix, and of x for each expert


@pytest.fixture(params=[1, 3])
def team(request):
    team = Team(request.param)
    yield team
    team.close()


def pack_of(kind: str, n_cols: int) -> cpuproducts.Pack:
    raw = cuda_cases.random_weights(np.random.default_rng(4), kind, len(COUNTS), ROWS, n_cols)
    return cpuproducts.pack(packs.NUMBERS[kind], raw, n_cols)


def weights_of(pack: cpuproducts.Pack, expert: int) -> np.ndarray:
    """An expert's matrix in float64."""
    size = -(-ROWS // packs.ROWS) * pack.group_bytes
    alone = dataclasses.replace(pack, data=pack.data[expert * size : (expert + 1) * size], n_matrices=1)
    out = np.empty((ROWS, pack.n_cols), np.float32)
    cpuproducts.gather_rows(alone, np.arange(ROWS), out)
    return out.astype(np.float64)


def width(kind: str) -> int:
    return 164 if kind in cuda_cases.FLOATS else 512


@pytest.mark.parametrize("slices", [1, 2, 8, 16])
@pytest.mark.parametrize("kind", cuda_cases.KINDS)
def test_each_expert_multiplies_its_rows(kind, slices, team, monkeypatch):
    monkeypatch.setattr(cpuexperts, "JOB_WORK", 10_000)  # several jobs an expert
    pack = pack_of(kind, width(kind))
    ends = np.cumsum(COUNTS)
    x = cuda_cases.normal(np.random.default_rng(5), ends[-1], pack.n_cols)
    used = np.flatnonzero(COUNTS)
    active = np.stack([used, (ends - COUNTS)[used], np.array(COUNTS)[used]], axis=1)
    out = np.full((len(x), ROWS), np.nan, np.float32)
    cpuexperts.multiply(team, pack, x, active, slices, out)
    for expert, first, count in active:
        exact = x[first : first + count].astype(np.float64) @ weights_of(pack, expert).T
        np.testing.assert_allclose(out[first : first + count], exact, rtol=0, atol=2e-6 * np.abs(exact).max())
        for row in range(first, first + count):
            alone = np.empty((1, ROWS), np.float32)
            cpuexperts.multiply(team, pack, x[row : row + 1], np.array([[expert, 0, 1]]), slices, alone)
            np.testing.assert_array_equal(alone[0].view(np.int32), out[row].view(np.int32))


def test_the_number_of_slices_decides_the_order_of_a_sum():
    team, pack = Team(1), pack_of("F32", 512)
    x = cuda_cases.normal(np.random.default_rng(6), 1, 512)
    results = []
    for slices in (1, 8):
        out = np.empty((1, ROWS), np.float32)
        cpuexperts.multiply(team, pack, x, np.array([[0, 0, 1]]), slices, out)
        weights, order = weights_of(pack, 0).astype(np.float32), []
        for part in range(slices):
            columns = [k for block in range(part, 16, slices) for k in range(32 * block, 32 * block + 32)]
            order.append(_fused_sum(weights[:, columns], x[0, columns]))
        expected = np.zeros(ROWS, np.float32)
        for part in order:
            expected += part
        np.testing.assert_array_equal(out[0], expected)
        results.append(out)
    assert not np.array_equal(*results)


def _fused_sum(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Column after column, each step rounded once; a long double holds a product and, here, its sum."""
    total = np.zeros(len(weights), np.float32)
    for k in range(len(x)):
        total = (weights[:, k].astype(np.longdouble) * x[k] + total).astype(np.float32)
    return total
