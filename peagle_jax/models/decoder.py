"""The decoder of every target family: embedding, layers with taps, final norm, logits.

Llama uses `layers.DecoderLayer`. So do Mistral (sliding window), Qwen2 (q/k/v biases) and Qwen3
(q/k norms); their `TargetConfig` enables the differences.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import TargetConfig
from peagle_jax.models.layers import (
    INIT_STD,
    Attend,
    DecoderLayer,
    Embed,
    Linear,
    RMSNorm,
    kept,
)
from peagle_jax.models.rope_angles import rope_angles
from peagle_jax.parallel import vocabulary


class Decoder(nnx.Module):
    """A target model.

    `make_layer(config, i, dtype=, rngs=)` constructs layer i, with the signature of
    `layers.DecoderLayer`. Taps select the residual streams returned for the drafter: id i is the
    stream entering layer i (id 0: the embedding; id L: the output of the last layer), not
    normalised, concatenated lowest layer first.
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
          keep: indices [B, n] int32 of the rows whose hidden states are returned; None: all.
        Returns:
          (hidden [B, T, D], with `keep` [B, n, D], before the final norm; taps [B, T, A*D], None if
          `taps` is empty; the updated cache).
        """
        h = self.embed(tokens)
        if self.config.embedding_scale != 1.0:
            h = h * jnp.asarray(self.config.embedding_scale, h.dtype)
        angles = self._angles(positions)
        streams, new_cache, delta = [], [], None
        last = len(self.layers) - 1
        # Rows outside `keep` need only K and V in the last layer, unless its output is tapped.
        keep_in_last = None if last + 1 in taps else keep
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            keep_here = keep_in_last if i == last else None
            stream, h, delta, layer_cache = layer(
                h, delta, angles[i], layer_cache, attend, keep_here
            )
            streams.append(stream)
            new_cache.append(layer_cache)
        h = h if delta is None else delta.added_to(h)
        streams.append(h)
        tapped = jnp.concatenate([streams[i] for i in taps], axis=-1) if taps else None
        return (h if keep_in_last is keep else kept(h, keep)), tapped, new_cache

    def _angles(self, positions: jax.Array) -> list:
        """Rope angles of each layer; layers with equal rope settings share one pair of arrays."""
        angles = {}
        for i in range(self.config.num_layers):
            attention = self.config.attention(i)
            rope = (attention.rope, attention.head_dim)
            if rope not in angles:
                angles[rope] = rope_angles(*rope, positions)
        layers = (self.config.attention(i) for i in range(self.config.num_layers))
        return [angles[layer.rope, layer.head_dim] for layer in layers]

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Final norm and output projection, [..., D] -> float32 [..., V], see `vocabulary`."""
        return self.logits(self.norm(hidden))

    def logits(self, normed: jax.Array) -> jax.Array:
        """`unembed` of a state [..., D] that is normed already, as a drafter may predict it."""
        if self.lm_head is None:
            logits = self.embed.unembed(normed)
        else:
            logits = self.lm_head(normed, out_dtype=jnp.float32)
        cap = self.config.logit_softcap
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return vocabulary.real(logits, self.config.vocab_size)
