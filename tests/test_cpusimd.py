"""Vector operations against NumPy: conversions bit by bit, e ** x and the logistic function against float64.

Owns: the evidence that the sixteen-lane operations mean what their names say. Refuses to know: weight formats and
models. Invariant: an operation is called through a kernel of its own, as the real kernels call it. Read next:
test_kernels_cpu.py.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cpumemory
import cpusimd as simd
import cpuunits
from jit import njit

ROOT = Path(__file__).parent.parent
LANES = 16
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


@njit
def apply_exp(x, out):
    for k in range(0, len(x), LANES):
        simd.store(out, k, simd.exp(simd.load(x, k)))


@njit
def apply_sigmoid(x, out):
    for k in range(0, len(x), LANES):
        simd.store(out, k, simd.sigmoid(simd.load(x, k)))


@njit
def widen(kind, raw, offset, out):
    if kind == 0:
        value = simd.load_f32(raw, offset)
    elif kind == 1:
        value = simd.load_f16(raw, offset)
    elif kind == 2:
        value = simd.load_bf16(raw, offset)
    elif kind == 3:
        value = simd.load_u8(raw, offset)
    elif kind == 4:
        value = simd.load_i8(raw, offset)
    else:
        value = simd.to_float(simd.load_i32(raw, offset))
    simd.store(out, 0, value)


@njit
def sums_of_rows(x, one_by_one, together):
    for r in range(LANES):
        one_by_one[r] = simd.sum_lanes(simd.load(x, 5 + r * LANES))
    simd.store(together, 3, simd.sum_rows(x, 5))


@njit
def transposed(x, stride, out, out_stride):
    simd.transpose(x, 7, stride, out, 2, out_stride)


@njit
def less(value, amount, out):
    simd.store_i32(out, 1, simd.subtract_bytes(simd.load_i32(value, 0), amount))


@njit
def tile(a, stride, b, n_wide, out):
    cpuunits.tiles_begin(cpuunits.TILE_SHAPES)
    if n_wide == 32:
        cpuunits.tile_product(a, 3, stride, b, 64, 32, out)
    else:
        cpuunits.tile_product(a, 3, stride, b, 64, 16, out)
    cpuunits.tiles_end()


@njit
def halves_to_floats(halves, out):
    for i in range(len(halves)):
        out[i] = simd.half_to_float(halves[i])


@njit
def floats_to_halves(x, one_by_one, by_vector):
    for i in range(len(x)):
        one_by_one[i] = simd.float_to_half(x[i])
    for k in range(0, len(x), LANES):
        simd.store_f16(by_vector, k, simd.load(x, k))


@njit
def arithmetic(a, b, c, out):
    x, y, z = simd.load(a, 0), simd.load(b, 0), simd.load(c, 0)
    results = (
        simd.fma(x, y, z), simd.add(x, y), simd.sub(x, y), simd.mul(x, y), simd.div(x, y), simd.minimum(x, y),
        simd.maximum(x, y), simd.round_even(x), simd.load_broadcast(a, 3), simd.splat(b[5]),
    )  # fmt: skip
    for i in range(10):
        simd.store(out, i * LANES, results[i])


@njit
def reduce(x, out):
    out[0] = simd.sum_lanes(simd.load(x, 0))
    out[1] = simd.max_lanes(simd.load(x, 0))


@njit
def powers(x, out):
    simd.store(out, 0, simd.power_of_two(simd.load(x, 0)))


@njit
def integer_fields(raw, shift, mask, out):
    value = simd.load_i32(raw, 0)
    simd.store(out, 0, simd.to_float(simd.bits(value, shift, mask)))
    simd.store(out, 16, simd.to_float(simd.shift_left(simd.bits(value, np.int32(0), np.int32(255)), shift)))
    for j in range(4):
        simd.store(out, 32 + 16 * j, simd.signed_byte(value, np.int32(j)))
    both = simd.either(simd.bits(value, np.int32(0), np.int32(15)), simd.bits(value, np.int32(8), np.int32(240)))
    simd.store(out, 96, simd.to_float(both))


@njit
def dot_products(unsigned, signed, at, start, out):
    total = simd.splat_i32(start)
    simd.store(out, 0, simd.to_float(cpuunits.dot_bytes(total, simd.load_i32(unsigned, 0), simd.load_i32(signed, 0))))
    shared = cpuunits.dot_bytes(total, simd.load_i32(unsigned, 0), simd.broadcast_i32(signed, at))
    simd.store(out, 16, simd.to_float(shared))


@njit
def narrow(x, magnitudes, codes):
    simd.store(magnitudes, 0, simd.magnitude(simd.load(x, 0)))
    simd.store_i8(codes, 3, simd.load(x, 0))


def test_exp_is_right_to_two_units_in_the_last_place():
    x = np.concatenate([np.linspace(-87, 87.9, 1 << 16), np.linspace(-1e-3, 1e-3, 1 << 12)]).astype(np.float32)
    out = np.empty_like(x)
    apply_exp(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / exact).max() < 2 * 2.0**-23


def test_exp_of_zero_is_one_and_its_ends_stay_finite():
    x = np.array([0, -0.0, -87.3, -88, -1e3, -np.inf, 88, 89, 1e30, np.inf] + [0] * 6, np.float32)
    out = np.empty_like(x)
    apply_exp(x, out)
    assert out[0] == out[1] == 1
    assert (out[2:6] == out[2]).all()
    assert 0 < out[2] < 1.3e-38
    assert (out[6:10] == out[6]).all()
    np.testing.assert_allclose(out[6], np.exp(88.0), rtol=3e-7)


def test_sigmoid_is_right_to_three_units_in_the_last_place():
    x = np.linspace(-86, 86, 1 << 16).astype(np.float32)
    out = np.empty_like(x)
    apply_sigmoid(x, out)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert (np.abs(out - exact) / exact).max() < 3 * 2.0**-23
    ends = np.array([-np.inf, -200, 200, np.inf] + [0] * 12, np.float32)
    apply_sigmoid(ends, out[:LANES])
    assert (out[:2] < 1e-37).all()
    assert (out[2:4] == 1).all()
    assert (out[4:LANES] == 0.5).all()


@pytest.mark.parametrize("offset", [0, 1, 7, 33])
def test_loads_widen_exactly_at_any_offset(offset):
    rng = np.random.default_rng(offset)
    floats = rng.standard_normal(LANES).astype(np.float32)
    whole = rng.integers(-(1 << 23), 1 << 23, LANES)
    fields = [
        (floats, floats),
        (floats.astype(np.float16), floats.astype(np.float16)),
        ((floats.view(np.uint32) >> 16).astype(np.uint16), (floats.view(np.uint32) >> 16 << 16).view(np.float32)),
        (whole.astype(np.uint8), whole.astype(np.uint8)),
        (whole.astype(np.int8), whole.astype(np.int8)),
        (whole.astype(np.int32), whole.astype(np.int32)),
    ]
    for kind, (stored, expected) in enumerate(fields):
        raw = np.concatenate([np.full(offset, 255, np.uint8), stored.view(np.uint8), np.full(8, 255, np.uint8)])
        out = np.full(LANES, np.nan, np.float32)
        widen(kind, raw, offset, out)
        np.testing.assert_array_equal(out, expected.astype(np.float32))


def test_every_float16_widens_and_comes_back():
    wide = np.empty(len(EVERY_HALF), np.float32)
    halves_to_floats(EVERY_HALF, wide)
    np.testing.assert_array_equal(wide, EVERY_HALF.view(np.float16).astype(np.float32))
    one_by_one, by_vector = np.empty((2, len(EVERY_HALF)), np.uint16)
    floats_to_halves(wide, one_by_one, by_vector)
    number = ~np.isnan(wide)
    for back in (one_by_one, by_vector):
        np.testing.assert_array_equal(back[number], EVERY_HALF[number])
        assert np.isnan(back[~number].view(np.float16)).all()


def test_rounding_to_float16_is_to_nearest_even():
    rng = np.random.default_rng(1)
    half = EVERY_HALF[(EVERY_HALF & 0x7C00) != 0x7C00].view(np.float16).astype(np.float32)
    between = (half[:-1].astype(np.float64) + half[1:]) / 2  # exact ties
    x = np.concatenate([between, rng.standard_normal(4096) * 10.0 ** rng.integers(-9, 5, 4096)]).astype(np.float32)
    x = x[: len(x) // LANES * LANES]
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    one_by_one, by_vector = np.empty((2, len(x)), np.uint16)
    floats_to_halves(x, one_by_one, by_vector)
    np.testing.assert_array_equal(one_by_one, expected)
    np.testing.assert_array_equal(by_vector, expected)


def test_arithmetic_is_that_of_float32():
    a, b, c = np.random.default_rng(2).standard_normal((3, LANES)).astype(np.float32)
    a[:4] = [0.5, 1.5, -2.5, 2.4999998]
    out = np.empty((10, LANES), np.float32)
    arithmetic(a, b, c, out.reshape(-1))
    wide = [v.astype(np.float64) for v in (a, b, c)]
    np.testing.assert_array_equal(out[0], (wide[0] * wide[1] + wide[2]).astype(np.float32))
    for got, expected in zip(out[1:], [a + b, a - b, a * b, a / b, np.minimum(a, b), np.maximum(a, b)], strict=False):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(out[7], np.rint(a))
    assert (out[8] == a[3]).all()
    assert (out[9] == b[5]).all()


def test_what_is_not_a_number_gives_way_in_minimum_and_maximum():
    a, b = np.full(LANES, np.nan, np.float32), np.arange(LANES, dtype=np.float32)
    out = np.empty((10, LANES), np.float32)
    arithmetic(b, a, b, out.reshape(-1))
    np.testing.assert_array_equal(out[5], b)
    np.testing.assert_array_equal(out[6], b)


def test_sum_of_lanes_is_a_tree_of_halves():
    x = (np.random.default_rng(3).standard_normal(LANES) * 1e4).astype(np.float32)
    out = np.empty(2, np.float32)
    reduce(x, out)
    tree = x
    while len(tree) > 1:
        tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
    assert out[0] == tree[0]
    assert out[1] == x.max()


def test_powers_of_two_are_exact():
    for start in range(-126, 112, LANES):
        x = np.arange(start, start + LANES, dtype=np.float32)
        out = np.empty_like(x)
        powers(x, out)
        np.testing.assert_array_equal(out, np.exp2(x.astype(np.float64)))


@pytest.mark.parametrize(("shift", "mask"), [(0, 255), (4, 15), (8, 0x0F0F), (30, 3), (31, 1)])
def test_fields_of_integers(shift, mask):
    value = np.random.default_rng(4).integers(-(1 << 31), 1 << 31, LANES).astype(np.int32)
    out = np.empty((7, LANES), np.float32)
    integer_fields(value.view(np.uint8), np.int32(shift), np.int32(mask), out.reshape(-1))
    unsigned = value.view(np.uint32)
    np.testing.assert_array_equal(out[0], unsigned >> np.uint32(shift) & np.uint32(mask))
    shifted = ((unsigned & 255) << np.uint32(shift)).view(np.int32)
    np.testing.assert_array_equal(out[1], shifted.astype(np.float32))
    np.testing.assert_array_equal(out[2:6].T, value.view(np.int8).reshape(LANES, 4))
    np.testing.assert_array_equal(out[6], (unsigned & 15) | (unsigned >> 8 & 240))


def test_dot_products_of_bytes_are_exact():
    rng = np.random.default_rng(5)
    unsigned, signed = rng.integers(0, 256, 64).astype(np.uint8), rng.integers(-128, 128, 64).astype(np.int8)
    unsigned[:8], signed[:8] = 255, [127] * 4 + [-128] * 4  # what 16 bits would saturate
    out = np.empty((2, LANES), np.float32)
    dot_products(unsigned, signed.view(np.uint8), 4, np.int32(-1000), out.reshape(-1))
    products = unsigned.astype(np.int64) * signed
    np.testing.assert_array_equal(out[0], products.reshape(16, 4).sum(axis=1) - 1000)
    np.testing.assert_array_equal(out[1], (unsigned.reshape(16, 4).astype(np.int64) * signed[4:8]).sum(axis=1) - 1000)


# A machine without byte products takes the portable form; Numba compiles for any processor that it is told.
OTHER_PROCESSOR = "import test_cpusimd; test_cpusimd.test_dot_products_of_bytes_are_exact(); print('exact')"


@pytest.mark.slow
def test_dot_products_are_exact_without_instructions_for_them():
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    for processor in ("generic", "haswell"):
        if processor == "haswell" and platform.machine() != "x86_64":
            continue
        environment = os.environ | {"PYTHONPATH": path, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
        run = subprocess.run([sys.executable, "-c", OTHER_PROCESSOR], env=environment, capture_output=True, check=False)
        assert (run.returncode, run.stdout.strip()) == (0, b"exact"), run.stderr.decode()[-500:]


def test_sums_of_rows_are_those_of_lanes():
    x = np.random.default_rng(6).standard_normal(5 + 256).astype(np.float32)
    one_by_one, together = np.empty(LANES, np.float32), np.full(24, -1, np.float32)
    sums_of_rows(x, one_by_one, together)
    np.testing.assert_array_equal(together[3:19], one_by_one)
    assert (together[:3] == -1).all()
    assert (together[19:] == -1).all()


def test_transposition_orders_columns_as_lanes_are_added():
    x, stride, out_stride = np.arange(2000, dtype=np.float32), 100, 80
    out = np.full(2 + 4 * out_stride, -1, np.float32)
    transposed(x, stride, out, out_stride)
    seen = np.zeros(out.shape, bool)
    for quarter in range(4):
        for place, c in enumerate((quarter, quarter + 8, quarter + 4, quarter + 12)):
            at = slice(2 + quarter * out_stride + place * LANES, 2 + quarter * out_stride + (place + 1) * LANES)
            np.testing.assert_array_equal(out[at], x[7 + c : 7 + c + LANES * stride : stride])
            seen[at] = True
    assert (out[~seen] == -1).all()


def test_bytes_are_lessened_without_a_borrow():
    value = np.random.default_rng(7).integers(0, 256, 64).astype(np.uint8)
    value[:4] = 0, 0, 255, 1
    out = np.full(70, 9, np.uint8)
    less(value, np.int32(8), out)
    np.testing.assert_array_equal(out[1:65], value - np.uint8(8))
    assert (out[65:] == 9).all()
    assert out[0] == 9


@pytest.mark.skipif(not cpuunits.has_tiles, reason="this processor has no tiles of bytes")
@pytest.mark.parametrize("n_columns", [16, 32])
def test_a_product_of_tiles_is_exact(n_columns):
    rng, stride = np.random.default_rng(n_columns), 48
    a, b = (rng.integers(-128, 128, n).astype(np.int8) for n in (3 + 16 * stride, 64 + n_columns * LANES))
    a[3:40], b[64:90] = -128, -128
    out = np.empty((LANES, LANES), np.int32)
    tile(a, stride, b.view(np.uint8), n_columns, out)
    rows = np.lib.stride_tricks.as_strided(a[3:], (LANES, n_columns), (stride, 1)).astype(np.int64)
    columns = b[64:].reshape(n_columns // 4, LANES, 4).transpose(0, 2, 1).reshape(n_columns, LANES)
    np.testing.assert_array_equal(out, rows @ columns.astype(np.int64))


def test_a_line_begins_where_scratch_and_zeros_do():
    for n in (1, 64, 1000):
        for array in (cpumemory.scratch(n), cpumemory.scratch_bytes(n), cpumemory.aligned_zeros((n, 3), np.int32)):
            assert array.ctypes.data % simd.LINE == 0
            assert len(array) == n
        assert not cpumemory.aligned_zeros((n, 3), np.int32).any()
    pooled, huge = cpumemory.LEAST_POOLED, cpumemory.HUGE_PAGE
    sizes = (pooled - 1, pooled, 1_000_001, huge, cpumemory.POOL_BYTES + 1, 1_000_003)
    arrays = [cpumemory.aligned_zeros((size,), np.uint8) for size in sizes]
    for i, array in enumerate(arrays):
        assert (array.ctypes.data % simd.LINE, len(array)) == (0, sizes[i])
        assert not array.any()
        array[:] = i + 1
    assert all((array == i + 1).all() for i, array in enumerate(arrays))


def test_magnitudes_and_bytes_of_whole_numbers():
    x = np.array([-128, -127.0, -0.0, 0, 1, 127, -1, 5, -5, 100, -100, 3, 2, -2, 64, -64], np.float32)
    magnitudes, codes = np.empty(LANES, np.float32), np.full(24, 99, np.int8)
    narrow(x, magnitudes, codes)
    np.testing.assert_array_equal(magnitudes, np.abs(x))
    np.testing.assert_array_equal(codes[3:19], x)
    assert (codes[:3] == 99).all()
    assert (codes[19:] == 99).all()


def test_a_store_writes_sixteen_values_and_no_more():
    x = np.arange(LANES, dtype=np.float32)
    out = np.full(40, -1, np.float32)
    apply_exp(x, out[11 : 11 + LANES])
    assert (out[:11] == -1).all()
    assert (out[27:] == -1).all()
    assert (out[11:27] > 0).all()
