"""The largest output of a linear layer and its index, for greedy tokens without logits in memory."""

from typing import Any

import jax

from pallas_kernels import dispatch, formats, mxfp8
from pallas_kernels.activations import Activations, are_quantized, rounding
from pallas_kernels.block_gemm.api import CHIPS as CHIPS
from pallas_kernels.block_gemm.api import launched, resolve
from pallas_kernels.linear_argmax import reference


def linear_argmax(
    x: jax.Array,
    weight: jax.Array,
    *,
    scale: jax.Array | None = None,
    activations: Activations = "bf16",
    implementation: dispatch.Implementation | None = None,
    config: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`jnp.argmax(y, -1)` and `y.max(-1)` of `y = linear(x, weight, out_dtype=float32)`.

    The sums have the bits of `linear`, whichever rows a call has. Of equal ones the lowest index is found, and
    the first NaN counts as the largest, as in `jnp.argmax`. The kernel does not write y: for each row and each
    tile of the weight it stores 8 bytes.

    Args:
      x: [..., K] activations, bfloat16 for the kernel.
      weight, scale, activations: as in `linear`.
      config: `TuningConfig` of the product without a K-split, for benchmarks; by default chosen from the shapes.
    Returns:
      (index [...] int32, maximum [...] float32). A maximum of zero may have either sign.
    Raises:
      ValueError: the weight has not two axes, the inner widths differ, or weight and scale match no format.
      NotImplementedError: the kernel is requested and does not support these arguments.
    """
    if weight.ndim != 2:
        raise ValueError(f"a linear layer's weight has two axes: {weight.shape=}")
    N, K = formats.logical_shape(weight, scale)
    if not formats.takes(weight, scale, x.shape[-1]):
        raise ValueError(f"inner widths differ: {x.shape=} weight [{N}, {K}]")
    x = mxfp8.widened(x, K)
    round_rows = rounding(activations, weight, scale)
    launch = resolve("linear_argmax", x, weight, scale, implementation)
    if launch is None:
        rows, quantized = (x, False) if round_rows is None else (round_rows(x), True)
        return reference.linear_argmax(rows, weight, scale, in_blocks=quantized)
    from pallas_kernels.linear_argmax import mosaic_gpu  # slow to import

    *leading, _ = x.shape
    flat = x.reshape(-1, K)
    quantized = are_quantized(activations, weight, scale)
    of_tiles = launched(flat, weight, scale, quantized, launch, config, mosaic_gpu.Largest())
    index, maximum = mosaic_gpu.merge(*of_tiles, tiles=mosaic_gpu.tiles(N, launch), launch=launch)
    return tuple(found[: flat.shape[0]].reshape(leading) for found in (index, maximum))
