"""All-gather between the GPUs of one process without a library: a kernel stores into the memory of
its peers.

It is a node of a CUDA graph like any other kernel, where NCCL's collectives lie between graphs.
`mailbox` has the protocol.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import add_in_order
from pallas_kernels.moe.api import Mixture
from pallas_kernels.peer_gather import reference
from pallas_kernels.peer_gather.mailbox import HALVES_BYTES, LINKS, MOST_BYTES, UNIT_BYTES

MULTIPLE = HALVES_BYTES
"""The bytes of a message are a multiple of this."""


def gather_sum(
    parts: jax.Array,
    dtype: jnp.dtype,
    links: jax.Array,
    *,
    num_devices: int,
    axis: str,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sums `(((p0 + p1) + p2) + ...).astype(dtype)` of all devices, by rank; within
    `shard_map`.

    Calls of a program must depend on each other by `links`: all devices then run them in one order.

    Args:
      parts: [parts, ...], this device's, for which `refusal` is None.
      dtype: of the sums.
      links: int32 [LINKS], this device's table with the numbers of all messages before
        (`mailbox.table`).
      num_devices: n.
      axis: name of the mesh axis with the n devices.
    Returns:
      [n, ...] of `dtype`, and the table after this message, updated in place if donated. A float
      NaN may become another NaN.
    Raises:
      ValueError: `refusal` is not None, or links has another shape.
    """
    _check(links, refusal(parts, dtype))
    shape, dtype = parts.shape[1:], jnp.dtype(dtype)
    unit_bytes = _unit_bytes(shape, dtype)
    launch = dispatch.resolve("peer_gather", implementation)
    if launch is None:
        units = math.prod(shape) * dtype.itemsize // unit_bytes
        return reference.gather(add_in_order(parts).astype(dtype), units, links, axis)
    # Imported here: a slow import that CPU use does not need.
    from pallas_kernels.peer_gather import mosaic_gpu

    flat = parts.reshape(len(parts), -1)
    gathered, links = mosaic_gpu.gather_sum(flat, dtype, links, num_devices, unit_bytes, launch)
    return gathered.reshape(num_devices, *shape), links


def gather_mixture(
    mixture: Mixture,
    num_rows: int,
    links: jax.Array,
    *,
    num_devices: int,
    axis: str,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sums `mixture.added(num_rows)` of all devices: bfloat16 [n, R, D]; otherwise as
    `gather_sum`.

    Raises:
      ValueError: `mixture_refusal` is not None, or links has another shape.
    """
    _check(links, mixture_refusal(mixture, num_rows))
    launch = dispatch.resolve("peer_gather", implementation)
    if launch is None:
        sent = mixture.added(num_rows)
        return reference.gather(sent, sent.nbytes // UNIT_BYTES, links, axis)
    from pallas_kernels.peer_gather import mosaic_gpu

    return mosaic_gpu.gather_mixture(*mixture, links, num_rows, num_devices, launch)


def refusal(parts: jax.Array, dtype: jnp.dtype) -> str | None:
    """Why parts [parts, ...] cannot be sent as `dtype`; None if they can."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.int32, jnp.uint32, jnp.bfloat16):
        return f"{dtype} is none of float32, int32, uint32 and bfloat16"
    if parts.dtype != dtype and (parts.dtype, dtype) != (jnp.float32, jnp.bfloat16):
        return f"{parts.dtype} is not rounded to {dtype}"
    if len(parts) > 1 and parts.dtype != jnp.float32:
        return f"parts of {parts.dtype} are not added"
    return _size_refusal(parts.shape[1:], dtype)


def mixture_refusal(mixture: Mixture, num_rows: int) -> str | None:
    """Why the sums of a mixture's rows cannot be sent; None if they can."""
    columns = mixture.values.shape[-1]
    if mixture.values.dtype != jnp.bfloat16:
        return f"results of experts are bfloat16, not {mixture.values.dtype}"
    if columns * mixture.values.dtype.itemsize % UNIT_BYTES:
        return f"{columns} columns are not a multiple of 8"
    return _size_refusal((num_rows, columns), mixture.values.dtype)


def _size_refusal(shape: tuple[int, ...], dtype: jnp.dtype) -> str | None:
    num_bytes, unit_bytes = math.prod(shape) * dtype.itemsize, _unit_bytes(shape, dtype)
    most = MOST_BYTES * unit_bytes // UNIT_BYTES
    if num_bytes % unit_bytes or not 0 < num_bytes <= most:
        return f"{num_bytes} bytes are not a multiple of {unit_bytes} up to {most}"
    return None


def _unit_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Data in a unit of a message [shape]."""
    whole = math.prod(shape) * dtype.itemsize % UNIT_BYTES == 0
    return UNIT_BYTES if whole and jnp.issubdtype(dtype, jnp.floating) else HALVES_BYTES


def _check(links: jax.Array, refused: str | None) -> None:
    if links.shape != (LINKS,):
        raise ValueError(f"{links.shape=} must be ({LINKS},)")
    if refused:
        raise ValueError(refused)
