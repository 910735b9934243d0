"""Mixture-of-experts layers of Qwen3-MoE and GPT-OSS. A config may keep some layers dense.

GPT-OSS also has biases in router and experts and a clamp in the experts (`swiglu_limit`). Its
attention sinks, biases and alternating windows are settings of `AttentionConfig`.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.activations import Activations
from pallas_kernels.moe.api import Norm, Router, normed_mixture
from pallas_kernels.moe.reference import Choice, Experts, ExpertWeights
from peagle_jax.config import TargetConfig
from peagle_jax.models.layers import INIT_STD, DecoderLayer, Delta, GatedMLP, Linear, RMSNorm
from peagle_jax.parallel import partition


class ExpertLinear(nnx.Module):
    """Weights [E, ..., out, in] of one projection of all experts; quantised ones have a `scale`."""

    activations: Activations = "bf16"

    def __init__(
        self, outputs: tuple[int, ...], inputs: int, *, bias: bool, std: float, dtype, rngs
    ):
        draw = jax.random.normal(rngs.params(), (*outputs, inputs), dtype)
        self.weight = nnx.Param(std * draw)
        self.scale = nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None

    def arrays(self) -> ExpertWeights:
        leaves = (self.weight, self.scale, self.bias)
        return ExpertWeights(*(None if p is None else p[...] for p in leaves))


class MoE(nnx.Module):
    """Router and top-k experts: `sum_e w_e down_e(act(gate_up_e x))`."""

    def __init__(self, config: TargetConfig, *, dtype, rngs: nnx.Rngs):
        E, D, F = config.experts.num_experts, config.hidden_size, config.intermediate_size
        self.config = config
        bias, std_out = config.family == "gpt_oss", INIT_STD / math.sqrt(2 * config.num_layers)
        self.router = Linear(D, E, bias=bias, std=INIT_STD, dtype=dtype, rngs=rngs)
        self.gate_up = ExpertLinear((E, 2, F), D, bias=bias, std=INIT_STD, dtype=dtype, rngs=rngs)
        self.down = ExpertLinear((E, D), F, bias=bias, std=std_out, dtype=dtype, rngs=rngs)

    def after(self, h: jax.Array, delta: Delta, norm: RMSNorm) -> tuple[jax.Array, Delta]:
        """(the stream after the attention's `delta` [..., D], the experts' delta of its norm).

        Raises:
          ValueError: the delta is routed, or has a norm or a factor.
        """
        if not all(x is None for x in (delta.weights, delta.rows, delta.norm, delta.factor)):
            raise ValueError("a mixture of experts adds a dense delta, without a norm or a factor")
        rule = self.config.experts
        weight, scale, bias = (
            None if p is None else p[...]
            for p in (self.router.weight, self.router.scale, self.router.bias)
        )
        experts = Experts(
            self.gate_up.arrays(),
            self.down.arrays(),
            self.config.swiglu_limit,
            self.gate_up.activations,
            None if partition.size() == 1 else partition.rank() * self.gate_up.weight.shape[0],
        )
        h, mixed = normed_mixture(
            h,
            delta.values,
            delta.bias,
            Norm(norm.weight[...], norm.eps),
            Router(weight, scale, Choice(rule.top_k, rule.normalize, bias)),
            experts,
        )
        if partition.size() == 1:
            return h, Delta(*mixed)
        parts = partition.mixtures_of_all(mixed, h.size // h.shape[-1])
        return h, Delta(parts.reshape(-1, *h.shape))


def moe_layer(config: TargetConfig, layer: int, *, dtype, rngs: nnx.Rngs) -> DecoderLayer:
    """A decoder layer with a mixture of experts, or with a dense MLP where `is_sparse(layer)` is
    False."""
    if config.is_sparse(layer):
        mlp = MoE(config, dtype=dtype, rngs=rngs)
    else:
        std_out = INIT_STD / math.sqrt(2 * config.num_layers)
        D, F = config.hidden_size, config.mlp_size(layer)
        mlp = GatedMLP(D, F, std_out=std_out, dtype=dtype, rngs=rngs)
    return DecoderLayer(config, layer, dtype=dtype, rngs=rngs, mlp=mlp)
