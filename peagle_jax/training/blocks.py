"""Training of block drafters: blocks of a newest token and masks behind anchors of each text.

The block of anchor a has x_{a+1} and masks at positions a+1, a+2, .., sees the context 0..a and
itself, and drafts x_{a+2}, .., so its drafts are the elements (a, d) of the other methods. A row
has scores against the context and against the T keys of its own block, and one softmax over both;
no mask over pairs of rows is built. Letters: B texts of S slots, P anchors, T rows of a block.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from peagle_jax.models.layers import Attention, AttentionRows
from peagle_jax.models.rope_angles import rope_angles
from peagle_jax.training import flash
from peagle_jax.training.attention import is_flash
from peagle_jax.training.picked import Picked, narrowed, widened

_NO_WEIGHT = 1e4
"""Log-sum-exp of a row whose attention weights are to be 0 in the backward pass."""


@dataclass(frozen=True)
class TextBlocks:
    """`block_head.BlockAttend` over the blocks of whole texts: rows [B * P, T, D]."""

    slots: jax.Array  # [B, P] int32, anchors, ascending
    picked: Picked | None  # None: all slots are anchors

    def __call__(self, attention: Attention, is_causal: bool, context, x, cache: None):
        config = attention.config
        if config.window is not None:
            raise ValueError("heads with sliding windows are not trained")
        (B, S, _), (P, T) = context.shape, (self.slots.shape[1], x.shape[1])
        angles = lambda at: rope_angles(config.rope, config.head_dim, at)
        _, k, v = AttentionRows(attention, context, angles(jnp.arange(S)[None])).heads()
        positions = self.slots.reshape(-1, 1) + 1 + jnp.arange(T)
        own = AttentionRows(attention, x, angles(positions)).heads()
        own = tuple(part.reshape(B, P, T, *part.shape[2:]) for part in own)
        out = _attend(is_causal, is_flash(k.dtype), self.picked, (k, v), own)
        return out.reshape(B * P, T, -1), cache


class _Wide(NamedTuple):
    """Moves rows [B, P, T, ...] to the slots of their anchors, [T * B, S, ...], and back.

    There the context that they see is that of causal attention.
    """

    picked: Picked | None

    def put(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        x = jnp.moveaxis(x, 2, 0)
        if self.picked is not None:
            x = jax.vmap(lambda rows: widened(rows, self.picked.columns, fill))(x)
        return x.reshape(-1, *x.shape[2:])

    def taken(self, x: jax.Array, T: int) -> jax.Array:
        x = x.reshape(T, -1, *x.shape[1:])
        if self.picked is not None:
            x = jax.vmap(lambda rows: narrowed(rows, *self.picked))(x)
        return jnp.moveaxis(x, 0, 2)


def _grouped(x: jax.Array, K: int) -> jax.Array:
    """[B, P, T, N, ...] -> float32 [B, P, T, K, G, ...]."""
    B, P, T, N, *rest = x.shape
    return x.astype(jnp.float32).reshape(B, P, T, K, N // K, *rest)


def _near(q: jax.Array, k: jax.Array, is_causal: bool) -> jax.Array:
    """Scores [B, P, K, G, T, T] of grouped queries against the keys of their block."""
    scores = jnp.einsum("bptkgh,bpskh->bpkgts", q, k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    T = scores.shape[-1]
    return jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf) if is_causal else scores


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(is_causal: bool, use_flash: bool, picked: Picked | None, context, own):
    """Output [B, P, T, N, H] of blocks `own` = (q, k, v) over them and `context` = (k, v)."""
    return _attend_fwd(is_causal, use_flash, picked, context, own)[0]


def _attend_fwd(is_causal, use_flash, picked, context, own):
    wide, (q, k, v) = _Wide(picked), own
    T, K = q.shape[2], k.shape[3]
    tiled = (jnp.tile(x, (T, 1, 1, 1)) for x in context)
    far, far_lse = (wide.taken(x, T) for x in flash.attend(wide.put(q), *tiled, flash=use_flash))
    near = _near(_grouped(q, K), k, is_causal)
    far_lse = jnp.moveaxis(_grouped(far_lse, K), 2, 4)  # [B, P, K, G, T]
    total = jnp.logaddexp(far_lse, jax.nn.logsumexp(near, axis=-1))
    weights = jnp.exp(near - total[..., None])
    out = jnp.einsum("bpkgts,bpskh->bptkgh", weights, v.astype(jnp.float32))
    out += jnp.moveaxis(jnp.exp(far_lse - total), 4, 2)[..., None] * _grouped(far, K)
    out = out.astype(q.dtype).reshape(q.shape)
    return out, (picked, context, own, out, total)


def _attend_bwd(is_causal, use_flash, saved, d_out):
    picked, context, (q, k, v), out, total = saved
    wide, T, K = _Wide(picked), q.shape[2], k.shape[3]
    lse = jnp.moveaxis(total, 4, 2).reshape(q.shape[:-1])  # [B, P, T, N]
    far_dq, *d_context = flash.gradients(
        wide.put(q),
        *(jnp.tile(x, (T, 1, 1, 1)) for x in context),
        wide.put(out),
        wide.put(lse, fill=_NO_WEIGHT),
        wide.put(d_out),
        flash=use_flash,
    )
    query, given = _grouped(q, K), _grouped(d_out, K)
    dot = (_grouped(out, K) * given).sum(-1)  # [B, P, T, K, G]
    weights = jnp.exp(_near(query, k, is_causal) - total[..., None])
    d_near = jnp.einsum("bptkgh,bpskh->bpkgts", given, v.astype(jnp.float32))
    d_near = weights * (d_near - jnp.moveaxis(dot, 2, 4)[..., None]) * q.shape[-1] ** -0.5
    dq = jnp.einsum("bpkgts,bpskh->bptkgh", d_near, k.astype(jnp.float32)).reshape(q.shape)
    dk = jnp.einsum("bpkgts,bptkgh->bpskh", d_near, query)
    dv = jnp.einsum("bpkgts,bptkgh->bpskh", weights, given)
    dq = dq + wide.taken(far_dq, T).astype(jnp.float32)
    added = lambda x: x.astype(jnp.float32).reshape(T, -1, *x.shape[1:]).sum(0)
    cast = lambda parts: tuple(part.astype(q.dtype) for part in parts)
    return None, cast(map(added, d_context)), cast((dq, dk, dv))


_attend.defvjp(_attend_fwd, _attend_bwd)
