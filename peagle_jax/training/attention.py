"""Attention for training: causal over a sequence, and over (anchor, depth) elements.

Element (a, d) attends to the depth-0 slots up to its anchor and to its own chain (a, 1) .. (a, d)
(docs/algorithm.md, "Training"). No mask over pairs of elements is built: a row has scores against the S
context keys and against the at most K_train - 1 keys of its chain, and one softmax over both. Letters:
C context keys, R element rows, D chain length, E entries of a depth block.
"""

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from peagle_jax.models.layers import AttentionRows
from peagle_jax.training.cod import Elements

Backend = Literal["auto", "xla", "cudnn"]


def is_flash(backend: Backend, dtype) -> bool:
    """Whether to use cuDNN's flash attention: on request, or for bfloat16 on an NVIDIA GPU."""
    if backend == "auto":
        return dtype == jnp.bfloat16 and dispatch.platform() == "cuda"
    return backend == "cudnn"


def heads_of(rows: AttentionRows, scale: float, sinks) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, N, H], k and v [B, T, K, H] of an `Attend` call; what is trained has no scales and no sinks."""
    q, k, v = rows.heads()
    if sinks is not None or scale != q.shape[-1] ** -0.5:
        raise ValueError("training attends with scale H ** -0.5 and without sinks")
    return q, k, v


def causal(backend: Backend = "auto"):
    """`layers.Attend` over whole sequences without a cache; cuDNN's flash attention for bf16 on GPUs."""

    def attend(rows: AttentionRows, cache: None, *, window: int | None, scale: float, sinks):
        return causal_attention(*heads_of(rows, scale, sinks), window, backend), None

    return attend


def causal_attention(q, k, v, window: int | None, backend: Backend) -> jax.Array:
    """Attention output [B, S, N, H] of q [B, S, N, H] over k and v [B, S, K, H]."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn" if is_flash(backend, q.dtype) else "xla",
    )


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


def _split_heads(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, R, N, H] -> scaled [B, R, K, G, H]."""
    B, R, N, H = q.shape
    return (q * H**-0.5).astype(q.dtype).reshape(B, R, num_kv_heads, N // num_kv_heads, H)


def _context_part(q, near, anchor, depth, context: Keys, window: int | None):
    """Softmax over context and chain scores, applied to the context's values.

    Args:
      q: [B, R, K, G, H]; near: [B, R, K, G, D] float32 chain scores, -inf where there is no key.
      anchor: [B, R]; depth: [R].
    Returns:
      the context's part of the output, [B, R, K, G, H], and the chain's weights, shaped like `near`.
    """
    key = jnp.arange(context.k.shape[1])
    visible = key <= anchor[..., None]  # [B, R, C]
    if window is not None:
        visible &= key > (anchor + depth - window)[..., None]
    far = jnp.where(visible[:, None, None], _scores(q, context.k), -jnp.inf)  # [B,K,G,R,C]
    near = near.transpose(0, 2, 3, 1, 4)  # [B,K,G,R,D]
    top = jax.lax.stop_gradient(jnp.maximum(far.max(-1), near.max(-1)))[..., None]
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = (far.sum(-1) + near.sum(-1))[..., None]
    out = jnp.einsum("bkgrc,bckh->brkgh", (far / total).astype(q.dtype), context.v)
    return out, (near / total).transpose(0, 3, 1, 2, 4)


def _context_chunked(q, near, anchor, depth, context: Keys, window, chunk: int | None):
    """`_context_part` over slices of `chunk` rows, recomputed in the backward pass."""
    B, R = anchor.shape
    if chunk is None or chunk >= R:
        return _context_part(q, near, anchor, depth, context, window)
    pieces = -(-R // chunk)

    def split(x):  # [B, R, ...] -> [pieces, B, chunk, ...]
        pad = [(0, 0), (0, pieces * chunk - R)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, pad).reshape(B, pieces, chunk, *x.shape[2:]), 1, 0)

    one = jax.checkpoint(lambda x: _context_part(*x[:3], x[3][0], context, window))
    depth = jnp.broadcast_to(depth, (B, R))
    out = jax.lax.map(one, jax.tree.map(split, (q, near, anchor, depth)))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(B, pieces * chunk, *x.shape[3:])[:, :R], out
    )


@jax.custom_vjp
def _chain_scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q [B,D,E,K,G,H], k [B,J,E,K,H] -> float32 [B,D,E,K,G,J]: entry by entry, all pairs of depths."""
    return jnp.einsum("bdekgh,bjekh->bdekgj", q, k, preferred_element_type=jnp.float32)


def _chain_scores_bwd(saved, g):
    q, k = saved
    g = g.astype(q.dtype)
    return jnp.einsum("bdekgj,bjekh->bdekgh", g, k), jnp.einsum("bdekgj,bdekgh->bjekh", g, q)


_chain_scores.defvjp(lambda q, k: (_chain_scores(q, k), (q, k)), _chain_scores_bwd)


def _chain_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """weights [B,D,E,K,G,J], v [B,J,E,K,H] -> [B,D,E,K,G,H]."""
    return jnp.einsum("bdekgj,bjekh->bdekgh", weights.astype(v.dtype), v)


@dataclass(frozen=True)
class ElementAttention:
    """`layers.Attend` over the rows of `Elements`, all depths in one call (P-EAGLE).

    A layer's cache is None, or the context's `Keys`; then the rows are those of depths 1.. only.

    For the chain the depth blocks are padded to one rectangle [B, D, E]: because every block is a
    prefix of the first, entry e holds the same anchor at every depth.
    """

    elements: Elements
    backend: Backend = "auto"
    chunk: int | None = None
    """Number of rows per chunk of context scores, to bound memory; None: all rows at once."""

    def _rectangle(self, x: jax.Array) -> jax.Array:
        """Rows [B, R, ...] of depths 1.. -> [B, D, E, ...]."""
        sizes = self.elements.sizes
        edges = itertools.accumulate(sizes[:-1])
        pad = lambda block: [(0, 0), (0, sizes[0] - block.shape[1])] + [(0, 0)] * (x.ndim - 2)
        blocks = jnp.split(x, list(edges), axis=1)
        return jnp.stack([jnp.pad(block, pad(block)) for block in blocks], axis=1)

    def _rows(self, x: jax.Array) -> jax.Array:
        """Undoes `_rectangle`."""
        sizes = self.elements.sizes
        return jnp.concatenate([x[:, d, :size] for d, size in enumerate(sizes)], axis=1)

    def __call__(
        self, rows: AttentionRows, cache: Keys | None, *, window: int | None, scale: float, sinks
    ):
        q, k, v = heads_of(rows, scale, sinks)
        if cache is not None:
            return self._deep(q, k, v, cache, window), cache
        S = self.elements.num_slots
        context = Keys(k[:, :S], v[:, :S])
        first = causal_attention(q[:, :S], *context, window, self.backend)
        if q.shape[1] == S:
            return first, None
        deep = self._deep(q[:, S:], k[:, S:], v[:, S:], context, window)
        return jnp.concatenate([first, deep], axis=1), None

    def _deep(self, q, k, v, context: Keys, window: int | None) -> jax.Array:
        """Rows of depths 1.., [B, R, N, H]."""
        S = self.elements.num_slots
        deep = _split_heads(q, k.shape[2])
        k, v = self._rectangle(k), self._rectangle(v)
        near = _chain_scores(self._rectangle(deep), k)  # [B,D,E,K,G,J]
        D = len(self.elements.sizes)
        in_chain = jnp.tri(D, dtype=bool)[:, None, None, None]  # key depth <= query depth
        near = self._rows(jnp.where(in_chain, near, -jnp.inf))
        depth = jnp.asarray(self.elements.depth[S:])
        anchor = self.elements.anchor[:, S:]
        far, near = _context_chunked(deep, near, anchor, depth, context, window, self.chunk)
        out = far + self._rows(_chain_values(self._rectangle(near), v))
        return out.reshape(q.shape)


@dataclass(frozen=True)
class UnrolledAttention:
    """`layers.Attend` for one unrolled step of EAGLE-3's training-time test.

    The cache of a layer is the list of `Keys` of the steps so far: the first is the context, the
    others are the chain; row a of every later step belongs to the same anchor, a or `anchors[a]`.
    """

    backend: Backend = "auto"
    chunk: int | None = None
    anchors: jax.Array | None = None  # [B, S]; None: all slots

    def __call__(
        self,
        rows: AttentionRows,
        cache: list[Keys] | None,
        *,
        window: int | None,
        scale: float,
        sinks,
    ):
        q, k, v = heads_of(rows, scale, sinks)
        cache = [*(cache or []), Keys(k, v)]
        if len(cache) == 1:
            return causal_attention(q, k, v, window, self.backend), cache
        B, S, N, H = q.shape
        context, *links = cache
        chain = Keys(*(jnp.stack(x, axis=1) for x in zip(*links, strict=True)))  # [B, J, S, K, H]
        q = _split_heads(q, k.shape[2])
        near = _chain_scores(q[:, None], chain.k)[:, 0]
        anchor = self.anchors
        if anchor is None:
            anchor = jnp.broadcast_to(jnp.arange(S), (B, S))
        depth = jnp.full(S, len(links))
        far, near = _context_chunked(q, near, anchor, depth, context, window, self.chunk)
        out = far + _chain_values(near[:, None], chain.v)[:, 0]
        return out.reshape(B, S, N, H), cache
