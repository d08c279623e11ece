"""Sums of float32 products in one fixed order: what every promise of equal bits rests on.

It owns that order; it knows neither where weights come from nor what a sum is for. Invariant: a sum's order depends on
its length alone, never on what is summed beside it: sixteen lanes are sixteen sums, and no loop here is cut elsewhere.
Read next: cpuproducts.py, cpuattention.py, kernels_cpu.py.
"""

import numpy as np

import cpusimd as simd
from jit import njit
from packs import ROWS


@njit
def dot(a, a_at, b, b_at, n):
    """Sum of a * b over n values, n a multiple of 16: column mod 16 in a lane, then the lanes."""
    total = simd.splat(np.float32(0))
    for k in range(0, n, ROWS):
        total = simd.fma(simd.load(a, a_at + k), simd.load(b, b_at + k), total)
    return simd.sum_lanes(total)


@njit
def square_sum(x, at, n):
    """Sum of squares of n values of x from `at` on; those behind the last sixteen come last."""
    total = simd.splat(np.float32(0))
    for k in range(0, n - n % ROWS, ROWS):
        value = simd.load(x, at + k)
        total = simd.fma(value, value, total)
    rest = np.float32(0)
    flat = x.ravel()
    for k in range(n - n % ROWS, n):
        rest += flat[at + k] * flat[at + k]
    return simd.sum_lanes(total) + rest


@njit
def block_1(weights, n_quads, x, at, sums, token):
    """One token: four partial sums (column mod 4), added in one order to the token's sixteen running sums."""
    zero = simd.splat(np.float32(0))
    a0, a1, a2, a3 = zero, zero, zero, zero
    for quad in range(n_quads):
        w, k = quad * 64, at + quad * 4
        a0 = simd.fma(simd.load(weights, w), simd.load_broadcast(x, k), a0)
        a1 = simd.fma(simd.load(weights, w + 16), simd.load_broadcast(x, k + 1), a1)
        a2 = simd.fma(simd.load(weights, w + 32), simd.load_broadcast(x, k + 2), a2)
        a3 = simd.fma(simd.load(weights, w + 48), simd.load_broadcast(x, k + 3), a3)
    total = simd.add(simd.add(a0, a1), simd.add(a2, a3))
    simd.store(sums, token * ROWS, simd.add(simd.load(sums, token * ROWS), total))


@njit
def block_4(weights, n_quads, x, at, stride, sums, token):
    """Four tokens, each summed exactly as in `block_1`; the weights are loaded once for all of them."""
    zero = simd.splat(np.float32(0))
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    c0, c1, c2, c3 = zero, zero, zero, zero
    d0, d1, d2, d3 = zero, zero, zero, zero
    for quad in range(n_quads):
        w, k = quad * 64, at + quad * 4
        w0, w1, w2, w3 = (
            simd.load(weights, w), simd.load(weights, w + 16), simd.load(weights, w + 32), simd.load(weights, w + 48)
        )
        a0 = simd.fma(w0, simd.load_broadcast(x, k), a0)
        a1 = simd.fma(w1, simd.load_broadcast(x, k + 1), a1)
        a2 = simd.fma(w2, simd.load_broadcast(x, k + 2), a2)
        a3 = simd.fma(w3, simd.load_broadcast(x, k + 3), a3)
        k += stride
        b0 = simd.fma(w0, simd.load_broadcast(x, k), b0)
        b1 = simd.fma(w1, simd.load_broadcast(x, k + 1), b1)
        b2 = simd.fma(w2, simd.load_broadcast(x, k + 2), b2)
        b3 = simd.fma(w3, simd.load_broadcast(x, k + 3), b3)
        k += stride
        c0 = simd.fma(w0, simd.load_broadcast(x, k), c0)
        c1 = simd.fma(w1, simd.load_broadcast(x, k + 1), c1)
        c2 = simd.fma(w2, simd.load_broadcast(x, k + 2), c2)
        c3 = simd.fma(w3, simd.load_broadcast(x, k + 3), c3)
        k += stride
        d0 = simd.fma(w0, simd.load_broadcast(x, k), d0)
        d1 = simd.fma(w1, simd.load_broadcast(x, k + 1), d1)
        d2 = simd.fma(w2, simd.load_broadcast(x, k + 2), d2)
        d3 = simd.fma(w3, simd.load_broadcast(x, k + 3), d3)
    at = token * ROWS
    simd.store(sums, at, simd.add(simd.load(sums, at), simd.add(simd.add(a0, a1), simd.add(a2, a3))))
    simd.store(sums, at + 16, simd.add(simd.load(sums, at + 16), simd.add(simd.add(b0, b1), simd.add(b2, b3))))
    simd.store(sums, at + 32, simd.add(simd.load(sums, at + 32), simd.add(simd.add(c0, c1), simd.add(c2, c3))))
    simd.store(sums, at + 48, simd.add(simd.load(sums, at + 48), simd.add(simd.add(d0, d1), simd.add(d2, d3))))
