"""Stages 2 to 6 of `mosaic_plan`: the worklist, by a counting sort with bit masks.

The worklist of the grouped GEMM (`worklist.Worklist`) sorts the rows by expert. A counting sort
does it with bit masks. Example with R = 4 rows, E = 4 experts, k = 2 and items of `tokens` = 2
rows:

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

    stage                what the block computes                     layout
    2  store_masks       masks                                       [Ep] shared memory
    3  exchange_counts   rows per expert of each block               [blocks, Ep] shared memory
    4  place_experts     ends, and first slots of the block's rows   [Ep] shared memory
    5  find_slots        slots of the block's rows                   [k8, rows] registers
    6  store_experts     expert of each item                         device memory

A device that has only some experts (`Own`) stores masks of these alone. Others then have no items,
and the items of its own experts begin at slot 0. With `own` = experts 2 and 3 above: ends 0 0 1 2,
slots of these experts 0, 3, 1, 2.

All numbers are int32. What a thread does alone is in operations of `mosaic_lanes`. Their loops are
not unrolled, because code that runs once is limited by instruction fetch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cluster_send
from pallas_kernels.moe import mosaic_lanes as lanes
from pallas_kernels.moe.mosaic_layout import Own, Plan, Scratch


def clear_masks(masks_smem: Any, interpreted: bool) -> None:
    """Stores zeros to masks_smem [n], n <= 128, and waits until the whole warpgroup has."""
    count = masks_smem.shape[0]
    if interpreted:
        masks_smem[...] = jnp.zeros((count,), jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def clear(_, masks):
        thread = lanes.thread()
        place = lanes.plus(lanes.address(masks), lanes.times(thread, 4))
        lanes.store(place, 0, lanes.less(thread, count))
        lanes.sync_warpgroup()

    clear(masks_smem)


def store_masks(
    plan: Plan, ids_reg: jax.Array, first_row: Any, masks_smem: Any, own: Own | None
) -> None:
    """Sets bit r of masks_smem [Ep], which is zeros, for each expert of row r of the block; ids_reg
    is [k8, rows].

    Rows past R and experts that are not in `own` set no bits.
    """
    row = plan.tall_iota(1)
    is_hit = (row + first_row < plan.R) & (plan.tall_iota(0) < plan.top_k)
    if own is not None:
        is_hit = is_hit & own.has(ids_reg)
    bits = jnp.where(is_hit, 1 << row, 0)
    lanes.or_at(masks_smem, ids_reg, bits, plan.tall, plan.interpreted)


def popcount(mask: jax.Array) -> jax.Array:
    """Number of set bits."""
    mask = mask - ((mask >> 1) & 0x55555555)
    mask = (mask & 0x33333333) + ((mask >> 2) & 0x33333333)
    mask = (mask + (mask >> 4)) & 0x0F0F0F0F
    return (mask * 0x01010101) >> 24


def exchange_counts(plan: Plan, g: Any, counts_gmem: list[Any], scratch: Scratch) -> None:
    """Rows per expert of each block of the cluster, to counts_smem [blocks, Ep] of all blocks. A
    thread reads them without another barrier.

    Each block sends its counts to the shared memory of all blocks, and waits for those of all.
    `prepare` has armed the barrier that counts them, see `cluster_send`.

    In the interpreter the counts go by TMA through counts_gmem [blocks, Ep], which it checks for
    races.
    """
    counts_smem = scratch.counts_smem
    if plan.interpreted:
        counts_smem[0] = popcount(scratch.masks_smem[...])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(counts_smem.at[0], counts_gmem[0].at[g])
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(scratch.cluster_barrier)
        plgpu.barrier_wait(scratch.cluster_barrier)
        plgpu.copy_gmem_to_smem(counts_gmem[0], counts_smem, scratch.loaded_barrier)
        plgpu.barrier_wait(scratch.loaded_barrier)
        return

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, lanes.SCALAR))
    def send(_, masks, counts, barriers, block):
        thread = lanes.thread()
        expert = lanes.smaller(thread, plan.Ep - 1)
        (mask,) = lanes.load(lanes.plus(lanes.address(masks), lanes.times(expert, 4)))
        line = lanes.times(lanes.scalar(block), plan.Ep)
        place = lanes.plus(lanes.address(counts), lanes.times(lanes.plus(line, expert), 4))
        count, is_expert = lanes.popcount(mask), lanes.less(thread, plan.Ep)
        counted_at = lanes.address(barriers)
        for to in range(plan.blocks):
            cluster_send.send(place, counted_at, lanes.word(to), [count], is_expert)

    cluster_send.wait_armed()
    send(scratch.masks_smem, counts_smem, scratch.barriers_smem, g)
    cluster_send.receive(scratch.barriers_smem, 0)


def place_experts(plan: Plan, g: Any, scratch: Scratch) -> None:
    """Ends of the experts' items, and the first slots of their rows in block g: ends_smem and
    base_smem [Ep].

    It reads masks_smem, or counts_smem of several blocks. Each warp computes and stores all of it,
    so that none waits for another: a lane has Ep / 32 adjacent experts. A thread reads the results
    without another barrier.
    """
    masks_smem, counts_smem = scratch.masks_smem, scratch.counts_smem
    if plan.interpreted:
        counts = popcount(masks_smem[...])[None] if plan.blocks == 1 else counts_smem[...]
        count = counts.sum(0, dtype=jnp.int32)
        is_before = jnp.arange(plan.blocks)[:, None] < g
        earlier = jnp.where(is_before, counts, 0).sum(0, dtype=jnp.int32)
        tiles = jnp.minimum(count, 1) if plan.shared else items_of(count, plan.tokens)
        ends = jnp.cumsum(tiles)
        scratch.ends_smem[...] = ends
        first = (ends - tiles) * plan.tokens
        scratch.base_smem[...] = first if plan.shared else first + earlier
        return

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, lanes.SCALAR))
    def place(_, masks, counts, ends, base, block):
        starts = [lanes.address(ref) for ref in (masks, counts, ends, base)]
        _place_experts(plan, *starts, lanes.scalar(block))

    place(masks_smem, counts_smem, scratch.ends_smem, scratch.base_smem, g)


def _place_experts(plan: Plan, masks: Any, counts: Any, ends: Any, base: Any, block: Any) -> None:
    """What one thread does in `place_experts`; arguments are the addresses of [Ep], counts of
    [blocks, Ep]."""
    width = plan.Ep // 32
    first = lanes.times(lanes.bit_and(lanes.thread(), 31), 4 * width)
    if plan.blocks == 1:
        count = [lanes.popcount(mask) for mask in lanes.load(lanes.plus(masks, first), width)]
        earlier = [0] * width
    else:
        count, earlier = [0] * width, [0] * width
        for i in range(plan.blocks):
            is_own = lanes.equal(block, i)
            place = lanes.plus(counts, lanes.plus(first, 4 * plan.Ep * i))
            for e, more in enumerate(lanes.load(place, width)):
                earlier[e] = lanes.select(is_own, count[e], earlier[e])
                count[e] = lanes.plus(count[e], more)
    if plan.shared:
        tiles = [lanes.smaller(x, 1) for x in count]
    else:
        padded = [lanes.plus(x, plan.tokens - 1) for x in count]
        tiles = [lanes.divided(x, plan.tokens) for x in padded]
    upto = _scan(tiles)
    slots = [
        lanes.times(lanes.minus(end, own), plan.tokens)
        for end, own in zip(upto, tiles, strict=True)
    ]
    if not plan.shared:
        slots = [lanes.plus(slot, before) for slot, before in zip(slots, earlier, strict=True)]
    lanes.store_words(lanes.plus(ends, first), upto)
    lanes.store_words(lanes.plus(base, first), slots)
    lanes.sync_warp()


def _scan(numbers: list) -> list:
    """Inclusive prefix sums over a warp whose lanes have adjacent numbers."""
    sums = numbers[:1]
    for x in numbers[1:]:
        sums.append(lanes.plus(sums[-1], x))
    upto = sums[-1]
    for distance in (1, 2, 4, 8, 16):
        upto = lanes.add_lane_below(upto, distance)
    before = lanes.minus(upto, sums[-1])
    return [lanes.plus(before, x) for x in sums]


def items_of(count: jax.Array, tokens: int) -> jax.Array:
    """Items of `tokens` rows that hold each of the counts [Ep] of rows."""
    padded = count + (tokens - 1)
    if tokens & (tokens - 1):
        return lax.div(padded, jnp.int32(tokens))
    return padded >> (tokens.bit_length() - 1)


def scan_items(Ep: int, tiles_smem: Any, ends_smem: Any, interpreted: bool) -> None:
    """Inclusive prefix sum of tiles_smem [Ep] to ends_smem [Ep], Ep a multiple of 32.

    Each warp computes and stores all of it, so that none waits for another: a lane adds Ep / 32
    adjacent numbers. A thread reads ends_smem without another barrier.
    """
    if interpreted:
        ends_smem[...] = jnp.cumsum(tiles_smem[...])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def scan(_, tiles, ends):
        width = Ep // 32
        first = lanes.times(lanes.bit_and(lanes.thread(), 31), 4 * width)
        numbers = lanes.load(lanes.plus(lanes.address(tiles), first), width)
        lanes.store_words(lanes.plus(lanes.address(ends), first), _scan(numbers))
        lanes.sync_warp()

    scan(tiles_smem, ends_smem)


def store_count(ends_smem: Any, num_items_gmem: Any, g: Any, interpreted: bool) -> None:
    """Stores the number of items to num_items_gmem [64], all equal, from block 0."""
    last, count = ends_smem.shape[0] - 1, num_items_gmem.shape[0]
    if interpreted:

        @pl.when(g == 0)
        def _():
            num_items_gmem[...] = jnp.full((count,), ends_smem[last])

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), lanes.SCALAR))
    def put(_, ends, num_items, block):
        thread = lanes.thread()
        (items,) = lanes.load(lanes.plus(lanes.address(ends), 4 * last))
        is_first = lanes.equal(lanes.scalar(block), 0)
        where = lanes.bit_and(is_first, lanes.less(thread, count))
        place = lanes.global_address(num_items)
        lanes.store_global(place, lanes.times(thread, 4), items, where)

    put(ends_smem, num_items_gmem, g)


def find_slots(plan: Plan, ids_reg: jax.Array, first_row: Any, scratch: Scratch) -> jax.Array:
    """Slots [k8, rows] of the chosen experts, in registers.

    Args:
      ids_reg: [k8, rows], the chosen experts.
      first_row: the block's first row.
    """
    base = lanes.gather(scratch.base_smem, ids_reg, plan.tall, plan.interpreted)
    row = plan.tall_iota(1)
    if plan.shared:
        return base + (row + first_row)
    masks = lanes.gather(scratch.masks_smem, ids_reg, plan.tall, plan.interpreted)
    return base + popcount(masks & ((1 << row) - 1))


def store_experts(
    E: int,
    ends_smem: Any,
    block: tuple[Any, int],
    experts_gmem: Any,
    own: Own | None,
    interpreted: bool,
) -> None:
    """Stores the expert of each item to experts_gmem [32 n]; with `own` counted from its first.

    It is the number of ends that are not above the item, but the last expert for items that do not
    exist. A thread searches the ends of one item.

    Args:
      ends_smem: [Ep], the prefix sum of `scan_items`.
      block: (g, n); block g of n takes every n-th 32 items.
    """
    g, blocks = block
    (Ep,) = ends_smem.shape
    chunks = experts_gmem.shape[0] // 32
    if interpreted:

        def store_part(i, _):
            part = (i * blocks + g) * 32
            done = (ends_smem[...] <= part + jnp.arange(32)[:, None]).sum(1, dtype=jnp.int32)
            found = done if own is None else done - own.first
            last = E - 1 if own is None else own.count - 1
            experts_gmem[pl.ds(part, 32)] = jnp.minimum(found, last)
            return 0

        lax.fori_loop(0, (chunks - g + blocks - 1) // blocks, store_part, 0)
        return

    firsts = [] if own is None else [own.first]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), *[lanes.SCALAR] * (1 + len(firsts)))
    )
    def put(_, ends, experts, block, *firsts):
        start, to = lanes.address(ends), lanes.global_address(experts)
        warp, lane = lanes.right(lanes.thread(), 5), lanes.bit_and(lanes.thread(), 31)

        def store_some(i, _):
            turn = lanes.plus(lanes.times(i, 4), warp)
            chunk = lanes.plus(lanes.times(turn, blocks), lanes.scalar(block))
            item = lanes.plus(lanes.times(chunk, 32), lane)
            expert = _search(start, Ep, item)
            for first in firsts:
                expert = lanes.minus(expert, lanes.scalar(first))
            expert = lanes.smaller(expert, E - 1 if own is None else own.count - 1)
            where = lanes.less(chunk, chunks)
            lanes.store_global(to, lanes.times(item, 4), expert, where)
            return []

        lanes.loop(pl.cdiv(chunks, 4 * blocks), store_some, [])

    put(ends_smem, experts_gmem, g, *firsts)


def _search(ends: Any, Ep: int, item: Any) -> Any:
    """How many of the Ep ends at an address are not above the item; if none is above, any number
    from Ep - 1 on.

    A step adds a power of two if the last of these ends is not above. A step past Ep looks at the
    last end: if that is not above, neither is any other.
    """
    count = lanes.word(0)
    for bit in reversed(range((Ep - 1).bit_length())):
        after = lanes.plus(count, 1 << bit)
        last = lanes.minus(after, 1)
        if Ep & (Ep - 1):
            last = lanes.smaller(last, Ep - 1)
        (end,) = lanes.load(lanes.plus(ends, lanes.times(last, 4)))
        count = lanes.select(lanes.less(item, end), count, after)
    return count


def store_columns(plan: Plan, x_reg: jax.Array, out_gmem: Any, first_row: Any) -> None:
    """Stores x_reg [k8, rows] to columns first_row .. of out_gmem [k, R'], without those past
    R'."""
    if plan.interpreted:
        columns = pl.ds(first_row, plan.rows)

        @pl.when(first_row < plan.padded_rows)  # the last blocks may have no rows
        def _():
            out_gmem[:, columns] = x_reg[: plan.top_k]

        return

    @plgpu.inline_mgpu(arg_types=(plan.tall, plgpu.RefType(), lanes.SCALAR))
    def put(_, x, out, first):
        to = lanes.global_address(out)
        warp, lane = lanes.right(lanes.thread(), 5), lanes.bit_and(lanes.thread(), 31)
        j = lanes.bit_and(lane, 7)
        row = lanes.plus(lanes.times(lanes.right(lane, 3), 4), warp)
        column = lanes.plus(lanes.scalar(first), row)
        groups = plan.rows // 16
        for i, word in enumerate(lanes.elements(x)):
            entry = lanes.plus(j, 8 * (i // groups))
            at = lanes.plus(column, 16 * (i % groups))
            exists = lanes.less(entry, plan.top_k)
            where = lanes.bit_and(exists, lanes.less(at, plan.padded_rows))
            place = lanes.plus(lanes.times(entry, plan.padded_rows), at)
            lanes.store_global(to, lanes.times(place, 4), word, where)

    put(x_reg, out_gmem, first_row)


def clear_columns(plan: Plan, out_gmem: list[Any]) -> None:
    """Stores zeros to the columns of each of out_gmem [k, R'] that a single block has no rows
    for."""
    rows, columns = plan.rows, plan.padded_rows
    if plan.blocks > 1:
        return
    if plan.interpreted:
        for out_ref in out_gmem:
            zeros = jnp.zeros((plan.top_k, columns - rows), out_ref.dtype)
            out_ref[:, pl.ds(rows, columns - rows)] = zeros
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(out_gmem))
    def clear(_, *outs):
        thread = lanes.thread()
        exists = lanes.less(thread, columns - rows)
        starts = [lanes.global_address(out) for out in outs]

        def clear_line(j, _):
            place = lanes.plus(lanes.plus(lanes.times(j, columns), rows), thread)
            for start in starts:
                lanes.store_global(start, lanes.times(place, 4), 0, exists)
            return []

        lanes.loop(plan.top_k, clear_line, [])

    clear(*out_gmem)
