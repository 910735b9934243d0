"""Hopper kernels of a mixture of experts: grouped products that read only the experts that were chosen.

Work comes as items: `tokens` rows of a buffer that all go to one expert. A block takes 64 rows of one
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
from pallas_kernels.moe.reference import ALPHA, ExpertWeights
from pallas_kernels.weight_tiles import (
    ROWS,
    STEP,
    Format,
    activations,
    each_step,
    fetch_tile,
    store_tokens_first,
    zeros,
)


@dataclass(frozen=True)
class TuningConfig:
    """Tokens of an item; whether items share the rows of x; pipeline stages of the two products."""

    tokens: int
    shared: bool
    stages: tuple[int, int]

    @classmethod
    def choose(cls, R: int, E: int, top_k: int) -> "TuningConfig":
        if R <= 16:  # as many tokens as an expert could have: nothing needs sorting
            return cls(8 if R <= 8 else 16, True, (3, 6))
        busy = R * top_k / E
        tokens = next((t for t in (8, 16, 32) if t >= 1.5 * busy), 64)
        return cls(tokens, False, (3, 6) if tokens <= 16 else (2, 4))


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
    out_dtype: jnp.dtype,
    launch: Launch,
    name: str,
) -> jax.Array:
    """`finish(products)` of every item: [items * tokens, N] of `out_dtype`.

    Args:
      x: [rows, K] bfloat16; item i takes rows i * tokens on, or the first ones if `shared`.
      weight: values [E, parts, N, K].
      experts: int32, of `items` and perhaps more; num_items: int32, in its first entry.
      items: the most there can be.
      parts: weights multiplied together, 2 for gate and up.
      finish: of `parts` float32 [ROWS, tokens] makes one.
    """
    K = x.shape[1]
    N = weight.values.shape[-2]
    form = Format.of(weight.values, weight.scale)
    num_steps = pl.cdiv(K, STEP)
    stages = min(stages, num_steps)
    row_tiles = pl.cdiv(N, ROWS)

    def body(*refs, w_s, x_s, out_s, ready):
        x, experts, num_items, w, *inputs, out = refs
        scale = inputs.pop(0) if weight.scale is not None else None
        bias = inputs.pop(0) if weight.bias is not None else None
        block = lax.axis_index("block")
        item, row_tile = lax.div(block, row_tiles), lax.rem(block, row_tiles)
        rows = pl.ds(row_tile * ROWS, ROWS)

        @pl.when(item < num_items[0])
        def _():
            expert = experts[item]
            source = 0 if shared else item * tokens

            def fetch(i, slot):
                columns = pl.ds(i * STEP, STEP)
                for part in range(parts):
                    fetch_tile(
                        w.at[expert, part, rows, columns], w_s.at[slot, part], ready.at[slot]
                    )
                fetch_tile(x.at[pl.ds(source, tokens), columns], x_s.at[slot], ready.at[slot])

            def block_scales(i):
                if scale is None:
                    return [jnp.float32(1)] * parts
                at = (lax.div(row_tile * ROWS, STEP), jnp.minimum(i, num_steps - 1))
                return [scale[expert, part, *at] for part in range(parts)]

            for i in range(stages):
                fetch(i, i)

            def visit(i, slot, carry):
                totals, factors = carry
                upcoming = block_scales(i + 1)
                plgpu.barrier_wait(ready.at[slot])
                tiles = [w_s.at[slot, part] for part in range(parts)]
                new = form.products(tiles, x_s.at[slot], tokens, launch.interpret)
                if scale is not None:
                    new = [p * factor for p, factor in zip(new, factors, strict=True)]
                return [t + p for t, p in zip(totals, new, strict=True)], upcoming

            carry = [zeros(tokens)] * parts, block_scales(0)
            totals, _ = each_step(
                0, num_steps, num_steps, stages, fetch, visit, carry, fence=form.unpacked
            )
            if bias is not None:
                for part in range(parts):
                    one = plgpu.load(
                        bias.at[expert, part, rows], layout=plgpu.Layout.WGMMA.reduce(1)
                    )
                    wide = lax.broadcast_in_dim(one.astype(jnp.float32), (ROWS, tokens), (0,))
                    totals[part] = totals[part] + wide
            here = out.at[pl.ds(item * tokens, tokens), rows]
            store_tokens_first(here, out_s, finish(*totals))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((items * tokens, N), out_dtype),
        scratch_types=dict(
            w_s=form.buffer(stages, parts),
            x_s=activations(stages, tokens),
            out_s=plgpu.SMEM((tokens, ROWS), out_dtype),
            ready=plgpu.Barrier(num_arrivals=parts + 1, num_barriers=stages),
        ),
        grid=(items * row_tiles,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name=name,
    )
    extra = [a for a in (weight.scale, weight.bias) if a is not None]
    return kernel(x, experts, num_items, weight.values, *extra)


@functools.partial(jax.jit, static_argnames=("items", "limit", "config", "launch"))
def gate_up(
    x: jax.Array,
    weight: ExpertWeights,
    experts: jax.Array,
    num_items: jax.Array,
    items: int,
    limit: float | None,
    config: TuningConfig,
    launch: Launch,
) -> jax.Array:
    """`activation(gate(x), up(x))` of every item, bfloat16 [items * tokens, F]."""
    return _grouped(
        x,
        weight,
        experts,
        num_items,
        items=items,
        parts=2,
        tokens=config.tokens,
        shared=config.shared,
        stages=config.stages[0],
        finish=lambda gate, up: _activate(gate, up, limit),
        out_dtype=jnp.bfloat16,
        launch=launch,
        name="moe_gate_up",
    )


@functools.partial(jax.jit, static_argnames=("items", "config", "launch"))
def down(
    x: jax.Array,
    weight: ExpertWeights,
    experts: jax.Array,
    num_items: jax.Array,
    items: int,
    config: TuningConfig,
    launch: Launch,
) -> jax.Array:
    """`down(x)` of every item, float32 [items * tokens, D]."""
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
        out_dtype=jnp.float32,
        launch=launch,
        name="moe_down",
    )
