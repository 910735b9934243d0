"""Metadata of a GGUF file -> `config.json` and `generation_config.json`.

Tables map llama.cpp's keys to transformers'. A key of the architecture that no table has is
refused, because it may change what the model computes.
"""

import math

import numpy as np

from peagle_jax.checkpoint.fields import Fields
from peagle_jax.checkpoint.gguf_file import GgufFile
from peagle_jax.checkpoint.rope_json import FULL, SLIDING
from peagle_jax.checkpoint.target_writer import ARCHITECTURES

_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_KEYS = {
    "llama": ("llama", _COMMON),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", _COMMON),
    "qwen3moe": (
        "qwen3_moe",
        _COMMON | _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"},
    ),
    "gpt-oss": (
        "gpt_oss",
        _COMMON | _EXPERTS | _WINDOW | {"expert_feed_forward_length": "intermediate_size"},
    ),
    "gemma4": (
        "gemma4_text",
        _COMMON
        | _WINDOW
        | {
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
}
"""By architecture: transformers' `model_type`, and its name of each key."""

_READ_BELOW = {
    "vocab_size",
    "tensor_data_layout",
    "attention.value_length",
    "attention.value_length_swa",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|call|>",
)
"""Spellings of control tokens that end a turn; the metadata names one id only."""
CONTROL = 3
"""The type of control tokens in `tokenizer.ggml.token_type`."""


def model_config(file: GgufFile) -> dict:
    """`config.json` of the model.

    Raises:
      CheckpointError: an architecture or a key that is not supported, or a value that is missing.
    """
    fields = Fields(file.metadata, str(file.path))
    architecture = fields.text("general.architecture")
    if architecture not in _KEYS:
        raise file.error(f"architecture {architecture!r} is not supported; {', '.join(_KEYS)} are")
    kind, names = _KEYS[architecture]
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for key, value in own.items():
        if key not in names and key not in _READ_BELOW and value:
            raise file.error(f"{architecture}.{key} {value!r} is not supported")
    config = {"architectures": [ARCHITECTURES[kind.removesuffix("_text")]], "model_type": kind}
    config |= {name: own[key] for key, name in names.items() if key in own}
    own = Fields(own, f"{file.path}: {architecture}")
    config["vocab_size"] = _embedding(file).shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config |= _READERS.get(architecture, _dense)(file, own, config)
    return config | _token_ids(file, fields, config)


def _embedding(file: GgufFile):
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise file.error("holds no matrix token_embd.weight")
    return tensor


def _token_ids(file: GgufFile, fields: Fields, config: dict) -> dict:
    """bos, and all ids that end a turn: the stated ones first, then control tokens by their
    spelling."""
    own = Fields(
        {key: fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")},
        f"{file.path}: tokenizer.ggml",
    )
    ids = {key: own.count(key, least=0) for key, value in own.raw.items() if value is not None}
    tokens, types = (fields.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
    if not all(isinstance(one, list) for one in (tokens, types)):
        raise file.error("tokenizer.ggml.tokens and token_type must be lists")
    if len(tokens) > config["vocab_size"]:
        raise file.error(
            f"names {len(tokens)} tokens; token_embd.weight has {config['vocab_size']} rows"
        )
    spelled = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in _ENDS
    ]
    ends = dict.fromkeys([*(ids[key] for key in ("eos", "eot", "eom") if key in ids), *spelled])
    return {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": list(ends) or None,
    }


def _rope(own: Fields, head_dim: int) -> dict:
    """`rope_theta` and `rope_scaling`."""
    own.only("rope.dimension_count", head_dim, hint=": all of a head is rotated")
    kind, scaling = own.text("rope.scaling.type", "none"), None
    own.only("rope.scaling.type", "none", "linear", "yarn")
    if kind != "none":
        scaling = {"rope_type": kind, "factor": own.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = own.count(
            "rope.scaling.original_context_length"
        )
        for name in ("beta_fast", "beta_slow"):
            if own.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = own.number(f"rope.scaling.yarn_{name}")
    return {"rope_theta": _theta(own, "rope.freq_base"), "rope_scaling": scaling}


def _theta(own: Fields, key: str) -> float:
    return own.number(key, 1e4, positive=True, above=1)


def _head_dim(own: Fields, config: dict) -> int:
    own.only("attention.value_length", config.get("head_dim"))
    if "head_dim" in config:
        return own.count("attention.key_length")
    return own.count("embedding_length") // own.count("attention.head_count")


def _dense(file: GgufFile, own: Fields, config: dict) -> dict:
    head_dim = _head_dim(own, config)
    rope = _rope(own, head_dim)
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        if rope["rope_scaling"] is not None:
            raise file.error("rope_freqs.weight stands beside another rope.scaling.type")
        values = np.asarray(factors.floats(), np.float64)
        rope["rope_scaling"] = _llama3(file, values, rope["rope_theta"], head_dim)
    biases = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
    if config["model_type"] != "llama":  # qwen2 always has biases of q, k and v, and qwen3 none
        biases = {}
    return (
        rope
        | {"head_dim": head_dim}
        | {name: f"blk.0.{part}.bias" in file.tensors for name, part in biases.items()}
    )


def _llama3(file: GgufFile, factors: np.ndarray, theta: float, head_dim: int) -> dict | None:
    """`rope_scaling` of Llama 3: what each frequency is divided by, float [head_dim / 2].

    The published models have 1 and 4 as the bounds of the ramp; the original context follows from a
    factor within it.
    """
    factor, low, high = float(factors.max(initial=1.0)), 1.0, 4.0
    if np.all(factors == 1):
        return None
    if not (np.isfinite(factors) & (factors >= 1)).all():
        raise file.error("rope_freqs.weight holds factors below 1 or not finite")
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    within = np.flatnonzero((factors > 1) & (factors < factor))
    original = 8192
    if factors.shape == wavelength.shape and within.size:
        i = within[-1]
        share = (1 / factors[i] - 1 / factor) / (1 - 1 / factor)
        original = round(wavelength[i] * (low + share * (high - low)))
    share = np.clip((original / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise file.error("rope_freqs.weight holds factors that are not those of Llama 3's rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _qwen3_moe(file: GgufFile, own: Fields, config: dict) -> dict:
    head_dim = _head_dim(own, config)
    # llama.cpp divides the weights of the chosen experts by their sum for every such file.
    return _rope(own, head_dim) | {"head_dim": head_dim, "norm_topk_prob": True}


def _gpt_oss(file: GgufFile, own: Fields, config: dict) -> dict:
    head_dim = _head_dim(own, config)
    rope = _rope(own, head_dim)
    if rope["rope_scaling"] is not None:
        rope["rope_scaling"]["truncate"] = False
    packed = any(tensor.type == "MXFP4" for tensor in file.tensors.values())
    method = {"quantization_config": {"quant_method": "mxfp4"}} if packed else {}
    return rope | method | {"head_dim": head_dim, "num_local_experts": config.pop("num_experts")}


def _gemma4(file: GgufFile, own: Fields, config: dict) -> dict:
    layers = own.count("block_count")
    slides = own.items("attention.sliding_window_pattern")
    heads = own.get("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * layers
    if not len(slides) == len(heads) == layers:
        raise file.error(f"the metadata's lists are not of {layers} layers, one entry for each")
    own.only("attention.value_length", own.get("attention.key_length"))
    own.only("attention.value_length_swa", own.get("attention.key_length_swa"))
    own.only("rope.dimension_count", own.get("attention.key_length"))
    own.only("rope.dimension_count_swa", own.get("attention.key_length_swa"))
    own.only("rope.scaling.type", "none")
    kinds = {
        sliding: {h for h, s in zip(heads, slides, strict=True) if s is sliding}
        for sliding in (True, False)
    }
    if any(len(counts) != 1 for counts in kinds.values()):
        raise file.error(f"attention.head_count_kv {heads} differs within a kind of layer")
    full = [i for i, sliding in enumerate(slides) if not sliding]
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        raise file.error("holds no rope_freqs.weight, which says what of a head is rotated")
    values = np.asarray(factors.floats())
    rotated = values == 1
    if not (rotated | (values >= 1e20)).all() or len(values) * 2 != own.count(
        "attention.key_length"
    ):
        raise file.error("rope_freqs.weight holds factors other than 1 and 1e30")
    return {
        "layer_types": [SLIDING if sliding else FULL for sliding in slides],
        "num_key_value_heads": kinds[True].pop(),
        "num_global_key_value_heads": kinds[False].pop(),
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in file.tensors,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": _theta(own, "rope.freq_base"),
                "partial_rotary_factor": float(rotated.mean()),
            },
            SLIDING: {"rope_type": "default", "rope_theta": _theta(own, "rope.freq_base_swa")},
        },
    }


_READERS = {"qwen3moe": _qwen3_moe, "gpt-oss": _gpt_oss, "gemma4": _gemma4}
