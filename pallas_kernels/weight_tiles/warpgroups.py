"""Blocks of several warpgroups, each with a weight tile of its own; they share the x tiles."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pipeline import warpgroup_index


def warpgroup_part(ref: Any, groups: int) -> Any:
    """This warpgroup's slice of a ref whose leading axis is the warpgroup."""
    return ref if groups == 1 else ref.at[warpgroup_index(groups)]


def tile_rows(rows: int, groups: int, block: Any, N: int) -> tuple[Any, Any]:
    """First weight row of this warpgroup's tile of `rows` rows: (row to read, row to store).

    A warpgroup whose tile is past N reads the last tile again, because all warpgroups must take
    part in the loop (`x_free_barrier` counts them). The caller skips its store.
    """
    row = (block if groups == 1 else block * groups + warpgroup_index(groups)) * rows
    if groups == 1 or N % (groups * rows) == 0:
        return row, row
    return jnp.minimum(row, (pl.cdiv(N, rows) - 1) * rows), row


def launch_options(groups: int) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` for blocks of several warpgroups."""
    if groups == 1:
        return {}
    # All warpgroups share the reduction scratch: a cross-warp reduction would be a race. Size 0
    # forbids it.
    no_scratch = plgpu.CompilerParams(reduction_scratch_bytes=0)
    return dict(num_threads=groups, thread_name="group", compiler_params=no_scratch)
