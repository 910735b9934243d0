"""Common parts of the ladder's steps: tile sizes, shared-memory layout, and the store of a
result."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Weight rows of a warpgroup: M of wgmma."""

STEP = 64
"""K columns of a bfloat16 tile: 128 bytes, the width of the shared-memory swizzle."""

GROUPS = 2
"""Consumer warpgroups of a block from step 3 on; each owns `ROWS` rows of the weight."""


def swizzled(dtype: jnp.dtype) -> tuple:
    """Layout of a tile in shared memory that TMA writes and wgmma reads without bank conflicts.

    Tiles of 8 rows and 128 bytes, in which the 16-byte units of row r are permuted by r.
    """
    columns = 128 // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))


def store_transposed(product_reg: jax.Array, out_smem: Any, out_gmem: Any) -> None:
    """Stores product_reg [ROWS, R] of a warpgroup to out_gmem [R, ROWS] through out_smem
    [R, ROWS]."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
    product_reg = product_reg.astype(out_gmem.dtype)
    out_smem.T[...] = plgpu.layout_cast(product_reg, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()  # the copy engine is to see what the threads stored
    plgpu.copy_smem_to_gmem(out_smem, out_gmem)


def check(x: jax.Array, values: jax.Array, step: int = STEP) -> None:
    """Raises ValueError unless a kernel of the ladder takes x [R, >= K] and values [..., N, K]."""
    R, (N, K) = x.shape[0], values.shape[-2:]
    if R % 8:
        raise ValueError(f"rows come in multiples of 8: {x.shape=}")
    if N % (ROWS * GROUPS) or K % step:
        raise ValueError(f"the weight is a multiple of [{ROWS * GROUPS}, {step}]: {values.shape=}")
    if x.shape[1] < K:
        raise ValueError(f"x has fewer columns than the weight: {x.shape=} {values.shape=}")
