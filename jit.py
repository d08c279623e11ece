"""How Numba is set up: where compiled kernels are kept, how threads wait, what every kernel is compiled with.

It owns the settings that must stand before numba is imported; it knows no kernel. Invariant: a kernel that was compiled
from other sources is never loaded, because the cache folder is named by a digest of all of them (Numba itself looks
only at the file of the outermost function). Read next: simd.py.
"""

import hashlib
import os
import pathlib
import tempfile

KERNEL_SOURCES = (
    "jit.py", "simd.py", "team.py", "packing.py", "cpupacks.py", "cpuattention.py", "kernels_cpu.py", "experthost.py",
    "fingerprint.py", "bytecopy.py",
)  # fmt: skip

TEMPORARY_PREFIX = "strata-numba-"  # of a cache folder that goes with its process


def _cache_dir() -> pathlib.Path:
    """A writable folder named by the kernel sources; Numba raises at import where it finds none."""
    here = pathlib.Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for name in KERNEL_SOURCES:
        source = here / name
        digest.update(source.read_bytes() if source.exists() else b"")
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(root) / "strata" / f"numba-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        # A read-only home compiles anew in each process, in a folder that goes with it.
        return pathlib.Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))


os.environ.setdefault("NUMBA_CACHE_DIR", str(_cache_dir()))
# libgomp spins for milliseconds by default and starves every other thread of a small machine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import numba  # noqa: E402

# Whoever imports numba before this module has it read the environment too early.
numba.config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]


_OPTIONS = {"cache": True, "error_model": "numpy"}  # C rules for division


def njit(function=None, *, inline="never", forceinline=False):
    """`numba.njit` as every kernel here uses it: cached on disk, without the GIL.

    `forceinline` has LLVM copy the function into each caller, so that an argument that is constant there costs nothing.
    """
    wrap = numba.njit(nogil=True, inline=inline, forceinline=forceinline, **_OPTIONS)
    return wrap(function) if function is not None else wrap


def cfunc(signature):
    """`numba.cfunc`, compiled as kernels are: what other kernels call by address."""
    return numba.cfunc(signature, **_OPTIONS)
