"""Memory as kernels want it: huge pages, whole cache lines, copies past the cache.

It owns where arrays of a process begin and one way to fill them; it knows neither files nor pools. Invariant: when
`copy` returns, every other thread sees the bytes. Read next: cpuproducts.py, sessionstate.py.
"""

import math
import mmap

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpusimd import LINE
from jit import njit

HUGE_PAGE = 2 << 20  # bytes; of a page of 4 KiB the address has to be looked up 512 times as often
POOL_BYTES = 32 << 20  # bytes mapped at once for arrays that are too small for huge pages of their own
LEAST_POOLED = 64 << 10  # an array smaller than this is left to NumPy


class _Pool:
    """Memory in huge pages that arrays are cut from; it lives as long as one of them."""

    def __init__(self):
        self._rest = np.empty(0, np.uint8)

    def cut(self, size: int) -> np.ndarray:
        """`size` bytes of zeros that begin at a cache line."""
        if size > len(self._rest):
            self._rest = _mapped(POOL_BYTES)
        part, self._rest = self._rest[:size], self._rest[-(-size // LINE) * LINE :]
        return part


_pool = _Pool()


def _mapped(size: int) -> np.ndarray:
    """Zeros in pages of their own, huge ones where the system has them to give."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes cannot be had ({error})") from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def aligned_zeros(shape, dtype) -> np.ndarray:
    """Zeros that begin at a cache line, in huge pages where they are many and the system has such pages."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < LEAST_POOLED or not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = np.zeros(size + LINE - 1, np.uint8)
        first = -raw.ctypes.data % LINE
        raw = raw[first : first + size]
    else:
        raw = _pool.cut(size) if size < HUGE_PAGE else _mapped(size)
    return raw.view(dtype).reshape(shape)


@njit
def scratch_bytes(n):
    """`n` bytes of any content that begin at a cache line."""
    raw = np.empty(n + LINE - 1, np.uint8)
    first = -np.int64(raw.ctypes.data) & (LINE - 1)
    return raw[first : first + n]


@njit
def scratch(n):
    """`n` float32 of any content that begin at a cache line."""
    return scratch_bytes(4 * n).view(np.float32)


# --- copies past the cache ------------------------------------------------------------------------------------------

LEAST_STREAMED = 1 << 18  # a shorter copy is done before a call of the kernel pays


def copy(out: np.ndarray, data: np.ndarray) -> None:
    """Copy the uint8 array `data` over `out`, of the same length; both hold bytes that follow each other.

    A plain copy reads every line of `out` before it overwrites it, which is a third of its traffic with the memory.
    """
    assert out.shape == data.shape, "a copy has the size of its source"
    if data.size < LEAST_STREAMED:
        out[:] = data
    else:
        _copy(out, data)


@intrinsic
def _stream_line(typingctx, out, data, offset):
    """A line of `data` from `offset` on, wherever it lies, to the same offset of `out`, at a whole line."""

    def codegen(context, builder, signature, args):
        line = ir.VectorType(ir.IntType(64), LINE // 8)
        target, source = (
            builder.bitcast(
                builder.gep(cgutils.create_struct_proxy(kind)(context, builder, array).data, [args[2]]),
                line.as_pointer(),
            )
            for kind, array in zip(signature.args[:2], args[:2], strict=True)
        )
        store = builder.store(builder.load(source, align=1), target, align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(out, data, types.int64), codegen


@intrinsic
def _fence(typingctx):
    """Have the stores before it seen by all before those after it: streamed ones are not ordered by themselves."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def _copy(out, data):
    start = min(data.size, (-out.ctypes.data) % LINE)
    for i in range(start):
        out[i] = data[i]
    end = start + (data.size - start) // LINE * LINE
    for i in range(start, end, LINE):
        _stream_line(out, data, i)
    for i in range(end, data.size):
        out[i] = data[i]
    _fence()
