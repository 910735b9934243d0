"""Prefetch of weights to the level-2 cache by a kernel that runs before the kernel that reads them.

A norm reads little, so memory is idle while it runs and while the next kernel starts. Its thread blocks ask for the
first bytes of the weights that come next. The requests outlive the kernel, and no result depends on them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MOST_BYTES = 24 * 2**20
"""Bytes of one prefetch, of all weights together: about half of an H200's level 2 (50 MB), which also holds the activations."""

_BOX = 256
"""Maximum rows and columns of one request, a limit of TMA."""


def as_rows(weight: jax.Array) -> jax.Array:
    """weight [..., K] as [N, K], for `request`."""
    return weight.reshape(-1, weight.shape[-1])


def request(weights_gmem: Sequence, block: jax.Array, num_blocks: int) -> None:
    """Asks for the share of thread block `block` of the first `MOST_BYTES` of the weights, each [N, K].

    One warpgroup of each of the `num_blocks` thread blocks calls this.
    """
    left = MOST_BYTES
    for weight_gmem in weights_gmem:
        rows, columns = weight_gmem.shape
        height, width = min(_BOX, rows), min(_BOX, columns)
        across = pl.cdiv(columns, width)
        band_bytes = height * columns * jnp.dtype(weight_gmem.dtype).itemsize
        bands = min(pl.cdiv(rows, height), left // band_bytes)
        left -= bands * band_bytes
        if not bands:
            continue

        def ask(i, _, weight_gmem=weight_gmem, across=across, height=height, width=width):
            index = block + i * num_blocks
            band, column = lax.div(index, across), lax.rem(index, across)
            where = pl.ds(band * height, height), pl.ds(column * width, width)
            plgpu.async_prefetch(weight_gmem.at[where])

        lax.fori_loop(0, lax.div(bands * across - block + num_blocks - 1, num_blocks), ask, None)
