"""Hopper kernel of routing: softmax over the chosen experts, and the worklist for the grouped products.

A warpgroup holds the logits of 64 rows in registers, [64, E] in the accumulator's layout, where a maximum
over a row is a few exchanges between four threads. Positions in the worklist are prefix sums of zeros and
ones, which tensor cores take exactly: ranks of rows within an expert are a triangular matrix times the
choices, first items of experts are the number of items times another.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch

ROWS = 64
"""Rows of one warpgroup."""
MOST_ROWS = 256
"""Rows whose worklist one block makes."""

_LAYOUT = plgpu.Layout.WGMMA
_WIDTH = 64
"""Experts at a time, so that what 64 rows know of them fits into registers."""
_ALL, _BELOW, _NONE = range(3)
"""Rows that a rank counts: all of them, those before the row, none."""


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_LAYOUT)


def _wide(column: jax.Array, E: int) -> jax.Array:
    """[ROWS] -> [ROWS, E]."""
    return lax.broadcast_in_dim(column, (ROWS, E), (0,))


def _halves(terms: list) -> jax.Array:
    """Their sum by halves, as `reference.route` takes it."""
    while len(terms) > 1:
        terms = terms + [None] * (len(terms) % 2)
        half = len(terms) // 2
        terms = [a if b is None else a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def _choose(parts: list, top_k: int) -> tuple[list, list]:
    """The largest logits of 64 rows and their ids, each a list of [ROWS]; ties to the lower id.

    `parts` are the logits of `_WIDTH` experts after the other: smaller arrays need fewer registers.
    """
    width = parts[0].shape[1]
    E = width * len(parts)
    values, ids = [], []
    for _ in range(top_k):
        best = _largest([jnp.max(part, axis=1) for part in parts])
        # The lowest id is the largest of E - id.
        ties = [
            jnp.max(jnp.where(part == _wide(best, width), E - _experts(i, width), 0), axis=1)
            for i, part in enumerate(parts)
        ]
        chosen = E - _largest(ties)
        parts = [
            jnp.where(_experts(i, width) == _wide(chosen, width), -jnp.inf, part)
            for i, part in enumerate(parts)
        ]
        values.append(best)
        ids.append(chosen)
    return values, ids


def _experts(part: int, width: int) -> jax.Array:
    """Ids of the experts of a part [ROWS, width]."""
    return _iota((ROWS, width), 1) + part * width


def _largest(terms: list) -> jax.Array:
    largest = terms[0]
    for term in terms[1:]:
        largest = jnp.maximum(largest, term)
    return largest


def _product(pairs: list, columns: int) -> jax.Array:
    """Sum of left [ROWS, n] times right [n, columns], whole numbers in shared memory: exact float32."""

    def multiply(acc):
        for left, right in pairs:
            plgpu.wgmma(acc, left, right)
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))


def _operand(*shape: int):
    """Shared memory for a bfloat16 matrix that tensor cores read."""
    width = min(64, shape[-1])
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def _any(expert: jax.Array, ids: list) -> jax.Array:
    """Where expert [ROWS, n] is one of its row's ids."""
    hit = expert == _wide(ids[0], expert.shape[1])
    for other in ids[1:]:
        hit = hit | (expert == _wide(other, expert.shape[1]))
    return hit


def _fill_triangles(sums_s, before_s, E: int, width: int) -> None:
    """sums_s [3, ROWS, ROWS]: ones, ones below the diagonal, zeros. before_s [E, E]: ones above it."""
    row, column = _iota((ROWS, ROWS), 0), _iota((ROWS, ROWS), 1)
    for which, mask in ((_ALL, row >= 0), (_BELOW, column < row), (_NONE, row < 0)):
        sums_s[which] = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
    for start in range(0, E, ROWS):  # with fewer than 64 experts rows past them stay unread
        for left in range(0, E, width):
            part = _iota((ROWS, width), 0) + start < _iota((ROWS, width), 1) + left
            before_s[pl.ds(start, ROWS), pl.ds(left, width)] = jnp.where(part, 1.0, 0.0).astype(
                jnp.bfloat16
            )


@functools.partial(jax.jit, static_argnames=("top_k", "normalize", "launch"))
def route(
    logits: jax.Array,  # [R, E] float32
    bias: jax.Array | None,  # [E]
    top_k: int,
    normalize: bool,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """weights float32 and ids int32, both [k, R'] with R' the next multiple of 64; any number of rows."""
    R, E = logits.shape
    blocks = pl.cdiv(R, ROWS)

    def body(*refs, logits_s, loaded):
        logits, *bias, weights, ids = refs
        block = lax.axis_index("block")
        rows = pl.ds(block * ROWS, ROWS)
        values, chosen, total = _softmax(
            logits, bias, logits_s, loaded, block, top_k=top_k, normalize=normalize
        )
        for j in range(top_k):
            weights[j, rows] = values[j] / total
            ids[j, rows] = chosen[j]

    shape = (top_k, blocks * ROWS)
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        scratch_types=dict(
            logits_s=plgpu.SMEM((ROWS, E), jnp.float32),
            loaded=plgpu.Barrier(),
        ),
        grid=(blocks,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name="moe_route",
    )(logits, *([] if bias is None else [bias]))


def _staged(R: int, E: int) -> bool:
    """Whether logits go through shared memory rather than straight to registers."""
    return bool(R % ROWS) or E < _WIDTH


def _softmax(logits, bias, logits_s, loaded, block, *, top_k: int, normalize: bool):
    """Powers and ids of the chosen experts of 64 rows, and what the powers are divided by."""
    R, E = logits.shape
    width = min(E, _WIDTH)
    rows = pl.ds(block * ROWS, ROWS)
    source = logits.at[rows]
    if _staged(R, E):  # through shared memory, where rows that do not exist become zeros
        plgpu.copy_gmem_to_smem(source, logits_s, loaded, oob_mode=plgpu.OOBFillMode.ZEROS)
        plgpu.barrier_wait(loaded)
        source = logits_s
    parts = []
    for start in range(0, E, width):
        part = plgpu.load(source.at[:, pl.ds(start, width)], layout=_LAYOUT, optimized=False)
        if bias:
            row = bias[0].at[pl.ds(start, width)]
            row = plgpu.load(row, layout=_LAYOUT.reduce(0), optimized=False).astype(jnp.float32)
            part = part + lax.broadcast_in_dim(row, (ROWS, width), (1,))
        parts.append(part)
    values, ids = _choose(parts, top_k)
    powers = [jnp.exp(value - values[0]) for value in values]
    if normalize:
        return powers, ids, _halves(powers)
    sums = [jnp.sum(jnp.exp(part - _wide(values[0], width)), axis=1) for part in parts]
    return powers, ids, _halves(sums)


@functools.partial(jax.jit, static_argnames=("top_k", "normalize", "tokens", "shared", "items", "launch"))
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
    """One block routes and plans, as `worklist.make_worklist` with `tokens` and `shared`.

    Returns:
      weights float32 [k, R'], slots int32 [k, R'], experts int32 [items'], num_items int32 [64] (all
      alike); R' and items' are the next multiples of 64.
    """
    R, E = logits.shape
    groups = pl.cdiv(R, ROWS)
    item_tiles = pl.cdiv(items, ROWS)

    width = min(E, _WIDTH)
    parts = [pl.ds(start, width) for start in range(0, E, width)]

    def body(*refs, logits_s, hits_s, tiles_s, sums_s, before_s, loaded, stored):
        logits, *bias, weights, slots, experts, num_items = refs
        g = lax.axis_index("group")
        rows = pl.ds(g * ROWS, ROWS)
        own_logits_s = logits_s.at[g if _staged(R, E) else 0]
        values, ids, total = _softmax(
            logits, bias, own_logits_s, loaded.at[g], g, top_k=top_k, normalize=normalize
        )
        for j in range(top_k):
            weights[j, rows] = values[j] / total
        real = _iota((ROWS, width), 0) + g * ROWS < R
        for part in parts:
            hit = _any(_iota((ROWS, width), 1) + part.start, ids)
            hits_s[g, :, part] = jnp.where(hit & real, 1.0, 0.0).astype(jnp.bfloat16)
        pl.when(g == 0)(lambda: _fill_triangles(sums_s, before_s, E, width))
        plgpu.commit_smem()
        plgpu.barrier_arrive(stored)
        plgpu.barrier_wait(stored)

        for part in parts:
            all_rows = [(sums_s.at[_ALL], hits_s.at[other, :, part]) for other in range(groups)]
            count = _product(all_rows, width)
            if shared:
                tiles = jnp.minimum(count, 1.0)
            else:
                whole = count.astype(jnp.int32) + (tokens - 1)
                tiles = lax.div(whole, jnp.full_like(whole, tokens)).astype(jnp.float32)
            tiles_s[g, :, part] = tiles.astype(jnp.bfloat16)
        plgpu.commit_smem()

        found = [jnp.zeros_like(i) for i in ids]
        done = [jnp.zeros_like(ids[0]) for _ in range(item_tiles)]
        for part in parts:
            first = _product([(tiles_s.at[g], before_s.at[pl.ds(0, E), part])], width)
            ends = (first + plgpu.load(tiles_s.at[g, :, part], layout=_LAYOUT)).astype(jnp.int32)
            for tile in range(item_tiles):
                over = ends <= _iota((ROWS, width), 0) + tile * ROWS
                done[tile] = done[tile] + jnp.sum(jnp.where(over, 1, 0), axis=1)
            if shared:
                rank = _iota((ROWS, width), 0).astype(jnp.float32)
            else:
                which = lambda other: jnp.where(
                    other < g, _ALL, jnp.where(other == g, _BELOW, _NONE)
                )
                earlier = [
                    (sums_s.at[which(other)], hits_s.at[other, :, part]) for other in range(groups)
                ]
                rank = _product(earlier, width)
            place = (first * tokens + rank).astype(jnp.int32)
            expert = _iota((ROWS, width), 1) + part.start
            for j in range(top_k):
                here = jnp.where(expert == _wide(ids[j], width), place, 0)
                found[j] = found[j] + jnp.sum(here, axis=1)
        for j in range(top_k):
            slots[j, rows] = found[j]

        @pl.when(g == 0)
        def _():
            for tile in range(item_tiles):
                experts[pl.ds(tile * ROWS, ROWS)] = jnp.minimum(done[tile], E - 1)
            num_items[...] = jnp.max(ends, axis=1)

    padded = (top_k, groups * ROWS)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(padded, jnp.float32),
            jax.ShapeDtypeStruct(padded, jnp.int32),
            jax.ShapeDtypeStruct((item_tiles * ROWS,), jnp.int32),
            jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        ),
        scratch_types=dict(
            logits_s=plgpu.SMEM((groups if _staged(R, E) else 1, ROWS, E), jnp.float32),
            hits_s=_operand(groups, ROWS, E),
            tiles_s=_operand(groups, ROWS, E),
            sums_s=_operand(3, ROWS, ROWS),
            before_s=_operand(max(E, ROWS), E),
            loaded=plgpu.Barrier(num_barriers=groups),
            stored=plgpu.Barrier(num_arrivals=groups),
        ),
        grid=(1,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="group",
        interpret=launch.interpret,
        kernel_name="moe_route_and_plan",
    )(logits, *([] if bias is None else [bias]))


@functools.partial(jax.jit, static_argnames=("size", "launch"))
def spread(x: jax.Array, slots: jax.Array, size: int, launch: Launch) -> jax.Array:
    """Copies row r of x [R, D] to rows `slots[:, r]` of a buffer [size, D]; its other rows are undefined."""
    R, D = x.shape
    width = 64
    top_k = slots.shape[0]

    def body(x, slots, out, row_s, loaded):
        r = lax.axis_index("row")
        plgpu.copy_gmem_to_smem(x.at[r], row_s, loaded)
        places = [slots[j, r] for j in range(top_k)]
        plgpu.barrier_wait(loaded)
        for place in places:
            plgpu.copy_smem_to_gmem(row_s, out.at[place])
        plgpu.wait_smem_to_gmem(0)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size, D // width, width), x.dtype),
        scratch_types=(plgpu.SMEM((D // width, width), x.dtype), plgpu.Barrier()),
        grid=(R,),
        grid_names=("row",),
        interpret=launch.interpret,
        kernel_name="moe_spread",
    )(x.reshape(R, D // width, width), slots)
    return out.reshape(size, D)
