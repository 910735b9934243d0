"""Step 4: one block for each multiprocessor, which works on units until none is left; K is split.

A unit is 128 rows of the weight and one chunk of K. Block b takes units b, b + blocks, ... The ring
does not end with a unit: while the consumers store a result, the producer already fills slots for
the next unit.

    producer    unit 0 ............|unit 132 ............|unit 264 .....
    consumers       unit 0 ............|store|unit 132 ............|store

A small weight has fewer tiles of rows than the chip has multiprocessors, so K is cut into chunks,
each with a partial sum of its own. The chunks follow from the weight's shape and the chip, and
their sums are added in ascending order: a row has the same bits however many rows are beside it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lab.lesson.tiles import GROUPS, ROWS, STEP, check, store_transposed, swizzled
from pallas_kernels.block_gemm.api import add_in_order
from pallas_kernels.dispatch import Launch

STAGES = 6
"""A block has a multiprocessor to itself: 96 KB of the weight are under way, and x with up to 64
rows fits."""

PRODUCER, TILE = GROUPS, GROUPS * ROWS
ZEROS = plgpu.OOBFillMode.ZEROS


def chunks(N: int, K: int, num_sms: int, step: int = STEP) -> int:
    """Chunks of K: the fewest with which 90 % of the multiprocessors have a unit, of two steps at
    least."""
    tiles, steps = N // TILE, K // step
    most = max(1, steps // 2)
    num_chunks = next((n for n in range(1, most) if tiles * n >= 0.9 * num_sms), most)
    return pl.cdiv(steps, pl.cdiv(steps, num_chunks))  # without chunks that begin past K


def declare(
    body: Callable,
    out_type: jax.ShapeDtypeStruct,
    launch: Launch,
    *,
    blocks: int,
    tile: tuple[int, int],
    weight: jnp.dtype,
    name: str,
) -> Callable:
    """The kernel that runs `body` in `blocks` blocks: a producer and `GROUPS` consumers around a
    ring.

    Args:
      body: its last arguments are x_smem [STAGES, *tile] bfloat16, w_smem [STAGES, TILE, tile[1]],
        out_smem [GROUPS, tile[0], ROWS], ready_barrier (x and the weight are in a slot) and
        free_barrier (the consumers have read it), each barrier one for each slot.
      tile: rows and columns of x in a step.
      weight: dtype of the weight's values.
    """
    rows, step = tile
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=dict(
            x_smem=plgpu.SMEM(
                (STAGES, rows, step), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)
            ),
            w_smem=plgpu.SMEM((STAGES, TILE, step), weight, transforms=swizzled(weight)),
            out_smem=plgpu.SMEM((GROUPS, rows, ROWS), out_type.dtype),
            ready_barrier=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            free_barrier=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=launch.interpret,
        kernel_name=name,
    )


@functools.partial(jax.jit, static_argnames="launch")
def product(x: jax.Array, w: jax.Array, launch: Launch) -> jax.Array:
    """x [R, >= K] bfloat16 times w [N, K] bfloat16: bfloat16 [R, N].

    Columns of x past K do not change the result, but must be finite: some are multiplied by zero.
    """
    check(x, w)
    R, (N, K) = x.shape[0], w.shape
    num_chunks = chunks(N, K, launch.device.num_sms)
    # The last chunk may have steps past K. TMA fills what is outside of the weight with zeros.
    num_steps = pl.cdiv(K // STEP, num_chunks)
    num_units = N // TILE * num_chunks
    blocks = min(launch.device.num_sms, num_units)
    out_dtype = x.dtype if num_chunks == 1 else jnp.float32

    def body(x_gmem, w_gmem, out_gmem, x_smem, w_smem, out_smem, ready_barrier, free_barrier):
        block, group = lax.axis_index("block"), lax.axis_index("group")
        own_units = lax.div(num_units - block + blocks - 1, blocks)

        def locate(unit):
            """(first row, chunk) of the block's n-th unit; chunks of a tile are neighbours."""
            unit = block + unit * blocks
            return lax.div(unit, num_chunks) * TILE, lax.rem(unit, num_chunks)

        @pl.when(group == PRODUCER)
        def _():
            def unit(n, carry):
                first_row, chunk = locate(n)

                def fetch(i, carry):
                    step = n * num_steps + i  # of all units
                    slot = lax.rem(step, STAGES)
                    columns = pl.ds((chunk * num_steps + i) * STEP, STEP)

                    @pl.when(step >= STAGES)
                    def _():
                        plgpu.barrier_wait(free_barrier.at[slot])

                    w_tile_gmem = w_gmem.at[pl.ds(first_row, TILE), columns]
                    x_tile_gmem, barrier = x_gmem.at[:, columns], ready_barrier.at[slot]
                    plgpu.copy_gmem_to_smem(w_tile_gmem, w_smem.at[slot], barrier, oob_mode=ZEROS)
                    plgpu.copy_gmem_to_smem(x_tile_gmem, x_smem.at[slot], barrier)
                    return carry

                return lax.fori_loop(0, num_steps, fetch, carry)

            lax.fori_loop(0, own_units, unit, None)

        @pl.when(group != PRODUCER)
        def _():
            def unit(n, carry):
                def multiply(acc_reg):
                    def step(i, carry):
                        slot = lax.rem(n * num_steps + i, STAGES)
                        plgpu.barrier_wait(ready_barrier.at[slot])
                        rows_smem = w_smem.at[slot, pl.ds(group * ROWS, ROWS)]
                        plgpu.wgmma(acc_reg, rows_smem, x_smem.at[slot].T)
                        plgpu.wgmma_wait(0)

                        @pl.when(n * num_steps + i + STAGES < own_units * num_steps)
                        def _():
                            plgpu.barrier_arrive(free_barrier.at[slot])

                        return carry

                    lax.fori_loop(0, num_steps, step, None)
                    return acc_reg[...]

                total_reg = pl.run_scoped(multiply, plgpu.ACC((ROWS, R), jnp.float32))
                first_row, chunk = locate(n)
                out_rows = pl.ds(first_row + group * ROWS, ROWS)
                store_transposed(total_reg, out_smem.at[group], out_gmem.at[chunk, :, out_rows])
                return carry

            lax.fori_loop(0, own_units, unit, None)
            plgpu.wait_smem_to_gmem(0)

    out_type = jax.ShapeDtypeStruct((num_chunks, R, N), out_dtype)
    kernel = declare(
        body,
        out_type,
        launch,
        blocks=blocks,
        tile=(R, STEP),
        weight=w.dtype,
        name="ladder_persistent",
    )
    return add_in_order(kernel(x, w)).astype(x.dtype)
