"""The operations of a forward pass on the CPU, in Numba.

It owns the small operations on plain arrays and the list of all; it knows no layer, no token and no file. Invariant:
what is computed for a token does not depend on which other tokens stand in the same call or how many threads run it:
every sum has a fixed order. Read next: cpuproducts.py for weights, cpuattention.py for attention.
"""

import functools

import numpy as np

import cpuattention
import cpumemory
import cpuproducts
import cpusimd as simd
from cells import PAGE
from cpuattention import append_cells
from cpuproducts import multiply, product_jobs
from cpusums import dot, square_sum
from cputeam import Job, Team, arguments, array_at, awake, begin, given, run_jobs
from jit import njit
from packs import ROWS

# --- arrays ---------------------------------------------------------------------------------------------------------
# A backend whose kernels cannot read the host's memory copies here; this one works where the arrays lie.


def empty(shape, dtype=np.float32):
    """An array of any content."""
    return np.empty(shape, dtype)


def zeros(shape, dtype=np.float32):
    """An array of zeros."""
    return np.zeros(shape, dtype)


def from_host(array):
    """A NumPy array as one that the operations take; it may be the same one."""
    return array


def to_host(array):
    """An operation's array as a NumPy one; it may be the same one."""
    return array


def host_copy(array):
    """An operation's array as a NumPy one of its own."""
    return array.copy()


def copy(array):
    """A copy that the operations take."""
    return array.copy()


def assign(out, source):
    """out = source, of the same shape; `source` may be an operation's array or a NumPy one."""
    out[...] = source


def clear(array):
    """Set an array to zeros."""
    array.fill(0)


def cells(n_pages, n_heads, sizes, residency=None):
    """The K/V pools of one layer, an array [pages][kv head][cell][bytes] for each of `sizes`, all in this memory."""
    if residency is not None:
        raise ValueError("there is no other memory to keep cells in")
    return [cpumemory.aligned_zeros((n_pages, n_heads, PAGE, size), np.uint8) for size in sizes]


def settle(pool, n_tokens):
    """After a rewind or a restore; nothing here depends on where cells lie."""


def read_bytes(array, offset, out):
    """Copy len(out) bytes of an array, from byte `offset`, into the NumPy array `out` (uint8)."""
    out[:] = array.reshape(-1).view(np.uint8)[offset : offset + len(out)]


def write_bytes(array, offset, data):
    """Copy `data` (NumPy, uint8) over the bytes of an array from byte `offset`."""
    # A reshape of a contiguous array is a view, which is what makes the bytes reach it.
    cpumemory.copy(array.reshape(-1).view(np.uint8)[offset : offset + len(data)], data)


# --- elementwise and row operations -------------------------------------------------------------------------------


@njit
def _inverse_rms(x, at, n, eps):
    return np.float32(1) / np.sqrt(square_sum(x, at, n) / np.float32(n) + eps)


@njit
def rms_norm(x, weight, eps, out):
    """out[r] = x[r] / sqrt(mean(x[r]**2) + eps) * weight[r mod C]; x, out float32 [R, N], weight [C, N]."""
    n = x.shape[1]
    for row in range(x.shape[0]):
        scale = _inverse_rms(x, row * n, n, eps)
        w = row % weight.shape[0]
        for k in range(n):
            out[row, k] = x[row, k] * scale * weight[w, k]


@njit
def silu_mul(gate, up, out):
    """out = gate * sigmoid(gate) * up; float32 [T, N], N a multiple of 16."""
    for k in range(0, gate.size, ROWS):
        g = simd.load(gate, k)
        simd.store(out, k, simd.mul(simd.mul(g, simd.sigmoid(g)), simd.load(up, k)))


def swiglu(gate_up, down, x, out, team=None):
    """out = down(silu(gate x) * up x): `silu_mul` between two products; x float32 [T, N], out [T, N]."""
    _swiglu(awake(team), *product_jobs(), gate_up.table, down.table, x, down.n_cols, out)


@njit
def _swiglu(control, round_job, product_job, tiles, gate_up, down, x, n_ff, out):
    n_tokens = x.shape[0]
    both, whole = cpumemory.scratch(2 * n_tokens * n_ff), np.array([0, n_tokens])
    multiply(control, round_job, product_job, tiles, gate_up, x, whole, both)
    gate = both[: n_tokens * n_ff]
    silu_mul(gate, both[n_tokens * n_ff :], gate)
    multiply(control, round_job, product_job, tiles, down, gate.reshape(n_tokens, n_ff), whole, out)


@njit
def sigmoid_mul(gate, x):
    """x *= sigmoid(gate) in place; float32 [T, N], N a multiple of 16."""
    for k in range(0, x.size, ROWS):
        simd.store(x, k, simd.mul(simd.load(x, k), simd.sigmoid(simd.load(gate, k))))


@njit
def silu_scaled(x, scale):
    """x = silu(x * scale) in place; float32 [T, N], N a multiple of 16."""
    for k in range(0, x.size, ROWS):
        value = simd.mul(simd.load(x, k), simd.splat(scale))
        simd.store(x, k, simd.mul(value, simd.sigmoid(value)))


@njit
def add_rows(x, y):
    """x += y; float32 of one shape."""
    flat, other = x.ravel(), y.ravel()
    for k in range(len(flat)):
        flat[k] += other[k]


@njit
def add_scaled_rows(x, scale, y):
    """x[t] += sigmoid(scale[t, 0]) * y[t]; the shared expert's gate."""
    for t in range(x.shape[0]):
        gate = np.float32(1) / (np.float32(1) + np.exp(-scale[t, 0]))
        for k in range(x.shape[1]):
            x[t, k] += gate * y[t, k]


@njit
def add_bias(x, bias):
    """x[t] += bias; x float32 [T, N], bias [N]."""
    for t in range(x.shape[0]):
        for k in range(x.shape[1]):
            x[t, k] += bias[k]


@njit
def split_gate(both, q, gate):
    """Each head's first half to q, its second to gate; both float32 [T, H, 2 D], q and gate [T, H, D]."""
    width = q.shape[2]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            for k in range(width):
                q[t, h, k] = both[t, h, k]
                gate[t, h, k] = both[t, h, width + k]


@njit
def rope_table(positions, inverse_frequency, cos, sin):
    """cos, sin (float32 [T, n_rot / 2]) of position * frequency, taken in float64; positions int64 [T]."""
    for t in range(len(positions)):
        for k in range(len(inverse_frequency)):
            angle = positions[t] * inverse_frequency[k]
            cos[t, k] = np.cos(angle)
            sin[t, k] = np.sin(angle)


@njit
def _rotate(x, cos, sin, paired):
    half = len(cos)
    for k in range(half):
        i, j = (2 * k, 2 * k + 1) if paired else (k, k + half)
        a, b = x[i], x[j]
        x[i] = a * cos[k] - b * sin[k]
        x[j] = b * cos[k] + a * sin[k]


@njit
def norm_rope_heads(x, weight, eps, cos, sin, paired):
    """RMS norm (weight float32 [1, D], or [0, D] for none) and rotation of each head's first dimensions, in place.

    x float32 [T, heads, D]; cos, sin [T, n_rot / 2]; `paired` rotates (2k, 2k + 1) instead of (k, k + n_rot / 2).
    """
    n_heads, width = x.shape[1], x.shape[2]
    for t in range(x.shape[0]):
        for h in range(n_heads):
            if len(weight):
                scale = _inverse_rms(x, (t * n_heads + h) * width, width, eps)
                for k in range(width):
                    x[t, h, k] = x[t, h, k] * scale * weight[0, k]
            _rotate(x[t, h], cos[t], sin[t], paired)


@njit
def hadamard_heads(x):
    """Orthonormal Walsh-Hadamard transform of every head in place; x float32 [T, heads, D], D a power of two."""
    width = x.shape[2]
    scale = np.float32(1 / np.sqrt(np.float64(width)))
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            row = x[t, h]
            span = 1
            while span < width:
                for start in range(0, width, 2 * span):
                    for k in range(start, start + span):
                        a, b = row[k], row[k + span]
                        row[k] = a + b
                        row[k + span] = a - b
                span *= 2
            for k in range(width):
                row[k] *= scale


# --- heads into cells ---------------------------------------------------------------------------------------------


@njit
def store_heads(q, k, v, q_norm, k_norm, eps, cos, sin, paired, rotated, storages, first_cell, k_codes, k_scales,
                v_codes, v_scales):
    """Norm and rotate q and k in place, then append k and v to the cells from `first_cell` on.

    `rotated` says whether K, and whether V is stored after `hadamard_heads` (q then goes with K, since only their
    product is used); `storages` are those of K and V; the rest as in `norm_rope_heads` and `append_cells`.
    """
    norm_rope_heads(q, q_norm, eps, cos, sin, paired)
    norm_rope_heads(k, k_norm, eps, cos, sin, paired)
    if rotated[0]:
        hadamard_heads(q)
        hadamard_heads(k)
    if rotated[1]:
        hadamard_heads(v)
    append_cells(storages[0], k, first_cell, k_codes, k_scales)
    append_cells(storages[1], v, first_cell, v_codes, v_scales)


# --- the block indexer --------------------------------------------------------------------------------------------


@njit
def pool_keys(raw, first_cell, tail, dead, weight, eps, inverse_frequency, pooled):
    """Fold raw index keys of cells first_cell.. into pooled block keys; mutates tail, dead and pooled.

    raw float32 [T, D]; tail [3, D] holds the raw keys of the open block; a block that becomes complete gets
    pooled[block] = rope(rms(mean of its four keys), position of its first cell); dead [D] = rms(raw key of cell 0).
    """
    width = raw.shape[1]
    half = len(inverse_frequency)
    mean = np.empty((1, width), np.float32)
    normed = np.empty((1, width), np.float32)
    cos, sin = np.empty((1, half), np.float32), np.empty((1, half), np.float32)
    position = np.empty(1, np.int64)
    for t in range(raw.shape[0]):
        cell = first_cell + t
        slot, block = cell % PAGE, cell // PAGE
        if cell == 0:
            scale = _inverse_rms(raw, t * width, width, eps)
            for k in range(width):
                dead[k] = raw[t, k] * scale * weight[0, k]
        if slot < PAGE - 1:
            tail[slot] = raw[t]
            continue
        for k in range(width):
            mean[0, k] = (tail[0, k] + tail[1, k] + tail[2, k] + raw[t, k]) * np.float32(0.25)
        scale = _inverse_rms(mean, 0, width, eps)
        for k in range(width):
            normed[0, k] = mean[0, k] * scale * weight[0, k]
        position[0] = block * PAGE
        rope_table(position, inverse_frequency, cos, sin)
        _rotate(normed[0], cos[0], sin[0], False)
        pooled[block] = normed[0]


# --- gated delta net ----------------------------------------------------------------------------------------------


@njit
def conv_silu(x, history, weight, out):
    """Causal depthwise convolution over time, then SiLU; the last rows of x become the history.

    x, out float32 [T, channels]; history [K - 1, channels], oldest first, mutated; weight [K, channels], the current
    row's tap last.
    """
    n_taps = weight.shape[0]
    for t in range(x.shape[0]):
        for c in range(x.shape[1]):
            total = x[t, c] * weight[n_taps - 1, c]
            for tap in range(n_taps - 1):
                total += history[tap, c] * weight[tap, c]
            out[t, c] = total / (np.float32(1) + np.exp(-total))
        for tap in range(n_taps - 2):
            history[tap] = history[tap + 1]
        history[n_taps - 2] = x[t]


@njit
def _l2_normalise(x, extra, out):
    total = np.float32(0)
    for value in x:
        total += value * value
    scale = np.float32(1) / np.sqrt(total + np.float32(1e-6)) * extra
    for k in range(len(x)):
        out[k] = x[k] * scale


@njit
def _delta_step(state, decay, beta, q, k, v, delta, out):
    """One token of one head: decay, then the delta update, then the read (state float32 [S_key, S_value])."""
    delta[:] = np.float32(0)
    out[:] = np.float32(0)
    for i in range(state.shape[0]):
        key = k[i]
        for j in range(state.shape[1]):
            value = state[i, j] * decay
            state[i, j] = value
            delta[j] += value * key
    for j in range(state.shape[1]):
        delta[j] = beta * (v[j] - delta[j])
    for i in range(state.shape[0]):
        key, query = k[i], q[i]
        for j in range(state.shape[1]):
            value = state[i, j] + key * delta[j]
            state[i, j] = value
            out[j] += value * query


def delta_net(mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out, team=None):
    """The gated delta rule, token by token; mutates state float32 [Hv, S, S].

    mixed float32 [T, 2 Hk S + Hv S] (q, k, v after the convolution), alpha, beta [T, Hv], a = -e ** A_log and dt_bias
    [Hv], out [T, Hv, S]. Value head v reads key head v // (Hv / Hk) where `grouped`, else v mod Hk.
    """
    _delta_net(awake(team), _DELTA.address, mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out)


_DeltaNet = arguments("mixed alpha beta a dt_bias state out n_key_heads grouped n_tokens n_channels n_heads size")


@njit
def _delta_net(control, delta_job, mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out):
    c = begin(control, delta_job, _DeltaNet)
    c.mixed, c.alpha, c.beta, c.a = mixed.ctypes.data, alpha.ctypes.data, beta.ctypes.data, a.ctypes.data
    c.dt_bias, c.state, c.out = dt_bias.ctypes.data, state.ctypes.data, out.ctypes.data
    c.n_key_heads, c.grouped, c.n_heads, c.size = n_key_heads, grouped, state.shape[0], state.shape[1]
    c.n_tokens, c.n_channels = mixed.shape
    run_jobs(control, len(state))


def _delta_job(control, head):
    """All tokens of one value head."""
    c = given(control, _DeltaNet)
    n_key_heads, grouped, n_tokens, n_heads, size = c.n_key_heads, c.grouped, c.n_tokens, c.n_heads, c.size
    mixed = array_at(c.mixed, (n_tokens, c.n_channels), np.float32)
    out = array_at(c.out, (n_tokens, n_heads, size), np.float32)
    alpha, beta = array_at(c.alpha, (n_tokens, n_heads), np.float32), array_at(c.beta, (n_tokens, n_heads), np.float32)
    a, dt_bias = array_at(c.a, n_heads, np.float32), array_at(c.dt_bias, n_heads, np.float32)
    state = array_at(c.state, (n_heads, size, size), np.float32)
    q, k, delta = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    key_head = head // (n_heads // n_key_heads) if grouped else head % n_key_heads
    for t in range(n_tokens):
        at = key_head * size
        _l2_normalise(mixed[t, at : at + size], np.float32(1 / np.sqrt(np.float64(size))), q)
        at += n_key_heads * size
        _l2_normalise(mixed[t, at : at + size], np.float32(1), k)
        at = 2 * n_key_heads * size + head * size
        x = alpha[t, head] + dt_bias[head]
        softplus = x if x > np.float32(20) else np.log1p(np.exp(x))
        decay = np.exp(a[head] * softplus)
        gate = np.float32(1) / (np.float32(1) + np.exp(-beta[t, head]))
        _delta_step(state[head], decay, gate, q, k, mixed[t, at : at + size], delta, out[t, head])


_DELTA = Job(_delta_job)


@njit
def norm_gate_heads(x, weight, eps, z, silu):
    """x = rms(x per head) * weight * gate(z), in place; gate is silu or sigmoid; x [T, Hv, S], z [T, Hv * S]."""
    n_heads, width = x.shape[1], x.shape[2]
    for t in range(x.shape[0]):
        for h in range(n_heads):
            scale = _inverse_rms(x, (t * n_heads + h) * width, width, eps)
            for k in range(width):
                gate = z[t, h * width + k]
                factor = np.float32(1) / (np.float32(1) + np.exp(-gate))
                if silu:
                    factor *= gate
                x[t, h, k] = x[t, h, k] * scale * weight[0, k] * factor


# --- hyper-connections --------------------------------------------------------------------------------------------


@njit
def mix_streams(gates, normed, out):
    """out[t] = mean over streams of sigmoid(gates) * normed; gates, normed float32 [T, C * N], out [T, N]."""
    n = out.shape[1]
    n_streams = gates.shape[1] // n
    for t in range(out.shape[0]):
        for k in range(n):
            total = np.float32(0)
            for c in range(n_streams):
                gate = np.float32(1) / (np.float32(1) + np.exp(-gates[t, c * n + k]))
                total += gate * normed[t, c * n + k]
            out[t, k] = total / np.float32(n_streams)


@njit
def inject_streams(residual, inject, y):
    """residual[t, c] += 2 sigmoid(inject[t, c] / C) * y[t]; residual float32 [T, C, N]."""
    n_streams = residual.shape[1]
    for t in range(residual.shape[0]):
        for c in range(n_streams):
            gate = np.float32(2) / (np.float32(1) + np.exp(-inject[t, c] / np.float32(n_streams)))
            for k in range(residual.shape[2]):
                residual[t, c, k] += gate * y[t, k]


@njit
def repeat_streams(x, residual):
    """residual[t, c] = x[t] for every stream; x float32 [T, N], residual [T, C, N]."""
    for t in range(residual.shape[0]):
        for c in range(residual.shape[1]):
            residual[t, c] = x[t]


@njit
def add_to_streams(residual, y):
    """residual[t, c] += y[t] for every stream; y float32 [T, N], or [1, N] for every token the same."""
    for t in range(residual.shape[0]):
        row = t if y.shape[0] > 1 else 0
        for c in range(residual.shape[1]):
            for k in range(residual.shape[2]):
                residual[t, c, k] += y[row, k]


# --- experts ------------------------------------------------------------------------------------------------------


@njit
def route(logits, weights, experts):
    """Softmax over all experts, the largest (ties to the lowest index), renormalised.

    logits float32 [T, E], mutated; weights float32 [T, k], experts int32 [T, k], both in falling order of weight.
    """
    for t in range(logits.shape[0]):
        row = logits[t]
        peak = row.max()
        for e in range(len(row)):
            row[e] = np.exp(row[e] - peak)
        chosen = np.float32(0)
        for rank in range(weights.shape[1]):
            best = 0
            for e in range(1, len(row)):
                if row[e] > row[best]:
                    best = e
            experts[t, rank] = best
            weights[t, rank] = row[best]
            chosen += row[best]
            row[best] = np.float32(-1)
        for rank in range(weights.shape[1]):
            weights[t, rank] /= chosen


@njit
def order_by_expert(experts, n_experts, order, offsets):
    """Stable order of the T * k assignments by expert: order int64 [T * k], offsets int64 [E + 1]."""
    flat = experts.ravel()
    offsets[:] = 0
    for e in flat:
        offsets[e + 1] += 1
    for e in range(n_experts):
        offsets[e + 1] += offsets[e]
    place = offsets.copy()
    for i in range(len(flat)):
        order[place[flat[i]]] = i
        place[flat[i]] += 1


@njit
def gather_assigned(x, order, rows):
    """rows[i] = the token of assignment order[i]; x float32 [T, N], order int64 [T * k], rows [T * k, N]."""
    n_used = rows.shape[0] // x.shape[0]
    for i in range(rows.shape[0]):
        rows[i] = x[order[i] // n_used]


@njit
def combine_experts(y, order, weights, out):
    """out[t] = sum over ranks, in their order, of weights[t, rank] * y[row of (t, rank)]."""
    n_used = weights.shape[1]
    row_of = np.empty(len(order), np.int64)
    for row in range(len(order)):
        row_of[order[row]] = row
    for t in range(out.shape[0]):
        out[t] = np.float32(0)
        for rank in range(n_used):
            row, weight = row_of[t * n_used + rank], weights[t, rank]
            for k in range(out.shape[1]):
                out[t, k] += weight * y[row, k]


# --- n-gram embeddings --------------------------------------------------------------------------------------------


@njit
def ngram_rows(ids, previous, eos, multipliers, vocab_sizes, head_offsets, rows):
    """Table rows of every token's n-grams: rows int64 [T, heads]; `previous` int64 [n - 1], newest first, -1 missing.

    Order n of the n-grams runs from 2 to len(multipliers), heads in equal shares; a missing predecessor or an
    end-of-text token turns itself and everything older into end-of-text.
    """
    n_orders = len(multipliers) - 1
    per_order = rows.shape[1] // n_orders
    context = np.empty(n_orders + 1, np.int64)
    for t in range(len(ids)):
        context[0] = ids[t]
        cut = False
        for back in range(1, n_orders + 1):
            token = np.int64(ids[t - back]) if t >= back else previous[back - t - 1]
            cut = cut or token < 0 or token == eos
            context[back] = eos if cut else token
        mixed = context[0] * multipliers[0]
        for order in range(1, n_orders + 1):
            mixed ^= context[order] * multipliers[order]
            for h in range((order - 1) * per_order, order * per_order):
                rows[t, h] = mixed % vocab_sizes[h] + head_offsets[h]


@njit
def ngram_gate(key, query, value, out):
    """out[t, c] = g * value[t], g = sigmoid(sign(s) sqrt(max(|s|, 1e-6))), s = key . query / sqrt(N) per stream.

    key, query, out float32 [T, C, N], value [T, N].
    """
    width = key.shape[2]
    for t in range(key.shape[0]):
        for c in range(key.shape[1]):
            at = (t * key.shape[1] + c) * width
            s = dot(key, at, query, at, width) / np.sqrt(np.float32(width))
            root = np.sqrt(max(abs(s), np.float32(1e-6)))
            signed = root if s > 0 else -root
            if s == 0:
                signed = np.float32(0)
            gate = np.float32(1) / (np.float32(1) + np.exp(-signed))
            for k in range(width):
                out[t, c, k] = gate * value[t, k]


@njit
def ngram_conv(normed, history, weight, dilation, gated, residual):
    """residual += gated + silu(conv(normed)): taps at t, t - dilation, ...; the last rows become the history.

    normed, gated, residual float32 [T, C * N]; history [(K - 1) * dilation, C * N], oldest first, mutated; weight
    [K, C * N], the current row's tap last.
    """
    n_taps, n_history = weight.shape[0], history.shape[0]
    for t in range(normed.shape[0]):
        for k in range(normed.shape[1]):
            total = normed[t, k] * weight[n_taps - 1, k]
            for tap in range(n_taps - 1):
                total += history[tap * dilation, k] * weight[tap, k]
            residual[t, k] += gated[t, k] + total / (np.float32(1) + np.exp(-total))
        for row in range(n_history - 1):
            history[row] = history[row + 1]
        history[n_history - 1] = normed[t]


@njit
def push_rows(history, rows):
    """Fold rows float32 [T, N] into history [n, N], which keeps the last n of all, oldest first."""
    n, fresh = history.shape[0], rows.shape[0]
    for row in range(n):
        history[row] = history[row + fresh] if row + fresh < n else rows[row + fresh - n]


# --- the choice of a token ----------------------------------------------------------------------------------------


def greedy(logits):
    """The index of each row's largest value, the lowest of equals, as NumPy int64 [T]; logits float32 [T, V].

    -1 where the largest value is not finite; NaN counts as the largest.
    """
    ids = logits.argmax(axis=1)
    return np.where(np.isfinite(np.take_along_axis(logits, ids[:, None], axis=1)[:, 0]), ids, -1)


def greedy_with_share(logits):
    """`greedy`, and the softmax probability of each choice as NumPy float32 [T], 0 where there is none."""
    ids = greedy(logits)
    share = [1 / np.exp(row - row[token]).sum() if token >= 0 else 0 for row, token in zip(logits, ids, strict=True)]
    return ids, np.array(share, np.float32)


# --- the list -----------------------------------------------------------------------------------------------------

def operations(n_threads: int) -> dict:
    """What a `backend.Backend` needs, by name, on a team of `n_threads`."""
    team = Team(n_threads)
    alone = (
        empty, zeros, from_host, to_host, host_copy, copy, assign, clear, cells, settle, read_bytes, write_bytes,
        append_cells, store_heads, cpuproducts.pack, cpuproducts.together, cpuproducts.gather_rows, rms_norm,
        silu_mul, silu_scaled, sigmoid_mul, add_rows, add_scaled_rows, add_bias, split_gate, rope_table,
        norm_rope_heads, hadamard_heads, pool_keys, conv_silu, norm_gate_heads, mix_streams, inject_streams,
        repeat_streams, add_to_streams, route, order_by_expert, gather_assigned, combine_experts, ngram_rows,
        ngram_gate, ngram_conv, push_rows, greedy, greedy_with_share,
    )  # fmt: skip
    shared_out = (
        cpuproducts.matmul, cpuproducts.matmul_each, cpuproducts.expert_matmul, cpuproducts.expert_matmul_each,
        swiglu, cpuattention.attention, cpuattention.attention_selected, cpuattention.select_blocks, delta_net,
    )  # fmt: skip
    return {
        **{function.__name__: function for function in alone},
        **{function.__name__: functools.partial(function, team=team) for function in shared_out},
        "pack_experts": cpuproducts.pack,
        "place_experts": None,
        "own_memory": False,
        "max_head": None,
        "max_state": None,
        "errors": (),
        "close": team.close,
    }
