"""The CUDA backend in Numba's simulator, turned on: imported before anything of numba by the files that run in it.

A process has one mode, so those files are run by test_kernels_cuda.py in processes of their own. Two faults of the
simulator with several threads a block are mended here: two threads that reach a shared array first could get one each,
and a device function of another module could lose its `cuda` when another thread left it. And where a device rounds
`cuda.fma` once, the simulator does twice.
"""

# ruff: noqa: E402  (what is set before numba is imported has to come first)

import ctypes
import ctypes.util
import os
import sys
import threading

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
# The simulator's scheduler spins; at the default interval each CUDA thread would wait milliseconds for its turn.
sys.setswitchinterval(1e-5)

import numpy as np
from numba import config
from numba.cuda.simulator import kernel, kernelapi

import cudablock
import cudapools

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


_fmaf = ctypes.CDLL(ctypes.util.find_library("m") or "ucrtbase").fmaf  # Windows has it in its C run-time library
_fmaf.argtypes, _fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float


def _fma(self, a, b, c):
    """a * b + c with one rounding."""
    return np.float32(_fmaf(a, b, c))


kernelapi.FakeCUDAShared.array = _shared_array
kernelapi.FakeCUDAModule.fma = _fma
cudablock.cuda = _Running()


def small_blocks(monkeypatch, threads: int) -> None:
    """Few blocks of few threads: every launch strides over its work, and a barrier costs more the more there are."""
    monkeypatch.setattr(cudapools, "MAX_BLOCKS", 3)
    monkeypatch.setattr(cudapools, "THREADS", threads)
