"""Norm, router and plan of a few rows in one kernel, for Hopper: one cluster of eight blocks.

It computes what three kernels compute, with the same bits: `add_rms_norm`, the router's product (`block_gemm`) and
`mosaic_plan.route_and_plan`. Each part is theirs: the norm of a row is `RowNorm`, a product of 128 columns is that of
`Format.add_products`, and `plan_rows` routes. A launch takes longer than a message between blocks.

    block       before the norm             norm             product, 64 experts each      sum           plan
    b = 0 .. 7  loads its 256 columns of    rows b, b + 8    of its columns, all rows,     16 experts    block 0
                the router's weight                          a warpgroup each

The sum of a logit is that of `block_gemm` with one chunk: steps of 128 columns in ascending order. With 2,048 columns a
block has two steps and so four products, one for each warpgroup.

`mosaic_norm_send` has the messages between the blocks: normed rows, products and logits.

Hazard: the warpgroups of a block reduce in one scratch memory, see `rms_norm/mosaic_gpu.py`. Two rows of a block are two
such reductions of the same kind: no warpgroup begins the second before all have arrived at the barrier of its squares,
which each does after the first. The plan's reductions stay within a warp.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activations import rounded
from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch
from pallas_kernels.moe import mosaic_norm_send, mosaic_plan, mosaic_route
from pallas_kernels.moe.mosaic_layout import Plan, Scratch, scratch_types
from pallas_kernels.moe.mosaic_norm_send import BLOCKS, EXPERTS, TILE, Messages, Sizes
from pallas_kernels.moe.mosaic_plan import Results, plan_rows, prepare
from pallas_kernels.rms_norm.mosaic_gpu import Added, RowNorm
from pallas_kernels.weight_tiles.codecs import STEP
from pallas_kernels.weight_tiles.format import Format, fetch_tile, swizzled
from pallas_kernels.weight_tiles.mma import Operands

MOST_ROWS = 16
"""Rows of one block of the plan, two for each block of the norm."""
_COLUMNS = 64
"""Columns of a tile of `RowNorm`."""


def fits(R: int, E: int, D: int, dtype: jnp.dtype, top_k: int, device: Device) -> bool:
    """Whether the kernel takes R rows of D columns, and E experts.

    The strips of a row are whole. 16 rows of 4,096 columns exceed the shared memory of a block.
    """
    is_few = R <= MOST_ROWS and mosaic_plan.fits(R, E, top_k)
    has_widths = E == EXPERTS and D in (1024, 2048) and dtype == jnp.bfloat16
    return is_few and has_widths and device.sm == 90


@functools.partial(
    jax.jit,
    static_argnames=(
        "eps",
        "top_k",
        "normalize",
        "tokens",
        "shared",
        "items",
        "launch",
        "out_dtypes",
    ),
)
def norm_and_route(
    h: jax.Array,  # [R, D] bfloat16
    parts: jax.Array,  # [S, R, D]
    bias: jax.Array | None,  # [D], added with the parts
    scale: jax.Array,  # [D]
    weight: jax.Array,  # [E, D] bfloat16, the router's
    router_bias: jax.Array | None,  # [E]
    *,
    eps: float,
    top_k: int,
    normalize: bool,
    tokens: int,
    shared: bool,
    items: int,
    launch: Launch,
    out_dtypes: tuple[jnp.dtype, ...] = (jnp.dtype(jnp.bfloat16),),
) -> tuple[jax.Array, ...]:
    """`add_rms_norm` of h and parts, then the router and `route_and_plan`.

    The router reads the norm in bfloat16, the first of `out_dtypes`.

    Returns:
      h plus the parts [R, D], its norm [R, D] in each of `out_dtypes`; then weights, slots, experts and num_items of
      `route_and_plan`.
    Raises:
      ValueError: the arguments exceed the limits of the kernel, or the first of `out_dtypes` is not bfloat16.
    """
    (R, D), E = h.shape, weight.shape[0]
    if not fits(R, E, D, h.dtype, top_k, launch.device):
        raise ValueError(f"{h.shape=} {h.dtype=} {weight.shape=} exceed the limits of this kernel")
    if out_dtypes[0] != jnp.bfloat16:
        raise ValueError(f"the router reads bfloat16 rows: {out_dtypes[0]=}")
    sizes = Sizes(R, D, 8 if R <= 8 else 16)
    plan = Plan(R, E, top_k, normalize, tokens, shared, launch.interpret is not None)
    row_norm = RowNorm(D, h.dtype, eps, None)
    form = Format.of(weight, None, launch.device)
    groups = row_norm.config.groups
    num_products = sizes.own_steps * (EXPERTS // TILE)
    each = num_products // groups  # products of a warpgroup
    messages = mosaic_norm_send.memory(sizes, plan.load_shape, groups, launch)
    squares, stored = row_norm.scratch(pl.cdiv(R, BLOCKS))
    planned = scratch_types(plan, staged=False)
    for received in ("logits_smem", "loaded_barrier"):
        planned.pop(received)

    def norm_rows(rows_gmem, sum_gmem, normed_gmem, squares_smem, stored_barrier, sender: Messages):
        """Norms the rows of this block; sends them to all."""
        block, g = sender.block, sender.group

        rows = [block + i * BLOCKS for i in range(pl.cdiv(R, BLOCKS))]
        # All rows are loaded before any is normed. A block without a row loads the last one.
        loaded = [row_norm.load(jnp.minimum(r, R - 1), R, g, *rows_gmem) for r in rows]

        def norm(i):
            r, own_smem = rows[i], squares_smem.at[pl.ds(i, 1)]
            strips = row_norm(loaded[i], g, sum_gmem.at[r], own_smem, stored_barrier)
            for n, (strip, x) in enumerate(strips):
                if i == n == 0:
                    sender.wait_begun()
                sender.send_row(r, strip.start * _COLUMNS, x.astype(h.dtype), row_norm.layout)
                for out_gmem in normed_gmem:
                    out_gmem[r, strip] = rounded(x, out_gmem.dtype)

        for i, r in enumerate(rows):
            run = functools.partial(norm, i)
            run() if (i + 1) * BLOCKS <= R else pl.when(r < R)(run)
        if R < BLOCKS:
            pl.when(block >= R)(sender.wait_begun)

    def body(
        *refs,  # leaves of h [R, tiles, 64], Added and scale; weight [E, D]; bias [E], if any; the results
        w_smem,  # [products, 64, 128] bfloat16
        ready_barrier,  # [products]
        squares_smem,
        stored_barrier,
        **scratch_refs,
    ):
        given, refs = refs[: len(leaves)], refs[len(leaves) :]
        w_gmem, *bias_gmem = refs[: 1 + (router_bias is not None)]
        made = refs[1 + len(bias_gmem) :]
        sum_gmem, *normed_gmem = made[:num_rows]
        results_gmem, exchanged = Results(*made[num_rows : num_rows + 4]), made[num_rows + 4 :]
        block, g = lax.axis_index("block"), lax.axis_index("group")
        of_messages = {name: scratch_refs.pop(name) for name in messages.scratch}
        sender = Messages(sizes, block, g, *exchanged, **of_messages)
        scratch = Scratch(**scratch_refs, logits_smem=sender.logits_smem)

        products = [_Product(g * each + i, block, sizes.own_steps) for i in range(each)]
        for one in products:
            one.fetch(w_gmem, w_smem, ready_barrier)
        sender.begin()
        rows_gmem = jax.tree.unflatten(tree, given)
        norm_rows(rows_gmem, sum_gmem, normed_gmem, squares_smem, stored_barrier, sender)

        for one in products:
            plgpu.barrier_wait(ready_barrier.at[one.number])
        sender.receive_rows(normed_gmem[0])
        for one in products:
            x_smem = sender.x_smem.at[one.own_step]
            operands = Operands([w_smem.at[one.number]], x_smem, (), one.step)
            zeros = form.zeros(1, sizes.tokens, 1)
            to = [jnp.float32(1)], operands, lambda: None, launch.interpret
            (product,) = form.add_products(zeros, *to)
            sender.send_products(one.step, one.tile, product)

        sender.receive_products()

        @pl.when(g == 0)
        def _():
            total = plgpu.layout_cast(jnp.zeros((sizes.experts, sizes.tokens)), sizes.totals)
            for step in range(sizes.steps):
                one_smem = sender.products_smem.at[step]
                total = total + plgpu.load(one_smem, layout=sizes.totals, optimized=False)
            sender.send_logits(total)

        sender.finish()

        @pl.when((block == 0) & (g == 0))
        def _():
            prepare(plan, results_gmem, scratch)
            sender.receive_logits()
            plan_rows(
                plan, 0, sender.logits_smem, bias_gmem, None, items, results_gmem, [], scratch
            )

    tiles = D // _COLUMNS
    in_tiles = lambda x: None if x is None else x.reshape(*x.shape[:-1], tiles, _COLUMNS)
    added = Added(in_tiles(parts).reshape(-1, tiles, _COLUMNS), bias=in_tiles(bias))
    leaves, tree = jax.tree.flatten((in_tiles(h), added, in_tiles(scale)))
    rows = [jax.ShapeDtypeStruct((R, tiles, _COLUMNS), dtype) for dtype in (h.dtype, *out_dtypes)]
    num_rows = len(rows)
    outputs = plgpu.kernel(
        body,
        out_type=(*rows, *mosaic_plan.results(plan, items), *messages.out),
        scratch_types=dict(
            w_smem=plgpu.SMEM(
                (num_products, TILE, STEP), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)
            ),
            ready_barrier=plgpu.Barrier(num_barriers=num_products),
            squares_smem=squares,
            stored_barrier=stored,
            **messages.scratch,
            **planned,
        ),
        cluster=(BLOCKS,),
        cluster_names=("block",),
        num_threads=groups,
        thread_name="group",
        interpret=launch.interpret,
        kernel_name="moe_norm_and_route",
    )(*leaves, weight, *mosaic_route.padded_bias(router_bias))
    return *(out.reshape(R, D) for out in outputs[:num_rows]), *outputs[num_rows : num_rows + 4]


class _Product:
    """A product of one warpgroup: 64 experts times a step of 128 columns.

    Attributes:
      number: among those of the block.
      tile: of 64 experts.
      own_step: among the steps of the block.
      step: among all.
    """

    def __init__(self, number: Any, block: Any, own_steps: int):
        tiles = EXPERTS // TILE
        self.number, self.tile = number, lax.rem(number, tiles)
        self.own_step = lax.div(number, tiles)
        self.step = block * own_steps + self.own_step

    def fetch(self, w_gmem: Any, w_smem: Any, ready_barrier: Any) -> None:
        """Starts the copy of the weight."""
        rows, columns = pl.ds(self.tile * TILE, TILE), pl.ds(self.step * STEP, STEP)
        barrier = ready_barrier.at[self.number]
        fetch_tile(w_gmem.at[rows, columns], w_smem.at[self.number], barrier)
