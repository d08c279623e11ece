"""How Numba is set up: where compiled kernels are kept, how threads wait, what every kernel is compiled with.

It owns the settings that must stand before numba is imported; it knows no kernel. Read next: kernelcache.py, which
keeps what was compiled; cpusimd.py.
"""

import os
import pathlib

# libgomp spins for milliseconds by default and starves every other thread of a small machine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import numba
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from kernelcache import KernelFolder

# What kernels are made of: those that were compiled from other sources are not used. Patterns, so that a new module of
# the wing is among them; a test holds them to what kernels import.
KERNEL_SOURCES = ("cpu*.py", "kernels_cpu.py", "checksum.py", "packs.py", "cells.py", "jit.py")
_FOLDER = pathlib.Path(__file__).resolve().parent
KERNELS = KernelFolder(sorted({path for pattern in KERNEL_SOURCES for path in _FOLDER.glob(pattern)}))

_OPTIONS = {"error_model": "numpy"}  # C rules for division


def njit(function=None, *, inline="never", forceinline=False):
    """`numba.njit` as every kernel here uses it: cached on disk, without the GIL.

    `forceinline` has LLVM copy the function into each caller, so that an argument that is constant there costs nothing.
    """

    def wrap(function):
        compiled = numba.njit(nogil=True, inline=inline, forceinline=forceinline, **_OPTIONS)(function)
        compiled._cache = KERNELS.cache_of(function)
        return compiled

    return wrap(function) if function is not None else wrap


def cfunc(signature):
    """`numba.cfunc`, compiled as kernels are: what other kernels call by address."""

    def wrap(function):
        compiled = CFunc(function, normalize_signature(signature), locals={}, options=_OPTIONS)
        compiled._cache = KERNELS.cache_of(function)
        compiled.compile()
        return compiled

    return wrap
