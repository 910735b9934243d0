"""Stage 1 of `mosaic_plan`: the top-k experts of a block's rows and their softmax weights, in
registers.

A warp has whole rows, see `mosaic_layout`, so nothing here waits for another warp. A lane has Ep /
32 adjacent experts of each row. It sorts them once; then each round compares the first one of all
lanes, in one instruction, and the lane that has the largest takes it away:

    lane                        0          1          2          3
    logits of its experts       1 5 2      0 3 3      5 4 1      2 0 0
    sorted                      5 2 1      3 3 0      5 4 1      2 0 0
    round 0: 5 of lane 0        2 1 -      3 3 0      5 4 1      2 0 0    the lowest lane first
    round 1: 5 of lane 2        2 1 -      3 3 0      4 1 -      2 0 0

A logit is compared as an integer, its key, which has the same order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe import mosaic_lanes as lanes
from pallas_kernels.moe.mosaic_layout import Plan
from pallas_kernels.moe.mosaic_route import replace_not_finite, sum_pairwise


def load_logits(plan: Plan, source_ref: Any, bias_gmem: list[Any]) -> jax.Array:
    """The logits plus bias of a block's rows, float32 [loaded rows, Ep] in registers; -inf past E.

    source_ref is float32 [rows or more, Ep or more] in shared or device memory; bias_gmem has [Ep],
    if any.
    """
    shape = plan.loaded_rows, plan.Ep
    columns = pl.ds(0, plan.Ep)
    part_ref = source_ref.at[pl.ds(0, plan.loaded_rows), columns]
    x = plgpu.load(part_ref, layout=plan.wide, optimized=False)
    if bias_gmem:
        row_ref = bias_gmem[0].at[columns]
        row = plgpu.load(row_ref, layout=plan.wide.reduce(0), optimized=False)
        x = x + lax.broadcast_in_dim(row.astype(jnp.float32), shape, (1,))
    x = replace_not_finite(x)
    if plan.Ep == plan.E:
        return x
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plan.wide)
    return jnp.where(column < plan.E, x, -jnp.inf)


def choose(
    plan: Plan, logits_reg: jax.Array, keys_smem: Any, ids_smem: Any
) -> tuple[jax.Array, jax.Array]:
    """Top k of logits_reg, float32 [loaded rows, Ep]; ties go to the lower id, also those of -0.0
    and 0.0.

    Each row has at least k logits that are not -inf. keys_smem and ids_smem are int32 [k8 * rows],
    in which a warp passes what it chose from lane to lane.

    Returns, in registers of `plan.tall`: the chosen logits float32 [k8, rows] and their ids int32
    [k8, rows]. From k on they are -inf and 0; in rows that are not loaded, 0 and 0.
    """
    shape = plan.k8, plan.rows
    if plan.interpreted:
        values, ids = _choose_by_definition(plan, logits_reg)
        rest = (0, plan.k8 - plan.top_k), (0, plan.rows - plan.loaded_rows)
        values = jnp.pad(values, (rest[0], (0, 0)), constant_values=-jnp.inf)
        return jnp.pad(values, ((0, 0), rest[1])), jnp.pad(ids, rest)

    @plgpu.inline_mgpu(
        arg_types=(plan.wide, plgpu.RefType(), plgpu.RefType()),
        return_type=[
            plgpu.ShapeDtypeStruct(shape, dtype, layout=plan.tall)
            for dtype in (jnp.float32, jnp.int32)
        ],
    )
    def choose_(_, logits, keys, ids):
        found = _choose(plan, lanes.elements(logits), lanes.address(keys), lanes.address(ids))
        dtypes = jnp.float32, jnp.int32
        return [
            lanes.array(x, shape, dtype, plan.tall) for x, dtype in zip(found, dtypes, strict=True)
        ]

    values_reg, ids_reg = choose_(logits_reg, keys_smem, ids_smem)
    return values_reg, ids_reg


def _choose_by_definition(plan: Plan, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values and ids [k, rows] of the top k of x [rows, Ep].

    Without `lax.top_k`: the interpreter's warpgroups are computations that wait for each other, and
    it waits for a thread that they have.
    """
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    shape = plan.top_k, x.shape[0]
    j = lax.broadcasted_iota(jnp.int32, shape, 0)

    def choose(i, carry):
        x, values, ids = carry
        best = x.max(1)
        first = jnp.where(x == best[:, None], column, plan.Ep).min(1)
        values = jnp.where(j == i, best, values)
        ids = jnp.where(j == i, first, ids)
        return jnp.where(column == first[:, None], -jnp.inf, x), values, ids

    none = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
    return lax.fori_loop(0, plan.top_k, choose, (x, *none))[1:]


def _key(logit: Any) -> Any:
    """The bits of a float32 that is not NaN as a word of the same order; both zeros become 0.

    It is its own inverse, but for -0.0.
    """
    key = lanes.bit_xor(logit, lanes.bit_and(lanes.right(logit, 31), 2**31 - 1))
    return lanes.select(lanes.equal(logit, lanes.LOWEST), 0, key)


def _choose(plan: Plan, logits: list, keys_start: Any, ids_start: Any) -> tuple[list, list]:
    """What one thread does in `choose`.

    Args:
      logits: words of `logits_reg`, those of row 4 i + warp from Ep / 32 * i on.
      keys_start, ids_start: the addresses of keys_smem and ids_smem.
    """
    width = plan.Ep // 32
    lane = lanes.bit_and(lanes.thread(), 31)
    warp = lanes.right(lanes.thread(), 5)
    own = lanes.left(1, lane)
    upto = lanes.bit_or(lanes.minus(own, 1), own)  # this lane and those below
    keys = [_key(x) for x in logits]
    # -inf marks columns past E, which lose against all that is finite.
    places = []
    first = lanes.times(lane, width)
    for start in range(0, len(keys), width):
        order = [lanes.plus(first, i) for i in range(width)]
        # Neighbours change places only if the second is larger, so equal keys keep the order of
        # their ids.
        for i in range(width):
            for a in range(start + i % 2, start + width - 1, 2):
                b, at = a + 1, a - start
                swap = lanes.less(keys[a], keys[b])
                low, high = order[at], order[at + 1]
                order[at] = lanes.select(swap, high, low)
                order[at + 1] = lanes.select(swap, low, high)
                keys[a], keys[b] = lanes.larger(keys[a], keys[b]), lanes.smaller(keys[a], keys[b])
        packed = order[0]
        for i in range(1, width):
            packed = lanes.bit_or(packed, lanes.left(order[i], 8 * i))
        places.append(packed)

    count = plan.loaded_rows // 4
    size = 4 * plan.k8  # bytes of a row's picks
    own_picks = lanes.times(warp, count * size)
    starts = lanes.plus(keys_start, own_picks), lanes.plus(ids_start, own_picks)

    def pick(j, carry):
        keys, places = carry[:-count], carry[-count:]
        heads = keys[::width]
        best = [lanes.largest(head) for head in heads]
        # All maxima first: the compiler keeps the order of these instructions, and each waits for
        # the one before.
        same = [lanes.lanes_where(lanes.equal(*both)) for both in zip(heads, best, strict=True)]
        to_key, to_id = (lanes.plus(start, lanes.times(j, 4)) for start in starts)
        left_keys, left_places = [], []
        for i in range(count):
            is_own = lanes.equal(lanes.bit_and(same[i], upto), own)
            lanes.store(lanes.plus(to_key, i * size), heads[i], is_own)
            lanes.store(lanes.plus(to_id, i * size), places[i], is_own)
            after = [*keys[i * width + 1 : (i + 1) * width], lanes.word(lanes.LOWEST)]
            for n, key in enumerate(after):
                left_keys.append(lanes.select(is_own, key, keys[i * width + n]))
            left_places.append(lanes.select(is_own, lanes.right(places[i], 8), places[i]))
        return left_keys + left_places

    lanes.loop(plan.top_k, pick, keys + places)
    lanes.sync_warp()
    return _load_picks(plan, starts, lane)


def _load_picks(plan: Plan, starts: tuple[Any, Any], lane: Any) -> tuple[list, list]:
    """The chosen logits and ids that this thread has in `plan.tall`, from the picks of its warp.

    Args:
      starts: the addresses of the warp's keys and of its ids, [loaded rows / 4, k8].
    """
    size = 4 * plan.k8
    values, ids = [], []
    part, j = lanes.right(lane, 3), lanes.bit_and(lane, 7)
    for first in range(0, plan.k8, 8):
        for group in range(plan.rows // 16):
            row = lanes.plus(part, 4 * group)  # among those of the warp
            is_loaded = None
            if 4 * group + 4 > plan.loaded_rows // 4:
                is_loaded = lanes.less(row, plan.loaded_rows // 4)
                row = lanes.select(is_loaded, row, 0)
            entry = lanes.plus(lanes.times(row, size), lanes.times(lanes.plus(j, first), 4))
            (key,), (id_,) = (lanes.load(lanes.plus(start, entry)) for start in starts)
            value, id_ = _key(key), lanes.bit_and(id_, 255)
            if first + 8 > plan.top_k:
                is_pick = lanes.less(lanes.plus(j, first), plan.top_k)
                value = lanes.select(is_pick, value, -(2**23))  # the bits of -inf
                id_ = lanes.select(is_pick, id_, 0)
            if is_loaded is not None:
                value, id_ = (lanes.select(is_loaded, x, 0) for x in (value, id_))
            values.append(value)
            ids.append(id_)
    return values, ids


def _picks(plan: Plan, x_reg: jax.Array, count: int) -> list[jax.Array]:
    """Entries 0 .. count of each column of x_reg float32 [k8, rows], each spread over the column as
    [k8, rows]."""
    shape = x_reg.shape
    if plan.interpreted:
        return [jnp.broadcast_to(x_reg[j], shape) for j in range(count)]

    @plgpu.inline_mgpu(
        arg_types=(plan.tall,),
        return_type=[plgpu.ShapeDtypeStruct(shape, x_reg.dtype, layout=plan.tall)] * count,
    )
    def spread(_, x):
        groups = plan.rows // 16
        found = lanes.elements(x)
        column = lanes.bit_and(lanes.thread(), 24)

        def entry(j):
            own = [
                lanes.of_lane(found[j // 8 * groups + i], lanes.bit_or(column, j % 8))
                for i in range(groups)
            ]
            return lanes.array(own * (plan.k8 // 8), shape, x_reg.dtype, plan.tall)

        return [entry(j) for j in range(count)]

    return spread(x_reg)


def softmax(plan: Plan, values_reg: jax.Array, total_smem: Any) -> jax.Array:
    """Weights float32 [k8, rows] in registers of the chosen logits values_reg [k8, rows], in
    descending order.

    The denominator is total_smem float32 [64], or the sum of the chosen ones if None.
    """
    (most,) = _picks(plan, values_reg, 1)
    powers = jnp.exp(values_reg - most)
    if total_smem is None:  # summed in the order of the reference
        total = sum_pairwise(_picks(plan, powers, plan.top_k))
    else:
        row_smem = total_smem.at[pl.ds(0, plan.rows)]
        row = plgpu.load(row_smem, layout=plan.tall.reduce(0), optimized=False)
        total = lax.broadcast_in_dim(row, values_reg.shape, (1,))
    # The barrier stops the interpreter's compiler from multiplying by the inverse instead.
    return powers / lax.optimization_barrier(total)
