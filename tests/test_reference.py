"""The float64 reference against logits of transformers, and its parts against their definitions.

Owns: the evidence that tests/reference.py may serve as an oracle. Refuses to know: the engine. Invariant: what is
expected here comes from another implementation, or from a formula written differently. Read next:
tools/make_model_fixtures.py, which made the data.
"""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

import reference
from reference import ReferenceModel, ReferenceModelError

DATA = Path(__file__).parent / "data" / "model"
MODELS = sorted(path.stem for path in DATA.glob("*.npz"))
HYBRID = ["qwen35", "qwen35moe", "qwen3next", "qwen4exp", "qwen4exp-8layers"]
# transformers computes in float32; where recurrent outputs are small before their norm its rounding shows most.
TOLERANCE = 5e-5
EOS = 5


def load(name: str, **options):
    """Model, ids and expected logits of one fixture."""
    data = np.load(DATA / f"{name}.npz")
    return ReferenceModel(DATA / f"{name}.gguf", **options), data["ids"], data["logits"]


@pytest.fixture(scope="module")
def exp():
    """The small qwen4exp model, its ids, and one run over them."""
    model, ids, _ = load("qwen4exp")
    return model, ids, model.run(ids)


# ---- against transformers


def test_there_is_a_fixture_of_every_architecture():
    found = {ReferenceModel(DATA / f"{name}.gguf").arch for name in MODELS}
    assert found == reference.ARCHITECTURES


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name):
    model, ids, expected = load(name)
    logits = model.logits(ids)
    assert logits.dtype == np.float64
    assert np.abs(logits - expected).max() < TOLERANCE
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_gives_the_same_logits(name):
    model, ids, _ = load(name)
    np.testing.assert_allclose(model.logits(ids[:37]), model.logits(ids)[:37], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_matrices_have_whole_blocks_of_32_inputs(name):
    model, *_ = load(name)
    kernels = ("ssm_conv1d", "ple_conv1d", "per_layer_token_embd")
    widths = {t.name: t.data.shape[-1] for t in model.tensors.values() if t.data.ndim > 1}
    assert not {n: width for n, width in widths.items() if width % 32 and not any(k in n for k in kernels)}


@pytest.mark.parametrize("name", MODELS)
def test_fixture_can_be_made_again(name, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs the `fixtures` extra")
    monkeypatch.syspath_prepend(DATA.parents[2] / "tools")
    import make_model_fixtures

    make_model_fixtures.make(name, tmp_path)
    assert (tmp_path / f"{name}.gguf").read_bytes() == (DATA / f"{name}.gguf").read_bytes()
    made, kept = np.load(tmp_path / f"{name}.npz"), np.load(DATA / f"{name}.npz")
    np.testing.assert_array_equal(made["ids"], kept["ids"])
    np.testing.assert_allclose(made["logits"], kept["logits"], rtol=0, atol=TOLERANCE)


# ---- value heads and rotary pairs: what a wrong reading would give


@pytest.mark.parametrize("name", ["qwen3next", "qwen4exp"])
def test_the_order_of_value_heads_matters(name, monkeypatch):
    model, ids, expected = load(name)
    swapped = {"qwen3next": "qwen35moe", "qwen4exp": "qwen3next"}[name]
    of_layer = ReferenceModel._gated_delta_net

    def with_the_other_order(self, *args):
        arch, self.arch = self.arch, swapped
        self.meta |= {key.replace(arch, swapped, 1): value for key, value in self.meta.items() if key.startswith(arch)}
        try:
            return of_layer(self, *args)
        finally:
            self.arch = arch

    monkeypatch.setattr(ReferenceModel, "_gated_delta_net", with_the_other_order)
    assert np.abs(model.logits(ids) - expected).max() > 0.1


# ---- the recurrent state


def test_delta_rule_equals_its_product_form():
    rng = np.random.default_rng(1)
    n_tokens, width = 9, 5
    query, key, value = rng.standard_normal((3, n_tokens, 1, width))
    beta, decay = rng.uniform(0, 1, (2, n_tokens, 1))
    state = np.zeros((width, width))
    for t in range(n_tokens):
        k = key[t, 0]
        keep = decay[t, 0] * (np.eye(width) - beta[t, 0] * np.outer(k, k))
        state = keep @ state + beta[t, 0] * np.outer(k, value[t, 0])
    out, final = reference.delta_rule(query, key, value, beta, decay)
    np.testing.assert_allclose(final[0], state, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(out[-1, 0], state.T @ query[-1, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", HYBRID)
def test_state_shapes_follow_the_metadata(name):
    model, ids, _ = load(name)
    run = model.run(ids)
    recurrent = [layer for layer in range(model.n_layers) if not model.is_attention[layer]]
    attention = [layer for layer in range(model.n_layers) if model.is_attention[layer]]
    width, k_heads = model.key("ssm.state_size"), model.key("ssm.group_count")
    v_heads = model.key("ssm.time_step_rank")
    assert len(attention) == model.n_layers // 4
    assert sorted(run.gdn) == sorted(run.conv) == recurrent
    assert sorted(run.keys) == sorted(run.values) == attention
    assert {state.shape for state in run.gdn.values()} == {(v_heads, width, width)}
    assert {rows.shape for rows in run.conv.values()} == {(3, (2 * k_heads + v_heads) * width)}
    assert {keys.shape for keys in run.keys.values()} == {(len(ids), model.n_head_kv, model.head_dim)}


def test_convolution_rows_move_up_with_each_token(exp):
    model, ids, run = exp
    before = model.run(ids[:-1])
    for layer in run.conv:
        np.testing.assert_allclose(run.conv[layer][:-1], before.conv[layer][1:], atol=1e-11)
    np.testing.assert_allclose(run.ple_history[:-1], before.ple_history[1:], atol=1e-11)
    assert run.ple_history.shape == (9, model.streams * model.n_embd)


def test_convolution_rows_before_the_first_token_are_zero(exp):
    model, ids, _ = exp
    run = model.run(ids[:2])
    for rows in [*run.conv.values(), run.ple_history[6:]]:
        assert not rows[0].any()
        assert np.abs(rows[1:]).max(axis=1).min() > 0


# ---- the indexer


@pytest.mark.parametrize(
    ("scores", "budget", "chosen"),
    [
        ([], 2, []),
        ([3.0], 2, [0]),
        ([0.0, 0.0, 0.0, 0.0], 2, [0, 1]),
        ([0.0, 1.0, 0.0, 2.0, 0.0], 3, [0, 1, 3]),
        ([1.0, 2.0, 1.0, 2.0, 1.0], 3, [0, 1, 3]),
        ([5.0, 4.0, 3.0], 2, [0, 1]),
        ([3.0, 4.0, 5.0], 2, [1, 2]),
    ],
)
def test_best_blocks_and_ties_go_to_the_lowest(scores, budget, chosen):
    assert reference.top_blocks(np.array(scores), budget).tolist() == chosen


def test_selection_keeps_the_budget_and_the_best(exp):
    model, ids, run = exp
    budget = model.key("attention.indexer.top_k") // 4
    (layer,) = run.selected
    assert len(run.selected[layer]) == len(ids) > 4 * budget + 3
    for token, (scores, chosen) in enumerate(zip(run.scores[layer], run.selected[layer], strict=True)):
        assert len(scores) == (token + 1) // 4
        assert len(chosen) == min(budget, len(scores))
        left_out = np.delete(scores, chosen)
        assert not len(left_out) or scores[chosen].min() > left_out.max()


def test_pooled_keys_follow_from_raw_keys(exp):
    model, _, run = exp
    (layer,) = run.pooled
    raw, pooled = run.raw_keys[layer], run.pooled[layer]
    weight = model.weight(f"blk.{layer}.indexer.k_norm.weight")
    for block in (0, 1, 7):
        mean = (raw[4 * block] + raw[4 * block + 1] + raw[4 * block + 2] + raw[4 * block + 3]) / 4
        normed = mean * weight / np.sqrt(np.mean(mean**2) + model.eps)
        half = model.n_rot // 2
        turned = (normed[:half] + 1j * normed[half : 2 * half]) * np.exp(
            1j * 4 * block / model.rope_base ** (np.arange(half) * 2 / model.n_rot)
        )
        np.testing.assert_allclose(pooled[block], [*turned.real, *turned.imag, *normed[2 * half :]], atol=1e-12)


def tied_selections(run):
    """(layer, token, scores, chosen) wherever a score taken equals one left out."""
    for layer, per_token in run.scores.items():
        for token, scores in enumerate(per_token):
            chosen = run.selected[layer][token]
            left_out = np.delete(np.arange(len(scores)), chosen)
            if len(left_out) and scores[chosen].min() == scores[left_out].max():
                yield layer, token, scores, chosen


def test_real_ties_at_zero_take_the_lowest_blocks():
    model, ids, _ = load("qwen4exp-8layers")
    ties = list(tied_selections(model.run(ids)))
    assert ties
    for _, _, scores, chosen in ties:
        zeros = np.flatnonzero(scores == 0)
        taken = np.intersect1d(zeros, chosen)
        assert scores[chosen].min() == 0
        assert taken.tolist() == zeros[: len(taken)].tolist()


def test_ties_taken_from_the_other_end_show_in_the_logits(monkeypatch):
    model, ids, expected = load("qwen4exp-8layers")
    monkeypatch.setattr(
        reference,
        "top_blocks",
        lambda scores, budget: np.sort(len(scores) - 1 - np.argsort(-scores[::-1], kind="stable")[:budget]),
    )
    assert np.abs(model.logits(ids) - expected).max() > 100 * TOLERANCE


def test_all_is_selected_while_the_budget_lasts(exp):
    model, ids, run = exp
    n_dense = model.key("attention.indexer.top_k") + 3
    blocks = model.block_sizes
    model.block_sizes = [0] * len(blocks)
    try:
        dense = model.logits(ids)
    finally:
        model.block_sizes = blocks
    np.testing.assert_allclose(dense[:n_dense], run.logits[:n_dense], atol=1e-12)
    assert np.abs(dense[n_dense:] - run.logits[n_dense:]).max() > 0.01


# ---- the n-gram embedding


@pytest.mark.parametrize(
    ("ids", "context"),
    [
        ([11], [11, EOS, EOS]),
        ([11, 12], [12, 11, EOS]),
        ([11, 12, 13], [13, 12, 11]),
        ([11, 12, EOS], [EOS, 12, 11]),
        ([11, EOS, 13], [13, EOS, EOS]),
        ([EOS, 12, 13], [13, 12, EOS]),
        ([11, EOS, EOS], [EOS, EOS, EOS]),
    ],
)
def test_an_end_of_text_hides_what_lies_before_it(ids, context):
    assert reference.ngram_context(ids, len(ids) - 1, 3, EOS) == context


def test_a_longer_context_stays_hidden_behind_an_end_of_text():
    assert reference.ngram_context([9, 8, EOS, 7, 6], 4, 5, EOS) == [6, 7, EOS, EOS, EOS]


def test_rows_equal_the_hash_in_64_bit_arithmetic(exp):
    model, ids, run = exp
    multipliers = np.array(model.key("ple.layer_multipliers"), np.int64)
    sizes = np.array(model.key("ple.head_vocab_sizes"), np.int64)
    offsets = np.array(model.key("ple.head_offsets"), np.int64)
    assert EOS in ids
    for t in range(2, len(ids)):
        newest, middle, oldest = (np.int64(ids[t - back]) for back in range(3))
        if middle == EOS:
            oldest = np.int64(EOS)
        two = newest * multipliers[0] ^ middle * multipliers[1]
        three = two ^ oldest * multipliers[2]
        mixed = np.array([two, two, three, three])
        np.testing.assert_array_equal(run.ple_rows[t], mixed % sizes + offsets)


# ---- rounding of K and V


def test_int8_by_hand():
    x = np.zeros((1, 1, 64))
    x[0, 0, :4] = [127.0, -0.6, 1.5, -126.5]
    assert reference.round_kv(x, "int8")[0, 0, :4].tolist() == [127, -1, 2, -126]


def test_q4_0_equals_the_library_on_unrotated_values():
    rng = np.random.default_rng(2)
    blocks = (rng.standard_normal((200, 32)) * rng.uniform(0.01, 10, (200, 1))).astype(np.float32)
    expected = dequantize(quantize(blocks, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(reference.round_q4_0(blocks), expected)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_rotation_is_orthonormal_and_its_own_inverse(width):
    rotation = reference.hadamard(width)
    np.testing.assert_allclose(rotation @ rotation, np.eye(width), atol=1e-12)
    assert (np.sign(rotation[1]) == np.tile([1, -1], width // 2)).all()


@pytest.mark.parametrize("kind", ["fp16", "int8", "q4_0"])
def test_zero_stays_zero(kind):
    assert not reference.round_kv(np.zeros((2, 1, 64)), kind).any()


@pytest.mark.parametrize(("kind", "bound"), [("fp16", 5e-4), ("int8", 4.1e-3), ("q4_0", 0.13)])
def test_rounding_error_is_what_the_format_allows(kind, bound):
    x = np.random.default_rng(3).standard_normal((50, 2, 64))
    seen = x if kind != "q4_0" else x @ reference.hadamard(64)
    rounded = reference.round_kv(x, kind)
    rounded = rounded if kind != "q4_0" else rounded @ reference.hadamard(64)
    error = np.abs(rounded - seen).max(axis=-1) / np.abs(seen).max(axis=-1)
    assert 0 < error.max() < bound


def test_coarser_formats_move_the_logits_further():
    exact, ids, _ = load("qwen35")
    logits = exact.logits(ids)
    moved = {kv: np.sqrt(np.mean((load("qwen35", kv=kv)[0].logits(ids) - logits) ** 2)) for kv in reference.KV_FORMATS}
    assert 0 < moved["fp16"] < moved["int8"] < moved["k8v4"] < moved["q4_0"]


def test_k8v4_takes_keys_of_int8_and_values_of_q4_0():
    _, ids, _ = load("qwen35")
    runs = {kv: load("qwen35", kv=kv)[0].run(ids) for kv in ("int8", "q4_0", "k8v4")}
    np.testing.assert_array_equal(runs["k8v4"].keys[3], runs["int8"].keys[3])
    np.testing.assert_array_equal(runs["k8v4"].values[3], runs["q4_0"].values[3])


# ---- the draft layer


def test_draft_cells_see_only_what_lies_before_them(exp):
    model, ids, run = exp
    whole = model.draft(run.residual[:-1], ids[1:])
    part = model.draft(run.residual[:30], ids[1:31])
    assert whole.logits.shape == (len(ids) - 1, model.n_vocab)
    np.testing.assert_allclose(whole.logits[:30], part.logits, atol=1e-12)
    np.testing.assert_allclose(whole.residual[:30], part.residual, atol=1e-12)
    assert list(whole.keys) == [model.n_layers]


def test_draft_norm_spans_all_streams(exp):
    model, ids, run = exp
    residual = run.residual[:-1]
    drafted = model.draft(residual, ids[1:]).logits
    np.testing.assert_allclose(model.draft(1000 * residual, ids[1:]).logits, drafted, atol=1e-4)
    one_louder = residual * np.array([1000, 1, 1, 1])[:, None]
    assert np.abs(model.draft(one_louder, ids[1:]).logits - drafted).max() > 0.1


def test_draft_window_hides_older_cells(exp):
    model, ids, run = exp
    first = model.draft(run.residual[:20], ids[1:21], window=8).logits
    other_past = np.concatenate([run.residual[20:30], run.residual[10:20]])
    other_ids = np.concatenate([ids[21:31], ids[11:21]])
    second = model.draft(other_past, other_ids, window=8).logits
    np.testing.assert_allclose(first[17:], second[17:], atol=1e-12)
    assert np.abs(first[10:17] - second[10:17]).max() > 1e-3


def test_draft_keys_stay_int8_beside_k8v4():
    model, ids, _ = load("qwen4exp", kv="k8v4")
    int8, *_ = load("qwen4exp", kv="int8")
    residual = int8.run(ids).residual[:-1]
    ours, theirs = model.draft(residual, ids[1:]), int8.draft(residual, ids[1:])
    np.testing.assert_array_equal(ours.values[4], theirs.values[4])


# ---- the other data


def test_types_file_holds_every_type_with_finite_values():
    tensors = GGUFReader(DATA / "types.gguf").tensors
    legacy = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
    super_blocks = ["Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL"]
    assert [tensor.tensor_type.name for tensor in tensors] == legacy + super_blocks
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        assert values.shape == (8, 512)
        assert np.isfinite(values).all()
        assert 0.1 < np.abs(values).max() < 1000


def test_tokenizer_of_the_llama_file_is_complete():
    model, ids, _ = load("llama")
    tokens, merges = model.meta["tokenizer.ggml.tokens"], model.meta["tokenizer.ggml.merges"]
    assert len(tokens) == model.n_vocab == len(set(tokens)) == len(model.meta["tokenizer.ggml.token_type"])
    assert sum(len(token) == 1 for token in tokens) == 256
    for merge in merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= set(tokens)
    assert ids.max() < model.n_vocab


# ---- refusals


@pytest.mark.parametrize("ids", [[], [-1], [96]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    model, *_ = load("qwen3")
    with pytest.raises(ReferenceModelError, match="from 0 to 95"):
        model.logits(ids)


def test_what_it_does_not_compute_is_refused():
    with pytest.raises(ReferenceModelError, match="'types' is none of"):
        ReferenceModel(DATA / "types.gguf")
    with pytest.raises(ReferenceModelError, match="'q8' is none of fp16, int8"):
        load("qwen3", kv="q8")
    model, ids, _ = load("qwen3", kv="int8")
    with pytest.raises(ReferenceModelError, match="groups of 64"):
        model.logits(ids)
    with pytest.raises(ReferenceModelError, match="no draft layer"):
        model.draft(np.zeros((1, 1, 64)), [1])
