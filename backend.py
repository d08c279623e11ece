"""Which backend computes: a CUDA device where one answers, else the CPU.

It owns the choice and what a backend cannot do; it knows no model file and no session. Invariant: nothing of Numba's
CUDA part is loaded on a machine without a driver. Read next: kernels_cpu.py, kernels_cuda.py.
"""

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Callable

import numba

import kernels_cpu


class BackendError(Exception):
    """A backend that was asked for and cannot be had, in one line."""


def choose(asked: str, log: Callable[[str], None]):
    """Name and module of the backend for `asked` (auto, cpu or cuda); auto says in one line why it is not cuda."""
    if asked == "cpu":
        return "cpu", kernels_cpu
    reason = _why_no_device()
    if reason is None:
        import kernels_cuda

        return "cuda", kernels_cuda
    if asked == "cuda":
        raise BackendError(f"no CUDA backend: {reason}")
    log(f"{reason}: computing on the CPU")
    return "cpu", kernels_cpu


def _why_no_device() -> str | None:
    if not numba.config.ENABLE_CUDASIM:
        try:
            ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        except OSError:
            return "no CUDA driver was found"
        missing = _missing_package()
        if missing:
            return f"{missing} is not installed (pip install 'strata-engine[cuda]')"
    from numba import cuda

    return None if cuda.is_available() else f"no CUDA device answers ({cuda.cuda_error() or 'the driver names none'})"


def _missing_package() -> str | None:
    """What the kernels' compilation lacks, None where it is all there."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda"
    pathfinder = importlib.import_module("cuda.pathfinder")  # comes with it
    try:
        pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError:
        return "CUDA's run-time compiler (NVRTC)"
    return None


def check_widths(operations, head_dim: int, index_dim: int, state: int) -> None:
    """Raise BackendError where a model's heads are wider than a device kernel has room for."""
    for part, width, most in (
        ("an attention head", head_dim, operations.MAX_HEAD),
        ("an index key", index_dim, operations.MAX_HEAD),
        ("a recurrent head", state, operations.MAX_STATE),
    ):
        if width > most:
            raise BackendError(f"{part} of width {width} does not fit the CUDA backend ({most}): use --backend cpu")
