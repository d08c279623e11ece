"""Weights and hyper-parameters of the trainer as a GGUF file, and back.

Owns key names, tensor types and the one conversion between a file and train_model.py (`ssm_a`). Knows nothing of
training. Invariant: what is read back differs from what was written by the rounding of Q8_0 only. Next: train_model.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Ggml
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from train_model import Config, Weights

ARCH = "qwen4exp"
KEEP_F32 = ("ffn_gate_inp", "ssm_a", "ssm_beta", "conv1d")  # rounding would flip experts and drift the decay

SCALAR_KEYS = {
    "context_length": "n_ctx", "embedding_length": "n_embd", "vocab_size": "n_vocab", "attention.head_count": "n_head",
    "attention.head_count_kv": "n_head_kv", "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "rope.dimension_count": "n_rot", "expert_count": "n_expert", "expert_used_count": "n_expert_used",
    "expert_feed_forward_length": "n_ff", "expert_shared_feed_forward_length": "n_ff_shared",
    "ssm.conv_kernel": "gdn_conv", "ssm.state_size": "gdn_state", "ssm.group_count": "gdn_k_heads",
    "ssm.time_step_rank": "gdn_v_heads", "ssm.inner_size": "value_dim", "full_attention_interval": "interval",
    "hyper_connection.count": "hc", "hyper_connection.low_rank": "hc_rank", "attention.indexer.head_count": "idx_heads",
    "attention.indexer.key_length": "idx_dim", "attention.indexer.top_k": "top_k", "ple.ngram_size": "ple_ngram",
    "ple.heads_per_ngram": "ple_heads", "ple.conv_kernel": "ple_conv", "ple.eos_token_id": "ple_eos",
    "embedding_length_per_layer_input": "ple_row",
}  # fmt: skip
ULONG_ARRAYS = {
    "ple.layer_multipliers": "ple_multipliers", "ple.head_offsets": "ple_offsets", "ple.head_vocab_sizes": "ple_sizes",
}  # fmt: skip


def write_gguf(path: Path, cfg: Config, weights: Weights, tokenizer_keys: dict, about: dict[str, str]) -> int:
    """Writes the file beside `path` and renames it there; returns its size in bytes."""
    temporary = path.with_name(path.name + ".part")
    writer = GGUFWriter(str(temporary), ARCH)
    for key, text in about.items():
        writer.add_string(f"general.{key}", text)
    _add_config(writer, cfg)
    for key, value in tokenizer_keys.items():
        _add_tokenizer_key(writer, f"tokenizer.{key}", value)
    for name, tensor in weights.items():
        _add_tensor(writer, name, tensor.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, path)
    return path.stat().st_size


def _add_config(writer: GGUFWriter, cfg: Config) -> None:
    layers = cfg.n_trunk + cfg.n_draft
    writer.add_uint32(f"{ARCH}.block_count", layers)
    writer.add_uint32(f"{ARCH}.nextn_predict_layers", cfg.n_draft)
    for key, name in SCALAR_KEYS.items():
        writer.add_uint32(f"{ARCH}.{key}", getattr(cfg, name))
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", cfg.eps)
    writer.add_float32(f"{ARCH}.rope.freq_base", cfg.rope_base)
    ratios = [cfg.idx_block if cfg.is_attention(i) else 0 for i in range(layers)]
    for key, values in (
        ("rope.dimension_sections", cfg.rope_sections),
        ("attention.compress_ratios", ratios),
        ("ple.layers", [cfg.ple_layer]),
    ):
        writer.add_key_value(f"{ARCH}.{key}", list(values), GGUFValueType.ARRAY, sub_type=GGUFValueType.INT32)
    for key, name in ULONG_ARRAYS.items():
        values = list(getattr(cfg, name))
        writer.add_key_value(f"{ARCH}.{key}", values, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64)


def _add_tokenizer_key(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        sub_type = GGUFValueType.INT32 if isinstance(value[0], int) else GGUFValueType.STRING
        writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=sub_type)


def _add_tensor(writer: GGUFWriter, name: str, values: np.ndarray) -> None:
    if name.endswith("ssm_a"):
        values = -np.exp(values)
    quantize = values.ndim >= 2 and values.shape[-1] % 32 == 0
    if quantize and not any(part in name for part in KEEP_F32):
        writer.add_tensor(name, gguf.quants.quantize(values, Ggml.Q8_0), raw_dtype=Ggml.Q8_0)
    else:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))


def read_keys(path: Path) -> dict:
    return {name.removeprefix(f"{ARCH}."): field.contents() for name, field in GGUFReader(str(path)).fields.items()}


def read_gguf(path: Path) -> tuple[Config, Weights]:
    keys = read_keys(path)
    fields = {name: keys[key] for key, name in SCALAR_KEYS.items() if name != "value_dim"}
    fields |= {name: tuple(keys[key]) for key, name in ULONG_ARRAYS.items()}
    n_draft = keys.get("nextn_predict_layers", 0)
    cfg = Config(
        **fields, n_trunk=keys["block_count"] - n_draft, n_draft=n_draft, ple_layer=keys["ple.layers"][0],
        eps=keys["attention.layer_norm_rms_epsilon"], rope_base=keys["rope.freq_base"],
        idx_block=max(keys["attention.compress_ratios"]), rope_sections=tuple(keys["rope.dimension_sections"]),
    )  # fmt: skip
    weights = {}
    for tensor in GGUFReader(str(path)).tensors:
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        weights[tensor.name] = torch.log(-values) if tensor.name.endswith("ssm_a") else values
    return cfg, weights
