"""The CUDA backend in Numba's simulator, turned on: imported before anything of numba by the files that run in it.

A process has one mode, so those files are run by test_kernels_cuda.py in processes of their own. Two faults of the
simulator with several threads a block are mended here: two threads that reach a shared array first could get one each,
and a device function of another module could lose its `cuda` when another thread left it. And where a device rounds
`cuda.fma` once, the simulator does twice.
"""

# ruff: noqa: E402  (what is set before numba is imported has to come first)

import os
import sys
import threading

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
# The simulator's scheduler spins; at the default interval each CUDA thread would wait milliseconds for its turn.
sys.setswitchinterval(1e-5)

import numpy as np
from numba import config, types
from numba.cuda.simulator import kernel, kernelapi
from numba.extending import intrinsic

import cudablock
import cudapools
from jit import njit

__all__ = ["config", "small_blocks"]

_first = threading.Lock()


def _shared_array(self, shape, dtype):
    """One array for each line of source, for all threads of a launch."""
    frame = sys._getframe(1)
    line = frame.f_code.co_filename, frame.f_lineno
    with _first:
        return self._allocations.setdefault(line, np.empty(shape, dtype))


class _Running:
    """The simulated `cuda` of the kernel that runs."""

    def __getattr__(self, name):
        return getattr(kernel._get_kernel_context(), name)


@intrinsic
def _fused(typingctx, a, b, c):
    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit
def _fma_float32(a, b, c):
    return _fused(a, b, c)


def _fma(self, a, b, c):
    """a * b + c with one rounding."""
    return np.float32(_fma_float32(np.float32(a), np.float32(b), np.float32(c)))


kernelapi.FakeCUDAShared.array = _shared_array
kernelapi.FakeCUDAModule.fma = _fma
cudablock.cuda = _Running()


def small_blocks(monkeypatch, threads: int) -> None:
    """Few blocks of few threads: every launch strides over its work, and a barrier costs more the more there are."""
    monkeypatch.setattr(cudapools, "MAX_BLOCKS", 3)
    monkeypatch.setattr(cudapools, "THREADS", threads)
