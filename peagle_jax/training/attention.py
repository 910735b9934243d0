"""Attention for training: causal over a sequence, and the unrolled steps of EAGLE-3.

A row of step s attends to the context up to its anchor and to its own chain, the rows of steps 1..s
of the same anchor (docs/algorithm.md, "Training"). No mask over pairs of rows is built: a row has
scores against the S context keys and against the keys of its chain, and one softmax over both.
Letters: C context keys, R rows of a step, D chain length.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from peagle_jax.models.layers import AttentionRows


def is_flash(dtype) -> bool:
    """Whether cuDNN's flash attention computes: bfloat16 on an NVIDIA GPU."""
    return dtype == jnp.bfloat16 and dispatch.platform() == "cuda"


def heads_of(rows: AttentionRows, scale: float, sinks) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, N, H], k and v [B, T, K, H] of an `Attend` call.

    Raises:
      ValueError: what is trained has another scale or sinks.
    """
    q, k, v = rows.heads()
    if sinks is not None or scale != q.shape[-1] ** -0.5:
        raise ValueError("training attends with scale H ** -0.5 and without sinks")
    return q, k, v


def causal(rows: AttentionRows, cache: None, *, window: int | None, scale: float, sinks):
    """`layers.Attend` over whole sequences without a cache."""
    return causal_attention(*heads_of(rows, scale, sinks), window), None


def causal_attention(q, k, v, window: int | None = None) -> jax.Array:
    """[B, S, N, H] of q [B, S, N, H] over k and v [B, S, K, H]; by cuDNN where `is_flash`."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn" if is_flash(q.dtype) else "xla",
    )


class Keys(NamedTuple):
    """Keys and values of one step, each [B, R, K, H]."""

    k: jax.Array
    v: jax.Array


@jax.custom_vjp
def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q [B,R,K,G,H], k [B,C,K,H] -> float32 [B,K,G,R,C]; gradients flow in the inputs' dtype."""
    return jnp.einsum("brkgh,bckh->bkgrc", q, k, preferred_element_type=jnp.float32)


def _scores_bwd(saved, g):
    q, k = saved
    g = g.astype(q.dtype)
    return jnp.einsum("bkgrc,bckh->brkgh", g, k), jnp.einsum("bkgrc,brkgh->bckh", g, q)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_bwd)


@jax.custom_vjp
def _chain_scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q [B,1,R,K,G,H], k [B,D,R,K,H] -> float32 [B,1,R,K,G,D]: every row against its own chain."""
    return jnp.einsum("bdekgh,bjekh->bdekgj", q, k, preferred_element_type=jnp.float32)


def _chain_scores_bwd(saved, g):
    q, k = saved
    g = g.astype(q.dtype)
    return jnp.einsum("bdekgj,bjekh->bdekgh", g, k), jnp.einsum("bdekgj,bdekgh->bjekh", g, q)


_chain_scores.defvjp(lambda q, k: (_chain_scores(q, k), (q, k)), _chain_scores_bwd)


def _chain_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """weights [B,1,R,K,G,D], v [B,D,R,K,H] -> [B,1,R,K,G,H]."""
    return jnp.einsum("bdekgj,bjekh->bdekgh", weights.astype(v.dtype), v)


def _split_heads(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, R, N, H] -> scaled [B, R, K, G, H]."""
    B, R, N, H = q.shape
    return (q * H**-0.5).astype(q.dtype).reshape(B, R, num_kv_heads, N // num_kv_heads, H)


def _context_part(q, near, anchor, context: Keys):
    """Softmax over context and chain scores, applied to the context's values.

    Args:
      q: [B, R, K, G, H]; near: [B, R, K, G, D] float32 chain scores; anchor: [B, R].
    Returns:
      the context's part of the output, [B, R, K, G, H], and the chain's weights, shaped like
      `near`.
    """
    key = jnp.arange(context.k.shape[1])
    visible = key <= anchor[..., None]  # [B, R, C]
    far = jnp.where(visible[:, None, None], _scores(q, context.k), -jnp.inf)  # [B,K,G,R,C]
    near = near.transpose(0, 2, 3, 1, 4)  # [B,K,G,R,D]
    top = jax.lax.stop_gradient(jnp.maximum(far.max(-1), near.max(-1)))[..., None]
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = (far.sum(-1) + near.sum(-1))[..., None]
    out = jnp.einsum("bkgrc,bckh->brkgh", (far / total).astype(q.dtype), context.v)
    return out, (near / total).transpose(0, 3, 1, 2, 4)


@dataclass(frozen=True)
class UnrolledAttention:
    """`layers.Attend` for one unrolled step of EAGLE-3's training-time test.

    The cache of a layer is the list of `Keys` of the steps so far: the first is the context, the
    others are the chain; row a of every later step belongs to the same anchor, a or `anchors[a]`.
    """

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
        if window is not None:
            raise ValueError("heads with sliding windows are not trained")
        cache = [*(cache or []), Keys(k, v)]
        if len(cache) == 1:
            return causal_attention(q, k, v), cache
        B, S, N, H = q.shape
        context, *links = cache
        chain = Keys(*(jnp.stack(x, axis=1) for x in zip(*links, strict=True)))  # [B, J, S, K, H]
        q = _split_heads(q, k.shape[2])
        near = _chain_scores(q[:, None], chain.k)[:, 0]
        anchor = self.anchors
        if anchor is None:
            anchor = jnp.broadcast_to(jnp.arange(S), (B, S))
        far, near = _context_part(q, near, anchor, context)
        out = far + _chain_values(near[:, None], chain.v)[:, 0]
        return out.reshape(B, S, N, H), cache
