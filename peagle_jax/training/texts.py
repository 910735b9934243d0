"""COD by texts: depth d is trained on the first B_d texts of a shuffled batch, on all their anchors.

The expected number of elements is that of `training.cod`, and the elements of a depth are a dense block
[B_d, S]: nothing is sorted or gathered. Blocks lie one after the other,

    rows 0..B-1        texts at depth 0, the context
    B_1 rows           texts[:B_1] at depth 1
    B_2 rows           texts[:B_2] at depth 2          B >= B_1 >= B_2 >= ...

so the elements are R = B + B_1 + ... rows of S slots. Element (a, d) of a text is column a of its row in
block d; its parent is the same column of the same text in block d - 1.

Attention of (a, d): the context up to a, which is causal attention of the row, and its own chain, which
is at most K_train - 1 keys in the same column.
"""

import itertools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.layers import AttentionRows
from peagle_jax.training import flash
from peagle_jax.training.attention import Backend, heads_of, is_flash


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
        """Adds up the rows [R, ...] of a text over the depths: [B, ...]. The transpose of `spread`."""
        return _sum(self.split(x), self.sizes[0])


def _sum(blocks: list[jax.Array], rows: int) -> jax.Array:
    """Adds up blocks whose rows are prefixes of `rows`, in float32."""
    wide = lambda x: jnp.pad(x.astype(jnp.float32), [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))
    return sum(map(wide, blocks))


def blocks_of(batch: int, num_depths: int, rate: float, min_rate: float) -> Blocks:
    """Depth d keeps floor(batch * max(rate**d, min_rate)) texts, and at least one.

    64 texts at rate 0.8 and min_rate 0.2: 64, 51, 40, 32, 26, 20, 16, 13.
    """
    kept = np.maximum(rate ** np.arange(num_depths), min_rate)
    # 0.8 ** 2 is a little above 0.64 in floating point, other powers are a little below.
    return Blocks(tuple(int(n) for n in np.maximum(np.floor(batch * kept + 1e-6), 1)))


@dataclass(frozen=True)
class TextAttention:
    """`layers.Attend` over the rows of `Blocks`, all depths in one call, without a cache."""

    blocks: Blocks
    backend: Backend = "auto"

    def __call__(self, rows: AttentionRows, cache: None, *, window: int | None, scale, sinks):
        q, k, v = heads_of(rows, scale, sinks)
        if window is not None:
            raise ValueError("elements by texts have no sliding window")
        return _attend(self.blocks, is_flash(self.backend, q.dtype), q, k, v), None


def _chains(blocks: list[jax.Array], depth: int) -> jax.Array:
    """Blocks [B_j, S, K, H] of the chain of `depth` as float32 [B_d, S, K, 1, d, H], j = 1..d."""
    rows = len(blocks[depth])
    chain = jnp.stack([block[:rows] for block in blocks[1 : depth + 1]], axis=3)
    return chain.astype(jnp.float32)[:, :, :, None]


def _grouped(x: jax.Array, K: int) -> jax.Array:
    """[B, S, N, ...] -> float32 [B, S, K, G, 1, ...]."""
    B, S, N, *rest = x.shape
    return x.astype(jnp.float32).reshape(B, S, K, N // K, 1, *rest)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(blocks: Blocks, use_flash: bool, q, k, v) -> jax.Array:
    """q [R, S, N, H], k and v [R, S, K, H] -> [R, S, N, H]."""
    return _attend_fwd(blocks, use_flash, q, k, v)[0]


def _attend_fwd(blocks, use_flash, q, k, v):
    K, H = k.shape[2:]
    context = blocks.spread(k[: blocks.sizes[0]]), blocks.spread(v[: blocks.sizes[0]])
    far, far_lse = flash.attend(q, *context, flash=use_flash)
    # Products of a row with at most seven keys are sums that XLA fuses; as matrix products they
    # would be tens of thousands of tiny ones.
    qs, ks, vs, fars, lses = map(blocks.split, (q, k, v, far, far_lse))
    outs, totals = fars[:1], lses[:1]
    for d in range(1, len(blocks.sizes)):
        near = (_grouped(qs[d], K) * _chains(ks, d)).sum(-1) * H**-0.5  # [B_d, S, K, G, d]
        lse = _grouped(lses[d], K)  # [B_d, S, K, G, 1]
        total = jnp.logaddexp(lse, jax.nn.logsumexp(near, axis=-1, keepdims=True))
        out = (jnp.exp(near - total)[..., None] * _chains(vs, d)).sum(-2)
        out += jnp.exp(lse - total) * _grouped(fars[d], K)[..., 0, :]
        outs.append(out.astype(q.dtype).reshape(qs[d].shape))
        totals.append(total.reshape(lses[d].shape))
    out, total = jnp.concatenate(outs), jnp.concatenate(totals)
    return out, (q, k, v, out, total)


def _attend_bwd(blocks, use_flash, saved, d_out):
    q, k, v, out, total = saved
    (K, H), B = k.shape[2:], blocks.sizes[0]
    context = blocks.spread(k[:B]), blocks.spread(v[:B])
    dq, *far = flash.gradients(q, *context, out, total, d_out, flash=use_flash)
    dot = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)  # [R, S, N]
    qs, ks, vs, dqs, totals, dots, gs = map(blocks.split, (q, k, v, dq, total, dot, d_out))
    parts = [[[] for _ in blocks.sizes] for _ in range(2)]  # of keys and values, by depth
    for d in range(1, len(blocks.sizes)):
        query, given, keys = _grouped(qs[d], K), _grouped(gs[d], K), _chains(ks, d)
        weights = jnp.exp((query * keys).sum(-1) * H**-0.5 - _grouped(totals[d], K))
        d_near = (given * _chains(vs, d)).sum(-1) - _grouped(dots[d], K)
        d_near = weights * d_near * H**-0.5  # [B_d, S, K, G, d]
        dqs[d] = dqs[d] + (d_near[..., None] * keys).sum(-2).reshape(qs[d].shape)
        for j in range(d):
            at = slice(j, j + 1)
            parts[0][j + 1].append((d_near[..., at, None] * query).sum((3, 4)))
            parts[1][j + 1].append((weights[..., at, None] * given).sum((3, 4)))
    for part, context_rows in zip(parts, far, strict=True):
        part[0] = [blocks.gathered(context_rows)]
    join = lambda part: jnp.concatenate(
        [_sum(x, size) for x, size in zip(part, blocks.sizes, strict=True)]
    )
    dk, dv = map(join, parts)
    dq = jnp.concatenate([x.astype(q.dtype) for x in dqs])
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


_attend.defvjp(_attend_fwd, _attend_bwd)
