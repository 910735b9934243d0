"""Routing and worklist of any number of rows in two kernels, without an operation of XLA.

`mosaic_plan` sorts up to 256 rows in one cluster of blocks, which send each other their counts.
More rows have more blocks than a cluster has, so here the counts go from one kernel to the next
one:

    kernel                a block of 64 rows computes
    moe_route_and_count   top-k and weights; for each expert a mask of every 16 rows, and the count
                          of all 64
    moe_place             rows of each expert in all blocks and in earlier ones; items and their
                          prefix sum; the slots of its rows, and the experts of some items

All numbers are those of `worklist.make_worklist`, as `mosaic_sort` explains; the weights have the
bits of `moe_route`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch
from pallas_kernels.moe import mosaic_route
from pallas_kernels.moe.mosaic_route import ROWS, load_flat, padded_experts
from pallas_kernels.moe.mosaic_sort import (
    items_of,
    popcount,
    scan_items,
    store_count,
    store_experts,
)

_LAYOUT = plgpu.Layout.WGMMA
_WIDTH = 64
"""Experts of one register array [ROWS, _WIDTH]."""
_MOST_BLOCKS = 256
"""Limit of a TMA copy in each dimension."""


def fits(R: int, E: int, device: Device) -> bool:
    """Whether `place` takes R rows and E experts: a block has the counts of all blocks in shared
    memory."""
    blocks, Ep = pl.cdiv(R, ROWS), padded_experts(E)
    return blocks <= _MOST_BLOCKS and Ep <= 256 and 4 * Ep * (blocks + 16) <= device.smem_bytes


def route_and_place(
    logits: jax.Array,  # [R, E] float32
    bias: jax.Array | None,  # [E]
    *,
    top_k: int,
    normalize: bool,
    tokens: int,
    items: int,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Routes the rows and builds the worklist, as `worklist.make_worklist` with `tokens` and not
    `shared`.

    Returns:
      weights float32 [k, R'], slots int32 [k, R'], experts int32 [items'], num_items int32 [64]
      (all equal); R' and items' are the next multiples of 64. Entries past R are unspecified.
    Raises:
      ValueError: `fits` is False.
    """
    R, E = logits.shape
    if not fits(R, E, launch.device):
        raise ValueError(f"{logits.shape=} exceeds the limits of this kernel")
    weights, *routed = mosaic_route.route(logits, bias, top_k, normalize, launch, counted=True)
    return weights, *place(*routed, E=E, tokens=tokens, items=items, launch=launch)


@functools.partial(jax.jit, static_argnames=("E", "tokens", "items", "launch"))
def place(
    ids: jax.Array,  # int32 [k, R']
    masks: jax.Array,  # int32 [R' / 64, 4, Ep]
    counts: jax.Array,  # int32 [R' / 64, Ep]
    *,
    E: int,
    tokens: int,
    items: int,
    launch: Launch,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The worklist of what `mosaic_route.route` has counted: slots, experts and num_items of
    `route_and_place`."""
    top_k, padded_rows = ids.shape
    blocks, Ep = counts.shape
    interpreted = launch.interpret is not None

    def body(
        ids_gmem,
        masks_gmem,
        counts_gmem,
        slots_gmem,  # int32 [k, R']
        experts_gmem,  # int32 [items'], items padded to a multiple of 64
        num_items_gmem,  # int32 [64]
        counts_smem,  # int32 [blocks, Ep]
        base_smem,  # int32 [4, Ep], first slot of each expert for every 16 rows of the block
        tiles_smem,  # int32 [Ep], items per expert
        ends_smem,  # int32 [Ep], inclusive prefix sum of the items
        loaded_barrier,
    ):
        g = lax.axis_index("block")
        plgpu.copy_gmem_to_smem(counts_gmem, counts_smem, loaded_barrier)
        groups = [popcount(load_flat(masks_gmem.at[g, i], Ep)) for i in range(4)]
        plgpu.barrier_wait(loaded_barrier)

        def add_block(i, carry):
            total, earlier = carry
            count = load_flat(counts_smem.at[i], Ep)
            return total + count, earlier + count * (i < g).astype(jnp.int32)

        none = groups[0] & 0
        total, earlier = lax.fori_loop(0, blocks, add_block, (none, none))
        tiles = items_of(total, tokens)
        tiles_smem[...] = tiles
        zero = counts_smem[0, 0] >> 30  # always 0, opaque to the compiler: prevents unrolling
        scan_items(Ep, tiles_smem, ends_smem, interpreted)
        store_count(ends_smem, num_items_gmem, g, interpreted)

        base = (load_flat(ends_smem, Ep) - tiles) * tokens + earlier
        for i, group in enumerate(groups):
            base_smem[i] = base
            base = base + group

        places = [_slots(masks_gmem.at[g], base_smem, i) for i in range(Ep // _WIDTH)]
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, _WIDTH), 1, layout=_LAYOUT)
        rows = pl.ds(g * ROWS, ROWS)

        def store_slots(j, _):
            ids = plgpu.load(ids_gmem.at[j, rows], layout=_LAYOUT.reduce(1), optimized=False)
            ids = lax.broadcast_in_dim(ids, (ROWS, _WIDTH), (0,))
            slots_of_experts = [
                jnp.sum(jnp.where(column == ids - i * _WIDTH, place, 0), axis=1)
                for i, place in enumerate(places)
            ]
            slots_gmem[j, rows] = functools.reduce(jnp.add, slots_of_experts)
            return 0

        lax.fori_loop(0, top_k + zero, store_slots, 0)
        store_experts(E, ends_smem, (g, blocks), experts_gmem, None, interpreted)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((top_k, padded_rows), jnp.int32),
            jax.ShapeDtypeStruct((pl.cdiv(items, ROWS) * ROWS,), jnp.int32),
            jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        ),
        scratch_types=dict(
            counts_smem=plgpu.SMEM((blocks, Ep), jnp.int32),
            base_smem=plgpu.SMEM((4, Ep), jnp.int32),
            tiles_smem=plgpu.SMEM((Ep,), jnp.int32),
            ends_smem=plgpu.SMEM((Ep,), jnp.int32),
            loaded_barrier=plgpu.Barrier(),
        ),
        # No scratch: every reduction stays within a warp, which saves two barriers each.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        grid=(blocks,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name="moe_place",
    )(ids, masks, counts)


def _slots(masks_gmem, base_smem, part: int) -> jax.Array:
    """[ROWS, _WIDTH] int32: the slot that a row has with an expert of this part, if it chose it.

    It is the group's first slot plus the number of earlier rows of the group that chose the expert.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, _WIDTH), 0, layout=_LAYOUT)
    columns = pl.ds(part * _WIDTH, _WIDTH)

    def of_groups(lines_ref):
        lines = [
            plgpu.load(lines_ref.at[i, columns], layout=_LAYOUT.reduce(0), optimized=False)
            for i in range(4)
        ]
        lines = [lax.broadcast_in_dim(line, (ROWS, _WIDTH), (1,)) for line in lines]
        chosen = lines[3]
        for i in (2, 1, 0):
            chosen = jnp.where(row < 16 * (i + 1), lines[i], chosen)
        return chosen

    return of_groups(base_smem) + popcount(of_groups(masks_gmem) & ((1 << (row & 15)) - 1))
