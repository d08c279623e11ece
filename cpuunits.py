"""Everything that asks which processor this is: products of bytes, tiles, the CRC instruction.

It owns each operation that has an instruction of its own on some processors; what every vector unit has is in
cpusimd.py. Invariant: an operation gives the same bits on every processor, whichever way it takes; integer sums are
exact. To add a vector unit, write its way here and name it in `_dot_for`. Read next: cpuproducts.py, checksum.py.
"""

import ctypes
import functools
import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from cpusimd import I32, LANES, address_of, i32x16, overloaded

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
    lanes = (ir.Constant(ir.VectorType(I32, 8), list(range(first, first + 8))) for first in (0, 8))
    return [builder.shuffle_vector(vector, undefined, part) for part in lanes]


def _joined(builder, parts):
    return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, LANES), list(range(LANES))))


def _dot_avx_vnni(builder, total, unsigned, signed):
    half = ir.VectorType(I32, 8)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(half, [half, half, half]), "llvm.x86.avx512.vpdpbusd.256"
    )
    parts = zip(*(_halves_of(builder, vector) for vector in (total, unsigned, signed)), strict=True)
    return _joined(builder, [builder.call(function, part) for part in parts])


def _dot_avx2(builder, total, unsigned, signed):
    """Even and odd bytes as 16-bit factors of two multiply-adds of neighbours: 255 x 128 x 2 fits their 32 bits."""
    words, half = ir.VectorType(ir.IntType(16), 16), ir.VectorType(I32, 8)
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
        overloaded(builder, f"llvm.x86.{name}", ir.VoidType(), arguments)


def _byte_pointer(context, builder, array_type, array, offset):
    address = address_of(context, builder, array_type, array, offset)
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


# --- CRC-32C -----------------------------------------------------------------------------------------------------


@intrinsic
def crc_instruction(typingctx, crc, word):
    """CRC-32C of eight bytes more, by the instruction of SSE 4.2: LLVM aborts where the target has none."""

    def codegen(context, builder, signature, args):
        word_type = ir.IntType(64)
        step = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(word_type, [word_type, word_type]), "llvm.x86.sse42.crc32.64.64"
        )
        return builder.call(step, args)

    return types.uint64(types.uint64, types.uint64), codegen


@functools.cache
def has_crc_instruction() -> bool:
    """Whether the target that kernels are compiled for has it, which settings may narrow below the machine's own."""
    return "+sse4.2" in _features(cpu_target.target_context)
