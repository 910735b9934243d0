"""Gemma 4 (text): norms before and after attention and MLP, GELU, and a scalar per layer.

Local layers use a sliding window. Every sixth layer has full attention with fewer, wider heads, takes V
from K's projection, and rotates only a quarter of its frequencies (`TargetConfig.global_attention`).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import TargetConfig
from peagle_jax.layers import INIT_STD, Attend, Attention, Delta, GatedMLP, RMSNorm, kept


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
        """As `layers.DecoderLayer`, but the delta is None: the scalar multiplies the complete sum."""
        entered, x = self.input_norm.after(h, delta)
        out, cache = self.attention(x, angles, cache, attend, keep)
        h = kept(entered, keep)
        h = h + self.post_attention_norm(out.added_to(jnp.zeros_like(h)))
        out = self.mlp(self.pre_mlp_norm(h))
        h = h + self.post_mlp_norm(out.added_to(jnp.zeros_like(h)))
        return entered, h * self.layer_scalar[...], None, cache
