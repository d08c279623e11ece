"""Vectors of sixteen 32-bit lanes as Numba values: what the kernels need of a vector unit and Numba does not offer.

It owns the types `f32x16` and `i32x16` and their operations; it knows no weight format and no model. Each operation is
one LLVM instruction or intrinsic on generic vectors, so LLVM splits it for a narrower unit and results are the same
on every machine with fused multiply-add. Invariant: no operation reads or writes outside the 16 lanes that it names,
and none is bounds-checked: the callers' shapes are checked before they enter. Read next: kernels_cpu.py.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numpy import float32

from jit import njit

LANES = 16
I8, I32, F16, F32 = ir.IntType(8), ir.IntType(32), ir.HalfType(), ir.FloatType()


class Vector(types.Type):
    """A Numba type whose values live in vector registers."""

    def __init__(self, name: str, element: ir.Type):
        self.llvm = ir.VectorType(element, LANES)
        super().__init__(name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, fe_type):
        super().__init__(data_model_manager, fe_type, fe_type.llvm)


f32x16 = Vector("f32x16", F32)
i32x16 = Vector("i32x16", I32)


def address_of(context, builder, array_type, array, index):
    """Pointer to element `index` of a C-contiguous array, without Numba's wrap-around of negative indices."""
    struct = cgutils.create_struct_proxy(array_type)(context, builder, array)
    return builder.gep(struct.data, [index])


def as_vector(builder, address, element, n=LANES):
    return builder.bitcast(address, ir.VectorType(element, n).as_pointer())


def _splat(builder, value, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, LANES), None))


def overloaded(builder, name, result, arguments):
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [a.type for a in arguments]), name
    )
    return builder.call(function, arguments)


LINE = 64  # bytes of a cache line and of a vector; a vector that lies in two lines takes twice as long to load


# --- loads and stores ---------------------------------------------------------------------------------------------


def _loading(name, element, align, vector, emit, doc):
    """An intrinsic that loads sixteen `element`s and widens them; `emit` is a builder method's name, "" for none."""

    @intrinsic
    def operation(typingctx, array, index):
        def codegen(context, builder, signature, args):
            address = address_of(context, builder, signature.args[0], args[0], args[1])
            loaded = builder.load(as_vector(builder, address, element), align=align)
            return getattr(builder, emit)(loaded, vector.llvm) if emit else loaded

        return vector(array, types.intp), codegen

    operation.__name__, operation.__doc__ = name, doc
    return operation


load = _loading("load", F32, 4, f32x16, "", "Sixteen float32 from element `index` of a float32 array.")
load_f32 = _loading("load_f32", F32, 1, f32x16, "", "Sixteen float32 at byte `index` of a uint8 array.")
load_i32 = _loading("load_i32", I32, 1, i32x16, "", "Sixteen int32 at byte `index` of a uint8 array.")
load_f16 = _loading("load_f16", F16, 1, f32x16, "fpext", "Sixteen float16 at byte `index` of a uint8 array, exact.")
load_u8 = _loading("load_u8", I8, 1, f32x16, "uitofp", "Sixteen unsigned bytes at `index` of a uint8 array.")
load_i8 = _loading("load_i8", I8, 1, f32x16, "sitofp", "Sixteen signed bytes at `index` of a uint8 or int8 array.")


def _storing(name, element, align, vector, narrow, doc):
    """An intrinsic that stores sixteen lanes as `element`s; `narrow` names the builder methods on the way, if any."""

    @intrinsic
    def operation(typingctx, array, index, value):
        def codegen(context, builder, signature, args):
            address, lanes = address_of(context, builder, signature.args[0], args[0], args[1]), args[2]
            for method, kind in narrow:
                lanes = getattr(builder, method)(lanes, ir.VectorType(kind, LANES))
            builder.store(lanes, as_vector(builder, address, element), align=align)
            return context.get_dummy_value()

        return types.void(array, types.intp, vector), codegen

    operation.__name__, operation.__doc__ = name, doc
    return operation


store = _storing("store", F32, 4, f32x16, (), "Write sixteen float32 to element `index` of a float32 array.")
store_i32 = _storing("store_i32", I32, 1, i32x16, (), "Write sixteen int32 to byte `index` of a uint8 array.")
store_f16 = _storing(
    "store_f16", F16, 2, f32x16, (("fptrunc", F16),),
    "Write sixteen float32, rounded to nearest even float16, to element `index` of a uint16 array.",
)  # fmt: skip
store_i8 = _storing(
    "store_i8", I8, 1, f32x16, (("fptosi", I32), ("trunc", I8)),
    "Write sixteen whole-numbered float32 in -128..127 to element `index` of an int8 array.",
)  # fmt: skip


@intrinsic
def load_broadcast(typingctx, array, index):
    """Element `index` of a float32 array in every lane."""

    def codegen(context, builder, signature, args):
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        return _splat(builder, builder.load(address), f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_bf16(typingctx, array, offset):
    """Sixteen bfloat16 at byte `offset` of a uint8 array, widened to float32 (exact)."""

    def codegen(context, builder, signature, args):
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        raw = builder.load(as_vector(builder, address, ir.IntType(16)), align=1)
        wide = builder.shl(builder.zext(raw, i32x16.llvm), ir.Constant(i32x16.llvm, [16] * LANES))
        return builder.bitcast(wide, f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def half_to_float(typingctx, bits):
    """A float16, given as its uint16 bits, as float32 (exact)."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), F32)

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
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        void_pointer = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [void_pointer, I32, I32, I32]), "llvm.prefetch.p0"
        )
        builder.call(function, [builder.bitcast(address, void_pointer), *(ir.Constant(I32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic(prefer_literal=True)
def stack_f32(typingctx, n):
    """Pointer to `n` (a literal) uninitialised float32 on the stack of the enclosing function; wrap it in `carray`."""
    count = n.literal_value

    def codegen(context, builder, signature, args):
        slot = cgutils.alloca_once(builder, ir.ArrayType(F32, count))
        slot.align = 64
        return builder.bitcast(slot, F32.as_pointer())

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
        return overloaded(builder, "llvm.fma.v16f32", f32x16.llvm, args)

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
div = _binary("div", f32x16, "fdiv")
either = _binary("either", i32x16, "or_")


@intrinsic
def magnitude(typingctx, value):
    """The absolute value of each lane."""

    def codegen(context, builder, signature, args):
        return overloaded(builder, "llvm.fabs.v16f32", f32x16.llvm, args)

    return f32x16(f32x16), codegen


@intrinsic
def minimum(typingctx, a, b):
    """The smaller of two float32 in each lane (a where b is not a number)."""

    def codegen(context, builder, signature, args):
        return overloaded(builder, "llvm.minnum.v16f32", f32x16.llvm, args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def maximum(typingctx, a, b):
    """The larger of two float32 in each lane (a where b is not a number)."""

    def codegen(context, builder, signature, args):
        return overloaded(builder, "llvm.maxnum.v16f32", f32x16.llvm, args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def round_even(typingctx, value):
    """Each lane rounded to the nearest integer, ties to even, still float32."""

    def codegen(context, builder, signature, args):
        return overloaded(builder, "llvm.nearbyint.v16f32", f32x16.llvm, args)

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
        up = builder.sub(ir.Constant(I32, 24), builder.shl(args[1], ir.Constant(I32, 3)))
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
            low = ir.Constant(ir.VectorType(I32, n), list(range(n)))
            high = ir.Constant(ir.VectorType(I32, n), list(range(n, 2 * n)))
            vector = builder.fadd(
                builder.shuffle_vector(vector, undefined, low), builder.shuffle_vector(vector, undefined, high)
            )
        return builder.extract_element(vector, ir.Constant(I32, 0))

    return types.float32(f32x16), codegen


@intrinsic
def max_lanes(typingctx, value):
    """The largest lane."""

    def codegen(context, builder, signature, args):
        return overloaded(builder, "llvm.vector.reduce.fmax.v16f32", F32, args)

    return types.float32(f32x16), codegen


# --- bytes in lanes -----------------------------------------------------------------------------------------------


@intrinsic
def broadcast_i32(typingctx, array, offset):
    """Four bytes at byte `offset` of an int8 array in every lane."""

    def codegen(context, builder, signature, args):
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        word = builder.load(builder.bitcast(address, I32.as_pointer()), align=1)
        return _splat(builder, word, i32x16.llvm)

    return i32x16(array, types.intp), codegen


@intrinsic
def splat_i32(typingctx, value):
    """An int32 in every lane."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], i32x16.llvm)

    return i32x16(types.int32), codegen


@intrinsic
def subtract_bytes(typingctx, value, less):
    """Each of the four bytes of each lane less `less`, an unsigned byte, without borrowing from its neighbours."""

    def codegen(context, builder, signature, args):
        narrow = ir.VectorType(ir.IntType(8), 4 * LANES)
        word = builder.mul(args[1], ir.Constant(I32, 0x01010101))
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
            address = address_of(context, builder, signature.args[0], args[0], index)
            rows.append(builder.load(as_vector(builder, address, F32), align=4))
        width = LANES  # partial sums of a row; a vector holds those of LANES // width rows
        while len(rows) > 1:
            starts, width = range(0, 2 * LANES, width), width // 2
            low = [lane for start in starts for lane in range(start, start + width)]
            high = [lane + width for lane in low]
            masks = [ir.Constant(ir.VectorType(I32, LANES), lanes) for lanes in (low, high)]
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
    masks = [ir.Constant(ir.VectorType(I32, LANES), lanes) for lanes in (low, high)]
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
            address = address_of(context, builder, signature.args[0], args[0], place(args[1], args[2], r, 0))
            rows.append(builder.load(as_vector(builder, address, F32), align=4))
        for span in (1, 2, 4, 8):
            rows = _exchange(builder, rows, span)
        for c in range(LANES):
            index = place(args[4], args[5], c % 4, LANES * (c // 4 % 2 * 2 + c // 8))
            address = address_of(context, builder, signature.args[3], args[3], index)
            builder.store(rows[c], as_vector(builder, address, F32), align=4)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, out, types.intp, types.intp), codegen


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
