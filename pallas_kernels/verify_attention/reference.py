"""Definition of attention of a few query rows over a paged cache: online softmax over key blocks.

Blocks are visited in order from position 0 and a block that is masked altogether changes nothing
(its weights are exactly 0 and the running maximum stays), so the result of a row depends neither on
other rows nor on how many blocks are visited past its own position.
"""

import jax
import jax.numpy as jnp

_MASKED = -1e30  # not -inf: a row without any visible key in a block must not produce NaN


def attend(
    q: jax.Array,  # [B, T, N, H]
    k_pages: jax.Array,  # [P, Z, K, H]
    v_pages: jax.Array,  # [P, Z, K, H]
    page_table: jax.Array,  # [B, W]
    positions: jax.Array,  # [B, T]
    scale: float,
    window: int | None,
    block_pages: int,
) -> jax.Array:
    B, T, N, H = q.shape
    _, Z, K, _ = k_pages.shape
    W = page_table.shape[1]
    block_pages = min(block_pages, W)
    num_blocks = -(-W // block_pages)
    page_table = jnp.pad(page_table, ((0, 0), (0, num_blocks * block_pages - W)))
    grouped = (q * jnp.asarray(scale, q.dtype)).reshape(B, T, K, N // K, H)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def visit(block, carry):
        best, total, out = carry  # [B, K, G, T], [B, K, G, T], [B, K, G, T, H]
        pages = jax.lax.dynamic_slice_in_dim(page_table, block * block_pages, block_pages, 1)
        k = k_pages[pages].reshape(B, block_pages * Z, K, H).astype(q.dtype)
        v = v_pages[pages].reshape(B, block_pages * Z, K, H).astype(q.dtype)
        key_position = block * block_pages * Z + jnp.arange(block_pages * Z)
        visible = key_position <= positions[:, :, None]  # [B, T, S]
        if window is not None:
            visible &= key_position > positions[:, :, None] - window
        scores = jnp.einsum(
            "btkgh,bskh->bkgts", grouped, k, precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(visible[:, None, None], scores, _MASKED)
        new_best = jnp.maximum(best, scores.max(-1))
        weights = jnp.where(visible[:, None, None], jnp.exp(scores - new_best[..., None]), 0.0)
        shrink = jnp.exp(best - new_best)
        partial = jnp.einsum(
            "bkgts,bskh->bkgth",
            weights.astype(q.dtype),
            v,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_best, total * shrink + weights.sum(-1), out * shrink[..., None] + partial

    shape = (B, K, N // K, T)
    carry = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, H), jnp.float32),
    )
    if num_blocks == 1:
        carry = visit(0, carry)
    else:
        last_block = jnp.clip(positions.max() // (block_pages * Z), 0, num_blocks - 1)
        carry = jax.lax.fori_loop(0, last_block + 1, visit, carry)
    _, total, out = carry
    out = out / total[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q.dtype)
