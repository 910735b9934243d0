"""Finds devices whose copies of the same values differ. All devices compute them by the same code
from the same inputs, so a difference means a fault: of a device, of a collective, or of this
program."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from peagle_jax.parallel.partition import gathered


def checksums(tree) -> jax.Array:
    """[n] uint32, by rank: a sum over the bits of each device's leaves, weighted by place."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = leaf.ravel()
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            bits = lax.bitcast_convert_type(bits.astype(jnp.float32), jnp.uint32)
        place = jnp.arange(bits.size, dtype=jnp.uint32)
        total = total * jnp.uint32(31) + (bits.astype(jnp.uint32) * (2 * place + 1)).sum()
    return gathered(total)


def check(sums: Sequence[int]) -> None:
    """Compares the checksums of a call.

    Raises:
      RuntimeError: they differ. The engine's texts can no longer be trusted.
    """
    if len(set(sums)) > 1:
        listed = ", ".join(f"{rank}: {value:08x}" for rank, value in enumerate(map(int, sums)))
        raise RuntimeError(
            f"devices that compute the same values disagree (checksums by device: {listed}); "
            "a device or its link is faulty: restart without it"
        )
