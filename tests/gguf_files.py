"""Writes GGUF files of the golden checkpoints as llama.cpp's converter does, with the writer of the
package `gguf`.

The names of tensors are those that the package maps transformers' names to, so neither names nor
orders here come from `peagle_jax.checkpoint`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type

from peagle_jax.checkpoint.safetensors import Checkpoint

GOLDEN = Path(__file__).parent / "golden"
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe-bf16": "qwen3moe",
    "gpt_oss-bf16": "gpt-oss",
    "gpt_oss-mxfp4": "gpt-oss",
    "gemma4": "gemma4",
}
"""Of each golden checkpoint that GGUF can hold."""
TYPES = {
    np.dtype(np.float32): Type.F32,
    np.dtype(np.float16): Type.F16,
    np.dtype(ml_dtypes.bfloat16): Type.BF16,
}
Tensors = dict[str, np.ndarray]
Meta = Callable[[gguf.GGUFWriter], None]


def write_golden(
    name: str,
    path: Path,
    *,
    matrices: Type | None = None,
    change: Callable[[Tensors], None] = lambda tensors: None,
    meta: Meta = lambda writer: None,
    split: int = 0,
    vocab_size: int | None = None,
) -> None:
    """Writes the golden checkpoint `name`.

    Args:
      matrices: their type, by default that of the checkpoint; vectors, biases and routers are
        float32.
      change: edits the tensors, float32 by their GGUF names; packed MXFP4 is uint8.
      meta: adds further metadata.
      vocab_size: rows of the embedding and of lm_head, zeros after those of the checkpoint.
      split: the most tensors of a part; 0 is one file.
    """
    architecture = ARCHITECTURES[name]
    config = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    tensors = gguf_tensors(name, config)
    (embedding,) = (key for key in Checkpoint(GOLDEN / name).names() if "embed_tokens" in key)
    if matrices is None:
        matrices = TYPES[Checkpoint(GOLDEN / name).info(embedding).dtype]
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
        for key in tensors.keys() & {"token_embd.weight", "output.weight"}:
            rows = tensors[key]
            tensors[key] = np.pad(rows, ((0, vocab_size - len(rows)), (0, 0)))
    change(tensors)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    add_sizes(writer, config)
    meta(writer)
    for key, array in tensors.items():
        if array.dtype == np.uint8:
            writer.add_tensor(key, array, raw_dtype=Type.MXFP4)
        elif array.ndim == 1 or key.endswith("bias") or "ffn_gate_inp" in key:
            writer.add_tensor(key, array)
        elif matrices in (Type.F32, Type.F16):
            writer.add_tensor(key, array.astype(np.float32 if matrices == Type.F32 else np.float16))
        else:
            writer.add_tensor(key, gguf.quants.quantize(array, matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(name: str, config: dict) -> Tensors:
    checkpoint = Checkpoint(GOLDEN / name)
    source = {key: checkpoint.read(key) for key in checkpoint.names() if is_text(key)}
    source = {
        key.replace("model.language_model.", "model."): numbers(array)
        for key, array in source.items()
    }
    architecture = ARCHITECTURES[name]
    kind = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    if architecture == "gpt-oss":
        source = gpt_oss_split(source)
    if architecture == "qwen3moe":
        source = experts_stacked(source, config)
    found = {}
    for key, array in source.items():
        if architecture == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = "num_attention_heads" if "q_proj" in key else "num_key_value_heads"
            array = permuted(array, config[heads])
        if key.endswith((".sinks", ".layer_scalar")):
            key += ".weight"
        found[names.get_name(key, try_suffixes=(".weight", ".bias"))] = array
    return found | rope_factors(architecture, config)


def is_text(key: str) -> bool:
    return not any(part in key for part in ("vision", "audio"))


def numbers(array: np.ndarray) -> np.ndarray:
    return array if array.dtype == np.uint8 else array.astype(np.float32)


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of halves as llama.cpp stores them: neighbours are pairs."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def experts_stacked(source: Tensors, config: dict) -> Tensors:
    found = {key: array for key, array in source.items() if ".experts." not in key}
    for i in range(config["num_hidden_layers"]):
        for part in ("gate", "up", "down"):
            base = f"model.layers.{i}.mlp.experts"
            each = [
                source[f"{base}.{e}.{part}_proj.weight"] for e in range(config["num_local_experts"])
            ]
            found[f"{base}.{part}_proj.weight"] = np.stack(each)
    return found


def gpt_oss_split(source: Tensors) -> Tensors:
    """Experts under the names that the map knows, with gate and up apart."""
    found = {}
    for key, array in source.items():
        base, _, part = key.rpartition(".experts.")
        if not base:
            found[key] = array
            continue
        if part.endswith("_blocks"):
            scales = source[key.replace("_blocks", "_scales")]
            array = mxfp4_blocks(array, scales)
        elif part.endswith("_scales"):
            continue
        elif not part.endswith("_bias"):
            array = array.swapaxes(1, 2)  # in-by-out
        end = "bias" if part.endswith("_bias") else "weight"
        if part.startswith("gate_up"):
            found[f"{base}.experts.gate_proj.{end}"] = np.ascontiguousarray(array[:, ::2])
            found[f"{base}.experts.up_proj.{end}"] = np.ascontiguousarray(array[:, 1::2])
        else:
            found[f"{base}.experts.down_proj.{end}"] = np.ascontiguousarray(array)
    return found


def mxfp4_blocks(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of 17 bytes [E, R, 17 C / 32], as ggml's struct defines them."""
    numbers = np.zeros((*scales.shape, 32), np.uint8)
    for i in range(32):
        numbers[..., i] = values[..., i // 2] >> (4 * (i % 2)) & 15
    blocks = np.zeros((*scales.shape, 17), np.uint8)
    blocks[..., 0] = scales
    for i in range(16):
        blocks[..., 1 + i] = numbers[..., i] | numbers[..., i + 16] << 4
    return blocks.reshape(*scales.shape[:2], -1)


def rope_factors(architecture: str, config: dict) -> Tensors:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        factors = []
        for i in range(0, config["head_dim"], 2):
            wavelength = 2 * np.pi * rope["rope_theta"] ** (i / config["head_dim"])
            periods = rope["original_max_position_embeddings"] / wavelength
            smooth = (periods - 1) / 3
            mixed = 1 / ((1 - smooth) / rope["factor"] + smooth)
            factors.append(1 if periods > 4 else rope["factor"] if periods < 1 else mixed)
        return {"rope_freqs.weight": np.array(factors, np.float32)}
    if architecture == "gemma4":
        half = config["global_head_dim"] // 2
        rotated = int(half * rope["full_attention"]["partial_rotary_factor"])
        values = [1.0] * rotated + [1e30] * (half - rotated)
        return {"rope_freqs.weight": np.array(values, np.float32)}
    return {}


def add_sizes(writer: gguf.GGUFWriter, config: dict) -> None:
    """The metadata that llama.cpp's converter writes for the family."""
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
    writer.add_eos_token_id(config["eos_token_id"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if config["model_type"] == "gemma4_text":
        add_gemma4(writer, config)
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        writer.add_expert_feed_forward_length(width)
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])


def add_gemma4(writer: gguf.GGUFWriter, config: dict) -> None:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    few, many = config["num_global_key_value_heads"], config["num_key_value_heads"]
    wide, narrow = config["global_head_dim"], config["head_dim"]
    writer.add_head_count_kv([many if sliding else few for sliding in slides])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(narrow)
    writer.add_value_length_swa(narrow)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(narrow)
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
