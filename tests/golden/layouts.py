"""The golden heads as other trainers would have saved them.

These layouts differ from speculators' by names, shapes and config.json alone, so their logits are
those of the source head and no weights are committed for them: a test converts, loads and compares
with expected/SOURCE.safetensors. Only the standard library and numpy, so that tests of the project
and make_golden.py can both import this file; `tensors` may map to any kind of array.

What differs in numbers has a checkpoint of its own: `peagle-bias` (biases, a norm for each tap) and
`peagle-shared` (neither embedding nor lm_head).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Head = tuple[dict, dict]
"""config.json, and the file's tensors by name."""

NOT_INNER = ("lm_head.weight", "d2t", "t2d", "mask_hidden")
"""Tensors that NeMo Automodel holds beside its inner `model`, so without that prefix."""


def flat_llama(config: dict, *drop: str, **changes) -> dict:
    """A flat Llama config.json of transformers 4 from speculators' nested one of transformers 5."""
    inner = dict(config["transformer_layer_config"])
    rope = dict(inner.pop("rope_parameters"))
    scaled = rope["rope_type"] != "default"
    flat = inner | dict(
        architectures=["LlamaForCausalLM"],
        draft_vocab_size=config["draft_vocab_size"],
        model_type="llama",
        rope_scaling={k: x for k, x in rope.items() if k != "rope_theta"} if scaled else None,
        rope_theta=rope["rope_theta"],
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.51.0",
    )
    return {key: value for key, value in (flat | changes).items() if key not in drop}


def midlayer(tensors: dict) -> dict:
    """Layer 0 under the name that EAGLE-3 gave it."""
    return {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}


def without_embedding(tensors: dict) -> dict:
    return {name: x for name, x in tensors.items() if name != "embed_tokens.weight"}


def aws(config: dict, tensors: dict) -> Head:
    """amazon/GPT-OSS-20B-P-EAGLE: `midlayer` and `layers.1` to `layers.3`, no tap ids, the mask
    token as `ptd_token_id`, and for a full vocabulary d2t all zeros and t2d all true."""
    vocabulary = config["draft_vocab_size"]
    identity = {"d2t": np.zeros(vocabulary, np.int64), "t2d": np.ones(vocabulary, bool)}
    raw = flat_llama(config, ptd_token_id=config["mask_token_id"])
    return raw, midlayer(tensors) | identity


def specforge_peagle(config: dict, tensors: dict) -> Head:
    """SpecForge's P-EAGLE: layers from 0, no mask token, which people add to serve."""
    raw = flat_llama(
        config,
        architectures=["PEagleDraftModel"],
        mask_token_id=config["mask_token_id"],
        sliding_window=None,
        use_sliding_window=False,
    )
    return raw, dict(tensors)


def safeailab(config: dict, tensors: dict) -> Head:
    """yuhuili/EAGLE3-*: no embedding, and neither head_dim nor any rope key in the config: the head
    dimension is hidden/heads and theta 10000."""
    raw = flat_llama(
        config, "head_dim", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias",
        architectures=["LlamaForCausalLMEagle3"], torch_dtype="float16",
        transformers_version="4.28.1", pad_token_id=0,
    )  # fmt: skip
    return raw, midlayer(without_embedding(tensors))


def specforge_eagle3(config: dict, tensors: dict) -> Head:
    """SpecForge's EAGLE-3: tap ids of finished layers, one less than speculators'."""
    finished = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]
    raw = flat_llama(
        config,
        architectures=["LlamaForCausalLMEagle3"],
        eagle_config={"eagle_aux_hidden_state_layer_ids": finished},
    )
    return raw, midlayer(without_embedding(tensors))


def automodel(config: dict, tensors: dict) -> Head:
    """NeMo Automodel's P-EAGLE: `model.` before the names of its inner module.

    config.json is the target's with the head's keys put in. So `model_type` is the target's, here
    qwen3, though the head is a Llama without q and k norms; `architectures` alone says that.
    """
    inner = config["transformer_layer_config"]
    methods = config["speculators_config"]["proposal_methods"]
    raw = inner | dict(
        architectures=["LlamaEagle3DraftModel"],
        attn_implementation="eager",
        down_sample_ratio=0.7,
        down_sample_ratio_min=0.2,
        draft_vocab_size=config["draft_vocab_size"],
        dtype="bfloat16",
        fc_norm=config["fc_norm"],
        layer_types=["full_attention"] * inner["num_hidden_layers"],
        mask_token_id=config["mask_token_id"],
        max_window_layers=8,
        model_type="qwen3",
        norm_output=config["norm_output"],
        num_depths=methods[0]["speculative_tokens"],
        parallel_drafting=True,
        sliding_window=None,
        target_hidden_size=inner["hidden_size"],
        use_sliding_window=False,
    )
    raw.pop("mlp_bias")  # Qwen3's config has no such key
    prefixed = {n if n in NOT_INNER else f"model.{n}": x for n, x in tensors.items()}
    return raw, prefixed


def mask_of_shape(*shape: int) -> Callable[[dict, dict], Head]:
    """speculators' layout with `mask_hidden` of another shape than [1, 1, X]."""
    return lambda config, tensors: (
        dict(config),
        tensors | {"mask_hidden": tensors["mask_hidden"].reshape(*shape)},
    )


def zlab(config: dict, tensors: dict) -> Head:
    """z-lab's DFlash: a flat Qwen3 config; block size and mask token in `dflash_config`."""
    inner = config["transformer_layer_config"]
    moved = ("mask_token_id", "block_size", "conv_kernel_size", "conv_group_size")
    options = {k: config[k] for k in (*moved, "selector_rank", "selector_top_k") if k in config}
    options["target_layer_ids"] = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    raw = inner | dict(
        architectures=config["architectures"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        dflash_config=options,
        draft_vocab_size=config["draft_vocab_size"],
        num_target_layers=8,
    )
    if "conv_kernel_size" in config:
        raw["is_causal"] = False
    return raw, tensors


def deepspec(config: dict, tensors: dict) -> Head:
    """DeepSpec's DSpark: a flat Qwen3 config with the target's keys, ids of finished layers."""
    inner = config["transformer_layer_config"]
    kept = ("mask_token_id", "block_size", "markov_rank", "markov_head_type", "draft_vocab_size")
    raw = inner | {key: config[key] for key in kept}
    raw |= dict(
        architectures=["Qwen3DSparkModel"],
        confidence_head_with_markov=True,
        enable_confidence_head=True,
        num_anchors=512,
        num_target_layers=8,
        target_layer_ids=[i - 1 for i in config["aux_hidden_state_layer_ids"]],
    )
    return raw, tensors


@dataclass(frozen=True)
class Layout:
    """`convert(config, tensors)` of the golden head `source`, in speculators' layout, gives a head
    in this layout with the logits of expected/SOURCE.safetensors."""

    source: str
    convert: Callable[[dict, dict], Head]


LAYOUTS = {
    "aws-peagle": Layout("peagle-4", aws),
    "specforge-peagle": Layout("peagle-pruned", specforge_peagle),
    "safeailab-eagle3": Layout("eagle3", safeailab),
    "specforge-eagle3": Layout("eagle3", specforge_eagle3),
    "automodel-peagle": Layout("peagle-bias", automodel),
    "mask-hidden-2d": Layout("peagle-1", mask_of_shape(1, -1)),
    "mask-hidden-1d": Layout("peagle-1", mask_of_shape(-1)),
}

BLOCK_LAYOUTS = {
    "zlab-dflash": Layout("dflash", zlab),
    "zlab-dflash2": Layout("dflash2", zlab),
    "deepspec-dspark": Layout("dspark", deepspec),
}
"""Of block drafters."""
