"""Warpgroups of a block, and blocks of a cluster: each has a weight tile of its own; they share the x tiles.

The blocks of a cluster read an x tile from level 2 once: each loads a part of it, and TMA stores the part in the shared
memory of all of them (multicast).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pipeline import warpgroup_index

CLUSTER_AXIS = "pair"
"""Name of the axis of a cluster's blocks in a kernel."""


def free_barrier(stages: int, groups: int, cluster: int) -> Any:
    """Barriers of the slots of x: all warpgroups of all blocks that share x have read the slot."""
    if cluster == 1:
        return plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
    return plgpu.ClusterBarrier(
        collective_axes=(CLUSTER_AXIS,), num_arrivals=groups, num_barriers=stages
    )


def block_index(axis: str, cluster: int) -> Any:
    """Index of this block along a grid axis whose neighbours are clusters of `cluster` blocks."""
    index = lax.axis_index(axis)
    return index if cluster == 1 else index * cluster + lax.axis_index(CLUSTER_AXIS)


def warpgroup_part(ref: Any, groups: int) -> Any:
    """This warpgroup's slice of a ref whose leading axis is the warpgroup."""
    return ref if groups == 1 else ref.at[warpgroup_index(groups)]


def tile_rows(rows: int, groups: int, block: Any, N: int, cluster: int = 1) -> tuple[Any, Any]:
    """First weight row of this warpgroup's tile of `rows` rows: (row to read, row to store).

    A warpgroup whose tile is past N reads the last tile again, because all warpgroups must take part in the
    loop (`x_free_barrier` counts them). The caller skips its store.
    """
    row = (block if groups == 1 else block * groups + warpgroup_index(groups)) * rows
    if groups * cluster == 1 or N % (groups * cluster * rows) == 0:
        return row, row
    return jnp.minimum(row, (pl.cdiv(N, rows) - 1) * rows), row


def launch_options(groups: int, cluster: int = 1) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` for blocks of several warpgroups, and for clusters."""
    options = {} if cluster == 1 else dict(cluster=(cluster,), cluster_names=(CLUSTER_AXIS,))
    if groups == 1:
        return options
    # All warpgroups share the reduction scratch: a cross-warp reduction would be a race. Size 0 forbids it.
    no_scratch = plgpu.CompilerParams(reduction_scratch_bytes=0)
    return options | dict(num_threads=groups, thread_name="group", compiler_params=no_scratch)
