"""Gemma 4 (text): norms before and after attention and MLP, GELU, and a scalar per layer.

Local layers use a sliding window. Every sixth layer has full attention with fewer, wider heads,
takes V from K's projection, and rotates only a quarter of its frequencies
(`TargetConfig.global_attention`).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import TargetConfig
from peagle_jax.models.layers import INIT_STD, Attend, Attention, Delta, GatedMLP, RMSNorm, kept


class Gemma4Layer(nnx.Module):
    """`(h + norm(attention(norm(h))) + norm(mlp(norm(.)))) * layer_scalar`."""

    def __init__(self, config: TargetConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        D, eps = config.hidden_size, config.norm_eps
        init = dict(std_out=INIT_STD / math.sqrt(2 * config.num_layers), dtype=dtype, rngs=rngs)
        norm = lambda: RMSNorm(D, eps=eps, dtype=dtype)
        self.input_norm, self.post_attention_norm = norm(), norm()
        self.pre_mlp_norm, self.post_mlp_norm = norm(), norm()
        self.attention = Attention(config.attention(layer), (D, D), eps=eps, **init)
        # jax.nn.gelu is the tanh approximation, as Gemma's `gelu_pytorch_tanh`.
        self.mlp = GatedMLP(D, config.intermediate_size, activation=jax.nn.gelu, **init)
        self.layer_scalar = nnx.Param(jnp.ones(1, dtype))

    def __call__(self, h: jax.Array, delta: Delta | None, angles, cache, attend: Attend, keep=None):
        """As `layers.DecoderLayer`; the MLP's delta has a norm, and the scalar as its factor."""
        entered, x = self.input_norm.after(h, delta, self.attention.qkv.row_dtype(h.dtype))
        out, cache = self.attention(x, angles, cache, attend, keep)
        out = out._replace(norm=self.post_attention_norm)
        h, out = self.mlp.after(kept(entered, keep), out, self.pre_mlp_norm)
        out = out._replace(norm=self.post_mlp_norm, factor=self.layer_scalar[...])
        return entered, h, out, cache
