"""Scores of the candidates of consecutive drafts, and the walk over them."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.candidate_walk import reference

CANDIDATES = 16
"""Candidates of a draft in the kernel."""
_RANKS = range(64, 256 + 1, 64)
"""A copied row of bfloat16 begins at a multiple of 128 bytes, as TMA requires."""
_MOST_DRAFTS = 16
_ROWS_BYTES = 96 * 1024
"""Most bytes of the rows of `before` that a block keeps in shared memory."""


def candidate_walk(
    ids: jax.Array,
    values: jax.Array,
    states: jax.Array,
    before: jax.Array,
    after: jax.Array,
    *,
    scale: float,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Takes the best candidate of each draft, given the one taken before it.

    The edge from candidate a of draft d-1 to candidate b of draft d is
    `scale * <silu(before[a] + states[d]), after[b]>`, and b is the argmax of its value plus its
    edge; equal ones by ascending index. Draft 1 has no edges.

    Args:
      ids: [B, J, C] int32, rows of the tables, of the candidates.
      values: [B, J, C] float32, their logits, without NaN.
      states: [B, J, r] float32; those of draft 1 are not used.
      before, after: [V, r], both bfloat16 or float32.
      scale: factor of the edges.
    Returns:
      (the candidates taken [B, J] int32, from 0 to C-1; edges [B, J, C, C] float32 from a to b, the
      last axis).
    Raises:
      NotImplementedError: the kernel is requested and does not support these arguments.
    """
    # One draft has no edges.
    launch = _resolve(implementation, ids, states, before, after) if ids.shape[1] > 1 else None
    if launch is None:
        return reference.candidate_walk(ids, values, states, before, after, scale)
    from pallas_kernels.candidate_walk import mosaic_gpu  # slow to import

    taken, edges = mosaic_gpu.candidate_walk(
        ids, values, states, before, after, scale=scale, launch=launch
    )
    return taken, jnp.pad(jnp.swapaxes(edges, 2, 3), ((0, 0), (1, 0), (0, 0), (0, 0)))


def _resolve(
    implementation: dispatch.Implementation | None,
    ids: jax.Array,
    states: jax.Array,
    before: jax.Array,
    after: jax.Array,
) -> dispatch.Launch | None:
    _, J, C = ids.shape
    rank, refusal = states.shape[-1], None
    dtypes = {before.dtype, after.dtype}
    if C != CANDIDATES:
        refusal = f"{C} candidates are not {CANDIDATES}"
    elif J > _MOST_DRAFTS:
        refusal = f"{J} drafts are more than {_MOST_DRAFTS}"
    elif rank not in _RANKS:
        refusal = f"rank {rank} is not a multiple of {_RANKS.step} from {_RANKS[0]} to {_RANKS[-1]}"
    elif len(dtypes) > 1 or dtypes - {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        refusal = f"tables of {' and '.join(sorted(map(str, dtypes)))} are not bfloat16 or float32"
    elif (J - 1) * C * rank * before.dtype.itemsize > _ROWS_BYTES:
        refusal = f"rows of {J - 1} drafts of rank {rank} do not fit into shared memory"
    return dispatch.resolve("candidate_walk", implementation, refusal=refusal)
