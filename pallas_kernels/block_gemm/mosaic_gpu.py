"""Kernel of the weight-stationary product.

A block multiplies a tile of the weight's rows, over one chunk of K or over all of them, with a tile of tokens.
How K is cut into chunks depends on the weight's shape alone. Few tokens: each chunk is a block of its own and
leaves a partial sum. Many tokens: a block adds the same partial sums itself, in the same order. So both
give the same bits, and the consumer of several partial sums adds them as it reads them.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats
from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK
from pallas_kernels.weight_chips import formats_of
from pallas_kernels.weight_tiles import (
    STEP,
    TOTAL,
    Format,
    Ring,
    fetch_scales,
    fetch_tile,
    first_rows,
    group_of,
    launch_options,
    of_group,
)


@dataclass(frozen=True)
class TuningConfig:
    """How a product is cut into blocks; only `chunks` changes bits.

    Attributes:
      tokens: of a tile; at most 64, on Hopper 128 as well.
      chunks: of K.
      split: whether each chunk is a block of its own.
      stages: `Format.stages` wanted.
      groups: `Format.groups` wanted: warpgroups of a block, each with rows of its own.
    """

    tokens: int
    chunks: int
    split: bool
    stages: int
    groups: int = 1

    @classmethod
    def choose(
        cls, R: int, N: int, K: int, device: Device, kind: formats.Kind = "plain"
    ) -> "TuningConfig":
        tokens = next(t for t in (8, 16, 32, 64) if t >= R or t == 64)
        if N <= 256:  # a router: one block reads the result, and would wait for every part of it
            return cls(8 if R <= 128 else 32, 1, False, stages=8)
        form = formats_of(device)(kind)
        tiles, steps = pl.cdiv(N, form.rows), pl.cdiv(K, STEP)
        # Up to two blocks an SM: more partial sums would cost what shorter loops save.
        per_chunk = next(
            n
            for n in range(1, steps + 1)
            if n == steps or pl.cdiv(steps, n) * tiles <= 2 * device.num_sms
        )
        chunks = pl.cdiv(steps, per_chunk)
        split = chunks > 1 and pl.cdiv(R, tokens) * tiles < device.num_sms
        least = cls(tokens, chunks, split, stages=4 if tokens <= 32 else 3)
        if R <= 64 or form.groups(2) == 1:
            return least
        cost = lambda one: one.cost(R, N, K, form, device)
        few = lambda one: one.blocks(R, N, form) < device.num_sms
        return min((one for one in least.alternatives(form) if few(one) or not one.split), key=cost)

    def alternatives(self, form: Format) -> "list[TuningConfig]":
        """For more than 64 tokens on Hopper: blocks of all sizes that threads have registers for."""
        found = []
        for groups, tokens in ((1, 64), (2, 64), (1, 128), (2, 128), (4, 64), (4, 128)):
            stages = 3 if tokens * groups == 64 else 4  # as many as there is memory for
            for split in (False, True)[: self.chunks]:
                totals = 1 if split or self.chunks == 1 else 2  # of a chunk, and of all in a block
                # A thread of four warpgroups has 128 registers: no room for unpacked weights.
                if groups < 4 or (not form.unpacked and tokens * totals <= 128):
                    size = dict(tokens=tokens, groups=groups, stages=stages)
                    found.append(replace(self, split=split, **size))
        return found

    def blocks(self, R: int, N: int, form: Format) -> int:
        """Without a split."""
        return pl.cdiv(N, self.groups * form.rows) * pl.cdiv(R, self.tokens)

    def cost(self, R: int, N: int, K: int, form: Format, device: Device) -> float:
        """Bytes between the level 2 cache and the multiprocessor that has most to do: an estimate."""
        splits = self.chunks if self.split else 1
        rows = self.groups * form.rows
        blocks = self.blocks(R, N, form) * splits
        row = K * form.width // form.step * form.dtype.itemsize  # of the weight
        read = (rows * row + self.tokens * K * 2) / splits
        added = 2 * rows * self.tokens * 4  # results are written, and read by whoever adds them up
        return pl.cdiv(blocks, device.num_sms) * (read + added)


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
    groups, tokens = form.groups(config.groups), config.tokens
    memory = (1, tokens, K, jnp.float32, groups)
    stages = form.stages(config.stages, num_steps, form.most_stages(*memory, launch.device))
    x = form.arrange(x)

    def body(
        *refs,
        w_s,
        x_s,
        out_s,
        ready,
        x_ready=None,
        x_free=None,
        scale_s=None,
        scales_ready=None,
        **memory,
    ):
        *inputs, out = refs
        x, w = inputs[:2]
        token_tile, row_tile, split = (lax.axis_index(name) for name in ("token", "row", "split"))
        first_row, out_row = first_rows(form, groups, row_tile, N)
        rows, here = pl.ds(first_row, form.rows), pl.ds(token_tile * tokens, tokens)
        first = split * num_steps

        def fetch_weights(i, tiles, ready):
            stored = pl.ds((first + i) * form.width, form.width)
            fetch_tile(w.at[rows, stored], tiles.at[0], ready)

        def fetch_x(i, tile, ready):
            columns = pl.ds((first + i) * form.step, form.step)
            fetch_tile(x.at[here, columns], tile, ready)

        slots = w_s, x_s, ready, x_ready, x_free
        ring = Ring(form, groups, stages, num_steps, fetch_weights, fetch_x, *slots)

        def block_scale(i):
            if not form.in_blocks:
                return jnp.float32(TOTAL if form.staged else 1)
            column = jnp.minimum(first + i, pl.cdiv(K, BLOCK) - 1)
            return inputs[2][lax.div(first_row, BLOCK), column]

        if form.staged:
            staged = [scale_s.at[group_of(groups)]]
            loaded = of_group(scales_ready, groups)
            fetch_scales(inputs[2], first_row, form.rows, staged[0], loaded)
        ring.start()
        if form.staged:
            plgpu.barrier_wait(loaded)

        def multiply(i, slot, refill, carry):
            totals, factor = carry
            upcoming = block_scale(i + 1)  # a step ahead: its latency hides behind this product
            tiles, x = ring.wait(slot)
            totals = form.add_products(
                totals,
                [factor],
                [tiles.at[0]],
                x,
                refill,
                launch.interpret,
                staged if form.staged else (),
                first + i,
                **memory,
            )
            return totals, upcoming

        def add_chunk(c, carry):
            totals, factor = carry
            start = form.zeros(1, tokens, groups), factor
            chunk, factor = ring.each_step(c * per_chunk, per_chunk, multiply, start)
            return [total + one for total, one in zip(totals, chunk, strict=True)], factor

        carry = form.zeros(1, tokens, groups), block_scale(0)
        totals, _ = lax.fori_loop(0, config.chunks // splits, add_chunk, carry)
        if form.per_row:
            piece = tokens // len(totals)
            own = form.load_rows(inputs[2].at[:, 0], first_row, piece, launch.interpret)
            totals = [total * own for total in totals]

        def store():
            place = out.at[split, here, pl.ds(out_row, form.rows)]
            form.store_tokens_first(place, of_group(out_s, groups), totals)

        store() if groups == 1 else pl.when(out_row < N)(store)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, R, N), jnp.float32),
        scratch_types=form.scratch(stages, *memory),
        # The last axis is the fastest: blocks that share a tile of the weight run together.
        grid=(pl.cdiv(N, groups * form.rows), pl.cdiv(R, tokens), splits),
        grid_names=("row", "token", "split"),
        interpret=launch.interpret,
        kernel_name="block_gemm",
        **launch_options(groups),
    )
    return kernel(x, values) if scale is None else kernel(x, values, form.kernel_scale(scale))
