"""Reference of attention of a few query rows over a paged cache: online softmax over key blocks.

Blocks are at absolute positions and visited in ascending order. A fully masked block changes
nothing: its weights are exactly 0 and the running maximum stays. So the result of a row depends
neither on other rows nor on how many masked blocks are visited before or after its visible keys.
"""

import jax
import jax.numpy as jnp

_MASKED = -1e30  # not -inf: a row without a visible key in a block would produce NaN


def _blocks(
    positions: jax.Array, window: int | None, size: int, table_size: int
) -> tuple[jax.Array, jax.Array, int]:
    """(first block [B] of each sequence, number of blocks to visit, static upper bound of it)."""
    if window is None:
        most = -(-table_size // size)
        first = jnp.zeros(positions.shape[0], jnp.int32)
    else:
        most = -(-(window + positions.shape[1] - 2) // size) + 1
        first = jnp.maximum(positions.min(1) - window + 1, 0) // size
    count = jnp.clip((positions.max(1) // size - first).max() + 1, 1, most)
    return first, count, most


def attend(
    q: jax.Array,  # [B, T, N, H]
    k_pages: jax.Array,  # [P, Z, K, H]
    v_pages: jax.Array,  # [P, Z, K, H]
    page_table: jax.Array,  # [B, W]
    positions: jax.Array,  # [B, T]
    scale: float,
    window: int | None,
    sinks: jax.Array | None,  # [N]
    block_pages: int,
) -> jax.Array:
    B, T, N, H = q.shape
    _, Z, K, _ = k_pages.shape
    W = page_table.shape[1]
    block_pages = min(block_pages, W)
    block_size = block_pages * Z
    first, count, most = _blocks(positions, window, block_size, W * Z)
    grouped = (q * jnp.asarray(scale, q.dtype)).reshape(B, T, K, N // K, H)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def visit(step, carry):
        best, total, out = carry  # [B, K, G, T], [B, K, G, T], [B, K, G, T, H]
        column = (first + step)[:, None] * block_pages + jnp.arange(block_pages)
        pages = jnp.take_along_axis(page_table, column % W, axis=1)
        k = k_pages[pages].reshape(B, block_size, K, H).astype(q.dtype)
        v = v_pages[pages].reshape(B, block_size, K, H).astype(q.dtype)
        key = (first + step)[:, None] * block_size + jnp.arange(block_size)  # [B, keys]
        visible = key[:, None] <= positions[:, :, None]  # [B, T, keys]
        if window is not None:
            visible &= key[:, None] > positions[:, :, None] - window
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
    if most <= 2:
        for step in range(most):
            carry = visit(step, carry)
    else:
        carry = jax.lax.fori_loop(0, count, visit, carry)
    best, total, out = carry
    if sinks is not None:
        # A sink is one more key per head, without a value.
        sink = sinks.astype(jnp.float32).reshape(K, N // K, 1)
        new_best = jnp.maximum(best, sink)
        shrink = jnp.exp(best - new_best)
        total = total * shrink + jnp.exp(sink - new_best)
        out = out * shrink[..., None]
    out = out / total[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q.dtype)
