"""Attention for training: causal over a sequence, and over (anchor, depth) elements.

Element (a, d) attends to the depth-0 slots up to its anchor and to its own chain (a, 1) .. (a, d)
(peagle-spec 4.4). The rule is used as structure and never as a mask over pairs of elements: scores
against the S context keys, d scores against the chain, one softmax over both.
"""

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from peagle_jax.training.cod import Elements

Backend = Literal["auto", "xla", "cudnn"]


def causal(backend: Backend = "auto"):
    """`layers.Attend` over whole sequences without a cache; cuDNN's flash attention for bf16 on GPUs."""

    def attend(q, k, v, cache: None, *, window: int | None):
        flash = backend == "cudnn" or (
            backend == "auto" and jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
        )
        local = None if window is None else (window - 1, 0)
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=local,
            implementation="cudnn" if flash else "xla",
        )
        return out, None

    return attend


@jax.custom_vjp
def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q [B,R,K,G,H], k [B,C,K,H] -> float32 [B,K,G,R,C]; gradients flow in the inputs' dtype."""
    return jnp.einsum("brkgh,bckh->bkgrc", q, k, preferred_element_type=jnp.float32)


def _scores_fwd(q, k):
    return _scores(q, k), (q, k)


def _scores_bwd(saved, g):
    q, k = saved
    g = g.astype(q.dtype)
    return jnp.einsum("bkgrc,bckh->brkgh", g, k), jnp.einsum("bkgrc,brkgh->bckh", g, q)


_scores.defvjp(_scores_fwd, _scores_bwd)


class Keys(NamedTuple):
    """Keys and values of one depth, each [B, R, K, H]."""

    k: jax.Array
    v: jax.Array


def attend_block(
    q: jax.Array,
    context: Keys,
    chain: list[Keys],
    anchor: jax.Array,
    *,
    window: int | None,
) -> jax.Array:
    """Attention of the elements of one depth.

    Args:
      q: [B, R, N, H], elements of depth d = len(chain).
      context: depth-0 keys and values of slots 0..C-1.
      chain: keys and values of depths 1..d, entry i of each belonging to the anchor of query i.
      anchor: [B, R].
      window: context keys must satisfy `key > anchor + d - window`; None: no limit.
    Returns:
      [B, R, N, H].
    """
    B, R, N, H = q.shape
    C, K = context.k.shape[1:3]
    q = (q * H**-0.5).astype(q.dtype).reshape(B, R, K, N // K, H)
    key = jnp.arange(C)
    visible = key <= anchor[..., None]  # [B, R, C]
    if window is not None:
        visible &= key > (anchor + len(chain) - window)[..., None]
    far = jnp.where(visible[:, None, None], _scores(q, context.k), -1e30)
    wide = lambda x: x.astype(jnp.float32)
    near = [(wide(q) * wide(link.k)[..., None, :]).sum(-1) for link in chain]  # each [B,R,K,G]
    near = jnp.stack(near, axis=-1).transpose(0, 2, 3, 1, 4)  # [B,K,G,R,d]
    top = jax.lax.stop_gradient(jnp.maximum(far.max(-1), near.max(-1)))[..., None]
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = (far.sum(-1) + near.sum(-1))[..., None]
    weights = (far / total).astype(q.dtype)
    out = jnp.einsum("bkgrc,bckh->brkgh", weights, context.v)
    near = (near / total).transpose(4, 0, 3, 1, 2)[..., None]  # [d,B,R,K,G,1]
    linked = sum(w * wide(link.v)[..., None, :] for w, link in zip(near, chain, strict=True))
    return (wide(out) + linked).astype(q.dtype).reshape(B, R, N, H)


def _attend_chunked(q, context, chain, anchor, *, window, chunk):
    """`attend_block` over slices of `chunk` queries, recomputed in the backward pass."""
    R = q.shape[1]
    if chunk is None or chunk >= R:
        return attend_block(q, context, chain, anchor, window=window)
    pieces = -(-R // chunk)

    def split(x):  # [B, R, ...] -> [pieces, B, chunk, ...]
        pad = [(0, 0), (0, pieces * chunk - R)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, pad).reshape(x.shape[0], pieces, chunk, *x.shape[2:]), 1, 0)

    one = jax.checkpoint(lambda x: attend_block(x[0], context, x[1], x[2], window=window))
    out = jax.lax.map(one, jax.tree.map(split, (q, chain, anchor)))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :R]


@dataclass(frozen=True)
class ElementAttention:
    """`layers.Attend` over the rows of `Elements`, all depths in one call (P-EAGLE)."""

    elements: Elements
    backend: Backend = "auto"
    chunk: int | None = None
    """Queries attended at once; None: a whole depth. Bounds the scores kept in memory."""

    def __call__(self, q, k, v, cache: None, *, window: int | None):
        offsets = self.elements.offsets
        blocks = [slice(a, b) for a, b in itertools.pairwise(offsets)]
        context = Keys(k[:, blocks[0]], v[:, blocks[0]])
        out = [causal(self.backend)(q[:, blocks[0]], *context, None, window=window)[0]]
        for d, rows in enumerate(blocks[1:], start=1):
            size = rows.stop - rows.start
            prefixes = [slice(b.start, b.start + size) for b in blocks[1 : d + 1]]
            chain = [Keys(k[:, p], v[:, p]) for p in prefixes]
            anchor = self.elements.anchor[:, rows]
            out.append(
                _attend_chunked(q[:, rows], context, chain, anchor, window=window, chunk=self.chunk)
            )
        return jnp.concatenate(out, axis=1), None


@dataclass(frozen=True)
class UnrolledAttention:
    """`layers.Attend` for one unrolled step of EAGLE-3's training-time test.

    The cache of a layer is the list of `Keys` of the steps so far: the first is the context, the
    others are the chain; row a of every step belongs to anchor a.
    """

    backend: Backend = "auto"
    chunk: int | None = None

    def __call__(self, q, k, v, cache: list[Keys] | None, *, window: int | None):
        cache = [*(cache or []), Keys(k, v)]
        if len(cache) == 1:
            return causal(self.backend)(q, k, v, None, window=window)[0], cache
        anchor = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        context, *chain = cache
        out = _attend_chunked(q, context, chain, anchor, window=window, chunk=self.chunk)
        return out, cache
