"""Each kernel against its plain float64 form; and that neither tiling nor threads change a bit.

Owns: the evidence for kernels_cpu.py, operation by operation. Refuses to know: layers, files, whole models.
Invariant: a plain form stands beside its test or comes from reference.py, and shares nothing with the kernel. Read
next: test_model.py.
"""

import numpy as np
import pytest

import kernels_cpu as ops
import reference
from given_kernels import normal, rng_for

EPS = np.float32(1e-6)


# --- rows and heads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 20, 35, 128])
@pytest.mark.parametrize("streams", [1, 4])
def test_rms_norm(width, streams, threads):
    rng = rng_for(width, streams)
    x, weight = normal(rng, 3 * streams, width) * 7, normal(rng, streams, width)
    out = np.empty_like(x)
    ops.rms_norm(x, weight, EPS, out)
    expected = reference.rms(x.astype(np.float64), np.tile(weight, (3, 1)), EPS)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    alone = np.empty_like(x[:1])
    ops.rms_norm(x[streams : streams + 1], weight[:1], EPS, alone)
    np.testing.assert_array_equal(alone[0], out[streams])


def test_rms_norm_of_zeros_is_zero():
    out = np.ones((1, 32), np.float32)
    ops.rms_norm(np.zeros((1, 32), np.float32), np.ones((1, 32), np.float32), EPS, out)
    assert not out.any()


def test_gates_of_feed_forward_and_attention(threads):
    gate, up = normal(rng_for("gates"), 2, 3, 48) * 5
    wide, sigmoid = gate.astype(np.float64), reference.sigmoid(gate.astype(np.float64))
    out = np.empty_like(gate)
    ops.silu_mul(gate, up, out)
    np.testing.assert_allclose(out, wide * sigmoid * up, rtol=1e-6)
    in_place = gate.copy()
    ops.silu_mul(in_place, up, in_place)
    np.testing.assert_array_equal(in_place, out)
    gated = up.copy()
    ops.sigmoid_mul(gate, gated)
    np.testing.assert_allclose(gated, up * sigmoid, rtol=1e-6)
    scaled = gate.copy()
    ops.silu_scaled(scaled, np.float32(0.25))
    np.testing.assert_allclose(scaled, reference.silu(wide * 0.25), rtol=1e-6)


def test_rows_are_added_plain_and_gated():
    rng = rng_for("add")
    x, y, scale = normal(rng, 3, 20), normal(rng, 3, 20), normal(rng, 3, 1)
    plain_sum, gated = x.copy(), x.copy()
    ops.add_rows(plain_sum, y)
    np.testing.assert_array_equal(plain_sum, x + y)
    ops.add_scaled_rows(gated, scale, y)
    np.testing.assert_allclose(gated, x + reference.sigmoid(scale.astype(np.float64)) * y, rtol=1e-6, atol=1e-6)


def test_a_bias_is_added_and_a_gate_split_off():
    rng = rng_for("bias")
    x, bias, both = normal(rng, 3, 20), normal(rng, 20), normal(rng, 3, 2, 32)
    biased, q, gate = x.copy(), np.empty((3, 2, 16), np.float32), np.empty((3, 2, 16), np.float32)
    ops.add_bias(biased, bias)
    np.testing.assert_array_equal(biased, x + bias)
    ops.split_gate(both, q, gate)
    np.testing.assert_array_equal(q, both[..., :16])
    np.testing.assert_array_equal(gate, both[..., 16:])


def rope_tables(positions, half: int, base: float):
    cos, sin = np.empty((2, len(positions), half), np.float32)
    ops.rope_table(np.asarray(positions, np.int64), base ** (-np.arange(half) / half), cos, sin)
    return cos, sin


def test_rotary_tables_hold_at_the_end_of_a_long_context():
    positions = np.array([0, 1, 4095, 262_143, (1 << 31) - 1])
    cos, sin = rope_tables(positions, 32, 1e7)
    angle = positions[:, None] * 1e7 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(cos, np.cos(angle), atol=6e-8)
    np.testing.assert_allclose(sin, np.sin(angle), atol=6e-8)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("rotated", [8, 16, 48])
def test_norm_and_rotation_of_heads(paired, rotated):
    rng = rng_for(paired, rotated)
    x, weight, positions = normal(rng, 5, 3, 48), normal(rng, 1, 48), np.array([0, 1, 2, 1000, 262_143])
    half = rotated // 2
    tables = rope_tables(positions, half, 1e6)
    first, second = (
        (np.arange(half) * 2, np.arange(half) * 2 + 1) if paired else (np.arange(half), np.arange(half) + half)
    )
    turn = np.exp(1j * positions[:, None, None] * 1e6 ** (-np.arange(half) / half))
    none = np.empty((0, 48), np.float32)
    for norm in (weight, none):
        out = x.copy()
        ops.norm_rope_heads(out, norm, EPS, *tables, paired)
        expected = reference.rms(x.astype(np.float64), norm[0], EPS) if len(norm) else x.astype(np.float64)
        turned = (expected[..., first] + 1j * expected[..., second]) * turn
        expected[..., first], expected[..., second] = turned.real, turned.imag
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("width", [32, 64, 256])
def test_hadamard_is_orthonormal_and_its_own_inverse(width):
    x = normal(rng_for(width), 3, 2, width)
    once = x.copy()
    ops.hadamard_heads(once)
    np.testing.assert_allclose(once, x.astype(np.float64) @ reference.hadamard(width), rtol=0, atol=2e-6)
    ops.hadamard_heads(once)
    np.testing.assert_allclose(once, x, rtol=0, atol=2e-6)


# --- gated delta net ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [2, 4])
def test_convolution_over_time(taps):
    rng, channels = rng_for("conv", taps), 37
    x, weight, history = normal(rng, 9, channels), normal(rng, taps, channels), normal(rng, taps - 1, channels)
    out, state = np.empty_like(x), history.copy()
    ops.conv_silu(x, state, weight, out)
    padded = np.concatenate([history, x])
    expected = sum(padded[tap : tap + 9].astype(np.float64) * weight[tap] for tap in range(taps))
    np.testing.assert_allclose(out, reference.silu(expected), rtol=0, atol=3e-6)
    np.testing.assert_array_equal(state, padded[9:])
    again, state_again = np.empty_like(x), history.copy()
    for first, last in ((0, 1), (1, 3), (3, 9)):
        ops.conv_silu(x[first:last], state_again, weight, again[first:last])
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(state_again, state)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 6), (3, 3), (1, 4)])
def test_delta_rule(key_heads, value_heads, grouped, threads):
    rng, size, n_tokens = rng_for(key_heads, value_heads), 16, 21
    mixed = normal(rng, n_tokens, (2 * key_heads + value_heads) * size)
    alpha, beta = normal(rng, 2, n_tokens, value_heads) * 4
    alpha[3] = 40  # the linear end of softplus
    a, dt_bias = -np.abs(normal(rng, value_heads)) * 0.3, normal(rng, value_heads)
    state = normal(rng, value_heads, size, size)
    expected_out, expected_state = plain_delta(mixed, alpha, beta, a, dt_bias, key_heads, grouped, state)
    out, start = np.empty((n_tokens, value_heads, size), np.float32), state.copy()
    ops.delta_net(mixed, alpha, beta, a, dt_bias, key_heads, grouped, state, out)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=5e-6)
    np.testing.assert_allclose(state, expected_state, rtol=0, atol=5e-6)
    again = np.empty_like(out)
    for part in (slice(0, 1), slice(1, 8), slice(8, 21)):
        ops.delta_net(mixed[part], alpha[part], beta[part], a, dt_bias, key_heads, grouped, start, again[part])
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(start, state)


def plain_delta(mixed, alpha, beta, a, dt_bias, key_heads, grouped, state):
    """reference.delta_rule from a state that need not be zero."""
    n_tokens, value_heads, size = len(mixed), len(a), state.shape[1]
    parts = mixed.astype(np.float64).reshape(n_tokens, -1, size)
    query, key, value = np.split(parts, [key_heads, 2 * key_heads], axis=1)
    heads = np.arange(value_heads) // (value_heads // key_heads) if grouped else np.arange(value_heads) % key_heads
    query = reference.l2_normalise(query)[:, heads] / np.sqrt(size)
    key = reference.l2_normalise(key)[:, heads]
    decay = np.exp(a * reference.softplus(alpha.astype(np.float64) + dt_bias))
    strength = reference.sigmoid(beta.astype(np.float64))
    state, out = state.astype(np.float64), []
    for t in range(n_tokens):
        state = state * decay[t][:, None, None]
        correction = strength[t][:, None] * (value[t] - (key[t][:, :, None] * state).sum(axis=1))
        state = state + key[t][:, :, None] * correction[:, None, :]
        out.append((query[t][:, :, None] * state).sum(axis=1))
    return np.array(out), state


@pytest.mark.parametrize("silu", [False, True])
def test_norm_and_gate_of_value_heads(silu):
    rng = rng_for("gate", silu)
    x, weight, z = normal(rng, 4, 3, 16), normal(rng, 1, 16), normal(rng, 4, 48) * 3
    out, wide = x.copy(), z.astype(np.float64)
    ops.norm_gate_heads(out, weight, EPS, z, silu)
    gate = reference.silu(wide) if silu else reference.sigmoid(wide)
    expected = reference.rms(x.astype(np.float64), weight[0], EPS) * gate.reshape(x.shape)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-30)


# --- streams and experts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [2, 4])
def test_streams_are_mixed_and_injected(streams):
    rng = rng_for("streams", streams)
    gates, normed = normal(rng, 2, 3, streams * 20) * 3
    out = np.empty((3, 20), np.float32)
    ops.mix_streams(gates, normed, out)
    expected = (reference.sigmoid(gates.astype(np.float64)) * normed).reshape(3, streams, 20).mean(axis=1)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
    residual, inject, y = normal(rng, 3, streams, 20), normal(rng, 3, streams), normal(rng, 3, 20)
    written = residual.copy()
    ops.inject_streams(written, inject, y)
    weight = 2 * reference.sigmoid(inject.astype(np.float64) / streams)
    np.testing.assert_allclose(written, residual + weight[:, :, None] * y[:, None], rtol=0, atol=1e-6)


def test_streams_start_equal_and_take_a_vector_each():
    rng = rng_for("repeat")
    x, residual = normal(rng, 3, 20), np.empty((3, 4, 20), np.float32)
    ops.repeat_streams(x, residual)
    np.testing.assert_array_equal(residual, np.repeat(x[:, None], 4, axis=1))
    for y in (normal(rng, 3, 20), normal(rng, 1, 20)):
        added = residual.copy()
        ops.add_to_streams(added, y)
        np.testing.assert_array_equal(added, residual + y[:, None])


def test_the_largest_logit_is_chosen_and_its_share_known():
    logits = np.array([[1, 3, 3, -2], [-5, -6, -7, -5], [0, 100, 0, 0]], np.float32)
    assert ops.greedy(logits).tolist() == [1, 0, 1]
    ids, share = ops.greedy_with_share(logits)
    assert ids.tolist() == [1, 0, 1]
    expected = reference.softmax(logits.astype(np.float64))[range(3), ids]
    np.testing.assert_allclose(share, expected, rtol=1e-6)


def routed(logits, used):
    weights, experts = np.empty((len(logits), used), np.float32), np.empty((len(logits), used), np.int32)
    ops.route(logits.copy(), weights, experts)
    return weights, experts


@pytest.mark.parametrize(("n_experts", "used"), [(5, 2), (8, 8), (64, 10), (1, 1)])
def test_routing(n_experts, used):
    logits = normal(rng_for("route", n_experts), 9, n_experts) * 4
    weights, experts = routed(logits, used)
    probability = reference.softmax(logits.astype(np.float64))
    order = np.argsort(-probability, axis=1, kind="stable")[:, :used]
    np.testing.assert_array_equal(experts, order)
    share = np.take_along_axis(probability, order, axis=1)
    np.testing.assert_allclose(weights, share / share.sum(axis=1, keepdims=True), rtol=2e-6)


def test_equal_experts_are_taken_from_the_lowest():
    weights, experts = routed(np.array([[1, 3, 3, 1, 3], [0, 0, 0, 0, 0]], np.float32), 4)
    assert experts.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert weights[1].tolist() == [0.25] * 4
    weights, experts = routed(np.array([[-200, 200, -200]], np.float32), 3)
    assert (weights.tolist(), experts.tolist()) == ([[1, 0, 0]], [[1, 0, 2]])


def test_assignments_are_ordered_by_expert_and_come_back_in_their_order():
    rng = rng_for("order")
    experts = np.array([rng.permutation(6)[:3] for _ in range(11)], np.int32)
    experts[experts == 4] = 5  # an expert that nobody takes
    order, offsets = np.empty(33, np.int64), np.empty(7, np.int64)
    ops.order_by_expert(experts, 6, order, offsets)
    np.testing.assert_array_equal(order, np.argsort(experts.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(np.diff(offsets), np.bincount(experts.reshape(-1), minlength=6))
    y, weights = normal(rng, 33, 10), np.abs(normal(rng, 11, 3))
    x, rows = normal(rng, 11, 10), np.empty((33, 10), np.float32)
    ops.gather_assigned(x, order, rows)
    np.testing.assert_array_equal(rows, np.repeat(x, 3, axis=0)[order])
    out = np.full((11, 10), np.nan, np.float32)
    ops.combine_experts(y[order], order, weights, out)
    expected = (y.reshape(11, 3, 10).astype(np.float64) * weights[:, :, None]).sum(axis=1)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)


# --- n-gram embeddings --------------------------------------------------------------------------------------------

EOS = 5
MULTIPLIERS = np.array([64343153921368269, 59473814669861233, 55314113489879299, 31415926535897931], np.int64)
SIZES = np.array([53, 59, 61, 67, 71, 73], np.int64)
OFFSETS = np.array([0, 53, 112, 173, 240, 311], np.int64)


def table_rows(ids, previous, order):
    heads = 2 * (order - 1)
    rows = np.empty((len(ids), heads), np.int64)
    ops.ngram_rows(
        np.array(ids, np.int32),
        np.array(previous, np.int64),
        EOS,
        MULTIPLIERS[:order],
        SIZES[:heads],
        OFFSETS[:heads],
        rows,
    )
    return rows.tolist()


def plain_rows(ids, order):
    """In Python's exact integers, from the context that reference.py states."""
    for position in range(len(ids)):
        context, row = reference.ngram_context(ids, position, order, EOS), []
        for n in range(2, order + 1):
            mixed = 0
            for token, multiplier in zip(context[:n], MULTIPLIERS[:n].tolist(), strict=True):
                mixed ^= token * multiplier
            row += [mixed % int(SIZES[h]) + int(OFFSETS[h]) for h in (2 * n - 4, 2 * n - 3)]
        yield row


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("eos_at", [None, 0, 1, 2, 3, 4, 5])
def test_rows_of_the_n_gram_table_with_an_end_of_text_at_each_distance(order, eos_at):
    ids = rng_for("ngram", order).integers(6, 96, 6).tolist()
    if eos_at is not None:
        ids[eos_at] = EOS
    expected = list(plain_rows(ids, order))
    assert table_rows(ids, [-1] * (order - 1), order) == expected
    for cut in range(1, 6):
        previous = (ids[:cut][::-1] + [-1] * order)[: order - 1]
        assert table_rows(ids[cut:], previous, order) == expected[cut:]


def test_n_gram_gate():
    rng = rng_for("ngram gate")
    key, query = normal(rng, 2, 4, 3, 32)
    query[0, 0] = 0  # a score of exactly 0 gives a gate of 1/2
    query[1] *= 1e-9  # |score| below the 1e-6 under the root
    value = normal(rng, 4, 32)
    out = np.empty_like(key)
    ops.ngram_gate(key, query, value, out)
    score = (key.astype(np.float64) * query).sum(axis=-1) / np.sqrt(32)
    gate = reference.sigmoid(np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6)))
    assert gate[0, 0] == 0.5
    np.testing.assert_allclose(out, gate[:, :, None] * value[:, None], rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(("taps", "dilation"), [(4, 3), (2, 1)])
def test_n_gram_convolution(taps, dilation):
    rng, channels, before = rng_for("ngram conv", taps), 24, (taps - 1) * dilation
    normed, gated, residual = normal(rng, 3, 14, channels)
    weight, history = normal(rng, taps, channels), normal(rng, before, channels)
    padded = np.concatenate([history, normed])
    convolved = sum(
        padded[tap * dilation : tap * dilation + 14].astype(np.float64) * weight[tap] for tap in range(taps)
    )
    written, state = residual.copy(), history.copy()
    ops.ngram_conv(normed, state, weight, dilation, gated, written)
    np.testing.assert_allclose(written, residual + gated + reference.silu(convolved), rtol=0, atol=4e-6)
    np.testing.assert_array_equal(state, padded[14:])
    again, state_again = residual.copy(), history.copy()
    for part in (slice(0, 2), slice(2, 3), slice(3, 14)):
        ops.ngram_conv(normed[part], state_again, weight, dilation, gated[part], again[part])
    np.testing.assert_array_equal(again, written)
    np.testing.assert_array_equal(state_again, state)
