"""Kernel of the weight-stationary product.

A block multiplies a tile of the weight's rows, over one chunk of K or over all of them, with a tile of tokens.
How K is cut into chunks depends on the weight's shape alone. Few tokens: each chunk is a block of its own and
leaves a partial sum. Many tokens: a block adds the same partial sums itself, in the same order. So both
give the same bits, and the consumer of several partial sums adds them as it reads them.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK
from pallas_kernels.weight_chips import formats_of
from pallas_kernels.weight_tiles import STEP, TOTAL, each_step, fetch_scales, fetch_tile


@dataclass(frozen=True)
class TuningConfig:
    """Tokens of a tile, chunks of K, whether each chunk is a block of its own, `Format.stages` wanted."""

    tokens: int
    chunks: int
    split: bool
    stages: int

    @classmethod
    def choose(cls, R: int, N: int, K: int, device: Device) -> "TuningConfig":
        tokens = next(t for t in (8, 16, 32, 64) if t >= R or t == 64)
        if N <= 256:  # a router: one block reads the result, and would wait for every part of it
            return cls(8 if R <= 128 else 32, 1, False, stages=8)
        tiles, steps = pl.cdiv(N, formats_of(device).rows), pl.cdiv(K, STEP)
        # Up to two blocks an SM: more partial sums would cost what shorter loops save.
        per_chunk = next(
            n
            for n in range(1, steps + 1)
            if n == steps or pl.cdiv(steps, n) * tiles <= 2 * device.num_sms
        )
        chunks = pl.cdiv(steps, per_chunk)
        split = chunks > 1 and pl.cdiv(R, tokens) * tiles < device.num_sms
        return cls(tokens, chunks, split, stages=4 if tokens <= 32 else 3)


@functools.partial(jax.jit, static_argnames=("config", "launch"))
def product(
    x: jax.Array,  # [R, K] bfloat16
    values: jax.Array,  # [N, K], mxfp4 [N, K / 2]
    scale: jax.Array | None,  # see formats.kernel_refusal
    config: TuningConfig,
    launch: Launch,
) -> jax.Array:
    """Partial sums float32 [S, R, N], to be added in ascending order; S is 1 or `config.chunks`."""
    R, K = x.shape
    N = values.shape[0]
    form = formats_of(launch.device).of(values, scale)
    # Steps past K are zeros times zeros: tiles outside of an array are filled so.
    per_chunk = pl.cdiv(pl.cdiv(K, form.step), config.chunks)
    splits = config.chunks if config.split else 1
    num_steps = per_chunk * config.chunks // splits
    stages = form.stages(config.stages, num_steps)
    tokens = config.tokens
    x = form.arrange(x)

    def body(*refs, w_s, x_s, out_s, ready, scale_s=None, scales_ready=None, **memory):
        *inputs, out = refs
        x, w = inputs[:2]
        token_tile, row_tile, split = (lax.axis_index(name) for name in ("token", "row", "split"))
        first_row = row_tile * form.rows
        rows, here = pl.ds(first_row, form.rows), pl.ds(token_tile * tokens, tokens)
        first = split * num_steps

        def fetch(i, slot):
            stored = pl.ds((first + i) * form.width, form.width)
            fetch_tile(w.at[rows, stored], w_s.at[slot, 0], ready.at[slot])
            columns = pl.ds((first + i) * form.step, form.step)
            fetch_tile(x.at[here, columns], x_s.at[slot], ready.at[slot])

        def block_scale(i):
            if not form.in_blocks:
                return jnp.float32(TOTAL if form.staged else 1)
            column = jnp.minimum(first + i, pl.cdiv(K, BLOCK) - 1)
            return inputs[2][lax.div(first_row, BLOCK), column]

        if form.staged:
            fetch_scales(inputs[2], first_row, form.rows, scale_s.at[0], scales_ready)
        for i in range(stages):
            fetch(i, i)
        if form.staged:
            plgpu.barrier_wait(scales_ready)

        def multiply(i, slot, refill, carry):
            chunk, factor = carry
            upcoming = block_scale(i + 1)  # a step ahead: its latency hides behind this product
            plgpu.barrier_wait(ready.at[slot])
            staged = [scale_s.at[0]] if form.staged else ()
            (chunk,) = form.add_products(
                [chunk],
                [factor],
                [w_s.at[slot, 0]],
                x_s.at[slot],
                refill,
                launch.interpret,
                staged,
                first + i,
                **memory,
            )
            return chunk, upcoming

        def add_chunk(c, carry):
            total, factor = carry
            chunk, factor = each_step(
                c * per_chunk,
                per_chunk,
                num_steps,
                stages,
                fetch,
                multiply,
                (form.zeros(tokens), factor),
                fence=form.unpacked,
            )
            return total + chunk, factor

        total, _ = lax.fori_loop(
            0, config.chunks // splits, add_chunk, (form.zeros(tokens), block_scale(0))
        )
        if form.per_row:
            own = form.load_rows(inputs[2].at[:, 0], first_row, tokens, launch.interpret)
            total = total * own
        form.store_tokens_first(out.at[split, here, rows], out_s, total)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, R, N), jnp.float32),
        scratch_types=dict(
            out_s=plgpu.SMEM((tokens, form.rows), jnp.float32),
            **form.scratch(stages, 1, tokens, K),
        ),
        # The last axis is the fastest: blocks that share a tile of the weight run together.
        grid=(pl.cdiv(N, form.rows), pl.cdiv(R, tokens), splits),
        grid_names=("row", "token", "split"),
        interpret=launch.interpret,
        kernel_name="block_gemm",
    )
    return kernel(x, values) if scale is None else kernel(x, values, form.kernel_scale(scale))
