"""GEMM kernel for linear layers: tokens times a weight [N, K], with a deterministic K-split.

The grid is (weight tiles, token tiles, K-splits). K is divided into chunks that depend on the weight's shape
only. With few tokens each chunk is one block, which stores a partial sum (K-split). With many tokens one
block runs over all chunks and adds the same partial sums in registers, in the same order. Both give the
same bits. The next kernel adds stored partial sums while it reads them.

`weight_tiles` unpacks and multiplies, `pipeline` loads ahead; this file chooses tile sizes and places the
blocks.
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
from pallas_kernels.pipeline import make_pipeline, warpgroup_index
from pallas_kernels.weight_tiles.codecs import STEP
from pallas_kernels.weight_tiles.format import Format, as_e8m0, fetch_scales, fetch_tile
from pallas_kernels.weight_tiles.mma import Operands
from pallas_kernels.weight_tiles.warpgroups import launch_options, tile_rows, warpgroup_part


@dataclass(frozen=True)
class TuningConfig:
    """Tile sizes of a product; only `chunks` affects the result's bits.

    Attributes:
      tokens: tokens of a tile; at most 64, on Hopper also 128.
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
        # Up to two blocks per SM: more splits would cost more in partial sums than the shorter loop saves.
        per_chunk = next(
            n
            for n in range(1, steps + 1)
            if n == steps or pl.cdiv(steps, n) * tiles <= 2 * device.num_sms
        )
        chunks = pl.cdiv(steps, per_chunk)
        split = chunks > 1 and pl.cdiv(R, tokens) * tiles < device.num_sms
        least = cls(tokens, chunks, split, stages=4 if tokens <= 32 else 3)
        if R <= 64 or form.mma.groups(2) == 1:
            return least
        cost = lambda tiling: tiling.cost(R, N, K, form, device)
        few = lambda tiling: tiling.blocks(R, N, form) < device.num_sms
        return min(
            (tiling for tiling in least.alternatives(form) if few(tiling) or not tiling.split),
            key=cost,
        )

    def alternatives(self, form: Format) -> "list[TuningConfig]":
        """Configs for more than 64 tokens on Hopper: all block sizes that fit into the register file."""
        configs = []
        for groups, tokens in ((1, 64), (2, 64), (1, 128), (2, 128), (4, 64), (4, 128)):
            stages = 3 if tokens * groups == 64 else 4  # capped by shared memory
            for split in (False, True)[: self.chunks]:
                # Accumulators: one of a chunk, and a second one of all chunks.
                totals = 1 if split or self.chunks == 1 else 2
                # With four warpgroups a thread has 128 registers: no room for unpacked weights, nor for
                # the scales of 128 rows of x.
                fits = not form.codec.unpacked and tokens * totals <= 128
                if groups < 4 or (fits and (tokens <= 64 or not form.codec.x_scaled)):
                    size = dict(tokens=tokens, groups=groups, stages=stages)
                    configs.append(replace(self, split=split, **size))
        return configs

    def blocks(self, R: int, N: int, form: Format) -> int:
        """Blocks of the grid without a K-split."""
        return pl.cdiv(N, self.groups * form.rows) * pl.cdiv(R, self.tokens)

    def cost(self, R: int, N: int, K: int, form: Format, device: Device) -> float:
        """Estimated bytes between L2 and the busiest SM."""
        splits = self.chunks if self.split else 1
        rows = self.groups * form.rows
        blocks = self.blocks(R, N, form) * splits
        row = K * form.codec.row_bytes // form.codec.step  # bytes of one weight row
        read = (rows * row + self.tokens * K * form.codec.x_dtype.itemsize) / splits
        added = 2 * rows * self.tokens * 4  # partial sums are written once and read once
        return pl.cdiv(blocks, device.num_sms) * (read + added)


@functools.partial(jax.jit, static_argnames=("config", "launch"))
def product(
    x: jax.Array,  # [R, K] bfloat16, or e4m3 with x_scale
    values: jax.Array,  # [N, K], mxfp4 [N, K / 2]
    scale: jax.Array | None,  # see formats.kernel_refusal
    config: TuningConfig,
    launch: Launch,
    x_scale: jax.Array | None = None,  # float32 [K / 128, R'], R' >= R a multiple of 4, or mxfp8
) -> jax.Array:
    """Partial sums float32 [S, R, N], to be added in ascending order; S is 1 or `config.chunks`.

    The scales of mxfp8 rows are uint8 [ceil(R / tokens), ceil(K / 128), 32, 16] (`mxfp8.pack`).
    """
    R, K = x.shape
    N = formats.logical_shape(values, scale)[0]
    form = Format.of(values, scale, launch.device, x.dtype)
    codec, mma = form.codec, form.mma
    # Steps past K multiply zeros: TMA fills tiles outside of the array with zeros.
    per_chunk = pl.cdiv(pl.cdiv(K, codec.step), config.chunks)
    splits = config.chunks if config.split else 1
    num_steps = per_chunk * config.chunks // splits
    groups, tokens = mma.groups(config.groups), config.tokens
    tile_sizes = (1, tokens, K, jnp.float32, groups)
    stages = form.stages(config.stages, num_steps, form.most_stages(*tile_sizes, launch.device))
    x = codec.arrange(x)

    def body(
        x_gmem,  # [R, K] bfloat16 or e4m3
        w_gmem,  # [N, K], mxfp4 [N, K / 2], fp8 tiles [N / 64, K / 128, 512, 16]
        *refs,  # the scales of w and x, if any; out_gmem float32 [splits, R, N]
        w_smem,  # [groups * stages, 1, rows, width], or fp8 tiles [groups * stages, 1, 512, 16]
        x_smem,  # [stages, tokens, step] bfloat16 or e4m3
        out_smem,  # [(groups,) stored tokens, rows] float32
        ready_barrier,
        x_ready_barrier=None,
        x_free_barrier=None,
        x_scale_smem=None,  # e4m3 x: [stages, tokens or more] float32
        scale_smem=None,  # mxfp4: [groups, rows * K / 32] uint8
        scales_ready_barrier=None,
        w_scale_smem=None,  # mxfp8: [stages, 1, 1, 1, 32, 16] e8m0, and x_scale_smem [stages, 1, 1, 32, 16]
        **scratch,  # of the MMA
    ):
        *scale_refs, out_gmem = refs
        x_scale_gmem = scale_refs.pop() if x_scale is not None else None
        scale_gmem = scale_refs[0] if scale_refs else None
        token_tile, row_tile, split = (lax.axis_index(name) for name in ("token", "row", "split"))
        first_row, out_row = tile_rows(form.rows, groups, row_tile, N)
        token_range = pl.ds(token_tile * tokens, tokens)
        first_step = split * num_steps

        def group_of(i):
            """The group of 128 columns of step i; the last one for steps past K, which multiply zeros."""
            return jnp.minimum(first_step + i, pl.cdiv(K, BLOCK) - 1)

        def fetch_weights(i, place):
            form.fetch_weight(
                w_gmem, first_row, first_step + i, w_smem.at[place, 0], ready_barrier.at[place]
            )
            if codec.mma_scaled:
                source_gmem = scale_gmem.at[row_tile, group_of(i)]
                target_smem = w_scale_smem.at[place, 0, 0, 0]
                fetch_tile(source_gmem, target_smem, ready_barrier.at[place])

        def fetch_x(i, slot, barrier):
            columns = pl.ds((first_step + i) * codec.step, codec.step)
            fetch_tile(x_gmem.at[token_range, columns], x_smem.at[slot], barrier.at[slot])
            if codec.x_scaled:
                source_gmem = x_scale_gmem.at[group_of(i), token_range]
                fetch_tile(source_gmem, x_scale_smem.at[slot, pl.ds(0, tokens)], barrier.at[slot])
            if codec.mma_scaled:
                source_gmem = x_scale_gmem.at[token_tile, group_of(i)]
                fetch_tile(source_gmem, x_scale_smem.at[slot, 0, 0], barrier.at[slot])

        pipeline = make_pipeline(
            groups=groups,
            stages=stages,
            num_steps=num_steps,
            fetch_weights=fetch_weights,
            fetch_x=fetch_x,
            ready_barrier=ready_barrier,
            x_ready_barrier=x_ready_barrier,
            x_free_barrier=x_free_barrier,
            fenced=form.read_by_threads,
        )

        def block_scale(i):
            if not codec.block_scaled:
                return jnp.float32(codec.rescale)
            return scale_gmem[lax.div(first_row, BLOCK), group_of(i)]

        scales_smem = ()
        if codec.staged:
            scales_smem = [scale_smem.at[warpgroup_index(groups)]]
            scales_ready = warpgroup_part(scales_ready_barrier, groups)
            fetch_scales(scale_gmem, first_row, form.rows, scales_smem[0], scales_ready)
        pipeline.start()
        if codec.staged:
            plgpu.barrier_wait(scales_ready)

        def multiply(i, slot, refill, carry):
            totals, factor = carry
            next_factor = block_scale(i + 1)  # one step ahead, to hide the load latency
            place = pipeline.wait(slot)
            tiles_smem = [w_smem.at[place, 0]]
            x_scales, w_scales = None, ()
            if codec.x_scaled:
                x_scales = x_scale_smem.at[slot, pl.ds(0, tokens)]
            elif codec.mma_scaled:
                x_scales, w_scales = x_scale_smem.at[slot], [w_scale_smem.at[place, 0]]
            operands = Operands(
                tiles_smem, x_smem.at[slot], scales_smem, first_step + i, x_scales, w_scales,
                is_first=lax.rem(i, per_chunk) == 0,
            )  # fmt: skip
            totals = form.add_products(
                totals, [factor], operands, refill, launch.interpret, **scratch
            )
            return totals, next_factor

        def add_chunk(c, carry):
            totals, factor = carry
            start = [] if codec.mma_scaled else form.zeros(1, tokens, groups), factor
            partial, factor = pipeline.each_step(c * per_chunk, per_chunk, multiply, start)
            partial = form.summed(partial, 1, tokens, **scratch)
            return [total + part for total, part in zip(totals, partial, strict=True)], factor

        carry = form.zeros(1, tokens, groups), block_scale(0)
        totals, _ = lax.fori_loop(0, config.chunks // splits, add_chunk, carry)
        if codec.row_scaled:
            piece = tokens // len(totals)
            scales = mma.load_rows(scale_gmem.at[:, 0], first_row, piece, launch.interpret)
            totals = [total * scales for total in totals]

        def store():
            target_gmem = out_gmem.at[split, token_range, pl.ds(out_row, form.rows)]
            form.store_tokens_first(target_gmem, warpgroup_part(out_smem, groups), totals)

        store() if groups == 1 else pl.when(out_row < N)(store)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, R, N), jnp.float32),
        scratch_types=form.scratch(stages, *tile_sizes),
        # The last axis varies fastest, so blocks that share a weight tile run together and hit L2.
        grid=(pl.cdiv(N, groups * form.rows), pl.cdiv(R, tokens), splits),
        grid_names=("row", "token", "split"),
        interpret=launch.interpret,
        kernel_name="block_gemm",
        **launch_options(groups),
    )
    if codec.mma_scaled:
        x_scale = as_e8m0(x_scale)
    scales = [s for s in (form.kernel_scale(scale), x_scale) if s is not None]
    return kernel(x, form.kernel_values(values), *scales)
