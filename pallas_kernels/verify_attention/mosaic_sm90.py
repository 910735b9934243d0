"""Paged attention for Hopper: `mosaic_warpgroups`, or `mosaic_prefill` for many queries, and their
tuning."""

import functools
from collections.abc import Callable
from typing import Any

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
from pallas_kernels.verify_attention.mosaic_prefill import prefill_kernel
from pallas_kernels.verify_attention.mosaic_warpgroups import walk_kernel

TILE = Tile(rows=64, groups=2, layout=plgpu.Layout.WGMMA, row_groups=2)
# From here on two row tiles that share key blocks are faster (lab/kernels.md): queries of a
# sequence, and positions.
_SHARED_ROWS, _SHARED_KEYS = 512, 1024


def choose_config(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    table_size: int,
    window: int | None,
    device: Device,
    fp8: bool = False,
) -> TuningConfig:
    """Tuning for q of `shape` [B, T, N, H] over page tables of `table_size` positions."""
    _, T, N, H = shape
    splits = splits_of(window)
    walks = choose_walks(shape, kv_heads, table_size, window, TILE, 2 * device.num_sms, splits)
    many = T >= _SHARED_ROWS and table_size >= _SHARED_KEYS and walks == 1
    if many and window is None and H <= 128:
        return prefill_config(H, splits, fp8)
    # Chosen so that two thread blocks of head dim 64 or 128 fit on one SM.
    stages = {64: 6, 128: 3 if N // kv_heads % 8 == 0 else 2, 256: 2, 512: 3}[H]
    return TuningConfig(32 if H > 256 else 64, splits, stages, walks)


def prefill_config(head_dim: int, splits: Splits, fp8: bool = False) -> TuningConfig:
    """Tuning with two row tiles a thread block, for a head dim of 64 or 128; `fp8`: the pages are
    e4m3."""
    # One thread block fits on an SM. The stages are 160 KB of keys and values; an e4m3 block has
    # half the bytes.
    wide = 128 // head_dim
    if fp8:
        return TuningConfig(64, splits, 4 * wide, 1, 2, raw_stages=2 * wide)
    return TuningConfig(64, splits, 5 * wide, 1, 2)


def _kernel(plan: AttentionPlan, interpret: Any) -> Callable:
    return (prefill_kernel if plan.config.row_groups > 1 else walk_kernel)(plan, interpret)


verify_attention = functools.partial(
    mosaic_merge.verify_attention,
    Chip(TILE, choose_config, _kernel),
)
