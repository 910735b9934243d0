"""`config.json` of a head <-> `DrafterConfig`, and the checks that head and target match.

Two shapes of file: flat (AWS, SafeAILab, SpecForge, ModelOpt, NeMo Automodel) and nested
(speculators: its `transformer_layer_config` holds the decoder's keys).

There are two conventions for tap ids. In ours, vLLM's and speculators', id i is the stream that
enters layer i; in the other, id i is the output of layer i, one less. Files written for SGLang
(SpecForge, ModelOpt; recognised by `eagle_config` or by SpecForge's P-EAGLE architecture) use
either. As in SGLang (sgl-project/sglang, pull request 25454), a first id of 1 means the second
convention, because the lowest tap of every head is the output of layer 1. The argument `taps`
overrides this.

`norm_before_residual` is false where a file does not state it: that is the default of speculators
(`models/eagle3/config.py`, for both methods) and of the flat layouts' models. speculators' files
state it; vLLM reads a nested EAGLE-3 file without it as true.
"""

from collections.abc import Sequence
from pathlib import Path

from peagle_jax.checkpoint.config_keys import HEAD_KEYS, read_keys, stray_keys
from peagle_jax.checkpoint.fields import Fields, read_config
from peagle_jax.checkpoint.rope_json import (
    FULL,
    rope_config,
    rope_json,
    stray_rope_keys,
    windows,
    windows_json,
)
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.checkpoint.target_json import check_quantization, decoder_fields, qwen_windows
from peagle_jax.checkpoint.target_writer import ARCHITECTURES, decoder_json
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.rope_config import DynamicScaling

_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_TYPES = ("eagle3", "peagle")
"""`speculators_model_type` of the heads that run here."""
_CLASSES = ("llama", "qwen3")
"""`model_type` of a speculators head's layers."""
_SPECFORGE_HEADS = ("PEagleDraftModel",)
_IDS = "eagle_aux_hidden_state_layer_ids"
_OWN_KEYS = {
    *_MASK_KEYS,
    _IDS,
    "eagle_config",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "transformer_layer_config",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "norm_output",
    "logit_scale",
    "num_speculative_tokens",
    "k_train",
    "num_depths",
    "embed_requires_grad",
    "tie_word_embeddings",
    "trained_length",
    "selector_rank",
    "selector_kind",
}
"""Keys of a head that say nothing about its layers."""
_BLOCK_KEYS = {
    "aux_hidden_state_layer_ids",
    "block_size",
    "confidence_head_with_markov",
    "conv_group_size",
    "conv_kernel_size",
    "dflash_config",
    "enable_confidence_head",
    "input_embedding_scale",
    "markov_head_type",
    "markov_rank",
    "num_anchors",
    "num_target_layers",
    "output_multiplier",
    "sample_from_anchor",
    "selector_top_k",
    "sliding_window_non_causal",
    "target_layer_ids",
}
"""The same of block drafters alone, see `block_json`."""


def _architecture(head: Fields) -> str:
    names = head.items("architectures", [])
    return str(names[0]) if names else ""


def _tap_ids(head: Fields, nested: bool) -> tuple[int, ...] | None:
    """Taps as ids of entered layers; None where the config leaves them to the target's default."""
    ids, for_sglang = head.ids(_IDS), _architecture(head) in _SPECFORGE_HEADS
    if not ids:
        ids, for_sglang = head.inner("eagle_config", {}).ids(_IDS), True
    if not ids:
        return None
    finished = for_sglang and not nested and ids[0] == 1
    return tuple(i + 1 for i in ids) if finished else ids


def _has_qk_norm(head: Fields, layers: Fields, nested: bool, tensors: set[str]) -> bool:
    """Whether the layers are Qwen3's. A flat `model_type` may be the target's (NeMo Automodel).

    speculators' default class is Llama's up to version 0.4 and Qwen3's later: then the tensors
    decide.
    """
    name = _architecture(head)
    if not nested and ("Qwen3ForCausalLM" in name or "Llama" in name):
        return "Llama" not in name
    if nested:
        layers.only("model_type", *_CLASSES)
        if layers.get("model_type") is None:
            return any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    return layers.get("model_type") == "qwen3"


def _windows(layers: Fields, keys: dict, qk_norm: bool) -> tuple[int | None, ...] | None:
    if qk_norm:
        return qwen_windows(layers, keys)
    types = keys["layer_types"] or []
    if all(kind == FULL for kind in types):
        return None  # a flat file may have its target's list, which is longer
    return windows(layers, types, keys["num_hidden_layers"], keys["sliding_window"])


def _trained_num_draft(head: Fields) -> int | None:
    """Depth of training by the key of each trainer: ours, AWS's, NeMo Automodel's, speculators'."""
    for key in ("num_speculative_tokens", "k_train", "num_depths"):
        if head.get(key) is not None:
            return head.count(key)
    methods = head.inner("speculators_config", {}).items("proposal_methods", [])
    if not methods or not isinstance(methods[0], dict):
        return None
    first = Fields(methods[0], head.where)
    return first.count("speculative_tokens") if first.get("speculative_tokens") else None


def _biases(layers: Fields, tensors: set[str]) -> tuple[bool, bool]:
    """Whether q, k and v have biases, and the output.

    vLLM's heads bias q, k and v only, those built from transformers' attention all four.
    """
    held = {p for p in "qkvo" if any(n.endswith(f"self_attn.{p}_proj.bias") for n in tensors)}
    stated = layers.get("attention_bias")
    if stated is None:
        return bool(held - {"o"}), "o" in held
    return layers.flag("attention_bias"), stated and "o" in held


def _check_promises(head: Fields, layers: Fields, tensors: set[str]) -> None:
    """Checks that the file has the tensors that config.json promises; otherwise drafts would be
    garbage.

    Raises:
      CheckpointError: something is missing.
    """
    states_mask = any(head.get(key) is not None for key in _MASK_KEYS)
    if states_mask and "mask_hidden" not in tensors:
        raise head.error(
            "config.json names a mask token but the file holds no mask_hidden; "
            "the head cannot draft in parallel"
        )
    if "mask_hidden" in tensors and not states_mask:
        raise head.error(
            "the file holds mask_hidden but config.json names no mask token id "
            f"({', '.join(_MASK_KEYS)})"
        )
    _check_type(head, tensors)
    for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if (head.get(flag) or layers.get(flag)) and name not in tensors:
            raise head.error(f"config.json says {flag} but the file holds no {name}")
        if head.get(flag, layers.get(flag)) is False and name in tensors:
            raise head.error(f"config.json says {flag} false but the file holds {name}")
    if head.inner("eagle_config", {}).get("use_aux_hidden_state") is False:
        raise head.error(
            "eagle_config says use_aux_hidden_state false: this head takes the target's last "
            "state, and only heads that tap layers are supported"
        )


def _check_type(head: Fields, tensors: set[str]) -> None:
    """speculators' names of the method.

    Raises:
      CheckpointError: another method than EAGLE-3 and P-EAGLE, or not the one that the tensors
        show.
    """
    head.only("selector_kind", "pairs")
    head.only("speculators_model_type", *_TYPES)
    speculators = head.inner("speculators_config", {})
    speculators.only("algorithm", *_TYPES)
    shown = "peagle" if "mask_hidden" in tensors else "eagle3"
    for source, key in ((head, "speculators_model_type"), (speculators, "algorithm")):
        if source.get(key) not in (None, shown):
            has = "holds" if shown == "peagle" else "holds no"
            raise head.error(f"{key} is {source.get(key)!r} but the file {has} mask_hidden")


def head_unread_keys(raw: dict, *, is_block: bool) -> list[str]:
    """Keys of a head's config.json that no table lists and that have no effect, sorted.

    Args:
      is_block: whether the head is a block drafter.
    """
    own = _OWN_KEYS | (_BLOCK_KEYS if is_block else set())
    layers = raw.get("transformer_layer_config")
    known = {*HEAD_KEYS["llama"], *HEAD_KEYS["qwen3"]}
    if not isinstance(layers, dict):
        return sorted({*stray_keys(raw, known | own), *stray_rope_keys(raw)})
    inner = {*stray_keys(layers, known | own), *stray_rope_keys(layers)}
    return sorted([*stray_keys(raw, own), *(f"transformer_layer_config.{key}" for key in inner)])


def drafter_config(
    folder: Path,
    target: TargetConfig,
    tensors: set[str],
    fused_width: int,
    taps: Sequence[int] | None = None,
) -> DrafterConfig:
    """DrafterConfig of a head folder in any of the layouts.

    Args:
      folder: holds config.json.
      target: the model the head will draft for.
      tensors: names in its file (without a `model.` prefix): they decide what the head owns.
      fused_width: input width of its `fc`.
      taps: ids of entered layers, in place of those in config.json.
    Raises:
      CheckpointError: the config is incomplete, or the head does not fit the target.
    """
    head = Fields(read_config(folder), str(folder))
    nested = head.get("transformer_layer_config") is not None
    layers = head.inner("transformer_layer_config") if nested else head
    _check_promises(head, layers, tensors)
    check_quantization(head)
    taps = tuple(taps) if taps is not None else _tap_ids(head, nested)
    qk_norm = _has_qk_norm(head, layers, nested, tensors)
    keys = read_keys(layers, HEAD_KEYS["qwen3" if qk_norm else "llama"])
    common = decoder_fields(layers, keys)
    masks = [head.count(key, least=0) for key in _MASK_KEYS if head.get(key) is not None]
    common["attention_bias"], output_bias = _biases(layers, tensors)
    try:
        config = DrafterConfig(
            method="peagle" if "mask_hidden" in tensors else "eagle3",
            **common,
            rope=rope_config(layers, max_position=keys["max_position_embeddings"]),
            draft_vocab_size=head.count("draft_vocab_size", common["vocab_size"]),
            target_hidden_size=head.count(
                "target_hidden_size", layers.count("target_hidden_size", target.hidden_size)
            ),
            num_taps=head.count("num_aux_hidden_states", len(taps or (0, 0, 0))),
            taps=taps,
            mask_token_id=masks[0] if masks else None,
            qk_norm=qk_norm,
            output_bias=output_bias,
            mlp_bias=keys.get("mlp_bias", False),
            norm_before_fc="input_norm.weight" in tensors,
            fc_norm="fc_norm.0.weight" in tensors,
            norm_before_residual=head.flag("norm_before_residual"),
            norm_output=head.flag("norm_output"),
            own_embedding="embed_tokens.weight" in tensors,
            own_lm_head="lm_head.weight" in tensors,
            sliding_windows=_windows(layers, keys, qk_norm),
            logit_scale=head.number("logit_scale", 1.0, positive=True),
            trained_num_draft=_trained_num_draft(head),
            trained_length=head.count("trained_length") if head.get("trained_length") else None,
            selector_rank=head.count("selector_rank", 0, least=0),
        )
    except CheckpointError:
        raise
    except ConfigError as error:
        raise head.error(str(error)) from error
    dynamic = isinstance(config.rope.scaling, DynamicScaling)
    if dynamic and keys["max_position_embeddings"] < target.max_position:
        raise head.error(
            "rope_type dynamic in a head with fewer max_position_embeddings than its target's "
            f"{target.max_position} is not supported"
        )
    check_fit(config, target, fused_width, str(folder))
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
            f"it taps states {config.target_hidden_size} wide, the target's are "
            f"{target.hidden_size}"
        )
    elif fused_width != config.num_taps * config.target_hidden_size:
        problems.append(
            f"its fc takes {fused_width}, {config.num_taps} taps give "
            f"{config.num_taps * target.hidden_size}"
        )
    if (
        len(taps) != config.num_taps
        or list(taps) != sorted(set(taps))
        or not 0 <= taps[0] <= taps[-1] <= target.num_layers
    ):
        problems.append(
            f"its taps {taps} are not {config.num_taps} ascending ids from 0 to "
            f"{target.num_layers}, the streams entering the target's layers and the one leaving "
            "the last"
            + ("" if config.taps else "; its config.json names none, so give them by --taps")
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


def head_json(config: DrafterConfig, max_position: int, dtype: str) -> dict:
    """config.json of a head in the flat (AWS, SafeAILab) form."""
    raw = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **decoder_json(config, dtype),
        **rope_json(config.rope),
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.num_taps,
        "mlp_bias": config.mlp_bias,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        **windows_json(config.sliding_windows),
    }
    if config.taps is not None:
        raw[_IDS] = list(config.taps)
    if config.logit_scale != 1.0:
        raw["logit_scale"] = config.logit_scale
    if config.mask_token_id is not None:
        raw["ptd_token_id"] = config.mask_token_id
    if config.trained_num_draft is not None:
        raw["num_speculative_tokens"] = config.trained_num_draft
    if config.trained_length is not None:
        raw["trained_length"] = config.trained_length
    if config.selector_rank:
        raw["selector_rank"] = config.selector_rank
    return raw


def speculators_config(config: DrafterConfig, target: TargetConfig) -> dict:
    """`speculators_config` of a head; `target` is its verifier."""
    depth = config.trained_num_draft or 7
    proposal = dict(
        proposal_type="greedy", speculative_tokens=depth, accept_tolerance=0.0, verifier_accept_k=1
    )
    return {
        "algorithm": config.method,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"architectures": [ARCHITECTURES[target.family]], "name_or_path": None},
    }


def speculators_json(config: DrafterConfig, target: TargetConfig, dtype: str) -> dict:
    """config.json of a head in the nested form of speculators; `target` is its verifier."""
    is_peagle = config.method == "peagle"
    return {
        "architectures": ["PEagleDraftModel" if is_peagle else "Eagle3DraftModel"],
        "speculators_model_type": config.method,
        "speculators_config": speculators_config(config, target),
        "transformer_layer_config": {
            "model_type": "qwen3" if config.qk_norm else "llama",
            **decoder_json(config, dtype),
            **rope_json(config.rope),
            "max_position_embeddings": target.max_position,
            "mlp_bias": config.mlp_bias,
            "tie_word_embeddings": False,
            **windows_json(config.sliding_windows),
        },
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps or target.default_taps),
        "target_hidden_size": config.target_hidden_size,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **({"mask_token_id": config.mask_token_id} if is_peagle else {}),
    }
