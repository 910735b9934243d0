"""Step 2: copies by TMA into a ring of tiles. The copies of the next steps run while one is
multiplied.

One thread starts a copy of a whole tile; the copy engine (TMA) moves it, swizzles it and reports to
a barrier. The registers hold no tile, and the threads compute no addresses. With STAGES = 4:

    slot 0   [load 0]             [mma 0] [load 4 ...          ] [mma 4]
    slot 1   [load 1]                     [mma 1] [load 5 ...          ]
    slot 2   [load 2]                             [mma 2] [load 6 ...
    slot 3   [load 3]                                     [mma 3] [load 7
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lab.lesson.tiles import ROWS, STEP, check, store_transposed, swizzled
from pallas_kernels.dispatch import Launch

STAGES = 4
"""Slots of the ring."""


@functools.partial(jax.jit, static_argnames="launch")
def product(x: jax.Array, w: jax.Array, launch: Launch) -> jax.Array:
    """x [R, >= K] bfloat16 times w [N, K] bfloat16: bfloat16 [R, N]. Columns of x past K are
    ignored."""
    check(x, w)
    R, (N, K) = x.shape[0], w.shape
    num_steps = K // STEP
    stages = min(STAGES, num_steps)

    def body(x_gmem, w_gmem, out_gmem, x_smem, w_smem, out_smem, ready_barrier):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)

        def fetch(i, slot):
            columns, barrier = pl.ds(i * STEP, STEP), ready_barrier.at[slot]
            plgpu.copy_gmem_to_smem(w_gmem.at[rows, columns], w_smem.at[slot], barrier)
            plgpu.copy_gmem_to_smem(x_gmem.at[:, columns], x_smem.at[slot], barrier)

        def multiply(acc_reg):
            def step(i, carry):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(ready_barrier.at[slot])
                plgpu.wgmma(acc_reg, w_smem.at[slot], x_smem.at[slot].T)
                plgpu.wgmma_wait(0)  # the tile is read: its slot may be filled again

                @pl.when(i + stages < num_steps)
                def _():
                    fetch(i + stages, slot)

                return carry

            lax.fori_loop(0, num_steps, step, None)
            return acc_reg[...]

        for i in range(stages):
            fetch(i, i)
        total_reg = pl.run_scoped(multiply, plgpu.ACC((ROWS, R), jnp.float32))
        store_transposed(total_reg, out_smem, out_gmem.at[:, rows])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((R, N), x.dtype),
        scratch_types=dict(
            x_smem=plgpu.SMEM((stages, R, STEP), x.dtype, transforms=swizzled(x.dtype)),
            w_smem=plgpu.SMEM((stages, ROWS, STEP), w.dtype, transforms=swizzled(w.dtype)),
            out_smem=plgpu.SMEM((R, ROWS), x.dtype),
            ready_barrier=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # w and x
        ),
        grid=(N // ROWS,),
        grid_names=("row",),
        interpret=launch.interpret,
        kernel_name="ladder_ring",
    )
    return kernel(x, w)
