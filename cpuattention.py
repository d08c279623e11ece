"""Attention on the CPU: how cells are stored, attention over them, and the choice of the blocks to attend to.

It owns the formats of cells and the order of attention's sums; it knows no layer. Invariant: what is computed for a
token depends neither on which other tokens stand in the same call nor on how many threads run it.
Read next: kernels_cpu.py.

Scores are taken for sixteen cells at once, which become the lanes of a vector; so no sum runs across lanes.
"""

import numpy as np

import cpumemory
import cpusimd as simd
from cells import (
    CELL_F16,
    CELL_F32,
    CELL_INT8,
    CELL_Q4_0,
    PAGE,
    Q4_BYTES,
    Q4_CODES,
    Q4_VALUES,
    SCALE_GROUP,
    SEGMENT,
)
from cpusums import block_1, block_4
from cputeam import Job, arguments, array_at, awake, begin, given, run_jobs
from jit import njit
from packs import ROWS

# --- K/V cells ----------------------------------------------------------------------------------------------------


@njit
def _quantize_int8(x, codes, scales):
    for group in range(len(x) // SCALE_GROUP):
        values = x[group * SCALE_GROUP : (group + 1) * SCALE_GROUP]
        largest = np.float32(0)
        for value in values:
            largest = max(largest, abs(value))
        half = simd.float_to_half(largest / np.float32(127))
        scales[2 * group] = half & 0xFF
        scales[2 * group + 1] = half >> 8
        scale = simd.half_to_float(half)
        for k in range(SCALE_GROUP):
            code = np.rint(values[k] / scale) if scale > 0 else np.float32(0)
            codes[group * SCALE_GROUP + k] = np.uint8(np.int8(min(max(code, np.float32(-127)), np.float32(127))))


@njit
def _quantize_q4_0(x, out):
    for block in range(len(x) // Q4_VALUES):
        values = x[block * Q4_VALUES : (block + 1) * Q4_VALUES]
        peak = np.float32(0)
        for value in values:
            if abs(value) > abs(peak):
                peak = value
        d = peak / np.float32(-8)
        inverse = np.float32(1) / d if d != 0 else np.float32(0)
        half = simd.float_to_half(d)
        at = block * Q4_BYTES
        out[at] = half & 0xFF
        out[at + 1] = half >> 8
        for k in range(16):
            low = min(15, np.int32(values[k] * inverse + np.float32(8.5)))
            high = min(15, np.int32(values[k + 16] * inverse + np.float32(8.5)))
            out[at + Q4_CODES + k] = low | high << 4


@njit
def _store_cell(storage, x, codes, scales):
    if storage == CELL_F16:
        halves = codes.view(np.uint16)
        for k in range(0, len(x), ROWS):
            simd.store_f16(halves, k, simd.load(x, k))
    elif storage == CELL_F32:
        codes[:] = x.view(np.uint8)
    elif storage == CELL_INT8:
        _quantize_int8(x, codes, scales)
    else:
        _quantize_q4_0(x, codes)


@njit
def append_cells(storage, x, first_cell, codes, scales):
    """Store x float32 [T, heads, D] in cells first_cell.. of one pool.

    codes uint8 [pages, heads, PAGE, bytes], scales uint8 [pages, heads, PAGE, 2 D / 64] (width 0 where the storage
    has no scales).
    """
    for t in range(x.shape[0]):
        page, slot = (first_cell + t) // PAGE, (first_cell + t) % PAGE
        for h in range(x.shape[1]):
            _store_cell(storage, x[t, h], codes[page, h, slot], scales[page, h, slot])


@njit
def _load_cell(storage, codes, at, scales, scales_at, width, out, out_at):
    """Widen one head's cell to float32; `at` and `scales_at` are byte offsets in the whole pools."""
    if storage == CELL_F16:
        for k in range(0, width, ROWS):
            simd.store(out, out_at + k, simd.load_f16(codes, at + 2 * k))
    elif storage == CELL_F32:
        for k in range(0, width, ROWS):
            simd.store(out, out_at + k, simd.load_f32(codes, at + 4 * k))
    elif storage == CELL_INT8:
        flat = scales.ravel()
        for k in range(0, width, ROWS):
            s = scales_at + 2 * (k // SCALE_GROUP)
            scale = simd.half_to_float(np.uint16(flat[s]) | np.uint16(flat[s + 1]) << np.uint16(8))
            simd.store(out, out_at + k, simd.mul(simd.load_i8(codes, at + k), simd.splat(scale)))
    else:
        flat = codes.ravel()
        for block in range(width // Q4_VALUES):
            b = at + block * Q4_BYTES
            scale = simd.half_to_float(np.uint16(flat[b]) | np.uint16(flat[b + 1]) << np.uint16(8))
            for k in range(16):
                byte, to = np.int32(flat[b + Q4_CODES + k]), out_at + block * Q4_VALUES + k
                out[to] = scale * np.float32((byte & 15) - 8)
                out[to + 16] = scale * np.float32((byte >> 4) - 8)


# --- attention ----------------------------------------------------------------------------------------------------

CELLS = SEGMENT * PAGE
TOKENS = 16  # tokens of a prompt that share one widening of a cell
_EMPTY = np.float32(-3.0e38)


@njit
def _visible_cells(pages, first, last, position):
    """How many cells of the pages first..last-1 a token at `position` sees; they are the first ones (may be <= 0)."""
    if len(pages):
        return (last - 1 - first) * PAGE + min(PAGE, position + 1 - pages[last - 1] * PAGE)
    return min((last - first) * PAGE, position + 1 - first * PAGE)


PAGES_AHEAD = 8  # pages asked for before they are read; the hardware does not foresee steps over other heads' cells


@njit
def _widen_as(storage, codes, scales, pages, first, n_cells, head, width, out):
    n_kv, row, scale_row = codes.shape[1], codes.shape[3], scales.shape[3]
    for c in range(n_cells):
        p = first + c // PAGE
        page = pages[p] if len(pages) else p
        if c % PAGE == 0:
            ahead = min(p + PAGES_AHEAD, len(pages) - 1)
            later = pages[ahead] if len(pages) else p + PAGES_AHEAD
            for line in range(0, PAGE * row, simd.LINE):
                simd.prefetch(codes, (later * n_kv + head) * PAGE * row + line)
        at = (page * n_kv + head) * PAGE + c % PAGE
        _load_cell(storage, codes, at * row, scales, at * scale_row, width, out, c * width)


@njit
def _widen_cells(storage, codes, scales, pages, first, n_cells, head, width, out):
    """Cells of one head from page `first` of a list (an empty one: of all pages) as float32 rows of `out`."""
    # Numba compiles a callee anew for each number that it is given literally: one branch-free loop per storage.
    if storage == CELL_F16:
        _widen_as(CELL_F16, codes, scales, pages, first, n_cells, head, width, out)
    elif storage == CELL_F32:
        _widen_as(CELL_F32, codes, scales, pages, first, n_cells, head, width, out)
    elif storage == CELL_INT8:
        _widen_as(CELL_INT8, codes, scales, pages, first, n_cells, head, width, out)
    else:
        _widen_as(CELL_Q4_0, codes, scales, pages, first, n_cells, head, width, out)


MOST_BY_LANES = 8  # queries up to which adding across lanes is cheaper than transposing the rows


@njit
def _dots(rows, width, queries, n, room, sums):
    """sums[i, r] = query i . rows[r] for sixteen rows and the `n` queries that `_put_query` put; all flat.

    `room` is of `_dots_room`. Both ways add the same products in the same order, that of `dot`.
    """
    if n <= MOST_BY_LANES:
        _dots_by_lanes(rows, width, queries, n, room, sums)
    else:
        _dots_by_columns(rows, width, queries, n, room, sums)


@njit
def _dots_room(n, width):
    """float32 that `_dots` needs beside its arguments: transposed rows and partial sums, or sums of lanes."""
    return ROWS * width + 4 * n * ROWS if n > MOST_BY_LANES else ROWS * ROWS


@njit
def _put_query(x, x_at, width, n, queries, i):
    """Query `i` of `n` for `_dots`, from element `x_at` of x: as it is, or in the order of `simd.transpose`."""
    if n <= MOST_BY_LANES:
        for k in range(0, width, ROWS):
            simd.store(queries, i * width + k, simd.load(x, x_at + k))
        return
    flat, quarter = x.reshape(x.size), width // 4
    for k in range(width):
        c = k % ROWS
        queries[i * width + c % 4 * quarter + k // ROWS * 4 + c // 4 % 2 * 2 + c // 8] = flat[x_at + k]


@njit
def _dots_by_lanes(rows, width, queries, n, room, sums):
    for i in range(n):
        for r in range(ROWS):
            total = simd.splat(np.float32(0))
            for k in range(0, width, ROWS):
                total = simd.fma(simd.load(rows, r * width + k), simd.load(queries, i * width + k), total)
            simd.store(room, r * ROWS, total)
        simd.store(sums, i * ROWS, simd.sum_rows(room, 0))


@njit
def _dots_by_columns(rows, width, queries, n, room, sums):
    quarter = width // 4
    columns, partial = room[: ROWS * width], room[ROWS * width :]
    for k in range(0, width, ROWS):
        simd.transpose(rows, k, width, columns, k * 4, quarter * ROWS)
    partial[: 4 * n * ROWS] = np.float32(0)
    for part in range(4):
        weights, sums_here, i = columns[part * quarter * ROWS :], partial[part * n * ROWS :], 0
        while i + 4 <= n:
            block_4(weights, quarter // 4, queries, i * width + part * quarter, width, sums_here, i)
            i += 4
        while i < n:
            block_1(weights, quarter // 4, queries, i * width + part * quarter, sums_here, i)
            i += 1
    for at in range(0, n * ROWS, ROWS):
        even = simd.add(simd.load(partial, at), simd.load(partial, at + 2 * n * ROWS))
        odd = simd.add(simd.load(partial, at + n * ROWS), simd.load(partial, at + 3 * n * ROWS))
        simd.store(sums, at, simd.add(even, odd))


@njit
def _segment_scores(storage, codes, scales, pages, first, n_cells, head, queries, n, width, scale, scores, cells,
                    dots_room, sums):
    """scores[query][cell] of `n_cells` cells from page `first` on; what stands behind them is not set."""
    for start in range(0, n_cells, ROWS):
        n_here, page = min(ROWS, n_cells - start), first + start // PAGE
        _widen_cells(storage, codes, scales, pages, page, n_here, head, width, cells)
        _dots(cells, width, queries, n, dots_room, sums)
        for i in range(n):
            simd.store(scores, i * CELLS + start, simd.mul(simd.load(sums, i * ROWS), simd.splat(scale)))


@njit
def _add_values(cells, width, n_cells, weights, at, partial, partial_at):
    """partial += sum of weight * V over the first `n_cells` cells, in their order."""
    k = 0
    while k + 64 <= width:
        a, b = simd.load(partial, partial_at + k), simd.load(partial, partial_at + k + 16)
        c, d = simd.load(partial, partial_at + k + 32), simd.load(partial, partial_at + k + 48)
        for cell in range(n_cells):
            weight, v = simd.load_broadcast(weights, at + cell), cell * width + k
            a = simd.fma(simd.load(cells, v), weight, a)
            b = simd.fma(simd.load(cells, v + 16), weight, b)
            c = simd.fma(simd.load(cells, v + 32), weight, c)
            d = simd.fma(simd.load(cells, v + 48), weight, d)
        simd.store(partial, partial_at + k, a)
        simd.store(partial, partial_at + k + 16, b)
        simd.store(partial, partial_at + k + 32, c)
        simd.store(partial, partial_at + k + 48, d)
        k += 64
    while k < width:
        a = simd.load(partial, partial_at + k)
        for cell in range(n_cells):
            a = simd.fma(simd.load(cells, cell * width + k), simd.load_broadcast(weights, at + cell), a)
        simd.store(partial, partial_at + k, a)
        k += ROWS


@njit
def _segment_values(storage, codes, scales, pages, first, n_cells, head, n, width, seen, weights, cells, partial):
    """partial[query] = sum of weight * V over the cells of the segment that it sees, in their order."""
    partial[: n * width] = np.float32(0)
    for start in range(0, n_cells, ROWS):
        n_here, page = min(ROWS, n_cells - start), first + start // PAGE
        _widen_cells(storage, codes, scales, pages, page, n_here, head, width, cells)
        for i in range(n):
            _add_values(cells, width, min(ROWS, seen[i] - start), weights, i * CELLS + start, partial, i * width)


@njit
def _softmax_segment(scores, at, n):
    """Turn `n` scores into e ** (score - max); returns (max, sum). The row has room for a multiple of 16."""
    padded = (n + ROWS - 1) // ROWS * ROWS
    scores[at + n : at + padded] = _EMPTY
    top = simd.splat(_EMPTY)
    for k in range(0, padded, ROWS):
        top = simd.maximum(top, simd.load(scores, at + k))
    peak = simd.max_lanes(top)
    for k in range(0, padded, ROWS):
        simd.store(scores, at + k, simd.exp(simd.sub(simd.load(scores, at + k), simd.splat(peak))))
    scores[at + n : at + padded] = np.float32(0)
    total = simd.splat(np.float32(0))
    for k in range(0, padded, ROWS):
        total = simd.add(total, simd.load(scores, at + k))
    return peak, simd.sum_lanes(total)


@njit
def _merge(peak, total, partial, part_at, peaks, sums, out, out_at, width):
    """Fold one segment's (peak, total, weighted V) into the running ones at index `part_at`."""
    if sums[part_at] == np.float32(0):
        keep, fresh = np.float32(0), np.float32(1)
        peaks[part_at] = peak
    else:
        top = max(peaks[part_at], peak)
        keep, fresh = np.exp(peaks[part_at] - top), np.exp(peak - top)
        peaks[part_at] = top
    sums[part_at] = sums[part_at] * keep + total * fresh
    for k in range(0, width, ROWS):
        value = simd.mul(simd.load(out, out_at + k), simd.splat(keep))
        simd.store(out, out_at + k, simd.fma(simd.load(partial, part_at * width + k), simd.splat(fresh), value))


@njit
def _attend_segment(k_storage, v_storage, pools, pages, first, last, head, queries, n, group, width, position, scale,
                    room, partial, peaks, sums):
    """Softmax and weighted V of the pages first..last - 1 for `n` queries, `group` of them a token from `position`."""
    scores, cells, dots_room, dots, seen = room
    k_codes, k_scales, v_codes, v_scales = pools
    for i in range(n):
        seen[i] = _visible_cells(pages, first, last, position + i // group)
    n_cells = max(0, seen[n - 1])  # of the latest token
    _segment_scores(k_storage, k_codes, k_scales, pages, first, n_cells, head, queries, n, width, scale, scores, cells,
                    dots_room, dots)
    for i in range(n):
        sums[i] = np.float32(0)
        if seen[i] > 0:
            peaks[i], sums[i] = _softmax_segment(scores, i * CELLS, seen[i])
    _segment_values(v_storage, v_codes, v_scales, pages, first, n_cells, head, n, width, seen, scores, cells, partial)


@njit
def _room(n, width):
    """What a segment needs beside its results: scores, widened cells, room for `_dots`, its results, cells seen."""
    return (
        cpumemory.scratch(n * CELLS), cpumemory.scratch(ROWS * width), cpumemory.scratch(_dots_room(n, width)),
        cpumemory.scratch(n * ROWS), np.empty(n, np.int64),
    )


@njit
def _queries(q, width, token, n_tokens, head, group):
    """The queries of one K/V head, token by token, as `_dots` takes them."""
    n = n_tokens * group
    queries = cpumemory.scratch(n * width)
    for i in range(n):
        _put_query(q, ((token + i // group) * q.shape[1] + head * group + i % group) * width, width, n, queries, i)
    return queries


@njit
def _attend_tile(width, k_storage, v_storage, pools, pages, n_pages, head, q, token, n_tokens, position, scale, out):
    """All segments, one after the other, for up to TOKENS tokens and the query heads of one K/V head."""
    group = q.shape[1] // pools[0].shape[1]
    n = n_tokens * group
    queries, room = _queries(q, width, token, n_tokens, head, group), _room(n, width)
    partial, result = cpumemory.scratch(n * width), cpumemory.scratch(n * width)
    result[:] = np.float32(0)
    peaks, sums = np.empty(n, np.float32), np.empty(n, np.float32)
    top, total = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for first in range(0, n_pages, SEGMENT):
        _attend_segment(k_storage, v_storage, pools, pages, first, min(first + SEGMENT, n_pages), head, queries, n,
                        group, width, position, scale, room, partial, peaks, sums)
        for i in range(n):
            if sums[i] > np.float32(0):
                _merge(peaks[i], sums[i], partial, i, top, total, result, i * width, width)
    for i in range(n):
        row = out[token + i // group, head * group + i % group]
        for k in range(width):
            row[k] = result[i * width + k] / total[i]


def attention(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out, team=None):
    """Causal attention of T tokens at cells position..position+T-1 over every cell up to their own.

    q, out float32 [T, H, D]; pools as in `append_cells`, K heads shared by H / K query heads in order. The softmax is
    taken per segment of 64 pages and merged in order, so neither T nor the number of threads changes a bit.
    """
    pools, n_pages = (k_codes, k_scales, v_codes, v_scales), (position + PAGE) // PAGE
    _attend(team, k_storage, v_storage, pools, q, position, scale, out, _NO_BLOCKS, _NO_COUNTS, n_pages)


def attention_selected(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, blocks, counts,
                       out, team=None):
    """`attention` over chosen pages only: token t reads pages blocks[t, :counts[t]] (ascending, its own page last)."""
    pools = k_codes, k_scales, v_codes, v_scales
    _attend(team, k_storage, v_storage, pools, q, position, scale, out, blocks, counts, int(counts[0]))


_NO_BLOCKS, _NO_COUNTS = np.empty((0, 1), np.int32), np.empty(0, np.int64)


def _attend(team, k_storage, v_storage, pools, q, position, scale, out, blocks, counts, n_pages) -> None:
    """One token is cut by segments, several are cut by tiles of tokens; both give the same sums."""
    control, shared = awake(team), (k_storage, v_storage, *pools, q, position, scale, out)
    width = q.shape[2] if q.shape[2] in _TILE else 0
    if len(q) == 1:
        _attend_token(control, _SEGMENT[width].address, *shared, blocks, n_pages)
    else:
        _attend_tokens(control, _TILE[width].address, *shared, blocks, counts, 1 if len(blocks) else TOKENS)


_Pools = """
    k_storage v_storage k_codes k_scales v_codes v_scales n_pages n_kv k_bytes k_scale_bytes v_bytes v_scale_bytes
"""
_Tokens = "q out n_tokens n_heads width position pages n_listed"
_Attention = arguments(f"{_Pools} {_Tokens} counts n_lists per_tile n_read n_jobs partial peaks_sums", "scale")


@njit
def _begin(control, job, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out):
    """What every attention job needs; the caller fills in the rest."""
    c = begin(control, job, _Attention)
    c.k_storage, c.v_storage, c.position, c.scale = k_storage, v_storage, position, scale
    c.k_codes, c.k_scales, c.v_codes, c.v_scales = (
        k_codes.ctypes.data, k_scales.ctypes.data, v_codes.ctypes.data, v_scales.ctypes.data,
    )  # fmt: skip
    c.n_pages, c.n_kv = k_codes.shape[0], k_codes.shape[1]
    c.k_bytes, c.k_scale_bytes, c.v_bytes, c.v_scale_bytes = (
        k_codes.shape[3], k_scales.shape[3], v_codes.shape[3], v_scales.shape[3],
    )  # fmt: skip
    c.q, c.out = q.ctypes.data, out.ctypes.data
    c.n_tokens, c.n_heads, c.width = q.shape
    return c


@njit
def _attend_tokens(control, tile_job, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale,
                   out, blocks, counts, per_tile):
    c = _begin(control, tile_job, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out)
    c.per_tile, c.n_lists, c.counts = per_tile, len(blocks), counts.ctypes.data
    c.pages, c.n_listed = blocks.ctypes.data, blocks.shape[1]
    run_jobs(control, (len(q) + per_tile - 1) // per_tile * k_codes.shape[1])


@njit
def _attend_token(control, segment_job, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale,
                  out, blocks, n_pages):
    """Each segment leaves weighted V, peaks and sums, which are merged in the order of the segments."""
    n_kv = k_codes.shape[1]
    group, n_jobs = q.shape[1] // n_kv, (n_pages + SEGMENT - 1) // SEGMENT * n_kv
    partial = cpumemory.scratch(n_jobs * group * q.shape[2]).reshape(n_jobs, group * q.shape[2])
    peaks_sums = np.empty((2, n_jobs, group), np.float32)
    c = _begin(control, segment_job, k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale,
               out)
    c.pages, c.n_listed, c.n_jobs = blocks.ctypes.data, n_pages if len(blocks) else 0, n_jobs
    c.partial, c.peaks_sums, c.n_read = partial.ctypes.data, peaks_sums.ctypes.data, n_pages
    run_jobs(control, n_jobs)
    _merge_segments(partial, peaks_sums, n_kv, out)


@njit
def _arrays(c, width):
    """The four pools, q and out."""
    pools = (
        array_at(c.k_codes, (c.n_pages, c.n_kv, PAGE, c.k_bytes), np.uint8),
        array_at(c.k_scales, (c.n_pages, c.n_kv, PAGE, c.k_scale_bytes), np.uint8),
        array_at(c.v_codes, (c.n_pages, c.n_kv, PAGE, c.v_bytes), np.uint8),
        array_at(c.v_scales, (c.n_pages, c.n_kv, PAGE, c.v_scale_bytes), np.uint8),
    )
    shape = (c.n_tokens, c.n_heads, width)
    return pools, array_at(c.q, shape, np.float32), array_at(c.out, shape, np.float32)


@njit
def _attend_tile_of(c, width, job):
    """A tile of tokens with the query heads of one K/V head; with a page list a tile is one token."""
    pools, q, out = _arrays(c, width)
    token = job // c.n_kv * c.per_tile
    n_tokens, position = min(c.per_tile, c.n_tokens - token), c.position + token
    pages, n_pages = array_at(c.pages, 0, np.int32), (position + n_tokens - 1 + PAGE) // PAGE
    if c.n_lists:
        n_pages = array_at(c.counts, c.n_lists, np.int64)[token]
        pages = array_at(c.pages + 4 * token * c.n_listed, n_pages, np.int32)
    _attend_tile(width, c.k_storage, c.v_storage, pools, pages, n_pages, job % c.n_kv, q, token, n_tokens, position,
                 np.float32(c.scale), out)


@njit
def _attend_segment_of(c, width, job):
    """Segment job // K of K/V head job mod K for one token."""
    pools, q, _ = _arrays(c, width)
    head, group, first = job % c.n_kv, c.n_heads // c.n_kv, job // c.n_kv * SEGMENT
    pages = array_at(c.pages, c.n_listed, np.int32)
    partial = array_at(c.partial, (c.n_jobs, group * width), np.float32)
    peaks_sums = array_at(c.peaks_sums, (2, c.n_jobs, group), np.float32)
    queries = _queries(q, width, 0, 1, head, group)
    _attend_segment(c.k_storage, c.v_storage, pools, pages, first, min(first + SEGMENT, c.n_read), head, queries, group,
                    group, width, c.position, np.float32(c.scale), _room(group, width), partial[job],
                    peaks_sums[0, job], peaks_sums[1, job])


# Numba compiles a callee anew for each number that it is given literally; so usual widths have loops of a known length.


def _jobs(work):
    """A job for each usual width, and one (0) for any other."""

    def of_width(width):
        def job(control, number):
            work(given(control, _Attention), width, number)

        return Job(job)

    def of_any(control, number):
        c = given(control, _Attention)
        work(c, c.width, number)

    return {width: of_width(width) for width in (64, 128, 256)} | {0: Job(of_any)}


_TILE, _SEGMENT = _jobs(_attend_tile_of), _jobs(_attend_segment_of)


@njit
def _merge_segments(partial, peaks_sums, n_kv, out):
    """Merge one token's segments in their order: the sums of `_attend_tile`."""
    group, width = peaks_sums.shape[2], out.shape[2]
    top, total, result = np.zeros(group, np.float32), np.zeros(group, np.float32), np.empty(group * width, np.float32)
    for head in range(n_kv):
        total[:] = np.float32(0)
        result[:] = np.float32(0)
        for job in range(head, len(partial), n_kv):
            for g in range(group):
                peak, part = peaks_sums[0, job, g], peaks_sums[1, job, g]
                if part > np.float32(0):
                    _merge(peak, part, partial[job], g, top, total, result, g * width, width)
        for g in range(group):
            for k in range(width):
                out[0, head * group + g, k] = result[g * width + k] / total[g]


# --- the choice of blocks -----------------------------------------------------------------------------------------


@njit
def _nth_largest(scores, n, rank):
    """The score of rank `rank` (1 the largest) among scores[:n], none negative, byte by byte of its bit pattern."""
    bits, prefix, known = scores.view(np.uint32), np.uint32(0), np.uint32(0)
    counts = np.empty(256, np.int64)
    for shift in (24, 16, 8, 0):
        counts[:] = 0
        for i in range(n):
            if bits[i] & known == prefix:
                counts[bits[i] >> np.uint32(shift) & np.uint32(255)] += 1
        byte = 255
        while counts[byte] < rank:
            rank -= counts[byte]
            byte -= 1
        prefix |= np.uint32(byte) << np.uint32(shift)
        known |= np.uint32(255) << np.uint32(shift)
    return prefix


@njit
def _select(scores, n, keep, out):
    """The `keep` largest of scores[:n] as ascending indices, equal scores by the lowest index."""
    bits, limit = scores.view(np.uint32), _nth_largest(scores, n, keep)
    above = 0
    for b in range(n):
        above += bits[b] > limit
    ties, m = keep - above, 0
    for b in range(n):
        if bits[b] > limit:
            out[m] = b
            m += 1
        elif bits[b] == limit and ties > 0:
            out[m] = b
            m += 1
            ties -= 1
    return m


def select_blocks(queries, pooled, position, keep, blocks, counts, team=None):
    """For token t the `keep` complete blocks of highest score, ascending, and the open block behind them.

    queries float32 [T, heads, D] (normed, rotated), pooled float32 [rows, D]; score = sum over heads of
    relu(query . pooled). blocks int32 [T, keep + 1], counts int64 [T].
    """
    _select_blocks(awake(team), _SELECT.address, queries, pooled, position, keep, blocks, counts)


_Selection = arguments("queries pooled position keep blocks counts n_tokens n_heads width n_pooled")


@njit
def _select_blocks(control, select_job, queries, pooled, position, keep, blocks, counts):
    c = begin(control, select_job, _Selection)
    c.queries, c.pooled, c.position, c.keep = queries.ctypes.data, pooled.ctypes.data, position, keep
    c.blocks, c.counts, c.n_pooled = blocks.ctypes.data, counts.ctypes.data, pooled.shape[0]
    c.n_tokens, c.n_heads, c.width = queries.shape
    run_jobs(control, len(queries))


@njit
def _block_scores(queries, pooled, n_blocks, scores):
    """scores[b] = sum over heads, in their order, of relu(query . pooled[b]); queries [heads, D], room for 15 more."""
    n_heads, width = queries.shape
    keys, ordered = pooled.reshape(pooled.size), cpumemory.scratch(n_heads * width)
    for h in range(n_heads):
        _put_query(queries, h * width, width, n_heads, ordered, h)
    rows, room = np.zeros(ROWS * width, np.float32), cpumemory.scratch(_dots_room(n_heads, width))
    sums, zero = cpumemory.scratch(n_heads * ROWS), simd.splat(np.float32(0))
    for first in range(0, n_blocks, ROWS):
        n_here = min(ROWS, n_blocks - first)
        rows[: n_here * width] = keys[first * width : (first + n_here) * width]
        _dots(rows, width, ordered, n_heads, room, sums)
        total = zero
        for h in range(n_heads):
            total = simd.add(total, simd.maximum(simd.load(sums, h * ROWS), zero))
        simd.store(scores, first, total)


def _select_job(control, t):
    """The blocks of token t."""
    c = given(control, _Selection)
    position, keep = c.position, c.keep
    queries = array_at(c.queries, (c.n_tokens, c.n_heads, c.width), np.float32)
    pooled = array_at(c.pooled, (c.n_pooled, c.width), np.float32)
    blocks, counts = array_at(c.blocks, (c.n_tokens, keep + 1), np.int32), array_at(c.counts, c.n_tokens, np.int64)
    complete = (position + t + 1) // PAGE
    m = min(complete, keep)
    if complete <= keep:
        for b in range(complete):
            blocks[t, b] = b
    else:
        scores = np.empty(complete + ROWS - 1, np.float32)
        _block_scores(queries[t], pooled, complete, scores)
        m = _select(scores, complete, keep, blocks[t])
    if (position + t + 1) % PAGE:
        blocks[t, m] = complete
        m += 1
    counts[t] = m


_SELECT = Job(_select_job)
