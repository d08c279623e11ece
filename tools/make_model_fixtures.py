"""Makes tests/data/model again: tiny GGUF files with random weights, and the logits that transformers gives for them.

Owns: which fixtures there are, their seeds, and the way from Hugging Face weights to the layout and names of a GGUF
file. Refuses to know: the engine. Invariant: the same weights, bit for bit, go to transformers (float32, eager) and
into the file. Norms, convolutions and biases get values away from their neutral ones, or a slip there would not show.
Read next: tests/reference.py, which has to agree before a fixture's logits are written.

Run with the `fixtures` extra installed: python tools/make_model_fixtures.py [name ...]
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "data" / "model"
sys.path.insert(0, str(ROOT / "tests"))

from reference import ReferenceModel  # noqa: E402

EOS = 5
ZERO_CENTRED_NORMS = {"qwen3next", "qwen35", "qwen35moe", "qwen4exp"}
TILED_VALUE_HEADS = {"qwen35", "qwen35moe", "qwen4exp"}
# Below this distance float32 rounding could change which block or expert is taken, and the logits would prove nothing.
MIN_MARGIN = 1e-4
MAX_LOGIT_ERROR = 5e-5


class Fixture(NamedTuple):
    """One file: the GGUF architecture, the transformers configuration, and what the file holds beyond the trunk."""

    arch: str
    config: dict
    seed: int
    n_tokens: int = 48
    draft_layer: bool = False
    tokenizer: bool = False
    fused_experts: bool = False  # gate and up in one tensor
    recurrent_layers: bool = False  # the layer kinds as a list of flags, not as an interval


def rope(factor: float, base: float, sections: list[int] | None = None) -> dict:
    """Rotary parameters as transformers wants them."""
    parameters = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": factor}
    if sections:
        parameters |= {"mrope_section": sections, "mrope_interleaved": True}
    return {"rope_parameters": parameters}


SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
DENSE = SMALL | {"num_hidden_layers": 2, "intermediate_size": 96}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32}
PATTERN = ["linear_attention"] * 3 + ["full_attention"]
HYBRID = SMALL | {
    "num_hidden_layers": 4,
    "layer_types": PATTERN,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
}
INTERLEAVED_ROPE = rope(0.5, 1e7, [3, 3, 2])
HYPER = {"hc_count": 4, "hc_lowrank": 32, "output_gate_type": "sigmoid"}
INDEXER = {"indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_compress_ratio": 4}
PLE = {
    "ple_layer_ids": [2],
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 53,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "eos_token_id": EOS,
}
EXP = HYBRID | SHARED_EXPERT | HYPER | INDEXER | PLE | {"hidden_size": 32, "linear_num_value_heads": 6}

FIXTURES = {
    "llama": Fixture("llama", DENSE | rope(1.0, 1e5) | {"tie_word_embeddings": True}, seed=11, tokenizer=True),
    "qwen2": Fixture("qwen2", DENSE | rope(1.0, 1e6) | {"tie_word_embeddings": True}, seed=12),
    "qwen3": Fixture("qwen3", DENSE | rope(1.0, 1e6) | {"head_dim": 32}, seed=13),
    "qwen3moe": Fixture(
        "qwen3moe", SMALL | EXPERTS | rope(1.0, 1e6) | {"num_hidden_layers": 2, "head_dim": 32}, seed=14
    ),
    "qwen3next": Fixture(
        "qwen3next",
        HYBRID | SHARED_EXPERT | rope(0.5, 1e7) | {"hidden_size": 32, "head_dim": 32, "linear_num_value_heads": 6},
        seed=15,
    ),
    "qwen35": Fixture(
        "qwen35",
        HYBRID | rope(0.25, 1e7, [3, 3, 2]) | {"intermediate_size": 96, "head_dim": 64, "linear_num_value_heads": 4},
        seed=16,
        n_tokens=80,
    ),
    "qwen35moe": Fixture(
        "qwen35moe", HYBRID | SHARED_EXPERT | INTERLEAVED_ROPE | {"head_dim": 32, "linear_num_value_heads": 4}, seed=17
    ),
    "qwen4exp": Fixture(
        "qwen4exp",
        EXP | rope(0.25, 1e7, [3, 3, 2]) | {"head_dim": 64, "indexer_n_heads": 8, "indexer_budget": 16},
        seed=106,
        n_tokens=80,
        draft_layer=True,
    ),
    # Two indexer heads: blocks whose score is exactly zero are common, so the selection often ends in a tie.
    "qwen4exp-8layers": Fixture(
        "qwen4exp",
        EXP
        | INTERLEAVED_ROPE
        | {"num_hidden_layers": 8, "layer_types": PATTERN * 2, "hc_count": 2, "num_experts": 4, "head_dim": 32}
        | {"indexer_n_heads": 2, "indexer_budget": 12},
        seed=100,
        n_tokens=80,
        fused_experts=True,
        recurrent_layers=True,
    ),
}


def main(names: list[str]) -> int:
    """Make the fixtures named, or all of them."""
    unknown = set(names) - {*FIXTURES, "types"}
    if unknown:
        print(f"no fixture is called {', '.join(sorted(unknown))}; there are {', '.join([*FIXTURES, 'types'])}")
        return 2
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in names or [*FIXTURES, "types"]:
        make(name, TARGET)
    return 0


def make(name: str, folder: Path):
    """Write one file and, once the reference agrees, its ids and logits."""
    if name == "types":
        write_types(folder / "types.gguf")
        return
    fixture = FIXTURES[name]
    rng = np.random.default_rng(fixture.seed)
    vocabulary = byte_level_vocabulary() if fixture.tokenizer else None
    if vocabulary:
        fixture = fixture._replace(config=fixture.config | {"vocab_size": len(vocabulary[0])})
    model = hugging_face_model(fixture)
    weights = random_weights(model, fixture.arch, rng)
    ids = rng.integers(6, fixture.config["vocab_size"], fixture.n_tokens)
    if "ple_layer_ids" in fixture.config:
        ids[[9, 10, 30, 33, 47]] = EOS
    logits = hugging_face_logits(model, weights, ids)
    path = folder / f"{name}.gguf"
    tensors = gguf_tensors(fixture, weights)
    if fixture.draft_layer:
        tensors |= draft_tensors(fixture, tensors, rng)
    write_gguf(path, fixture.arch, metadata(fixture, model), tensors, vocabulary)
    run = ReferenceModel(path).run(ids)
    error, margin, ties = np.abs(run.logits - logits).max(), *smallest_margin(run)
    print(f"{name}: {path.stat().st_size} bytes, largest logit {np.abs(logits).max():.2f},", end=" ")
    print(f"largest difference {error:.1e}, smallest margin {margin:.1e}, tied selections {ties}")
    if error > MAX_LOGIT_ERROR or margin < MIN_MARGIN:
        raise SystemExit(f"{name}: take another seed, or find the fault")
    np.savez_compressed(folder / f"{name}.npz", ids=ids.astype(np.int32), logits=logits)


def smallest_margin(run) -> tuple[float, int]:
    """The closest call among selections of blocks and experts, and how many block selections ended in an exact tie."""
    margins, ties = [np.inf], 0
    for layer, all_scores in run.scores.items():
        for scores, chosen in zip(all_scores, run.selected[layer], strict=True):
            left_out = np.delete(scores, chosen)
            if not len(left_out):
                continue
            tied = scores[chosen].min() == left_out.max() == 0
            ties += tied
            distinct = np.unique(scores[chosen]).min() - left_out.max()
            margins.append(scores[scores > 0].min(initial=np.inf) if tied else distinct)
    for layer, chosen in run.experts.items():
        ranked = -np.sort(-run.router[layer], axis=1)
        used = chosen.shape[1]
        margins.append((ranked[:, used - 1] - ranked[:, used]).min())
    return min(margins), int(ties)


# ---- transformers


def hugging_face_model(fixture: Fixture):
    """The model class of transformers for this architecture, on float32 and the plain attention."""
    import transformers
    from transformers.models import qwen3_5, qwen3_5_moe, qwen4_exp

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "qwen3next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
        "qwen35": (qwen3_5.Qwen3_5TextConfig, qwen3_5.Qwen3_5ForCausalLM),
        "qwen35moe": (qwen3_5_moe.Qwen3_5MoeTextConfig, qwen3_5_moe.Qwen3_5MoeForCausalLM),
        "qwen4exp": (qwen4_exp.Qwen4ExpTextConfig, qwen4_exp.Qwen4ExpForCausalLM),
    }
    config_class, model_class = classes[fixture.arch]
    return model_class(config_class(**fixture.config, attn_implementation="eager")).eval()


def random_weights(model, arch: str, rng) -> dict[str, np.ndarray]:
    """A value for every parameter; those of matrices are ones that float16 holds exactly, as they are stored so."""
    weights = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        weight = random_values(name, shape, arch, model.config.tie_word_embeddings, rng).astype(np.float32)
        weights[name] = weight.astype(np.float16).astype(np.float32) if is_half(weight) else weight
    return weights


def random_values(name: str, shape: tuple, arch: str, tied: bool, rng) -> np.ndarray:
    """Values that keep activations near one and every part of the model at work."""
    normal = rng.standard_normal(shape)
    if "norm" in name:
        plain = arch not in ZERO_CENTRED_NORMS or "linear_attn.norm" in name
        return 0.3 * normal + (1 if plain else 0)
    if name.endswith("A_log"):
        return rng.uniform(-3, 1, shape)
    if "conv1d" in name or name.endswith("bias"):
        return 0.5 * normal
    if "embed" in name:
        return normal * (0.25 if tied else 1)
    return 1.2 * normal / np.sqrt(shape[-1])


def is_half(weight: np.ndarray) -> bool:
    """Matrices are stored as float16; vectors and convolution kernels (channels, 1, 4) as float32."""
    return weight.ndim >= 2 and weight.shape[-1] >= 16


def hugging_face_logits(model, weights, ids) -> np.ndarray:
    """Logits (T, V); equal scores are taken in order of their index, which torch leaves open."""
    import torch

    def stable_top_k(scores, k, dim=-1, **_):
        values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    state = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    model.load_state_dict(state, strict=False)
    of_tensor, of_module = torch.Tensor.topk, torch.topk
    torch.Tensor.topk = torch.topk = stable_top_k
    try:
        with torch.no_grad():
            return model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    finally:
        torch.Tensor.topk, torch.topk = of_tensor, of_module


# ---- the file


def write_gguf(path: Path, arch: str, keys: dict, tensors: dict, vocabulary):
    """A model file; `vocabulary` is tokens and merges, or None for a file without a tokenizer."""
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        put(writer, f"{arch}.{key}", value)
    if vocabulary:
        write_tokenizer(writer, *vocabulary)
    else:
        writer.add_tokenizer_model("none")
    for name, tensor in tensors.items():
        stored = tensor.astype(np.float16) if is_half(tensor) else tensor.astype(np.float32)
        writer.add_tensor(name, np.ascontiguousarray(stored))
    finish(writer)


def finish(writer: GGUFWriter):
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put(writer: GGUFWriter, key: str, value):
    """Add one metadata value with the type that llama.cpp gives it."""
    if isinstance(value, np.ndarray):
        numbers = [int(number) for number in value]
        writer.add_key_value(key, numbers, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64)
    elif isinstance(value, list):
        kind = GGUFValueType.BOOL if isinstance(value[0], bool) else GGUFValueType.INT32
        writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=kind)
    else:
        kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
        writer.add_key_value(key, value, kind)


def metadata(fixture: Fixture, model) -> dict:
    """Metadata of the architecture, without its prefix."""
    config, rotary = fixture.config, fixture.config["rope_parameters"]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    keys = {
        "block_count": config["num_hidden_layers"] + fixture.draft_layer,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rotary["rope_theta"],
    }
    if "head_dim" in config:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        keys["rope.dimension_count"] = int(head_dim * rotary["partial_rotary_factor"])
    if "mrope_section" in rotary:
        keys["rope.dimension_sections"] = [*rotary["mrope_section"], 0]
    if "intermediate_size" in config:
        keys["feed_forward_length"] = config["intermediate_size"]
    return keys | expert_metadata(config) | hybrid_metadata(fixture) | exp_metadata(fixture, model)


def expert_metadata(config: dict) -> dict:
    """What a mixture of experts adds."""
    if "num_experts" not in config:
        return {}
    keys = {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    if "shared_expert_intermediate_size" in config:
        keys["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return keys


def hybrid_metadata(fixture: Fixture) -> dict:
    """What recurrent layers add."""
    config = fixture.config
    if "layer_types" not in config:
        return {}
    keys = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
    }
    if fixture.recurrent_layers:
        keys["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config["layer_types"]]
    else:
        keys["full_attention_interval"] = len(PATTERN)
    return keys


def exp_metadata(fixture: Fixture, model) -> dict:
    """What hyper-connections, the indexer, the n-gram embedding and the draft layer add."""
    config = fixture.config
    if fixture.arch != "qwen4exp":
        return {}
    kinds = config["layer_types"] + ["full_attention"] * fixture.draft_layer
    embedding = model.model.layers[config["ple_layer_ids"][0] - 1].ple.ple_embedding
    keys = {
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
        "attention.compress_ratios": [0 if kind == "linear_attention" else 4 for kind in kinds],
        "ple.layers": [layer - 1 for layer in config["ple_layer_ids"]],
        "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"],
        "ple.layer_multipliers": embedding.layer_multipliers.numpy().ravel(),
        "ple.head_offsets": embedding.ngram_heads_offsets.numpy().ravel(),
        "ple.head_vocab_sizes": embedding.ngram_heads_vocab_sizes.numpy().ravel(),
        "embedding_length_per_layer_input": config["hidden_size"] // (2 * config["heads_per_ngram"]),
    }
    return keys | ({"nextn_predict_layers": 1} if fixture.draft_layer else {})


GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.hyper_connection_mixer.hc_norm.weight": "output_hc_norm.weight",
    "model.hyper_connection_mixer.input_mix_weight_down.weight": "output_hc_down.weight",
    "model.hyper_connection_mixer.input_mix_weight_up.weight": "output_hc_up.weight",
}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query",
    "ple.norm_conv": "ple_norm_conv",
    "ple.conv1d": "ple_conv1d",
    "attn_hyper_connection.hc_norm": "hc_attn_norm",
    "attn_hyper_connection.input_mix_weight_down": "hc_attn_down",
    "attn_hyper_connection.input_mix_weight_up": "hc_attn_up",
    "attn_hyper_connection.block_inject_weight": "hc_attn_inject",
    "mlp_hyper_connection.hc_norm": "hc_ffn_norm",
    "mlp_hyper_connection.input_mix_weight_down": "hc_ffn_down",
    "mlp_hyper_connection.input_mix_weight_up": "hc_ffn_up",
    "mlp_hyper_connection.block_inject_weight": "hc_ffn_inject",
}


def gguf_tensors(fixture: Fixture, weights) -> dict[str, np.ndarray]:
    """All tensors of the trunk, named and laid out as in a GGUF file."""
    tensors = {}
    for name, weight in weights.items():
        zero_centred = fixture.arch in ZERO_CENTRED_NORMS and "norm" in name and "linear_attn.norm" not in name
        stored = np.float32(1) + weight if zero_centred else weight
        if name in GLOBAL_NAMES:
            tensors[GLOBAL_NAMES[name]] = stored
            continue
        _, _, layer, part = name.split(".", 3)
        for suffix, tensor in block_tensors(fixture, part, stored):
            prefix = "" if suffix == "per_layer_token_embd.weight" else f"blk.{layer}."
            tensors[prefix + suffix] = tensor
    return tensors


def block_tensors(fixture: Fixture, part: str, weight):
    """The tensors, one or more, that one parameter of a layer becomes."""
    config = fixture.config
    name, _, kind = part.rpartition(".")
    if part == "mlp.experts.gate_up_proj":
        gate, up = np.split(weight, 2, axis=1)
        if fixture.fused_experts:
            return [("ffn_gate_up_exps.weight", weight)]
        return [("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up)]
    if part == "mlp.experts.down_proj":
        return [("ffn_down_exps.weight", weight)]
    if part == "linear_attn.in_proj_qkvz.weight":
        qkv, z = ungroup_qkvz(weight, config)
        return [("attn_qkv.weight", qkv), ("attn_gate.weight", z)]
    if name == "self_attn.indexer.index_qk_proj":
        n_query = config["indexer_n_heads"] * config["indexer_head_dim"]
        return [("indexer.q_proj.weight", weight[:n_query]), ("indexer.k_proj.weight", weight[n_query:])]
    if name == "ple.ple_embedding.ngram_embedding":
        return [("per_layer_token_embd.weight", weight)]
    if part == "post_attention_layernorm.weight":
        return [("post_attention_norm.weight" if "layer_types" in config else "ffn_norm.weight", weight)]
    if part.startswith("linear_attn.") and fixture.arch in TILED_VALUE_HEADS:
        weight = tile_value_heads(part, weight, config)
    if part == "linear_attn.A_log":
        return [("ssm_a", -np.exp(weight))]
    if part == "linear_attn.dt_bias":
        return [("ssm_dt.bias", weight)]
    if fixture.arch == "llama" and name in ("self_attn.q_proj", "self_attn.k_proj"):
        weight = pair_neighbours(weight, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    if name.endswith("conv1d") or name == "mlp.shared_expert_gate":
        weight = weight.squeeze()
    return [(f"{BLOCK_NAMES[name]}.{kind}", weight)]


def pair_neighbours(weight, n_heads: int):
    """Rows so ordered that rotary pairs (i, i + half) become (2i, 2i + 1)."""
    return weight.reshape(n_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def ungroup_qkvz(weight, config: dict):
    """From rows grouped by key head (q, k, its v's, its z's) to all q, all k, all v; and all z."""
    k_heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // k_heads * config["linear_value_head_dim"]
    grouped = weight.reshape(k_heads, -1, weight.shape[1])
    parts = np.split(grouped, np.cumsum([width, width, values]), axis=1)
    query, key, value, z = (part.reshape(-1, weight.shape[1]) for part in parts)
    return np.concatenate([query, key, value]), z


def tile_value_heads(part: str, weight, config: dict):
    """Value heads from v // (Hv / Hk) = key head to v % Hk = key head, on whichever axis holds them."""
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first_value = 2 * k_heads * config["linear_key_head_dim"]

    def tile(rows):
        return rows.reshape(k_heads, v_heads // k_heads, -1).swapaxes(0, 1).reshape(rows.shape)

    if part.startswith(("linear_attn.in_proj_qkv", "linear_attn.conv1d")):
        return np.concatenate([weight[:first_value], tile(weight[first_value:])])
    if part.startswith("linear_attn.out_proj"):
        return tile(np.ascontiguousarray(weight.T)).T
    return weight if part.startswith("linear_attn.norm") else tile(weight)


def draft_tensors(fixture: Fixture, tensors, rng) -> dict[str, np.ndarray]:
    """A draft block: the last layer's shapes with values of its own, and what joins it to the trunk."""
    config = fixture.config
    last, block = f"blk.{config['num_hidden_layers'] - 1}.", f"blk.{config['num_hidden_layers']}."
    n_embd, streams, rank = config["hidden_size"], config["hc_count"], config["hc_lowrank"]
    shapes = {block + name[len(last) :]: tensor.shape for name, tensor in tensors.items() if name.startswith(last)}
    shapes |= {
        block + "nextn.eh_proj.weight": (n_embd, 2 * n_embd),
        block + "nextn.enorm.weight": (n_embd,),
        block + "nextn.hnorm.weight": (streams * n_embd,),
        block + "nextn.hc_head_norm.weight": (streams * n_embd,),
        block + "nextn.hc_head_down.weight": (rank, streams * n_embd),
        block + "nextn.hc_head_up.weight": (streams * n_embd, rank),
    }
    return {
        name: rng.standard_normal(shape) * (0.3 if "norm" in name else 1.2 / np.sqrt(shape[-1])) + ("norm" in name)
        for name, shape in shapes.items()
    }


# ---- a tokenizer


MERGES = ["Ġ t", "h e", "i n", "e r", "o n", "Ġt he", "in g", "Ġ a", "a n", "r e", "Ġ w", "o r", "Ġ s", "o u"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: the special ones first, every byte, then what the merges make."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    made = [merge.replace(" ", "") for merge in MERGES]
    return SPECIAL + [letters[byte] for byte in range(256)] + made, MERGES


def write_tokenizer(writer: GGUFWriter, tokens: list[str], merges: list[str]):
    """Byte-level BPE with the special tokens of ChatML."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


# ---- one matrix of every storage type


QUANTISED_BY_LIBRARY = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
# Where the float16 scales lie in a block; all other bytes may be anything.
RANDOM_BLOCKS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,)}


def write_types(path: Path):
    """A GGUF with one random matrix (8, 512) of every type that kernels may read without the library."""
    rng = np.random.default_rng(20)
    writer = GGUFWriter(path, "types")
    for name in QUANTISED_BY_LIBRARY:
        kind = GGMLQuantizationType[name]
        values = rng.standard_normal((8, 512)).astype(np.float32)
        writer.add_tensor(name.lower(), quantize(values, kind), raw_dtype=kind)
    for name, scale_offsets in RANDOM_BLOCKS.items():
        kind = GGMLQuantizationType[name]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (8, 512 // block_size, block_bytes), dtype=np.uint8)
        for offset in scale_offsets:
            scales = (0.05 * rng.standard_normal(blocks.shape[:2])).astype(np.float16)
            blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
        writer.add_tensor(name.lower(), blocks.reshape(8, -1), raw_dtype=kind)
    finish(writer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
