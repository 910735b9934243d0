"""Kernels of a mixture of experts: grouped products that read only the experts that were chosen.

Work comes as items: `tokens` rows of a buffer that all go to one expert. A block takes a tile of one
expert's weight and one item, so an expert's weight streams from memory once and blocks of items that
do not exist return at once.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch
from pallas_kernels.formats import BLOCK
from pallas_kernels.moe.reference import ALPHA, ExpertWeights
from pallas_kernels.weight_chips import formats_of
from pallas_kernels.weight_tiles import TOTAL, Ring, fetch_scales, fetch_tile


@dataclass(frozen=True)
class TuningConfig:
    """How work is cut; no bit depends on it.

    Attributes:
      tokens: of an item, at most 64.
      shared: whether items share the rows of x.
      stages: `Format.stages` wanted of the two products.
    """

    tokens: int
    shared: bool
    stages: tuple[int, int]

    @classmethod
    def choose(cls, R: int, E: int, top_k: int) -> "TuningConfig":
        if R <= 16:  # as many tokens as an expert could have: nothing needs sorting
            return cls(8 if R <= 8 else 16, True, (2, 3))
        busy = R * top_k / E
        tokens = next((t for t in (8, 16, 32) if t >= 1.5 * busy), 64)
        if R > 64:
            return cls(tokens, False, (2, 2))
        return cls(tokens, False, {32: (4, 2), 64: (2, 2)}.get(tokens, (2, 3)))


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
) -> jax.Array:
    """`finish(products)` of every item: [items * tokens, N] in `x.dtype`.

    Args:
      x: [rows, K] bfloat16, arranged as the weight's `Format` wants it; item i takes rows i * tokens
        on, or the first ones if `shared`.
      weight: values [E, parts, N, K].
      experts: int32, of `items` and perhaps more; num_items: int32, in its first entry.
      items: the most there can be.
      parts: weights multiplied together, 2 for gate and up.
      finish: of `parts` float32 [rows, tokens] makes one.
      arranged: columns of the result are in the order in which products with mxfp4 weights take them.
    """
    K = x.shape[1]
    N = weight.values.shape[-2]
    form = formats_of(launch.device).of(weight.values, weight.scale)
    num_steps = pl.cdiv(K, form.step)
    memory = (parts, tokens, K, x.dtype, 1)  # of one warpgroup
    stages = form.stages(stages, num_steps, form.most_stages(*memory, launch.device))
    row_tiles = pl.cdiv(N, form.rows)

    def body(*refs, w_s, x_s, out_s, ready, scale_s=None, scales_ready=None, **memory):
        x, experts, num_items, w, *inputs, out = refs
        scale = inputs.pop(0) if weight.scale is not None else None
        bias = inputs.pop(0) if weight.bias is not None else None
        block = lax.axis_index("block")
        item, row_tile = lax.div(block, row_tiles), lax.rem(block, row_tiles)
        first_row = row_tile * form.rows
        rows = pl.ds(first_row, form.rows)

        @pl.when(item < num_items[0])
        def _():
            expert = experts[item]
            source = 0 if shared else item * tokens

            def fetch_weights(i, tiles, ready):
                stored = pl.ds(i * form.width, form.width)
                for part in range(parts):
                    fetch_tile(w.at[expert, part, rows, stored], tiles.at[part], ready)

            def fetch_x(i, tile, ready):
                columns = pl.ds(i * form.step, form.step)
                fetch_tile(x.at[pl.ds(source, tokens), columns], tile, ready)

            ring = Ring(form, 1, stages, num_steps, fetch_weights, fetch_x, w_s, x_s, ready)

            def block_scales(i):
                if not form.in_blocks:
                    return [jnp.float32(TOTAL if form.staged else 1)] * parts
                at = (lax.div(first_row, BLOCK), jnp.minimum(i, num_steps - 1))
                return [scale[expert, part, *at] for part in range(parts)]

            staged = [scale_s.at[part] for part in range(parts)] if form.staged else []
            for part, own in enumerate(staged):
                row = (expert * parts + part) * N + first_row
                fetch_scales(scale, row, form.rows, own, scales_ready)
            ring.start()
            if form.staged:
                plgpu.barrier_wait(scales_ready)

            def visit(i, slot, refill, carry):
                totals, factors = carry
                upcoming = block_scales(i + 1)
                tiles, x = ring.wait(slot)
                totals = form.add_products(
                    totals,
                    factors,
                    [tiles.at[part] for part in range(parts)],
                    x,
                    refill,
                    launch.interpret,
                    staged,
                    i,
                    **memory,
                )
                return totals, upcoming

            carry = form.zeros(parts, tokens, 1), block_scales(0)
            totals, _ = ring.each_step(0, num_steps, visit, carry)
            of_rows = lambda source: form.load_rows(source, first_row, tokens, launch.interpret)
            for part in range(parts):
                if form.per_row:
                    totals[part] = totals[part] * of_rows(scale.at[expert, part, :, 0])
                if bias is not None:
                    totals[part] = totals[part] + of_rows(bias.at[expert, part])
            form.store_tokens_first(
                out.at[pl.ds(item * tokens, tokens), rows],
                out_s,
                [finish(*totals)],
                arranged=arranged,
                interpret=launch.interpret,
            )

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((items * tokens, N), x.dtype),
        scratch_types=form.scratch(stages, *memory),
        grid=(items * row_tiles,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name=name,
    )
    extra = form.kernel_scale(weight.scale), form.pad_rows(weight.bias)
    return kernel(x, experts, num_items, weight.values, *(one for one in extra if one is not None))


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
) -> jax.Array:
    """`activation(gate(x), up(x))` of every item, bfloat16 [items * tokens, F].

    With `arranged` F is in the order that `down` takes with `arranged`; down's weight is mxfp4 then.
    """
    return _grouped(
        formats_of(launch.device).of(weight.values, weight.scale).arrange(x),
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
) -> jax.Array:
    """`down(x)` of every item, bfloat16 [items * tokens, D]; see `gate_up` for `arranged`."""
    if not arranged:
        x = formats_of(launch.device).of(weight.values, weight.scale).arrange(x)
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
    )
