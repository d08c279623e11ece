"""Model files: what they are read as, and a `ModelError` of one line for every file that cannot be used.

Owns: doctored files and what becomes of them. Refuses to know: forward passes, but for the proof that a file that loads
also runs. Invariant: no other exception leaves `load_model`, and no file makes it allocate much more than it holds.
Read next: test_model.py.
"""

import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quantize

import modelweights
import packs
from cells import EXACT
from given_kernels import CPU
from given_weights import MODELS, fixture, load, loaded_or_refused, run
from modelconfig import read_config
from modelfile import open_gguf
from modelweights import Loader
from reference import ReferenceModel


def refused(path) -> str:
    """The reason why a file is refused, which must be."""
    message = loaded_or_refused(path)
    assert isinstance(message, str), "the file loaded"
    return message.removeprefix(f"{path}: ")


# --- doctored files -----------------------------------------------------------------------------------------------


class Doctored:
    """A file's fields and tensors in memory, to be changed; it stands in for what `open_gguf` returns."""

    def __init__(self, name: str, monkeypatch):
        reader = open_gguf(fixture(name))
        self.path, self.values = f"{name}.gguf", {key: field.contents() for key, field in reader.fields.items()}
        self.tensors_by_name = {tensor.name: tensor for tensor in reader.tensors}
        self.arch = self.values["general.architecture"]
        monkeypatch.setattr(modelweights, "open_gguf", lambda path: self)

    @property
    def fields(self):
        return {key: SimpleNamespace(contents=lambda v=value: v) for key, value in self.values.items()}

    @property
    def tensors(self):
        return list(self.tensors_by_name.values())

    def refused(self, **changes) -> str:
        """The message for the file with other values of keys below its architecture (None: without the key)."""
        kept = dict(self.values)
        for name, value in changes.items():
            key = f"{self.arch}.{name}".replace("__", ".")
            self.values.pop(key, None)
            if value is not None:
                self.values[key] = value
        try:
            return refused(self.path)
        finally:
            self.values = kept


def write(path: Path, name: str, keys=None, tensors=None, **options) -> Path:
    """Write a fixture anew; keys are (value, type, element type), tensors (data, type) or None to leave one out."""
    reader = open_gguf(fixture(name))
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents(), **options)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in (keys or {}):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for key, (value, *types) in (keys or {}).items():
        writer.add_key_value(key, value, types[0], sub_type=types[1] if len(types) > 1 else None)
    kept = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for tensor_name, entry in (kept | (tensors or {})).items():
        if entry is not None:
            data, kind = entry
            writer.add_tensor(tensor_name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def retyped(name: str, kinds: dict[str, str]) -> dict:
    """Matrices of a fixture in other types, by a part of their names."""
    changed = {}
    for tensor in open_gguf(fixture(name)).tensors:
        for part, kind in kinds.items():
            if part in tensor.name and len(tensor.shape) > 1:
                values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
                changed[tensor.name] = quantize(values, GGMLQuantizationType[kind]), GGMLQuantizationType[kind]
    return changed


# --- what a file is read as ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_loads_and_runs(name):
    lines = []
    file = load(fixture(name), lines.append)
    assert file.config.arch == name.split("-")[0]
    assert file.paths == [str(fixture(name))]
    assert len(file.weights.layers) == file.config.n_layers
    assert np.isfinite(run(file, range(9))).all()
    assert lines == []


def test_hyper_parameters_of_a_file_with_every_part():
    c = load(fixture("qwen4exp")).config
    assert c.geometry == (32, 4, 4, 16, 2, 6, 4, 160, 96, 4, 2, 64, 8, 32, 4, 32, 5, 32)
    assert (c.n_draft, c.n_vocab, c.n_ctx, c.n_rot, c.rope_base, c.rope_factor) == (1, 96, 4096, 16, 1e7, 1.0)
    assert c.attention_layers == (False, False, False, True)
    assert (c.idx_top_k, c.n_expert_used, c.n_ff_shared) == (16, 2, 32)
    assert (c.ngrams.layer, c.ngrams.eos, c.ngrams.n_taps, c.ngrams.row_width) == (1, 5, 4, 8)
    shape = c.cache_shape(9, EXACT)
    assert (shape.n_cells, shape.n_attention, shape.n_recurrent, shape.has_draft) == (12, 1, 3, True)
    assert (shape.index_dim, shape.history_bytes) == (32, 4 * 9 * 4 * 32)


def test_hyper_parameters_of_a_plain_file_are_zero_where_a_part_is_absent():
    c = load(fixture("llama")).config
    assert c.geometry == (64, 2, 0, 0, 0, 0, 0, 0, 0, 4, 2, 16, 0, 0, 0, 0, 0, 96)
    assert (c.head_dim, c.n_rot, c.ngrams, c.n_draft, c.streams) == (16, 16, None, 0, 1)
    assert c.attention_layers == (True, True)


def test_layers_may_be_listed_or_follow_an_interval():
    listed, counted = load(fixture("qwen4exp-8layers")).config, load(fixture("qwen35")).config
    assert listed.attention_layers == (False, False, False, True) * 2
    assert counted.attention_layers == (False, False, False, True)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 1.0),
        ({"scaling.type": "linear"}, 1.0),
        ({"scaling.factor": 4.0}, 4.0),
        ({"scale_linear": 2.0}, 2.0),
        ({"scaling.type": "linear", "scaling.factor": 4.0, "scale_linear": 2.0}, 4.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1.0),
    ],
    ids=str,
)
def test_positions_are_scaled_as_llama_cpp_does(keys, factor, monkeypatch):
    file = Doctored("llama", monkeypatch)
    file.values |= {f"llama.rope.{key}": value for key, value in keys.items()}
    assert load(file.path).config.rope_factor == factor


def test_keys_that_a_file_may_leave_out_have_the_defaults_of_llama_cpp(monkeypatch):
    file = Doctored("qwen3next", monkeypatch)
    for name in ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "full_attention_interval"):
        del file.values[f"{file.arch}.{name}"]
    c = read_config(file.path, file.fields, file.tensors_by_name)
    assert (c.n_head_kv, c.rope_base, c.n_rot, c.interval) == (c.n_head, 10000.0, c.head_dim, 4)


def test_tokens_that_end_an_answer_or_start_a_turn():
    file = load(fixture("llama"))
    assert (file.end_ids, file.turn_start_id) == ({0, 2}, 1)
    file = load(fixture("qwen3"))
    assert (file.end_ids, file.turn_start_id) == (frozenset(), None)


def test_a_number_may_stand_as_an_array_of_one_a_layer(monkeypatch):
    file = Doctored("qwen35", monkeypatch)
    expected = run(load(file.path), range(9))
    file.values |= {"qwen35.attention.head_count_kv": [0, 0, 0, 2], "qwen35.feed_forward_length": [96] * 4}
    np.testing.assert_array_equal(run(load(file.path), range(9)), expected)
    assert "head_count_kv differs between layers" in file.refused(attention__head_count_kv=[0, 0, 2, 4])


def test_fused_gate_and_up_projections_are_the_separate_ones(tmp_path):
    tensors = {}
    for layer in range(2):
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        parts = [tensor for tensor in open_gguf(fixture("qwen3moe")).tensors if tensor.name in names]
        fused = np.concatenate([part.data for part in sorted(parts, key=lambda part: part.name)], axis=1)
        tensors |= dict.fromkeys(names) | {f"blk.{layer}.ffn_gate_up_exps.weight": (fused, parts[0].tensor_type)}
    file = load(write(tmp_path / "fused.gguf", "qwen3moe", tensors=tensors))
    np.testing.assert_array_equal(run(file, range(9)), run(load(fixture("qwen3moe")), range(9)))


@pytest.mark.slow
def test_matrices_of_several_types_in_one_file(tmp_path):
    kinds = {
        "token_embd": "Q8_0",
        "attn_q": "Q4_0",
        "attn_k": "BF16",
        "attn_v": "F32",
        "ffn_": "Q4_1",
        "ffn_down": "Q5_1",
        "output": "Q8_0",
        "attn_output": "Q5_0",  # behind "output", which is a part of this name too
    }
    path = write(tmp_path / "mixed.gguf", "qwen3", tensors=retyped("qwen3", kinds))
    lines, ids = [], np.arange(20)
    logits = run(load(path, lines.append), ids)
    assert np.abs(logits - ReferenceModel(path).logits(ids)).max() < 1e-4
    assert lines == []


def test_a_type_without_a_kernel_is_widened_and_said_so(tmp_path):
    path = write(tmp_path / "wide.gguf", "qwen3", tensors=retyped("qwen3", {"ffn_up": "MXFP4", "attn_q": "MXFP4"}))
    lines, ids = [], np.arange(20)
    logits = run(load(path, lines.append), ids)
    assert np.abs(logits - ReferenceModel(path).logits(ids)).max() < 1e-4
    note = "weights of type {} have no kernel here: widened to float32, 0 MiB of RAM"
    assert lines == [note.format("MXFP4")]


def test_the_note_on_widened_types_counts_their_memory():
    rows, lines = 8192, []
    block = quantize(np.ones((1, 128), np.float32), GGMLQuantizationType.MXFP4)
    data = np.tile(block, (rows, 1))
    tensor = SimpleNamespace(shape=[128, rows], data=data, tensor_type=GGMLQuantizationType.MXFP4)
    loader = Loader("x.gguf", {"a": tensor, "b": tensor}, CPU, lines.append, False)
    matrices = [loader.matrix(name, rows, 128) for name in "ab"]
    loader.report()
    assert {matrix.kind for matrix in matrices} == {packs.F32}
    assert lines == ["weights of type MXFP4 have no kernel here: widened to float32, 8 MiB of RAM"]


# --- files in parts -----------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    """A fixture split by the gguf library."""
    write(tmp_path / "split.gguf", "qwen35", split_max_tensors=20)
    return sorted(tmp_path.glob("split-*.gguf"))


def test_a_split_file_is_the_whole_one(parts):
    assert [part.name for part in parts] == [f"split-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    file = load(parts[0])
    assert file.paths == [str(part) for part in parts]
    np.testing.assert_array_equal(run(file, range(9)), run(load(fixture("qwen35")), range(9)))


def test_a_part_that_is_not_the_first_is_refused(parts, tmp_path):
    assert "architecture" in refused(parts[1])
    alone = parts[0].rename(tmp_path / "alone.gguf")
    assert "one of 3 parts; name the first one, which ends in -00001-of-00003.gguf" in refused(alone)


def test_a_part_that_is_missing_cut_or_of_another_model_is_refused(parts, tmp_path):
    whole = parts[2].read_bytes()
    parts[2].write_bytes(whole[:3000])
    assert parts[2].name in refused(parts[0])
    shutil.copy(parts[1], parts[2])
    assert "not those of one model" in refused(parts[0])
    shutil.copy(fixture("qwen35"), parts[2])
    assert "not those of one model" in refused(parts[0])
    parts[2].unlink()
    assert "No such file" in refused(parts[0])
    parts[2].write_bytes(whole)
    load(parts[0])


@pytest.mark.parametrize("count", ["2", 2.5, -1, [2], 1 << 40])
def test_a_count_of_parts_that_is_none_is_refused(count, monkeypatch):
    file = Doctored("llama", monkeypatch)
    file.values["split.count"] = count
    assert "split.count is" in refused(file.path)


def test_a_huge_count_of_parts_stops_at_the_first_missing_one(tmp_path, bounded_memory):
    path = tmp_path / f"many-00001-of-{(1 << 31) - 1}.gguf"
    write(path, "llama", keys={"split.count": ((1 << 31) - 1, GGUFValueType.UINT32)})
    assert "many-00002-of-2147483647.gguf: No such file" in refused(path)


# --- tensors ------------------------------------------------------------------------------------------------------

# Without these a file means something else: the output is the embedding's, the draft block needs no indexer.
OPTIONAL = ("output.weight", "blk.4.indexer.")
# Where a file may hold one thing or another, it is the other that is missed.
ALTERNATIVES = {"ssm_ba": "ssm_alpha", "post_attention_norm": "ffn_norm", "ffn_gate_up_exps": "ffn_gate_exps"}


@pytest.mark.faults
@pytest.mark.parametrize("name", MODELS)
def test_a_missing_tensor_is_named(name, monkeypatch):
    file = Doctored(name, monkeypatch)
    for missing, tensor in list(file.tensors_by_name.items()):
        del file.tensors_by_name[missing]
        if missing.startswith(OPTIONAL):
            load(file.path)
        else:
            part = missing.split(".")[-2]
            assert refused(file.path) == f"tensor {missing.replace(part, ALTERNATIVES.get(part, part))} is missing"
        file.tensors_by_name[missing] = tensor


@pytest.mark.faults
@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_of_another_shape_is_named(name, monkeypatch):
    file = Doctored(name, monkeypatch)
    for changed, tensor in list(file.tensors_by_name.items()):
        if changed.startswith("blk.4.indexer."):
            continue
        for axis in range(len(tensor.shape)):
            shape = tensor.shape.copy()
            shape[axis] += 32
            file.tensors_by_name[changed] = tensor._replace(shape=shape)
            rows_of_embedding = changed == "token_embd.weight" and axis == 1
            more_rows_than_read = changed == "per_layer_token_embd.weight" and axis == 1
            if rows_of_embedding or more_rows_than_read:
                continue
            message = refused(file.path)
            assert f"tensor {changed} has shape" in message
        file.tensors_by_name[changed] = tensor


def test_a_vocabulary_of_two_sizes_is_refused(monkeypatch):
    file = Doctored("qwen4exp", monkeypatch)
    output = file.tensors_by_name["output.weight"]
    file.tensors_by_name["output.weight"] = output._replace(shape=np.array([32, 95], np.uint64))
    assert refused(file.path) == "tensor output.weight has shape (95, 32), expected (96, 32)"
    flat = file.tensors_by_name["token_embd.weight"]._replace(shape=np.array([3072], np.uint64))
    file.tensors_by_name["token_embd.weight"] = flat
    assert "token_embd.weight is no matrix" in refused(file.path)


@pytest.mark.parametrize(
    "tensor", ["blk.0.attn_output.bias", "blk.1.attn_sinks.weight", "blk.2.attn_q.weight", "extra"]
)
def test_a_tensor_that_nothing_would_read_is_refused(tensor, monkeypatch):
    file = Doctored("qwen3", monkeypatch)
    file.tensors_by_name[tensor] = file.tensors_by_name["output_norm.weight"]._replace(name=tensor)
    assert refused(file.path) == f"tensor {tensor} has no meaning in this architecture"
    file.tensors_by_name["other"] = file.tensors_by_name[tensor]._replace(name="other")
    assert "and 1 more has no meaning" in refused(file.path)


def test_the_draft_block_may_hold_more_than_is_used(monkeypatch):
    file = Doctored("qwen4exp", monkeypatch)
    name = "blk.4.nextn.embed_tokens.weight"
    file.tensors_by_name[name] = file.tensors_by_name["token_embd.weight"]._replace(name=name)
    assert load(file.path).weights.draft is not None


@pytest.mark.parametrize(
    ("name", "tensor"), [("qwen3", "blk.1.ffn_up.weight"), ("qwen4exp", "per_layer_token_embd.weight")]
)
@pytest.mark.parametrize("kind", ["I32", "I8", "F64"])
def test_a_type_that_cannot_be_read_is_named(kind, name, tensor, monkeypatch):
    file = Doctored(name, monkeypatch)
    changed = file.tensors_by_name[tensor]._replace(tensor_type=GGMLQuantizationType[kind])
    file.tensors_by_name[tensor] = changed
    assert refused(file.path) == f"tensor {tensor} has type {kind}, which cannot be read"


def test_a_width_that_does_not_fit_its_blocks_is_refused(tmp_path, monkeypatch):
    file = Doctored("qwen3", monkeypatch)
    tensor = file.tensors_by_name["blk.0.ffn_down.weight"]
    file.tensors_by_name["blk.0.ffn_down.weight"] = tensor._replace(
        tensor_type=GGMLQuantizationType.Q4_K, data=np.zeros((64, 54), np.uint8)
    )
    assert refused(file.path) == "tensor blk.0.ffn_down.weight: a width of 96 cannot be packed"


# --- files that are none ------------------------------------------------------------------------------------------


def test_what_is_no_model_file_is_refused(tmp_path):
    (tmp_path / "text").write_text("GGUF is what this is not")
    (tmp_path / "empty").touch()
    assert "not a whole GGUF file" in refused(tmp_path / "text")
    assert "not a whole GGUF file" in refused(tmp_path / "empty")
    assert "No such file" in refused(tmp_path / "absent")
    assert "not a regular file" in refused(tmp_path)
    assert "architecture 'types' is not supported (llama, qwen2, " in refused(fixture("types"))


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole, cut = fixture("qwen3").read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 4000, 199), *range(4000, len(whole) - 64, 20_001), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        assert "not a whole GGUF file" in refused(cut)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["llama", "qwen4exp"])
def test_damage_before_the_weights_is_refused_or_harmless(name, tmp_path, bounded_memory):
    whole, broken, rng = fixture(name).read_bytes(), tmp_path / "broken.gguf", random.Random(name)
    start, outcomes = int(open_gguf(fixture(name)).data_offset), set()
    wide = [b"\xff" * 8, bytes(8), (1 << 31).to_bytes(8, "little"), (1 << 62).to_bytes(8, "little")]
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 2, 4])):
            at = rng.randrange(start)
            patch = rng.choice([bytes([rng.randrange(256)]), *wide])
            damaged[at : at + len(patch)] = patch
        broken.write_bytes(damaged[: len(whole)])
        outcomes.add(isinstance(loaded_or_refused(broken), str))
    assert outcomes == {True, False}


# --- metadata -----------------------------------------------------------------------------------------------------


def test_each_key_that_is_needed_is_named_where_it_is_missing(monkeypatch):
    needed = {
        "block_count", "context_length", "embedding_length", "attention.head_count",
        "attention.layer_norm_rms_epsilon", "expert_used_count", "expert_feed_forward_length", "ssm.conv_kernel",
        "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "attention.indexer.head_count",
        "attention.indexer.key_length", "attention.indexer.top_k", "ple.ngram_size", "ple.heads_per_ngram",
        "ple.conv_kernel", "ple.eos_token_id", "ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes",
        "embedding_length_per_layer_input",
    }  # fmt: skip
    file = Doctored("qwen4exp", monkeypatch)
    for key in needed:
        assert file.refused(**{key: None}) == f"the key qwen4exp.{key} is missing"
    del file.values["general.architecture"]
    assert refused(file.path) == "the key general.architecture is missing"


WRONG = [
    ("block_count", "4", "qwen4exp.block_count is '4', expected int"),
    ("block_count", True, "qwen4exp.block_count is 'True', expected int"),
    ("block_count", 1, "0 layers and 1 draft layers"),
    ("block_count", 1 << 30, "layers, but 145 tensors"),
    ("nextn_predict_layers", 2, "3 layers and 2 draft layers"),
    ("embedding_length", 1 << 31, "is 2147483648, expected 0 to 2147483647"),
    ("embedding_length", 0, "a width of 0"),
    ("attention__head_count", 0, "0 heads"),
    ("attention__head_count_kv", 3, "4 heads over 3 kv heads"),
    ("attention__head_count_kv", 0, "4 heads over 0 kv heads"),
    ("attention__key_length", 24, "a head width of 24; expected a multiple of 16"),
    ("rope__dimension_count", 0, "0 rotated of 64"),
    ("rope__dimension_count", 66, "66 rotated of 64"),
    ("rope__dimension_count", 15, "15 rotated of 64"),
    ("rope__dimension_count", 48, "an indexer of 8 heads, 32 wide"),
    ("rope__freq_base", 0.0, "rope base"),
    ("rope__freq_base", float("nan"), "rope base"),
    ("rope__freq_base", float("inf"), "rope base"),
    ("rope__scaling__type", "yarn", "rope scaling 'yarn' is not supported (none, linear)"),
    ("attention__layer_norm_rms_epsilon", -1.0, "epsilon"),
    ("context_length", 0, "a context of 0"),
    ("full_attention_interval", 0, "full_attention_interval is 0"),
    ("full_attention_interval", 9, "none of 4 layers is an attention layer"),
    ("attention__recurrent_layers", [True], "lists 1 layers, expected 4"),
    ("attention__recurrent_layers", [True] * 4, "none of 4 layers is an attention layer"),
    ("attention__recurrent_layers", [1, 1, 1, 0], "holds '1', expected booleans"),
    ("attention__compress_ratios", [0, 0, 0, 8], "gives attention layers [8], expected 0 or 4"),
    ("attention__compress_ratios", [0], "expected 0 or 4"),
    ("attention__compress_ratios", [0, 0, 0, -4], "holds '-4'"),
    ("attention__compress_ratios", None, "tensor blk.3.indexer."),
    ("attention__indexer__top_k", 0, "for 0 cells"),
    ("attention__indexer__top_k", 18, "18 indexed cells in pages of 4"),
    ("attention__indexer__head_count", 0, "an indexer of 0 heads"),
    ("attention__indexer__key_length", 0, "0 wide"),
    ("expert_used_count", 0, "0 experts used of 5"),
    ("expert_used_count", 6, "6 experts used of 5"),
    ("expert_count", 0, "feed_forward_length is missing"),
    ("expert_feed_forward_length", 0, "a feed-forward width of 0"),
    ("expert_feed_forward_length", 40, "expected multiples of 16"),
    ("hyper_connection__low_rank", 0, "a rank of 0"),
    ("ssm__time_step_rank", 5, "5 value heads over 2 key heads"),
    ("ssm__group_count", 0, "6 value heads over 0 key heads"),
    ("ssm__conv_kernel", 1, "a convolution of 1 taps"),
    ("ple__layers", [4], "n-gram embeddings on layer 4 of 4"),
    ("ple__layers", [1, 2], "names 2 layers, expected one"),
    ("ple__layers", None, "tensor blk.1.ple_"),
    ("ple__ngram_size", 1, "do not fit ple.ngram_size 1 x 2 heads"),
    ("ple__heads_per_ngram", 0, "do not fit ple.ngram_size 3 x 0 heads"),
    ("ple__layer_multipliers", [3, 5], "do not fit"),
    ("ple__layer_multipliers", [3, 5, 1 << 62], "too large for a vocabulary of 96"),
    ("ple__layer_multipliers", [3, 5, 1 << 63], "expected numbers from 0 to 2^63 - 1"),
    ("ple__head_vocab_sizes", [53, 59, 61, 0], "do not fit"),
    ("ple__head_vocab_sizes", [53, 59, 61, 1 << 62], "has shape (240, 8), expected 4611686018427388077 rows or more"),
    ("ple__head_offsets", [0, 53, 112, 174], "has shape (240, 8), expected 241 rows or more"),
    ("ple__head_offsets", [0, 53, 112, -1], "holds '-1'"),
    ("ple__eos_token_id", 96, "n-grams end at token 96 of 96"),
    ("ple__conv_kernel", 1, "fold 1 taps"),
    ("ple__conv_kernel", 5, "tensor blk.1.ple_conv1d.weight has shape (128, 4), expected (128, 5)"),
    ("embedding_length_per_layer_input", 9, "tensor per_layer_token_embd.weight has shape (240, 8), expected (240, 9)"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "message"), WRONG)
def test_a_value_that_cannot_be_is_refused_with_its_reason(key, value, message, monkeypatch):
    assert message in Doctored("qwen4exp", monkeypatch).refused(**{key: value})


def test_part_of_a_group_of_tensors_is_no_group(monkeypatch):
    file = Doctored("qwen2", monkeypatch)
    del file.tensors_by_name["blk.0.attn_q.bias"]
    assert refused(file.path) == "tensor blk.0.attn_q.bias is missing"
    file = Doctored("qwen3", monkeypatch)
    del file.tensors_by_name["blk.1.attn_q_norm.weight"]
    assert refused(file.path) == "tensor blk.1.attn_q_norm.weight is missing"
    file = Doctored("qwen35moe", monkeypatch)
    del file.tensors_by_name["blk.1.ffn_gate_inp_shexp.weight"]
    assert refused(file.path) == "tensor blk.1.ffn_gate_inp_shexp.weight is missing"


@pytest.mark.parametrize("changes", [{"ggml.tokens": 7}, {"ggml.eos_token_id": [1]}, {"ggml.tokens": [[1]]}])
def test_tokenizer_metadata_of_other_types_is_refused(changes, monkeypatch):
    file = Doctored("llama", monkeypatch)
    file.values |= {f"tokenizer.{key}": value for key, value in changes.items()}
    assert "its tokenizer's metadata cannot be used" in refused(file.path)


def test_text_that_is_no_unicode_is_refused(tmp_path):
    broken = tmp_path / "broken.gguf"
    for old, message in ((b"smollm", "cannot be used"), (b"llama", "general.architecture cannot be read")):
        raw = fixture("llama").read_bytes()
        at = raw.index(old, raw.index(b"general.architecture") + 20)
        broken.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
        assert message in refused(broken)


SCALARS = [
    0,
    1,
    2,
    3,
    7,
    -1,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    (1 << 64) - 1,
    1.5,
    0.0,
    -1.0,
    float("nan"),
    float("inf"),
]
OTHERS = [True, False, "", "x", [], [0], [1], [-1], [1, 2, 3], [1 << 63], ["a"], [1.5], [0] * 5, [4] * 5, [True] * 4]
ELEMENTS = [0, 1, -1, 1 << 31, 1 << 62, (1 << 64) - 1, "x", 1.5, True]


def hostile(value):
    """Values to put in a key's place; for an array also its own with one element changed, one more and one less."""
    yield from [*SCALARS, *OTHERS]
    if isinstance(value, list) and 0 < len(value) < 50:
        for element in ELEMENTS:
            yield [element, *value[1:]]
            yield [*value[:-1], element]
        yield [*value, value[0]]
        yield value[:-1]


@pytest.mark.faults
@pytest.mark.parametrize("name", ["llama", "qwen3next", "qwen4exp"])
def test_any_value_of_any_key_is_refused_or_runs(name, monkeypatch, bounded_memory):
    file, n_refused, n_run = Doctored(name, monkeypatch), 0, 0
    for key in [key for key in file.values if not key.startswith("GGUF.")]:
        kept = file.values[key]
        for value in hostile(kept):
            file.values[key] = value
            loaded = loaded_or_refused(file.path)
            if isinstance(loaded, str):
                n_refused += 1
            else:
                run(loaded, range(5, 15))
                n_run += 1
        file.values[key] = kept
    assert min(n_refused, n_run) > 50
