"""All-gather between the GPUs of one process without a library: a kernel stores into the memory of its peers.

It is a node of a CUDA graph like any other kernel, where NCCL's collectives lie between graphs. `mailbox` has the
protocol.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.peer_gather import reference
from pallas_kernels.peer_gather.mailbox import LINKS, MOST_BYTES, PAIR_BYTES

CHIPS = (90, 100)
"""Generations (`Device.sm`) with a kernel: those whose GPUs may be linked by NVLink."""


def gather_sum(
    parts: jax.Array,
    dtype: jnp.dtype,
    links: jax.Array,
    *,
    num_devices: int,
    axis: str,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sums `(((p0 + p1) + p2) + ...).astype(dtype)` of all devices, by rank; within `shard_map`.

    Calls of a program must depend on each other by `links`: all devices then run them in one order.

    Args:
      parts: [S, ...], this device's, for which `refusal` is None.
      dtype: of the sums.
      links: int32 [LINKS], this device's table with the numbers of all messages before (`mailbox.table`).
      num_devices: n.
      axis: name of the mesh axis with the n devices.
    Returns:
      [n, ...] of `dtype`, and the table after this message, updated in place if donated.
    Raises:
      ValueError: `refusal` is not None, or links has another shape.
    """
    if links.shape != (LINKS,):
        raise ValueError(f"{links.shape=} must be ({LINKS},)")
    if why := refusal(parts, dtype):
        raise ValueError(why)
    launch = dispatch.resolve("peer_gather", implementation, chips=CHIPS)
    if launch is None:
        return reference.gather_sum(parts, dtype, links, axis)
    # Imported here: a slow import that CPU use does not need.
    from pallas_kernels.peer_gather import mosaic_gpu

    flat = parts.reshape(len(parts), -1)
    gathered, links = mosaic_gpu.gather_sum(flat, jnp.dtype(dtype), links, num_devices, launch)
    return gathered.reshape(num_devices, *parts.shape[1:]), links


def refusal(parts: jax.Array, dtype: jnp.dtype) -> str | None:
    """Why parts [S, ...] cannot be sent as `dtype`; None if they can."""
    dtype, num_bytes = jnp.dtype(dtype), math.prod(parts.shape[1:]) * jnp.dtype(dtype).itemsize
    if dtype not in (jnp.float32, jnp.int32, jnp.uint32, jnp.bfloat16):
        return f"{dtype} is none of float32, int32, uint32 and bfloat16"
    if parts.dtype != dtype and (parts.dtype, dtype) != (jnp.float32, jnp.bfloat16):
        return f"{parts.dtype} is not rounded to {dtype}"
    if len(parts) > 1 and parts.dtype != jnp.float32:
        return f"parts of {parts.dtype} are not added"
    if num_bytes % PAIR_BYTES or not 0 < num_bytes <= MOST_BYTES:
        return f"{num_bytes} bytes are not a multiple of {PAIR_BYTES} up to {MOST_BYTES}"
    return None
