"""The operations of kernels_cpu.py as Numba CUDA kernels, with the same names and signatures.

It owns the small operations and is the list of all; it knows no layer, no token and no file. Invariant: what is
computed for a token does not depend on which other tokens stand in the same launch: every sum has one order, set by the
block size alone. Read next: cudaproducts.py for weights, cudaexperts.py for experts that are not all on the device,
cudaattention.py for attention, cudapools.py for where cells lie.

Every kernel runs in Numba's simulator too, which has no warp shuffles, needs one shared array a line and takes the
arithmetic of NumPy scalars; so integers are cast before they are multiplied and sums go through shared memory.
Kernels stride over their work by the grid, so any number of blocks is right.
"""

import math

import numpy as np
from numba import cuda

import cudaattention
import cudaexperts
import cudapools
import cudaproducts
import kernels_cpu
from cudaattention import MAX_HEAD, append_cells
from cudablock import EMPTY, INFINITE, MAX_THREADS, block_sum, inverse_rms, sigmoid
from cudaexperts import expert_matmul
from cudapools import empty, launch, launch_rows
from cudaproducts import matmul

MAX_STATE = 128  # widest state of a gated delta net head
STATE_COLUMNS = 32  # columns of that state that a block keeps in shared memory
STATE_ROOM = MAX_STATE * STATE_COLUMNS


# --- products that read the same x --------------------------------------------------------------------------------


def together(*parts):
    """Packs for `matmul_each` and `expert_matmul_each`; here each is a launch of its own."""
    return parts


def matmul_each(weights, x):
    """x times each of the packs put `together`: an array float32 [T, n_rows] for each."""
    return [_filled(matmul, part, x) for part in weights]


def expert_matmul_each(weights, x, offsets):
    """`expert_matmul` with each of the packs put `together`: an array float32 [n, n_rows] for each."""
    return [_filled(expert_matmul, part, x, offsets) for part in weights]


def _filled(product, weights, x, *offsets):
    out = empty((x.shape[0], weights.n_rows))
    product(weights, x, *offsets, out)
    return out


# --- elementwise and row operations -------------------------------------------------------------------------------


@cuda.jit
def _rms_norm_kernel(x, weight, eps, out):
    """A block a row. Shared: a float a thread. Twin: rms_norm, another order of the sum."""
    scratch = cuda.shared.array(MAX_THREADS, np.float32)
    for row in range(cuda.blockIdx.x, x.shape[0], cuda.gridDim.x):
        scale = inverse_rms(x, row, x.shape[1], eps, scratch)
        for k in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
            out[row, k] = x[row, k] * scale * weight[row % weight.shape[0], k]


def rms_norm(x, weight, eps, out):
    """out[r] = x[r] / sqrt(mean(x[r]**2) + eps) * weight[r mod C]; x, out float32 [R, N], weight [C, N]."""
    launch_rows(_rms_norm_kernel, x.shape[0], x, weight, eps, out)


@cuda.jit
def _silu_mul_kernel(gate, up, out):
    for i in range(cuda.grid(1), gate.shape[0], cuda.gridsize(1)):
        out[i] = gate[i] * sigmoid(gate[i]) * up[i]


def silu_mul(gate, up, out):
    """out = gate * sigmoid(gate) * up; float32 [T, N]."""
    launch(_silu_mul_kernel, gate.size, gate.ravel(), up.ravel(), out.ravel())


def swiglu(gate_up, down, x, out):
    """out = down(silu(gate x) * up x): `silu_mul` between two products; x float32 [T, N], out [T, N]."""
    gate, up = matmul_each(gate_up, x)
    silu_mul(gate, up, gate)
    matmul(down, gate, out)


@cuda.jit
def _sigmoid_mul_kernel(gate, x):
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        x[i] *= sigmoid(gate[i])


def sigmoid_mul(gate, x):
    """x *= sigmoid(gate) in place; float32 [T, N]."""
    launch(_sigmoid_mul_kernel, x.size, gate.ravel(), x.ravel())


@cuda.jit
def _silu_scaled_kernel(x, scale):
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        value = x[i] * scale
        x[i] = value * sigmoid(value)


def silu_scaled(x, scale):
    """x = silu(x * scale) in place; float32 [T, N]."""
    launch(_silu_scaled_kernel, x.size, x.ravel(), scale)


@cuda.jit
def _add_rows_kernel(x, y):
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        x[i] += y[i]


def add_rows(x, y):
    """x += y; float32 of one size."""
    launch(_add_rows_kernel, x.size, x.ravel(), y.ravel())


@cuda.jit
def _add_scaled_rows_kernel(x, scale, y):
    width = x.shape[1]
    for i in range(cuda.grid(1), x.shape[0] * width, cuda.gridsize(1)):
        t, k = i // width, i % width
        x[t, k] += sigmoid(scale[t, 0]) * y[t, k]


def add_scaled_rows(x, scale, y):
    """x[t] += sigmoid(scale[t, 0]) * y[t]; the shared expert's gate."""
    launch(_add_scaled_rows_kernel, x.size, x, scale, y)


@cuda.jit
def _add_bias_kernel(x, bias):
    width = x.shape[1]
    for i in range(cuda.grid(1), x.shape[0] * width, cuda.gridsize(1)):
        x[i // width, i % width] += bias[i % width]


def add_bias(x, bias):
    """x[t] += bias; x float32 [T, N], bias [N]."""
    launch(_add_bias_kernel, x.size, x, bias)


@cuda.jit
def _split_gate_kernel(both, q, gate):
    heads, width = q.shape[1], q.shape[2]
    for i in range(cuda.grid(1), q.shape[0] * heads * width, cuda.gridsize(1)):
        t, h, k = i // (heads * width), i // width % heads, i % width
        q[t, h, k] = both[t, h, k]
        gate[t, h, k] = both[t, h, width + k]


def split_gate(both, q, gate):
    """Each head's first half to q, its second to gate; both float32 [T, H, 2 D], q and gate [T, H, D]."""
    launch(_split_gate_kernel, q.size, both, q, gate)


@cuda.jit
def _rope_table_kernel(positions, inverse_frequency, cos, sin):
    half = inverse_frequency.shape[0]
    for i in range(cuda.grid(1), positions.shape[0] * half, cuda.gridsize(1)):
        t, k = i // half, i % half
        angle = positions[t] * inverse_frequency[k]
        cos[t, k] = math.cos(angle)
        sin[t, k] = math.sin(angle)


def rope_table(positions, inverse_frequency, cos, sin):
    """cos, sin (float32 [T, n_rot / 2]) of position * frequency, taken in float64; positions int64 [T]."""
    launch(_rope_table_kernel, cos.size, positions, inverse_frequency, cos, sin)


@cuda.jit(device=True)
def _scaled(x, row, k, scale, weight):
    if weight.shape[0]:
        return x[row, k] * scale * weight[0, k]
    return x[row, k]


@cuda.jit
def _norm_rope_kernel(x, n_heads, weight, eps, cos, sin, paired):
    """A block a head; a thread takes whole pairs, so nothing is read after it was written. Twin: norm_rope_heads."""
    scratch = cuda.shared.array(MAX_THREADS, np.float32)
    width, half = x.shape[1], cos.shape[1]
    for row in range(cuda.blockIdx.x, x.shape[0], cuda.gridDim.x):
        t, scale = row // n_heads, np.float32(1)
        if weight.shape[0]:
            scale = inverse_rms(x, row, width, eps, scratch)
        for k in range(cuda.threadIdx.x, half, cuda.blockDim.x):
            i, j = k, k + half
            if paired:
                i, j = 2 * k, 2 * k + 1
            a, b = _scaled(x, row, i, scale, weight), _scaled(x, row, j, scale, weight)
            x[row, i] = a * cos[t, k] - b * sin[t, k]
            x[row, j] = b * cos[t, k] + a * sin[t, k]
        for k in range(2 * half + cuda.threadIdx.x, width, cuda.blockDim.x):
            x[row, k] = _scaled(x, row, k, scale, weight)


def norm_rope_heads(x, weight, eps, cos, sin, paired):
    """RMS norm (weight float32 [1, D], or [0, D] for none) and rotation of each head's first dimensions, in place.

    x float32 [T, heads, D]; cos, sin [T, n_rot / 2]; `paired` rotates (2k, 2k + 1) instead of (k, k + n_rot / 2).
    """
    n_tokens, n_heads, width = x.shape
    rows = x.reshape(n_tokens * n_heads, width)
    launch_rows(_norm_rope_kernel, n_tokens * n_heads, rows, n_heads, weight, eps, cos, sin, paired)


@cuda.jit
def _hadamard_kernel(x):
    """A block a head of at most 256. Shared: the head. Twin: hadamard_heads, the same bits: each stage in its order."""
    row_values = cuda.shared.array(MAX_HEAD, np.float32)
    width = x.shape[1]
    scale = np.float32(1) / np.float32(math.sqrt(np.float32(width)))
    for row in range(cuda.blockIdx.x, x.shape[0], cuda.gridDim.x):
        for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            row_values[k] = x[row, k]
        cuda.syncthreads()
        span = 1
        while span < width:
            for pair in range(cuda.threadIdx.x, width // 2, cuda.blockDim.x):
                k = pair // span * 2 * span + pair % span
                a, b = row_values[k], row_values[k + span]
                row_values[k] = a + b
                row_values[k + span] = a - b
            cuda.syncthreads()
            span *= 2
        for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            x[row, k] = row_values[k] * scale
        cuda.syncthreads()


def hadamard_heads(x):
    """Orthonormal Walsh-Hadamard transform of every head in place; x float32 [T, heads, D], D a power of two."""
    n_tokens, n_heads, width = x.shape
    launch_rows(_hadamard_kernel, n_tokens * n_heads, x.reshape(n_tokens * n_heads, width))


def store_heads(q, k, v, q_norm, k_norm, eps, cos, sin, paired, rotated, storages, first_cell, k_codes, k_scales,
                v_codes, v_scales):
    """Norm and rotate q and k in place, then append k and v to the cells from `first_cell` on; see kernels_cpu.py."""
    norm_rope_heads(q, q_norm, eps, cos, sin, paired)
    norm_rope_heads(k, k_norm, eps, cos, sin, paired)
    if rotated[0]:
        hadamard_heads(q)
        hadamard_heads(k)
    if rotated[1]:
        hadamard_heads(v)
    append_cells(storages[0], k, first_cell, k_codes, k_scales)
    append_cells(storages[1], v, first_cell, v_codes, v_scales)


# --- gated delta net ----------------------------------------------------------------------------------------------


@cuda.jit
def _conv_silu_kernel(x, history, weight, out):
    n_tokens, channels, before = x.shape[0], x.shape[1], weight.shape[0] - 1
    for item in range(cuda.grid(1), n_tokens * channels, cuda.gridsize(1)):
        t, c = item // channels, item % channels
        total = x[t, c] * weight[before, c]
        for tap in range(before):
            source = t - before + tap
            if source >= 0:
                total = cuda.fma(x[source, c], weight[tap, c], total)
            else:
                total = cuda.fma(history[source + before, c], weight[tap, c], total)
        out[t, c] = total * sigmoid(total)


def conv_silu(x, history, weight, out):
    """Causal depthwise convolution over time, then SiLU; the last rows of x become the history.

    x, out float32 [T, channels]; history [K - 1, channels], oldest first, mutated; weight [K, channels], the current
    row's tap last.
    """
    launch(_conv_silu_kernel, x.size, x, history, weight, out)
    push_rows(history, x)


@cuda.jit
def _push_rows_kernel(history, rows):
    """A thread a column, rows in order, so each is read before it is overwritten."""
    n, fresh = history.shape[0], rows.shape[0]
    for k in range(cuda.grid(1), history.shape[1], cuda.gridsize(1)):
        for row in range(n):
            if row + fresh < n:
                history[row, k] = history[row + fresh, k]
            else:
                history[row, k] = rows[row + fresh - n, k]


def push_rows(history, rows):
    """Fold rows float32 [T, N] into history [n, N], which keeps the last n of all, oldest first."""
    launch(_push_rows_kernel, history.shape[1], history, rows)


@cuda.jit(device=True)
def _l2_normalise(x, t, at, n, extra, out, scratch):
    squares = np.float32(0)
    for k in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        squares = cuda.fma(x[t, at + k], x[t, at + k], squares)
    scale = np.float32(1) / np.float32(math.sqrt(block_sum(squares, scratch) + np.float32(1e-6))) * extra
    for k in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        out[k] = x[t, at + k] * scale


@cuda.jit
def _delta_net_kernel(mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out):
    """blockIdx (head, 32 columns of its state): token by token, the columns in shared memory, a thread a column.

    Decay first, then the delta update, then the read. Shared: 16 KiB of state, q and k. Twin: delta_net.
    """
    columns = cuda.shared.array(STATE_ROOM, np.float32)
    q = cuda.shared.array(MAX_STATE, np.float32)
    key = cuda.shared.array(MAX_STATE, np.float32)
    scratch = cuda.shared.array(MAX_THREADS, np.float32)
    n_heads, size, head = state.shape[0], state.shape[1], cuda.blockIdx.x
    first = cuda.blockIdx.y * STATE_COLUMNS
    n = min(STATE_COLUMNS, size - first)
    key_head = head % n_key_heads
    if grouped:
        key_head = head // (n_heads // n_key_heads)
    for item in range(cuda.threadIdx.x, size * n, cuda.blockDim.x):
        columns[item // n * STATE_COLUMNS + item % n] = state[head, item // n, first + item % n]
    for t in range(mixed.shape[0]):
        inverse_root = np.float32(1) / np.float32(math.sqrt(np.float32(size)))
        _l2_normalise(mixed, t, key_head * size, size, inverse_root, q, scratch)
        _l2_normalise(mixed, t, (n_key_heads + key_head) * size, size, np.float32(1), key, scratch)
        x = alpha[t, head] + dt_bias[head]
        softplus = x
        if x <= np.float32(20):
            softplus = np.float32(math.log1p(np.float32(math.exp(x))))
        decay, gate = np.float32(math.exp(a[head] * softplus)), sigmoid(beta[t, head])
        cuda.syncthreads()
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            recalled, read = np.float32(0), np.float32(0)
            for i in range(size):
                value = columns[i * STATE_COLUMNS + j] * decay
                columns[i * STATE_COLUMNS + j] = value
                recalled = cuda.fma(value, key[i], recalled)
            delta = gate * (mixed[t, 2 * n_key_heads * size + head * size + first + j] - recalled)
            for i in range(size):
                value = cuda.fma(key[i], delta, columns[i * STATE_COLUMNS + j])
                columns[i * STATE_COLUMNS + j] = value
                read = cuda.fma(value, q[i], read)
            out[t, head, first + j] = read
        cuda.syncthreads()
    for item in range(cuda.threadIdx.x, size * n, cuda.blockDim.x):
        state[head, item // n, first + item % n] = columns[item // n * STATE_COLUMNS + item % n]


def delta_net(mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out):
    """The gated delta rule, token by token; mutates state float32 [Hv, S, S].

    mixed float32 [T, 2 Hk S + Hv S] (q, k, v after the convolution), alpha, beta [T, Hv], a = -e ** A_log and dt_bias
    [Hv], out [T, Hv, S]. Value head v reads key head v // (Hv / Hk) where `grouped`, else v mod Hk.
    """
    n_heads, size = state.shape[0], state.shape[1]
    grid = (n_heads, -(-size // STATE_COLUMNS))
    _delta_net_kernel[grid, min(cudapools.THREADS, STATE_COLUMNS)](
        mixed, alpha, beta, a, dt_bias, n_key_heads, grouped, state, out
    )


@cuda.jit
def _norm_gate_kernel(x, n_heads, weight, eps, z, silu):
    """A block a head of a token. Twin: norm_gate_heads."""
    scratch = cuda.shared.array(MAX_THREADS, np.float32)
    width = x.shape[1]
    for row in range(cuda.blockIdx.x, x.shape[0], cuda.gridDim.x):
        scale = inverse_rms(x, row, width, eps, scratch)
        for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            gate = z[row // n_heads, row % n_heads * width + k]
            factor = sigmoid(gate)
            if silu:
                factor *= gate
            x[row, k] = x[row, k] * scale * weight[0, k] * factor


def norm_gate_heads(x, weight, eps, z, silu):
    """x = rms(x per head) * weight * gate(z), in place; gate is silu or sigmoid; x [T, Hv, S], z [T, Hv * S]."""
    n_tokens, n_heads, width = x.shape
    rows = x.reshape(n_tokens * n_heads, width)
    launch_rows(_norm_gate_kernel, n_tokens * n_heads, rows, n_heads, weight, eps, z, silu)


# --- hyper-connections --------------------------------------------------------------------------------------------


@cuda.jit
def _mix_streams_kernel(gates, normed, out):
    n_tokens, n = out.shape
    n_streams = gates.shape[1] // n
    for item in range(cuda.grid(1), n_tokens * n, cuda.gridsize(1)):
        t, k = item // n, item % n
        total = np.float32(0)
        for c in range(n_streams):
            total = cuda.fma(sigmoid(gates[t, c * n + k]), normed[t, c * n + k], total)
        out[t, k] = total / np.float32(n_streams)


def mix_streams(gates, normed, out):
    """out[t] = mean over streams of sigmoid(gates) * normed; gates, normed float32 [T, C * N], out [T, N]."""
    launch(_mix_streams_kernel, out.size, gates, normed, out)


@cuda.jit
def _inject_streams_kernel(residual, inject, y):
    n_streams, n = residual.shape[1], residual.shape[2]
    for item in range(cuda.grid(1), residual.shape[0] * n_streams * n, cuda.gridsize(1)):
        t, c, k = item // (n_streams * n), item // n % n_streams, item % n
        gate = np.float32(2) * sigmoid(inject[t, c] / np.float32(n_streams))
        residual[t, c, k] = cuda.fma(gate, y[t, k], residual[t, c, k])


def inject_streams(residual, inject, y):
    """residual[t, c] += 2 sigmoid(inject[t, c] / C) * y[t]; residual float32 [T, C, N]."""
    launch(_inject_streams_kernel, residual.size, residual, inject, y)


@cuda.jit
def _repeat_streams_kernel(x, residual):
    n_streams, n = residual.shape[1], residual.shape[2]
    for item in range(cuda.grid(1), residual.shape[0] * n_streams * n, cuda.gridsize(1)):
        residual[item // (n_streams * n), item // n % n_streams, item % n] = x[item // (n_streams * n), item % n]


def repeat_streams(x, residual):
    """residual[t, c] = x[t] for every stream; x float32 [T, N], residual [T, C, N]."""
    launch(_repeat_streams_kernel, residual.size, x, residual)


@cuda.jit
def _add_to_streams_kernel(residual, y):
    n_streams, n = residual.shape[1], residual.shape[2]
    for item in range(cuda.grid(1), residual.shape[0] * n_streams * n, cuda.gridsize(1)):
        t, c, k = item // (n_streams * n), item // n % n_streams, item % n
        row = 0
        if y.shape[0] > 1:
            row = t
        residual[t, c, k] += y[row, k]


def add_to_streams(residual, y):
    """residual[t, c] += y[t] for every stream; y float32 [T, N], or [1, N] for every token the same."""
    launch(_add_to_streams_kernel, residual.size, residual, y)


# --- experts ------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _block_best(value, index, values, indices):
    """The largest value of all threads and its index, the lowest of equals; all threads get both."""
    thread, span = cuda.threadIdx.x, cuda.blockDim.x // 2
    values[thread] = value
    indices[thread] = index
    cuda.syncthreads()
    while span > 0:
        if thread < span:
            other = thread + span
            larger = values[other] > values[thread]
            if larger or (values[other] == values[thread] and indices[other] < indices[thread]):
                values[thread] = values[other]
                indices[thread] = indices[other]
        cuda.syncthreads()
        span //= 2
    best, at = values[0], indices[0]
    cuda.syncthreads()
    return best, at


@cuda.jit(device=True)
def _row_best(x, t, values, indices):
    """Largest element of row t and its lowest index, by the whole block; NaN counts as infinite, less than EMPTY not.

    The index lies in the row whatever its values are, as callers write there.
    """
    best, at = EMPTY, np.int32(0)
    for k in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        value = INFINITE if math.isnan(x[t, k]) else x[t, k]
        if value > best:
            best, at = value, np.int32(k)
    return _block_best(best, at, values, indices)


@cuda.jit
def _route_kernel(logits, weights, experts):
    """A block a token: the softmax's numerators in place, then the largest one as often as experts are used."""
    values = cuda.shared.array(MAX_THREADS, np.float32)
    indices = cuda.shared.array(MAX_THREADS, np.int32)
    for t in range(cuda.blockIdx.x, logits.shape[0], cuda.gridDim.x):
        peak, _ = _row_best(logits, t, values, indices)
        for e in range(cuda.threadIdx.x, logits.shape[1], cuda.blockDim.x):
            logits[t, e] = np.float32(math.exp(logits[t, e] - peak))
        cuda.syncthreads()
        chosen = np.float32(0)
        for rank in range(weights.shape[1]):
            best, expert = _row_best(logits, t, values, indices)
            chosen += best
            if cuda.threadIdx.x == 0:
                weights[t, rank] = best
                experts[t, rank] = expert
                logits[t, expert] = np.float32(-1)
            cuda.syncthreads()
        for rank in range(cuda.threadIdx.x, weights.shape[1], cuda.blockDim.x):
            weights[t, rank] /= chosen
        cuda.syncthreads()


def route(logits, weights, experts):
    """Softmax over all experts, the largest (ties to the lowest index), renormalised.

    logits float32 [T, E], mutated; weights float32 [T, k], experts int32 [T, k], both in falling order of weight.
    """
    launch_rows(_route_kernel, logits.shape[0], logits, weights, experts)


@cuda.jit
def _order_kernel(experts, order, offsets):
    """One block: a thread counts, then places, the assignments of its experts in their order."""
    n_experts, n = offsets.shape[0] - 1, experts.shape[0]
    for e in range(cuda.threadIdx.x, n_experts, cuda.blockDim.x):
        count = 0
        for i in range(n):
            if experts[i] == e:
                count += 1
        offsets[e + 1] = count
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        offsets[0] = 0
        for e in range(n_experts):
            offsets[e + 1] += offsets[e]
    cuda.syncthreads()
    for e in range(cuda.threadIdx.x, n_experts, cuda.blockDim.x):
        place = offsets[e]
        for i in range(n):
            if experts[i] == e:
                order[place] = i
                place += 1


def order_by_expert(experts, n_experts, order, offsets):
    """Stable order of the T * k assignments by expert: order int64 [T * k], offsets int64 [E + 1]."""
    _order_kernel[1, cudapools.THREADS](experts.ravel(), order, offsets)


@cuda.jit
def _gather_assigned_kernel(x, order, n_used, rows):
    width = x.shape[1]
    for item in range(cuda.grid(1), rows.shape[0] * width, cuda.gridsize(1)):
        rows[item // width, item % width] = x[order[item // width] // n_used, item % width]


def gather_assigned(x, order, rows):
    """rows[i] = the token of assignment order[i]; x float32 [T, N], order int64 [T * k], rows [T * k, N]."""
    launch(_gather_assigned_kernel, rows.size, x, order, rows.shape[0] // x.shape[0], rows)


@cuda.jit
def _invert_kernel(order, row_of):
    for row in range(cuda.grid(1), order.shape[0], cuda.gridsize(1)):
        row_of[order[row]] = row


@cuda.jit
def _combine_kernel(y, row_of, weights, out):
    n_used, width = weights.shape[1], out.shape[1]
    for item in range(cuda.grid(1), out.shape[0] * width, cuda.gridsize(1)):
        t, k = item // width, item % width
        total = np.float32(0)
        for rank in range(n_used):
            total = cuda.fma(weights[t, rank], y[row_of[t * n_used + rank], k], total)
        out[t, k] = total


def combine_experts(y, order, weights, out):
    """out[t] = sum over ranks, in their order, of weights[t, rank] * y[row of (t, rank)]."""
    row_of = empty(order.shape[0], np.int64)
    launch(_invert_kernel, order.shape[0], order, row_of)
    launch(_combine_kernel, out.size, y, row_of, weights, out)


# --- n-gram embeddings --------------------------------------------------------------------------------------------
# ngram_rows is kernels_cpu's: the table lies in the file, so its rows are looked up where the ids already are.


@cuda.jit
def _ngram_gate_kernel(key, query, value, n_streams, out):
    """A block a stream of a token; key, query, out [T * C, N], value [T, N]. Twin: ngram_gate."""
    scratch = cuda.shared.array(MAX_THREADS, np.float32)
    width = key.shape[1]
    for row in range(cuda.blockIdx.x, key.shape[0], cuda.gridDim.x):
        dot = np.float32(0)
        for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            dot = cuda.fma(key[row, k], query[row, k], dot)
        s = block_sum(dot, scratch) / np.float32(math.sqrt(np.float32(width)))
        signed = np.float32(math.sqrt(max(np.float32(abs(s)), np.float32(1e-6))))
        if s < np.float32(0):
            signed = -signed
        if s == np.float32(0):
            signed = np.float32(0)
        gate = sigmoid(signed)
        for k in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            out[row, k] = gate * value[row // n_streams, k]


def ngram_gate(key, query, value, out):
    """out[t, c] = g * value[t], g = sigmoid(sign(s) sqrt(max(|s|, 1e-6))), s = key . query / sqrt(N) per stream.

    key, query, out float32 [T, C, N], value [T, N].
    """
    n_tokens, n_streams, width = key.shape
    rows = (part.reshape(n_tokens * n_streams, width) for part in (key, query))
    launch_rows(_ngram_gate_kernel, n_tokens * n_streams, *rows, value, n_streams,
                 out.reshape(n_tokens * n_streams, width))


@cuda.jit
def _ngram_conv_kernel(normed, history, weight, dilation, gated, residual):
    n_tokens, width, n_history, taps = normed.shape[0], normed.shape[1], history.shape[0], weight.shape[0] - 1
    for item in range(cuda.grid(1), n_tokens * width, cuda.gridsize(1)):
        t, k = item // width, item % width
        total = normed[t, k] * weight[taps, k]
        for tap in range(taps):
            source = t - n_history + tap * dilation
            if source >= 0:
                total = cuda.fma(normed[source, k], weight[tap, k], total)
            else:
                total = cuda.fma(history[source + n_history, k], weight[tap, k], total)
        residual[t, k] += gated[t, k] + total * sigmoid(total)


def ngram_conv(normed, history, weight, dilation, gated, residual):
    """residual += gated + silu(conv(normed)): taps at t, t - dilation, ...; the last rows become the history.

    normed, gated, residual float32 [T, C * N]; history [(K - 1) * dilation, C * N], oldest first, mutated; weight
    [K, C * N], the current row's tap last.
    """
    launch(_ngram_conv_kernel, normed.size, normed, history, weight, dilation, gated, residual)
    push_rows(history, normed)


# --- the choice of a token ----------------------------------------------------------------------------------------


@cuda.jit
def _greedy_kernel(logits, ids, shares, with_share):
    """A block a row: the largest logit's lowest index, and where asked for its softmax probability."""
    values = cuda.shared.array(MAX_THREADS, np.float32)
    indices = cuda.shared.array(MAX_THREADS, np.int32)
    for t in range(cuda.blockIdx.x, logits.shape[0], cuda.gridDim.x):
        peak, token = _row_best(logits, t, values, indices)
        found, total = EMPTY < peak < INFINITE, np.float32(0)
        if with_share and found:
            for k in range(cuda.threadIdx.x, logits.shape[1], cuda.blockDim.x):
                total += np.float32(math.exp(logits[t, k] - peak))
            total = block_sum(total, values)
        if cuda.threadIdx.x == 0:
            ids[t] = token if found else -1
            if with_share:
                shares[t] = np.float32(1) / total if found else np.float32(0)


def _choose(logits, with_share):
    n_tokens = logits.shape[0]
    ids, shares = empty(n_tokens, np.int64), empty(n_tokens)
    launch_rows(_greedy_kernel, n_tokens, logits, ids, shares, with_share)
    return ids, shares


def greedy(logits):
    """The index of each row's largest value, the lowest of equals, as NumPy int64 [T]; logits float32 [T, V].

    -1 where the largest value is not finite; NaN counts as the largest.
    """
    return _choose(logits, False)[0].copy_to_host()


def greedy_with_share(logits):
    """`greedy`, and the softmax probability of each choice as NumPy float32 [T], 0 where there is none."""
    ids, shares = _choose(logits, True)
    return ids.copy_to_host(), shares.copy_to_host()


# --- the list -----------------------------------------------------------------------------------------------------


def operations() -> dict:
    """What a `backend.Backend` needs, by name."""
    functions = (
        empty, cudapools.zeros, cudapools.from_host, cudapools.to_host, cudapools.copy, cudapools.assign,
        cudapools.clear, cudapools.cells, cudapools.settle, cudapools.read_bytes, cudapools.write_bytes, append_cells,
        store_heads, cudaproducts.pack, cudaexperts.pack_experts, cudaexperts.place_experts, together,
        cudaproducts.gather_rows, matmul, matmul_each, expert_matmul, expert_matmul_each, swiglu, rms_norm, silu_mul,
        silu_scaled, sigmoid_mul, add_rows, add_scaled_rows, add_bias, split_gate, rope_table, norm_rope_heads,
        hadamard_heads, cudaattention.attention, cudaattention.attention_selected, cudaattention.pool_keys,
        cudaattention.select_blocks, conv_silu, delta_net, norm_gate_heads, mix_streams, inject_streams,
        repeat_streams, add_to_streams, route, order_by_expert, gather_assigned, combine_experts,
        kernels_cpu.ngram_rows, ngram_gate, ngram_conv, push_rows, greedy, greedy_with_share,
    )  # fmt: skip
    return {
        **{function.__name__: function for function in functions},
        "host_copy": cudapools.to_host,
        "max_head": MAX_HEAD,
        "max_state": MAX_STATE,
        "own_memory": True,
        "errors": cudapools.DEVICE_ERRORS,
        "close": lambda: None,
    }
