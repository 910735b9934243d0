"""The KV cache of one model, one entry per layer (pages or a ring), and attention over it.

A full-attention layer stores K and V in pages, which the scheduler allocates through the page
table. A sliding-window layer stores them in one ring of pages per slot, large enough for the window
plus the rows of one call, independent of the sequence length. Page 0 and the last slot are dummies:
padding rows and positions past a page table write there, and no real row reads them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rope_write.api import rope_write
from pallas_kernels.verify_attention.api import verify_attention
from peagle_jax.config import AttentionConfig, EngineConfig
from peagle_jax.models.layers import AttentionRows
from peagle_jax.parallel.shares import stored_attention


class PageCache(NamedTuple):
    """K and V of a full-attention layer, each [P, Z, K, H]: P pages of Z positions."""

    k: jax.Array
    v: jax.Array


class RingCache(NamedTuple):
    """K and V of a sliding-window layer, each [slots + saved, ring, Z, K, H]: a ring of pages for
    each slot, and saved rings."""

    k: jax.Array
    v: jax.Array


LayerCache = PageCache | RingCache


def ring_rows(config: EngineConfig) -> int:
    """Rows of a ring cache: the slots, the dummy slot, and the saved rings."""
    return config.max_num_seqs + 1 + (config.saved_rings or 0)


def init_cache(layers: Sequence[AttentionConfig], config: EngineConfig) -> list[LayerCache]:
    """Zeroed caches for all layers, of all devices together.

    They have rows for `max_num_seqs` slots, the dummy slot and the saved rings.
    """

    def zeros(layer: AttentionConfig) -> LayerCache:
        layer = stored_attention(layer, config.tensor_parallel)
        tail = (config.page_size, layer.num_kv_heads, layer.head_dim)
        if layer.window is None:
            kind, shape = PageCache, (config.total_pages, *tail)
        else:
            ring = config.ring_pages(layer.window)
            kind, shape = RingCache, (ring_rows(config), ring, *tail)
        return kind(jnp.zeros(shape, config.cache_dtype), jnp.zeros(shape, config.cache_dtype))

    return [zeros(layer) for layer in layers]


def rings_of(*caches: Sequence[LayerCache]) -> list[RingCache]:
    """The layers with a sliding window."""
    return [layer for cache in caches for layer in cache if isinstance(layer, RingCache)]


def with_rings(cache: Sequence[LayerCache], rings: Iterator[RingCache]) -> list[LayerCache]:
    """The cache with other arrays in the layers with a sliding window: the next ones of `rings`."""
    return [next(rings) if isinstance(layer, RingCache) else layer for layer in cache]


def copy_rings(rings: list[RingCache], source: jax.Array, target: jax.Array) -> list[RingCache]:
    """Copies the rings of row `source`, [] int32, to row `target` in all layers."""
    return jax.tree.map(lambda x: x.at[target].set(x[source]), rings)


@dataclass(frozen=True)
class PagedAttention:
    """`layers.Attend` over pages and rings: writes the new K and V, then computes causal attention.

    The write comes first, so that rows of one call see each other. Stale K and V of rejected drafts
    need no rollback: the next round overwrites these positions before any query reads them.
    """

    page_table: jax.Array  # [B, W] int32
    slots: jax.Array  # [B] int32
    positions: jax.Array  # [B, T] int32

    def __call__(
        self,
        rows: AttentionRows,
        cache: LayerCache,
        *,
        window: int | None,
        scale: float,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache]:
        q, cache = self.write(rows, cache)
        return self.read(q, cache, window=window, scale=scale, sinks=sinks), cache

    def write(self, rows: AttentionRows, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Writes K and V of the rows. Returns their queries [B, T, N, H] and the cache."""
        table, is_ring = self._table(cache)
        projected = rows.projected()
        q, *pages = rope_write(
            projected.parts,
            *_as_pages(cache),
            angles=projected.angles,
            page_table=table,
            positions=self.positions,
            form=replace(projected.form, ring=is_ring),
            norms=projected.norms,
            bias=projected.bias,
        )
        return q, type(cache)(*(x.reshape(cache.k.shape) for x in pages))

    def read(
        self,
        q: jax.Array,
        cache: LayerCache,
        *,
        window: int | None,
        scale: float,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Attention output [B, T, N, H] of queries q [B, T, N, H] over the written positions."""
        return verify_attention(
            q,
            *_as_pages(cache),
            page_table=self._table(cache)[0],
            positions=self.positions,
            scale=scale,
            window=window,
            sinks=sinks,
        )

    def _table(self, cache: LayerCache) -> tuple[jax.Array, bool]:
        """The page table [B, W] of a layer's cache, and whether it is a ring."""
        if isinstance(cache, PageCache):
            return self.page_table, False
        ring = cache.k.shape[1]
        return self.slots[:, None] * ring + jnp.arange(ring, dtype=jnp.int32), True


def _as_pages(cache: LayerCache) -> list[jax.Array]:
    """K and V as [P, Z, K, H]; the rings of all slots are concatenated."""
    return [x.reshape(-1, *x.shape[-3:]) for x in cache]
