"""GEMM kernel for linear layers: tokens times a weight [N, K], with a deterministic K-split.

The grid is (weight tiles, token tiles, K-splits), or a block for each multiprocessor that stays for
several of these units. K is divided into chunks that depend on the weight's shape only. With few
tokens each chunk is one block, which stores a partial sum (K-split). With many tokens one block
runs over all chunks and adds the same partial sums in registers, in the same order. Both give the
same bits. The next kernel adds stored partial sums while it reads them.

`weight_tiles` unpacks and multiplies, `pipeline` loads ahead; this file chooses tile sizes and
places the blocks.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats
from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK
from pallas_kernels.pipeline import make_pipeline, warpgroup_index
from pallas_kernels.weight_tiles.codecs import STEP
from pallas_kernels.weight_tiles.format import Format, fetch_scales, fetch_tile
from pallas_kernels.weight_tiles.mma import Operands
from pallas_kernels.weight_tiles.warpgroups import launch_options, tile_rows, warpgroup_part

_FEW_STEPS = 16
"""Most steps of a unit for which blocks stay for several. With 32 and more they are 8 % slower to 4
% faster on an H200."""
_COMMON_SIZES = ((1, 64), (2, 64), (1, 128), (2, 128), (2, 192))
_SIZES = {
    "plain": (*_COMMON_SIZES, (3, 128), (4, 64), (4, 128), (2, 256)),
    "scaled": (*_COMMON_SIZES, (2, 256), (3, 64), (4, 64)),
    "tiled": (*_COMMON_SIZES, (2, 256), (3, 64)),
    "unpacked": _COMMON_SIZES[:-1],
}
"""Sizes of a block on Hopper for more than 64 tokens, (warpgroups, tokens), by its operands. With
four warpgroups a thread has 128 registers: no room for unpacked weights, nor for the scales of 128
rows of x."""
_MOST_SUMS = {1: 384, 2: 384, 3: 256, 4: 128}
"""Most sums of a weight row that registers hold, by the number of warpgroups."""
_STEP_COST, _SPILL_COST = 170, 1.12
_STORE_COST, _SPLIT_COST = 2, 9
"""Constants of `TuningConfig.cost`, from 634 timings of one H200."""


@dataclass(frozen=True)
class TuningConfig:
    """Tile sizes of a product; only `chunks` affects the result's bits.

    Attributes:
      tokens: tokens of a tile; at most 64, on Hopper up to 256.
      chunks: chunks of K.
      split: K-split: one block per chunk.
      stages: preferred pipeline stages, see `Format.stages`.
      groups: preferred warpgroups per block, see `Mma.groups`; each has its own weight tile.
    """

    tokens: int
    chunks: int
    split: bool
    stages: int
    groups: int = 1

    @classmethod
    def choose(
        cls,
        R: int,
        N: int,
        K: int,
        device: Device,
        kind: formats.Kind = "plain",
        x_dtype: jnp.dtype = jnp.bfloat16,
    ) -> "TuningConfig":
        tokens = next(t for t in (8, 16, 32, 64) if t >= R or t == 64)
        if N <= 256:  # router: the next kernel is one block, which would read every split
            return cls(8 if R <= 128 else 32, 1, False, stages=8)
        form = Format.of_kind(kind, device, x_dtype)
        tiles, steps = pl.cdiv(N, form.rows), pl.cdiv(K, STEP)
        # Up to two blocks per SM: more splits would cost more in partial sums than the shorter loop
        # saves.
        per_chunk = next(
            n
            for n in range(1, steps + 1)
            if n == steps or pl.cdiv(steps, n) * tiles <= 2 * device.num_sms
        )
        chunks = pl.cdiv(steps, per_chunk)
        split = chunks > 1 and pl.cdiv(R, tokens) * tiles < device.num_sms
        is_small = (
            tokens <= 32 or form.codec.tiled
        )  # two thread blocks with four slots share a multiprocessor
        least = cls(tokens, chunks, split, stages=4 if is_small else 3)
        if R <= 64 and form.codec.tiled and chunks == 1:
            return least.in_whole_waves(R, N, K, form, device)
        if R <= 64 or form.mma.groups(2) == 1:
            return least
        # Partial sums of more tiles would take too much memory.
        few = lambda tiling: tiling.blocks(R, N, form) < 2 * device.num_sms
        return min(
            (tiling for tiling in least.alternatives(form) if few(tiling) or not tiling.split),
            key=lambda tiling: tiling.cost(R, N, K, form, device),
        )

    def alternatives(self, form: Format) -> "list[TuningConfig]":
        """Configs for more than 64 tokens on Hopper, of all sizes that fit into the register
        file."""
        codec, configs = form.codec, []
        stored = "scaled" if codec.x_scaled else "plain"
        operands = "tiled" if codec.tiled else "unpacked" if codec.unpacked else stored
        for groups, tokens in _SIZES[operands]:
            stages = 3 if tokens * groups == 64 else 4  # capped by shared memory
            for split in (False, True)[: self.chunks]:
                size = replace(self, split=split, tokens=tokens, groups=groups, stages=stages)
                if size.totals * tokens <= _MOST_SUMS[groups]:
                    configs.append(size)
        return configs

    def in_whole_waves(
        self, R: int, N: int, K: int, form: Format, device: Device
    ) -> "TuningConfig":
        """With the stages whose last wave is fullest; of equal ones the most.

        With fewer stages more blocks run at a time. A few that run alone wait for memory: with 32
        rows Llama's gate and up took 41 us in four stages, 31 in two, on an H200.
        """

        def unused(stages: int) -> float:
            resident = form.resident_blocks(stages, 1, self.tokens, K, jnp.float32, device)
            waves = self.blocks(R, N, form) / (device.num_sms * resident)
            return math.ceil(waves) / max(waves, 1)

        return replace(self, stages=min((4, 3, 2), key=unused))

    @property
    def totals(self) -> int:
        """Sums of a tile in registers: of a chunk, and a second one of all chunks."""
        return 1 if self.split or self.chunks == 1 else 2

    def blocks(self, R: int, N: int, form: Format) -> int:
        """Blocks of the grid without a K-split."""
        return pl.cdiv(N, self.groups * form.rows) * pl.cdiv(R, self.tokens)

    def cost(self, R: int, N: int, K: int, form: Format, device: Device) -> float:
        """Estimated time, in that of 64 rows of a weight times one token for a step.

        A step takes as long as the tensor cores do, and a little longer; the results of a unit are
        stored, and partial sums are read again.
        """
        codec, splits = form.codec, self.chunks if self.split else 1
        size = self.groups * self.tokens
        waves = pl.cdiv(self.blocks(R, N, form) * splits, device.num_sms)
        step = size + _STEP_COST
        if codec.unpacked and self.totals * self.tokens > 256:  # the compiler spills
            step *= _SPILL_COST
        stored = (_SPLIT_COST if self.split else _STORE_COST) * size
        return waves * (pl.cdiv(pl.cdiv(K, codec.step), splits) * step + stored)


class _Unit(NamedTuple):
    """What a block computes at a time: a tile of rows, a tile of tokens, and a split of K.

    `offset` + i is the step along K of step i of all units of the block.
    """

    first_row: jax.Array  # of this warpgroup's tile, to read and to store; see `tile_rows`
    out_row: jax.Array
    token_tile: jax.Array
    split: jax.Array
    offset: jax.Array


def _steps_of_chunk(
    n: jax.Array, c: jax.Array, chunks: int, num_steps: int
) -> tuple[jax.Array, int | jax.Array]:
    """(first, number) of the steps of chunk c of a block's n-th unit, which has `chunks`; the last
    ones may have fewer."""
    per_chunk = pl.cdiv(num_steps, chunks)
    count = per_chunk
    if num_steps < per_chunk * chunks:
        count = jnp.clip(num_steps - c * per_chunk, 0, per_chunk)
    return n * num_steps + c * per_chunk, count


@functools.partial(jax.jit, static_argnames=("config", "launch"))
def product(
    x: jax.Array,  # [R, K] in `Codec.x_dtype`
    values: jax.Array,  # [N, K], mxfp4 [N, K / 2], fp8 tiles [N / 64, K / 128, 8192]
    scale: jax.Array | None,  # see formats.kernel_refusal
    config: TuningConfig,
    launch: Launch,
    x_scale: jax.Array | None = None,  # float32 [K / 128, R'], R' >= R a multiple of 4
) -> jax.Array:
    """Partial sums float32 [parts, R, N], to be added in ascending order: 1 or `config.chunks`
    of them."""
    R, K = x.shape
    N = formats.logical_shape(values, scale)[0]
    form = Format.of(values, scale, launch.device, x.dtype)
    codec, mma = form.codec, form.mma
    per_chunk = pl.cdiv(pl.cdiv(K, codec.step), config.chunks)
    splits = config.chunks if config.split else 1
    # All splits have as many steps: TMA puts zeros into tiles past K.
    num_steps = per_chunk if config.split else pl.cdiv(K, codec.step)
    groups, tokens = mma.groups(config.groups), config.tokens
    tile_sizes = (1, tokens, K, jnp.float32, groups)
    stages = form.stages(config.stages, num_steps, form.most_stages(*tile_sizes, launch.device))
    x = codec.arrange(x)
    row_tiles, token_tiles = pl.cdiv(N, groups * form.rows), pl.cdiv(R, tokens)
    units, blocks = row_tiles * token_tiles * splits, launch.device.num_sms
    # A block of several warpgroups has a multiprocessor for itself. Where its units are short it
    # stays for several of them, and loads the next one's tiles while it stores a result. Staged
    # scales belong to one row tile.
    persistent = groups > 1 and num_steps <= _FEW_STEPS and not codec.staged and blocks < units
    # The last axis varies fastest, so blocks that share a weight tile run together and hit L2.
    each_unit = dict(row=row_tiles, token=token_tiles, split=splits)
    grid = dict(block=blocks) if persistent else each_unit

    def body(
        x_gmem,  # [R, K]
        w_gmem,  # [N, K], mxfp4 [N, K / 2], fp8 tiles [N / 64, K / 128, 512, 16]
        *refs,  # the scales of w and x, if any; out_gmem float32 [splits, R, N]
        w_smem,  # [groups * stages, 1, rows, width], or fp8 tiles [groups * stages, 1, 512, 16]
        x_smem,  # [stages, tokens, step]
        out_smem,  # [(groups,) stored tokens, rows] float32
        ready_barrier,
        x_ready_barrier=None,
        x_free_barrier=None,
        x_scale_smem=None,  # e4m3 x: [stages, tokens or more] float32
        scale_smem=None,  # mxfp4: [groups, rows * K / 32] uint8
        scales_ready_barrier=None,
        **scratch,  # of the MMA
    ):
        *scale_refs, out_gmem = refs
        x_scale_gmem = scale_refs.pop() if x_scale is not None else None
        scale_gmem = scale_refs[0] if scale_refs else None
        count = 1  # units of this block
        if persistent:
            block = lax.axis_index("block")
            count = lax.div(units - 1 - block, jnp.int32(blocks)) + 1

        def unit(n) -> _Unit:
            """The n-th unit of this block, in the order of the grid of other blocks."""
            if persistent:
                index = block + jnp.minimum(n, count - 1) * blocks
                tile, split = lax.div(index, splits), lax.rem(index, splits)
                row, token = lax.div(tile, token_tiles), lax.rem(tile, token_tiles)
            else:
                row, token, split = map(lax.axis_index, ("row", "token", "split"))
            offset = (split - n) * num_steps
            return _Unit(*tile_rows(form.rows, groups, row, N), token, split, offset)

        def ring_of(n, one: _Unit):
            """(ring, `at`, `block_scale`) for the steps of the n-th unit and those loaded ahead.

            A unit has at least `stages` steps, so these are of the next unit at most."""
            following, end = unit(n + 1), (n + 1) * num_steps

            def at(i) -> tuple[_Unit, jax.Array, jax.Array]:
                """(unit, step along K, group of 128 columns) of step i of all units of this block.

                Steps past K multiply zeros and have the last group.
                """
                of = one
                if persistent:
                    pairs = zip(one, following, strict=True)
                    of = _Unit(*(lax.select(i < end, *pair) for pair in pairs))
                step = of.offset + i
                return of, step, jnp.minimum(step, pl.cdiv(K, BLOCK) - 1)

            def fetch_weights(i, place):
                of, step, _ = at(i)
                tile_smem, barrier = w_smem.at[place, 0], ready_barrier.at[place]
                form.fetch_weight(w_gmem, of.first_row, step, tile_smem, barrier)

            def fetch_x(i, slot, x_barrier):
                (of, step, group), barrier = at(i), x_barrier.at[slot]
                rows = pl.ds(of.token_tile * tokens, tokens)
                columns = pl.ds(step * codec.step, codec.step)
                fetch_tile(x_gmem.at[rows, columns], x_smem.at[slot], barrier)
                if codec.x_scaled:
                    target_smem = x_scale_smem.at[slot, pl.ds(0, tokens)]
                    fetch_tile(x_scale_gmem.at[group, rows], target_smem, barrier)

            def block_scale(i):
                if not codec.block_scaled:
                    return jnp.float32(codec.rescale)
                of, _, group = at(i)
                return scale_gmem[lax.div(of.first_row, BLOCK), group]

            ring = make_pipeline(
                groups=groups,
                stages=stages,
                num_steps=count * num_steps,
                fetch_weights=fetch_weights,
                fetch_x=fetch_x,
                ready_barrier=ready_barrier,
                x_ready_barrier=x_ready_barrier,
                x_free_barrier=x_free_barrier,
                fenced=form.codec.read_by_threads,
            )
            return ring, at, block_scale

        scales_smem = ()
        if codec.staged:
            scales_smem = [scale_smem.at[warpgroup_index(groups)]]
            scales_ready = warpgroup_part(scales_ready_barrier, groups)
            fetch_scales(scale_gmem, unit(0).first_row, form.rows, scales_smem[0], scales_ready)
        ring, _, block_scale = ring_of(0, unit(0))
        ring.start()
        if codec.staged:
            plgpu.barrier_wait(scales_ready)

        def multiply_unit(n, factor):
            one = unit(n)
            ring, at, block_scale = ring_of(n, one)

            def multiply(i, slot, refill, carry):
                totals, factor = carry
                next_factor = block_scale(i + 1)  # one step ahead, to hide the load latency
                place = ring.wait(slot)
                tiles_smem = [w_smem.at[place, 0]]
                x_scales = x_scale_smem.at[slot, pl.ds(0, tokens)] if codec.x_scaled else None
                scales = (scales_smem, at(i)[1], x_scales)
                operands = Operands(tiles_smem, x_smem.at[slot], *scales)
                totals = form.add_products(
                    totals, [factor], operands, refill, launch.interpret, **scratch
                )
                return totals, next_factor

            def add_chunk(c, carry):
                totals, factor = carry
                start = form.zeros(1, tokens, groups), factor
                first, steps = _steps_of_chunk(n, c, config.chunks // splits, num_steps)
                partial, factor = ring.each_step(first, steps, multiply, start)
                if codec.row_scaled:  # the sum of each chunk, because a K-split scales it too
                    scales = scale_gmem.at[:, 0], one.first_row
                    partial = form.times_scales(partial, *scales, tokens, launch.interpret)
                return [total + part for total, part in zip(totals, partial, strict=True)], factor

            carry = form.zeros(1, tokens, groups), factor
            totals, factor = lax.fori_loop(0, config.chunks // splits, add_chunk, carry)

            def store():
                token_range = pl.ds(one.token_tile * tokens, tokens)
                target_gmem = out_gmem.at[one.split, token_range, pl.ds(one.out_row, form.rows)]
                form.store_tokens_first(target_gmem, warpgroup_part(out_smem, groups), totals)

            store() if groups == 1 else pl.when(one.out_row < N)(store)
            return factor

        if persistent:
            lax.fori_loop(0, count, multiply_unit, block_scale(0))
        else:
            multiply_unit(0, block_scale(0))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, R, N), jnp.float32),
        scratch_types=form.scratch(stages, *tile_sizes),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        interpret=launch.interpret,
        kernel_name="block_gemm",
        **launch_options(groups),
    )
    scales = [s for s in (form.kernel_scale(scale), x_scale) if s is not None]
    return kernel(x, form.kernel_values(values), *scales)
