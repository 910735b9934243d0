"""Routing of any number of rows: top-k experts with their softmax weights, and the worklist.

One warpgroup holds the logits of 64 rows in the wgmma accumulator layout, in which four threads
share a row, so a row maximum takes a few shuffles. `mosaic_plan` routes and sorts up to 256 rows in
one cluster of blocks, which send each other their counts. More rows have more blocks than a cluster
has, so here the counts go from one kernel to the next one:

    kernel                a block of 64 rows computes
    moe_route_and_count   top-k and weights; for each expert a mask of every 16 rows, and the count
                          of all 64
    moe_place             rows of each expert in all blocks and in earlier ones; items and their
                          prefix sum; the slots of its rows, and the experts of some items

All numbers are those of `worklist.make_worklist`, as `mosaic_sort` explains.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch
from pallas_kernels.moe.mosaic_sort import (
    items_of,
    popcount,
    scan_items,
    store_count,
    store_experts,
)
from pallas_kernels.moe.paths import ROWS, WIDTH, Routing, padded_experts

_LAYOUT = plgpu.Layout.WGMMA
_LOWEST = float(jnp.finfo(jnp.float32).min)


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_LAYOUT)


def _broadcast(column: jax.Array) -> jax.Array:
    """[ROWS] -> [ROWS, WIDTH]."""
    return lax.broadcast_in_dim(column, (ROWS, WIDTH), (0,))


def sum_pairwise(terms: list) -> jax.Array:
    """Sum by halving, in the order of `reference.route`."""
    while len(terms) > 1:
        terms = terms + [None] * (len(terms) % 2)
        half = len(terms) // 2
        terms = [a if b is None else a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def _from_end() -> jax.Array:
    """[ROWS, WIDTH]: distance of each column from the end of its part; the maximum is the lowest
    id.

    All parts share this one iota, because the compiler keeps each iota in registers.
    """
    return WIDTH - _iota((ROWS, WIDTH), 1)


def _choose(parts: list, top_k: int, values_smem, ids_smem) -> list:
    """Top k of 64 rows: values_smem float32 and ids_smem int32 [k, ROWS]; ties go to the lower id.

    `parts` are the logits of `WIDTH` experts each, which limits register pressure. Returns them
    with -inf at chosen experts. The k rounds are a loop: unrolled, the kernel is limited by
    instruction fetch.
    """
    from_end = _from_end()
    after = [WIDTH * (len(parts) - 1 - i) for i in range(len(parts))]

    def choose(j, parts):
        best = _largest([jnp.max(part, axis=1) for part in parts])
        ties = [jnp.max(jnp.where(part == _broadcast(best), from_end, 0), axis=1) for part in parts]
        last = _largest([jnp.where(t > 0, t + n, 0) for t, n in zip(ties, after, strict=True)])
        values_smem[j] = best
        ids_smem[j] = WIDTH * len(parts) - last
        return [
            jnp.where(from_end == _broadcast(last - n), -jnp.inf, part)
            for part, n in zip(parts, after, strict=True)
        ]

    return lax.fori_loop(0, top_k, choose, parts)


def load_flat(row_ref: Any, Ep: int) -> jax.Array:
    """row_ref [Ep], in shared or device memory, Ep a multiple of 32, to registers: one
    element per thread, replicated in four warps below 128."""
    if Ep % 128:
        tiles = plgpu.Tiling(((32,), (1,)))
        layout = plgpu.Layout.TILED(tiles, (plgpu.Replicated(4),), (-2,), -1)
    else:
        layout = plgpu.Layout.WG_STRIDED((Ep,), 1)
    return plgpu.load(row_ref, layout=layout, optimized=False)


def _load_column(rows_smem, j) -> jax.Array:
    """rows_smem[j] of a shared array [k, ROWS]: one element per row, in registers."""
    return plgpu.load(rows_smem.at[j], layout=_LAYOUT.reduce(1), optimized=False)


def _experts(part: int) -> jax.Array:
    """Expert ids of a part, int32 [ROWS, WIDTH]."""
    return _iota((ROWS, WIDTH), 1) + part * WIDTH


def _largest(terms: list) -> jax.Array:
    largest = terms[0]
    for term in terms[1:]:
        largest = jnp.maximum(largest, term)
    return largest


@functools.partial(jax.jit, static_argnames=("top_k", "normalize", "launch"))
def route(
    logits: jax.Array,  # [R, E] float32
    bias: jax.Array | None,  # [E]
    top_k: int,
    normalize: bool,
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """Routes any number of rows.

    Returns:
      weights float32 and ids int32, both [k, R'], R' the next multiple of 64; and of which `place`
      makes the worklist, with Ep for E padded to 64: masks int32 [R' / 64, 4, Ep], bit r of
      [b, i, e] is set if row 64 b + 16 i + r < R chose expert e; counts int32 [R' / 64, Ep], set
      bits of a block's masks.
    """
    num_rows, E = logits.shape
    logits = pad_for_copy(logits)
    blocks, Ep = pl.cdiv(logits.shape[0], ROWS), padded_experts(E)

    def body(
        logits_gmem,  # [R, E] float32, padded for TMA
        *refs,  # bias [padded E], if any; weights, ids, masks and counts
        logits_smem,  # [ROWS, padded E] float32
        values_smem,  # [k, ROWS] float32
        ids_smem,  # [k, ROWS] int32
        loaded_barrier,
        hits_smem,  # [ROWS, padded E] int32
    ):
        *bias_gmem, weights_gmem, ids_gmem, masks_gmem, counts_gmem = refs
        block = lax.axis_index("block")
        rows = pl.ds(block * ROWS, ROWS)
        parts = _load(E, logits_gmem, bias_gmem, logits_smem, loaded_barrier, block)
        total = None if normalize else sum_of_exps(parts)
        parts = _choose(parts, top_k, values_smem, ids_smem)
        _store_weights(total, top_k, values_smem, weights_gmem, rows)
        for j in range(top_k):
            ids_gmem[j, rows] = _load_column(ids_smem, j)
        _store_hits(parts, num_rows - block * ROWS, E, hits_smem)
        _store_masks(hits_smem, block, masks_gmem, counts_gmem)

    shape = (top_k, blocks * ROWS)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct((blocks, 4, Ep), jnp.int32),
            jax.ShapeDtypeStruct((blocks, Ep), jnp.int32),
        ),
        scratch_types=dict(
            logits_smem=plgpu.SMEM((ROWS, Ep), jnp.float32),
            values_smem=plgpu.SMEM((top_k, ROWS), jnp.float32),
            ids_smem=plgpu.SMEM((top_k, ROWS), jnp.int32),
            loaded_barrier=plgpu.Barrier(),
            hits_smem=plgpu.SMEM((ROWS, Ep), jnp.int32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name="moe_route_and_count",
    )(logits, *padded_bias(bias))


def _store_hits(parts: list, num_rows: Any, E: int, hits_smem: Any) -> None:
    """Stores 1 to hits_smem [ROWS, padded E] where `_choose` has left -inf, in the first num_rows
    rows; else 0."""
    is_row = _iota((ROWS, WIDTH), 0) < num_rows
    for i, part in enumerate(parts):
        hit = (part == -jnp.inf) & is_row
        if (i + 1) * WIDTH > E:
            hit = hit & (_experts(i) < E)
        hits_smem[:, pl.ds(i * WIDTH, WIDTH)] = jnp.where(hit, 1, 0)


def _store_masks(hits_smem: Any, block: Any, masks_gmem: Any, counts_gmem: Any) -> None:
    """Stores masks and counts of a block, as `route` returns them; a thread handles one expert."""
    Ep = hits_smem.shape[1]

    def add_row(row, carry):
        *masks, count = carry
        hits = [load_flat(hits_smem.at[16 * i + row], Ep) for i in range(4)]
        masks = [mask + (hit << row) for mask, hit in zip(masks, hits, strict=True)]
        return *masks, functools.reduce(jnp.add, hits, count)

    none = load_flat(hits_smem.at[0], Ep) & 0
    *masks, count = lax.fori_loop(0, 16, add_row, (none,) * 5)
    for i, mask in enumerate(masks):
        masks_gmem[block, i] = mask
    counts_gmem[block] = count


def padded_bias(bias: jax.Array | None) -> list[jax.Array]:
    """The bias as a list of zero or one operands."""
    return [] if bias is None else [jnp.pad(bias, (0, padded_experts(bias.size) - bias.size))]


def pad_for_copy(logits: jax.Array) -> jax.Array:
    """Pads for Mosaic's copies by TMA: rows to tiles of 8 above 8 rows, to blocks of `ROWS` above
    128; columns to tiles of 32."""
    R, E = logits.shape
    unit = ROWS if R > 2 * ROWS else 8 if R > 8 else 1
    return jnp.pad(logits, ((0, -R % unit), (0, -E % 32)))


def _staged(R: int, E: int) -> bool:
    """Whether logits are loaded through shared memory; otherwise straight to registers."""
    return bool(R % ROWS or E % WIDTH)


def _load(E: int, logits_gmem, bias_gmem, logits_smem, loaded_barrier, block) -> list:
    """The logits of 64 rows in registers, a list of [ROWS, WIDTH]; -inf past E."""
    R, columns = logits_gmem.shape
    source_ref = logits_gmem.at[pl.ds(block * ROWS, ROWS), pl.ds(0, padded_experts(E))]
    if _staged(R, columns):  # out-of-range rows and experts are filled with zeros
        plgpu.copy_gmem_to_smem(
            source_ref, logits_smem, loaded_barrier, oob_mode=plgpu.OOBFillMode.ZEROS
        )
        plgpu.barrier_wait(loaded_barrier)
        source_ref = logits_smem
    return load_parts(source_ref, bias_gmem, E)


def replace_not_finite(logits: jax.Array) -> jax.Array:
    """Replaces -inf by the lowest finite number and NaN by +inf.

    -inf marks experts that are chosen already or do not exist. NaN compares unequal to everything:
    the row would get ids past the last expert and slots of other rows. With +inf its ids are valid,
    and its weights are NaN because +inf - +inf is NaN.
    """
    return jnp.where(logits == logits, jnp.maximum(logits, _LOWEST), jnp.inf)


def load_parts(source_ref, bias_gmem: list, E: int) -> list:
    """Logits plus bias of 64 rows of `source_ref` in registers, a list of [ROWS, WIDTH]; -inf past
    E."""
    parts = []
    for start in range(0, E, WIDTH):
        columns = pl.ds(start, WIDTH)
        part = plgpu.load(source_ref.at[:, columns], layout=_LAYOUT, optimized=False)
        if bias_gmem:
            row = plgpu.load(bias_gmem[0].at[columns], layout=_LAYOUT.reduce(0), optimized=False)
            part = part + lax.broadcast_in_dim(row.astype(jnp.float32), (ROWS, WIDTH), (1,))
        part = replace_not_finite(part)
        if start + WIDTH > E:
            part = jnp.where(_experts(start // WIDTH) < E, part, -jnp.inf)
        parts.append(part)
    return parts


def sum_of_exps(parts: list) -> jax.Array:
    """Softmax denominator [ROWS] over all experts, relative to the row maximum."""
    best = _largest([jnp.max(part, axis=1) for part in parts])
    return sum_pairwise([jnp.sum(jnp.exp(part - _broadcast(best)), axis=1) for part in parts])


def _store_weights(total: jax.Array | None, top_k: int, values_smem, weights_gmem, rows) -> None:
    """Softmax weights of the chosen experts; denominator `total`, or their own sum if None."""
    values = [_load_column(values_smem, j) for j in range(top_k)]
    exps = [jnp.exp(value - values[0]) for value in values]
    total = sum_pairwise(exps) if total is None else total
    for j in range(top_k):
        weights_gmem[j, rows] = exps[j] / total


def route_and_place(
    logits: jax.Array,  # [R, E] float32
    bias: jax.Array | None,  # [E]
    routing: Routing,
) -> tuple[jax.Array, ...]:
    """Routes the rows and builds the worklist, as `worklist.make_worklist`, not `shared`.

    Returns:
      weights float32 [k, R'], slots int32 [k, R'], experts int32 [items'], num_items int32 [64]
      (all equal); R' and items' are the next multiples of 64. Entries past R are unspecified.
    """
    weights, ids, masks, counts = route(
        logits, bias, routing.top_k, routing.normalize, routing.launch
    )
    return weights, *place(ids, masks, counts, logits.shape[1], routing)


@functools.partial(jax.jit, static_argnames=("E", "routing"))
def place(
    ids: jax.Array,  # int32 [k, R']
    masks: jax.Array,  # int32 [R' / 64, 4, Ep]
    counts: jax.Array,  # int32 [R' / 64, Ep]
    E: int,
    routing: Routing,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The worklist of what `route` has counted: slots, experts and num_items of
    `route_and_place`."""
    top_k, padded_rows = ids.shape
    blocks, Ep = counts.shape
    tokens, interpreted = routing.tokens, routing.launch.interpret is not None

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

        places = [_slots(masks_gmem.at[g], base_smem, i) for i in range(Ep // WIDTH)]
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, WIDTH), 1, layout=_LAYOUT)
        rows = pl.ds(g * ROWS, ROWS)

        def store_slots(j, _):
            ids = plgpu.load(ids_gmem.at[j, rows], layout=_LAYOUT.reduce(1), optimized=False)
            ids = lax.broadcast_in_dim(ids, (ROWS, WIDTH), (0,))
            slots_of_experts = [
                jnp.sum(jnp.where(column == ids - i * WIDTH, place, 0), axis=1)
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
            jax.ShapeDtypeStruct((pl.cdiv(routing.items, ROWS) * ROWS,), jnp.int32),
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
        interpret=routing.launch.interpret,
        kernel_name="moe_place",
    )(ids, masks, counts)


def _slots(masks_gmem, base_smem, part: int) -> jax.Array:
    """[ROWS, WIDTH] int32: the slot that a row has with an expert of this part, if it chose it.

    It is the group's first slot plus the number of earlier rows of the group that chose the expert.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, WIDTH), 0, layout=_LAYOUT)
    columns = pl.ds(part * WIDTH, WIDTH)

    def of_groups(lines_ref):
        lines = [
            plgpu.load(lines_ref.at[i, columns], layout=_LAYOUT.reduce(0), optimized=False)
            for i in range(4)
        ]
        lines = [lax.broadcast_in_dim(line, (ROWS, WIDTH), (1,)) for line in lines]
        chosen = lines[3]
        for i in (2, 1, 0):
            chosen = jnp.where(row < 16 * (i + 1), lines[i], chosen)
        return chosen

    return of_groups(base_smem) + popcount(of_groups(masks_gmem) & ((1 << (row & 15)) - 1))
