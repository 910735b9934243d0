"""`config.json` of a block drafter <-> `DrafterConfig`.

Three forms: flat with a `dflash_config` (`DFlashDraftModel`, `DFlash2DraftModel`), flat without one
(DeepSpec's `Qwen3DSparkModel`), and nested (speculators' `dflash`, `dflash2` and `dspark`). The
first two name layers whose output is tapped, `target_layer_ids`; speculators' ids are those of
entered layers, one more.

Where a file does not say whether the rows of a block see later ones, those of layers with a sliding
window do not, as in vLLM.
"""

from collections.abc import Sequence
from pathlib import Path

from peagle_jax.checkpoint.config_keys import HEAD_KEYS, read_keys
from peagle_jax.checkpoint.fields import Fields, read_config
from peagle_jax.checkpoint.head_json import check_fit, speculators_config
from peagle_jax.checkpoint.rope_json import rope_config, rope_json, windows_json
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.checkpoint.target_json import check_quantization, decoder_fields, qwen_windows
from peagle_jax.checkpoint.target_writer import decoder_json
from peagle_jax.config import BlockConfig, ConfigError, DrafterConfig, TargetConfig
from peagle_jax.method.selector import CANDIDATES

_SPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "dspark")
_NAMES = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator", "dflash", "dflash2", *_SPARK)
"""`architectures` and `speculators_model_type` of the block drafters that run here."""
_UNSUPPORTED = {
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "use_swa": (False,),
    "is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "fc_norm": (False,),
    "norm_before_fc": (False,),
    "markov_head_type": ("vanilla",),
    "selector_top_k": (CANDIDATES,),
    "final_logit_softcapping": (0, 0.0),
}
"""Keys of variants, and the values that run."""


def is_block(tensors: set[str]) -> bool:
    """Whether tensors with these names are a block drafter's."""
    return "hidden_norm.weight" in tensors


def block_head_config(
    folder: Path,
    target: TargetConfig,
    tensors: set[str],
    fused_width: int,
    taps: Sequence[int] | None = None,
) -> DrafterConfig:
    """As `head_json.drafter_config`, of a block drafter."""
    head = Fields(read_config(folder), str(folder))
    nested = head.get("transformer_layer_config") is not None
    # Keys stand in `dflash_config` or beside it, depending on the age of the file.
    options = Fields(head.raw | head.inner("dflash_config", {}).raw, head.where)
    layers = head.inner("transformer_layer_config") if nested else head
    layers = Fields({k: v for k, v in layers.raw.items() if k != "is_causal"}, head.where)
    name = _check(options, folder)
    check_quantization(head)
    keys = read_keys(layers, HEAD_KEYS["qwen3"])
    common = decoder_fields(layers, keys)
    block_size = options.count("block_size", least=2)
    sliding = qwen_windows(layers, keys)
    scale = 1.0 if nested or "embed_tokens.weight" in tensors else target.embedding_scale
    from_newest = options.flag("sample_from_anchor", name in _SPARK)
    try:
        config = DrafterConfig(
            method="dflash",
            **common,
            rope=rope_config(layers, max_position=keys["max_position_embeddings"]),
            draft_vocab_size=options.count("draft_vocab_size", common["vocab_size"]),
            target_hidden_size=options.count("target_hidden_size", target.hidden_size),
            num_taps=fused_width // target.hidden_size,
            taps=tuple(taps) if taps is not None else _taps(options),
            mask_token_id=options.count("mask_token_id", least=0),
            qk_norm=True,
            output_bias=common["attention_bias"],
            own_embedding="embed_tokens.weight" in tensors,
            own_lm_head="lm_head.weight" in tensors,
            sliding_windows=sliding,
            logit_scale=options.number("output_multiplier", keys["logit_scale"], positive=True),
            trained_num_draft=block_size - (not from_newest),
            trained_length=head.count("trained_length") if head.get("trained_length") else None,
            selector_rank=options.count("selector_rank", 0, least=0),
            block=BlockConfig(
                causal=_causal(options, name, sliding or (None,) * common["num_layers"]),
                drafts_from_newest=from_newest,
                conv_taps=options.count("conv_kernel_size", 0, least=0, most=block_size),
                conv_group=options.count("conv_group_size", 0, least=0),
                markov_rank=options.count("markov_rank", 0, least=0),
                embedding_scale=options.number("input_embedding_scale", scale, positive=True),
            ),
        )
    except CheckpointError:
        raise
    except ConfigError as error:
        raise head.error(str(error)) from error
    check_fit(config, target, fused_width, str(folder))
    return config


def _check(options: Fields, folder: Path) -> str:
    """The architecture or speculators' type of the head.

    Raises:
      CheckpointError: it is another one, or has something that does not run here.
    """
    names = [*map(str, options.items("architectures", [])), options.get("speculators_model_type")]
    names = [name for name in names if name is not None]
    if unknown := [name for name in names if name not in _NAMES]:
        raise options.error(f"the block drafter {unknown[0]!r} is not supported")
    for key, accepted in _UNSUPPORTED.items():
        options.only(key, *accepted)
    if (folder / "mask_embedding.pt").exists():
        raise options.error("mask_embedding.pt is not supported: the mask is a token's embedding")
    return names[-1] if names else ""


def _taps(options: Fields) -> tuple[int, ...]:
    """Ids of entered layers."""
    if ids := options.ids("aux_hidden_state_layer_ids"):
        return ids
    if ids := options.ids("target_layer_ids", least=-1):  # -1: the embedding
        return tuple(i + 1 for i in ids)
    raise options.error(
        "config.json states neither target_layer_ids nor aux_hidden_state_layer_ids; give the "
        "head's taps by --taps"
    )


def _causal(options: Fields, name: str, sliding: Sequence[int | None]) -> tuple[bool, ...]:
    for key in ("is_causal", "causal"):
        if options.get(key) is not None:
            return (options.flag(key),) * len(sliding)
    sees_later = options.flag("sliding_window_non_causal", name == "dflash2")
    return tuple(window is not None and not sees_later for window in sliding)


def block_head_json(config: DrafterConfig, max_position: int, dtype: str) -> dict:
    """config.json in the form of `DFlashDraftModel`, `DFlash2DraftModel` or `Qwen3DSparkModel`."""
    block = config.block
    kind = "DFlash2DraftModel" if block.conv_taps else "DFlashDraftModel"
    options = {
        "block_size": config.trained_num_draft + (not block.drafts_from_newest),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [i - 1 for i in config.taps],
        "sample_from_anchor": block.drafts_from_newest,
        "output_multiplier": config.logit_scale,
        "input_embedding_scale": block.embedding_scale,
    }
    if block.conv_taps:
        options |= {"conv_kernel_size": block.conv_taps, "conv_group_size": block.conv_group}
    if config.selector_rank:
        options |= {"selector_rank": config.selector_rank, "selector_top_k": CANDIDATES}
    if is_spark := block.markov_rank > 0:
        kind = "Qwen3DSparkModel"
        options |= {"markov_rank": block.markov_rank, "markov_head_type": "vanilla"}
        options |= {"enable_confidence_head": False}
    causal = {"is_causal": block.causal[0]} if len(set(block.causal)) == 1 else {}
    return {
        "architectures": [kind],
        **_layers_json(config, max_position, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        **causal,
        **({"trained_length": config.trained_length} if config.trained_length else {}),
        **(options if is_spark else {"dflash_config": options}),
    }


def block_speculators_json(config: DrafterConfig, target: TargetConfig, dtype: str) -> dict:
    """config.json in the form of speculators' `dflash`, or `dspark` with a Markov head.

    Raises:
      CheckpointError: the head has convolutions, for which this form has no name.
    """
    block = config.block
    if block.conv_taps:
        raise CheckpointError("speculators' layout has no convolutions: write the head as it is")
    kind = "dspark" if block.markov_rank else "dflash"
    sliding = config.sliding_windows or ()
    causal = any(c for c, w in zip(block.causal, sliding, strict=False) if w is not None)
    raw = {
        "architectures": ["DSparkDraftModel" if block.markov_rank else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": speculators_config(config, target) | {"algorithm": kind},
        "transformer_layer_config": _layers_json(config, target.max_position, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.trained_num_draft + (not block.drafts_from_newest),
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(config.taps),
        "sample_from_anchor": block.drafts_from_newest,
        "sliding_window_non_causal": not causal,
        "dtype": dtype,
    }
    if block.markov_rank:
        raw |= {"markov_rank": block.markov_rank, "markov_head_type": "vanilla"}
        raw |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    return raw


def _layers_json(config: DrafterConfig, max_position: int, dtype: str) -> dict:
    return {
        "model_type": "qwen3",
        **decoder_json(config, dtype),
        **rope_json(config.rope),
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
        **windows_json(config.sliding_windows),
    }
