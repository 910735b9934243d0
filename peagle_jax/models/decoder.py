"""The skeleton of every target: embedding, layers with taps, final norm, logits.

Llama is this with `layers.DecoderLayer`. By their configs Mistral adds a window, Qwen2 biases of q, k
and v, and Qwen3 q/k norms.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import TargetConfig
from peagle_jax.layers import (
    INIT_STD,
    Attend,
    DecoderLayer,
    Embed,
    Linear,
    RMSNorm,
    kept,
    rope_angles,
)


class Decoder(nnx.Module):
    """A target model.

    `make_layer(config, i, dtype=, rngs=)` makes layer i, called as `layers.DecoderLayer`. Taps name the
    residual streams returned for the drafter: id i is the stream entering layer i (id 0 the
    embedding, id L what leaves the last layer), un-normalised, concatenated lowest layer first.
    """

    def __init__(
        self,
        config: TargetConfig,
        make_layer: Callable[..., nnx.Module] = DecoderLayer,
        *,
        dtype,
        rngs: nnx.Rngs,
    ):
        D = config.hidden_size
        self.config = config
        self.embed = Embed(config.vocab_size, D, std=INIT_STD, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [make_layer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
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
        keep: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None, list]:
        """Runs all layers.

        Args:
          tokens, positions: [B, T] int32.
          cache: one entry per layer, passed through `attend`.
          attend: see `layers.Attend`.
          taps: ids of residual streams to return.
          keep: rows [B, n] int32 whose hidden states are wanted; None: all.
        Returns:
          hidden [B, T, D], or [B, n, D], after the last layer (before the final norm), taps
          [B, T, A*D] (None when `taps` is empty), the updated cache.
        """
        h = self.embed(tokens)
        if self.config.embedding_scale != 1.0:
            h = h * jnp.asarray(self.config.embedding_scale, h.dtype)
        angles = self._angles(positions)
        streams, new_cache, delta = [], [], None
        last = len(self.layers) - 1
        # Of other rows the last layer has only keys and values to make, unless its stream is tapped.
        early = None if last + 1 in taps else keep
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            of_layer = (angles[i], layer_cache, attend, early if i == last else None)
            entered, h, delta, layer_cache = layer(h, delta, *of_layer)
            streams.append(entered)
            new_cache.append(layer_cache)
        h = h if delta is None else delta.added_to(h)
        streams.append(h)
        tapped = jnp.concatenate([streams[i] for i in taps], axis=-1) if taps else None
        return (h if early is keep else kept(h, keep)), tapped, new_cache

    def _angles(self, positions: jax.Array) -> list:
        """Rope angles of each layer; layers with one rope share one pair of arrays."""
        made = {}
        for i in range(self.config.num_layers):
            attention = self.config.attention(i)
            rope = (attention.rope, attention.head_dim)
            if rope not in made:
                made[rope] = rope_angles(*rope, positions)
        layers = (self.config.attention(i) for i in range(self.config.num_layers))
        return [made[layer.rope, layer.head_dim] for layer in layers]

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Final norm and output projection: [..., D] -> float32 logits [..., V]."""
        normed = self.norm(hidden)
        if self.lm_head is None:
            logits = self.embed.unembed(normed)
        else:
            logits = self.lm_head(normed, out_dtype=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
