"""Hugging Face `config.json` <-> our configs. Strict: what a model needs must be stated."""

import json
from pathlib import Path

from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.config import DrafterConfig, Llama3Scaling, RopeConfig, TargetConfig

_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_QWEN_HEADS = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM")


def read_json(folder: Path) -> dict:
    """`config.json` of a folder as a dict.

    Raises:
      CheckpointError: missing, or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json; give a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return raw


def _need(raw: dict, key: str, where: str):
    if raw.get(key) is None:
        raise CheckpointError(f"{where}: config.json states no {key}")
    return raw[key]


def _rope(raw: dict, where: str) -> RopeConfig:
    """Both forms: `rope_theta` + `rope_scaling` (released files), `rope_parameters` (transformers 5)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or _need(raw, "rope_theta", where))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise CheckpointError(
            f"{where}: rope_type {kind!r} is not supported; llama3 and default are"
        )
    llama3 = Llama3Scaling(
        factor=float(_need(scaling, "factor", where)),
        low_freq_factor=float(_need(scaling, "low_freq_factor", where)),
        high_freq_factor=float(_need(scaling, "high_freq_factor", where)),
        original_max_position=int(_need(scaling, "original_max_position_embeddings", where)),
    )
    return RopeConfig(theta=theta, scaling=llama3)


def _ids(value) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _shape(raw: dict, where: str) -> dict:
    """Fields that a target and a draft decoder share."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"{where}: hidden_act {activation!r} is not supported; silu is")
    heads = int(_need(raw, "num_attention_heads", where))
    hidden = int(_need(raw, "hidden_size", where))
    return dict(
        vocab_size=int(_need(raw, "vocab_size", where)),
        hidden_size=hidden,
        num_layers=int(_need(raw, "num_hidden_layers", where)),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        intermediate_size=int(_need(raw, "intermediate_size", where)),
        norm_eps=float(_need(raw, "rms_norm_eps", where)),
        rope=_rope(raw, where),
        attention_bias=bool(raw.get("attention_bias", False)),
    )


def target_config(folder: Path) -> TargetConfig:
    """TargetConfig of a Hugging Face folder.

    Raises:
      CheckpointError: unknown family, or a needed key is missing.
    """
    raw, where = read_json(folder), str(folder)
    family = raw.get("model_type")
    if family not in ("llama", "qwen3"):
        raise CheckpointError(
            f"{where}: model_type {family!r} is not supported; llama and qwen3 are"
        )
    slides = bool(raw.get("use_sliding_window") and raw.get("sliding_window"))
    if slides or "sliding_attention" in (raw.get("layer_types") or ()):
        raise CheckpointError(f"{where}: sliding-window layers are not supported in a target")
    eos = raw.get("eos_token_id")
    generation = Path(folder) / "generation_config.json"
    if generation.is_file():
        # Chat models list their end-of-turn token only here.
        eos = json.loads(generation.read_text()).get("eos_token_id", eos)
    return TargetConfig(
        family=family,
        **_shape(raw, where),
        max_position=int(_need(raw, "max_position_embeddings", where)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        eos_ids=_ids(eos),
        bos_id=raw.get("bos_token_id"),
    )


def _taps(raw: dict) -> tuple[int, ...] | None:
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(ids) if ids else None


def _windows(layers: dict) -> tuple[int | None, ...] | None:
    types, window = layers.get("layer_types"), layers.get("sliding_window")
    if not types or not window:
        return None
    return tuple(window if t == "sliding_attention" else None for t in types)


def _trained_num_draft(raw: dict) -> int | None:
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    stated = raw.get("num_speculative_tokens") or raw.get("k_train")
    return stated or methods[0].get("speculative_tokens")


def _check_promises(raw: dict, layers: dict, tensors: set[str], where: str) -> None:
    """What config.json says the head has must be in its file, or it drafts garbage.

    Raises:
      CheckpointError: something is missing.
    """
    states_mask = any(raw.get(key) is not None for key in _MASK_KEYS)
    if states_mask and "mask_hidden" not in tensors:
        raise CheckpointError(
            f"{where}: config.json names a mask token but the file holds no mask_hidden; "
            "the head cannot draft in parallel"
        )
    if "mask_hidden" in tensors and not states_mask:
        raise CheckpointError(
            f"{where}: the file holds mask_hidden but config.json names no mask token id "
            f"({', '.join(_MASK_KEYS)})"
        )
    for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if (raw.get(flag) or layers.get(flag)) and name not in tensors:
            raise CheckpointError(f"{where}: config.json says {flag} but the file holds no {name}")


def drafter_config(
    folder: Path, target: TargetConfig, tensors: set[str], fused_width: int
) -> DrafterConfig:
    """DrafterConfig of a head folder in the AWS, SafeAILab, SpecForge or speculators layout.

    Args:
      folder: holds config.json.
      target: the model the head will draft for.
      tensors: names in its file (without a `model.` prefix): they decide what the head owns.
      fused_width: input width of its `fc`.
    """
    raw, where = read_json(folder), str(folder)
    speculators = "transformer_layer_config" in raw
    layers = raw["transformer_layer_config"] if speculators else raw
    _check_promises(raw, layers, tensors, where)
    taps = _taps(raw)
    width = int(
        raw.get("target_hidden_size") or layers.get("target_hidden_size") or target.hidden_size
    )
    num_taps = int(raw.get("num_aux_hidden_states") or (len(taps) if taps else 3))
    mask = next((raw[key] for key in _MASK_KEYS if raw.get(key) is not None), None)
    is_peagle = "mask_hidden" in tensors
    # speculators' own default differs by algorithm (peagle-spec 2.3).
    residual_default = speculators and raw.get("speculators_model_type") == "eagle3"
    shape = _shape(layers, where)
    qwen = (
        layers.get("model_type") == "qwen3" or (raw.get("architectures") or [""])[0] in _QWEN_HEADS
    )
    config = DrafterConfig(
        method="peagle" if is_peagle else "eagle3",
        **shape,
        draft_vocab_size=int(raw.get("draft_vocab_size") or shape["vocab_size"]),
        target_hidden_size=width,
        num_taps=num_taps,
        taps=taps,
        mask_token_id=None if mask is None else int(mask),
        qk_norm=qwen,
        # vLLM's heads bias q, k and v only, those built from transformers' attention all four.
        output_bias=shape["attention_bias"]
        and any(name.endswith("self_attn.o_proj.bias") for name in tensors),
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_before_residual=bool(raw.get("norm_before_residual", residual_default)),
        norm_output=bool(raw.get("norm_output", False)),
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        sliding_windows=_windows(layers),
        logit_scale=float(raw.get("logit_scale", 1.0)),
        trained_num_draft=_trained_num_draft(raw),
    )
    check_fit(config, target, fused_width, where)
    return config


def check_fit(config: DrafterConfig, target: TargetConfig, fused_width: int, where: str) -> None:
    """Refuses a head that would draft garbage for this target.

    Raises:
      CheckpointError: names the mismatch.
    """
    taps = config.taps or target.default_taps
    problems = []
    if config.vocab_size != target.vocab_size:
        problems.append(f"its vocabulary is {config.vocab_size}, the target's {target.vocab_size}")
    if config.target_hidden_size != target.hidden_size:
        problems.append(
            f"it taps states {config.target_hidden_size} wide, the target's are {target.hidden_size}"
        )
    elif fused_width != config.num_taps * config.target_hidden_size:
        problems.append(
            f"its fc takes {fused_width}, {config.num_taps} taps give {config.num_taps * target.hidden_size}"
        )
    if (
        len(taps) != config.num_taps
        or list(taps) != sorted(set(taps))
        or not 0 <= taps[0] <= taps[-1] < target.num_layers
    ):
        problems.append(
            f"its taps {taps} are not {config.num_taps} ascending layers of the target's {target.num_layers}"
        )
    if not config.own_embedding and config.hidden_size != target.hidden_size:
        problems.append("it has no embedding and its width differs from the target's")
    if not config.own_lm_head and (
        config.hidden_size != target.hidden_size or config.draft_vocab_size != target.vocab_size
    ):
        problems.append(
            "it has no lm_head and cannot share the target's (other width or vocabulary)"
        )
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < config.vocab_size:
        problems.append(f"its mask token id {config.mask_token_id} lies outside the vocabulary")
    if problems:
        raise CheckpointError(f"{where}: the head does not fit the target: " + "; ".join(problems))


def _rope_json(rope: RopeConfig) -> dict:
    if rope.scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": rope.scaling.factor,
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_max_position,
        },
    }


def _shape_json(config: TargetConfig | DrafterConfig, dtype: str) -> dict:
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
        **_rope_json(config.rope),
    }


def target_json(config: TargetConfig, dtype: str) -> dict:
    """config.json of a target, as its family's released files write it."""
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config.family]
    eos = list(config.eos_ids)
    return {
        "architectures": [architecture],
        "model_type": config.family,
        **_shape_json(config, dtype),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def _windows_json(windows: tuple[int | None, ...] | None) -> dict:
    widths = {width for width in windows or () if width is not None}
    if not widths:
        return {}
    if len(widths) > 1:
        raise CheckpointError(
            f"config.json holds one sliding window; the head has {sorted(widths)}"
        )
    types = ["full_attention" if width is None else "sliding_attention" for width in windows]
    return {"layer_types": types, "sliding_window": widths.pop(), "use_sliding_window": True}


def head_json(config: DrafterConfig, max_position: int, dtype: str) -> dict:
    """config.json of a head in the flat (AWS, SafeAILab) form."""
    raw = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **_shape_json(config, dtype),
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.num_taps,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        **_windows_json(config.sliding_windows),
    }
    if config.taps is not None:
        raw["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    if config.logit_scale != 1.0:
        raw["logit_scale"] = config.logit_scale
    if config.mask_token_id is not None:
        raw["ptd_token_id"] = config.mask_token_id
    if config.trained_num_draft is not None:
        raw["num_speculative_tokens"] = config.trained_num_draft
    return raw
