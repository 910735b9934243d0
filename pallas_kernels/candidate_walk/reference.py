"""Reference of the walk over candidates."""

import jax
import jax.numpy as jnp


def candidate_walk(
    ids: jax.Array,
    values: jax.Array,
    states: jax.Array,
    before: jax.Array,
    after: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """`api.candidate_walk` in jnp."""
    wide = lambda table, ids: table[ids].astype(jnp.float32)
    inner = wide(before, ids[:, :-1]) + states[:, 1:, None]
    edges = scale * jnp.einsum(
        "...ar,...cr->...ac",
        jax.nn.silu(inner),
        wide(after, ids[:, 1:]),
        precision=jax.lax.Precision.HIGHEST,
    )
    edges = jnp.pad(edges, ((0, 0), (1, 0), (0, 0), (0, 0)))
    return walk(best_after(values, edges)), edges


def best_after(values: jax.Array, edges: jax.Array) -> jax.Array:
    """The best candidate after each of the position before: values [B, J, C], edges [B, J, C, C] ->
    [B, J, C]."""
    return jnp.argmax(values[..., None, :] + edges, axis=-1).astype(jnp.int32)


def walk(best: jax.Array) -> jax.Array:
    """Follows the candidates of the positions, each given the one before.

    Args:
      best: [B, J, C] int32, the candidate to take after each candidate of the position before; of
        the first position column 0 is used.
    Returns:
      [B, J] int32, the candidates taken.
    """
    taken = [best[:, 0, 0]]
    for following in jnp.moveaxis(best, 1, 0)[1:]:
        taken.append(jnp.take_along_axis(following, taken[-1][:, None], axis=1)[:, 0])
    return jnp.stack(taken, axis=1)
