"""The KV cache: one entry per layer, pages or a ring, and attention over it.

A layer that sees everything keeps its keys in pages that the scheduler hands out. A layer with a
sliding window keeps, for each slot, a ring of pages just large enough for the window and the rows of
one call; its size does not grow with the sequence. Page 0 and the last slot are dummies: padding rows
and positions past a page table are written there and never read by a real row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rope_write.api import Form, rope_write
from pallas_kernels.verify_attention.api import verify_attention
from peagle_jax.config import AttentionConfig, EngineConfig


class PageCache(NamedTuple):
    """Keys and values of a layer that sees everything, each [P, Z, K, H]."""

    k: jax.Array
    v: jax.Array


class RingCache(NamedTuple):
    """Keys and values of a layer with a window, each [S, R, Z, K, H]: R pages for each slot."""

    k: jax.Array
    v: jax.Array


LayerCache = PageCache | RingCache


def init_cache(layers: Sequence[AttentionConfig], config: EngineConfig) -> list[LayerCache]:
    """Zeroed keys and values for every layer; slots are `max_num_seqs` and the dummy."""

    def zeros(layer: AttentionConfig) -> LayerCache:
        tail = (config.page_size, layer.num_kv_heads, layer.head_dim)
        if layer.window is None:
            kind, shape = PageCache, (config.total_pages, *tail)
        else:
            ring = config.ring_pages(layer.window)
            kind, shape = RingCache, (config.max_num_seqs + 1, ring, *tail)
        return kind(jnp.zeros(shape, config.cache_dtype), jnp.zeros(shape, config.cache_dtype))

    return [zeros(layer) for layer in layers]


@dataclass(frozen=True)
class PagedAttention:
    """`layers.CachedAttend` over pages and rings: writes the new rows, then attends causally by position.

    Writing comes first so that rows of one call see each other; a stale row of a rejected draft is
    overwritten by the round that reaches its position before any query may see it.
    """

    page_table: jax.Array  # [B, W]
    slots: jax.Array  # [B]
    positions: jax.Array  # [B, T]

    def write(
        self, parts, cache: LayerCache, *, angles, form: Form, norms, bias
    ) -> tuple[jax.Array, LayerCache]:
        """q [B, T, N, H] of the new rows, and the cache with their keys and values."""
        table, ring = self._table(cache)
        q, *pages = rope_write(
            parts,
            *_as_pages(cache),
            angles=angles,
            page_table=table,
            positions=self.positions,
            form=replace(form, ring=ring),
            norms=norms,
            bias=bias,
        )
        return q, type(cache)(*(x.reshape(cache.k.shape) for x in pages))

    def read(
        self, q, cache: LayerCache, *, window: int | None, scale=None, sinks=None
    ) -> jax.Array:
        return verify_attention(
            q,
            *_as_pages(cache),
            page_table=self._table(cache)[0],
            positions=self.positions,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            window=window,
            sinks=sinks,
        )

    def _table(self, cache: LayerCache) -> tuple[jax.Array, bool]:
        """Pages of each sequence [B, W], and whether they are a ring."""
        if isinstance(cache, PageCache):
            return self.page_table, False
        R = cache.k.shape[1]
        return self.slots[:, None] * R + jnp.arange(R, dtype=jnp.int32), True


def _as_pages(cache: LayerCache) -> list[jax.Array]:
    """Keys and values as [P, Z, K, H], rings one after the other."""
    return [x.reshape(-1, *x.shape[-3:]) for x in cache]
