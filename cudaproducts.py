"""Weights on the device: packs, their rows, and products with them, in Numba CUDA.

It owns the decoding of weight types and the matrix products; it knows no layer. Invariant: a pack has the bytes that
kernels_cpu.py gives it, so the rows that are read from it are exact, and the bits of a product do not depend on how
many tokens stand beside it. Sixteen rows lie side by side: half a warp reads 64 bytes at once.
Read next: kernels_cuda.py.
"""

from typing import NamedTuple

import numpy as np
from numba import cuda

import cpuproducts
import cudapools
import packs
from cudablock import MAX_THREADS, bits_as_float
from cudapools import launch
from packs import BLOCK, F16, F32, ROWS

TILE = 8  # tokens that share one decoding of a weight
# Room for one sum a thread and token; the shape of a shared array has to be a name or a number.
PARTIALS = MAX_THREADS + ROWS
TILE_PARTIALS = TILE * PARTIALS


# --- packs --------------------------------------------------------------------------------------------------------


class Pack(NamedTuple):
    """Weights of one or more matrices of a shape: one piece of device memory seen as four element types."""

    kind: int
    bytes: object
    words: object
    halves: object
    floats: object
    group_bytes: int
    n_rows: int
    n_cols: int
    n_matrices: int


def pack(kind, raw, n_cols, *, round_x=False):
    """`kernels_cpu.pack`, on the device; raises ValueError where the width cannot be cut into the kind's blocks.

    Activations stay float32 here, whatever `round_x` asks for.
    """
    return to_device(cpuproducts.pack(kind, raw, n_cols))


def to_device(packed):
    """A pack of kernels_cpu.py on the device."""
    return seen_as(packed, cuda.to_device(packed.data), packed.n_matrices)


def room_for(packed, n_matrices):
    """Device memory of any content for some matrices like those of a pack of kernels_cpu.py."""
    return seen_as(packed, cuda.device_array(n_matrices * matrix_bytes(packed), np.uint8), n_matrices)


def seen_as(packed, data, n_matrices) -> Pack:
    """Device memory as matrices like those of a pack of kernels_cpu.py; data uint8, of at least that many."""
    views = (data.view(dtype) for dtype in (np.int32, np.float16, np.float32))
    return Pack(packed.kind, data, *views, packed.group_bytes, packed.n_rows, packed.n_cols, n_matrices)


def matrix_bytes(packed) -> int:
    """Bytes of one matrix of a pack."""
    return -(-packed.n_rows // ROWS) * packed.group_bytes


@cuda.jit(device=True)
def _block_start(kind, at, block):
    """Byte of the file's block that holds column block `block` (32 columns) of the row group at byte `at`."""
    return at + block // packs.SHARE[kind] * packs.BYTES[kind]


@cuda.jit(device=True)
def _scale(kind, data, halves, at, block, half, row):
    """(scale, offset) of 16 columns of a row: a weight is code * scale + offset. Not for kinds of floats."""
    scale, sub = np.float32(halves[at // 2 + row]), block % packs.SHARE[kind]
    if packs.SCALES[kind]:
        sub_scale = sub * packs.HALVES[kind] + half * (packs.HALVES[kind] - 1)
        code = np.int32(data[at + packs.SCALES[kind] + sub_scale * ROWS + row])
        if packs.SIGNED[kind] and code > 127:
            code = np.int32(code - 256)
        scale *= np.float32(code)
    if packs.OFFSET[kind] == 0:
        return scale, scale * np.float32(-packs.ZERO[kind])
    offset = np.float32(halves[(at + packs.OFFSET[kind]) // 2 + row])
    if packs.MINIMA[kind]:
        offset = -(offset * np.float32(data[at + packs.MINIMA[kind] + sub * ROWS + row]))
    return scale, offset


@cuda.jit(device=True)
def _codes(kind, words, at, block, quad, row):
    """Unsigned codes of four columns of a row, a byte each."""
    bits, at = packs.BITS[kind], at + packs.CODES[kind] + block % packs.SHARE[kind] * packs.CODES_STEP[kind]
    if bits == 8:
        return words[(at + quad * 64) // 4 + row]
    codes = np.int32((words[(at + (quad & 3) * 64) // 4 + row] >> np.int32(4 * (quad >> 2))) & np.int32(0x0F0F0F0F))
    if bits == 5:
        high = np.int32((words[(at + 256) // 4 + row] >> np.int32(quad)) & np.int32(0x01010101))
        codes = np.int32(codes | np.int32(high << np.int32(4)))
    elif bits == 6:
        plane = words[(at + 256 + (quad >> 2) * 64) // 4 + row]
        high = np.int32((plane >> np.int32(2 * (quad & 3))) & np.int32(0x03030303))
        codes = np.int32(codes | np.int32(high << np.int32(4)))
    return codes


@cuda.jit(device=True)
def _float_weight(kind, words, halves, floats, at, column, row):
    """One weight of a kind of floats; `at` is its block, `column` in it."""
    index = column * ROWS + row
    if kind == F32:
        return floats[at // 4 + index]
    if kind == F16:
        return np.float32(halves[at // 2 + index])
    word = words[at // 4 + index // 2]
    if index % 2:
        return bits_as_float(np.int32(word & np.int32(-65536)))
    return bits_as_float(np.int32(word << np.int32(16)))


@cuda.jit(device=True)
def _quad(kind, words, halves, floats, at, block, quad, row, scale, offset):
    """The weights of four columns of a row."""
    if not packs.CODED[kind]:
        k = 4 * quad
        return (
            _float_weight(kind, words, halves, floats, at, k, row),
            _float_weight(kind, words, halves, floats, at, k + 1, row),
            _float_weight(kind, words, halves, floats, at, k + 2, row),
            _float_weight(kind, words, halves, floats, at, k + 3, row),
        )
    codes = _codes(kind, words, at, block, quad, row)
    c0 = np.float32(np.int32(codes & np.int32(255)))
    c1 = np.float32(np.int32((codes >> np.int32(8)) & np.int32(255)))
    c2 = np.float32(np.int32((codes >> np.int32(16)) & np.int32(255)))
    c3 = np.float32(np.int32((codes >> np.int32(24)) & np.int32(255)))
    return (
        cuda.fma(c0, scale, offset), cuda.fma(c1, scale, offset), cuda.fma(c2, scale, offset),
        cuda.fma(c3, scale, offset),
    )  # fmt: skip


@cuda.jit
def _gather_kernel(kind, data, words, halves, floats, group_bytes, n_cols, ids, out):
    """out float32 [n, n_cols] = rows ids[n]; an item is four columns. Exact, like its twin."""
    quads = n_cols // 4
    for item in range(cuda.grid(1), ids.shape[0] * quads, cuda.gridsize(1)):
        i, k = item // quads, item % quads
        token = ids[i]
        block, quad, row = k // 8, k % 8, token % ROWS
        at = _block_start(kind, (token // ROWS) * group_bytes, block)
        scale, offset = np.float32(0), np.float32(0)
        if packs.CODED[kind]:
            scale, offset = _scale(kind, data, halves, at, block, quad >> 2, row)
        w0, w1, w2, w3 = _quad(kind, words, halves, floats, at, block, quad, row, scale, offset)
        out[i, 4 * k] = w0
        out[i, 4 * k + 1] = w1
        out[i, 4 * k + 2] = w2
        out[i, 4 * k + 3] = w3


def gather_rows(weights, ids, out):
    """out[i] = row ids[i] of the weights as float32 [n_cols]; ids on the device."""
    w = weights
    launch(_gather_kernel, ids.shape[0] * (w.n_cols // 4), w.kind, w.bytes, w.words, w.halves, w.floats, w.group_bytes,
            w.n_cols, ids, out)


# --- matrix products ----------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _fma4(w0, w1, w2, w3, x, token, k, total):
    """Four columns of a token on top of its sum, in their order."""
    total = cuda.fma(w0, x[token, k], total)
    total = cuda.fma(w1, x[token, k + 1], total)
    total = cuda.fma(w2, x[token, k + 2], total)
    return cuda.fma(w3, x[token, k + 3], total)


@cuda.jit(device=True)
def _dot_1(kind, data, words, halves, floats, at, n_cols, x, token, row, first, step):
    """Row `row` of the group at byte `at` times one token, over the column blocks first, first + step, ...

    cpuexperts.py sums in the same order, to the last bit.
    """
    total = np.float32(0)
    for block in range(first, (n_cols + BLOCK - 1) // BLOCK, step):
        start = _block_start(kind, at, block)
        scale, offset = np.float32(0), np.float32(0)
        for quad in range(min(BLOCK, n_cols - block * BLOCK) // 4):
            if packs.CODED[kind] and quad % 4 == 0:
                scale, offset = _scale(kind, data, halves, start, block, quad >> 2, row)
            w0, w1, w2, w3 = _quad(kind, words, halves, floats, start, block, quad, row, scale, offset)
            k = block * BLOCK + 4 * quad
            total = _fma4(w0, w1, w2, w3, x, token, k, total)
    return total


@cuda.jit(device=True)
def _dot_8(kind, data, words, halves, floats, at, n_cols, x, token, last, row, first, step):
    """`_dot_1` for the tokens token..token + 7 (those behind `last` repeat it), each summed in the same order."""
    t1, t2, t3, t4 = min(token + 1, last), min(token + 2, last), min(token + 3, last), min(token + 4, last)
    t5, t6, t7 = min(token + 5, last), min(token + 6, last), min(token + 7, last)
    a0, a1, a2, a3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    a4, a5, a6, a7 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for block in range(first, (n_cols + BLOCK - 1) // BLOCK, step):
        start = _block_start(kind, at, block)
        scale, offset = np.float32(0), np.float32(0)
        for quad in range(min(BLOCK, n_cols - block * BLOCK) // 4):
            if packs.CODED[kind] and quad % 4 == 0:
                scale, offset = _scale(kind, data, halves, start, block, quad >> 2, row)
            w0, w1, w2, w3 = _quad(kind, words, halves, floats, start, block, quad, row, scale, offset)
            k = block * BLOCK + 4 * quad
            a0 = _fma4(w0, w1, w2, w3, x, token, k, a0)
            a1 = _fma4(w0, w1, w2, w3, x, t1, k, a1)
            a2 = _fma4(w0, w1, w2, w3, x, t2, k, a2)
            a3 = _fma4(w0, w1, w2, w3, x, t3, k, a3)
            a4 = _fma4(w0, w1, w2, w3, x, t4, k, a4)
            a5 = _fma4(w0, w1, w2, w3, x, t5, k, a5)
            a6 = _fma4(w0, w1, w2, w3, x, t6, k, a6)
            a7 = _fma4(w0, w1, w2, w3, x, t7, k, a7)
    return a0, a1, a2, a3, a4, a5, a6, a7


@cuda.jit(device=True)
def _write_sums(partial, slices, group, n_rows, first, n, out):
    """Sum the slices of a row group in order and write out[first + t, row] for t < n; partial [tile][slice][16]."""
    for item in range(cuda.threadIdx.x, n * ROWS, cuda.blockDim.x):
        t, row = item // ROWS, item % ROWS
        if group * ROWS + row < n_rows:
            total = np.float32(0)
            for part in range(slices):
                total += partial[(t * slices + part) * ROWS + row]
            out[first + t, group * ROWS + row] = total


@cuda.jit
def _matmul_1_kernel(kind, data, words, halves, floats, group_bytes, n_rows, n_cols, x, out):
    """out [T, n_rows] = x [T, n_cols] times the rows; a block is sixteen rows and one token, blockIdx (group, token).

    Half a warp reads sixteen rows' quads, 64 bytes; the slices of a block take column blocks in turn. Shared: 16 floats
    a slice. Twin: matmul; the order of a sum differs from it.
    """
    partial = cuda.shared.array(PARTIALS, np.float32)
    lanes = min(ROWS, cuda.blockDim.x)
    slices = cuda.blockDim.x // lanes
    part, group, token = cuda.threadIdx.x // lanes, cuda.blockIdx.x, cuda.blockIdx.y
    for row in range(cuda.threadIdx.x % lanes, min(ROWS, n_rows - group * ROWS), lanes):
        partial[part * ROWS + row] = _dot_1(kind, data, words, halves, floats, group * group_bytes, n_cols, x, token,
                                            row, part, slices)
    cuda.syncthreads()
    _write_sums(partial, slices, group, n_rows, token, 1, out)


@cuda.jit
def _matmul_8_kernel(kind, data, words, halves, floats, group_bytes, n_rows, n_cols, x, out):
    """`_matmul_1_kernel` for eight tokens a block, each with the same bits; blockIdx (group, tile of tokens)."""
    partial = cuda.shared.array(TILE_PARTIALS, np.float32)
    lanes = min(ROWS, cuda.blockDim.x)
    slices = cuda.blockDim.x // lanes
    part, group, token = cuda.threadIdx.x // lanes, cuda.blockIdx.x, cuda.blockIdx.y * TILE
    for row in range(cuda.threadIdx.x % lanes, min(ROWS, n_rows - group * ROWS), lanes):
        a0, a1, a2, a3, a4, a5, a6, a7 = _dot_8(
            kind, data, words, halves, floats, group * group_bytes, n_cols, x, token, x.shape[0] - 1, row, part, slices)
        at, step = part * ROWS + row, slices * ROWS
        partial[at] = a0
        partial[at + step] = a1
        partial[at + 2 * step] = a2
        partial[at + 3 * step] = a3
        partial[at + 4 * step] = a4
        partial[at + 5 * step] = a5
        partial[at + 6 * step] = a6
        partial[at + 7 * step] = a7
    cuda.syncthreads()
    _write_sums(partial, slices, group, n_rows, token, min(TILE, x.shape[0] - token), out)


def matmul(weights, x, out):
    """out = x times the transposed weights; x float32 [T, n_cols], out float32 [T, n_rows], both C-contiguous."""
    w, n_tokens = weights, x.shape[0]
    groups = -(-w.n_rows // ROWS)
    args = (w.kind, w.bytes, w.words, w.halves, w.floats, w.group_bytes, w.n_rows, w.n_cols, x, out)
    if n_tokens < TILE // 2:
        _matmul_1_kernel[(groups, n_tokens), cudapools.THREADS](*args)
    else:
        _matmul_8_kernel[(groups, -(-n_tokens // TILE)), cudapools.THREADS](*args)


@cuda.jit
def _expert_tiles_kernel(offsets, tile, tiles):
    """tiles int32 [n, 3]: expert, first row and end of each run of at most `tile` rows, then expert -1. One thread."""
    if cuda.grid(1) == 0:
        n = 0
        for expert in range(offsets.shape[0] - 1):
            for row in range(offsets[expert], offsets[expert + 1], tile):
                tiles[n, 0] = expert
                tiles[n, 1] = row
                tiles[n, 2] = min(row + tile, offsets[expert + 1])
                n += 1
        while n < tiles.shape[0]:
            tiles[n, 0] = -1
            n += 1


@cuda.jit
def _expert_1_kernel(kind, data, words, halves, floats, group_bytes, n_rows, n_cols, x, tiles, out):
    """Each run of one row times its matrix; blockIdx (group, run). Shared and order as in `_matmul_1_kernel`."""
    partial = cuda.shared.array(PARTIALS, np.float32)
    lanes = min(ROWS, cuda.blockDim.x)
    slices = cuda.blockDim.x // lanes
    part, group = cuda.threadIdx.x // lanes, cuda.blockIdx.x
    matrix, token = tiles[cuda.blockIdx.y, 0], tiles[cuda.blockIdx.y, 1]
    if matrix >= 0:
        at = (matrix * ((n_rows + ROWS - 1) // ROWS) + group) * group_bytes
        for row in range(cuda.threadIdx.x % lanes, min(ROWS, n_rows - group * ROWS), lanes):
            partial[part * ROWS + row] = _dot_1(kind, data, words, halves, floats, at, n_cols, x, token, row, part,
                                                slices)
    cuda.syncthreads()
    if matrix >= 0:
        _write_sums(partial, slices, group, n_rows, token, 1, out)


@cuda.jit
def _expert_8_kernel(kind, data, words, halves, floats, group_bytes, n_rows, n_cols, x, tiles, out):
    """`_expert_1_kernel` for runs of up to eight rows, each with the same bits."""
    partial = cuda.shared.array(TILE_PARTIALS, np.float32)
    lanes = min(ROWS, cuda.blockDim.x)
    slices = cuda.blockDim.x // lanes
    part, group = cuda.threadIdx.x // lanes, cuda.blockIdx.x
    matrix, token, end = tiles[cuda.blockIdx.y, 0], tiles[cuda.blockIdx.y, 1], tiles[cuda.blockIdx.y, 2]
    if matrix >= 0:
        start = (matrix * ((n_rows + ROWS - 1) // ROWS) + group) * group_bytes
        for row in range(cuda.threadIdx.x % lanes, min(ROWS, n_rows - group * ROWS), lanes):
            a0, a1, a2, a3, a4, a5, a6, a7 = _dot_8(kind, data, words, halves, floats, start, n_cols, x, token,
                                                    end - 1, row, part, slices)
            at, step = part * ROWS + row, slices * ROWS
            partial[at] = a0
            partial[at + step] = a1
            partial[at + 2 * step] = a2
            partial[at + 3 * step] = a3
            partial[at + 4 * step] = a4
            partial[at + 5 * step] = a5
            partial[at + 6 * step] = a6
            partial[at + 7 * step] = a7
    cuda.syncthreads()
    if matrix >= 0:
        _write_sums(partial, slices, group, n_rows, token, end - token, out)


def expert_matmul(weights, x, offsets, out):
    """Rows offsets[e]..offsets[e + 1] of x times expert e; x [n, n_cols], out [n, n_rows], offsets int64 [E + 1]."""
    n, tile = x.shape[0], tile_rows(x.shape[0], weights.n_matrices)
    tiles = cuda.device_array((n if tile == 1 else n // TILE + weights.n_matrices, 3), np.int32)
    _expert_tiles_kernel[1, 1](offsets, tile, tiles)
    multiply_tiles(weights, x, tiles, tile, out)


def tile_rows(n_rows, n_matrices) -> int:
    """How many rows of an expert share a decoding: one where most experts have few rows."""
    return 1 if n_rows < 4 * n_matrices else TILE


def multiply_tiles(weights, x, tiles, tile, out):
    """Rows of x times the matrix of their run; tiles int32 [n, 3] on the device: matrix (-1: none), first row, end."""
    w, kernel = weights, _expert_1_kernel if tile == 1 else _expert_8_kernel
    kernel[(-(-w.n_rows // ROWS), tiles.shape[0]), cudapools.THREADS](
        w.kind, w.bytes, w.words, w.halves, w.floats, w.group_bytes, w.n_rows, w.n_cols, x, tiles, out
    )
