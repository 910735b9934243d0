"""The paged KV cache: a list with one `LayerCache` per layer, and attention over it.

Page 0 is the dummy page: padding rows and positions past a page table are written there and never
read by a real row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.verify_attention.api import verify_attention


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [P, Z, K, H]."""

    k: jax.Array
    v: jax.Array


def init_cache(
    num_layers: int, *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype
) -> list[LayerCache]:
    """Zeroed pages for every layer."""
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    return [LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)]


@dataclass(frozen=True)
class PagedAttention:
    """`layers.Attend` over pages: writes the new rows, then attends causally by position.

    Writing comes first so that rows of one call see each other; a stale row of a rejected draft is
    overwritten by the round that reaches its position before any query may see it.
    """

    page_table: jax.Array  # [B, W]
    positions: jax.Array  # [B, T]

    def __call__(self, q, k, v, cache: LayerCache, *, window: int | None):
        where = dict(page_table=self.page_table, positions=self.positions)
        pages = write_kv(cache.k, cache.v, k, v, **where)
        out = verify_attention(q, *pages, **where, scale=q.shape[-1] ** -0.5, window=window)
        return out, LayerCache(*pages)
