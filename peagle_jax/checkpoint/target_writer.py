"""`TargetConfig` -> `config.json`, as the family's released files write it."""

from peagle_jax.checkpoint.rope_json import (
    FULL,
    SLIDING,
    rope_json,
    rope_parameters_json,
    windows_json,
)
from peagle_jax.config import DrafterConfig, TargetConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
}
"""transformers' class for each family."""


def decoder_json(config: TargetConfig | DrafterConfig, dtype: str) -> dict:
    """Keys that targets and heads share."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }


def target_json(config: TargetConfig, dtype: str) -> dict:
    """config.json of an unquantised target, as its family's released files write it."""
    eos = list(config.eos_ids)
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": "gemma4_text" if config.family == "gemma4" else config.family,
        **decoder_json(config, dtype),
        **_family_json(config),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def _family_json(config: TargetConfig) -> dict:
    rope, sliding = rope_json(config.rope), windows_json(config.sliding_windows)
    experts = config.experts
    full = {"layer_types": [FULL] * config.num_layers}  # a missing key would mean sliding windows
    match config.family:
        case "llama":
            return {**rope, **sliding, "mlp_bias": config.mlp_bias}
        case "mistral":  # a missing key would mean a sliding window
            return {**rope, "sliding_window": config.window(0)}
        case "qwen3_moe":
            dense = experts.dense_layers
            return {
                **rope,
                **({"intermediate_size": experts.dense_size} if dense else {}),
                "num_experts": experts.num_experts,
                "num_experts_per_tok": experts.top_k,
                "moe_intermediate_size": config.intermediate_size,
                "norm_topk_prob": experts.normalize,
                "decoder_sparse_step": 1,
                "mlp_only_layers": list(dense),
            }
        case "gpt_oss":
            if config.rope.scaling is None:  # a missing key would mean YaRN
                rope = {"rope_parameters": rope_parameters_json(config.rope)}
            return {
                **rope,
                **(sliding or full),
                "num_local_experts": experts.num_experts,
                "num_experts_per_tok": experts.top_k,
                "experts_per_token": experts.top_k,
                "swiglu_limit": config.swiglu_limit,
            }
        case "gemma4":
            wide = config.global_attention
            return {
                **(sliding or full),
                "rope_parameters": {
                    SLIDING: rope_parameters_json(config.rope),
                    FULL: rope_parameters_json(wide.rope),
                },
                "global_head_dim": wide.head_dim,
                "num_global_key_value_heads": wide.num_kv_heads,
                "attention_k_eq_v": wide.shared_kv,
                "final_logit_softcapping": config.logit_softcap,
                "hidden_activation": "gelu_pytorch_tanh",
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": False,
                "use_double_wide_mlp": False,
            }
    return {**rope, **sliding}
