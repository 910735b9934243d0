"""Quantised rows for products with fp8 weights: kernels of the definition
`activations.quantize`."""

import jax
import jax.numpy as jnp

from pallas_kernels import activations
from pallas_kernels.activations import Quantized
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK

CHIPS = (90, 100, 120)
"""Generations (`Device.sm`) with a kernel."""
_TILE = 8  # groups


def quantize(x: jax.Array, launch: Launch) -> Quantized:
    """Quantises rows x [R, K]; a copy pads odd numbers of rows, so callers that pad anyway do it
    before.

    Widths that are no multiple of 128 take XLA's code, whatever R is.
    """
    R, K = x.shape
    if K % BLOCK:
        return activations.quantize(x)
    from pallas_kernels.quantize import mosaic_gpu  # a slow import that CPU use does not need

    if R % _TILE == 0 or (R < _TILE and K >= _TILE * BLOCK):
        return mosaic_gpu.quantize(x, launch)
    values, scale = mosaic_gpu.quantize(jnp.pad(x, ((0, -R % _TILE), (0, 0))), launch)
    return Quantized(values[:R], scale)


def spread(x: jax.Array, slots: jax.Array, size: int, launch: Launch) -> Quantized:
    """Quantises rows x [R, K] and copies row r to the rows `slots[:, r]` of `size`.

    Args:
      slots: int32 [k, R'], R' >= R, distinct but for rows that are never read; other rows of the
        result are undefined.
      size: a multiple of 8; K is a multiple of 64.
    Returns:
      values [size, K], scale [groups, size].
    """
    if x.shape[1] % BLOCK == 0 and x.shape[1] >= _TILE * BLOCK:
        from pallas_kernels.quantize import mosaic_gpu  # a slow import that CPU use does not need

        return mosaic_gpu.spread(x, slots, size, launch)
    from pallas_kernels.moe import mosaic_route

    R = x.shape[0]
    values, scale = quantize(x, launch)
    copies = jnp.broadcast_to(scale[:, None, :R], (scale.shape[0], slots.shape[0], R))
    spread_scale = jnp.ones((scale.shape[0], size), scale.dtype).at[:, slots[:, :R]].set(copies)
    return Quantized(mosaic_route.spread(values, slots, size, launch), spread_scale)
