"""K/V cells, attention over them and the block indexer, in Numba CUDA.

It owns what is read from and written to the pools of `cudapools.Cells`; it does not know which page lies where, it asks
the page table. Invariant: the cells that are written are byte for byte those of kernels_cpu.py, and a token's result
does not depend on where its pages lie or on how its segments are spread over blocks. Read next: kernels_cuda.py.
"""

import math

import numpy as np
from numba import cuda

import cudapools
from cells import CELL_F16, CELL_INT8, PAGE, Q4_BYTES, Q4_CODES, Q4_VALUES, SCALE_GROUP, SEGMENT
from cudablock import EMPTY, MAX_THREADS, block_sum, inverse_rms, nearest, product
from cudapools import empty, launch, launch_rows

MAX_HEAD = 256  # widest head: shared rows of attention
GROUP = 4  # query heads that share one reading of a cell
CELL_LANES = 8  # threads that share the dot product with one cell
# Rooms in shared memory, whose shapes have to be names or numbers.
SCORES = GROUP * SEGMENT * PAGE
PARTIALS = 2 * GROUP * MAX_THREADS
RESULTS = GROUP * MAX_HEAD
SPLIT_TOKENS = 4  # up to this many tokens each segment gets a block of its own; longer inputs fill the device as it is


# --- K/V cells ----------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _store_int8(x, t, head, group, codes, scales, page, slot):
    largest = np.float32(0)
    for k in range(group * SCALE_GROUP, (group + 1) * SCALE_GROUP):
        largest = max(largest, np.float32(abs(x[t, head, k])))
    half = np.float16(largest / np.float32(127))
    scales[page, head, slot, group] = half
    scale = np.float32(half)
    for k in range(group * SCALE_GROUP, (group + 1) * SCALE_GROUP):
        code = np.int32(0)
        if scale > np.float32(0):
            ratio = max(np.float32(-127), min(np.float32(127), x[t, head, k] / scale))
            code = np.int32(nearest(ratio))
        codes[page, head, slot, k] = np.uint8(code & np.int32(255))


@cuda.jit(device=True)
def _q4_0_code(value, inverse):
    return min(np.int32(15), np.int32(product(value, inverse) + np.float32(8.5)))


@cuda.jit(device=True)
def _store_q4_0(x, t, head, block, codes, halves, page, slot):
    peak = np.float32(0)
    for k in range(block * Q4_VALUES, (block + 1) * Q4_VALUES):
        if abs(x[t, head, k]) > abs(peak):
            peak = x[t, head, k]
    d, inverse = peak / np.float32(-8), np.float32(0)
    if d != np.float32(0):
        inverse = np.float32(1) / d
    halves[page, head, slot, block * (Q4_BYTES // 2)] = np.float16(d)
    for k in range(16):
        low = _q4_0_code(x[t, head, block * Q4_VALUES + k], inverse)
        high = _q4_0_code(x[t, head, block * Q4_VALUES + k + 16], inverse)
        codes[page, head, slot, block * Q4_BYTES + Q4_CODES + k] = np.uint8(low | np.int32(high << np.int32(4)))


@cuda.jit(device=True)
def _store_unit(storage, x, t, head, unit, codes, halves, scales, page, slot):
    if storage == CELL_F16:
        halves[page, head, slot, unit] = np.float16(x[t, head, unit])
    elif storage == CELL_INT8:
        _store_int8(x, t, head, unit, codes, scales, page, slot)
    else:
        _store_q4_0(x, t, head, unit, codes, halves, page, slot)


@cuda.jit
def _append_kernel(storage, x, units, first_cell, table, codes, halves, scales, on_host, host_codes, host_halves,
                   host_scales):
    """An item is what shares a scale: one value of fp16, 64 of int8, 32 of q4_0. Twin: append_cells, the same bytes.

    `table` int32 [pages] (empty: page p lies in slot p) tells where a page is resident; with `on_host` the host's pools
    are written always, since they are the authoritative ones.
    """
    n_heads = x.shape[1]
    for item in range(cuda.grid(1), x.shape[0] * n_heads * units, cuda.gridsize(1)):
        t, head, unit = item // (n_heads * units), item // units % n_heads, item % units
        page, cell = (first_cell + t) // PAGE, (first_cell + t) % PAGE
        place = page
        if table.shape[0]:
            place = table[page]
        if place >= 0:
            _store_unit(storage, x, t, head, unit, codes, halves, scales, place, cell)
        if on_host:
            _store_unit(storage, x, t, head, unit, host_codes, host_halves, host_scales, page, cell)


def append_cells(storage, x, first_cell, codes, scales):
    """Store x float32 [T, heads, D] in cells first_cell.. of one pool; codes and scales are `cudapools.Cells`."""
    width = x.shape[2]
    units = {CELL_F16: width, CELL_INT8: width // SCALE_GROUP}.get(storage, width // Q4_VALUES)
    codes.before_append(first_cell, x.shape[0])
    cudapools.forget_copies()
    launch(_append_kernel, x.shape[0] * x.shape[1] * units, storage, x, units, first_cell, codes.table,
            codes.device.bytes, codes.device.halves, scales.device.halves, codes.is_mirrored, codes.host.bytes,
            codes.host.halves, scales.host.halves)


# --- attention ----------------------------------------------------------------------------------------------------

@cuda.jit(device=True)
def _cell_value(storage, codes, halves, scales, page, head, slot, k):
    """Element k of a head's cell, widened."""
    if storage == CELL_F16:
        return np.float32(halves[page, head, slot, k])
    if storage == CELL_INT8:
        code = np.int32(codes[page, head, slot, k])
        if code > 127:
            code = np.int32(code - 256)
        return np.float32(code) * np.float32(scales[page, head, slot, k // SCALE_GROUP])
    block, at = k // Q4_VALUES, k % Q4_VALUES
    byte = np.int32(codes[page, head, slot, block * Q4_BYTES + Q4_CODES + at % 16])
    if at >= 16:
        byte = np.int32(byte >> np.int32(4))
    code = np.int32(np.int32(byte & np.int32(15)) - np.int32(8))
    return np.float32(halves[page, head, slot, block * (Q4_BYTES // 2)]) * np.float32(code)


@cuda.jit(device=True)
def _page_of(blocks, counts, t, first_page, i):
    """Page of the i-th entry of a token's list: chosen ones, or all from `first_page` on."""
    if counts.shape[0]:
        return blocks[t, i]
    return first_page + i


@cuda.jit(device=True)
def _segment_scores(storage, codes, halves, scales, host_codes, host_halves, host_scales, table, q, t, head, first_q,
                    last_q, blocks, counts, first_page, first, n_cells, scale, partial, scores):
    """scores [4][256] of a segment's visible cells for four query heads; eight threads share a cell's dot products."""
    width, lanes = q.shape[2], min(CELL_LANES, cuda.blockDim.x)
    cells_at_once, thread = cuda.blockDim.x // lanes, cuda.threadIdx.x
    part, mine = thread % lanes, thread // lanes
    q1, q2, q3 = min(first_q + 1, last_q), min(first_q + 2, last_q), min(first_q + 3, last_q)
    for start in range(0, n_cells, cells_at_once):
        cell = start + mine
        a0, a1, a2, a3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        if cell < n_cells:
            page, slot = _page_of(blocks, counts, t, first_page, first + cell // PAGE), cell % PAGE
            place = page
            if table.shape[0]:
                place = table[page]
            for k in range(part, width, lanes):
                if place >= 0:
                    value = _cell_value(storage, codes, halves, scales, place, head, slot, k)
                else:
                    value = _cell_value(storage, host_codes, host_halves, host_scales, page, head, slot, k)
                a0 = cuda.fma(q[t, first_q, k], value, a0)
                a1 = cuda.fma(q[t, q1, k], value, a1)
                a2 = cuda.fma(q[t, q2, k], value, a2)
                a3 = cuda.fma(q[t, q3, k], value, a3)
        partial[thread] = a0
        partial[MAX_THREADS + thread] = a1
        partial[2 * MAX_THREADS + thread] = a2
        partial[3 * MAX_THREADS + thread] = a3
        cuda.syncthreads()
        for item in range(thread, GROUP * cells_at_once, cuda.blockDim.x):
            g, c = item // cells_at_once, item % cells_at_once
            if start + c < n_cells:
                total = np.float32(0)
                for lane in range(lanes):
                    total += partial[g * MAX_THREADS + c * lanes + lane]
                scores[g * SEGMENT * PAGE + start + c] = total * scale
        cuda.syncthreads()


@cuda.jit(device=True)
def _softmax_segment(scores, n_cells, partial, peaks, sums):
    """Turn the scores of four heads into e ** (score - peak); a fixed group of threads a head, sums in its order."""
    thread, lanes = cuda.threadIdx.x, max(1, cuda.blockDim.x // GROUP)
    heads_at_once = cuda.blockDim.x // lanes
    for g in range(thread // lanes, GROUP, heads_at_once):
        top = EMPTY
        for cell in range(thread % lanes, n_cells, lanes):
            top = max(top, scores[g * SEGMENT * PAGE + cell])
        partial[g * MAX_THREADS + thread % lanes] = top
    cuda.syncthreads()
    for g in range(thread // lanes, GROUP, heads_at_once):
        peak, total = EMPTY, np.float32(0)
        for lane in range(lanes):
            peak = max(peak, partial[g * MAX_THREADS + lane])
        for cell in range(thread % lanes, n_cells, lanes):
            weight = np.float32(math.exp(scores[g * SEGMENT * PAGE + cell] - peak))
            scores[g * SEGMENT * PAGE + cell] = weight
            total += weight
        partial[(GROUP + g) * MAX_THREADS + thread % lanes] = total
        if thread % lanes == 0:
            peaks[g] = peak
    cuda.syncthreads()
    for g in range(thread, GROUP, cuda.blockDim.x):
        total = np.float32(0)
        for lane in range(lanes):
            total += partial[(GROUP + g) * MAX_THREADS + lane]
        sums[g] = total
    cuda.syncthreads()


@cuda.jit(device=True)
def _merge_factors(peak, total, top, running):
    """How a segment (peak, total) and what came before it (top, running) are weighed, and the peak of both."""
    if running == np.float32(0):
        return np.float32(0), np.float32(1), peak
    both = max(top, peak)
    return np.float32(math.exp(top - both)), np.float32(math.exp(peak - both)), both


@cuda.jit(device=True)
def _add_values(storage, codes, halves, scales, host_codes, host_halves, host_scales, table, t, head, width, blocks,
                counts, first_page, first, n_cells, scores, peaks, sums, tops, running, result):
    """Fold a segment's weighted V into result [4][width]; a thread owns its elements k, so nothing is shared."""
    for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        a0, a1, a2, a3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for cell in range(n_cells):
            page, slot = _page_of(blocks, counts, t, first_page, first + cell // PAGE), cell % PAGE
            place = page
            if table.shape[0]:
                place = table[page]
            if place >= 0:
                value = _cell_value(storage, codes, halves, scales, place, head, slot, k)
            else:
                value = _cell_value(storage, host_codes, host_halves, host_scales, page, head, slot, k)
            a0 = cuda.fma(scores[cell], value, a0)
            a1 = cuda.fma(scores[SEGMENT * PAGE + cell], value, a1)
            a2 = cuda.fma(scores[2 * SEGMENT * PAGE + cell], value, a2)
            a3 = cuda.fma(scores[3 * SEGMENT * PAGE + cell], value, a3)
        for g in range(GROUP):
            keep, fresh, _ = _merge_factors(peaks[g], sums[g], tops[g], running[g])
            mine = a0
            if g == 1:
                mine = a1
            elif g == 2:
                mine = a2
            elif g == 3:
                mine = a3
            result[g * MAX_HEAD + k] = cuda.fma(mine, fresh, product(result[g * MAX_HEAD + k], keep))
    cuda.syncthreads()
    for g in range(cuda.threadIdx.x, GROUP, cuda.blockDim.x):
        keep, fresh, top = _merge_factors(peaks[g], sums[g], tops[g], running[g])
        running[g] = cuda.fma(sums[g], fresh, product(running[g], keep))
        tops[g] = top
    cuda.syncthreads()


@cuda.jit
def _attention_kernel(k_storage, v_storage, k_codes, k_halves, k_scales, v_codes, v_halves, v_scales, table, hk_codes,
                      hk_halves, hk_scales, hv_codes, hv_halves, hv_scales, q, position, scale, blocks, counts,
                      window_pages, segments_a_block, partial_out, partial_peaks, partial_sums, out):
    """blockIdx (token, four query heads of a K/V head, run of segments): softmax-weighted V over the run's cells.

    A block goes through its segments of 64 pages in order, merging each into what it has; with one run it writes `out`,
    with several its peak, sum and unnormalised values for `_merge_kernel`, which merges them in the same order: the
    bits do not depend on how segments are spread. A page is read in its slot where `table` has one (empty table: page p
    in slot p), else in the host's pools. `window_pages` (0: all) is how far back a token looks. Shared: scores 4 KiB,
    partial sums 8 KiB, result 4 KiB. Twin: attention, attention_selected; scores differ by their order of sums.
    """
    scores = cuda.shared.array(SCORES, np.float32)
    partial = cuda.shared.array(PARTIALS, np.float32)
    result = cuda.shared.array(RESULTS, np.float32)
    peaks = cuda.shared.array(GROUP, np.float32)
    sums = cuda.shared.array(GROUP, np.float32)
    tops = cuda.shared.array(GROUP, np.float32)
    running = cuda.shared.array(GROUP, np.float32)
    t, run, width, n_kv = cuda.blockIdx.x, cuda.blockIdx.z, q.shape[2], k_codes.shape[1]
    group = q.shape[1] // n_kv
    quarters = (group + GROUP - 1) // GROUP
    head = cuda.blockIdx.y // quarters
    first_q, last_q = head * group + cuda.blockIdx.y % quarters * GROUP, (head + 1) * group - 1
    n_pages, first_page = (position + t + PAGE) // PAGE, 0
    if counts.shape[0]:
        n_pages = counts[t]
    elif window_pages > 0:
        first_page = max(0, n_pages - window_pages)
        n_pages -= first_page
    for item in range(cuda.threadIdx.x, GROUP * MAX_HEAD, cuda.blockDim.x):
        result[item] = np.float32(0)
    for g in range(cuda.threadIdx.x, GROUP, cuda.blockDim.x):
        tops[g], running[g] = EMPTY, np.float32(0)
    cuda.syncthreads()
    for segment in range(run * segments_a_block, (run + 1) * segments_a_block):
        first = segment * SEGMENT
        last = min(first + SEGMENT, n_pages)
        if first < last:
            last_page = _page_of(blocks, counts, t, first_page, last - 1)
            n_cells = (last - 1 - first) * PAGE + min(PAGE, position + t + 1 - last_page * PAGE)
            if n_cells > 0:
                _segment_scores(k_storage, k_codes, k_halves, k_scales, hk_codes, hk_halves, hk_scales, table, q, t,
                                head, first_q, last_q, blocks, counts, first_page, first, n_cells, scale, partial,
                                scores)
                _softmax_segment(scores, n_cells, partial, peaks, sums)
                _add_values(v_storage, v_codes, v_halves, v_scales, hv_codes, hv_halves, hv_scales, table, t, head,
                            width, blocks, counts, first_page, first, n_cells, scores, peaks, sums, tops, running,
                            result)
    for item in range(cuda.threadIdx.x, GROUP * width, cuda.blockDim.x):
        g, k = item // width, item % width
        if first_q + g <= last_q:
            if partial_sums.shape[0]:
                partial_out[t, run, first_q + g, k] = result[g * MAX_HEAD + k]
            else:
                out[t, first_q + g, k] = result[g * MAX_HEAD + k] / running[g]
    if partial_sums.shape[0]:
        for g in range(cuda.threadIdx.x, GROUP, cuda.blockDim.x):
            if first_q + g <= last_q:
                partial_peaks[t, run, first_q + g] = tops[g]
                partial_sums[t, run, first_q + g] = running[g]


@cuda.jit
def _merge_kernel(partial_out, peaks, sums, out):
    """Merge the runs of `_attention_kernel` in order; an item is one element of one head of one token."""
    n_heads, width = out.shape[1], out.shape[2]
    for item in range(cuda.grid(1), out.shape[0] * n_heads * width, cuda.gridsize(1)):
        t, h, k = item // (n_heads * width), item // width % n_heads, item % width
        top, running, value = EMPTY, np.float32(0), np.float32(0)
        for run in range(peaks.shape[1]):
            total = sums[t, run, h]
            if total > np.float32(0):
                keep, fresh, top = _merge_factors(peaks[t, run, h], total, top, running)
                value = cuda.fma(partial_out[t, run, h, k], fresh, product(value, keep))
                running = cuda.fma(total, fresh, product(running, keep))
        out[t, h, k] = value / running


def _attend(storages, pools, q, position, scale, blocks, counts, n_pages, out):
    """Launch attention over at most `n_pages` pages a token, split over blocks where there are few tokens."""
    k, k_scale, v, v_scale = pools
    n_tokens, n_heads, width = q.shape
    n_kv = k.device.bytes.shape[1]
    grid_heads = n_kv * -(-(n_heads // n_kv) // GROUP)
    n_segments = -(-n_pages // SEGMENT)
    runs = n_segments if n_tokens <= SPLIT_TOKENS else 1
    split = runs > 1
    partial_out = empty((n_tokens, runs, n_heads, width) if split else (0, 0, 0, 0))
    partial_peaks, partial_sums = (empty((n_tokens, runs, n_heads) if split else (0, 0, 0)) for _ in range(2))
    _attention_kernel[(n_tokens, grid_heads, runs), cudapools.THREADS](
        *storages, k.device.bytes, k.device.halves, k_scale.device.halves, v.device.bytes, v.device.halves,
        v_scale.device.halves, k.table, k.host.bytes, k.host.halves, k_scale.host.halves, v.host.bytes, v.host.halves,
        v_scale.host.halves, q, position, scale, blocks, counts, k.window_pages, -(-n_segments // runs), partial_out,
        partial_peaks, partial_sums, out,
    )  # fmt: skip
    if split:
        launch(_merge_kernel, out.size, partial_out, partial_peaks, partial_sums, out)


def attention(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, out):
    """Causal attention of T tokens at cells position..position+T-1 over every cell up to their own, or their window.

    q, out float32 [T, H, D]; pools are `cudapools.Cells`.
    """
    n_pages = (position + q.shape[0] - 1 + PAGE) // PAGE
    k_codes.before_dense_read(n_pages)
    blocks, counts = empty((0, 0), np.int32), empty(0, np.int64)
    if k_codes.window_pages:
        n_pages = min(n_pages, k_codes.window_pages)
    pools = (k_codes, k_scales, v_codes, v_scales)
    _attend((k_storage, v_storage), pools, q, position, scale, blocks, counts, n_pages, out)


def attention_selected(k_storage, v_storage, k_codes, k_scales, v_codes, v_scales, q, position, scale, blocks, counts,
                       out):
    """`attention` over chosen pages only: token t reads pages blocks[t, :counts[t]] (ascending, its own page last)."""
    k_codes.before_read(blocks, counts)
    pools = (k_codes, k_scales, v_codes, v_scales)
    _attend((k_storage, v_storage), pools, q, position, scale, blocks, counts, blocks.shape[1], out)


# --- the block indexer --------------------------------------------------------------------------------------------


@cuda.jit
def _pool_kernel(raw, first_cell, tail, weight, eps, inverse_frequency, pooled):
    """A block a page that becomes complete: pooled = rope(rms(mean of its four raw keys)). Shared: the key, the sum."""
    key = cuda.shared.array(MAX_HEAD, np.float32)
    scratch = cuda.shared.array(MAX_THREADS, np.float32)
    width, half = raw.shape[1], inverse_frequency.shape[0]
    first_page, n_pages = first_cell // PAGE, (first_cell + raw.shape[0]) // PAGE
    for page in range(first_page + cuda.blockIdx.x, n_pages, cuda.gridDim.x):
        squares = np.float32(0)
        for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            total = np.float32(0)
            for slot in range(PAGE):
                t = page * PAGE + slot - first_cell
                if t >= 0:
                    total += raw[t, k]
                else:
                    total += tail[slot, k]
            mean = total * np.float32(0.25)
            key[k] = mean
            squares = cuda.fma(mean, mean, squares)
        scale = np.float32(1) / np.float32(math.sqrt(block_sum(squares, scratch) / np.float32(width) + eps))
        for k in range(cuda.threadIdx.x, half, cuda.blockDim.x):
            angle = page * PAGE * inverse_frequency[k]
            cos, sin = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            a, b = key[k] * scale * weight[0, k], key[k + half] * scale * weight[0, k + half]
            pooled[page, k] = a * cos - b * sin
            pooled[page, k + half] = b * cos + a * sin
        for k in range(2 * half + cuda.threadIdx.x, width, cuda.blockDim.x):
            pooled[page, k] = key[k] * scale * weight[0, k]
        cuda.syncthreads()


@cuda.jit
def _tail_kernel(raw, first_cell, tail, dead, weight, eps):
    """One block: the last raw keys of the open page to `tail`; rms(raw key of cell 0) to `dead` where it is read."""
    scratch = cuda.shared.array(MAX_THREADS, np.float32)
    width, n_tokens = raw.shape[1], raw.shape[0]
    for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        for t in range(max(0, n_tokens - PAGE), n_tokens):
            slot = (first_cell + t) % PAGE
            if slot < PAGE - 1:
                tail[slot, k] = raw[t, k]
    if first_cell == 0:
        scale = inverse_rms(raw, 0, width, eps, scratch)
        for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            dead[k] = raw[0, k] * scale * weight[0, k]


def pool_keys(raw, first_cell, tail, dead, weight, eps, inverse_frequency, pooled):
    """Fold raw index keys of cells first_cell.. into pooled block keys; mutates tail, dead and pooled.

    raw float32 [T, D]; tail [3, D] holds the raw keys of the open block; a block that becomes complete gets
    pooled[block] = rope(rms(mean of its four keys), position of its first cell); dead [D] = rms(raw key of cell 0).
    """
    n_complete = (first_cell + raw.shape[0]) // PAGE - first_cell // PAGE
    launch_rows(_pool_kernel, n_complete, raw, first_cell, tail, weight, eps, inverse_frequency, pooled)
    if raw.shape[0]:
        _tail_kernel[1, cudapools.THREADS](raw, first_cell, tail, dead, weight, eps)


@cuda.jit
def _block_scores_kernel(queries, pooled, n, scores):
    """scores [T, n] = sum over heads of relu(query . pooled); an item is a token and a block."""
    n_heads, width = queries.shape[1], queries.shape[2]
    for item in range(cuda.grid(1), queries.shape[0] * n, cuda.gridsize(1)):
        t, b = item // n, item % n
        total = np.float32(0)
        for h in range(n_heads):
            dot = np.float32(0)
            for k in range(width):
                dot = cuda.fma(queries[t, h, k], pooled[b, k], dot)
            total += max(np.float32(0), dot)
        scores[t, b] = total


@cuda.jit(device=True)
def _count_bytes(scores, t, n, shift, prefix, histogram):
    """How often each byte at `shift` comes among the scores whose bytes above it are those of `prefix`."""
    for bucket in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        histogram[bucket] = np.int32(0)
    cuda.syncthreads()
    for b in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        bits = scores[t, b]
        # Two shifts, since one by 32 is undefined.
        above_byte = np.int32(np.int32(bits >> np.int32(shift)) >> np.int32(8))
        if above_byte == np.int32(np.int32(prefix >> np.int32(shift)) >> np.int32(8)):
            cuda.atomic.add(histogram, np.int32(np.int32(bits >> np.int32(shift)) & np.int32(255)), 1)
    cuda.syncthreads()


@cuda.jit(device=True)
def _find_limit(scores, t, n, keep, histogram, state):
    """The bits of the score of rank `keep`, and how many of that score are among the largest: a byte at a time."""
    if cuda.threadIdx.x == 0:
        state[0], state[1] = np.int32(0), np.int32(keep)  # bits of the limit so far; how many are still wanted
    cuda.syncthreads()
    for shift in range(24, -1, -8):
        prefix = state[0]
        _count_bytes(scores, t, n, shift, prefix, histogram)
        if cuda.threadIdx.x == 0:
            bucket, wanted = 255, state[1]
            while histogram[bucket] < wanted:
                wanted = np.int32(wanted - histogram[bucket])
                bucket -= 1
            state[0] = np.int32(prefix | np.int32(np.int32(bucket) << np.int32(shift)))
            state[1] = wanted
        cuda.syncthreads()
    return state[0], state[1]


@cuda.jit(device=True)
def _write_largest(scores, t, n, limit, ties, above, equal, blocks):
    """Every thread writes what its own run of blocks adds, behind that of the threads before it."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    run = (n + threads - 1) // threads
    first, last = min(thread * run, n), min((thread + 1) * run, n)
    n_above, n_equal = np.int32(0), np.int32(0)
    for b in range(first, last):
        if scores[t, b] > limit:
            n_above = np.int32(n_above + 1)
        elif scores[t, b] == limit:
            n_equal = np.int32(n_equal + 1)
    above[thread] = n_above
    equal[thread] = n_equal
    cuda.syncthreads()
    n_above, n_equal = np.int32(0), np.int32(0)
    for other in range(thread):
        n_above = np.int32(n_above + above[other])
        n_equal = np.int32(n_equal + equal[other])
    for b in range(first, last):
        if scores[t, b] > limit:
            blocks[t, n_above + min(n_equal, ties)] = b
            n_above = np.int32(n_above + 1)
        elif scores[t, b] == limit:
            if n_equal < ties:
                blocks[t, n_above + n_equal] = b
            n_equal = np.int32(n_equal + 1)
    cuda.syncthreads()


@cuda.jit
def _select_kernel(scores, position, keep, blocks, counts):
    """The `keep` largest of a token's complete blocks, ascending, ties to the lowest, and the open block behind them.

    A block per token; scores int32 [T, n]: the bits of floats >= 0, which sort like the floats.
    Twin: select_blocks, the same indices for the same scores.
    """
    histogram = cuda.shared.array(256, np.int32)
    state = cuda.shared.array(2, np.int32)
    above = cuda.shared.array(MAX_THREADS, np.int32)
    equal = cuda.shared.array(MAX_THREADS, np.int32)
    for t in range(cuda.blockIdx.x, counts.shape[0], cuda.gridDim.x):
        n = (position + t + 1) // PAGE
        m = min(n, keep)
        if n <= keep:
            for b in range(cuda.threadIdx.x, n, cuda.blockDim.x):
                blocks[t, b] = b
        else:
            limit, ties = _find_limit(scores, t, n, keep, histogram, state)
            _write_largest(scores, t, n, limit, ties, above, equal, blocks)
        if cuda.threadIdx.x == 0:
            if (position + t + 1) % PAGE:
                blocks[t, m] = n
                m += 1
            counts[t] = m


def select_blocks(queries, pooled, position, keep, blocks, counts):
    """For token t the `keep` complete blocks of highest score, ascending, and the open block behind them.

    queries float32 [T, heads, D] (normed, rotated), pooled float32 [rows, D]; score = sum over heads of
    relu(query . pooled). blocks int32 [T, keep + 1], counts int64 [T].
    """
    n_tokens = queries.shape[0]
    n = (position + n_tokens) // PAGE
    scores = empty((n_tokens, n if n > keep else 0))
    launch(_block_scores_kernel, scores.size, queries, pooled, n, scores)
    bits = scores.view(np.int32) if scores.size else empty((0, 0), np.int32)
    launch_rows(_select_kernel, n_tokens, bits, position, keep, blocks, counts)
