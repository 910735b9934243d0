"""Routing of a small batch in one kernel: top-k experts, softmax weights, and the worklist.

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

A block holds 16 or 32 rows, so that a small batch uses all threads. More than 16 rows are one cluster of 4 or
8 blocks. Each block counts its own rows, and the blocks exchange the counts through L2. All arithmetic
on masks is done 16 rows at a time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch
from pallas_kernels.moe import mosaic_route
from pallas_kernels.moe.mosaic_route import ROWS, padded_experts, sum_pairwise


class _Rows(NamedTuple):
    """Register layouts of one warpgroup that holds 16 or 32 rows: 8 or 4 threads share a row.

    The wgmma layout needs 64 rows, and would leave most threads idle in a small batch.
    """

    rows: int

    @property
    def wide(self):
        """Layout of [rows, n], n a multiple of 32: a thread holds groups of four columns of its row."""
        if self.rows == 16:
            tiles = (16, 32), (4, 16), (4, 8), (4, 4)
            lanes = -2, -7, -5, -3
        else:
            tiles = (32, 16), (8, 8), (8, 4)
            lanes = -2, -5, -3
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-2 * len(tiles),), lanes, -1)

    @property
    def tall(self):
        """Layout of [8 n, rows]: a row is a column here, held by the threads that hold it in `wide`."""
        if self.rows == 16:
            tiles = (8, 16), (4, 4), (2, 4), (1,)
            return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-6,), (-2, -3, -5, -7), -1)
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 32), (2, 8), (1,))), (-4,), (-2, -3, -5), -1)

    def iota(self, columns: int, axis: int) -> jax.Array:
        shape = self.rows, columns
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.wide)

    def tall_iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.tall)

    def broadcast(self, column: jax.Array, columns: int) -> jax.Array:
        """[rows] -> [rows, columns]."""
        return lax.broadcast_in_dim(column, (self.rows, columns), (0,))

    def load_row(self, ref) -> jax.Array:
        """ref [columns] -> [rows, columns], the same in each row."""
        row = plgpu.load(ref, layout=self.wide.reduce(0), optimized=False)
        return lax.broadcast_in_dim(row, (self.rows, *ref.shape), (1,))


_QUARTER = _Rows(32)
"""Layout of [32, n] arrays of per-expert numbers, 32 experts or items at a time."""


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block; Ep is E padded to 32, k8 is k padded to 8."""

    logits_smem: Any  # float32 [rows, Ep], or [64, padded E] if not normalize; [1, Ep] if unused
    total_smem: Any  # float32 [64], softmax denominators
    hits_smem: Any  # int32 [rows, Ep], 1 << (row % 16) where the row chose the expert
    counts_smem: Any  # int32 [blocks, Ep], rows per expert of each block
    tiles_smem: Any  # int32 [Ep], items per expert
    ends_smem: Any  # int32 [Ep], inclusive prefix sum of the items
    packed_smem: Any  # int32 [2, Ep], first slot << 16 | mask, for each 16 rows
    ids_smem: Any  # int32 [k8, rows], chosen experts
    powers_smem: Any  # float32 [k8, rows], exp(logit - maximum)
    weights_smem: Any  # float32 [k8, columns], output tile
    slots_smem: Any  # int32 [k8, columns], output tile
    loaded_barrier: Any  # a TMA load has arrived
    cluster_barrier: Any  # all blocks have stored their counts


class _Plan(NamedTuple):
    """Static facts of one call."""

    R: int
    E: int
    top_k: int
    normalize: bool
    tokens: int
    shared: bool

    @property
    def block(self) -> _Rows:
        return _Rows(16 if self.R <= 128 else 32)

    @property
    def blocks(self) -> int:
        """Blocks of the grid; at most 8, the portable cluster size."""
        return 1 if self.R <= 16 else 4 if self.R <= 64 else 8

    @property
    def padded_rows(self) -> int:
        """Rows of the outputs."""
        return pl.cdiv(self.R, ROWS) * ROWS

    @property
    def columns(self) -> int:
        """Output rows that one block stores."""
        return self.padded_rows if self.blocks == 1 else self.block.rows

    @property
    def Ep(self) -> int:
        return pl.cdiv(self.E, 32) * 32

    @property
    def k8(self) -> int:
        return pl.cdiv(self.top_k, 8) * 8

    @property
    def load_shape(self) -> tuple[int, int]:
        """Logits that a block loads. Without `normalize` the denominator is summed in `route`'s layout of 64
        rows, so that both kernels give the same bits."""
        return (self.block.rows, self.Ep) if self.normalize else (ROWS, padded_experts(self.E))

    @property
    def flat(self):
        """Layout of [Ep]: one element per thread, replicated in four warps below 128 experts."""
        if self.Ep % 128:
            tiles = plgpu.Tiling(((32,), (1,)))
            return plgpu.Layout.TILED(tiles, (plgpu.Replicated(4),), (-2,), -1)
        return plgpu.Layout.WG_STRIDED((self.Ep,), 1)

    def load_flat(self, ref) -> jax.Array:
        return plgpu.load(ref, layout=self.flat, optimized=False)


def _popcount(mask: jax.Array) -> jax.Array:
    """Number of set bits among the lowest 16; the upper bits are 0."""
    mask = mask - ((mask >> 1) & 0x5555)
    mask = (mask & 0x3333) + ((mask >> 2) & 0x3333)
    mask = (mask + (mask >> 4)) & 0x0F0F
    return (mask + (mask >> 8)) & 0x1F


def _load_logits(plan: _Plan, source, bias_gmem: list) -> jax.Array:
    """The logits plus bias of a block's rows, float32 [rows, Ep] in registers; -inf past E."""
    block, E = plan.block, plan.E
    columns = pl.ds(0, plan.Ep)
    part = source.at[pl.ds(0, block.rows), columns]
    x = plgpu.load(part, layout=block.wide, optimized=False)
    if bias_gmem:
        x = x + block.load_row(bias_gmem[0].at[columns]).astype(jnp.float32)
    x = mosaic_route.replace_not_finite(x)
    return x if x.shape[1] == E else jnp.where(block.iota(x.shape[1], 1) < E, x, -jnp.inf)


def _choose(plan: _Plan, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Top k of x [rows, Ep]: x with -inf at chosen experts, values and ids [k8, rows] in registers.

    Nothing is stored to shared memory in the loop, because each store costs two barriers.
    """
    block, padded = plan.block, padded_experts(plan.E)
    shape = plan.k8, block.rows
    columns = x.shape[1]
    from_end = padded - block.iota(columns, 1)
    j = block.tall_iota(shape, 0)
    spread = lambda column: lax.broadcast_in_dim(column, shape, (1,))

    def choose(i, carry):
        x, values, ids = carry
        best = jnp.max(x, axis=1)
        ties = jnp.where(x == block.broadcast(best, columns), from_end, 0)
        last = jnp.max(ties, axis=1)
        values = jnp.where(j == i, spread(best), values)
        ids = jnp.where(j == i, spread(padded - last), ids)
        return jnp.where(from_end == block.broadcast(last, columns), -jnp.inf, x), values, ids

    initial = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    return lax.fori_loop(0, plan.top_k, choose, (x, *initial))


def _softmax(plan: _Plan, values: jax.Array, total_smem, powers_smem) -> jax.Array:
    """Weights [k8, rows] of the chosen values; denominator total_smem, or their own sum if None."""
    block = plan.block
    spread = lambda column: lax.broadcast_in_dim(column, values.shape, (1,))
    load = lambda ref: plgpu.load(ref, layout=block.tall.reduce(0), optimized=False)
    powers = jnp.exp(values - spread(jnp.max(values, axis=0)))
    if total_smem is None:  # summed in the order of the reference
        powers_smem[...] = powers
        total = sum_pairwise([load(powers_smem.at[i]) for i in range(plan.top_k)])
    else:
        total = load(total_smem.at[pl.ds(0, block.rows)])
    # The barrier stops the interpreter's compiler from multiplying by the inverse instead.
    return powers / lax.optimization_barrier(spread(total))


def _store_hits(plan: _Plan, x: jax.Array, first_row, hits_smem) -> jax.Array:
    """Stores 1 << (row % 16) where x, after `_choose`, marks a chosen expert; returns the row iota."""
    block = plan.block
    row = block.iota(plan.Ep, 0)
    hit = (x == -jnp.inf) & (row + first_row < plan.R)
    if plan.Ep > plan.E:
        hit = hit & (block.iota(plan.Ep, 1) < plan.E)
    hits_smem[...] = jnp.where(hit, 1 << (row & 15), 0)
    return row


def _load_masks(plan: _Plan, hits_smem) -> list[jax.Array]:
    """The bit masks [Ep] of each 16 rows: the sum of their hits."""
    masks = []
    for start in range(0, min(plan.block.rows, plan.R), 16):
        lines = [plan.load_flat(hits_smem.at[start + i]) for i in range(min(16, plan.R))]
        masks.append(functools.reduce(jnp.add, lines))
    return masks


def _exchange_counts(plan: _Plan, count: jax.Array, g, counts_gmem, scratch: _Scratch) -> tuple:
    """Rows per expert of the whole cluster [Ep], and of the blocks before this one.

    The counts go by TMA through L2, then a cluster barrier, then each block reads all counts. The TMA
    store is complete before the block arrives at the barrier.
    """
    counts_smem = scratch.counts_smem
    counts_smem[0] = count
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


def _scan_items(plan: _Plan, tiles_smem, ends_smem, zero) -> jax.Array:
    """Inclusive prefix sum of tiles_smem to ends_smem; returns the total, int32 [32], all equal.

    32 experts at a time: a triangular mask and a row sum, plus the carry of the parts before.
    """
    upto = _QUARTER.iota(32, 1) <= _QUARTER.iota(32, 0)

    def add_part(i, carry):
        part = pl.ds(i * 32, 32)
        line = _QUARTER.load_row(tiles_smem.at[part])
        ends_smem[part] = jnp.sum(jnp.where(upto, line, 0), axis=1) + carry
        return jnp.sum(line, axis=1) + carry

    carry = plgpu.layout_cast(jnp.zeros((32,), jnp.int32), _QUARTER.wide.reduce(1))
    return lax.fori_loop(0, plan.Ep // 32 + zero, add_part, carry)


def _find_slots(
    plan: _Plan, masks: list, first: jax.Array, earlier, row, first_row, zero, scratch: _Scratch
) -> jax.Array:
    """Slots int32 [k8, rows] of the chosen experts.

    A slot and a mask are packed into one integer per expert, which a row looks up by a masked sum.

    Args:
      masks: [Ep] for each 16 rows.
      first: [Ep], the first slot of each expert.
      earlier: [Ep], rows of the expert in the blocks before.
      row: the row iota [rows, Ep].
    """
    block, Ep, padded = plan.block, plan.Ep, padded_experts(plan.E)
    packed_smem, ids_smem = scratch.packed_smem, scratch.ids_smem
    if plan.shared:
        packed_smem[0] = first
    else:
        base = first + earlier
        for i, mask in enumerate(masks):
            packed_smem[i] = (base << 16) | mask
            base = base + _popcount(mask)
    packed = block.load_row(packed_smem.at[0])
    if len(masks) == 2 and not plan.shared:
        packed = jnp.where(row < 16, packed, block.load_row(packed_smem.at[1]))
    from_end = padded - block.iota(Ep, 1)
    j = block.tall_iota(ids_smem.shape, 0)

    def look_up(i, found):
        column = plgpu.load(ids_smem.at[i], layout=block.wide.reduce(1), optimized=False)
        chosen = block.broadcast(padded - column, Ep)
        value = jnp.sum(jnp.where(from_end == chosen, packed, 0), axis=1)
        return jnp.where(j == i, lax.broadcast_in_dim(value, found.shape, (1,)), found)

    found = jnp.zeros(ids_smem.shape, jnp.int32)
    found = lax.fori_loop(0, plan.top_k + zero, look_up, found)
    row = block.tall_iota(ids_smem.shape, 1)
    if plan.shared:
        return found + (row + first_row)
    return (found >> 16) + _popcount(found & ((1 << (row & 15)) - 1))


def _store_experts(plan: _Plan, ends_smem, g, chunks: int, zero, experts_gmem) -> None:
    """Stores the expert of each item, 32 items at a time; the blocks take the chunks in turn."""
    ends = _QUARTER.load_row(ends_smem)

    def store_part(i, _):
        part = (i * plan.blocks + g) * 32
        done = jnp.sum(jnp.where(ends <= _QUARTER.iota(plan.Ep, 0) + part, 1, 0), axis=1)
        experts_gmem[pl.ds(part, 32)] = jnp.minimum(done, plan.E - 1)
        return 0

    lax.fori_loop(0, (chunks - g + plan.blocks - 1) // plan.blocks + zero, store_part, 0)


@functools.partial(
    jax.jit,
    static_argnames=("top_k", "normalize", "tokens", "shared", "items", "launch"),
)
def route_and_plan(
    logits: jax.Array,  # [R, E] float32, R <= MOST_ROWS
    bias: jax.Array | None,  # [E]
    *,
    top_k: int,
    normalize: bool,
    tokens: int,
    shared: bool,
    items: int,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Routes the rows and builds the worklist, as `worklist.make_worklist` with `tokens` and `shared`.

    Up to 16 rows are one block, more are one cluster. A cluster barrier is in shared memory, so unlike a
    semaphore it needs no zeroed device memory.

    Returns:
      weights float32 [k, R'], slots int32 [k, R'], experts int32 [items'], num_items int32 [64] (all
      equal); R' and items' are the next multiples of 64. Entries past R are unspecified.
    """
    plan = _Plan(*logits.shape, top_k, normalize, tokens, shared)
    assert plan.E * tokens + plan.R * top_k < 1 << 15, "slots have 15 bits"
    logits = mosaic_route.pad_for_copy(logits)
    block, blocks, columns = plan.block, plan.blocks, plan.columns
    rows, Ep = block.rows, plan.Ep
    staged = not normalize or logits.shape != (blocks * rows, Ep)
    chunks = pl.cdiv(items, ROWS) * 2

    def body(
        logits_gmem,  # [R, E] float32, rows padded for TMA
        *refs,  # bias [padded E], if any; the results; int32 [blocks, Ep] to exchange counts
        **scratch_refs,
    ):
        *bias_gmem, weights_gmem, slots_gmem, experts_gmem, num_items_gmem, counts_gmem = refs
        scratch = _Scratch(**scratch_refs)
        weights_smem, slots_smem = scratch.weights_smem, scratch.slots_smem
        g = lax.axis_index("block")
        first_row = g * rows
        load_rows, load_columns = plan.load_shape
        source = logits_gmem.at[pl.ds(first_row, load_rows), pl.ds(0, load_columns)]
        if staged:
            plgpu.copy_gmem_to_smem(
                source, scratch.logits_smem, scratch.loaded_barrier,
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )  # fmt: skip
        if columns > rows:  # the padding rows of the outputs are zeros
            zeros = lambda ref: plgpu.layout_cast(jnp.zeros(ref.shape, ref.dtype), block.tall)
            weights_smem[...] = zeros(weights_smem)
            slots_smem[...] = zeros(slots_smem)
        if staged:
            plgpu.barrier_wait(scratch.loaded_barrier)
            source = scratch.logits_smem
        if not normalize:
            parts = mosaic_route.load_parts(source, bias_gmem, plan.E)
            scratch.total_smem[...] = mosaic_route.sum_of_exps(parts)
        x, values, ids = _choose(plan, _load_logits(plan, source, bias_gmem))

        row = _store_hits(plan, x, first_row, scratch.hits_smem)
        scratch.ids_smem[...] = ids
        zero = scratch.ids_smem[0, 0] >> 30  # always 0, opaque to the compiler: prevents unrolling
        total_smem = scratch.total_smem if not normalize else None
        weights = _softmax(plan, values, total_smem, scratch.powers_smem)
        weights_smem[:, pl.ds(0, rows)] = weights
        plgpu.commit_smem()

        def store(tile_smem, target_gmem) -> None:
            target = target_gmem.at[:, pl.ds(first_row, columns)]
            copy = lambda: plgpu.copy_smem_to_gmem(tile_smem.at[pl.ds(0, top_k)], target)
            pl.when(first_row < plan.padded_rows)(copy)  # the last blocks may have no rows

        store(weights_smem, weights_gmem)

        masks = _load_masks(plan, scratch.hits_smem)
        count = functools.reduce(jnp.add, map(_popcount, masks))
        earlier = 0
        if blocks > 1:
            count, earlier = _exchange_counts(plan, count, g, counts_gmem, scratch)
        whole = (count + (tokens - 1)) >> (tokens.bit_length() - 1)
        tiles = jnp.minimum(count, 1) if shared else whole
        scratch.tiles_smem[...] = tiles
        num_items = _scan_items(plan, scratch.tiles_smem, scratch.ends_smem, zero)

        @pl.when(g == 0)
        def _():
            for start in range(0, ROWS, 32):
                num_items_gmem[pl.ds(start, 32)] = num_items

        first = (plan.load_flat(scratch.ends_smem) - tiles) * tokens
        slots = _find_slots(plan, masks, first, earlier, row, first_row, zero, scratch)
        slots_smem[:, pl.ds(0, rows)] = slots
        plgpu.commit_smem()
        store(slots_smem, slots_gmem)
        _store_experts(plan, scratch.ends_smem, g, chunks, zero, experts_gmem)
        plgpu.wait_smem_to_gmem(0)

    outputs = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((top_k, plan.padded_rows), jnp.float32),
            jax.ShapeDtypeStruct((top_k, plan.padded_rows), jnp.int32),
            jax.ShapeDtypeStruct((chunks * 32,), jnp.int32),
            jax.ShapeDtypeStruct((ROWS,), jnp.int32),
            jax.ShapeDtypeStruct((blocks, Ep), jnp.int32),
        ),
        scratch_types=_scratch_types(plan, staged),
        # No scratch: every reduction stays within a warp, which saves two barriers each.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        cluster=(blocks,),
        cluster_names=("block",),
        interpret=launch.interpret,
        kernel_name="moe_route_and_plan",
    )(logits, *mosaic_route.padded_bias(bias))
    return tuple(outputs[:4])


def _scratch_types(plan: _Plan, staged: bool) -> dict[str, Any]:
    """Scratch of a block, by the fields of `_Scratch`."""
    rows, Ep, k8 = plan.block.rows, plan.Ep, plan.k8
    return dict(
        logits_smem=plgpu.SMEM(plan.load_shape if staged else (1, Ep), jnp.float32),
        total_smem=plgpu.SMEM((ROWS,), jnp.float32),
        hits_smem=plgpu.SMEM((rows, Ep), jnp.int32),
        counts_smem=plgpu.SMEM((plan.blocks, Ep), jnp.int32),
        tiles_smem=plgpu.SMEM((Ep,), jnp.int32),
        ends_smem=plgpu.SMEM((Ep,), jnp.int32),
        packed_smem=plgpu.SMEM((2, Ep), jnp.int32),
        ids_smem=plgpu.SMEM((k8, rows), jnp.int32),
        powers_smem=plgpu.SMEM((k8, rows), jnp.float32),
        weights_smem=plgpu.SMEM((k8, plan.columns), jnp.float32),
        slots_smem=plgpu.SMEM((k8, plan.columns), jnp.int32),
        loaded_barrier=plgpu.Barrier(),
        cluster_barrier=plgpu.ClusterBarrier(collective_axes=("block",)),
    )
