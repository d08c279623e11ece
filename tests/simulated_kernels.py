"""Every CUDA operation against its CPU twin, in Numba's simulator; run by test_DEVICE.py in its own process.

Owns: sizes around a warp, odd heads and block sizes. Inputs and tolerances are those of tools/cuda_cases.py, which also
run on a device. Read next: simulated_residency.py.
"""

import given_simulator  # first: it turns the simulator on
from given_simulator import small_blocks

# isort: split

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import cuda_cases

import backend
import packs
from given_kernels import CPU

DEVICE = backend.load("cuda", 1, print)

SUPER_BLOCKS = [kind.name for kind in packs.KINDS if kind.columns == 256]  # the others have 32


def sizes(name: str, n: int) -> cuda_cases.Sizes:
    """Small layers: the simulator runs some ten thousand multiplications a second."""
    wide = any(kind in name for kind in SUPER_BLOCKS)
    columns, rows = (256, 2) if wide else (64, 3)
    return cuda_cases.SMALL._replace(n=n, columns=columns, rows=rows, experts=5, vocab=45, state=8)


@pytest.mark.parametrize("n", [1, 31, 32, 33])
@pytest.mark.parametrize("case", cuda_cases.CASES, ids=lambda case: case.name)
def test_operation_is_that_of_the_cpu(case, n, monkeypatch):
    small_blocks(monkeypatch, 8 if n < 33 else 32)
    given = sizes(case.name, n)
    expected, found = (cuda_cases.run_case(case, ops, given) for ops in (CPU, DEVICE))
    assert cuda_cases.largest_error(expected, found, case.tolerance) <= case.tolerance


@pytest.mark.parametrize("threads", [1, 64, 128])
@pytest.mark.parametrize("name", ["matmul[Q4_0]", "rms_norm", "attention[int8]", "select_blocks", "route"])
def test_any_power_of_two_of_threads_is_right(name, threads, monkeypatch):
    small_blocks(monkeypatch, threads)
    case = next(case for case in cuda_cases.CASES if case.name == name)
    given = sizes(name, 5)
    expected, found = (cuda_cases.run_case(case, ops, given) for ops in (CPU, DEVICE))
    assert cuda_cases.largest_error(expected, found, case.tolerance) <= case.tolerance


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 32), (3, 5, 32), (1, 9, 64)])
def test_odd_numbers_of_heads(kv_heads, group, head_dim, monkeypatch):
    small_blocks(monkeypatch, 8)
    given = cuda_cases.SMALL._replace(n=7, kv_heads=kv_heads, group=group, head_dim=head_dim)
    for case in cuda_cases.CASES:
        if case.name in ("attention[fp16]", "attention[q4_0]", "attention_selected[fp16]"):
            expected, found = (cuda_cases.run_case(case, ops, given) for ops in (CPU, DEVICE))
            assert cuda_cases.largest_error(expected, found, case.tolerance) <= case.tolerance


def test_the_simulator_is_on():
    assert given_simulator.config.ENABLE_CUDASIM


def test_a_product_has_the_same_bits_in_any_company(monkeypatch):
    small_blocks(monkeypatch, 32)
    rng = np.random.default_rng(0)
    weights, x = cuda_cases.pack(DEVICE, rng, "Q4_0", 1, 5, 96), cuda_cases.normal(rng, 11, 96)
    together = cuda_cases.into(DEVICE, DEVICE.matmul, (11, 5), weights, x)[0]
    for token in range(11):
        alone = cuda_cases.into(DEVICE, DEVICE.matmul, (1, 5), weights, x[token : token + 1])[0]
        np.testing.assert_array_equal(alone[0], together[token])


def test_attention_has_the_same_bits_however_its_segments_are_spread(monkeypatch):
    """Two segments: one block each for a single token, one after the other for five."""
    small_blocks(monkeypatch, 8)
    given = cuda_cases.SMALL._replace(n=270, kv_heads=1, group=1, head_dim=32)
    case = next(case for case in cuda_cases.CASES if case.name == "attention[fp16]")
    alone, together = cuda_cases.run_case(case, DEVICE, given)
    np.testing.assert_array_equal(alone[0], together[-1])
    expected = cuda_cases.run_case(case, CPU, given)
    assert cuda_cases.largest_error(expected, [alone, together], case.tolerance) <= case.tolerance
