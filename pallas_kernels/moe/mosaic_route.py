"""Routing kernels: top-k experts with their softmax weights (`route`), and the copy to slots
(`spread`).

One warpgroup of `route` holds the logits of 64 rows in the wgmma accumulator layout, in which four
threads share a row, so a row maximum takes a few shuffles. Small batches use
`mosaic_plan.route_and_plan`, which also builds the worklist.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch

ROWS = 64
"""Rows of one block of `route`; the results are padded to a multiple."""

_LAYOUT = plgpu.Layout.WGMMA
_WIDTH = 64
"""Experts of one register array [ROWS, _WIDTH]."""
_LOWEST = float(jnp.finfo(jnp.float32).min)


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_LAYOUT)


def _broadcast(column: jax.Array) -> jax.Array:
    """[ROWS] -> [ROWS, _WIDTH]."""
    return lax.broadcast_in_dim(column, (ROWS, _WIDTH), (0,))


def sum_pairwise(terms: list) -> jax.Array:
    """Sum by halving, in the order of `reference.route`."""
    while len(terms) > 1:
        terms = terms + [None] * (len(terms) % 2)
        half = len(terms) // 2
        terms = [a if b is None else a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def _from_end() -> jax.Array:
    """[ROWS, _WIDTH]: distance of each column from the end of its part; the maximum is the lowest
    id.

    All parts share this one iota, because the compiler keeps each iota in registers.
    """
    return _WIDTH - _iota((ROWS, _WIDTH), 1)


def _choose(parts: list, top_k: int, values_smem, ids_smem) -> list:
    """Top k of 64 rows: values_smem float32 and ids_smem int32 [k, ROWS]; ties go to the lower id.

    `parts` are the logits of `_WIDTH` experts each, which limits register pressure. Returns them
    with -inf at chosen experts. The k rounds are a loop: unrolled, the kernel is limited by
    instruction fetch.
    """
    from_end = _from_end()
    after = [_WIDTH * (len(parts) - 1 - i) for i in range(len(parts))]

    def choose(j, parts):
        best = _largest([jnp.max(part, axis=1) for part in parts])
        ties = [jnp.max(jnp.where(part == _broadcast(best), from_end, 0), axis=1) for part in parts]
        last = _largest([jnp.where(t > 0, t + n, 0) for t, n in zip(ties, after, strict=True)])
        values_smem[j] = best
        ids_smem[j] = _WIDTH * len(parts) - last
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
    """Expert ids of a part, int32 [ROWS, _WIDTH]."""
    return _iota((ROWS, _WIDTH), 1) + part * _WIDTH


def _largest(terms: list) -> jax.Array:
    largest = terms[0]
    for term in terms[1:]:
        largest = jnp.maximum(largest, term)
    return largest


@functools.partial(jax.jit, static_argnames=("top_k", "normalize", "launch", "counted"))
def route(
    logits: jax.Array,  # [R, E] float32
    bias: jax.Array | None,  # [E]
    top_k: int,
    normalize: bool,
    launch: Launch,
    counted: bool = False,
) -> tuple[jax.Array, ...]:
    """Top-k weights float32 and ids int32, both [k, R'] with R' the next multiple of 64; any R.

    Args:
      counted: two results more, of which `mosaic_place` makes the worklist. Ep is E padded to 64.
        masks int32 [R' / 64, 4, Ep]: bit r of [b, i, e] is set if row 64 b + 16 i + r < R chose
        expert e. counts int32 [R' / 64, Ep]: set bits of a block's masks.
    """
    num_rows, E = logits.shape
    logits = pad_for_copy(logits)
    blocks, Ep = pl.cdiv(logits.shape[0], ROWS), padded_experts(E)

    def body(
        logits_gmem,  # [R, E] float32, padded for TMA
        # bias [padded E], if any; weights float32 and ids int32 [k, R']; masks and counts, if
        # counted
        *refs,
        logits_smem,  # [ROWS, padded E] float32
        values_smem,  # [k, ROWS] float32
        ids_smem,  # [k, ROWS] int32
        loaded_barrier,
        hits_smem=None,  # [ROWS, padded E] int32
    ):
        bias_gmem, (weights_gmem, ids_gmem, *hits_gmem) = (
            list(refs[:-num_outputs]),
            refs[-num_outputs:],
        )
        block = lax.axis_index("block")
        rows = pl.ds(block * ROWS, ROWS)
        parts = _load(E, logits_gmem, bias_gmem, logits_smem, loaded_barrier, block)
        total = None if normalize else sum_of_exps(parts)
        parts = _choose(parts, top_k, values_smem, ids_smem)
        _store_weights(total, top_k, values_smem, weights_gmem, rows)
        for j in range(top_k):
            ids_gmem[j, rows] = _load_column(ids_smem, j)
        if counted:
            _store_hits(parts, num_rows - block * ROWS, E, hits_smem)
            _store_masks(hits_smem, block, *hits_gmem)

    shape = (top_k, blocks * ROWS)
    outputs = [(shape, jnp.float32), (shape, jnp.int32)]
    if counted:
        outputs += [((blocks, 4, Ep), jnp.int32), ((blocks, Ep), jnp.int32)]
    num_outputs = len(outputs)
    return plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(*output) for output in outputs),
        scratch_types=dict(
            logits_smem=plgpu.SMEM((ROWS, Ep), jnp.float32),
            values_smem=plgpu.SMEM((top_k, ROWS), jnp.float32),
            ids_smem=plgpu.SMEM((top_k, ROWS), jnp.int32),
            loaded_barrier=plgpu.Barrier(),
            **(dict(hits_smem=plgpu.SMEM((ROWS, Ep), jnp.int32)) if counted else {}),
        ),
        grid=(blocks,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name="moe_route_and_count" if counted else "moe_route",
    )(logits, *padded_bias(bias))


def _store_hits(parts: list, num_rows: Any, E: int, hits_smem: Any) -> None:
    """Stores 1 to hits_smem [ROWS, padded E] where `_choose` has left -inf, in the first num_rows
    rows; else 0."""
    is_row = _iota((ROWS, _WIDTH), 0) < num_rows
    for i, part in enumerate(parts):
        hit = (part == -jnp.inf) & is_row
        if (i + 1) * _WIDTH > E:
            hit = hit & (_experts(i) < E)
        hits_smem[:, pl.ds(i * _WIDTH, _WIDTH)] = jnp.where(hit, 1, 0)


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


def padded_experts(E: int) -> int:
    """E rounded up to the register width; experts past E get a logit of -inf."""
    return pl.cdiv(E, _WIDTH) * _WIDTH


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
    return bool(R % ROWS or E % _WIDTH)


def _load(E: int, logits_gmem, bias_gmem, logits_smem, loaded_barrier, block) -> list:
    """The logits of 64 rows in registers, a list of [ROWS, _WIDTH]; -inf past E."""
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
    """Logits plus bias of 64 rows of `source_ref` in registers, a list of [ROWS, _WIDTH]; -inf past
    E."""
    parts = []
    for start in range(0, E, _WIDTH):
        columns = pl.ds(start, _WIDTH)
        part = plgpu.load(source_ref.at[:, columns], layout=_LAYOUT, optimized=False)
        if bias_gmem:
            row = plgpu.load(bias_gmem[0].at[columns], layout=_LAYOUT.reduce(0), optimized=False)
            part = part + lax.broadcast_in_dim(row.astype(jnp.float32), (ROWS, _WIDTH), (1,))
        part = replace_not_finite(part)
        if start + _WIDTH > E:
            part = jnp.where(_experts(start // _WIDTH) < E, part, -jnp.inf)
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
