"""Step 3: a warpgroup that only loads, and two that only multiply (warp specialisation).

The producer waits for free slots and never for a product; the consumers wait for tiles and never
for an address. Two barriers a slot hand it back and forth:

    producer    wait free -> start copies -> (TMA arrives at ready)
    consumers   wait ready -> multiply -> arrive at free

Both consumers, each with 64 rows of the weight, read the same tile of x. Half as many blocks read
x, and with 64 tokens a tile of x is as large as a tile of the weight.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lab.lesson.tiles import GROUPS, ROWS, STEP, check, store_transposed, swizzled
from pallas_kernels.dispatch import Launch

STAGES = 4
PRODUCER = GROUPS
"""Index of the producer among the warpgroups; the consumers are 0 to GROUPS - 1."""


@functools.partial(jax.jit, static_argnames="launch")
def product(x: jax.Array, w: jax.Array, launch: Launch) -> jax.Array:
    """x [R, >= K] bfloat16 times w [N, K] bfloat16: bfloat16 [R, N]. Columns of x past K are
    ignored."""
    check(x, w)
    R, (N, K) = x.shape[0], w.shape
    num_steps, tile = K // STEP, GROUPS * ROWS
    stages = min(STAGES, num_steps)

    def body(x_gmem, w_gmem, out_gmem, x_smem, w_smem, out_smem, ready_barrier, free_barrier):
        first_row = lax.axis_index("row") * tile
        group = lax.axis_index("group")

        @pl.when(group == PRODUCER)
        def _():
            def fetch(i, carry):
                slot, columns = lax.rem(i, stages), pl.ds(i * STEP, STEP)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free_barrier.at[slot])

                w_tile_gmem = w_gmem.at[pl.ds(first_row, tile), columns]
                barrier = ready_barrier.at[slot]
                plgpu.copy_gmem_to_smem(w_tile_gmem, w_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(x_gmem.at[:, columns], x_smem.at[slot], barrier)
                return carry

            lax.fori_loop(0, num_steps, fetch, None)

        @pl.when(group != PRODUCER)
        def _():
            def multiply(acc_reg):
                def step(i, carry):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(ready_barrier.at[slot])
                    rows_smem = w_smem.at[slot, pl.ds(group * ROWS, ROWS)]
                    plgpu.wgmma(acc_reg, rows_smem, x_smem.at[slot].T)
                    plgpu.wgmma_wait(0)

                    @pl.when(i + stages < num_steps)
                    def _():
                        plgpu.barrier_arrive(free_barrier.at[slot])

                    return carry

                lax.fori_loop(0, num_steps, step, None)
                return acc_reg[...]

            total_reg = pl.run_scoped(multiply, plgpu.ACC((ROWS, R), jnp.float32))
            out_rows = pl.ds(first_row + group * ROWS, ROWS)
            store_transposed(total_reg, out_smem.at[group], out_gmem.at[:, out_rows])
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((R, N), x.dtype),
        scratch_types=dict(
            x_smem=plgpu.SMEM((stages, R, STEP), x.dtype, transforms=swizzled(x.dtype)),
            w_smem=plgpu.SMEM((stages, tile, STEP), w.dtype, transforms=swizzled(w.dtype)),
            out_smem=plgpu.SMEM((GROUPS, R, ROWS), x.dtype),
            ready_barrier=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # w and x
            free_barrier=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        ),
        grid=(N // tile,),
        grid_names=("row",),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=launch.interpret,
        kernel_name="ladder_roles",
    )
    return kernel(x, w)
