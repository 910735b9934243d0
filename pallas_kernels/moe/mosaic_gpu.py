"""Grouped GEMM kernels of a mixture of experts; only the weights of chosen experts are read.

The worklist (`worklist.Worklist`) divides the rows into items: `tokens` rows of a buffer that
belong to one expert. A block multiplies one weight tile of an expert with one item. The grid covers
the largest possible number of items; blocks past `num_items` return immediately.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats
from pallas_kernels.activations import are_quantized
from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK
from pallas_kernels.moe.paths import TuningConfig
from pallas_kernels.moe.reference import ALPHA, Experts, ExpertWeights
from pallas_kernels.moe.worklist import Worklist
from pallas_kernels.pipeline import Pipeline
from pallas_kernels.quantize.mosaic_gpu import operand, spread_operand
from pallas_kernels.weight_tiles.codecs import codec_of
from pallas_kernels.weight_tiles.format import Format, fetch_scales, fetch_tile
from pallas_kernels.weight_tiles.mma import Operands


def _activate(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    if limit is None:
        return gate / (1.0 + jnp.exp(-gate)) * up
    gate = jnp.minimum(gate, limit)
    up = jnp.minimum(jnp.maximum(up, -limit), limit)
    return (up + 1.0) * gate / (1.0 + jnp.exp(-ALPHA * gate))


def _grouped(
    x: jax.Array,
    weight: ExpertWeights,
    experts: jax.Array,
    num_items: jax.Array,
    *,
    items: int,
    parts: int,
    tokens: int,
    shared: bool,
    stages: int,
    finish,
    launch: Launch,
    name: str,
    arranged: bool = False,
    x_scale: jax.Array | None = None,
) -> jax.Array:
    """Multiplies every item with its expert's weight: bfloat16 [items * tokens, N].

    Args:
      x: [rows, K] in `Codec.arrange` order and `Codec.x_dtype`; item i reads `tokens` rows
        from i * tokens on, or from 0 if `shared`.
      weight: values [E, parts, N, K].
      experts: int32 [items or more], the expert of each item.
      num_items: int32, the number of items in entry 0.
      items: upper bound of the number of items.
      parts: weights that share x: 2 for gate and up.
      finish: epilogue; maps `parts` totals float32 [rows, tokens] to one.
      arranged: store the columns in the order that mxfp4 products expect.
      x_scale: float32 [K / 128, rows'], rows' a multiple of 4.
    """
    K = x.shape[1]
    N = formats.logical_shape(weight.values, weight.scale)[-2]
    form = Format.of(weight.values, weight.scale, launch.device, x.dtype)
    codec, mma = form.codec, form.mma
    num_steps = pl.cdiv(K, codec.step)
    tile_sizes = (parts, tokens, K, jnp.bfloat16, 1)  # one warpgroup
    stages = form.stages(stages, num_steps, form.most_stages(*tile_sizes, launch.device))
    row_tiles = pl.cdiv(N, form.rows)

    def body(
        x_gmem,  # [rows, K]
        experts_gmem,  # [items or more] int32
        num_items_gmem,  # [1 or more] int32
        # [E, parts, N, K], mxfp4 [E, parts, N, K / 2], fp8 tiles [E, parts, N / 64, K / 128, 512,
        # 16]
        w_gmem,
        *refs,  # scale, bias and scale of x, if any; out_gmem bfloat16 [items * tokens, N]
        w_smem,  # [stages, parts, rows, width], or fp8 tiles [stages, parts, 512, 16]
        x_smem,  # [stages, tokens, step]
        out_smem,  # [stored tokens, rows] bfloat16
        ready_barrier,
        x_scale_smem=None,  # e4m3 x: [stages, tokens or more] float32
        scale_smem=None,  # mxfp4: [parts, rows * K / 32] uint8
        scales_ready_barrier=None,
        **scratch,  # of the MMA
    ):
        *optional, out_gmem = refs
        scale_gmem = optional.pop(0) if weight.scale is not None else None
        bias_gmem = optional.pop(0) if weight.bias is not None else None
        x_scale_gmem = optional.pop(0) if x_scale is not None else None
        block = lax.axis_index("block")
        item, row_tile = lax.div(block, row_tiles), lax.rem(block, row_tiles)
        first_row = row_tile * form.rows
        rows = pl.ds(first_row, form.rows)

        @pl.when(item < num_items_gmem[0])
        def _():
            expert = experts_gmem[item]
            first_token = 0 if shared else item * tokens

            def fetch(i, slot):
                barrier = ready_barrier.at[slot]
                for part in range(parts):
                    tile_smem = w_smem.at[slot, part]
                    form.fetch_weight(w_gmem.at[expert, part], first_row, i, tile_smem, barrier)
                columns = pl.ds(i * codec.step, codec.step)
                token_range = pl.ds(first_token, tokens)
                fetch_tile(x_gmem.at[token_range, columns], x_smem.at[slot], barrier)
                if codec.x_scaled:
                    target_smem = x_scale_smem.at[slot, pl.ds(0, tokens)]
                    fetch_tile(x_scale_gmem.at[i, token_range], target_smem, barrier)

            pipeline = Pipeline(
                stages=stages,
                num_steps=num_steps,
                fetch=fetch,
                ready_barrier=ready_barrier,
                fenced=form.codec.read_by_threads,
            )

            def block_scales(i):
                if not codec.block_scaled:
                    return [jnp.float32(codec.rescale)] * parts
                at = (lax.div(first_row, BLOCK), jnp.minimum(i, num_steps - 1))
                return [scale_gmem[expert, part, *at] for part in range(parts)]

            scales_smem = [scale_smem.at[part] for part in range(parts)] if codec.staged else []
            for part, part_smem in enumerate(scales_smem):
                row = (expert * parts + part) * N + first_row
                fetch_scales(scale_gmem, row, form.rows, part_smem, scales_ready_barrier)
            pipeline.start()
            if codec.staged:
                plgpu.barrier_wait(scales_ready_barrier)

            def visit(i, slot, refill, carry):
                totals, factors = carry
                next_factors = block_scales(i + 1)  # one step ahead, to hide the load latency
                pipeline.wait(slot)
                tiles_smem = [w_smem.at[slot, part] for part in range(parts)]
                x_scales = x_scale_smem.at[slot, pl.ds(0, tokens)] if codec.x_scaled else None
                operands = Operands(tiles_smem, x_smem.at[slot], scales_smem, i, x_scales)
                totals = form.add_products(
                    totals, factors, operands, refill, launch.interpret, **scratch
                )
                return totals, next_factors

            carry = form.zeros(parts, tokens, 1), block_scales(0)
            totals, _ = pipeline.each_step(0, num_steps, visit, carry)
            pieces = len(totals) // parts
            load = lambda source_gmem: mma.load_rows(
                source_gmem, first_row, tokens // pieces, launch.interpret
            )
            for i in range(len(totals)):
                part = i // pieces
                if codec.row_scaled:
                    totals[i] = totals[i] * load(scale_gmem.at[expert, part, :, 0])
                if bias_gmem is not None:
                    totals[i] = totals[i] + load(bias_gmem.at[expert, part])
            form.store_tokens_first(
                out_gmem.at[pl.ds(item * tokens, tokens), rows],
                out_smem,
                [finish(*totals[piece::pieces]) for piece in range(pieces)],
                arranged=arranged,
                interpret=launch.interpret,
            )

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((items * tokens, N), jnp.bfloat16),
        scratch_types=form.scratch(stages, *tile_sizes),
        grid=(items * row_tiles,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name=name,
    )
    optional = form.kernel_scale(weight.scale), mma.pad_rows(weight.bias), x_scale
    optional = [array for array in optional if array is not None]
    values = form.kernel_values(weight.values)
    return kernel(x, experts, num_items, values, *optional)


def results(
    x: jax.Array, work: Worklist, experts: Experts, config: TuningConfig, launch: Launch
) -> jax.Array:
    """Results of all items, bfloat16 [slots, D]; slots of no row are undefined and never read.

    With `experts.first` the worklist is that of `worklist.own_items`.
    """
    weights = experts.gate_up, experts.down
    quantized = [are_quantized(experts.activations, w.values, w.scale) for w in weights]
    if config.shared:
        x, scale = operand(x, quantized[0], launch)
    else:
        size = work.items * config.tokens
        of_share = None if experts.first is None else work.num_items
        x, scale = spread_operand(
            x, work.slots, size, quantized[0], launch, of_share, config.tokens
        )
    items = work.experts, work.num_items, work.items
    arranged = formats.kind(experts.down.values, experts.down.scale) == "mxfp4"
    x = gate_up(x, experts.gate_up, *items, experts.limit, config, launch, arranged, scale)
    x, scale = operand(x, quantized[1], launch)
    return down(x, experts.down, *items, config, launch, arranged, scale)


@functools.partial(jax.jit, static_argnames=("items", "limit", "config", "launch", "arranged"))
def gate_up(
    x: jax.Array,
    weight: ExpertWeights,
    experts: jax.Array,
    num_items: jax.Array,
    items: int,
    limit: float | None,
    config: TuningConfig,
    launch: Launch,
    arranged: bool = False,
    x_scale: jax.Array | None = None,
) -> jax.Array:
    """`activation(gate(x), up(x))` of every item, bfloat16 [items * tokens, F].

    Set `arranged` if down's weight is mxfp4: F is then stored in `arrange` order.
    """
    return _grouped(
        codec_of(weight.values, weight.scale).arrange(x),
        weight,
        experts,
        num_items,
        items=items,
        parts=2,
        tokens=config.tokens,
        shared=config.shared,
        stages=config.stages[0],
        finish=lambda gate, up: _activate(gate, up, limit),
        launch=launch,
        name="moe_gate_up",
        arranged=arranged,
        x_scale=x_scale,
    )


@functools.partial(jax.jit, static_argnames=("items", "config", "launch", "arranged"))
def down(
    x: jax.Array,
    weight: ExpertWeights,
    experts: jax.Array,
    num_items: jax.Array,
    items: int,
    config: TuningConfig,
    launch: Launch,
    arranged: bool = False,
    x_scale: jax.Array | None = None,
) -> jax.Array:
    """`down(x)` of every item, bfloat16 [items * tokens, D]; `arranged` as in `gate_up`."""
    if not arranged:
        x = codec_of(weight.values, weight.scale).arrange(x)
    with_part = ExpertWeights(*(None if leaf is None else leaf[:, None] for leaf in weight))
    return _grouped(
        x,
        with_part,
        experts,
        num_items,
        items=items,
        parts=1,
        tokens=config.tokens,
        shared=False,
        stages=config.stages[1],
        finish=lambda y: y,
        launch=launch,
        name="moe_down",
        x_scale=x_scale,
    )
