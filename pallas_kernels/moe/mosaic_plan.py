"""Routing of a small batch in one kernel: top-k experts, softmax weights, and the worklist.

A block holds 16 or 32 rows, so that a small batch uses all threads. More than 16 rows are one
cluster of 4 or 8 blocks. Each block counts its own rows, and sends the counts to the others.

A GPU runs operations of single lanes: each step needs the one before, and an operation on arrays of
a warpgroup ends in a barrier that most steps do not need. There are two barriers of the warpgroup:
after the masks are cleared, and after all rows have set their bits. Each warp computes the rest
from the masks, and reads nothing that another warp has computed.

`mosaic_topk` has the choice of experts, `mosaic_sort` the worklist with a worked example,
`mosaic_layout` the registers and the shared memory, `mosaic_lanes` the operations of a lane.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cluster_send
from pallas_kernels.moe import mosaic_route
from pallas_kernels.moe.mosaic_layout import Own, Plan, Scratch, scratch_types
from pallas_kernels.moe.mosaic_sort import (
    clear_columns,
    clear_masks,
    exchange_counts,
    find_slots,
    place_experts,
    store_columns,
    store_count,
    store_experts,
    store_masks,
)
from pallas_kernels.moe.mosaic_topk import choose, load_logits, softmax
from pallas_kernels.moe.paths import ROWS, Routing


class Results(NamedTuple):
    """What `route_and_plan` returns, in device memory."""

    weights_gmem: Any
    slots_gmem: Any
    experts_gmem: Any
    num_items_gmem: Any


def results(plan: Plan, items: int) -> Results:
    """Shapes of the results."""
    columns = plan.top_k, plan.padded_rows
    return Results(
        jax.ShapeDtypeStruct(columns, jnp.float32),
        jax.ShapeDtypeStruct(columns, jnp.int32),
        jax.ShapeDtypeStruct((pl.cdiv(items, ROWS) * ROWS,), jnp.int32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    )


def prepare(plan: Plan, results_gmem: Results, scratch: Scratch) -> None:
    """What precedes `plan_rows` and needs no logits: clears the masks, and the columns of the
    results that have no row.

    Several blocks arm a barrier for the counts that they send each other.
    """
    if plan.blocks > 1 and not plan.interpreted:
        cluster_send.arm(scratch.barriers_smem, [plan.blocks * plan.Ep * 4])
    clear_columns(plan, [results_gmem.weights_gmem, results_gmem.slots_gmem])
    clear_masks(scratch.masks_smem, plan.interpreted)


def plan_rows(
    plan: Plan,
    g: Any,
    source_ref: Any,
    bias_gmem: list[Any],
    own: Own | None,
    items: int,
    results_gmem: Results,
    counts_gmem: list[Any],
    scratch: Scratch,
) -> None:
    """Routes the rows of block g and builds its share of the worklist, by one warpgroup.

    Args:
      source_ref: the block's logits, float32 `plan.load_shape`, in shared or device memory.
      bias_gmem: [padded E], if any.
      counts_gmem: int32 [blocks, Ep], to exchange counts in the interpreter.
    """
    interpreted = plan.interpreted
    first_row = g * plan.rows
    if not plan.normalize:
        parts = mosaic_route.load_parts(source_ref, bias_gmem, plan.E)
        scratch.total_smem[...] = mosaic_route.sum_of_exps(parts)

    # Stage 1: top-k. logits_reg [loaded rows, Ep], values and ids [k8, rows].
    logits_reg = load_logits(plan, source_ref, bias_gmem)
    values_reg, ids_reg = choose(plan, logits_reg, scratch.keys_smem, scratch.ids_smem)

    # Stages 2 and 3: the rows that chose each expert.
    store_masks(plan, ids_reg, first_row, scratch.masks_smem, own)
    if plan.blocks > 1:
        exchange_counts(plan, g, counts_gmem, scratch)

    # Stages 4 to 6: slots [k8, rows] of this block's rows, and the expert of each item.
    place_experts(plan, g, scratch)
    slots_reg = find_slots(plan, ids_reg, first_row, scratch)
    if own is not None:  # own experts leave the last row free, see `own_items`
        slots_reg = jnp.where(own.has(ids_reg), slots_reg, items * plan.tokens - 1)
    store_columns(plan, slots_reg, results_gmem.slots_gmem, first_row)
    of_block = g, plan.blocks
    store_experts(plan.E, scratch.ends_smem, of_block, results_gmem.experts_gmem, own, interpreted)
    store_count(scratch.ends_smem, results_gmem.num_items_gmem, g, interpreted)

    # The rest of stage 1, which nothing waits for.
    total_smem = scratch.total_smem if not plan.normalize else None
    weights_reg = softmax(plan, values_reg, total_smem)  # [k8, rows]
    if own is not None:
        weights_reg = jnp.where(own.has(ids_reg), weights_reg, 0.0)
    store_columns(plan, weights_reg, results_gmem.weights_gmem, first_row)


@functools.partial(jax.jit, static_argnames=("routing", "count"))
def route_and_plan(
    logits: jax.Array,  # [R, E] float32, R <= 256, E <= 128
    bias: jax.Array | None,  # [E]
    routing: Routing,
    first: jax.Array | None = None,  # [] or [1] int32
    count: int | None = None,
) -> tuple[jax.Array, ...]:
    """Routes the rows and builds the worklist, as `worklist.make_worklist`.

    With `first` the result is that of `worklist.own_items` for the experts `first` ..
    `first + count`.

    Up to 16 rows are one block, more are one cluster. Its blocks count messages at barriers in
    shared memory, which unlike a semaphore need no zeroed device memory.

    Returns:
      weights float32 [k, R'], slots int32 [k, R'], experts int32 [items'], num_items int32 [64]
      (all equal); R' and items' are the next multiples of 64. Entries past R are unspecified.
    """
    plan = Plan.of(*logits.shape, routing)
    logits = mosaic_route.pad_for_copy(logits)
    blocks, Ep = plan.blocks, plan.Ep
    staged = not plan.normalize or logits.shape != (blocks * plan.rows, Ep)
    operands = [logits, *mosaic_route.padded_bias(bias)]
    if first is not None:
        operands.append(first.reshape(1))

    num_refs = len(operands) - 1 + len(Results._fields)
    exchanged = (
        [jax.ShapeDtypeStruct((blocks, Ep), jnp.int32)] if plan.interpreted and blocks > 1 else []
    )

    def body(
        logits_gmem,  # [R, E] float32, padded for TMA
        *refs,  # bias [padded E] and first [1], if any; the results; `exchanged`
        **scratch_refs,
    ):
        *bias_gmem, weights_gmem, slots_gmem, experts_gmem, num_items_gmem = refs[:num_refs]
        counts_gmem = refs[num_refs:]
        own = None
        if first is not None:
            first_gmem = bias_gmem.pop()
            own = Own(first_gmem[0], count)
        scratch = Scratch(**scratch_refs)
        g = lax.axis_index("block")
        load_rows, load_columns = plan.load_shape
        source_ref = logits_gmem.at[pl.ds(g * plan.rows, load_rows), pl.ds(0, load_columns)]
        if staged:
            plgpu.copy_gmem_to_smem(
                source_ref,
                scratch.logits_smem,
                scratch.loaded_barrier,
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )
        results_gmem = Results(weights_gmem, slots_gmem, experts_gmem, num_items_gmem)
        prepare(plan, results_gmem, scratch)
        if staged:
            plgpu.barrier_wait(scratch.loaded_barrier)
            source_ref = scratch.logits_smem
        plan_rows(
            plan, g, source_ref, bias_gmem, own, routing.items, results_gmem, counts_gmem, scratch
        )

    outputs = plgpu.kernel(
        body,
        out_type=(*results(plan, routing.items), *exchanged),
        scratch_types=scratch_types(plan, staged),
        # No scratch: every reduction stays within a warp, which saves two barriers each.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        cluster=(blocks,),
        cluster_names=("block",),
        interpret=routing.launch.interpret,
        kernel_name="moe_route_and_plan",
    )(*operands)
    return tuple(outputs[:4])
