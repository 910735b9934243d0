"""The draft head: its weights, and its forward pass over rows of tokens and states.

A row combines the embedding of a token with the target's tapped states. Layer 0 is twice as wide as
the others.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import column_tiles
from peagle_jax.config import DrafterConfig
from peagle_jax.method.selector import Selector, Tables, TableSelector
from peagle_jax.models.layers import (
    INIT_STD,
    Attend,
    Attention,
    DecoderLayer,
    Embed,
    GatedMLP,
    Linear,
    RMSNorm,
    kept,
)
from peagle_jax.models.rope_angles import rope_angles
from peagle_jax.parallel import vocabulary


def selector_class(config: DrafterConfig) -> type[Selector] | type[TableSelector]:
    """That of a head's selector."""
    return Selector if config.block is None else TableSelector


class Buffer(nnx.Variable):
    """An array that is stored with the weights but not trained."""


class FirstLayer(nnx.Module):
    """Layer 0 ("midlayer" in checkpoints): its attention reads [norm(embedding), norm(hidden)], 2D
    wide."""

    def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
        D, eps = config.hidden_size, config.norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.attention = Attention(
            config.attention(0), (2 * D, D), eps=eps, std_out=INIT_STD, dtype=dtype, rngs=rngs
        )
        self.post_norm = RMSNorm(D, eps=eps, dtype=dtype)
        init = dict(bias=config.mlp_bias, std_out=INIT_STD, dtype=dtype, rngs=rngs)
        self.mlp = GatedMLP(D, config.intermediate_size, **init)

    def __call__(self, embedding, h, angles, cache, attend: Attend, keep: jax.Array | None = None):
        normed = self.hidden_norm(h)
        residual = normed if self.norm_before_residual else h
        x = jnp.concatenate([self.input_norm(embedding), normed], axis=-1)
        out, cache = self.attention(x, angles, cache, attend, keep)
        h, x = self.post_norm.after(kept(residual, keep), out)
        return h, self.mlp(x), cache


class DraftHead(nnx.Module):
    """Weights of a head and its forward pass over rows, which the classes of `drafter` arrange.

    `block_head.BlockHead` has other layers between the same ends.
    """

    def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
        D, eps = config.hidden_size, config.norm_eps
        fused = config.num_taps * config.target_hidden_size
        self.config = config
        self.embed = (
            Embed(config.vocab_size, D, std=INIT_STD, dtype=dtype, rngs=rngs)
            if config.own_embedding
            else None
        )
        self.input_norm = RMSNorm(fused, eps=eps, dtype=dtype) if config.norm_before_fc else None
        norms = config.num_taps if config.fc_norm else 0
        self.fc_norm = nnx.List(
            [RMSNorm(config.target_hidden_size, eps=eps, dtype=dtype) for _ in range(norms)]
        )
        self.fc = Linear(fused, D, bias=False, std=INIT_STD, dtype=dtype, rngs=rngs)
        self._add_layers(config, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.lm_head = (
            Linear(D, config.draft_vocab_size, bias=False, std=INIT_STD, dtype=dtype, rngs=rngs)
            if config.own_lm_head
            else None
        )
        self.d2t = (
            Buffer(jnp.zeros(config.draft_vocab_size, jnp.int32))
            if config.draft_vocab_size != config.vocab_size
            else None
        )
        self.selector = (
            selector_class(config)(config, dtype=dtype, rngs=rngs) if config.selector_rank else None
        )

    def _add_layers(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs) -> None:
        fused = config.num_taps * config.target_hidden_size
        self.mask_hidden = (
            nnx.Param(jax.random.normal(rngs.params(), (fused,), dtype))
            if config.method == "peagle"
            else None
        )
        self.first = FirstLayer(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(1, config.num_layers)]
        )

    def fuse(self, taps: jax.Array) -> jax.Array:
        """Tapped states [..., A*Dt] -> [..., D]. Mask rows use `fuse(mask_hidden)`."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm:
            chunks = jnp.split(taps, len(self.fc_norm), axis=-1)
            taps = jnp.concatenate(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], axis=-1
            )
        return self.fc(taps)

    def __call__(
        self,
        target,
        tokens: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        cache: list,
        attend: Attend,
        keep: jax.Array | None = None,
    ):
        """Runs the layers over rows.

        Args:
          target: the target model; its embedding is used if the head has none.
          tokens, positions: [B, T] int32.
          hidden: [B, T, D], output of `fuse` or of `feedback`.
          cache, attend, keep: as in `models.Decoder`.
        Returns:
          (output before the final norm, [B, T, D] or with `keep` [B, n, D]; the updated cache).
        """
        embed = target.embed if self.embed is None else self.embed
        angles = rope_angles(self.config.rope, self.config.head_dim, positions)
        last = len(self.layers)
        layer_args = lambda i: (angles, cache[i], attend, keep if i == last else None)
        h, delta, first_cache = self.first(embed(tokens), hidden, *layer_args(0))
        new_cache = [first_cache]
        for i, layer in enumerate(self.layers, start=1):
            _, h, delta, layer_cache = layer(h, delta, *layer_args(i))
            new_cache.append(layer_cache)
        return delta.added_to(h), new_cache

    def logits(self, target, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 logits over the draft vocabulary [..., Vd], see
        `parallel.vocabulary`."""
        normed = self.norm(hidden)
        if self.lm_head is not None:
            out = self.lm_head(normed, out_dtype=jnp.float32)
        elif target.lm_head is not None:
            out = target.lm_head(normed, out_dtype=jnp.float32)
        else:
            out = target.embed.unembed(normed)
        out = vocabulary.real(out, self.config.draft_vocab_size)
        return out * self.config.logit_scale if self.config.logit_scale != 1.0 else out

    def edges(self, target, hidden: jax.Array, candidates: jax.Array) -> jax.Array:
        """The selector's scores of a position's candidates after each candidate of the one before.

        Args:
          hidden: [B, J, D], output of the layers.
          candidates: [B, J, C] draft ids.
        Returns:
          [B, J, C, C] float32; equal rows at the first position, which has no candidates before it.
        """
        embedded = self._embedded(target, candidates[:, :-1])
        normed = self.norm(hidden[:, 1:])
        score = lambda columns: self.selector(embedded, normed, columns)
        edges = vocabulary.by_columns(score, self.unembedding(target), candidates[:, 1:])
        return jnp.pad(edges, ((0, 0), (1, 0), (0, 0), (0, 0)))

    def tables(self, target) -> Tables:
        """The selector's tables, for one device."""
        unembedding = self.unembedding(target)[: self.config.draft_vocab_size]
        return self.selector.tables(lambda ids: self._embedded(target, ids), unembedding)

    def _embedded(self, target, draft_ids: jax.Array) -> jax.Array:
        """Draft ids [...] -> embeddings [..., D]."""
        embed = target.embed if self.embed is None else self.embed
        return embed(self.to_target_ids(draft_ids))

    def unembedding(self, target) -> jax.Array:
        """Rows [Vd, D] of the projection to logits."""
        owner = target if self.lm_head is None else self
        rows = (owner.embed if owner.lm_head is None else owner.lm_head).weight[...]
        return column_tiles.restore(rows) if column_tiles.is_tiled(rows, None) else rows

    def feedback(self, hidden: jax.Array) -> jax.Array:
        """The next state in autoregressive drafting: the output, normalised if `norm_output` is
        set."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def to_target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Draft vocabulary ids -> target ids: `id + d2t[id]`; `d2t` stores offsets."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[...][draft_ids]
