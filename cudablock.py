"""Device functions that several kernels share: sums over a block, and arithmetic that must not be fused.

It owns what the simulator and a device spell differently; it knows no operation. Invariant: a sum over a block is the
same tree in every block of one size. Read next: kernels_cuda.py.
"""

import math

import numpy as np
from numba import config, cuda
from numba.cuda import libdevice

MAX_THREADS = 256  # room of the shared arrays that hold one value a thread
EMPTY = np.float32(-3.0e38)  # less than any score or logit
INFINITE = np.float32(np.inf)

if config.ENABLE_CUDASIM:

    def bits_as_float(bits):
        return np.int32(bits).view(np.float32)

    def product(a, b):
        return a * b

    def nearest(x):
        return np.rint(x)
else:

    @cuda.jit(device=True)
    def bits_as_float(bits):
        return libdevice.int_as_float(np.int32(bits))

    @cuda.jit(device=True)
    def product(a, b):
        """a * b, rounded by itself: fused with the sum behind it, it would quantise K/V to other codes."""
        return libdevice.fmul_rn(a, b)

    @cuda.jit(device=True)
    def nearest(x):
        """The nearest whole number as float32, ties to even (`round` would compute in float64)."""
        return libdevice.rintf(x)


@cuda.jit(device=True)
def sigmoid(x):
    return np.float32(1) / (np.float32(1) + np.float32(math.exp(-x)))


@cuda.jit(device=True)
def block_sum(value, scratch):
    """The sum of every thread's value, the same tree in every block of a size; all threads get it."""
    thread, span = cuda.threadIdx.x, cuda.blockDim.x // 2
    scratch[thread] = value
    cuda.syncthreads()
    while span > 0:
        if thread < span:
            scratch[thread] = scratch[thread] + scratch[thread + span]
        cuda.syncthreads()
        span //= 2
    total = scratch[0]
    cuda.syncthreads()
    return total


@cuda.jit(device=True)
def inverse_rms(x, row, n, eps, scratch):
    """1 / sqrt(mean(x[row]**2) + eps) by the whole block; x [rows, n]."""
    squares = np.float32(0)
    for k in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        squares = cuda.fma(x[row, k], x[row, k], squares)
    total = block_sum(squares, scratch)
    return np.float32(1) / np.float32(math.sqrt(total / np.float32(n) + eps))
