"""Full-size models by name for benches with random weights: target, format of its weights, heads.

`gpt-oss-20b` is the released MXFP4 checkpoint, `qwen3-coder-30b-a3b` the bfloat16 one, and
`qwen3-coder-30b-a3b-fp8` the block-quantised one.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from bench.command import PRESET_SUFFIX
from peagle_jax.config import BlockConfig, ConfigError, DrafterConfig, TargetConfig
from peagle_jax.presets import PRESETS
from peagle_jax.rope_config import Llama3Scaling, RopeConfig

Format = Literal["bf16", "fp8", "mxfp4"]

FORMATS: dict[str, tuple[Format, ...]] = {
    "llama": ("bf16", "fp8"),
    "mistral": ("bf16", "fp8"),
    "qwen2": ("bf16", "fp8"),
    "qwen3": ("bf16", "fp8"),
    "qwen3_moe": ("bf16", "fp8"),
    "gpt_oss": ("mxfp4",),
    "gemma4": ("bf16", "fp8"),
}
"""Formats of the released checkpoints, by family."""

PEAGLE_LAYERS, DFLASH_LAYERS = 4, 5
"""Layers of every published P-EAGLE head, and of most DFlash heads."""
EAGLE3_VOCAB = 32000
"""Draft vocabulary of the published EAGLE-3 heads; P-EAGLE's have the target's."""


def with_layers(config: TargetConfig, num_layers: int) -> TargetConfig:
    """The model cut to its first layers."""
    windows, experts = config.sliding_windows, config.experts
    if experts is not None:
        dense = tuple(i for i in experts.dense_layers if i < num_layers)
        size = experts.dense_size if dense else None
        experts = replace(experts, dense_layers=dense, dense_size=size)
    windows = windows and windows[:num_layers]
    return replace(config, num_layers=num_layers, sliding_windows=windows, experts=experts)


class _Shape(NamedTuple):
    """Sizes of the layers of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


_OSS = _Shape(64, 8, 64, 14336)
# Shapes of heads without a published config: the MLP widths of gpt-oss-20b and 120b follow from the
# heads' 1.8e9 and 1.7e9 parameters; the other two are assumptions. All other heads have the shape
# of one layer of their target, as the public EAGLE-3 heads of dense targets do.
_SHAPES = {
    "gpt-oss-20b": _OSS,
    "gpt-oss-120b": _OSS._replace(intermediate_size=11520),
    "qwen3-coder-30b-a3b": _Shape(32, 4, 128, 12288),
    "gemma-4-31b": _Shape(32, 8, 128, 21504),
}
_MASK_IDS = {"gpt-oss-20b": 201020, "gpt-oss-120b": 201020}


@dataclass(frozen=True)
class Preset:
    """A model to generate; rows carry its `name`."""

    name: str
    base: str
    target: TargetConfig
    format: Format

    @property
    def weights(self) -> str:
        """Name of the format in rows: a dtype, fp8 or mxfp4."""
        return "bfloat16" if self.format == "bf16" else self.format

    def head(self, method: Literal["eagle3", "peagle", "dflash"]) -> DrafterConfig:
        """The head for this target: P-EAGLE with four layers, embedding and logits of its own over
        the whole vocabulary; EAGLE-3 with one layer, the target's embedding and 32000 draft tokens;
        DFlash with five layers and the target's tables.
        """
        target, parallel, is_block = self.target, method == "peagle", method == "dflash"
        dense = (
            target.num_heads,
            target.num_kv_heads,
            target.head_dim,
            target.intermediate_size,
        )
        shape = _SHAPES.get(self.base, _Shape(*dense))
        L, V = target.num_layers, target.vocab_size
        return DrafterConfig(
            method=method,
            vocab_size=V,
            draft_vocab_size=min(EAGLE3_VOCAB, V) if method == "eagle3" else V,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            num_layers={"peagle": PEAGLE_LAYERS, "dflash": DFLASH_LAYERS}.get(method, 1),
            **shape._asdict(),
            norm_eps=target.norm_eps,
            rope=RopeConfig(theta=5e5, scaling=Llama3Scaling(factor=8.0)),
            # The default (2, L/2, L-3), clipped to the layers of a shortened target.
            taps=tuple(sorted((min(2, L), L // 2, max(L - 3, 0)))),
            mask_token_id=None if method == "eagle3" else _MASK_IDS.get(self.base, V - 1),
            own_embedding=parallel,
            own_lm_head=not is_block,
            qk_norm=is_block,
            block=BlockConfig(causal=(False,) * DFLASH_LAYERS) if is_block else None,
        )


def _released(base: str) -> tuple[Format, ...]:
    return FORMATS[PRESETS[base].family]


def names() -> list[str]:
    """Names that `preset` accepts."""
    found = []
    for base in PRESETS:
        forms = _released(base)
        found += [base, base + PRESET_SUFFIX] if "fp8" in forms else [base]
    return found


def preset(name: str, layers: int | None = None) -> Preset:
    """A full-size model by name.

    Args:
      name: of `peagle_jax.presets`; with "-fp8" its linear layers are fp8 in blocks of 128 x
        128.
      layers: number of first layers to keep; the name then states it.
    Raises:
      ConfigError: no such preset, or it has fewer layers.
    """
    if name not in names():
        raise ConfigError(f"unknown preset {name!r}; known are {', '.join(names())}")
    base = name.removesuffix(PRESET_SUFFIX)
    form = "fp8" if name.endswith(PRESET_SUFFIX) else _released(base)[0]
    config = PRESETS[base]
    if layers is None or layers == config.num_layers:
        return Preset(name, base, config, form)
    if layers > config.num_layers:
        raise ConfigError(f"--layers {layers}: {base} has {config.num_layers}")
    title = f"{name} ({layers} of {config.num_layers} layers)"
    config = with_layers(config, layers)
    return Preset(title, base, config, form)
