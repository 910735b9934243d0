"""Kernels of routing: softmax over the chosen experts, and the worklist for the grouped products.

A warpgroup holds the logits of 64 rows in registers, [64, E] in the accumulator's layout, where a maximum
over a row is a few exchanges between four threads. Positions in the worklist are prefix sums of zeros and
ones, which tensor cores take exactly: ranks of rows within an expert are a triangular matrix times the
choices, first items of experts are the number of items times another.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch

ROWS = 64
"""Rows of one warpgroup."""
MOST_ROWS, MOST_EXPERTS = 256, 128
"""Of a call whose worklist one block makes."""

_LAYOUT = plgpu.Layout.WGMMA
_WIDTH = 64
"""Experts at a time, so that what 64 rows know of them fits into registers."""
_LOWEST = float(jnp.finfo(jnp.float32).min)
_SWIZZLE = {90: 128, 100: 64}
"""Bytes, of operands of `_product`."""
Core = tuple[Any, Any] | None
"""An accumulator in tensor memory and its barrier; None for Hopper."""
_ALL, _BELOW, _ABOVE, _NONE = range(4)
"""Matrices [ROWS, ROWS] of ones: everywhere, below the diagonal, above it, nowhere."""


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_LAYOUT)


def _wide(column: jax.Array) -> jax.Array:
    """[ROWS] -> [ROWS, _WIDTH]."""
    return lax.broadcast_in_dim(column, (ROWS, _WIDTH), (0,))


def _halves(terms: list) -> jax.Array:
    """Their sum by halves, as `reference.route` takes it."""
    while len(terms) > 1:
        terms = terms + [None] * (len(terms) % 2)
        half = len(terms) // 2
        terms = [a if b is None else a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def _from_end() -> jax.Array:
    """[ROWS, _WIDTH]: how far a part's experts are from its end, and the largest is the lowest id.

    The only numbers of columns, the same for all parts: compilers keep each kind in registers.
    """
    return _WIDTH - _iota((ROWS, _WIDTH), 1)


def _choose(parts: list, top_k: int, values_s, ids_s) -> list:
    """Stores the largest logits of 64 rows and their ids, each [k, ROWS]; ties to the lower id.

    `parts` are the logits of `_WIDTH` experts after the other: smaller arrays need fewer registers. They
    come back with -inf where an expert was chosen. The rounds are a loop, for code that runs once is
    fetched more slowly than it runs.
    """
    from_end = _from_end()
    after = [_WIDTH * (len(parts) - 1 - i) for i in range(len(parts))]

    def choose(j, parts):
        best = _largest([jnp.max(part, axis=1) for part in parts])
        ties = [jnp.max(jnp.where(part == _wide(best), from_end, 0), axis=1) for part in parts]
        last = _largest([jnp.where(t > 0, t + n, 0) for t, n in zip(ties, after, strict=True)])
        values_s[j] = best
        ids_s[j] = _WIDTH * len(parts) - last
        return [
            jnp.where(from_end == _wide(last - n), -jnp.inf, part)
            for part, n in zip(parts, after, strict=True)
        ]

    return lax.fori_loop(0, top_k, choose, parts)


def _column(ref, j) -> jax.Array:
    """Row j of a shared array [k, ROWS] as a number for each of 64 rows."""
    return plgpu.load(ref.at[j], layout=_LAYOUT.reduce(1), optimized=False)


def _experts(part: int) -> jax.Array:
    """Ids of the experts of a part [ROWS, _WIDTH]."""
    return _iota((ROWS, _WIDTH), 1) + part * _WIDTH


def _largest(terms: list) -> jax.Array:
    largest = terms[0]
    for term in terms[1:]:
        largest = jnp.maximum(largest, term)
    return largest


def _product(left, right, core: Core, terms: int = 1) -> jax.Array:
    """Sum of left(i) [ROWS, n] times right(i) [n, _WIDTH] over `terms` i: exact, they are whole numbers.

    Both are in shared memory. The terms are a loop, or addresses of all of them would fill registers.
    """

    def each_term(multiply) -> None:
        lax.fori_loop(0, terms, multiply, None) if terms > 1 else multiply(0, None)

    if core is not None:
        acc, done = core
        each_term(
            lambda i, _: plgpu.tcgen05_mma(acc, left(i), right(i), accumulate=jnp.int32(i) > 0)
        )
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        return _last_product(core)

    def multiply(acc):
        def add(i, _):
            plgpu.wgmma(acc, left(i), right(i))
            plgpu.wgmma_wait(0)

        each_term(add)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, _WIDTH), jnp.float32))


def _last_product(core: Core) -> jax.Array:
    """Of a warpgroup on Blackwell, from tensor memory."""
    found = plgpu.async_load_tmem(core[0], layout=_LAYOUT)
    plgpu.wait_load_tmem()
    return found


def _cores(device: Device, groups: int) -> dict:
    """What `_product` needs beside registers: on Blackwell tensor memory and barriers, one a warpgroup."""
    if device.sm == 90:
        return {}
    return dict(
        accs=plgpu.TMEM((groups, ROWS, _WIDTH), jnp.float32),
        done=plgpu.Barrier(num_barriers=groups, orders_tensor_core=True),
    )


def _operand(device: Device, *shape: int):
    """Shared memory for a bfloat16 matrix that tensor cores read."""
    # Blackwell's product of 64 rows takes half of the columns at a time.
    width = _SWIZZLE[device.sm]
    transforms = plgpu.TilingTransform((8, width // 2)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


@functools.partial(jax.jit, static_argnames=("top_k", "normalize", "launch"))
def route(
    logits: jax.Array,  # [R, E] float32
    bias: jax.Array | None,  # [E]
    top_k: int,
    normalize: bool,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """weights float32 and ids int32, both [k, R'] with R' the next multiple of 64; any number of rows."""
    logits = _copyable(logits)
    R, E = logits.shape
    blocks = pl.cdiv(R, ROWS)

    def body(*refs, logits_s, values_s, ids_s, loaded):
        logits, *bias, weights, ids = refs
        block = lax.axis_index("block")
        rows = pl.ds(block * ROWS, ROWS)
        parts = _load(logits, bias, logits_s, loaded, block)
        total = None if normalize else _sum_of_powers(parts)
        _choose(parts, top_k, values_s, ids_s)
        _store_weights(total, top_k, values_s, weights, rows)
        for j in range(top_k):
            ids[j, rows] = _column(ids_s, j)

    shape = (top_k, blocks * ROWS)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        scratch_types=dict(
            logits_s=plgpu.SMEM((ROWS, _padded(E)), jnp.float32),
            values_s=plgpu.SMEM((top_k, ROWS), jnp.float32),
            ids_s=plgpu.SMEM((top_k, ROWS), jnp.int32),
            loaded=plgpu.Barrier(),
        ),
        grid=(blocks,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name="moe_route",
    )(logits, *_bias(bias))


def _padded(E: int) -> int:
    """Experts as registers hold them; those past E have a logit of -inf."""
    return pl.cdiv(E, _WIDTH) * _WIDTH


def _bias(bias: jax.Array | None) -> list[jax.Array]:
    return [] if bias is None else [jnp.pad(bias, (0, _padded(bias.size) - bias.size))]


def _copyable(logits: jax.Array) -> jax.Array:
    """With rows below that mean nothing: of an 8 x n tile copies take all or, if it is the only one,
    some rows, and more than 128 rows would not fit into shared memory."""
    R = logits.shape[0]
    unit = ROWS if R > 2 * ROWS else 8 if R > 8 else 1
    return jnp.pad(logits, ((0, -R % unit), (0, 0)))


def _staged(R: int, E: int) -> bool:
    """Whether logits go through shared memory rather than straight to registers."""
    return bool(R % ROWS or E % _WIDTH)


def _load(logits, bias, logits_s, loaded, block) -> list:
    """The logits of 64 rows, `_WIDTH` experts after the other."""
    R, E = logits.shape
    source = logits.at[pl.ds(block * ROWS, ROWS), pl.ds(0, _padded(E))]
    if _staged(R, E):  # rows and experts that do not exist become zeros
        plgpu.copy_gmem_to_smem(source, logits_s, loaded, oob_mode=plgpu.OOBFillMode.ZEROS)
        plgpu.barrier_wait(loaded)
        source = logits_s
    parts = []
    for start in range(0, E, _WIDTH):
        columns = pl.ds(start, _WIDTH)
        part = plgpu.load(source.at[:, columns], layout=_LAYOUT, optimized=False)
        if bias:
            row = plgpu.load(bias[0].at[columns], layout=_LAYOUT.reduce(0), optimized=False)
            part = part + lax.broadcast_in_dim(row.astype(jnp.float32), (ROWS, _WIDTH), (1,))
        part = jnp.maximum(part, _LOWEST)  # -inf is for experts that were chosen or do not exist
        if start + _WIDTH > E:
            part = jnp.where(_experts(start // _WIDTH) < E, part, -jnp.inf)
        parts.append(part)
    return parts


def _sum_of_powers(parts: list) -> jax.Array:
    """[ROWS], over all experts."""
    best = _largest([jnp.max(part, axis=1) for part in parts])
    return _halves([jnp.sum(jnp.exp(part - _wide(best)), axis=1) for part in parts])


def _store_weights(total: jax.Array | None, top_k: int, values_s, weights, rows) -> None:
    """Softmax over the chosen experts, or over those that add up to `total`."""
    values = [_column(values_s, j) for j in range(top_k)]
    powers = [jnp.exp(value - values[0]) for value in values]
    total = _halves(powers) if total is None else total
    for j in range(top_k):
        weights[j, rows] = powers[j] / total


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
    """One block routes and plans, as `worklist.make_worklist` with `tokens` and `shared`.

    Returns:
      weights float32 [k, R'], slots int32 [k, R'], experts int32 [items'], num_items int32 [64] (all
      alike); R' and items' are the next multiples of 64.
    """
    R, E = logits.shape
    logits = _copyable(logits)
    staged = _staged(*logits.shape)
    groups = pl.cdiv(R, ROWS)
    item_tiles = pl.cdiv(items, ROWS)
    parts = _padded(E) // _WIDTH

    def each_part(visit) -> None:
        """In a loop: one part after the other needs the registers of one."""
        if parts == 1:
            visit(0)
        else:
            lax.fori_loop(0, parts, lambda part, _: visit(part), None)

    def body(
        *refs,
        logits_s,
        values_s,
        ids_s,
        hits_s,
        tiles_s,
        sums_s,
        found_s,
        done_s,
        loaded,
        constant,
        stored,
        accs=None,
        done=None,
    ):
        logits, sums, *bias, weights, slots, experts, num_items = refs
        g = lax.axis_index("group")
        core = None if accs is None else (accs.at[g], done.at[g])
        rows = pl.ds(g * ROWS, ROWS)

        pl.when(g == 0)(lambda: plgpu.copy_gmem_to_smem(sums, sums_s, constant))
        own_logits_s = logits_s.at[g if staged else 0]
        values = _load(logits, bias, own_logits_s, loaded.at[g], g)
        # Before logits are taken away: to keep both would take more registers than there are.
        total = None if normalize else _sum_of_powers(values)
        left = _choose(values, top_k, values_s.at[g], ids_s.at[g])
        real = _iota((ROWS, _WIDTH), 0) + g * ROWS < R
        for i, part in enumerate(left):
            hit = (part == -jnp.inf) & real
            if (i + 1) * _WIDTH > E:
                hit = hit & (_experts(i) < E)
            hits_s[g, i] = jnp.where(hit, 1.0, 0.0).astype(jnp.bfloat16)
        _store_weights(total, top_k, values_s.at[g], weights, rows)
        plgpu.commit_smem()
        plgpu.barrier_arrive(stored)
        plgpu.barrier_wait(stored)
        plgpu.barrier_wait(constant)

        @each_part
        def _(part):
            count = _product(lambda _: sums_s.at[_ALL], lambda i: hits_s.at[i, part], core, groups)
            if shared:
                tiles = jnp.minimum(count, 1.0)
            else:
                whole = count.astype(jnp.int32) + (tokens - 1)
                tiles = (whole >> tokens.bit_length() - 1).astype(jnp.float32)
            tiles_s[g, part] = tiles.astype(jnp.bfloat16)

        plgpu.commit_smem()

        @each_part
        def _(part):
            before = lambda i: jnp.where(i < part, _ALL, jnp.where(i == part, _ABOVE, _NONE))
            first = _product(
                lambda i: tiles_s.at[g, i], lambda i: sums_s.at[before(i)], core, parts
            )
            later = jnp.minimum(part, 1)  # whether there were parts before

            @pl.when(g == 0)
            def _():
                ends = (first + plgpu.load(tiles_s.at[g, part], layout=_LAYOUT)).astype(jnp.int32)
                num_items[...] = jnp.max(ends, axis=1)

                def store_experts(tile, _):
                    item = _iota((ROWS, _WIDTH), 0) + tile * ROWS
                    done = jnp.sum(jnp.where(ends <= item, 1, 0), axis=1)
                    if parts > 1:
                        done = done + _column(done_s, tile) * later
                        done_s[tile] = done
                    experts[pl.ds(tile * ROWS, ROWS)] = jnp.minimum(done, E - 1)
                    return 0

                lax.fori_loop(0, item_tiles, store_experts, 0)

            if core is not None:  # rather than to keep it in registers, which are few
                first = _last_product(core)
            if shared:
                rank = _iota((ROWS, _WIDTH), 0)
            else:
                above = lambda i: jnp.where(i < g, _ALL, jnp.where(i == g, _BELOW, _NONE))
                rank = _product(
                    lambda i: sums_s.at[above(i)], lambda i: hits_s.at[i, part], core, groups
                ).astype(jnp.int32)
            place = first.astype(jnp.int32) * tokens + rank

            def store_slots(j, _):
                chosen = _wide((part + 1) * _WIDTH - _column(ids_s.at[g], j))
                found = jnp.sum(jnp.where(_from_end() == chosen, place, 0), axis=1)
                if parts > 1:
                    found = found + _column(found_s.at[g], j) * later
                    found_s[g, j] = found
                slots[j, rows] = found
                return 0

            lax.fori_loop(0, top_k, store_slots, 0)

    per_row = (top_k, groups * ROWS)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(per_row, jnp.float32),
            jax.ShapeDtypeStruct(per_row, jnp.int32),
            jax.ShapeDtypeStruct((item_tiles * ROWS,), jnp.int32),
            jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        ),
        scratch_types=dict(
            logits_s=plgpu.SMEM((groups, ROWS, _padded(E)) if staged else (1, 1, E), jnp.float32),
            values_s=plgpu.SMEM((groups, top_k, ROWS), jnp.float32),
            ids_s=plgpu.SMEM((groups, top_k, ROWS), jnp.int32),
            hits_s=_operand(launch.device, groups, parts, ROWS, _WIDTH),
            tiles_s=_operand(launch.device, groups, parts, ROWS, _WIDTH),
            sums_s=_operand(launch.device, 4, ROWS, ROWS),
            found_s=plgpu.SMEM((groups, top_k, ROWS), jnp.int32),
            done_s=plgpu.SMEM((item_tiles, ROWS), jnp.int32),
            loaded=plgpu.Barrier(num_barriers=groups),
            constant=plgpu.Barrier(),
            stored=plgpu.Barrier(num_arrivals=groups),
            **_cores(launch.device, groups),
        ),
        # Reductions stay within a warp: warpgroups would share the scratch memory of others.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        grid=(1,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="group",
        interpret=launch.interpret,
        kernel_name="moe_route_and_plan",
    )(logits, _triangles(), *_bias(bias))


def _triangles() -> np.ndarray:
    """[4, ROWS, ROWS], see `_ALL`."""
    ones = np.ones((ROWS, ROWS))
    return np.stack([ones, np.tril(ones, -1), np.triu(ones, 1), 0 * ones]).astype(jnp.bfloat16)


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
