"""Rows as products read them: kernels that quantise rows to e4m3 by the definition
`activations.quantize`, and that copy rows to the slots of their experts; one source for all chips.

A tile has 8 groups. 16 threads share a group: each loads 16 bytes, so a group is one read of 256
bytes, and its largest magnitude is found by shuffles within a warp. Nothing crosses warps, so a
group's numbers depend on the group alone, in whatever tile it lies.

    quantize, 8 rows or more   a tile is one group of 8 rows: their scales are adjacent
    quantize, fewer rows       a block has one row, in tiles of 8 groups
    quantize_and_spread        the same, and copies the row
    spread                     a block copies one row as it is
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import activations
from pallas_kernels.activations import LARGEST, Quantized, missing_rows
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK

GROUPS = 8
"""Groups of a tile."""
_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((GROUPS, BLOCK), (2, 8))), (-4,), (-2, -3), -1)
_E4M3 = jnp.float8_e4m3fn


def _load(x_gmem: Any) -> jax.Array:
    """A tile of 8 groups [8, 128] in registers."""
    return plgpu.load(x_gmem, layout=_LAYOUT, optimized=False)


def _quantized(x_reg: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A tile of 8 groups [8, 128] as e4m3 values and scales [8], see `activations.quantize`."""
    x_reg = x_reg.astype(jnp.float32)
    largest_reg = jnp.max(jnp.abs(x_reg), axis=1)
    smallest = jnp.finfo(jnp.float32).tiny
    scale_reg = jnp.maximum(largest_reg * (1 / LARGEST), smallest)
    scale_reg = jnp.where(largest_reg == 0, 1.0, scale_reg)
    values_reg = x_reg / lax.broadcast_in_dim(scale_reg, x_reg.shape, (0,))
    return values_reg.astype(_E4M3), scale_reg


def _tiles(groups: int) -> list:
    """Slices of 8 groups of a row; the last overlaps the one before it and stores the same numbers
    again."""
    return [pl.ds(min(first, groups - GROUPS), GROUPS) for first in range(0, groups, GROUPS)]


def _tiles_of_block(R: int, groups: int) -> int:
    """Tiles of 8 rows in a block: up to four of adjacent groups, as long as there are a thousand
    blocks."""
    return next(
        n for n in (4, 3, 2, 1) if n == 1 or (groups % n == 0 and R // 8 * groups >= n * 1024)
    )


def operand(x: jax.Array, quantized: bool, launch: Launch) -> tuple[jax.Array, jax.Array | None]:
    """Rows x [R, K] as products read them: in whole tiles, quantised or not.

    Returns:
      values [R', K] and scale [groups, R'], None of rows that are not quantised; R' >= R.
    """
    if missing := missing_rows(x.shape[0]):
        x = jnp.pad(x, ((0, missing), (0, 0)))
    return quantize(x, launch) if quantized else (x, None)


def spread_operand(
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
      num_items, tokens: as of `spread`; rows that are quantised are copied all.
    Returns:
      values [size, K], scale [groups, size], None of rows that are not quantised.
    """
    R, K = x.shape
    if not quantized:
        return spread(x, slots, size, launch, num_items, tokens), None
    if K % BLOCK == 0 and K >= GROUPS * BLOCK:
        return quantize_and_spread(x, slots, size, launch)
    values, scale = quantize(x, launch)
    copies = jnp.broadcast_to(scale[:, None, :R], (len(scale), len(slots), R))
    spread_scale = jnp.ones((len(scale), size), scale.dtype).at[:, slots[:, :R]].set(copies)
    return spread(values, slots, size, launch), spread_scale


def quantize(x: jax.Array, launch: Launch) -> Quantized:
    """Quantises rows x [R, K]; a copy pads odd numbers of rows, so callers that pad anyway do it
    before.

    Widths that are no multiple of 128 take XLA's code, whatever R is.
    """
    R, K = x.shape
    if K % BLOCK:
        return activations.quantize(x)
    if R % GROUPS == 0 or (R < GROUPS and K >= GROUPS * BLOCK):
        return _quantize(x, launch)
    values, scale = _quantize(jnp.pad(x, ((0, -R % GROUPS), (0, 0))), launch)
    return Quantized(values[:R], scale)


@functools.partial(jax.jit, static_argnames=("launch",))
def _quantize(x: jax.Array, launch: Launch) -> Quantized:
    """x [R, K], K a multiple of 128; R is a multiple of 8, or less than 8 with at least 8
    groups."""
    R, K = x.shape
    groups = K // BLOCK
    few = R < GROUPS
    tiles = 1 if few else _tiles_of_block(R, groups)

    def body(
        x_gmem,  # [R, groups, 128]
        values_gmem,  # [R, groups, 128] e4m3
        scale_gmem,  # [groups, R'] float32
    ):
        if few:
            places = [(lax.axis_index("row"), tile) for tile in _tiles(groups)]
        else:
            rows, first = pl.ds(lax.axis_index("row") * GROUPS, GROUPS), lax.axis_index("group")
            places = [(rows, first * tiles + i) for i in range(tiles)]
        loaded = [_load(x_gmem.at[place]) for place in places]
        for (row, group), x_reg in zip(places, loaded, strict=True):
            values_gmem[row, group], scale_gmem[group, row] = _quantized(x_reg)

    values, scale = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((R, groups, BLOCK), _E4M3),
            jax.ShapeDtypeStruct((groups, pl.cdiv(R, 8) * 8), jnp.float32),
        ),
        grid=(R, 1) if few else (R // GROUPS, groups // tiles),
        grid_names=("row", "group"),
        interpret=launch.interpret,
        kernel_name="quantize",
    )(x.reshape(R, groups, BLOCK))
    return Quantized(values.reshape(R, K), scale)


@functools.partial(jax.jit, static_argnames=("size", "launch"))
def quantize_and_spread(x: jax.Array, slots: jax.Array, size: int, launch: Launch) -> Quantized:
    """Quantises x [R, K] and copies row r to the rows `slots[:, r]` of `size`; other rows stay
    undefined.

    K is a multiple of 128 and at least 1,024, size a multiple of 8.
    """
    R, K = x.shape
    groups, top_k = K // BLOCK, slots.shape[0]

    def body(
        x_gmem,  # [R, groups, 128]
        slots_gmem,  # [k, R'] int32
        values_gmem,  # [size, groups, 128] e4m3
        scale_gmem,  # [groups, size] float32
        row_smem,  # [groups, 128] e4m3
    ):
        r = lax.axis_index("row")
        targets = [slots_gmem[j, r] for j in range(top_k)]
        tiles = _tiles(groups)
        loaded = [_load(x_gmem.at[r, tile]) for tile in tiles]
        for tile, x_reg in zip(tiles, loaded, strict=True):
            row_smem[tile], scale_reg = _quantized(x_reg)
            for target in targets:
                scale_gmem[tile, target] = scale_reg
        plgpu.commit_smem()
        for target in targets:
            plgpu.copy_smem_to_gmem(row_smem, values_gmem.at[target])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    values, scale = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((size, groups, BLOCK), _E4M3),
            jax.ShapeDtypeStruct((groups, size), jnp.float32),
        ),
        scratch_types=(plgpu.SMEM((groups, BLOCK), _E4M3),),
        grid=(R,),
        grid_names=("row",),
        interpret=launch.interpret,
        kernel_name="quantize_and_spread",
    )(x.reshape(R, groups, BLOCK), slots)
    return Quantized(values.reshape(size, K), scale)


@functools.partial(jax.jit, static_argnames=("size", "launch", "tokens"))
def spread(
    x: jax.Array,
    slots: jax.Array,
    size: int,
    launch: Launch,
    num_items: jax.Array | None = None,
    tokens: int = 0,
) -> jax.Array:
    """Copies row r of x [R, D] to rows `slots[:, r]` of a buffer [size, D]; other rows stay
    undefined.

    One block per row: one TMA load to shared memory, then k TMA stores.

    Args:
      num_items: int32, entry 0 is the number of items with `tokens` rows each. Slots behind them
        are left out: in a share of the experts all rows of other experts have the last slot
        (`worklist.own_items`), and a thousand stores to one row wait for each other.
    """
    R, D = x.shape
    width = 64
    top_k = slots.shape[0]

    def body(
        x_gmem,  # [R, D / width, width]
        slots_gmem,  # [k, R] int32
        *refs,  # num_items, if any; out_gmem [size, D / width, width]
        row_smem,  # [D / width, width]
        loaded_barrier,
    ):
        *num_items_gmem, out_gmem = refs
        r = lax.axis_index("row")
        plgpu.copy_gmem_to_smem(x_gmem.at[r], row_smem, loaded_barrier)
        targets = [slots_gmem[j, r] for j in range(top_k)]
        end = num_items_gmem[0][0] * tokens if num_items_gmem else None
        plgpu.barrier_wait(loaded_barrier)
        for target in targets:
            copy = functools.partial(plgpu.copy_smem_to_gmem, row_smem, out_gmem.at[target])
            copy() if end is None else pl.when(target < end)(copy)
        # Shared memory must live until it is read; the end of the kernel waits for the writes.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size, D // width, width), x.dtype),
        scratch_types=dict(
            row_smem=plgpu.SMEM((D // width, width), x.dtype), loaded_barrier=plgpu.Barrier()
        ),
        grid=(R,),
        grid_names=("row",),
        interpret=launch.interpret,
        kernel_name="moe_spread",
    )(x.reshape(R, D // width, width), slots, *([] if num_items is None else [num_items]))
    return out.reshape(size, D)
