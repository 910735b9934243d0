"""`jax.random.normal` outside of `jax.jit`, compiled for few shapes.

Jax compiles it again for each shape, which takes 40 ms, and tests draw hundreds of shapes. The
number at flat index i depends on the key and on i alone (`jax_threefry_partitionable`), so a longer
row begins with the same numbers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

_LEAST, _MOST = 2**10, 2**20
of_jax = jax.random.normal


def normal(key, shape=(), dtype=None, **options) -> jax.Array:
    """As `jax.random.normal`, with the same bits."""
    size = math.prod(shape) if isinstance(shape, tuple) else _MOST + 1
    if isinstance(key, jax.core.Tracer) or options or not 0 < size <= _MOST:
        return of_jax(key, shape, dtype, **options)
    length = max(_LEAST, 1 << (size - 1).bit_length())
    row = np.asarray(of_jax(key, (length,), dtype))
    return jnp.asarray(row[:size].reshape(shape))
