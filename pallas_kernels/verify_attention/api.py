"""Attention of a few new rows per sequence (verification, drafting, a prefill chunk) over paged KV."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.verify_attention import reference


def verify_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    page_table: jax.Array,
    positions: jax.Array,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Causal grouped-query attention: row (b, t) sees keys at positions `0..positions[b, t]`.

    Args:
      q: [B, T, N, H].
      k_pages, v_pages: [P, Z, K, H] pages of one layer, the new rows already written.
      page_table: [B, W] int32. With a window it is a ring: position p lies in column (p // Z) % W.
      positions: [B, T] int32, ascending within a sequence.
      scale: factor on the scores.
      window: sliding window in tokens (the row's own position counts), None for all.
      sinks: [N] logits that join each softmax and carry no value (GPT-OSS), or None.
    Returns:
      [B, T, N, H].
    """
    dispatch.resolve("verify_attention", implementation)
    # A loop with a data-dependent end reads only the pages in use, which is what counts on a CPU;
    # on an accelerator such a loop stops at the host each turn, so one block covers the whole table.
    block_pages = 128 // k_pages.shape[1] if jax.default_backend() == "cpu" else page_table.shape[1]
    return reference.attend(
        q, k_pages, v_pages, page_table, positions, scale, window, sinks, max(1, block_pages)
    )
