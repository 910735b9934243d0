"""The head of a block drafter, in DFlash's layout (arXiv 2602.06036).

A pass drafts a whole block. Its rows are the newest token and masks, and each layer sees

    keys and values of the context: projections of c_p = norm(fuse(g_p)), the target's tapped states
    those of the block: projections of the rows themselves, all of which see each other

The context of a position needs neither the token there nor any layer before: it is written once,
when the target has run. Keys of the block are not kept (docs/algorithm.md, "A block").

DFlash2 adds a convolution along the block before and after each sublayer, and a selector. DSpark
adds to the logits of each draft a bias by the draft before it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import DrafterConfig
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models.layers import (
    INIT_STD,
    Attention,
    DecoderLayer,
    Delta,
    Embed,
    Linear,
    RMSNorm,
)

BlockAttend = Callable[[Attention, bool, jax.Array, jax.Array, object], tuple[jax.Array, object]]
"""How a block attends: (the layer's attention, whether the block is causal, context [B, C, D], rows
[B, T, D], the layer's cache) -> (output [B, T, N * H], the cache with the context's keys and
values)."""


class BlockConv(nnx.Module):
    """Convolution along a block before and after a sublayer.

        out[i, c] = sum_t (base[t, c] + delta[i, t, g(c)]) x[i - t, c]

    Rows before the block are zeros. The row that enters predicts the `delta` of both sides, one
    number for each group g of channels. It begins as the identity.
    """

    def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
        D, taps = config.hidden_size, config.block.conv_taps
        groups = D // config.block.conv_group
        self.base = nnx.Param(jnp.zeros((2, taps, D), dtype).at[:, 0].set(1))
        self.delta = Linear(D, 2 * taps * groups, bias=False, std=0.0, dtype=dtype, rngs=rngs)

    def before(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the input [B, T, D] of the sublayer, what `after` needs)."""
        B, T, _ = x.shape
        delta = self.delta(x, out_dtype=jnp.float32)
        delta = delta.reshape(B, T, 2, self.base.shape[1], -1)
        return self._convolved(x, delta[:, :, 0], 0), delta[:, :, 1]

    def after(self, delta: jax.Array, out: Delta, h: jax.Array) -> Delta:
        """The addition to the stream h, in place of the sublayer's `out`."""
        summed = out.added_to(jnp.zeros_like(h))
        return Delta(self._convolved(summed, delta, 1)[None].astype(jnp.float32))

    def _convolved(self, x: jax.Array, delta: jax.Array, side: int) -> jax.Array:
        """x [B, T, D], delta [B, T, taps, groups]."""
        B, T, D = x.shape
        base, groups = self.base[...][side].astype(jnp.float32), delta.shape[-1]
        weights = base.reshape(-1, groups, D // groups) + delta[..., None]
        padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (len(base) - 1, 0), (0, 0)))
        out = 0.0
        for tap in range(len(base)):
            shifted = padded[:, len(base) - 1 - tap :][:, :T]
            out = out + weights[:, :, tap] * shifted.reshape(B, T, groups, -1)
        return out.reshape(B, T, D).astype(x.dtype)


class BlockLayer(DecoderLayer):
    """A decoder layer whose attention also sees the context, with convolutions if the head has
    some."""

    def __init__(self, config: DrafterConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        conv = lambda: BlockConv(config, dtype=dtype, rngs=rngs) if config.block.conv_taps else None
        self.attention_conv, self.mlp_conv = conv(), conv()
        self.is_causal = config.block.causal[layer]

    def __call__(self, h, delta, context, cache, attend: BlockAttend):
        """Runs the layer on the rows `h + delta` [B, T, D] of the block.

        Returns:
          (the stream after attention, the MLP's delta to it, cache).
        """
        h, x = self.input_norm.after(h, delta)
        x, late = self._convolved(self.attention_conv, x)
        out, cache = attend(self.attention, self.is_causal, context, x, cache)
        out = self.attention.out.delta(out)
        if late is not None:
            out = self.attention_conv.after(late, out, h)
        h, x = self.post_norm.after(h, out)
        x, late = self._convolved(self.mlp_conv, x)
        out = self.mlp(x)
        return h, out if late is None else self.mlp_conv.after(late, out, h), cache

    @staticmethod
    def _convolved(conv: BlockConv | None, x: jax.Array):
        return (x, None) if conv is None else conv.before(x)


class BlockHead(DraftHead):
    """Weights of a block drafter, and its pass over blocks."""

    def _add_layers(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs) -> None:
        self.context_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.layers = nnx.List(
            [BlockLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        rank = config.block.markov_rank
        init = dict(std=INIT_STD, dtype=dtype, rngs=rngs)
        self.markov_before = Embed(config.vocab_size, rank, **init) if rank else None
        self.markov_after = (
            Linear(rank, config.draft_vocab_size, bias=False, **init) if rank else None
        )

    def context(self, taps: jax.Array) -> jax.Array:
        """Tapped states [..., A*Dt] -> [..., D], what all layers project to keys and values."""
        return self.context_norm(self.fuse(taps))

    def __call__(
        self, target, tokens: jax.Array, context: jax.Array, cache: list, attend: BlockAttend
    ) -> tuple[jax.Array, list]:
        """Runs the layers over blocks.

        Args:
          target: the target model; its embedding is used if the head has none.
          tokens: [B, T] int32, the newest token and masks.
          context: [B, C, D], of `context`.
          cache: one entry per layer, passed through `attend`.
        Returns:
          (output before the final norm [B, T, D]; the updated cache).
        """
        embed = target.embed if self.embed is None else self.embed
        h, delta, new_cache = embed(tokens), None, []
        if self.config.block.embedding_scale != 1.0:
            h = h * jnp.asarray(self.config.block.embedding_scale, h.dtype)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h, delta, layer_cache = layer(h, delta, context, layer_cache, attend)
            new_cache.append(layer_cache)
        return delta.added_to(h), new_cache

    def after_token(self, logits: jax.Array, before: jax.Array) -> jax.Array:
        """Logits [B, n, Vd] of drafts, given the tokens `before` them [B, n] int32; as they are
        without a Markov head."""
        if self.markov_before is None:
            return logits
        return logits + self.markov_after(self.markov_before(before), out_dtype=jnp.float32)


def make_head(config: DrafterConfig, *, dtype, rngs: nnx.Rngs) -> DraftHead:
    """A head of the method of `config`, with random weights."""
    make = DraftHead if config.block is None else BlockHead
    return make(config, dtype=dtype, rngs=rngs)
