"""Step 1: a product on tensor cores. One warpgroup a block, plain loads, nothing overlaps.

A block owns 64 rows of the weight. Its loop over K loads a tile through registers into shared
memory, multiplies it with wgmma, waits, and only then loads the next one:

    memory   [load 0]          [load 1]          [load 2]
    tensor            [mma 0]           [mma 1]           [mma 2]

The weight is wgmma's first operand (64 rows) and the tokens are the second one (8 columns at
least): with the tokens first, 56 of 64 rows would be padding.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lab.lesson.tiles import ROWS, STEP, check, store_transposed, swizzled
from pallas_kernels.dispatch import Launch

VECTORS = plgpu.Layout.SMEM_GMEM_COPY((ROWS, STEP), jnp.bfloat16, 128)
"""Registers of a tile of the weight: a thread loads 16 bytes at a time, eight threads a row."""

PAIRS = plgpu.Layout.WGMMA_TRANSPOSED
"""Registers of a tile of x, whose 8 rows are too few for VECTORS: 2 columns of 8 rows at a time."""


@functools.partial(jax.jit, static_argnames="launch")
def product(x: jax.Array, w: jax.Array, launch: Launch) -> jax.Array:
    """x [R, >= K] bfloat16 times w [N, K] bfloat16: bfloat16 [R, N]. Columns of x past K are
    ignored."""
    check(x, w)
    R, (N, K) = x.shape[0], w.shape

    def body(x_gmem, w_gmem, out_gmem, x_smem, w_smem, out_smem):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)

        def multiply(acc_reg):
            def step(i, carry):
                columns = pl.ds(i * STEP, STEP)
                # Both loads are under way before a thread waits for either.
                w_reg = plgpu.load(w_gmem.at[rows, columns], layout=VECTORS, optimized=False)
                x_reg = plgpu.load(x_gmem.at[:, columns].T, layout=PAIRS, optimized=False)
                w_smem[...] = w_reg
                x_smem.T[...] = x_reg
                plgpu.commit_smem()  # tensor cores are to see what the threads stored
                plgpu.wgmma(acc_reg, w_smem, x_smem.T)
                plgpu.wgmma_wait(0)
                return carry

            lax.fori_loop(0, K // STEP, step, None)
            return acc_reg[...]

        total_reg = pl.run_scoped(multiply, plgpu.ACC((ROWS, R), jnp.float32))
        store_transposed(total_reg, out_smem, out_gmem.at[:, rows])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((R, N), x.dtype),
        scratch_types=dict(
            x_smem=plgpu.SMEM((R, STEP), x.dtype, transforms=swizzled(x.dtype)),
            w_smem=plgpu.SMEM((ROWS, STEP), w.dtype, transforms=swizzled(w.dtype)),
            out_smem=plgpu.SMEM((R, ROWS), x.dtype),
        ),
        grid=(N // ROWS,),
        grid_names=("row",),
        interpret=launch.interpret,
        kernel_name="ladder_wgmma",
    )
    return kernel(x, w)
