"""Definition of the weight-stationary product: x @ weight.T with float32 accumulation."""

import jax
import jax.numpy as jnp


def linear(
    x: jax.Array,  # [..., K]
    weight: jax.Array,  # [N, K]
    bias: jax.Array | None,  # [N]
    out_dtype: jnp.dtype,
) -> jax.Array:
    # HIGHEST keeps float32 inputs in float32 on GPUs, where the default would round them to TF32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32 if out_dtype == jnp.float32 else None,
    )
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(out_dtype)
