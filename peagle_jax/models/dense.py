"""Llama and Qwen3: one dense decoder; Qwen3 adds q/k norm, Llama 3 its rope scaling."""

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import TargetConfig
from peagle_jax.layers import INIT_STD, Attend, DecoderLayer, Embed, Linear, RMSNorm, rope_angles


class Dense(nnx.Module):
    """A target model.

    `taps` names the residual streams returned for the drafter: id i is the stream entering layer i
    (id 0 the embedding), un-normalised, concatenated lowest layer first.
    """

    def __init__(self, config: TargetConfig, *, dtype, rngs: nnx.Rngs):
        D = config.hidden_size
        self.config = config
        self.embed = Embed(config.vocab_size, D, std=INIT_STD, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(D, eps=config.norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(D, config.vocab_size, bias=False, std=INIT_STD, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: list,
        attend: Attend,
        *,
        taps: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array | None, list]:
        """Runs all layers.

        Args:
          tokens, positions: [B, T] int32.
          cache: one entry per layer, passed through `attend`.
          attend: see `layers.Attend`.
          taps: ids of residual streams to return.
        Returns:
          hidden [B, T, D] after the last layer (before the final norm), taps [B, T, A*D] (None when
          `taps` is empty), the updated cache.
        """
        h = self.embed(tokens)
        angles = rope_angles(self.config.rope, self.config.head_dim, positions)
        streams, new_cache = {}, []
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            if i in taps:
                streams[i] = h
            h, layer_cache = layer(h, angles, layer_cache, attend)
            new_cache.append(layer_cache)
        tapped = jnp.concatenate([streams[i] for i in taps], axis=-1) if taps else None
        return h, tapped, new_cache

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Final norm and output projection: [..., D] -> float32 logits [..., V]."""
        normed = self.norm(hidden)
        if self.lm_head is None:
            return self.embed.unembed(normed)
        return self.lm_head(normed, out_dtype=jnp.float32)
