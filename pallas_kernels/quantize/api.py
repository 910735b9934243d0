"""Rows as products read them: quantised for fp8 weights by kernels of the definition
`activations.quantize`, and copied to the slots of their experts."""

import jax
import jax.numpy as jnp

from pallas_kernels import activations
from pallas_kernels.activations import Quantized, whole_tiles
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK

CHIPS = (90, 100)
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


def operand(x: jax.Array, quantized: bool, launch: Launch) -> tuple[jax.Array, jax.Array | None]:
    """Rows x [R, K] as products read them: in whole tiles, quantised or not.

    Returns:
      values [R', K] and scale [groups, R'], None of rows that are not quantised; R' >= R.
    """
    x = whole_tiles(x)
    return quantize(x, launch) if quantized else (x, None)


def spread(
    x: jax.Array,
    slots: jax.Array,
    size: int,
    quantized: bool,
    launch: Launch,
    num_items: jax.Array | None = None,
    tokens: int = 0,
) -> tuple[jax.Array, jax.Array | None]:
    """Copies row r of x [R, K], quantised or not, to the rows `slots[:, r]` of `size`.

    Args:
      slots: int32 [k, R'], R' >= R, distinct but for rows that are never read; other rows of the
        result are undefined.
      size: a multiple of 8; K is a multiple of 64.
      num_items, tokens: int32 and a number: slots from num_items[0] * tokens on are never read, and
        rows that are not quantised leave them out. None: all are read.
    Returns:
      values [size, K], scale [groups, size], None of rows that are not quantised.
    """
    from pallas_kernels.quantize import mosaic_gpu  # a slow import that CPU use does not need

    R, K = x.shape
    if not quantized:
        return mosaic_gpu.spread(x, slots, size, launch, num_items, tokens), None
    if K % BLOCK == 0 and K >= _TILE * BLOCK:
        return mosaic_gpu.quantize_and_spread(x, slots, size, launch)
    values, scale = quantize(x, launch)
    copies = jnp.broadcast_to(scale[:, None, :R], (len(scale), len(slots), R))
    spread_scale = jnp.ones((len(scale), size), scale.dtype).at[:, slots[:, :R]].set(copies)
    return mosaic_gpu.spread(values, slots, size, launch), spread_scale
