"""Stages 2 to 6 of `mosaic_plan`: the worklist, by a counting sort with bit masks.

The worklist of the grouped GEMM (`worklist.Worklist`) sorts the rows by expert. A counting sort does it
with bit masks. Example with R = 4 rows, E = 4 experts, k = 2 and items of `tokens` = 2 rows:

    chosen experts        row 0: 2 0    row 1: 0 3    row 2: 0 2    row 3: 3 0

    expert                           0      1      2      3
    mask: bit r = row r chose it  1111   0000   0101   1010
    count = popcount(mask)           4      0      2      2
    items = ceil(count / tokens)     2      0      1      1
    ends = inclusive prefix sum      2      2      3      4      num_items = 4
    first = (ends - items) * tokens  0      4      4      6      first slot of the expert

    slot of (row, expert) = first[expert] + rank,  rank = popcount(mask & ((1 << row) - 1))
    slots                 row 0: 4 0    row 1: 1 6    row 2: 2 5    row 3: 7 3
    expert of item i      number of ends <= i:  0 0 2 3

    stage                what the block computes                                  layout
    2  store_hits        1 << (row % 16) where a row chose an expert              [rows, Ep] shared memory
       load_masks        masks, 16 rows each                                      [Ep] registers
    3  exchange_counts   rows per expert of the cluster, and of earlier blocks    [Ep] registers
    4  scan_items        ends                                                     [Ep] shared memory
    5  find_slots        slots of the block's rows                                [k8, rows] registers
    6  store_experts     expert of each item                                      device memory

A device that has only some experts (`Own`) stores hits of these alone. Others then have no items, and the items of
its own experts begin at slot 0. With `own` = experts 2 and 3 above: ends 0 0 1 2, slots of these experts 0, 3, 1, 2.

All numbers are int32. The argument `zero` is 0 at run time, but the compiler does not know it: it keeps loops
from being unrolled, because code that runs once is limited by instruction fetch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe.mosaic_layout import Own, Plan, Rows, Scratch
from pallas_kernels.moe.mosaic_route import padded_experts

_BY_32 = Rows(32)
"""Layout of [32, n] arrays of per-expert numbers, 32 experts or items at a time."""


def store_hits(
    plan: Plan, logits_reg: jax.Array, first_row: Any, hits_smem: Any, own: Own | None
) -> jax.Array:
    """Stores 1 << (row % 16) to hits_smem [rows, Ep] where `choose` has left -inf in logits_reg [rows, Ep].

    Experts that are not in `own` get no hits.

    Returns:
      the row iota [rows, Ep] in registers.
    """
    block = plan.block
    row = block.iota(plan.Ep, 0)
    hit = (logits_reg == -jnp.inf) & (row + first_row < plan.R)
    if plan.Ep > plan.E:
        hit = hit & (block.iota(plan.Ep, 1) < plan.E)
    if own is not None:
        hit = hit & own.has(block.iota(plan.Ep, 1))
    hits_smem[...] = jnp.where(hit, 1 << (row & 15), 0)
    return row


def load_masks(plan: Plan, hits_smem: Any) -> list[jax.Array]:
    """The bit masks [Ep] in registers of each 16 rows: the sum of their hits."""
    masks = []
    for start in range(0, min(plan.block.rows, plan.R), 16):
        lines = [plan.load_flat(hits_smem.at[start + i]) for i in range(min(16, plan.R))]
        masks.append(functools.reduce(jnp.add, lines))
    return masks


def popcount(mask: jax.Array) -> jax.Array:
    """Number of set bits among the lowest 16; the upper bits are 0."""
    mask = mask - ((mask >> 1) & 0x5555)
    mask = (mask & 0x3333) + ((mask >> 2) & 0x3333)
    mask = (mask + (mask >> 4)) & 0x0F0F
    return (mask + (mask >> 8)) & 0x1F


def exchange_counts(
    plan: Plan, count_reg: jax.Array, g: Any, counts_gmem: Any, scratch: Scratch
) -> tuple[jax.Array, jax.Array]:
    """Rows per expert of the whole cluster, and of the blocks before block g; both [Ep] in registers.

    count_reg [Ep] are those of block g, counts_gmem is [blocks, Ep]. The counts go by TMA through L2, then a cluster barrier, then each block reads all counts. The TMA
    store is complete before the block arrives at the barrier.
    """
    counts_smem = scratch.counts_smem
    counts_smem[0] = count_reg
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(counts_smem.at[0], counts_gmem.at[g])
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(scratch.cluster_barrier)
    plgpu.barrier_wait(scratch.cluster_barrier)
    plgpu.copy_gmem_to_smem(counts_gmem, counts_smem, scratch.loaded_barrier)
    plgpu.barrier_wait(scratch.loaded_barrier)
    counts = [plan.load_flat(counts_smem.at[i]) for i in range(plan.blocks)]
    total = functools.reduce(jnp.add, counts)
    earlier = [count * (i < g).astype(jnp.int32) for i, count in enumerate(counts)]
    return total, functools.reduce(jnp.add, earlier)


def items_of(count: jax.Array, tokens: int) -> jax.Array:
    """Items of `tokens` rows that hold each of the counts [Ep] of rows."""
    padded = count + (tokens - 1)
    if tokens & (tokens - 1):
        return lax.div(padded, jnp.int32(tokens))
    return padded >> (tokens.bit_length() - 1)


def scan_items(Ep: int, tiles_smem: Any, ends_smem: Any, zero: Any) -> jax.Array:
    """Inclusive prefix sum of tiles_smem [Ep] to ends_smem [Ep]; returns the total, [32], all equal.

    32 experts at a time: a triangular mask and a row sum, plus the carry of the parts before.
    """
    upto = _BY_32.iota(32, 1) <= _BY_32.iota(32, 0)

    def add_part(i, carry):
        part = pl.ds(i * 32, 32)
        line = _BY_32.load_row(tiles_smem.at[part])
        ends_smem[part] = jnp.sum(jnp.where(upto, line, 0), axis=1) + carry
        return jnp.sum(line, axis=1) + carry

    carry = plgpu.layout_cast(jnp.zeros((32,), jnp.int32), _BY_32.wide.reduce(1))
    return lax.fori_loop(0, Ep // 32 + zero, add_part, carry)


def find_slots(
    plan: Plan,
    masks_reg: list[jax.Array],
    first_reg: jax.Array,
    earlier_reg: Any,
    row_reg: jax.Array,
    first_row: Any,
    zero: Any,
    scratch: Scratch,
) -> jax.Array:
    """Slots [k8, rows] of the chosen experts, in registers.

    A slot and a mask are packed into one integer per expert, which a row looks up by a masked sum.

    Args:
      masks_reg: [Ep] for each 16 rows.
      first_reg: [Ep], the first slot of each expert.
      earlier_reg: [Ep], rows of the expert in the blocks before; 0 for a single block.
      row_reg: the row iota [rows, Ep].
      first_row: the block's first row.
    """
    block, Ep, padded = plan.block, plan.Ep, padded_experts(plan.E)
    packed_smem, ids_smem = scratch.packed_smem, scratch.ids_smem
    if plan.shared:
        packed_smem[0] = first_reg
    else:
        base = first_reg + earlier_reg
        for i, mask in enumerate(masks_reg):
            packed_smem[i] = (base << 16) | mask
            base = base + popcount(mask)
    packed = block.load_row(packed_smem.at[0])
    if len(masks_reg) == 2 and not plan.shared:
        packed = jnp.where(row_reg < 16, packed, block.load_row(packed_smem.at[1]))
    from_end = padded - block.iota(Ep, 1)
    j = block.tall_iota(ids_smem.shape, 0)

    def look_up(i, entries):
        column = plgpu.load(ids_smem.at[i], layout=block.wide.reduce(1), optimized=False)
        chosen = block.broadcast(padded - column, Ep)
        value = jnp.sum(jnp.where(from_end == chosen, packed, 0), axis=1)
        return jnp.where(j == i, lax.broadcast_in_dim(value, entries.shape, (1,)), entries)

    entries = jnp.zeros(ids_smem.shape, jnp.int32)
    entries = lax.fori_loop(0, plan.top_k + zero, look_up, entries)
    row = block.tall_iota(ids_smem.shape, 1)
    if plan.shared:
        return entries + (row + first_row)
    return (entries >> 16) + popcount(entries & ((1 << (row & 15)) - 1))


def store_experts(
    E: int,
    ends_smem: Any,
    block: tuple[Any, int],
    chunks: int,
    zero: Any,
    experts_gmem: Any,
    own: Own | None = None,
) -> None:
    """Stores the expert of each item to experts_gmem [32 * chunks]; with `own` counted from its first.

    Args:
      ends_smem: [Ep], the prefix sum of `scan_items`.
      block: (g, n); block g of n takes every n-th chunk.
    """
    ends = _BY_32.load_row(ends_smem)
    g, blocks = block

    def store_part(i, _):
        part = (i * blocks + g) * 32
        done = jnp.sum(jnp.where(ends <= _BY_32.iota(ends.shape[1], 0) + part, 1, 0), axis=1)
        if own is None:
            experts_gmem[pl.ds(part, 32)] = jnp.minimum(done, E - 1)
        else:  # the experts before the first one have no items, so they are counted for every item
            experts_gmem[pl.ds(part, 32)] = jnp.minimum(done - own.first, own.count - 1)
        return 0

    lax.fori_loop(0, (chunks - g + blocks - 1) // blocks + zero, store_part, 0)
