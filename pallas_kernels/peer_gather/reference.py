"""Definition of `peer_gather` by XLA's all-gather, with the numbers of messages as the kernel leaves them."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_gemm.api import add_in_order
from pallas_kernels.peer_gather.mailbox import COUNTERS, PAIR_BYTES, blocks_of


def gather_sum(
    parts: jax.Array, dtype: jnp.dtype, links: jax.Array, axis: str
) -> tuple[jax.Array, jax.Array]:
    """As `api.gather_sum`, within `shard_map` over the mesh axis `axis`."""
    sent = add_in_order(parts).astype(dtype)
    blocks, _ = blocks_of(sent.size * sent.dtype.itemsize // PAIR_BYTES)
    numbers = links[COUNTERS : COUNTERS + blocks] + 1
    numbers = jnp.where(numbers == 0, 2, numbers)  # as `mailbox.number_after`
    return lax.all_gather(sent, axis), links.at[COUNTERS : COUNTERS + blocks].set(numbers)
