"""Paged attention for RTX cards of the Blackwell generation (sm_120): mma.sync, operands in
registers.

The loop is that of `mosaic_warpgroups`. Of 99 KB of shared memory a thread block takes half with
head dims of 64 and 128, so that two of them fit on one SM. Keys and values come through ldmatrix,
values transposed. Queries stay in registers where there is room, else each key block loads them
again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.verify_attention import mosaic_merge
from pallas_kernels.verify_attention.mosaic_merge import Chip
from pallas_kernels.verify_attention.mosaic_plan import (
    AttentionPlan,
    Splits,
    Tile,
    TuningConfig,
    choose_walks,
    splits_of,
)
from pallas_kernels.verify_attention.mosaic_tiles import copy_queries
from pallas_kernels.verify_attention.mosaic_warpgroups import Cores, walk_kernel
from pallas_kernels.weight_tiles.mma_sm120 import as_operand

_COLUMNS = 64  # of queries and keys in one load: a row of the swizzle
TILE = Tile(rows=64, groups=2, layout=plgpu.Layout.WGMMA, swizzled=False, chunk=_COLUMNS)
_KEYS = 16  # of values in one load: K of the instruction


def choose_config(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    table_size: int,
    window: int | None,
    device: Device,
    splits: Splits | None = None,
    fp8: bool = False,
) -> TuningConfig:
    """Tuning for q of `shape` [B, T, N, H] over page tables of `table_size` positions; `splits`
    other than the layer's. H is at most 256."""
    H = shape[3]
    room = (1 if H > 128 else 2) * device.num_sms
    splits = splits or splits_of(window)
    walks = choose_walks(shape, kv_heads, table_size, window, TILE, room, splits)
    return TuningConfig(64 if H == 64 else 32, splits, 2, walks)


class _Mma(Cores):
    def load_queries(
        self, plan, q_gmem, q_smem, plain_smem, ready_barrier, group_barrier, place, interpret
    ):
        copy_queries(plan, q_gmem, q_smem, plain_smem, ready_barrier, place)

        def load(part: int) -> jax.Array:
            part_reg = plgpu.load(plain_smem.at[part], layout=TILE.layout)
            return as_operand(part_reg, interpret)

        if plan.H > 64 and (plan.H > 128 or plan.merges_inside):
            # The sums of this split and of those before it leave no registers for the queries.
            return load
        parts = [load(part) for part in range(plan.H // _COLUMNS)]
        return parts.__getitem__

    def scores(
        self, plan: AttentionPlan, queries: Callable[[int], jax.Array], keys_smem: Any
    ) -> jax.Array:
        shape = (TILE.rows, keys_smem.shape[0])
        scores = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE.layout)
        for i in range(plan.H // _COLUMNS):
            keys_part_smem = keys_smem.at[:, i * _COLUMNS : (i + 1) * _COLUMNS]
            keys_reg = plgpu.load(
                keys_part_smem.transpose((1, 0)), layout=plgpu.Layout.MMA_RHS(jnp.bfloat16)
            )
            scores = plgpu.mma(scores, queries(i), keys_reg)
        return scores

    def accumulate(self, out_reg, weights_reg, values_smem, interpret):
        for first in range(0, weights_reg.shape[1], _KEYS):
            keys = slice(first, first + _KEYS)
            values_reg = plgpu.load(values_smem.at[keys], layout=plgpu.Layout.MMA_RHS(jnp.bfloat16))
            out_reg = plgpu.mma(out_reg, as_operand(weights_reg[:, keys], interpret), values_reg)
        plgpu.commit_smem()  # threads have read keys and values: a fence before the next copy
        return out_reg


verify_attention = functools.partial(
    mosaic_merge.verify_attention, Chip(TILE, choose_config, functools.partial(walk_kernel, _Mma()))
)
