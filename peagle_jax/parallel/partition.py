"""The devices that run one step together, while it is traced, and the collectives of the forward pass.

The step is one program under `shard_map`, so layers see the arrays of one device. They add what devices computed
in parts by `gathered` and an ordered sum, never by `psum`: its order of additions depends on the size of
the message, so a row's bits would depend on the other rows of its batch. Without a partition every function
here is the identity, and a program for one device has no operation more.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_gemm.api import add_in_order

AXIS = "model"
"""Name of the mesh axis."""

_size: ContextVar[int] = ContextVar("devices of the step", default=1)


@contextlib.contextmanager
def over(num_devices: int) -> Iterator[None]:
    """Traces for `num_devices` devices along `AXIS`; 1: for arrays that are whole."""
    token = _size.set(num_devices)
    try:
        yield
    finally:
        _size.reset(token)


def size() -> int:
    """Number of devices that the step is traced for."""
    return _size.get()


def rank() -> jax.Array:
    """[] int32, number of the device that runs, 0..size-1."""
    return lax.axis_index(AXIS)


def gathered(x: jax.Array) -> jax.Array:
    """The arrays of all devices by rank: [...] -> [n, ...]. Moves bytes only."""
    return lax.all_gather(x, AXIS)


def total(x: jax.Array) -> jax.Array:
    """The sum of the devices' arrays, added by ascending rank on every device."""
    return x if size() == 1 else add_in_order(gathered(x))


def parts_of_all(parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One part of each device: this device's partial sums float32 [S, ...] -> [n, ...] in `dtype`.

    A device adds its own K-splits first and rounds once to `dtype`, which halves the bytes of bfloat16.
    """
    return parts if size() == 1 else gathered(add_in_order(parts).astype(dtype))
