"""`peagle-bench sizes`: weights and KV cache of every preset, and what fits on one GPU.

Weights are counted on the models themselves, so the table cannot drift from the code.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
from flax import nnx

from peagle_jax.config import EngineConfig, TargetConfig
from peagle_jax.engine.device.memory import ring_bytes
from peagle_jax.models import build
from peagle_jax.models.presets import PRESETS

Format = Literal["bf16", "fp8", "mxfp4"]

GPU_BYTES = 139 * 2**30
"""Memory of one NVIDIA H200, sold as 141 GB."""
USABLE = 0.92
"""Share for weights and caches; the rest is for driver, programs and activations."""

_BITS = {"bf16": 16, "fp8": 8 + 32 / 128**2, "mxfp4": 4 + 8 / 32}
QUANTISED = {"qkv", "out", "gate_up", "down"}
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


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters: experts, other matrices of the layers, everything else."""

    experts: int
    matrices: int
    rest: int

    @property
    def total(self) -> int:
        return self.experts + self.matrices + self.rest

    def num_bytes(self, form: Format) -> int:
        """Bytes in memory. mxfp4 is GPT-OSS's: only experts are quantised."""
        experts = self.experts * _BITS[form]
        matrices = self.matrices * _BITS["bf16" if form == "mxfp4" else form]
        return int(experts + matrices + self.rest * _BITS["bf16"]) // 8


@functools.cache
def count(config: TargetConfig) -> Weights:
    """Numbers of parameters of a target, from shapes alone."""
    model = nnx.eval_shape(lambda: build(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    sizes = {"experts": 0, "matrices": 0, "rest": 0}
    for path, leaf in dict(nnx.to_flat_state(nnx.state(model))).items():
        quantised = path[-1] == "weight" and path[-2] in QUANTISED
        kind = "experts" if len(leaf.shape) > 2 else "matrices"
        sizes[kind if quantised else "rest"] += leaf.size
    return Weights(**sizes)


def kv_bytes(config: TargetConfig, context: int) -> int:
    """KV cache of one sequence of `context` tokens in bfloat16, rings of sliding layers included."""
    one = EngineConfig(max_num_seqs=1, max_model_len=context, dtype="bfloat16")
    layers = map(config.attention, range(config.num_layers))
    token = sum(4 * x.num_kv_heads * x.head_dim for x in layers if x.window is None)
    # `ring_bytes` counts two slots, because the dummy slot has a ring, too.
    return token * context + ring_bytes(config, None, one) // 2


def sequences(config: TargetConfig, form: Format, context: int) -> int:
    """Number of sequences of `context` tokens that fit beside the weights; 0 if the weights do not fit."""
    room = USABLE * GPU_BYTES - count(config).num_bytes(form)
    return max(0, int(room // kv_bytes(config, context)))


def table(contexts: tuple[int, ...] = (1024, 8192, 32768)) -> str:
    """Markdown: one line per preset and format."""
    header = ["model", "parameters, 10⁹", "format", "weights, GB", "KV of 8k tokens, MB"]
    header += [f"sequences at {context // 1024}k" for context in contexts]
    lines = ["| " + " | ".join(header) + " |", "|---|---:|---|" + "---:|" * (len(header) - 3)]
    with jax.default_device(jax.devices("cpu")[0]):
        for name, config in PRESETS.items():
            weights = count(config)
            for form in FORMATS[config.family]:
                size = f"{weights.num_bytes(form) / 1e9:.1f}"
                fits = [sequences(config, form, context) for context in contexts]
                cells = [name, f"{weights.total / 1e9:.2f}", form, size]
                cells += [f"{kv_bytes(config, 8192) / 1e6:,.0f}"]
                cells += [f"{n:,}" if n else "no" for n in fits]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
