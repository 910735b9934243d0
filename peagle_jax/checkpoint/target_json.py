"""`config.json` and `generation_config.json` of a target -> `TargetConfig`.

`config_keys` holds the keys with their defaults and accepted values; this file builds a
`TargetConfig` from them. An unsupported feature is refused with the name of its key.
"""

from pathlib import Path

from peagle_jax.checkpoint.config_keys import KEYS, SIZES, check_unsupported, read_keys, stray_keys
from peagle_jax.checkpoint.fields import Fields, read_config, read_json
from peagle_jax.checkpoint.rope_json import (
    DEFAULT_ROPE,
    FULL,
    GPT_OSS_ROPE,
    SLIDING,
    rope_config,
    rope_of_type,
    stray_rope_keys,
    windows,
)
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.config import (
    ConfigError,
    ExpertsConfig,
    GlobalAttention,
    TargetConfig,
)
from peagle_jax.rope_config import RopeConfig

_QUANTIZED = ("mxfp4", "fp8", "compressed-tensors", "modelopt")
_COMPRESSED = ("float-quantized", "naive-quantized")
"""Formats of compressed-tensors that hold a weight as FP8 with its scales."""
_WRAPPERS = {"gemma4": "gemma4_text"}
"""Models of several towers, and the `model_type` of their `text_config`."""
_DEFAULT_IDS = {"llama": (1, 2), "mistral": (1, 2), "gemma4_text": (2, 1)}
"""bos and eos ids of families whose transformers class has a default for a missing key."""


def target_config(folder: Path) -> TargetConfig:
    """TargetConfig of a Hugging Face folder.

    Raises:
      CheckpointError: unknown family, a value that cannot be right, or a feature that is not
        supported.
    """
    folder = Path(folder)
    outer = Fields(read_config(folder), str(folder))
    kind, fields = _text_fields(outer)
    for one in (outer, fields):
        check_quantization(one)
    generation = Fields({}, str(folder / "generation_config.json"))
    if Path(generation.where).is_file():
        generation = Fields(read_json(Path(generation.where)), generation.where)
    keys = read_keys(fields, KEYS[kind])
    # generation_config.json comes first: only there chat models list their end-of-turn token.
    sources = (generation, outer, fields)
    bos, eos = (
        _ids(sources, key, keys["vocab_size"], default)
        for key, default in zip(
            ("bos_token_id", "eos_token_id"), _DEFAULT_IDS.get(kind, (None, None)), strict=True
        )
    )
    common = dict(
        max_position=keys["max_position_embeddings"],
        tie_embeddings=_tied(outer, fields, keys),
        eos_ids=eos,
        bos_id=bos[0] if bos else None,
    )
    try:
        return TargetConfig(**common, **_READERS[kind](fields, keys))
    except CheckpointError:
        raise
    except ConfigError as error:
        raise outer.error(str(error)) from error


def target_unread_keys(raw: dict) -> list[str]:
    """Keys of a target's config.json that no table lists and that have no effect, sorted.

    Empty for files of other families.
    """
    kind, text = raw.get("model_type"), raw.get("text_config")
    if kind not in [*_WRAPPERS, *KEYS]:
        return []
    if kind in KEYS:
        return sorted({*stray_keys(raw, KEYS[kind]), *stray_rope_keys(raw)})
    inner = {"model_type": _WRAPPERS[kind], **(text if isinstance(text, dict) else {})}
    return sorted({*target_unread_keys(inner), *stray_keys(raw, ("tie_word_embeddings",))})


def unstated_sizes(folder: Path) -> str:
    """Hint for messages about mismatching tensors: the sizes that config.json leaves to
    defaults."""
    kind, fields = _text_fields(Fields(read_config(folder), str(folder)))
    defaults = [
        f"{name} ({KEYS[kind][name].default})"
        for name in SIZES
        if name in KEYS[kind] and fields.get(name) is None
    ]
    if not defaults:
        return ""
    return f"; config.json does not state {', '.join(defaults)}: these are transformers' defaults"


def _text_fields(outer: Fields) -> tuple[str, Fields]:
    """(`model_type` of the text model, its keys)."""
    kind = outer.get("model_type")
    known = [*_WRAPPERS, *_READERS]
    if kind not in known:
        raise outer.error(f"model_type {kind!r} is not supported; {', '.join(known)} are")
    if kind not in _WRAPPERS:
        return kind, outer
    fields = outer.inner("text_config")
    fields.only("model_type", _WRAPPERS[kind])
    check_unsupported(outer, ())
    return _WRAPPERS[kind], fields


def _ids(
    sources: tuple[Fields, ...], key: str, vocab_size: int, default: int | None
) -> tuple[int, ...]:
    """Token ids of the first source that has them; () if a source has null and no other has ids.

    Raises:
      CheckpointError: an id that the vocabulary does not have.
    """
    for source in sources:
        ids = source.ids(key)
        if ids:
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise source.error(
                    f"{key} {outside[0]} lies outside the vocabulary of {vocab_size} tokens"
                )
            return ids
    is_stated = any(key in source.raw for source in sources)
    return () if is_stated or default is None or default >= vocab_size else (default,)


def _tied(outer: Fields, fields: Fields, keys: dict) -> bool:
    """Whether lm_head is tied to the embedding; a wrapper and its text config must agree."""
    stated = {
        source.flag("tie_word_embeddings")
        for source in (outer, fields)
        if source.get("tie_word_embeddings") is not None
    }
    if len(stated) > 1:
        raise outer.error("tie_word_embeddings differs between config.json and its text_config")
    return stated.pop() if stated else keys["tie_word_embeddings"]


def decoder_fields(fields: Fields, keys: dict, *, intermediate: str = "intermediate_size") -> dict:
    """Fields that targets with one kind of attention and draft decoders share, of `read_keys`."""
    heads, hidden = keys["num_attention_heads"], keys["hidden_size"]
    head_dim = keys["head_dim"] or max(1, hidden // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rope turns pairs")
    return dict(
        vocab_size=keys["vocab_size"],
        hidden_size=hidden,
        num_layers=keys["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=keys["num_key_value_heads"] or heads,
        head_dim=head_dim,
        intermediate_size=keys[intermediate],
        norm_eps=keys["rms_norm_eps"],
        attention_bias=keys["attention_bias"],
    )


def check_quantization(fields: Fields) -> None:
    """Refuses a `quantization_config` whose weights would have other values here, by name."""
    quantization = fields.inner("quantization_config", {})
    method = quantization.get("quant_method")
    if method not in (None, *_QUANTIZED):
        raise fields.error(
            f"quantization_config: quant_method {method!r} is not supported; "
            f"{', '.join(_QUANTIZED)} are, and unquantised checkpoints"
        )
    quantization.only("weight_block_size", [128, 128])
    quantization.only("fmt", "e4m3", "float8_e4m3fn")
    quantization.only("quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
    if method == "compressed-tensors":
        _check_compressed(quantization)


def _check_compressed(quantization: Fields) -> None:
    """Refuses all formats of the container `compressed-tensors` but FP8 weights with scales."""
    where = f"{quantization.where}: quantization_config"
    at = lambda name, raw: Fields(raw, f"{where}: {name}")
    at("compressed-tensors", quantization.raw).only("format", *_COMPRESSED)
    at("transform_config", quantization.raw).only("transform_config", {})
    sparsity = quantization.inner("sparsity_config", {}).raw
    at("sparsity_config", sparsity).only("format", "dense")
    for name, group in quantization.inner("config_groups", {}).raw.items():
        fields = at(name, group if isinstance(group, dict) else {})
        fields.only("format", *_COMPRESSED)
        weights = at(f"{name}.weights", fields.inner("weights", {}).raw)
        weights.only("num_bits", 8)
        weights.only("type", "float")
        weights.only("symmetric", True)
        weights.only("strategy", "tensor", "channel", "block")
        weights.only("block_structure", [128, 128])


def _rope(fields: Fields, keys: dict, default: RopeConfig = DEFAULT_ROPE) -> RopeConfig:
    return rope_config(fields, max_position=keys["max_position_embeddings"], default=default)


def _check_no_window(fields: Fields, keys: dict) -> None:
    types = keys["layer_types"]
    if SLIDING in (types or []):
        raise fields.error(
            f"layer_types names {SLIDING}: layers with a window are not supported in this family"
        )
    if types is not None:
        windows(fields, types, keys["num_hidden_layers"], None)


def _llama(fields: Fields, keys: dict) -> dict:
    _check_no_window(fields, keys)
    common = decoder_fields(fields, keys)
    return dict(
        family="llama", **common, rope=_rope(fields, keys), qk_norm=False, mlp_bias=keys["mlp_bias"]
    )


def _mistral(fields: Fields, keys: dict) -> dict:
    """All layers slide, or with a window of null none."""
    common, width = decoder_fields(fields, keys), keys["sliding_window"]
    kind = FULL if width is None else SLIDING
    if any(layer != kind for layer in keys["layer_types"] or []):
        raise fields.error(
            "layer_types and sliding_window contradict each other; in a mistral target all layers "
            "slide, or none if sliding_window is null"
        )
    layers = common["num_layers"]
    types = [kind] * layers if keys["layer_types"] is None else keys["layer_types"]
    sliding = windows(fields, types, layers, width)
    rope = _rope(fields, keys)
    return dict(family="mistral", **common, rope=rope, qk_norm=False, sliding_windows=sliding)


def _qwen2(fields: Fields, keys: dict) -> dict:
    """Qwen2. q, k and v always have biases, as in transformers; the key is ignored."""
    common = decoder_fields(fields, keys) | {"attention_bias": True}
    sliding = qwen_windows(fields, keys)
    rope = _rope(fields, keys)
    return dict(family="qwen2", **common, rope=rope, qk_norm=False, sliding_windows=sliding)


def _qwen3(fields: Fields, keys: dict) -> dict:
    common = decoder_fields(fields, keys)
    sliding = qwen_windows(fields, keys)
    rope = _rope(fields, keys)
    return dict(family="qwen3", **common, rope=rope, qk_norm=True, sliding_windows=sliding)


def qwen_windows(fields: Fields, keys: dict) -> tuple[int | None, ...] | None:
    """Window of each layer as transformers' `Qwen2Config` and `Qwen3Config` derive it."""
    layers, types = keys["num_hidden_layers"], keys["layer_types"]
    width = keys["sliding_window"] if keys["use_sliding_window"] else None
    if types is None:
        first = layers if width is None else keys["max_window_layers"]
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    if SLIDING in types and width is None:
        raise fields.error(
            "layer_types names sliding-window layers, but use_sliding_window and sliding_window do "
            "not; set or clear all three"
        )
    return windows(fields, types, layers, width)


def _experts(fields: Fields, keys: dict, **rules) -> ExpertsConfig:
    names = ("num_experts", "num_local_experts")
    stated = {keys[name] for name in names if fields.get(name) is not None}
    if len(stated) > 1:
        raise fields.error(f"num_experts and num_local_experts contradict each other: {stated}")
    total = stated.pop() if stated else keys["num_experts"] or keys["num_local_experts"]
    if keys["num_experts_per_tok"] > total:
        raise fields.error(
            f"num_experts_per_tok {keys['num_experts_per_tok']} is more than the {total} experts"
        )
    if fields.get("experts_per_token") not in (None, keys["num_experts_per_tok"]):
        raise fields.error("experts_per_token and num_experts_per_tok contradict each other")
    return ExpertsConfig(num_experts=total, top_k=keys["num_experts_per_tok"], **rules)


def _qwen3_moe(fields: Fields, keys: dict) -> dict:
    _check_no_window(fields, keys)
    dense = _dense_layers(fields, keys)
    experts = _experts(
        fields,
        keys,
        normalize=keys["norm_topk_prob"],
        dense_layers=dense,
        dense_size=keys["intermediate_size"] if dense else None,
    )
    common = decoder_fields(fields, keys, intermediate="moe_intermediate_size")
    rope = _rope(fields, keys)
    return dict(family="qwen3_moe", **common, rope=rope, qk_norm=True, experts=experts)


def _dense_layers(fields: Fields, keys: dict) -> tuple[int, ...]:
    """Layers with a dense MLP: `mlp_only_layers`, and all but every `decoder_sparse_step`-th
    layer."""
    step, listed = keys["decoder_sparse_step"], keys["mlp_only_layers"]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in listed):
        raise fields.error(f"mlp_only_layers must be a list of layer numbers, not {listed!r}")
    layers = range(keys["num_hidden_layers"])
    return tuple(i for i in layers if i in listed or (i + 1) % step)


def _gpt_oss(fields: Fields, keys: dict) -> dict:
    common = decoder_fields(fields, keys)
    layers, types = common["num_layers"], keys["layer_types"]
    if types is None:
        types = [FULL if i % 2 else SLIDING for i in range(layers)]
    return dict(
        family="gpt_oss",
        **common,
        rope=_rope(fields, keys, GPT_OSS_ROPE),
        qk_norm=False,
        experts=_experts(fields, keys),
        swiglu_limit=keys["swiglu_limit"],
        sliding_windows=windows(fields, types, layers, keys["sliding_window"]),
    )


def _gemma4(fields: Fields, keys: dict) -> dict:
    common = decoder_fields(fields, keys)
    layers, types = common["num_layers"], keys["layer_types"]
    if types is None:
        types = [SLIDING if (i + 1) % 6 else FULL for i in range(layers)]
    if types[-1:] == [SLIDING]:
        raise fields.error(f"layer_types must end in {FULL}")
    return dict(
        family="gemma4",
        **common,
        rope=rope_of_type(fields, SLIDING),
        qk_norm=True,
        sliding_windows=windows(fields, types, layers, keys["sliding_window"]),
        global_attention=_global_attention(fields, keys, types),
        logit_softcap=keys["final_logit_softcapping"],
    )


def _global_attention(fields: Fields, keys: dict, types: list[str]) -> GlobalAttention:
    """Released files name the full layers' sizes once, transformers 5 saves them layer by layer."""
    shared, kv_heads = keys["attention_k_eq_v"], keys["num_key_value_heads"]
    full = {str(i) for i, one in enumerate(types) if one == FULL}
    if keys["per_layer_config"] is None:
        # transformers counts the other number of heads only where V is K.
        kv_heads = keys["num_global_key_value_heads"] or kv_heads if shared else kv_heads
        wide = {(keys["global_head_dim"], kv_heads)}
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
            head_dim = layer.count("head_dim", keys["head_dim"])
            wide.add((head_dim, layer.count("num_key_value_heads", kv_heads)))
    if len(wide) != 1:
        raise fields.error("per_layer_config must be the same for all full layers")
    ((head_dim, kv_heads),) = wide
    if head_dim % 2:
        raise fields.error(f"the full layers' head_dim {head_dim} is odd; rope turns pairs")
    rope = rope_of_type(fields, FULL)
    return GlobalAttention(num_kv_heads=kv_heads, head_dim=head_dim, rope=rope, shared_kv=shared)


_READERS = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "gemma4_text": _gemma4,
}
"""By `model_type`: TargetConfig's fields from the values of `read_keys`."""
