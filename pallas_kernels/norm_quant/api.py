"""RMSNorm over the last axis."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.norm_quant import reference


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """`x / sqrt(mean(x²) + eps) * scale`, computed in float32.

    Args:
      x: [..., D].
      scale: [D].
    Returns:
      [..., D] in `x.dtype`.
    """
    dispatch.resolve("norm_quant", implementation)
    return reference.rms_norm(x, scale, eps)
