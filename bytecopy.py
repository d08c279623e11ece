"""Copies of many bytes past the processor's cache, for what nobody reads again soon.

It owns one kernel; it knows neither files nor pools. Invariant: when `copy` returns, every other thread sees the bytes.
Read next: sessionstate.py, which fills a restored conversation with it.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpusimd import LINE
from jit import njit

LEAST_BYTES = 1 << 18  # a shorter copy is done before a call of the kernel pays


def copy(out: np.ndarray, data: np.ndarray) -> None:
    """Copy the uint8 array `data` over `out`, of the same length; both hold bytes that follow each other.

    A plain copy reads every line of `out` before it overwrites it, which is a third of its traffic with the memory.
    """
    assert out.shape == data.shape, "a copy has the size of its source"
    if data.size < LEAST_BYTES:
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
def _settle(typingctx):
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
    _settle()
