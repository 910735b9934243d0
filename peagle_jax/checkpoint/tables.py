"""One table a layout: module path <- checkpoint tensors. A fused weight names several, concatenated.

Rows of `gate_up` are gate then up, rows of `qkv` q then k then v; `sizes` splits them again on export.
"""

from typing import NamedTuple

from peagle_jax.config import DrafterConfig, TargetConfig

Path = tuple[str | int, ...]


class Rule(NamedTuple):
    """Parameter `path` is the concatenation along axis 0 of `names`, which have `sizes` rows."""

    path: Path
    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()


def _attention(path: Path, prefix: str, config: TargetConfig | DrafterConfig) -> list[Rule]:
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = (heads, kv, kv)
    leaves = ("weight", "bias") if config.attention_bias else ("weight",)
    rules = [
        Rule((*path, "qkv", leaf), tuple(f"{prefix}.{p}_proj.{leaf}" for p in "qkv"), sizes)
        for leaf in leaves
    ]
    rules.append(Rule((*path, "out", "weight"), (f"{prefix}.o_proj.weight",)))
    if config.output_bias:
        rules.append(Rule((*path, "out", "bias"), (f"{prefix}.o_proj.bias",)))
    if config.qk_norm:
        rules += [
            Rule((*path, f"{p}_norm", "weight"), (f"{prefix}.{p}_norm.weight",)) for p in "qk"
        ]
    return rules


def _block(path: Path, prefix: str, config: TargetConfig | DrafterConfig) -> list[Rule]:
    F = config.intermediate_size
    mlp = f"{prefix}.mlp"
    return [
        Rule((*path, "input_norm", "weight"), (f"{prefix}.input_layernorm.weight",)),
        *_attention((*path, "attention"), f"{prefix}.self_attn", config),
        Rule((*path, "post_norm", "weight"), (f"{prefix}.post_attention_layernorm.weight",)),
        Rule(
            (*path, "mlp", "gate_up", "weight"),
            (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            (F, F),
        ),
        Rule((*path, "mlp", "down", "weight"), (f"{mlp}.down_proj.weight",)),
    ]


def target_rules(config: TargetConfig) -> list[Rule]:
    """Llama and Qwen3 dense checkpoints."""
    rules = [Rule(("embed", "weight"), ("model.embed_tokens.weight",))]
    for i in range(config.num_layers):
        rules += _block(("layers", i), f"model.layers.{i}", config)
    rules.append(Rule(("norm", "weight"), ("model.norm.weight",)))
    if not config.tie_embeddings:
        rules.append(Rule(("lm_head", "weight"), ("lm_head.weight",)))
    return rules


def head_rules(config: DrafterConfig, first: str) -> list[Rule]:
    """Heads; layer 0 is called `first`: "midlayer" (AWS, SafeAILab) or "layers.0" (speculators)."""
    rules = []
    if config.own_embedding:
        rules.append(Rule(("embed", "weight"), ("embed_tokens.weight",)))
    if config.norm_before_fc:
        rules.append(Rule(("input_norm", "weight"), ("input_norm.weight",)))
    if config.fc_norm:
        rules += [
            Rule(("fc_norm", i, "weight"), (f"fc_norm.{i}.weight",)) for i in range(config.num_taps)
        ]
    rules.append(Rule(("fc", "weight"), ("fc.weight",)))
    if config.method == "peagle":
        rules.append(Rule(("mask_hidden",), ("mask_hidden",)))
    rules += _block(("first",), first, config)
    rules.append(Rule(("first", "hidden_norm", "weight"), (f"{first}.hidden_norm.weight",)))
    for i in range(1, config.num_layers):
        rules += _block(("layers", i - 1), f"layers.{i}", config)
    rules.append(Rule(("norm", "weight"), ("norm.weight",)))
    if config.own_lm_head:
        rules.append(Rule(("lm_head", "weight"), ("lm_head.weight",)))
    return rules
