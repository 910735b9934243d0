"""Attention of a few new rows per sequence (verification, drafting, prefill chunk) over the paged
cache."""

import jax
import jax.numpy as jnp

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
      k_pages, v_pages: [P, Z, K, H] pages of one layer, the new rows already written; float8_e4m3fn
        ones are widened to q's dtype, which is exact.
      page_table: [B, W] int32. With a window it is a ring: position p lies in column (p // Z) % W.
      positions: [B, T] int32, which never fall within a sequence.
      scale: factor on the scores.
      window: sliding window in tokens (the row's own position counts), None for all.
      sinks: [N] logits that join each softmax and carry no value (GPT-OSS), or None.
    Returns:
      [B, T, N, H].
    Raises:
      NotImplementedError: the requested implementation cannot take these arguments here.
    """
    refusal = _refusal(q, k_pages, v_pages)
    launch = dispatch.resolve("verify_attention", implementation, refusal=refusal)
    if launch is not None:
        # Imported here: a slow import that CPU use does not need.
        from pallas_kernels.verify_attention import mosaic_sm90, mosaic_sm100

        chip = {90: mosaic_sm90, 100: mosaic_sm100}[launch.device.sm]
        return chip.verify_attention(
            q, k_pages, v_pages, page_table, positions, scale, window, sinks, launch
        )
    # A loop with a data-dependent end reads only the pages in use. On a GPU such a loop
    # synchronises with the host in each iteration, so there one block covers the whole table.
    keys = {"cpu": 128, "tpu": 512}.get(dispatch.platform())
    block_pages = page_table.shape[1] if keys is None else keys // k_pages.shape[1]
    return reference.attend(
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        scale,
        window,
        sinks,
        max(1, block_pages),
    )


def _refusal(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> str | None:
    """Why the kernels do not support these arguments; None if they do."""
    N, H = q.shape[2:]
    Z, K = k_pages.shape[1:3]
    if q.dtype != jnp.bfloat16:
        return f"its rows are bfloat16, not {q.dtype}"
    if k_pages.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn) or v_pages.dtype != k_pages.dtype:
        return f"its pages are bfloat16 or e4m3, not {k_pages.dtype} and {v_pages.dtype}"
    if H not in (64, 128, 256, 512):
        return f"a head dim of {H} is none of 64, 128, 256, 512"
    if N // K > 64:
        return f"{N // K} query heads for one kv head are more than 64"
    if H == 512 and (N // K) % 8:
        return f"with a head dim of {H} the {N // K} query heads of a kv head must come in eights"
    if Z % 8 or (64 % Z and Z % 64):
        return f"pages of {Z} tokens neither divide a block of 64 keys nor hold a number of them"
    return None
