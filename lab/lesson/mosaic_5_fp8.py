"""Step 5: weights in FP8 with a scale for each block of 128 x 128, converted in registers.

Half the bytes of step 4. A consumer loads its tile from shared memory into registers, gives each
thread the elements that wgmma expects of it, converts them to bfloat16, which is exact, and
multiplies from there:

    shared memory        registers                          tensor core
    e4m3 [64, 128]  ->   e4m3  ->  float32  ->  bfloat16  ->  product [64, R]
                                                              total += product x scale

A step of K is a block of scales, so its product is multiplied by one number and added to a float32
total. Tensor cores could multiply e4m3 directly, but then the tokens would be rounded to e4m3 too,
and Hopper's sums of e4m3 products keep fewer bits than float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lab.lesson.mosaic_4_persistent import (
    PRODUCER,
    STAGES,
    TILE,
    ZEROS,
    chunks,
    declare,
)
from lab.lesson.tiles import ROWS, check, store_transposed
from pallas_kernels.block_gemm.api import add_in_order
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK


def unpack(tile_smem: Any) -> jax.Array:
    """e4m3 [ROWS, BLOCK] in shared memory to bfloat16 in registers, as wgmma's first operand.

    Threads exchange bytes (the change of layout) while elements have 8 bits: half as many shuffles.
    Hopper converts e4m3 to float16 only; through float32 to bfloat16 it is exact.
    """
    packed_reg = plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    packed_reg = plgpu.layout_cast(packed_reg, plgpu.Layout.WGMMA)
    return packed_reg.astype(jnp.float32).astype(jnp.bfloat16)


def multiply(tile_smem: Any, x_smem: Any, interpret: Any) -> jax.Array:
    """e4m3 [ROWS, BLOCK] times bfloat16 [R, BLOCK]: float32 [ROWS, R] in registers."""
    weight_reg = unpack(tile_smem)
    if interpret is not None:  # the interpreter has no wgmma with an operand in registers
        return jnp.dot(weight_reg.astype(jnp.float32), x_smem[...].astype(jnp.float32).T)

    def run(acc_reg):
        plgpu.wgmma(acc_reg, weight_reg, x_smem.T)
        plgpu.wgmma_wait(0)
        return acc_reg[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, x_smem.shape[0]), jnp.float32))


def scaled_product(
    n: jax.Array,
    own_units: jax.Array,
    num_steps: int,
    block_scale: Callable[[jax.Array | int], jax.Array],
    group: jax.Array,
    x_smem: Any,
    w_smem: Any,
    ready_barrier: Any,
    free_barrier: Any,
    interpret: Any,
) -> jax.Array:
    """A consumer's sum over the steps of a unit: float32 [ROWS, R] in registers.

    Args:
      n: the unit is the block's n-th of `own_units`, each of `num_steps` steps.
      block_scale: float32 scale of the unit's i-th step; i may be `num_steps`, whose scale is not
        used.
      x_smem: [STAGES, R, BLOCK] bfloat16; w_smem [STAGES, TILE, BLOCK] e4m3.
    """

    def step(i, carry):
        total_reg, factor = carry
        next_factor = block_scale(i + 1)  # a step early, to hide the latency
        slot = lax.rem(n * num_steps + i, STAGES)
        plgpu.barrier_wait(ready_barrier.at[slot])
        rows_smem = w_smem.at[slot, pl.ds(group * ROWS, ROWS)]
        product_reg = multiply(rows_smem, x_smem.at[slot], interpret)

        @pl.when(n * num_steps + i + STAGES < own_units * num_steps)
        def _():
            plgpu.commit_smem()  # the threads' reads precede the next copy
            plgpu.barrier_arrive(free_barrier.at[slot])

        return total_reg + product_reg * factor, next_factor

    zeros = jnp.zeros((ROWS, x_smem.shape[1]), jnp.float32)
    start = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), block_scale(0)
    return lax.fori_loop(0, num_steps, step, start)[0]


@functools.partial(jax.jit, static_argnames="launch")
def product(x: jax.Array, values: jax.Array, scale: jax.Array, launch: Launch) -> jax.Array:
    """x [R, >= K] bfloat16 times values [N, K] e4m3 with scale [N / 128, K / 128]: bfloat16 [R, N].

    Columns of x past K do not change the result, but must be finite: some are multiplied by zero.
    """
    check(x, values, BLOCK)
    R, (N, K) = x.shape[0], values.shape
    num_chunks = chunks(N, K, launch.device.num_sms, BLOCK)
    num_steps = pl.cdiv(K // BLOCK, num_chunks)
    num_units = N // TILE * num_chunks
    blocks = min(launch.device.num_sms, num_units)
    out_dtype = x.dtype if num_chunks == 1 else jnp.float32

    def body(
        x_gmem, w_gmem, scale_gmem, out_gmem, x_smem, w_smem, out_smem, ready_barrier, free_barrier
    ):
        block, group = lax.axis_index("block"), lax.axis_index("group")
        own_units = lax.div(num_units - block + blocks - 1, blocks)

        def locate(unit):
            unit = block + unit * blocks
            return lax.div(unit, num_chunks), lax.rem(unit, num_chunks)

        @pl.when(group == PRODUCER)
        def _():
            def unit(n, carry):
                tile, chunk = locate(n)

                def fetch(i, carry):
                    step = n * num_steps + i
                    slot = lax.rem(step, STAGES)
                    columns = pl.ds((chunk * num_steps + i) * BLOCK, BLOCK)

                    @pl.when(step >= STAGES)
                    def _():
                        plgpu.barrier_wait(free_barrier.at[slot])

                    w_tile_gmem = w_gmem.at[pl.ds(tile * TILE, TILE), columns]
                    x_tile_gmem, barrier = x_gmem.at[:, columns], ready_barrier.at[slot]
                    plgpu.copy_gmem_to_smem(w_tile_gmem, w_smem.at[slot], barrier, oob_mode=ZEROS)
                    plgpu.copy_gmem_to_smem(x_tile_gmem, x_smem.at[slot], barrier)
                    return carry

                return lax.fori_loop(0, num_steps, fetch, carry)

            lax.fori_loop(0, own_units, unit, None)

        @pl.when(group != PRODUCER)
        def _():
            def unit(n, carry):
                tile, chunk = locate(n)

                def block_scale(i):
                    return scale_gmem[tile, jnp.minimum(chunk * num_steps + i, K // BLOCK - 1)]

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
                out_rows = pl.ds(tile * TILE + group * ROWS, ROWS)
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
        tile=(R, BLOCK),
        weight=values.dtype,
        name="ladder_fp8",
    )
    return add_in_order(kernel(x, values, scale)).astype(x.dtype)
