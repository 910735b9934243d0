"""Kernels of routing: softmax over the chosen experts, and the worklist for the grouped products.

`route` alone holds the logits of 64 rows a warpgroup, in the accumulator's layout of tensor cores, where a
maximum over a row is a few exchanges between four threads. `route_and_plan` has 16 or 32 rows a warpgroup,
so that a small batch occupies all threads and a large one several SMs, which together count the rows of each
expert. An expert's rows within a block are bits of a number: a row's rank is how many bits are below its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch

ROWS = 64
"""Of one warpgroup in `route`; results have multiples of it."""
MOST_ROWS, MOST_EXPERTS = 256, 128
"""Of a call that `route_and_plan` takes."""

_LAYOUT = plgpu.Layout.WGMMA
_WIDTH = 64
"""Experts at a time, so that what 64 rows know of them fits into registers."""
_LOWEST = float(jnp.finfo(jnp.float32).min)


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
    return _parts(source, bias, E)


def _ordered(logits: jax.Array) -> jax.Array:
    """Logits without NaN and -inf.

    -inf marks experts that were chosen or do not exist. NaN becomes +inf, because no comparison finds NaN:
    the row would have ids past the last expert, and slots that belong to other rows. Its weights are NaN
    all the same, for +inf - +inf is.
    """
    return jnp.where(logits == logits, jnp.maximum(logits, _LOWEST), jnp.inf)


def _parts(source, bias, E: int) -> list:
    parts = []
    for start in range(0, E, _WIDTH):
        columns = pl.ds(start, _WIDTH)
        part = plgpu.load(source.at[:, columns], layout=_LAYOUT, optimized=False)
        if bias:
            row = plgpu.load(bias[0].at[columns], layout=_LAYOUT.reduce(0), optimized=False)
            part = part + lax.broadcast_in_dim(row.astype(jnp.float32), (ROWS, _WIDTH), (1,))
        part = _ordered(part)
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


class _Rows(NamedTuple):
    """How a warpgroup holds 16 or 32 rows: 8 or 4 threads have one.

    Tensor cores would want 64, of which a small batch has few, and those in one warp.
    """

    rows: int

    @property
    def wide(self):
        """[rows, n], n a multiple of 32: a thread has each time four columns of its row."""
        if self.rows == 16:
            tiles = (16, 32), (4, 16), (4, 8), (4, 4)
            lanes = -2, -7, -5, -3
        else:
            tiles = (32, 16), (8, 8), (8, 4)
            lanes = -2, -5, -3
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-2 * len(tiles),), lanes, -1)

    @property
    def tall(self):
        """[8 n, rows]: what is known of a row, in the threads that have it in `wide`."""
        if self.rows == 16:
            tiles = (8, 16), (4, 4), (2, 4), (1,)
            return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-6,), (-2, -3, -5, -7), -1)
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 32), (2, 8), (1,))), (-4,), (-2, -3, -5), -1)

    def iota(self, columns: int, axis: int) -> jax.Array:
        shape = self.rows, columns
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.wide)

    def widen(self, column: jax.Array, columns: int) -> jax.Array:
        """[rows] -> [rows, columns]."""
        return lax.broadcast_in_dim(column, (self.rows, columns), (0,))

    def load_row(self, ref) -> jax.Array:
        """[columns] in memory -> [rows, columns]."""
        row = plgpu.load(ref, layout=self.wide.reduce(0), optimized=False)
        return lax.broadcast_in_dim(row, (self.rows, *ref.shape), (1,))


def _flat(E: int):
    """Layout of [E]: a thread has one of 128, or of 32 if there are fewer."""
    if E % 128:
        tiles = plgpu.Tiling(((32,), (1,)))
        return plgpu.Layout.TILED(tiles, (plgpu.Replicated(4),), (-2,), -1)
    return plgpu.Layout.WG_STRIDED((E,), 1)


def _ones(mask: jax.Array) -> jax.Array:
    """How many of the lowest 16 bits are set; the others are not."""
    mask = mask - ((mask >> 1) & 0x5555)
    mask = (mask & 0x3333) + ((mask >> 2) & 0x3333)
    mask = (mask + (mask >> 4)) & 0x0F0F
    return (mask + (mask >> 8)) & 0x1F


def _choose_ranked(x: jax.Array, block: _Rows, top_k: int, padded: int) -> tuple:
    """As `_choose`, of [rows, n]: x less the chosen, and values and ids, both [8 m, rows], m >= k / 8.

    Nothing is stored meanwhile, for threads wait for each other before and after each store.
    """
    shape = _tall(top_k), block.rows
    columns = x.shape[1]
    from_end = padded - block.iota(columns, 1)
    j = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=block.tall)
    spread = lambda column: lax.broadcast_in_dim(column, shape, (1,))

    def choose(i, carry):
        x, values, ids = carry
        best = jnp.max(x, axis=1)
        ties = jnp.where(x == block.widen(best, columns), from_end, 0)
        last = jnp.max(ties, axis=1)
        values = jnp.where(j == i, spread(best), values)
        ids = jnp.where(j == i, spread(padded - last), ids)
        return jnp.where(from_end == block.widen(last, columns), -jnp.inf, x), values, ids

    none = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    return lax.fori_loop(0, top_k, choose, (x, *none))


def _load_rows(source, bias: list, block: _Rows, E: int) -> jax.Array:
    """The logits of a block's rows, -inf past the experts that exist."""
    columns = pl.ds(0, pl.cdiv(E, 32) * 32)
    part = source.at[pl.ds(0, block.rows), columns]
    x = plgpu.load(part, layout=block.wide, optimized=False)
    if bias:
        x = x + block.load_row(bias[0].at[columns]).astype(jnp.float32)
    x = _ordered(x)
    return x if x.shape[1] == E else jnp.where(block.iota(x.shape[1], 1) < E, x, -jnp.inf)


def _softmax(values: jax.Array, total_s, top_k: int, block: _Rows, powers_s) -> jax.Array:
    """As `_store_weights`, of values [8 m, rows]; `total_s` is in shared memory, or None."""
    spread = lambda column: lax.broadcast_in_dim(column, values.shape, (1,))
    read = lambda ref: plgpu.load(ref, layout=block.tall.reduce(0), optimized=False)
    powers = jnp.exp(values - spread(jnp.max(values, axis=0)))
    if total_s is None:  # added in the order of the definition
        powers_s[...] = powers
        total = _halves([read(powers_s.at[i]) for i in range(top_k)])
    else:
        total = read(total_s.at[pl.ds(0, block.rows)])
    # Behind a barrier, or the interpreter's compiler would multiply by the inverse.
    return powers / lax.optimization_barrier(spread(total))


def _exchange(count: jax.Array, counts_s, own, counts, told, loaded, read) -> list:
    """[E] of every block of the cluster, from `count` of this one.

    Copy engines write and read: what one has written is in the memory that all SMs share when the
    block hears that it is done, and only then it tells the others.
    """
    counts_s[0] = count
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(counts_s.at[0], own)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(told)
    plgpu.barrier_wait(told)
    plgpu.copy_gmem_to_smem(counts, counts_s, loaded)
    plgpu.barrier_wait(loaded)
    return [read(counts_s.at[i]) for i in range(counts.shape[0])]


def _tall(top_k: int) -> int:
    return pl.cdiv(top_k, 8) * 8


def _blocks(R: int) -> tuple[_Rows, int]:
    """Rows of a block of `route_and_plan`, and blocks: at most 8, for they are one cluster."""
    if R <= 16:
        return _Rows(16), 1
    if R <= 128:
        return _Rows(16), 4 if R <= 64 else 8
    return _Rows(32), 8


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
    """Routes and plans, as `worklist.make_worklist` with `tokens` and `shared`.

    One block does it for up to 16 rows. More rows are a cluster of blocks, which tell each other how
    many of their rows each expert has; all of them then know where every expert begins. A cluster's
    barrier, unlike a semaphore, is in shared memory: nothing has to be zero before or after.

    Returns:
      weights float32 [k, R'], slots int32 [k, R'], experts int32 [items'], num_items int32 [64] (all
      alike); R' and items' are the next multiples of 64. What lies past R means nothing.
    """
    R, E = logits.shape
    logits = _copyable(logits)
    own, blocks = _blocks(R)
    rows, outs = own.rows, pl.cdiv(R, ROWS) * ROWS
    columns = outs if blocks == 1 else rows  # of weights and slots that a block writes
    Ep = pl.cdiv(E, 32) * 32
    flat, quarter = _flat(Ep), _Rows(32)
    assert E * tokens + R * top_k < 1 << 15, "places have 15 bits"
    # All of 64 rows' experts where they are added up: as `route` does, for the same bits.
    loaded_shape = (rows, Ep) if normalize else (ROWS, _padded(E))
    staged = not normalize or logits.shape != (blocks * rows, Ep)
    chunks = pl.cdiv(items, ROWS) * 2

    def body(
        *refs,
        logits_s,
        total_s,
        hits_s,
        counts_s,
        tiles_s,
        ends_s,
        places_s,
        ids_s,
        powers_s,
        weights_s,
        slots_s,
        loaded,
        told,
    ):
        logits, *bias, weights, slots, experts, num_items, counts = refs
        g = lax.axis_index("block")
        first_row = g * rows
        source = logits.at[pl.ds(first_row, loaded_shape[0]), pl.ds(0, loaded_shape[1])]
        if staged:
            plgpu.copy_gmem_to_smem(source, logits_s, loaded, oob_mode=plgpu.OOBFillMode.ZEROS)
        if columns > rows:  # past the rows are zeros
            weights_s[...] = plgpu.layout_cast(jnp.zeros(weights_s.shape, jnp.float32), own.tall)
            slots_s[...] = plgpu.layout_cast(jnp.zeros(slots_s.shape, jnp.int32), own.tall)
        if staged:
            plgpu.barrier_wait(loaded)
            source = logits_s
        if not normalize:
            total_s[...] = _sum_of_powers(_parts(source, bias, E))
        x = _load_rows(source, bias, own, E)
        x, values, ids = _choose_ranked(x, own, top_k, _padded(E))

        # Rows of an expert are bits of a number, 16 rows each.
        row = own.iota(Ep, 0)
        hit = (x == -jnp.inf) & (row + first_row < R)
        if Ep > E:
            hit = hit & (own.iota(Ep, 1) < E)
        hits_s[...] = jnp.where(hit, 1 << (row & 15), 0)
        ids_s[...] = ids
        more = ids_s[0, 0] >> 30  # turns of loops: none, but those who know it unroll them
        total = total_s if not normalize else None
        weights_s[:, pl.ds(0, rows)] = _softmax(values, total, top_k, own, powers_s)
        plgpu.commit_smem()
        out = pl.ds(first_row, columns)
        of_k = pl.ds(0, top_k)

        def store(source, target) -> None:
            copy = lambda: plgpu.copy_smem_to_gmem(source.at[of_k], target.at[:, out])
            pl.when(first_row < outs)(copy)  # a block may have no rows at all

        store(weights_s, weights)

        read = lambda ref: plgpu.load(ref, layout=flat, optimized=False)
        masks = []
        for start in range(0, min(rows, R), 16):
            lines = [read(hits_s.at[start + i]) for i in range(min(16, R))]
            masks.append(functools.reduce(jnp.add, lines))
        count = functools.reduce(jnp.add, map(_ones, masks))
        earlier = 0  # rows of each expert in blocks before
        if blocks > 1:
            every = _exchange(count, counts_s, counts.at[g], counts, told, loaded, read)
            count = functools.reduce(jnp.add, every)
            earlier = [one * (i < g).astype(jnp.int32) for i, one in enumerate(every)]
            earlier = functools.reduce(jnp.add, earlier)
        whole = (count + (tokens - 1)) >> (tokens.bit_length() - 1)
        tiles = jnp.minimum(count, 1) if shared else whole
        tiles_s[...] = tiles

        # Where experts end: 32 at a time, before which are the items of those so far.
        upto = quarter.iota(32, 1) <= quarter.iota(32, 0)

        def add_part(i, so_far):
            part = pl.ds(i * 32, 32)
            line = quarter.load_row(tiles_s.at[part])
            ends_s[part] = jnp.sum(jnp.where(upto, line, 0), axis=1) + so_far
            return jnp.sum(line, axis=1) + so_far

        so_far = plgpu.layout_cast(jnp.zeros((32,), jnp.int32), quarter.wide.reduce(1))
        so_far = lax.fori_loop(0, Ep // 32 + more, add_part, so_far)

        @pl.when(g == 0)
        def _():
            for start in range(0, ROWS, 32):
                num_items[pl.ds(start, 32)] = so_far

        first = (read(ends_s) - tiles) * tokens
        if shared:
            places_s[0] = first
        else:
            base = first + earlier
            for i, mask in enumerate(masks):
                places_s[i] = (base << 16) | mask
                base = base + _ones(mask)
        place = own.load_row(places_s.at[0])
        if len(masks) == 2 and not shared:
            place = jnp.where(row < 16, place, own.load_row(places_s.at[1]))
        from_end = _padded(E) - own.iota(Ep, 1)
        j = plgpu.broadcasted_iota(jnp.int32, ids.shape, 0, layout=own.tall)

        def find(i, found):
            column = plgpu.load(ids_s.at[i], layout=own.wide.reduce(1), optimized=False)
            chosen = own.widen(_padded(E) - column, Ep)
            one = jnp.sum(jnp.where(from_end == chosen, place, 0), axis=1)
            return jnp.where(j == i, lax.broadcast_in_dim(one, found.shape, (1,)), found)

        found = jnp.zeros(ids.shape, jnp.int32)
        found = lax.fori_loop(0, top_k + more, find, found)
        row = plgpu.broadcasted_iota(jnp.int32, ids.shape, 1, layout=own.tall)
        if shared:
            found = found + (row + first_row)
        else:
            found = (found >> 16) + _ones(found & ((1 << (row & 15)) - 1))
        slots_s[:, pl.ds(0, rows)] = found
        plgpu.commit_smem()
        store(slots_s, slots)

        ends = quarter.load_row(ends_s)

        def store_experts(i, _):
            part = (i * blocks + g) * 32
            done = jnp.sum(jnp.where(ends <= quarter.iota(Ep, 0) + part, 1, 0), axis=1)
            experts[pl.ds(part, 32)] = jnp.minimum(done, E - 1)
            return 0

        # Blocks take turns.
        lax.fori_loop(0, (chunks - g + blocks - 1) // blocks + more, store_experts, 0)
        plgpu.wait_smem_to_gmem(0)

    per_row = (top_k, outs)
    tall = _tall(top_k)
    made = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(per_row, jnp.float32),
            jax.ShapeDtypeStruct(per_row, jnp.int32),
            jax.ShapeDtypeStruct((chunks * 32,), jnp.int32),
            jax.ShapeDtypeStruct((ROWS,), jnp.int32),
            jax.ShapeDtypeStruct((blocks, Ep), jnp.int32),
        ),
        scratch_types=dict(
            logits_s=plgpu.SMEM(loaded_shape if staged else (1, Ep), jnp.float32),
            total_s=plgpu.SMEM((ROWS,), jnp.float32),
            hits_s=plgpu.SMEM((rows, Ep), jnp.int32),
            counts_s=plgpu.SMEM((blocks, Ep), jnp.int32),
            tiles_s=plgpu.SMEM((Ep,), jnp.int32),
            ends_s=plgpu.SMEM((Ep,), jnp.int32),
            places_s=plgpu.SMEM((2, Ep), jnp.int32),
            ids_s=plgpu.SMEM((tall, rows), jnp.int32),
            powers_s=plgpu.SMEM((tall, rows), jnp.float32),
            weights_s=plgpu.SMEM((tall, columns), jnp.float32),
            slots_s=plgpu.SMEM((tall, columns), jnp.int32),
            loaded=plgpu.Barrier(),
            told=plgpu.ClusterBarrier(collective_axes=("block",)),
        ),
        # No reduction leaves its warp, which would cost two barriers.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        cluster=(blocks,),
        cluster_names=("block",),
        interpret=launch.interpret,
        kernel_name="moe_route_and_plan",
    )(logits, *_bias(bias))
    return tuple(made[:4])


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
