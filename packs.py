"""How weights lie in packs: blocks of a file's types, sixteen rows side by side.

It owns the layout and the way into it, in NumPy; it multiplies nothing. Invariant: a pack holds the bits of the file's
codes and scales, in another order only. Read next: cpuproducts.py, which decodes and multiplies packs.

A pack has row groups of sixteen rows, the lanes of a vector, and in them blocks of 32 (K types: 256) input columns.
Inside a block the codes stand in *quads*: four columns of sixteen rows, 64 bytes, a row's four in one 32-bit lane.
"""

import numpy as np

ROWS = 16  # rows of a pack, the lanes of a vector
BLOCK = 32  # columns decoded at once

F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K = range(9)
BLOCK_COLUMNS = {F32: 32, F16: 32, BF16: 32, Q8_0: 32, Q4_0: 32, Q4_1: 32, Q4_K: 256, Q5_K: 256, Q6_K: 256}
BLOCK_BYTES = {F32: 2048, F16: 1024, BF16: 1024, Q8_0: 544, Q4_0: 288, Q4_1: 320, Q4_K: 2368, Q5_K: 2880, Q6_K: 3360}


def _pack_floats(rows, out):
    groups, blocks = out.shape[:2]
    padded = np.zeros((groups, ROWS, blocks * BLOCK), rows.dtype)
    padded[:, :, : rows.shape[2]] = rows
    columns = padded.reshape(groups, ROWS, blocks, BLOCK).transpose(0, 2, 3, 1)
    out[:] = np.ascontiguousarray(columns).reshape(groups, blocks, -1).view(np.uint8)


def _blocks(rows, block_bytes):
    """[groups, 16, bytes] to [groups, blocks, 16, block_bytes]."""
    return rows.reshape(rows.shape[0], ROWS, -1, block_bytes).transpose(0, 2, 1, 3)


def _lanes(fields):
    """Fields [groups, blocks, 16, n] to the lane order [groups, blocks, n * 16], as bytes of whole fields."""
    return np.ascontiguousarray(np.swapaxes(fields, 2, 3)).reshape(*fields.shape[:2], -1)


def _halves(blocks, first, n):
    """`n` float16 fields at byte `first` of every block, lane order, as bytes."""
    fields = np.ascontiguousarray(blocks[..., first : first + 2 * n]).view(np.uint16)
    return _lanes(fields).view(np.uint8)


def _quads(codes):
    """Codes [groups, blocks, 16, columns] to [groups, blocks, quads, 64]: four columns of a row in one lane."""
    groups, blocks, _, columns = codes.shape
    quads = codes.reshape(groups, blocks, ROWS, columns // 4, 4).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(quads).reshape(groups, blocks, columns // 4, 64)


def _nibble_quads(codes):
    """32-column codes: the low 4 bits of quads 0..3 beside those of quads 4..7, in [groups, blocks, 256]."""
    quads = _quads(codes) & 15
    both = quads[:, :, :4] | quads[:, :, 4:] << 4
    return both.reshape(*both.shape[:2], -1)


def _nibbles(packed):
    """ggml's nibbles: the low ones are the first half of a block, the high ones the second."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _pack_q8_0(rows, out):
    blocks = _blocks(rows, 34)
    out[..., :32] = _halves(blocks, 0, 1)
    out[..., 32:] = _quads(blocks[..., 2:]).reshape(*out.shape[:2], -1)


def _pack_q4_0(rows, out):
    blocks = _blocks(rows, 18)
    out[..., :32] = _halves(blocks, 0, 1)
    out[..., 32:] = _nibble_quads(_nibbles(blocks[..., 2:]))


def _pack_q4_1(rows, out):
    blocks = _blocks(rows, 20)
    out[..., :64] = _halves(blocks, 0, 2)
    out[..., 64:] = _nibble_quads(_nibbles(blocks[..., 4:]))


def _k_scales(packed):
    """The eight 6-bit scales and minima of Q4_K and Q5_K out of their 12 bytes."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=-1)
    return scales, minima


def _put_k_header(blocks, out):
    out[..., :64] = _halves(blocks, 0, 2)
    scales, minima = _k_scales(blocks[..., 4:16])
    out[..., 64:192] = _lanes(scales)
    out[..., 192:320] = _lanes(minima)


def _k_codes(nibbles):
    """128 bytes of Q4_K or Q5_K to 256 codes: 64 columns at a time, low nibbles first."""
    chunks = nibbles.reshape(*nibbles.shape[:-1], 4, 32)
    return np.concatenate([chunks & 15, chunks >> 4], axis=-1).reshape(*nibbles.shape[:-1], 256)


def _put_sub_blocks(codes, first_byte, sub_bytes, out, high_planes):
    """Each 32-column sub-block: nibble quads, then its planes of higher bits."""
    for sub in range(8):
        part = codes[..., sub * 32 : sub * 32 + 32]
        at = first_byte + sub * sub_bytes
        out[..., at : at + 256] = _nibble_quads(part)
        if high_planes:
            out[..., at + 256 : at + sub_bytes] = high_planes(part >> 4)


def _fifth_bits(high):
    """One bit a column: byte j of a lane holds the bits of column 4 q + j at bit q."""
    quads = _quads(high)
    return np.bitwise_or.reduce(quads << np.arange(8, dtype=np.uint8)[:, None], axis=2)


def _top_two_bits(high):
    """Two bits a column: plane p holds quads 4 p .. 4 p + 3, quad q at bits 2 (q mod 4)."""
    quads = _quads(high).reshape(*high.shape[:2], 2, 4, 64)
    planes = np.bitwise_or.reduce(quads << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=3)
    return planes.reshape(*high.shape[:2], 128)


def _pack_q4_k(rows, out):
    blocks = _blocks(rows, 144)
    _put_k_header(blocks, out)
    _put_sub_blocks(_k_codes(blocks[..., 16:]), 320, 256, out, None)


def _pack_q5_k(rows, out):
    blocks = _blocks(rows, 176)
    _put_k_header(blocks, out)
    bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [..., column mod 32, sub-block]
    high = np.swapaxes(bits, -1, -2).reshape(*bits.shape[:-2], 256)
    _put_sub_blocks(_k_codes(blocks[..., 48:]) | high << 4, 320, 320, out, _fifth_bits)


def _q6_codes(low, high):
    """ggml's order of Q6_K: two halves of 128 columns, each four runs of 32 that share the bytes of `high`."""
    halves = []
    for half in range(2):
        ql, qh = low[..., half * 64 : half * 64 + 64], high[..., half * 32 : half * 32 + 32]
        runs = (ql[..., :32] & 15, ql[..., 32:] & 15, ql[..., :32] >> 4, ql[..., 32:] >> 4)
        halves += [run | ((qh >> 2 * i) & 3) << 4 for i, run in enumerate(runs)]
    return np.concatenate(halves, axis=-1)


def _pack_q6_k(rows, out):
    blocks = _blocks(rows, 210)
    out[..., :32] = _halves(blocks, 208, 1)
    out[..., 32:288] = _lanes(blocks[..., 192:208])
    _put_sub_blocks(_q6_codes(blocks[..., :128], blocks[..., 128:192]), 288, 384, out, _top_two_bits)


# What fills a pack's row groups [groups, blocks, bytes] from a file's rows [groups, 16, bytes or values], by kind.
PACKERS = (
    _pack_floats, _pack_floats, _pack_floats, _pack_q8_0, _pack_q4_0, _pack_q4_1, _pack_q4_k, _pack_q5_k, _pack_q6_k,
)
