"""`config.json` and `generation_config.json` of a target <-> `TargetConfig`.

Strict: what a model needs must be stated, and a feature that is not done here is refused by its name.
"""

from pathlib import Path

from peagle_jax.checkpoint.fields import Fields, read_config, read_json
from peagle_jax.checkpoint.rope_json import (
    FULL,
    SLIDING,
    rope_config,
    rope_json,
    rope_of_type,
    rope_parameters_json,
    windows,
    windows_json,
)
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.config import (
    ConfigError,
    DrafterConfig,
    ExpertsConfig,
    GlobalAttention,
    TargetConfig,
)

_QUANTIZED = ("mxfp4", "fp8", "compressed-tensors", "modelopt")
_SWIGLU_ALPHA = 1.702
_MAX_LAYERS = 4096


def target_config(folder: Path) -> TargetConfig:
    """TargetConfig of a Hugging Face folder.

    Raises:
      CheckpointError: unknown family, a needed key is missing, or a feature is not supported.
    """
    folder = Path(folder)
    outer = Fields(read_config(folder), str(folder))
    kind = outer.get("model_type")
    if kind not in [*_READERS]:
        raise outer.error(f"model_type {kind!r} is not supported; {', '.join(_READERS)} are")
    fields = outer.inner("text_config") if kind == "gemma4" else outer
    _check_quantization(outer)
    generation = Fields({}, str(folder / "generation_config.json"))
    if Path(generation.where).is_file():
        generation = Fields(read_json(Path(generation.where)), generation.where)
    # Chat models list their end-of-turn token only there; a wrapper's text config knows least.
    sources = (generation, outer, fields)
    eos = [ids for source in sources if (ids := source.ids("eos_token_id"))]
    bos = [ids for source in sources if (ids := source.ids("bos_token_id"))]
    tied = kind.startswith("gemma4")  # transformers' default
    common = dict(
        max_position=fields.count("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", tied)),
        eos_ids=eos[0] if eos else (),
        bos_id=bos[0][0] if bos else None,
    )
    try:
        return TargetConfig(**common, **_READERS[kind](fields))
    except CheckpointError:
        raise
    except ConfigError as error:
        raise outer.error(str(error)) from error


def decoder_fields(fields: Fields, *, intermediate: str = "intermediate_size") -> dict:
    """Fields that targets with one kind of attention and draft decoders share."""
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    return dict(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.count("num_hidden_layers", most=_MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", max(1, hidden // heads)),
        intermediate_size=fields.count(intermediate),
        norm_eps=fields.number("rms_norm_eps"),
        attention_bias=fields.flag("attention_bias"),
    )


def _check_quantization(fields: Fields) -> None:
    quantization = fields.inner("quantization_config", {})
    method = quantization.get("quant_method")
    if method not in (None, *_QUANTIZED):
        raise fields.error(
            f"quantization_config: quant_method {method!r} is not supported; {', '.join(_QUANTIZED)} "
            "are, and unquantised checkpoints"
        )
    quantization.only("weight_block_size", [128, 128])
    quantization.only("fmt", "e4m3", "float8_e4m3fn")


def _dense(fields: Fields) -> dict:
    fields.only("hidden_act", "silu")
    fields.only("mlp_bias", False)
    return dict(**decoder_fields(fields), rope=rope_config(fields))


def _llama(fields: Fields) -> dict:
    if fields.flag("use_sliding_window") or SLIDING in fields.items("layer_types", []):
        raise fields.error("sliding-window layers are not supported in a llama target")
    return dict(family="llama", **_dense(fields), qk_norm=False)


def _qwen3(fields: Fields) -> dict:
    common = _dense(fields)
    fields.only("use_qk_norm", True)
    fields.only("qkv_bias", False)
    layers = common["num_layers"]
    slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    if fields.get("layer_types") is not None:
        types = fields.items("layer_types")
    else:
        first = fields.count("max_window_layers", least=0) if slides else layers
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    if SLIDING in types and not slides:
        raise fields.error(
            "layer_types names sliding-window layers, but use_sliding_window and sliding_window do "
            "not; set or clear all three"
        )
    sliding = windows(fields, types, layers)
    return dict(family="qwen3", **common, qk_norm=True, sliding_windows=sliding)


def _num_experts(fields: Fields) -> int:
    """Both names are in use; transformers 5 writes the second one."""
    key = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    return fields.count(key)


def _qwen3_moe(fields: Fields) -> dict:
    fields.only("hidden_act", "silu")
    fields.only("use_qk_norm", True)
    fields.only("qkv_bias", False)
    fields.only("use_sliding_window", False)
    fields.only("shared_expert_intermediate_size", 0)
    dense = "; some layers would be dense, and only models whose every layer is MoE are done"
    fields.only("decoder_sparse_step", 1, hint=dense)
    fields.only("mlp_only_layers", [], hint=dense)
    experts = ExpertsConfig(
        num_experts=_num_experts(fields),
        top_k=fields.count("num_experts_per_tok"),
        normalize=fields.flag("norm_topk_prob", None),
    )
    common = decoder_fields(fields, intermediate="moe_intermediate_size")
    rope = rope_config(fields)
    return dict(family="qwen3_moe", **common, rope=rope, qk_norm=True, experts=experts)


def _gpt_oss(fields: Fields) -> dict:
    fields.only("swiglu_alpha", _SWIGLU_ALPHA)
    common = decoder_fields(fields)
    layers = common["num_layers"]
    alternate = [FULL if i % 2 else SLIDING for i in range(layers)]  # transformers' default
    sliding = windows(fields, fields.items("layer_types", alternate), layers)
    experts = ExpertsConfig(
        num_experts=_num_experts(fields), top_k=fields.count("num_experts_per_tok")
    )
    return dict(
        family="gpt_oss", **common, rope=rope_config(fields), qk_norm=False, experts=experts,
        sliding_windows=sliding, swiglu_limit=fields.number("swiglu_limit", 7.0),
    )  # fmt: skip


def _gemma4(fields: Fields) -> dict:
    fields.only("model_type", "gemma4_text")
    fields.need("hidden_activation")
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("num_kv_shared_layers", 0)
    fields.only("hidden_size_per_layer_input", 0)
    fields.only("enable_moe_block", False)
    fields.only("use_double_wide_mlp", False)
    fields.only("use_bidirectional_attention", "vision")
    fields.only("attn_logit_softcapping")
    common = decoder_fields(fields)
    types = fields.items("layer_types")
    if types[-1:] == [SLIDING]:
        raise fields.error(f"layer_types must end in {FULL}")
    cap = fields.get("final_logit_softcapping")
    return dict(
        family="gemma4", **common, rope=rope_of_type(fields, SLIDING), qk_norm=True,
        sliding_windows=windows(fields, types, common["num_layers"]),
        global_attention=_global_attention(fields, types),
        logit_softcap=None if cap is None else fields.number("final_logit_softcapping"),
    )  # fmt: skip


def _global_attention(fields: Fields, types: list[str]) -> GlobalAttention:
    """Released files name the full layers' sizes once, transformers 5 saves them layer by layer."""
    shared = fields.flag("attention_k_eq_v")
    kv_heads = fields.count("num_key_value_heads")
    full = {str(i) for i, one in enumerate(types) if one == FULL}
    if fields.get("per_layer_config") is None:
        # transformers counts the other number of heads only where V is K.
        kv_heads = fields.count("num_global_key_value_heads", kv_heads) if shared else kv_heads
        wide = {(fields.count("global_head_dim"), kv_heads)}
    else:
        layers = fields.inner("per_layer_config")
        extra = {key for key, one in layers.raw.items() if one} - full
        if extra:
            raise fields.error(f"per_layer_config changes layers {sorted(extra)}, which slide")
        wide = set()
        for i in full:
            layer = layers.inner(i, {})
            unknown = layer.raw.keys() - {"head_dim", "num_key_value_heads"}
            if unknown:
                raise fields.error(f"per_layer_config changes {sorted(unknown)}, not supported")
            head_dim = layer.count("head_dim", fields.count("head_dim"))
            wide.add((head_dim, layer.count("num_key_value_heads", kv_heads)))
    if len(wide) != 1:
        raise fields.error("per_layer_config must be the same for all full layers")
    ((head_dim, kv_heads),) = wide
    rope = rope_of_type(fields, FULL)
    return GlobalAttention(num_kv_heads=kv_heads, head_dim=head_dim, rope=rope, shared_kv=shared)


_READERS = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
}
"""By `model_type`. "gemma4" wraps a text config beside a vision tower."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
}


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
        "architectures": [_ARCHITECTURES[config.family]],
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
    match config.family:
        case "qwen3_moe":
            return {
                **rope,
                "num_experts": experts.num_experts,
                "num_experts_per_tok": experts.top_k,
                "moe_intermediate_size": config.intermediate_size,
                "norm_topk_prob": experts.normalize,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        case "gpt_oss":
            return {
                **rope,
                **sliding,
                "num_local_experts": experts.num_experts,
                "num_experts_per_tok": experts.top_k,
                "experts_per_token": experts.top_k,
                "swiglu_limit": config.swiglu_limit,
            }
        case "gemma4":
            wide = config.global_attention
            return {
                **sliding,
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
