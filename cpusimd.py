"""Vectors of sixteen 32-bit lanes as Numba values: what the kernels need of a vector unit and Numba does not offer.

It owns the types `f32x16` and `i32x16` and their operations; it knows no weight format and no model. Each operation is
one LLVM instruction or intrinsic on generic vectors, so LLVM splits it for a narrower unit and results are the same
on every machine with fused multiply-add. Invariant: no operation reads or writes outside the 16 lanes that it names,
and none is bounds-checked: the callers' shapes are checked before they enter. Read next: kernels_cpu.py.
"""

import ctypes
import math
import mmap
import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model
from numpy import float32

from jit import njit

LANES = 16
_I32 = ir.IntType(32)
_F32 = ir.FloatType()


class Vector(types.Type):
    """A Numba type whose values live in vector registers."""

    def __init__(self, name: str, element: ir.Type):
        self.llvm = ir.VectorType(element, LANES)
        super().__init__(name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, fe_type):
        super().__init__(data_model_manager, fe_type, fe_type.llvm)


f32x16 = Vector("f32x16", _F32)
i32x16 = Vector("i32x16", _I32)


def _address(context, builder, array_type, array, index):
    """Pointer to element `index` of a C-contiguous array, without Numba's wrap-around of negative indices."""
    struct = cgutils.create_struct_proxy(array_type)(context, builder, array)
    return builder.gep(struct.data, [index])


def _as_vector(builder, address, element, n=LANES):
    return builder.bitcast(address, ir.VectorType(element, n).as_pointer())


def _splat(builder, value, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_I32, LANES), None))


def _overloaded(builder, name, result, arguments):
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [a.type for a in arguments]), name
    )
    return builder.call(function, arguments)


LINE = 64  # bytes of a cache line and of a vector; a vector that lies in two lines takes twice as long to load


HUGE_PAGE = 2 << 20  # bytes; of a page of 4 KiB the address has to be looked up 512 times as often
CHUNK = 32 << 20  # bytes mapped at once for arrays that are too small for huge pages of their own
LEAST_OF_CHUNK = 64 << 10  # an array smaller than this is left to NumPy


class _Chunk:
    """Memory in huge pages that arrays are cut from; it lives as long as one of them."""

    def __init__(self):
        self._rest = np.empty(0, np.uint8)

    def cut(self, size: int) -> np.ndarray:
        """`size` bytes of zeros that begin at a cache line."""
        if size > len(self._rest):
            self._rest = _mapped(CHUNK)
        part, self._rest = self._rest[:size], self._rest[-(-size // LINE) * LINE :]
        return part


_chunk = _Chunk()


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
    if size < LEAST_OF_CHUNK or not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = np.zeros(size + LINE - 1, np.uint8)
        first = -raw.ctypes.data % LINE
        raw = raw[first : first + size]
    else:
        raw = _chunk.cut(size) if size < HUGE_PAGE else _mapped(size)
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


# --- loads and stores ---------------------------------------------------------------------------------------------


@intrinsic
def load(typingctx, array, index):
    """Sixteen float32 from element `index` of a float32 array."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        return builder.load(_as_vector(builder, address, _F32), align=4)

    return f32x16(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Write sixteen float32 to element `index` of a float32 array."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], _as_vector(builder, address, _F32), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def load_broadcast(typingctx, array, index):
    """Element `index` of a float32 array in every lane."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        return _splat(builder, builder.load(address), f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_f32(typingctx, array, offset):
    """Sixteen float32 at byte `offset` of a uint8 array."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        return builder.load(_as_vector(builder, address, _F32), align=1)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_f16(typingctx, array, offset):
    """Sixteen float16 at byte `offset` of a uint8 array, widened to float32 (exact)."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        half = builder.load(_as_vector(builder, address, ir.HalfType()), align=1)
        return builder.fpext(half, f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_bf16(typingctx, array, offset):
    """Sixteen bfloat16 at byte `offset` of a uint8 array, widened to float32 (exact)."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        raw = builder.load(_as_vector(builder, address, ir.IntType(16)), align=1)
        wide = builder.shl(builder.zext(raw, i32x16.llvm), ir.Constant(i32x16.llvm, [16] * LANES))
        return builder.bitcast(wide, f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_u8(typingctx, array, offset):
    """Sixteen unsigned bytes at `offset` of a uint8 array as float32."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        raw = builder.load(_as_vector(builder, address, ir.IntType(8)), align=1)
        return builder.uitofp(raw, f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_i8(typingctx, array, offset):
    """Sixteen signed bytes at `offset` of a uint8 or int8 array as float32."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        raw = builder.load(_as_vector(builder, address, ir.IntType(8)), align=1)
        return builder.sitofp(raw, f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_i32(typingctx, array, offset):
    """Sixteen int32 at byte `offset` of a uint8 array."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        return builder.load(_as_vector(builder, address, _I32), align=1)

    return i32x16(array, types.intp), codegen


@intrinsic
def store_f16(typingctx, array, index, value):
    """Write sixteen float32, rounded to nearest even float16, to element `index` of a uint16 array."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        half = builder.fptrunc(args[2], ir.VectorType(ir.HalfType(), LANES))
        builder.store(half, _as_vector(builder, address, ir.HalfType()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def store_i32(typingctx, array, offset, value):
    """Write sixteen int32 to byte `offset` of a uint8 array."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], _as_vector(builder, address, _I32), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, i32x16), codegen


@intrinsic
def store_i8(typingctx, array, index, value):
    """Write sixteen whole-numbered float32 in -128..127 to element `index` of an int8 array."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        small = builder.trunc(builder.fptosi(args[2], i32x16.llvm), ir.VectorType(ir.IntType(8), LANES))
        builder.store(small, _as_vector(builder, address, ir.IntType(8)), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def half_to_float(typingctx, bits):
    """A float16, given as its uint16 bits, as float32 (exact)."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_half(typingctx, value):
    """The bits of a float32 rounded to nearest even float16."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def prefetch(typingctx, array, offset):
    """Ask for the cache line at byte `offset` of a uint8 array; an address past its end is harmless."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        void_pointer = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [void_pointer, _I32, _I32, _I32]), "llvm.prefetch.p0"
        )
        builder.call(function, [builder.bitcast(address, void_pointer), *(ir.Constant(_I32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic(prefer_literal=True)
def stack_f32(typingctx, n):
    """Pointer to `n` (a literal) uninitialised float32 on the stack of the enclosing function; wrap it in `carray`."""
    count = n.literal_value

    def codegen(context, builder, signature, args):
        slot = cgutils.alloca_once(builder, ir.ArrayType(_F32, count))
        slot.align = 64
        return builder.bitcast(slot, _F32.as_pointer())

    return types.CPointer(types.float32)(types.literal(count)), codegen


# --- arithmetic ---------------------------------------------------------------------------------------------------


@intrinsic
def splat(typingctx, value):
    """A float32 in every lane."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], f32x16.llvm)

    return f32x16(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c with one rounding."""

    def codegen(context, builder, signature, args):
        return _overloaded(builder, "llvm.fma.v16f32", f32x16.llvm, args)

    return f32x16(f32x16, f32x16, f32x16), codegen


def _binary(name, vector, emit):
    """An intrinsic of two vectors; Numba caches it by its code, so `emit` must be a builder method's name."""

    @intrinsic
    def operation(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, emit)(*args)

        return vector(vector, vector), codegen

    operation.__name__ = name
    return operation


add = _binary("add", f32x16, "fadd")
sub = _binary("sub", f32x16, "fsub")
mul = _binary("mul", f32x16, "fmul")
either = _binary("either", i32x16, "or_")


@intrinsic
def magnitude(typingctx, value):
    """The absolute value of each lane."""

    def codegen(context, builder, signature, args):
        return _overloaded(builder, "llvm.fabs.v16f32", f32x16.llvm, args)

    return f32x16(f32x16), codegen


@intrinsic
def minimum(typingctx, a, b):
    """The smaller of two float32 in each lane (a where b is not a number)."""

    def codegen(context, builder, signature, args):
        return _overloaded(builder, "llvm.minnum.v16f32", f32x16.llvm, args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def maximum(typingctx, a, b):
    """The larger of two float32 in each lane (a where b is not a number)."""

    def codegen(context, builder, signature, args):
        return _overloaded(builder, "llvm.maxnum.v16f32", f32x16.llvm, args)

    return f32x16(f32x16, f32x16), codegen


div = _binary("div", f32x16, "fdiv")


@intrinsic
def round_even(typingctx, value):
    """Each lane rounded to the nearest integer, ties to even, still float32."""

    def codegen(context, builder, signature, args):
        return _overloaded(builder, "llvm.nearbyint.v16f32", f32x16.llvm, args)

    return f32x16(f32x16), codegen


@intrinsic
def power_of_two(typingctx, exponent):
    """2 ** exponent for whole-numbered lanes in -126..127."""

    def codegen(context, builder, signature, args):
        whole = builder.add(builder.fptosi(args[0], i32x16.llvm), ir.Constant(i32x16.llvm, [127] * LANES))
        return builder.bitcast(builder.shl(whole, ir.Constant(i32x16.llvm, [23] * LANES)), f32x16.llvm)

    return f32x16(f32x16), codegen


@intrinsic
def bits(typingctx, value, shift, mask):
    """(value >> shift) & mask in each lane, shift unsigned; shift and mask are scalars."""

    def codegen(context, builder, signature, args):
        shifted = builder.lshr(args[0], _splat(builder, args[1], i32x16.llvm))
        return builder.and_(shifted, _splat(builder, args[2], i32x16.llvm))

    return i32x16(i32x16, types.int32, types.int32), codegen


@intrinsic
def shift_left(typingctx, value, shift):
    """value << shift in each lane."""

    def codegen(context, builder, signature, args):
        return builder.shl(args[0], _splat(builder, args[1], i32x16.llvm))

    return i32x16(i32x16, types.int32), codegen


@intrinsic
def signed_byte(typingctx, value, position):
    """Byte `position` (0 the lowest) of each lane, sign-extended, as float32."""

    def codegen(context, builder, signature, args):
        up = builder.sub(ir.Constant(_I32, 24), builder.shl(args[1], ir.Constant(_I32, 3)))
        left = builder.shl(args[0], _splat(builder, up, i32x16.llvm))
        return builder.sitofp(builder.ashr(left, ir.Constant(i32x16.llvm, [24] * LANES)), f32x16.llvm)

    return f32x16(i32x16, types.int32), codegen


@intrinsic
def to_float(typingctx, value):
    """Each int32 lane as float32."""

    def codegen(context, builder, signature, args):
        return builder.sitofp(args[0], f32x16.llvm)

    return f32x16(i32x16), codegen


@intrinsic
def sum_lanes(typingctx, value):
    """The sum of the lanes as a tree of halves: a fixed order, ((0+8)+(4+12))+... ."""

    def codegen(context, builder, signature, args):
        vector, n = args[0], LANES
        while n > 1:
            n //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            low = ir.Constant(ir.VectorType(_I32, n), list(range(n)))
            high = ir.Constant(ir.VectorType(_I32, n), list(range(n, 2 * n)))
            vector = builder.fadd(
                builder.shuffle_vector(vector, undefined, low), builder.shuffle_vector(vector, undefined, high)
            )
        return builder.extract_element(vector, ir.Constant(_I32, 0))

    return types.float32(f32x16), codegen


@intrinsic
def max_lanes(typingctx, value):
    """The largest lane."""

    def codegen(context, builder, signature, args):
        return _overloaded(builder, "llvm.vector.reduce.fmax.v16f32", _F32, args)

    return types.float32(f32x16), codegen


# --- integer dot products -----------------------------------------------------------------------------------------


def _features(context) -> str:
    """What the target that code is compiled for can do; settings may narrow it below the machine's own."""
    return context.codegen().magic_tuple()[2]


def _dot_vnni(builder, total, unsigned, signed):
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(i32x16.llvm, [i32x16.llvm, i32x16.llvm, i32x16.llvm]), name
    )
    return builder.call(function, [total, unsigned, signed])


def _halves_of(builder, vector):
    """A vector of sixteen lanes as two of eight."""
    undefined = ir.Constant(vector.type, ir.Undefined)
    lanes = (ir.Constant(ir.VectorType(_I32, 8), list(range(first, first + 8))) for first in (0, 8))
    return [builder.shuffle_vector(vector, undefined, part) for part in lanes]


def _joined(builder, parts):
    return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES))))


def _dot_avx_vnni(builder, total, unsigned, signed):
    half = ir.VectorType(_I32, 8)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(half, [half, half, half]), "llvm.x86.avx512.vpdpbusd.256"
    )
    parts = zip(*(_halves_of(builder, vector) for vector in (total, unsigned, signed)), strict=True)
    return _joined(builder, [builder.call(function, part) for part in parts])


def _dot_avx2(builder, total, unsigned, signed):
    """Even and odd bytes as 16-bit factors of two multiply-adds of neighbours: 255 x 128 x 2 fits their 32 bits."""
    words, half = ir.VectorType(ir.IntType(16), 16), ir.VectorType(_I32, 8)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(half, [words, words]), "llvm.x86.avx2.pmadd.wd"
    )
    eight = ir.Constant(words, [8] * 16)
    sums = []
    for start, *factors in zip(*(_halves_of(builder, vector) for vector in (total, unsigned, signed)), strict=True):
        u, s = (builder.bitcast(factor, words) for factor in factors)
        even = builder.call(
            function, [builder.and_(u, ir.Constant(words, [255] * 16)), builder.ashr(builder.shl(s, eight), eight)]
        )
        odd = builder.call(function, [builder.lshr(u, eight), builder.ashr(s, eight)])
        sums.append(builder.add(start, builder.add(even, odd)))
    return _joined(builder, sums)


def _dot_portable(builder, total, unsigned, signed):
    """Byte by byte: zero-extend one factor, sign-extend the other, multiply and add as 32-bit integers."""
    for j in range(4):
        up = ir.Constant(i32x16.llvm, [24 - 8 * j] * LANES)
        down = ir.Constant(i32x16.llvm, [24] * LANES)
        a = builder.lshr(builder.shl(unsigned, up), down)
        b = builder.ashr(builder.shl(signed, up), down)
        total = builder.add(total, builder.mul(a, b))
    return total


def _dot_for(features: str):
    """The fastest way to sum products of bytes that a target has."""
    if "+avx512vnni" in features and "+avx512f" in features:
        return _dot_vnni
    if "+avxvnni" in features or ("+avx512vnni" in features and "+avx512vl" in features):
        return _dot_avx_vnni
    return _dot_avx2 if "+avx2" in features else _dot_portable


@intrinsic
def dot_bytes(typingctx, total, unsigned, signed):
    """total + the sum of unsigned byte * signed byte over the four bytes of each lane, exact."""

    def codegen(context, builder, signature, args):
        return _dot_for(_features(context))(builder, *args)

    return i32x16(i32x16, i32x16, i32x16), codegen


@intrinsic
def broadcast_i32(typingctx, array, offset):
    """Four bytes at byte `offset` of an int8 array in every lane."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        word = builder.load(builder.bitcast(address, _I32.as_pointer()), align=1)
        return _splat(builder, word, i32x16.llvm)

    return i32x16(array, types.intp), codegen


@intrinsic
def splat_i32(typingctx, value):
    """An int32 in every lane."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], i32x16.llvm)

    return i32x16(types.int32), codegen


flip = _binary("flip", i32x16, "xor")


@intrinsic
def subtract_bytes(typingctx, value, less):
    """Each of the four bytes of each lane less `less`, an unsigned byte, without borrowing from its neighbours."""

    def codegen(context, builder, signature, args):
        narrow = ir.VectorType(ir.IntType(8), 4 * LANES)
        word = builder.mul(args[1], ir.Constant(_I32, 0x01010101))
        result = builder.sub(
            builder.bitcast(args[0], narrow), builder.bitcast(_splat(builder, word, i32x16.llvm), narrow)
        )
        return builder.bitcast(result, i32x16.llvm)

    return i32x16(i32x16, types.int32), codegen


# --- sixteen by sixteen -------------------------------------------------------------------------------------------


@intrinsic
def sum_rows(typingctx, array, at):
    """Lane r is `sum_lanes` of the sixteen float32 from element at + 16 r on, of the same bits."""

    def codegen(context, builder, signature, args):
        rows = []
        for r in range(LANES):
            index = builder.add(args[1], ir.Constant(args[1].type, LANES * r))
            address = _address(context, builder, signature.args[0], args[0], index)
            rows.append(builder.load(_as_vector(builder, address, _F32), align=4))
        width = LANES  # partial sums of a row; a vector holds those of LANES // width rows
        while len(rows) > 1:
            starts, width = range(0, 2 * LANES, width), width // 2
            low = [lane for start in starts for lane in range(start, start + width)]
            high = [lane + width for lane in low]
            masks = [ir.Constant(ir.VectorType(_I32, LANES), lanes) for lanes in (low, high)]
            rows = [
                builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks))
                for a, b in zip(rows[::2], rows[1::2], strict=True)
            ]
        return rows[0]

    return f32x16(array, types.intp), codegen


def _exchange(builder, rows, span):
    """One step of a transposition: exchange the off-diagonal squares of `span` rows by `span` columns."""
    low = [lane - span + LANES if lane & span else lane for lane in range(LANES)]
    high = [lane + LANES if lane & span else lane + span for lane in range(LANES)]
    masks = [ir.Constant(ir.VectorType(_I32, LANES), lanes) for lanes in (low, high)]
    mixed = list(rows)
    for r in range(LANES):
        if not r & span:
            mixed[r], mixed[r + span] = (builder.shuffle_vector(rows[r], rows[r + span], mask) for mask in masks)
    return mixed


@intrinsic
def transpose(typingctx, source, at, stride, out, out_at, out_stride):
    """Columns of source[at + stride r + c], sixteen by sixteen float32, as rows of `out` in the order of `sum_lanes`.

    Column c is row c // 4 % 2 * 2 + c // 8 of the four rows from out_at + out_stride (c % 4): those that `sum_lanes`
    adds first stand together.
    """

    def codegen(context, builder, signature, args):
        def place(first, factor, constant, more):
            index = builder.add(first, builder.mul(factor, ir.Constant(factor.type, constant)))
            return builder.add(index, ir.Constant(index.type, more))

        rows = []
        for r in range(LANES):
            address = _address(context, builder, signature.args[0], args[0], place(args[1], args[2], r, 0))
            rows.append(builder.load(_as_vector(builder, address, _F32), align=4))
        for span in (1, 2, 4, 8):
            rows = _exchange(builder, rows, span)
        for c in range(LANES):
            index = place(args[4], args[5], c % 4, LANES * (c // 4 % 2 * 2 + c // 8))
            address = _address(context, builder, signature.args[3], args[3], index)
            builder.store(rows[c], _as_vector(builder, address, _F32), align=4)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, out, types.intp, types.intp), codegen


# --- tiles of bytes -----------------------------------------------------------------------------------------------
#
# The matrix unit of some x86 processors (AMX): registers of sixteen rows of 64 bytes. A tile of `a`, a row of bytes for
# each token, times a tile of `b`, quads of columns by sixteen rows of weights, is added to sixteen by sixteen int32.

TILE_SHAPES = np.zeros(64, np.uint8)  # what `tiles_begin` loads: palette 1, then bytes a row, then rows of each tile
TILE_SHAPES[0] = 1
# Tile 0: the sums. Tiles 1 and 2: a and b of 32 columns. Tiles 3 and 4: of 16 columns.
for _tile, (_rows, _row_bytes) in enumerate(((16, 64), (16, 32), (8, 64), (16, 16), (4, 64))):
    TILE_SHAPES[16 + 2 * _tile], TILE_SHAPES[48 + _tile] = _row_bytes, _rows


def _ask_for_tiles() -> bool:
    """Whether code for tiles is compiled here and this process may run it; Linux has each process ask once."""
    if "+amx-int8" not in _features(cpu_target.target_context) or platform.system() != "Linux":
        return False
    system_call = ctypes.CDLL(None).syscall
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return system_call(arch_prctl, request_permission, tile_data) == 0


def _tile_instruction(builder, context, name, arguments) -> None:
    """Emit an instruction where the target has it; elsewhere `has_tiles` is False and nothing comes here."""
    if "+amx-int8" in _features(context):
        _overloaded(builder, f"llvm.x86.{name}", ir.VoidType(), arguments)


def _byte_pointer(context, builder, array_type, array, offset):
    address = _address(context, builder, array_type, array, offset)
    return builder.bitcast(address, ir.IntType(8).as_pointer())


@intrinsic
def tiles_begin(typingctx, shapes):
    """Set the shapes of the tile registers, TILE_SHAPES; before the first use in a run of tile operations."""

    def codegen(context, builder, signature, args):
        pointer = _byte_pointer(context, builder, signature.args[0], args[0], ir.Constant(ir.IntType(64), 0))
        _tile_instruction(builder, context, "ldtilecfg", [pointer])
        return context.get_dummy_value()

    return types.void(shapes), codegen


@intrinsic
def tiles_end(typingctx):
    """Give the tile registers back, so that switching threads need not save them."""

    def codegen(context, builder, signature, args):
        _tile_instruction(builder, context, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def tile_product(typingctx, a, a_at, a_stride, b, b_at, n_columns, out):
    """out int32 [16 tokens, 16 rows] = a times b, exact: int8 at byte offsets, `n_columns` the literal 32 or 16.

    a has a row of bytes a token, `a_stride` apart; b has a quad of columns, 64 bytes, a row.
    """
    first = {32: 1, 16: 3}[n_columns.literal_value]

    def codegen(context, builder, signature, args):
        zero, row_bytes = ir.Constant(ir.IntType(64), 0), ir.Constant(ir.IntType(64), 64)
        tile_0, tile_a, tile_b = (ir.Constant(ir.IntType(8), n) for n in (0, first, first + 1))
        a_pointer = _byte_pointer(context, builder, signature.args[0], args[0], args[1])
        b_pointer = _byte_pointer(context, builder, signature.args[3], args[3], args[4])
        out_pointer = _byte_pointer(context, builder, signature.args[6], args[6], zero)
        _tile_instruction(builder, context, "tilezero", [tile_0])
        _tile_instruction(builder, context, "tileloadd64", [tile_a, a_pointer, args[2]])
        _tile_instruction(builder, context, "tileloadd64", [tile_b, b_pointer, row_bytes])
        _tile_instruction(builder, context, "tdpbssd", [tile_0, tile_a, tile_b])
        _tile_instruction(builder, context, "tilestored64", [tile_0, out_pointer, row_bytes])
        return context.get_dummy_value()

    return types.void(a, types.intp, types.intp, b, types.intp, n_columns, out), codegen


has_tiles = _ask_for_tiles()


# --- functions ----------------------------------------------------------------------------------------------------

_LOG2_E = float32(1.44269504)
_LN_2_HIGH, _LN_2_LOW = float32(-0.693359375), float32(2.12194440e-4)
# Minimax coefficients of (e**r - 1 - r) / r**2 on |r| <= ln(2)/2, relative error below 2 units in the last place.
_EXP_5, _EXP_4, _EXP_3 = float32(1.9875691500e-4), float32(1.3981999507e-3), float32(8.3334519073e-3)
_EXP_2, _EXP_1, _EXP_0 = float32(4.1665795894e-2), float32(1.6666665459e-1), float32(5.0000001201e-1)


@njit(inline="always")
def exp(value):
    """e ** value in each lane; below -87 the result is 2 ** -126, above 88 it is about e ** 88."""
    x = maximum(minimum(value, splat(float32(88.0))), splat(float32(-87.3)))
    n = round_even(mul(x, splat(_LOG2_E)))
    r = fma(n, splat(_LN_2_LOW), fma(n, splat(_LN_2_HIGH), x))
    p = fma(splat(_EXP_5), r, splat(_EXP_4))
    p = fma(p, r, splat(_EXP_3))
    p = fma(p, r, splat(_EXP_2))
    p = fma(p, r, splat(_EXP_1))
    p = fma(p, r, splat(_EXP_0))
    p = add(fma(p, mul(r, r), r), splat(float32(1)))
    return mul(p, power_of_two(n))


@njit(inline="always")
def sigmoid(value):
    """1 / (1 + e ** -value) in each lane."""
    one = splat(float32(1))
    return div(one, add(one, exp(sub(splat(float32(0)), value))))
