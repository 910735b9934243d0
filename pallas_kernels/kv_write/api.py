"""Writes new keys and values to the paged cache."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.kv_write import reference


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    page_table: jax.Array,
    positions: jax.Array,
    ring: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Stores row (b, t) at position `positions[b, t]` of sequence b.

    A position past the page table, or one whose entry is 0, is written to page 0, a dummy page that is
    never read. With Z = 4 and a page table row [7, 3], position 5 is slot 1 of page 3.

    Args:
      k_pages, v_pages: [P, Z, K, H] pages of one layer; float8_e4m3fn saturates.
      k, v: [B, T, K, H] new rows.
      page_table: [B, W] int32, the page of each Z positions.
      positions: [B, T] int32.
      ring: position p is in column (p // Z) % W, so no position is past the table.
    Returns:
      The two updated page arrays.
    """
    dispatch.resolve("kv_write", implementation)
    return reference.write_kv(k_pages, v_pages, k, v, page_table, positions, ring)
