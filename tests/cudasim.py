"""The CUDA backend in Numba's simulator, turned on: imported before anything of numba by the files that run in it.

A process has one mode, so those files are run by test_kernels_cuda.py in processes of their own. Two faults of the
simulator with several threads a block are mended here: two threads that reach a shared array first could get one each,
and a device function of another module could lose its `cuda` when another thread left it.
"""

# ruff: noqa: E402  (what is set before numba is imported has to come first)

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


kernelapi.FakeCUDAShared.array = _shared_array
cudablock.cuda = _Running()


def small_blocks(monkeypatch, threads: int) -> None:
    """Few blocks of few threads: every launch strides over its work, and a barrier costs more the more there are."""
    monkeypatch.setattr(cudapools, "MAX_BLOCKS", 3)
    monkeypatch.setattr(cudapools, "THREADS", threads)
