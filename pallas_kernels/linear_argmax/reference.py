"""Reference of the largest output of a linear layer."""

import jax
import jax.numpy as jnp

from pallas_kernels.block_gemm import reference


def linear_argmax(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, in_blocks: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `api.linear_argmax`; `in_blocks` as in `block_gemm.reference.linear`."""
    float32 = jnp.dtype(jnp.float32)
    y = reference.linear(x, weight, scale, None, float32, in_blocks=in_blocks)
    return jnp.argmax(y, axis=-1).astype(jnp.int32), y.max(-1)
