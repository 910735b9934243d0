"""Tables of tensor names: one per target family and one for heads.

`target_layout` and `head_layout` map the tensors of a file to parameters, by headers alone.
`target_tensors` and `head_tensors` list the tensors of an unquantised checkpoint of a config.

Row order of fused matrices: `gate_up` is gate, up; `qkv` is q, k, v.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
from flax import nnx

from peagle_jax.checkpoint.layout import Layout, Path, Table
from peagle_jax.checkpoint.safetensors import Headers, TensorInfo
from peagle_jax.checkpoint.transforms import Deinterleave, Merge, Transpose
from peagle_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from peagle_jax.method.draft_head import selector_class

_OTHER_TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")


def _attention(
    table: Table, path: Path, base: str, config: AttentionConfig, widths: tuple[int, int]
) -> None:
    """`widths` = (input, output): equal except in layer 0 of a head."""
    inputs, outputs = widths
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = (heads, kv) if config.shared_kv else (heads, kv, kv)
    qkv = [f"{base}.{p}_proj" for p in "qkv"[: len(rows)]]
    out = [f"{base}.o_proj"]
    table.linear((*path, "qkv"), qkv, rows, inputs)
    table.linear((*path, "out"), out, (outputs,), heads)
    if config.bias:
        table.bias((*path, "qkv"), qkv, rows)
    if config.output_bias:
        table.bias((*path, "out"), out, (outputs,))
    if config.qk_norm:
        for p in "qk":
            table.vector((*path, f"{p}_norm", "weight"), f"{base}.{p}_norm.weight", config.head_dim)
    if config.sinks:
        table.vector((*path, "sinks"), f"{base}.sinks", config.num_heads)


def _mlp(table: Table, path: Path, base: str, D: int, F: int, *, bias: bool = False) -> None:
    gate_up, down = [f"{base}.gate_proj", f"{base}.up_proj"], [f"{base}.down_proj"]
    table.linear((*path, "gate_up"), gate_up, (F, F), D)
    table.linear((*path, "down"), down, (D,), F)
    if bias:
        table.bias((*path, "gate_up"), gate_up, (F, F))
        table.bias((*path, "down"), down, (D,))


def _qwen3_experts(table: Table, path: Path, base: str, config: TargetConfig) -> None:
    """Experts one by one: gate_proj and up_proj [F, D], down_proj [D, F]."""
    E, D, F = config.experts.num_experts, config.hidden_size, config.intermediate_size
    expert = [f"{base}.experts.{i}" for i in range(E)]
    table.plain((*path, "router", "weight"), [f"{base}.gate.weight"], (E, D))
    gate_up = [f"{prefix}.{part}_proj" for prefix in expert for part in ("gate", "up")]
    table.experts((*path, "gate_up"), gate_up, (2,), (F, D))
    table.experts((*path, "down"), [f"{prefix}.down_proj" for prefix in expert], (), (D, F))


def _gpt_oss_experts(table: Table, path: Path, base: str, config: TargetConfig) -> None:
    """Experts stacked, gate and up interleaved: MXFP4 row by row, or unquantised and transposed."""
    E, D, F = config.experts.num_experts, config.hidden_size, config.intermediate_size
    table.plain((*path, "router", "weight"), [f"{base}.router.weight"], (E, D))
    table.vector((*path, "router", "bias"), f"{base}.router.bias", E)
    gate_up, down = f"{base}.experts.gate_up_proj", f"{base}.experts.down_proj"
    if table.has(f"{gate_up}_blocks") or table.has(f"{down}_blocks"):
        made, kept = Deinterleave(), Merge(axes=2)
        table.packed(
            (*path, "gate_up", "weight"), f"{gate_up}_blocks", (E, 2 * F, D // 32, 16), made
        )
        table.packed((*path, "gate_up", "scale"), f"{gate_up}_scales", (E, 2 * F, D // 32), made)
        table.packed((*path, "down", "weight"), f"{down}_blocks", (E, D, F // 32, 16), kept)
        table.packed((*path, "down", "scale"), f"{down}_scales", (E, D, F // 32), Merge(axes=1))
    else:
        split = Deinterleave(transposed=True)
        table.plain((*path, "gate_up", "weight"), [gate_up], (E, D, 2 * F), transform=split)
        table.plain((*path, "down", "weight"), [down], (E, F, D), transform=Transpose())
    bias = Deinterleave()
    table.plain((*path, "gate_up", "bias"), [f"{gate_up}_bias"], (E, 2 * F), transform=bias)
    table.plain((*path, "down", "bias"), [f"{down}_bias"], (E, D))


def _block(table: Table, i: int, base: str, config: TargetConfig) -> None:
    """All but Gemma; they differ in their attention's config and in the MLP."""
    path, D = ("layers", i), config.hidden_size
    table.vector((*path, "input_norm", "weight"), f"{base}.input_layernorm.weight", D)
    attention = config.attention(i)
    _attention(table, (*path, "attention"), f"{base}.self_attn", attention, (D, D))
    table.vector((*path, "post_norm", "weight"), f"{base}.post_attention_layernorm.weight", D)
    mlp = (table, (*path, "mlp"), f"{base}.mlp")
    if config.family == "gpt_oss":
        _gpt_oss_experts(*mlp, config)
    elif config.is_sparse(i):
        _qwen3_experts(*mlp, config)
    else:
        _mlp(*mlp, D, config.mlp_size(i), bias=config.mlp_bias)


_GEMMA4_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def _gemma4_block(table: Table, i: int, base: str, config: TargetConfig) -> None:
    path, D = ("layers", i), config.hidden_size
    for ours, theirs in _GEMMA4_NORMS.items():
        table.vector((*path, ours, "weight"), f"{base}.{theirs}.weight", D)
    attention = config.attention(i)
    _attention(table, (*path, "attention"), f"{base}.self_attn", attention, (D, D))
    _mlp(table, (*path, "mlp"), f"{base}.mlp", D, config.intermediate_size)
    table.flat((*path, "layer_scalar"), f"{base}.layer_scalar", 1)


def _without_head(tensors: Collection[str]) -> bool:
    """Whether these are the names of a model without its head, as transformers' `AutoModel` saves
    it."""
    return "embed_tokens.weight" in tensors


def _target(table: Table, config: TargetConfig, base: str) -> None:
    V, D = config.vocab_size, config.hidden_size
    block = _gemma4_block if config.family == "gemma4" else _block
    table.plain(("embed", "weight"), [f"{base}.embed_tokens.weight"], (V, D))
    for i in range(config.num_layers):
        block(table, i, f"{base}.layers.{i}", config)
    table.vector(("norm", "weight"), f"{base}.norm.weight", D)
    if not config.tie_embeddings:
        table.plain(("lm_head", "weight"), ["lm_head.weight"], (V, D))


def _base(config: TargetConfig, tensors: Collection[str]) -> str:
    """The common prefix of a target's tensor names."""
    wrapped = config.family == "gemma4" and any(
        n.startswith("model.language_model.") for n in tensors
    )
    return "model.language_model" if wrapped else "model"


def as_tied(config: TargetConfig, checkpoint: Headers) -> TargetConfig:
    """`config`, whose `tie_embeddings` is False if the file holds an lm_head that differs from the
    embedding.

    transformers does the same: it ties two weights that are both in a file only where they are
    equal. Reads both tensors if config.json ties them; their bytes are compared, so one of another
    dtype differs.
    """
    names = f"{_base(config, checkpoint.tensors)}.embed_tokens.weight", "lm_head.weight"
    has_both = config.tie_embeddings and all(name in checkpoint for name in names)
    if has_both and not checkpoint.same_bytes(*names):
        return replace(config, tie_embeddings=False)
    return config


def target_layout(config: TargetConfig, tensors: Mapping[str, TensorInfo]) -> Layout:
    """The layout of a target's parameters in `tensors`.

    Args:
      config: from `as_tied`; the lm_head of a tied config is dropped.
    Raises:
      CheckpointError: a tensor's shape or dtype contradicts the config or the tensors it is fused
        with.
    """
    table = Table(tensors)
    if _without_head(tensors):
        table = Table(tensors, rename=lambda name: name.removeprefix("model."))
    _target(table, config, _base(config, tensors))

    def drop(name: str) -> str | None:
        if config.tie_embeddings and name == "lm_head.weight":
            return "it is the embedding, to which the config ties it"
        tower = name.removeprefix("model.").split(".")[0]
        if config.family == "gemma4" and tower in _OTHER_TOWERS:
            return "only the text model is used"
        return None

    return table.layout(drop)


def target_tensors(config: TargetConfig, dtype: np.dtype) -> dict[str, TensorInfo]:
    """The tensors of an unquantised checkpoint in `dtype`, as transformers names them."""
    table = Table({}, invent=np.dtype(dtype))
    _target(table, config, "model")
    return table.invented


def _head_layer(table: Table, i: int, path: Path, base: str, config: DrafterConfig) -> None:
    D = config.hidden_size
    table.vector((*path, "input_norm", "weight"), f"{base}.input_layernorm.weight", D)
    if i == 0:
        table.vector((*path, "hidden_norm", "weight"), f"{base}.hidden_norm.weight", D)
    widths = (2 * D if i == 0 else D, D)
    attention = config.attention(i)
    _attention(table, (*path, "attention"), f"{base}.self_attn", attention, widths)
    table.vector((*path, "post_norm", "weight"), f"{base}.post_attention_layernorm.weight", D)
    mlp = (table, (*path, "mlp"), f"{base}.mlp")
    _mlp(*mlp, D, config.intermediate_size, bias=config.mlp_bias)


def _block_layers(table: Table, config: DrafterConfig) -> None:
    """Layers of a block drafter, and what it has beside them."""
    D, V, block = config.hidden_size, config.vocab_size, config.block
    table.vector(("context_norm", "weight"), "hidden_norm.weight", D)
    for i in range(config.num_layers):
        path, base = ("layers", i), f"layers.{i}"
        table.vector((*path, "input_norm", "weight"), f"{base}.input_layernorm.weight", D)
        _attention(table, (*path, "attention"), f"{base}.self_attn", config.attention(i), (D, D))
        table.vector((*path, "post_norm", "weight"), f"{base}.post_attention_layernorm.weight", D)
        _mlp(table, (*path, "mlp"), f"{base}.mlp", D, config.intermediate_size)
        for conv in ("attention_conv", "mlp_conv") if block.conv_taps else ():
            table.plain(
                (*path, conv, "base"), [f"{base}.{conv}.base_kernel"], (2, block.conv_taps, D)
            )
            table.plain(
                (*path, conv, "delta", "weight"),
                [f"{base}.{conv}.kernel_projection.weight"],
                (2 * block.conv_taps * (D // block.conv_group), D),
            )
    if (rank := config.selector_rank) > 0:
        for part, name in (("before", "predecessor"), ("after", "successor")):
            name = f"candidate_selector.{name}_codebook"
            name = f"{name}.weight" if table.has(f"{name}.weight") else name
            table.plain(("selector", part), [name], (V, rank))
        hidden = ["candidate_selector.hidden_projection.weight"]
        table.plain(("selector", "hidden", "weight"), hidden, (rank, D))
    if (rank := block.markov_rank) > 0:
        table.plain(("markov_before", "weight"), ["markov_head.markov_w1.weight"], (V, rank))
        rows = config.draft_vocab_size
        table.plain(("markov_after", "weight"), ["markov_head.markov_w2.weight"], (rows, rank))


def _head(table: Table, config: DrafterConfig, first: str) -> None:
    D, width = config.hidden_size, config.target_hidden_size
    fused = config.num_taps * width
    if config.own_embedding:
        table.plain(("embed", "weight"), ["embed_tokens.weight"], (config.vocab_size, D))
    if config.norm_before_fc:
        table.vector(("input_norm", "weight"), "input_norm.weight", fused)
    for i in range(config.num_taps if config.fc_norm else 0):
        table.vector(("fc_norm", i, "weight"), f"fc_norm.{i}.weight", width)
    table.plain(("fc", "weight"), ["fc.weight"], (D, fused))
    if config.method == "peagle":
        table.flat(("mask_hidden",), "mask_hidden", fused, axes=3)
    if config.block is not None:
        _block_layers(table, config)
    else:
        _head_layer(table, 0, ("first",), first, config)
        for i in range(1, config.num_layers):
            _head_layer(table, i, ("layers", i - 1), f"layers.{i}", config)
    table.vector(("norm", "weight"), "norm.weight", D)
    if config.own_lm_head:
        table.plain(("lm_head", "weight"), ["lm_head.weight"], (config.draft_vocab_size, D))
    if config.draft_vocab_size != config.vocab_size:
        table.integers(("d2t",), "d2t", config.draft_vocab_size)
    if config.selector_rank and config.block is None:
        _selector(table, config)


def _selector(table: Table, config: DrafterConfig) -> None:
    make = lambda: selector_class(config)(config, dtype=np.float32, rngs=nnx.Rngs(0))
    for path, leaf in nnx.to_flat_state(nnx.state(nnx.eval_shape(make))):
        table.plain(("selector", *path), [".".join(["selector", *map(str, path)])], leaf.shape)


def head_layout(config: DrafterConfig, tensors: Mapping[str, TensorInfo]) -> Layout:
    """The layout of a head's parameters in `tensors`, with or without the prefix `model.`.

    Does not read `d2t`; `checked.checked_head` checks that it holds offsets.

    Raises:
      CheckpointError: a tensor's shape or dtype contradicts the config or the tensors it is fused
        with.
    """
    rename = head_names(tensors)
    table = Table(tensors, rename=rename)
    _head(table, config, "midlayer" if table.has("midlayer.hidden_norm.weight") else "layers.0")
    reasons = {
        rename("d2t"): "the draft vocabulary is the target's",
        rename("t2d"): "d2t says the same",
    }

    def drop(name: str) -> str | None:
        if config.block is not None and name.removeprefix("model.").startswith("confidence_head."):
            return "the number of drafts does not depend on the head's confidence"
        return reasons.get(name)

    return table.layout(drop)


def head_names(tensors: Mapping[str, TensorInfo]) -> Callable[[str], str]:
    """Maps a head's tensor name to its name in the file: some files prefix all or most with
    `model.`."""
    return lambda name: f"model.{name}" if f"model.{name}" in tensors else name


def head_tensors(
    config: DrafterConfig, dtype: np.dtype, first: str = "midlayer"
) -> dict[str, TensorInfo]:
    """The weights of an unquantised head in `dtype`; `first` is the name of layer 0.

    It is `midlayer` in files of AWS and SafeAILab, `layers.0` in those of speculators.
    """
    table = Table({}, invent=np.dtype(dtype))
    _head(table, config, first)
    return table.invented
