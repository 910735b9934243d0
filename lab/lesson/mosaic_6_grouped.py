"""Step 6: the product of a mixture of experts. Each row has chosen experts; each expert has its own
weight.

A plan sorts the chosen rows by expert and cuts them into items: `tokens` rows that belong to one
expert, padded with zeros. With experts 0 to 3, three rows that choose two experts each, and 8
tokens an item:

    row 0: 1, 3      item 0: expert 1: rows 0, 2 and 6 of padding
    row 1: 2, 3      item 1: expert 2: rows 1, 2 and 6 of padding
    row 2: 1, 2      item 2: expert 3: rows 0, 1 and 6 of padding

Expert 0 has no item, so its weight is not read. A unit of step 5's loop is an item and 128 rows of
its expert's weight; how many there are is read from memory. K is short and experts are many, so K
is not split and the ring, which does not end with a unit, matters more: a unit has 6 or 16 steps.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lab.lesson.mosaic_4_persistent import PRODUCER, STAGES, TILE, declare
from lab.lesson.mosaic_5_fp8 import scaled_product
from lab.lesson.tiles import ROWS, check, store_transposed
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK
from pallas_kernels.moe.worklist import Worklist, make_worklist


def plan(x: jax.Array, ids: jax.Array, num_experts: int, tokens: int) -> tuple[jax.Array, Worklist]:
    """Sorts rows by expert.

    Args:
      x: [R, K].
      ids: int32 [k, R], the experts that each row chose.
      tokens: rows of an item, a multiple of 8.
    Returns:
      The rows of all items [items * tokens, K], unused ones zero, and the worklist; `slots` [k, R]
      says where a row's results will stand.
    """
    work = make_worklist(ids, num_experts, tokens, shared=False)
    rows = jnp.zeros((work.items * tokens, x.shape[1]), x.dtype)
    return rows.at[work.slots].set(x), work


@functools.partial(jax.jit, static_argnames=("tokens", "launch"))
def product(
    x: jax.Array,  # [items * tokens, >= K] bfloat16, sorted by `plan`
    values: jax.Array,  # [E, N, K] e4m3
    scale: jax.Array,  # [E, N / 128, K / 128] float32
    experts: jax.Array,  # [items or more] int32
    num_items: jax.Array,  # int32, the number of items in entry 0
    *,
    tokens: int,
    launch: Launch,
) -> jax.Array:
    """Each item times its expert's weight: bfloat16 [items * tokens, N], unspecified from
    `num_items` on."""
    check(x, values, BLOCK)
    N, K = values.shape[1:]
    num_steps, row_tiles = K // BLOCK, N // TILE
    blocks = min(launch.device.num_sms, x.shape[0] // tokens * row_tiles)

    def body(
        x_gmem,
        w_gmem,
        scale_gmem,
        experts_gmem,
        num_items_gmem,
        out_gmem,
        x_smem,  # [STAGES, tokens, BLOCK] bfloat16
        w_smem,  # [STAGES, TILE, BLOCK] e4m3
        out_smem,  # [GROUPS, tokens, ROWS] bfloat16
        ready_barrier,
        free_barrier,
    ):
        block, group = lax.axis_index("block"), lax.axis_index("group")
        num_units = num_items_gmem[0] * row_tiles
        own_units = lax.div(num_units - block + blocks - 1, blocks)

        def locate(unit):
            """(item, tile of weight rows) of the block's n-th unit; tiles of an item are
            neighbours."""
            unit = block + unit * blocks
            return lax.div(unit, row_tiles), lax.rem(unit, row_tiles)

        @pl.when(group == PRODUCER)
        def _():
            def unit(n, carry):
                item, tile = locate(n)
                w_rows_gmem = w_gmem.at[experts_gmem[item], pl.ds(tile * TILE, TILE)]
                x_rows_gmem = x_gmem.at[pl.ds(item * tokens, tokens)]

                def fetch(i, carry):
                    step = n * num_steps + i
                    slot, columns = lax.rem(step, STAGES), pl.ds(i * BLOCK, BLOCK)

                    @pl.when(step >= STAGES)
                    def _():
                        plgpu.barrier_wait(free_barrier.at[slot])

                    barrier = ready_barrier.at[slot]
                    plgpu.copy_gmem_to_smem(w_rows_gmem.at[:, columns], w_smem.at[slot], barrier)
                    plgpu.copy_gmem_to_smem(x_rows_gmem.at[:, columns], x_smem.at[slot], barrier)
                    return carry

                return lax.fori_loop(0, num_steps, fetch, carry)

            lax.fori_loop(0, own_units, unit, None)

        @pl.when(group != PRODUCER)
        def _():
            def unit(n, carry):
                item, tile = locate(n)
                expert = experts_gmem[item]

                def block_scale(i):
                    return scale_gmem[expert, tile, jnp.minimum(i, num_steps - 1)]

                total_reg = scaled_product(
                    n,
                    own_units,
                    num_steps,
                    block_scale,
                    group,
                    x_smem,
                    w_smem,
                    ready_barrier,
                    free_barrier,
                    launch.interpret,
                )
                rows, out_rows = (
                    pl.ds(item * tokens, tokens),
                    pl.ds(tile * TILE + group * ROWS, ROWS),
                )
                store_transposed(total_reg, out_smem.at[group], out_gmem.at[rows, out_rows])
                return carry

            lax.fori_loop(0, own_units, unit, None)
            plgpu.wait_smem_to_gmem(0)

    out_type = jax.ShapeDtypeStruct((x.shape[0], N), x.dtype)
    kernel = declare(
        body,
        out_type,
        launch,
        blocks=blocks,
        tile=(tokens, BLOCK),
        weight=values.dtype,
        name="ladder_grouped",
    )
    return kernel(x, values, scale, experts, num_items)
