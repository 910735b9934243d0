"""COD by texts: depth d is trained on all anchors of the first B_d texts of a shuffled batch.

The paper drops anchors of each text. Dropping texts keeps the expected number of elements, and the
elements of a depth are a dense block [B_d, S]: nothing is sorted or gathered. Blocks lie one after
the other,

    rows 0..B-1        texts at depth 0, the context
    B_1 rows           texts[:B_1] at depth 1
    B_2 rows           texts[:B_2] at depth 2          B >= B_1 >= B_2 >= ...

so the elements are R = B + B_1 + ... rows of S slots. Element (a, d) of a text is column a of its
row in block d; its parent is the same column of the same text in block d - 1.

Attention of (a, d): the context up to a, which is causal attention of the row, and its own chain,
which is at most K_train - 1 keys in the same column.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.models.layers import AttentionRows
from peagle_jax.training import flash
from peagle_jax.training.attention import heads_of, is_flash
from peagle_jax.training.picked import Picked, narrowed, widened

RATE, MIN_RATE = 0.8, 0.2
"""Shares of the texts kept from depth to depth, and at any depth."""
_NO_WEIGHT = 1e4
"""Log-sum-exp of a row whose attention weights are to be 0 in the backward pass."""


@dataclass(frozen=True)
class Blocks:
    """Texts of each depth: sizes[0] is the batch, and sizes never rise."""

    sizes: tuple[int, ...]

    @property
    def depth(self) -> np.ndarray:
        """Depth of every row, [R] int32."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Rows [R, ...] by depth."""
        return jnp.split(x, list(itertools.accumulate(self.sizes[:-1])))

    def spread(self, x: jax.Array) -> jax.Array:
        """One entry per text [B, ...] -> the rows' [R, ...]."""
        return jnp.concatenate([x[:size] for size in self.sizes])

    def ahead(self, x: jax.Array) -> jax.Array:
        """x [B, S] at position a + d, zero past the end: [R, S]."""
        pad = lambda d, size: jnp.pad(x[:size, d:], ((0, 0), (0, d)))
        return jnp.concatenate([pad(d, size) for d, size in enumerate(self.sizes)])

    def gathered(self, x: jax.Array) -> jax.Array:
        """Adds up the rows [R, ...] of a text over the depths: [B, ...]. Transposes `spread`."""
        return _sum(self.split(x), self.sizes[0])


def _sum(blocks: list[jax.Array], rows: int) -> jax.Array:
    """Adds up blocks whose rows are prefixes of `rows`, in float32."""
    wide = lambda x: jnp.pad(x.astype(jnp.float32), [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))
    return sum(map(wide, blocks))


def kept_shares(num_depths: int) -> np.ndarray:
    """Share of the texts that are trained at each depth."""
    return np.maximum(RATE ** np.arange(num_depths), MIN_RATE)


def blocks_of(batch: int, num_depths: int) -> Blocks:
    """Depth d keeps floor(batch * max(RATE**d, MIN_RATE)) texts, and at least one.

    Of 64 texts: 64, 51, 40, 32, 26, 20, 16, 13.
    """
    kept = kept_shares(num_depths)
    # 0.8 ** 2 is a little above 0.64 in floating point, other powers are a little below.
    return Blocks(tuple(int(n) for n in np.maximum(np.floor(batch * kept + 1e-6), 1)))


@dataclass(frozen=True)
class TextAttention:
    """`layers.Attend` over all depths in one call, without a cache.

    Rows are B * S of depth 0, then those of the blocks B_1, B_2, ...; their leading axes do not
    matter. Deep blocks have all S anchors of a text, or those of `picked`.
    """

    blocks: Blocks
    picked: Picked | None = None

    def __call__(self, rows: AttentionRows, cache: None, *, window: int | None, scale, sinks):
        q, k, v = heads_of(rows, scale, sinks)
        if window is not None:
            raise ValueError("heads with sliding windows are not trained")
        B, deep = self.blocks.sizes[0], sum(self.blocks.sizes[1:])
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        picked = self.picked
        columns = len(flat[0]) // (B + deep) if picked is None else picked.slots.shape[1]
        edge = len(flat[0]) - deep * columns
        first = [x[:edge].reshape(B, edge // B, *x.shape[1:]) for x in flat]
        rest = [x[edge:].reshape(deep, columns, *x.shape[1:]) for x in flat]
        outs = _attend(self.blocks, is_flash(q.dtype), picked, first, rest)
        return jnp.concatenate([x.reshape(-1, *x.shape[2:]) for x in outs]).reshape(q.shape), None


def _chains(blocks: list[jax.Array], depth: int) -> jax.Array:
    """Blocks [B_j, P, K, H], j = 1..d, of the chain of `depth` as float32 [B_d, P, K, 1, d, H]."""
    rows = len(blocks[depth - 1])
    chain = jnp.stack([block[:rows] for block in blocks[:depth]], axis=3)
    return chain.astype(jnp.float32)[:, :, :, None]


def _grouped(x: jax.Array, K: int) -> jax.Array:
    """[B, P, N, ...] -> float32 [B, P, K, G, 1, ...]."""
    B, P, N, *rest = x.shape
    return x.astype(jnp.float32).reshape(B, P, K, N // K, 1, *rest)


class _Deep(NamedTuple):
    """Splits and moves rows of the depths from 1 on."""

    blocks: Blocks
    picked: Picked | None

    def split(self, x: jax.Array) -> list[jax.Array]:
        sizes = self.blocks.sizes[1:]
        return jnp.split(x, list(itertools.accumulate(sizes[:-1])))[: len(sizes)]

    def _spread(self, x: jax.Array) -> jax.Array:
        return self.blocks.spread(x)[self.blocks.sizes[0] :]

    def join(self, first: jax.Array, deep: jax.Array, fill: float = 0.0) -> jax.Array:
        """Rows of depth 0 [B, S, ...] and deep rows [.., P, ...] at their slots: [R, S, ...]."""
        if self.picked is not None:
            deep = widened(deep, self._spread(self.picked.columns), fill)
        return jnp.concatenate([first, deep])

    def parts(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Undoes `join`."""
        first, deep = jnp.split(x, [self.blocks.sizes[0]])
        if self.picked is not None:
            deep = narrowed(deep, *map(self._spread, self.picked))
        return first, deep


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(blocks: Blocks, use_flash: bool, picked: Picked | None, first, deep):
    """Outputs of depth 0 [B, S, N, H] and of the other depths [R - B, P, N, H].

    `first` and `deep` are (q, k, v) of these rows.
    """
    return _attend_fwd(blocks, use_flash, picked, first, deep)[0]


def _attend_fwd(blocks, use_flash, picked, first, deep):
    rows = _Deep(blocks, picked)
    q, k, v = deep
    K, H = k.shape[2:]
    context = map(blocks.spread, first[1:])
    far, far_lse = flash.attend(rows.join(first[0], q), *context, flash=use_flash)
    (out, far), (lse, far_lse) = rows.parts(far), rows.parts(far_lse)
    # Products of a row with at most seven keys are sums that XLA fuses; as matrix products they
    # would be tens of thousands of tiny ones.
    qs, ks, vs, fars, lses = map(rows.split, (q, k, v, far, far_lse))
    outs, totals = [far[:0]], [far_lse[:0]]
    for d in range(1, len(blocks.sizes)):
        query, fars_lse = qs[d - 1], _grouped(lses[d - 1], K)  # [B_d, P, K, G, 1]
        near = (_grouped(query, K) * _chains(ks, d)).sum(-1) * H**-0.5  # [B_d, P, K, G, d]
        total = jnp.logaddexp(fars_lse, jax.nn.logsumexp(near, axis=-1, keepdims=True))
        mixed = (jnp.exp(near - total)[..., None] * _chains(vs, d)).sum(-2)
        mixed += jnp.exp(fars_lse - total) * _grouped(fars[d - 1], K)[..., 0, :]
        outs.append(mixed.astype(q.dtype).reshape(query.shape))
        totals.append(total.reshape(query.shape[:-1]))
    outs = out, jnp.concatenate(outs)
    return outs, (picked, first, deep, outs, (lse, jnp.concatenate(totals)))


def _attend_bwd(blocks, use_flash, saved, d_outs):
    picked, first, deep, outs, lses = saved
    rows, (q, k, v) = _Deep(blocks, picked), deep
    K, H = k.shape[2:]
    dq, *far = flash.gradients(
        rows.join(first[0], q),
        *map(blocks.spread, first[1:]),
        rows.join(*outs),
        rows.join(*lses, fill=_NO_WEIGHT),
        rows.join(*d_outs),
        flash=use_flash,
    )
    first_dq, dq = rows.parts(dq)
    dot = (outs[1].astype(jnp.float32) * d_outs[1].astype(jnp.float32)).sum(-1)
    qs, ks, vs, dqs, totals, dots, gs = map(rows.split, (q, k, v, dq, lses[1], dot, d_outs[1]))
    parts = [[[] for _ in ks] for _ in range(2)]  # of keys and values, by depth
    for d in range(1, len(blocks.sizes)):
        query, given, keys = _grouped(qs[d - 1], K), _grouped(gs[d - 1], K), _chains(ks, d)
        weights = jnp.exp((query * keys).sum(-1) * H**-0.5 - _grouped(totals[d - 1], K))
        d_near = (given * _chains(vs, d)).sum(-1) - _grouped(dots[d - 1], K)
        d_near = weights * d_near * H**-0.5  # [B_d, P, K, G, d]
        dqs[d - 1] = dqs[d - 1] + (d_near[..., None] * keys).sum(-2).reshape(qs[d - 1].shape)
        for j in range(d):
            at = slice(j, j + 1)
            parts[0][j].append((d_near[..., at, None] * query).sum((3, 4)))
            parts[1][j].append((weights[..., at, None] * given).sum((3, 4)))
    join = lambda part, x: jnp.concatenate(
        [
            x[:0].astype(jnp.float32),
            *(_sum(p, n) for p, n in zip(part, blocks.sizes[1:], strict=True)),
        ]
    ).astype(x.dtype)
    d_first = [blocks.gathered(x).astype(q.dtype) for x in far]
    d_deep = [join(part, x) for part, x in zip(parts, (k, v), strict=True)]
    dq = jnp.concatenate([q[:0], *(x.astype(q.dtype) for x in dqs)])
    return None, [first_dq.astype(q.dtype), *d_first], [dq, *d_deep]


_attend.defvjp(_attend_fwd, _attend_bwd)
