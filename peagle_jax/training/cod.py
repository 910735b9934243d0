"""Conditional drop-token sampling (COD): which (anchor, depth) elements a drafter is trained on.

Element (a, d) is the draft d steps after the real slot a; its slot is p = a + d. Depth 0 has every slot,
as context. Deeper elements are subsampled; an anchor kept at depth d + 1 is kept at depth d, so the chain
that an element attends to always exists.

The layout of rows spares the attention all index arithmetic:

    rows      0..S-1        slots in order, depth 0
    block 1   R_1 rows      anchors[:R_1] at depth 1
    block 2   R_2 rows      anchors[:R_2] at depth 2          R_1 >= R_2 >= ...

Anchors are sorted by how deep they survive, deepest first. Hence the kept anchors of every depth are
a prefix, and entry i of block d has its parent at entry i of block d - 1.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Elements:
    """T = S + R_1 + ... rows per sequence; `used` marks the rows that enter the loss."""

    anchor: jax.Array  # [B, T] int32
    used: jax.Array  # [B, T] bool
    num_slots: int = field(metadata=dict(static=True))
    sizes: tuple[int, ...] = field(metadata=dict(static=True))

    @property
    def depth(self) -> np.ndarray:
        """Depth of every row, [T] int32."""
        blocks = (self.num_slots, *self.sizes)
        return np.repeat(np.arange(len(blocks), dtype=np.int32), blocks)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of every depth, and the number of rows T at the end."""
        return (0, *np.cumsum((self.num_slots, *self.sizes)).tolist())

    @property
    def slots(self) -> jax.Array:
        """Slot (and rope position) a + d of every row, [B, T]."""
        return self.anchor + self.depth


def kept_counts(num_slots: int, num_depths: int, rate: float, min_rate: float) -> np.ndarray:
    """Elements kept at each depth for every number of seeds: [num_slots + 1, num_depths] int32.

    `floor(max(0, seeds - d) * max(rate**d, min_rate))`: with 512 seeds and rate 0.8 that is 512, 408,
    326, 260, 208, ...
    """
    seeds = np.arange(num_slots + 1)[:, None]
    depth = np.arange(num_depths)
    kept = np.maximum(seeds - depth, 0) * np.maximum(rate**depth, min_rate)
    return np.floor(kept).astype(np.int32)


def _ahead(valid: jax.Array, d: int) -> jax.Array:
    """`valid` at slot a + d for every anchor a [..., S]."""
    return jnp.pad(valid[..., d:], [(0, 0)] * (valid.ndim - 1) + [(0, d)])


def sample_elements(
    key: jax.Array, valid: jax.Array, *, num_depths: int, rate: float, min_rate: float
) -> Elements:
    """Draws the elements of each sequence.

    Each anchor draws one random priority. Depth d keeps the n_d anchors of highest priority: a uniform
    subset, and the subsets of deeper depths are nested.

    Args:
      valid: [B, S] bool, slots whose label enters the loss; they are the seeds.
      num_depths: K_train; depths 0 to K_train - 1.
      rate, min_rate: depth d keeps about max(rate**d, min_rate) of the seeds.
    """
    B, S = valid.shape
    counts = kept_counts(S, num_depths, rate, min_rate)
    keep = jnp.asarray(counts)[valid.sum(axis=1)]  # [B, num_depths]
    priority = jax.random.uniform(key, (B, S))
    alive = jnp.ones((B, S), bool)
    survived = jnp.zeros((B, S), jnp.int32)
    for d in range(1, num_depths):
        pool = alive & _ahead(valid, d)
        ranked = jnp.sort(jnp.where(pool, priority, jnp.inf), axis=1)
        limit = jnp.take_along_axis(ranked, jnp.maximum(keep[:, d : d + 1] - 1, 0), axis=1)
        alive = pool & (priority <= limit) & (keep[:, d : d + 1] > 0)
        survived = survived + alive
    order = jnp.argsort(-survived, axis=1, stable=True).astype(jnp.int32)
    deepest = jnp.take_along_axis(survived, order, axis=1)
    sizes = tuple(int(n) for n in counts[S, 1:] if n > 0)
    anchor = [jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))]
    used = [valid]
    for d, size in enumerate(sizes, start=1):
        anchor.append(order[:, :size])
        used.append(deepest[:, :size] >= d)
    return Elements(jnp.concatenate(anchor, 1), jnp.concatenate(used, 1), S, sizes)


def all_elements(valid: jax.Array, num_depths: int) -> Elements:
    """Every anchor at every depth, nothing dropped: T = S * num_depths rows (evaluation)."""
    B, S = valid.shape
    anchor = jnp.tile(jnp.arange(S, dtype=jnp.int32), (B, num_depths))
    used = jnp.concatenate([_ahead(valid, d) for d in range(num_depths)], axis=1)
    return Elements(anchor, used, S, (S,) * (num_depths - 1))
