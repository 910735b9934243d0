"""Norm and router of some rows in one kernel, for Hopper: a cluster of eight blocks for each 8 or
16 rows. Up to 16 rows are one cluster, which can also plan.

`norm_and_product` computes what two kernels compute, `add_rms_norm` and the router's product
(`block_gemm`); `norm_and_route` also what `mosaic_plan.route_and_plan` does: block 0 receives the
logits from all, and `plan_rows` routes. The bits are the same, because each part is theirs: the
norm of a row is `RowNorm`, and a product of 128 columns is that of `Format.add_products`. A launch
takes longer than a message between blocks, and the router alone has work for few blocks, each of
which would read much.

    block       before the norm            norm            product, 64 experts each   sum
    b = 0 .. 7  loads its 256 columns of   rows b, b + 8   of its columns, all rows,  16 experts
                the router's weight        of the cluster  a warpgroup each

The sum of a logit is that of `block_gemm` with one chunk: steps of 128 columns in ascending order.
With 2,048 columns a block has two steps and so four products, one for each warpgroup.

`mosaic_norm_send` has the messages between the blocks of a cluster: normed rows, products, and
logits. Clusters need nothing of each other: to plan, several clusters would have to exchange counts
of rows through device memory that is zeroed before, which takes another launch.

Hazard: the warpgroups of a block reduce in one scratch memory, see `rms_norm/mosaic_gpu.py`. Two
rows of a block are two such reductions of the same kind: no warpgroup begins the second before all
have arrived at the barrier of its squares, which each does after the first. The plan's reductions
stay within a warp.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activations import rounded
from pallas_kernels.dispatch import Launch
from pallas_kernels.moe import mosaic_lanes as lanes
from pallas_kernels.moe import mosaic_norm_send, mosaic_plan, mosaic_route
from pallas_kernels.moe.mosaic_layout import Plan, Scratch, scratch_types
from pallas_kernels.moe.mosaic_norm_send import BLOCKS, EXPERTS, TILE, Messages, Sizes
from pallas_kernels.moe.mosaic_plan import Results, plan_rows, prepare
from pallas_kernels.moe.paths import Routing
from pallas_kernels.rms_norm.mosaic_gpu import Added, RowNorm
from pallas_kernels.weight_tiles.codecs import STEP
from pallas_kernels.weight_tiles.format import Format, fetch_tile, swizzled
from pallas_kernels.weight_tiles.mma import Operands

_COLUMNS = 64
"""Columns of a tile of `RowNorm`."""


def tokens_of(R: int) -> int:
    """Rows of a cluster. Each cluster reads the whole weight, so that many rows have fewer
    clusters."""
    return 8 if R <= 64 else 16


@functools.partial(jax.jit, static_argnames=("eps", "launch", "out_dtypes"))
def norm_and_product(
    h: jax.Array,  # [R, D] bfloat16
    parts: jax.Array,  # [parts, R, D]
    bias: jax.Array | None,  # [D], added with the parts
    scale: jax.Array,  # [D]
    weight: jax.Array,  # [E, D] bfloat16, the router's
    *,
    eps: float,
    launch: Launch,
    out_dtypes: tuple[jnp.dtype, ...] = (jnp.dtype(jnp.bfloat16),),
) -> tuple[jax.Array, ...]:
    """`add_rms_norm` of h and parts, and the product of the norm with the router's weight.

    The router reads the norm in bfloat16, the first of `out_dtypes`.

    Returns:
      h plus the parts [R, D], its norm [R, D] in each of `out_dtypes`; then the logits float32
      [R, E].
    Raises:
      ValueError: the first of `out_dtypes` is not bfloat16.
    """
    (R, D), E = h.shape, weight.shape[0]
    sizes = Sizes(R, D, tokens_of(R))
    clusters = Clusters(sizes, h, parts, bias, scale, weight, eps, out_dtypes, None, launch)

    def body(*refs, **scratch_refs):  # the operands of `clusters`; rows, logits [R, E]; `exchanged`
        operands_gmem, _, rows_gmem, (logits_gmem, *exchanged) = clusters.divided(refs)
        sender = clusters.messages_of(lax.axis_index("tile"), exchanged, scratch_refs)
        clusters.multiply(operands_gmem, rows_gmem, sender, **scratch_refs)

        @pl.when(sender.group == 0)
        def _():
            store_logits(sender, clusters.added(sender), logits_gmem)

    logits = jax.ShapeDtypeStruct((R, E), jnp.float32)
    outputs = plgpu.kernel(
        body,
        out_type=(*clusters.rows, logits, *clusters.messages.out),
        scratch_types=clusters.scratch,
        # Safe: squares_smem is the only ref that threads both write and read, see
        # `rms_norm/mosaic_gpu.py`. Copies and messages, which are asynchronous, write the others
        # once, and a barrier counts them.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=(sizes.tiles,),
        grid_names=("tile",),
        cluster=(BLOCKS,),
        cluster_names=("block",),
        num_threads=clusters.groups,
        thread_name="group",
        interpret=launch.interpret,
        kernel_name="moe_norm_and_product",
    )(*clusters.operands)
    return *(out.reshape(R, D) for out in outputs[: clusters.num_rows]), outputs[clusters.num_rows]


def store_logits(sender: Messages, totals_reg: jax.Array, logits_gmem: Any) -> None:
    """Stores the logits [experts, tokens] of this block to logits_gmem [R, E], by warpgroup 0."""
    sizes, count = sender.sizes, sender.sizes.tokens // BLOCKS
    experts = sizes.experts
    if sender.barriers_smem is None:  # in the interpreter
        for i in range(sizes.tokens):

            @pl.when(sender.first_row + i < sizes.R)
            def _(i=i):
                own = pl.ds(sender.block * experts, experts)
                logits_gmem[sender.first_row + i, own] = totals_reg[:, i]

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lanes.SCALAR, lanes.SCALAR, sizes.totals))
    def put(_, logits, first, block, totals):
        words = lanes.elements(totals)
        thread = lanes.thread()
        expert = lanes.plus(
            lanes.times(lanes.scalar(block), experts), lanes.right(thread, BLOCKS.bit_length() - 1)
        )
        row = lanes.plus(lanes.scalar(first), lanes.times(lanes.bit_and(thread, BLOCKS - 1), count))
        to = lanes.global_address(logits)
        for i in range(count):
            at = lanes.plus(row, i)
            exists = None if sizes.R % sizes.tokens == 0 else lanes.less(at, sizes.R)
            place = lanes.plus(lanes.times(at, EXPERTS), expert)
            lanes.store_global(to, lanes.times(place, 4), words[i], exists)

    put(logits_gmem, jnp.int32(sender.first_row), sender.block, totals_reg)


@functools.partial(jax.jit, static_argnames=("eps", "routing", "out_dtypes"))
def norm_and_route(
    h: jax.Array,  # [R, D] bfloat16
    parts: jax.Array,  # [parts, R, D]
    bias: jax.Array | None,  # [D], added with the parts
    scale: jax.Array,  # [D]
    weight: jax.Array,  # [E, D] bfloat16, the router's
    router_bias: jax.Array | None,  # [E]
    routing: Routing,
    *,
    eps: float,
    out_dtypes: tuple[jnp.dtype, ...] = (jnp.dtype(jnp.bfloat16),),
) -> tuple[jax.Array, ...]:
    """`add_rms_norm` of h and parts, then the router and `route_and_plan`.

    The router reads the norm in bfloat16, the first of `out_dtypes`.

    Returns:
      h plus the parts [R, D], its norm [R, D] in each of `out_dtypes`; then weights, slots, experts
      and num_items of `route_and_plan`.
    Raises:
      ValueError: the first of `out_dtypes` is not bfloat16.
    """
    (R, D), E = h.shape, weight.shape[0]
    sizes = Sizes(R, D, 8 if R <= 8 else 16)
    plan, items, launch = Plan.of(R, E, routing), routing.items, routing.launch
    clusters = Clusters(
        sizes, h, parts, bias, scale, weight, eps, out_dtypes, plan.load_shape, launch
    )
    num_rows = clusters.num_rows
    planned = scratch_types(plan, staged=False)
    for received in ("logits_smem", "loaded_barrier"):
        planned.pop(received)

    def body(*refs, **scratch_refs):
        """refs: the operands of `clusters`; the router's bias [E], if any; rows; the plan's
        results; `exchanged`."""
        operands_gmem, bias_gmem, rows_gmem, others = clusters.divided(refs, len(biases))
        results_gmem, exchanged = Results(*others[:4]), others[4:]
        sender = clusters.messages_of(0, exchanged, scratch_refs)
        of_plan = {name: scratch_refs.pop(name) for name in planned}
        scratch = Scratch(**of_plan, logits_smem=sender.logits_smem)
        clusters.multiply(operands_gmem, rows_gmem, sender, **scratch_refs)

        @pl.when(sender.group == 0)
        def _():
            sender.send_logits(clusters.added(sender))

        sender.finish()

        @pl.when((sender.block == 0) & (sender.group == 0))
        def _():
            prepare(plan, results_gmem, scratch)
            sender.receive_logits()
            logits_smem = sender.logits_smem
            plan_rows(plan, 0, logits_smem, bias_gmem, None, items, results_gmem, [], scratch)

    biases = mosaic_route.padded_bias(router_bias)
    outputs = plgpu.kernel(
        body,
        out_type=(*clusters.rows, *mosaic_plan.results(plan, items), *clusters.messages.out),
        scratch_types=clusters.scratch | planned,
        cluster=(BLOCKS,),
        cluster_names=("block",),
        num_threads=clusters.groups,
        thread_name="group",
        interpret=launch.interpret,
        kernel_name="moe_norm_and_route",
    )(*clusters.operands, *biases)
    return *(out.reshape(R, D) for out in outputs[:num_rows]), *outputs[num_rows : num_rows + 4]


class Clusters:
    """What each cluster of a kernel does: norms its rows and multiplies them.

    Attributes:
      groups: warpgroups of a block.
      messages: between blocks.
      operands: of the kernel: the leaves of h [R, tiles, 64], Added and scale, then weight [E, D].
      rows: the kernel's first results [R, tiles, 64]: the sum, and its norm in each dtype.
      scratch: of a block.
    """

    def __init__(
        self,
        sizes: Sizes,
        h: jax.Array,
        parts: jax.Array,
        bias: jax.Array | None,
        scale: jax.Array,
        weight: jax.Array,
        eps: float,
        out_dtypes: tuple[jnp.dtype, ...],
        logits_shape: tuple[int, int] | None,
        launch: Launch,
    ):
        """The arguments of `norm_and_product`; `logits_shape` as in `mosaic_norm_send.memory`.

        Raises:
          ValueError: the first of `out_dtypes` is not bfloat16.
        """
        if out_dtypes[0] != jnp.bfloat16:
            raise ValueError(f"the router reads bfloat16 rows: {out_dtypes[0]=}")
        self.sizes, self.launch, self.dtype = sizes, launch, h.dtype
        self.row_norm = RowNorm(sizes.D, h.dtype, eps, None)
        self.form = Format.of(weight, None, launch.device)
        self.groups = self.row_norm.config.groups
        num_products = sizes.own_steps * (EXPERTS // TILE)
        self._each = num_products // self.groups  # products of a warpgroup
        self.messages = mosaic_norm_send.memory(sizes, logits_shape, self.groups, launch)
        squares, stored = self.row_norm.scratch(pl.cdiv(sizes.rows, BLOCKS))
        self.scratch = dict(
            w_smem=plgpu.SMEM(
                (num_products, TILE, STEP), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)
            ),
            ready_barrier=plgpu.Barrier(num_barriers=num_products),
            squares_smem=squares,
            stored_barrier=stored,
            **self.messages.scratch,
        )
        tiles = sizes.D // _COLUMNS
        in_tiles = lambda x: None if x is None else x.reshape(*x.shape[:-1], tiles, _COLUMNS)
        added = Added(in_tiles(parts).reshape(-1, tiles, _COLUMNS), bias=in_tiles(bias))
        leaves, self._tree = jax.tree.flatten((in_tiles(h), added, in_tiles(scale)))
        self.operands = *leaves, weight
        self.rows = [
            jax.ShapeDtypeStruct((sizes.R, tiles, _COLUMNS), dtype)
            for dtype in (h.dtype, *out_dtypes)
        ]

    @property
    def num_rows(self) -> int:
        """Results that are rows."""
        return len(self.rows)

    def divided(self, refs: tuple, num_others: int = 0) -> tuple[tuple, tuple, tuple, tuple]:
        """Refs of a kernel: `operands`, other operands, `rows`, and the rest."""
        first = len(self.operands)
        second = first + num_others
        third = second + self.num_rows
        return refs[:first], refs[first:second], refs[second:third], refs[third:]

    def messages_of(self, tile: Any, exchanged: Any, scratch_refs: dict[str, Any]) -> Messages:
        """The messages of this block of cluster `tile`. Takes their memory out of
        `scratch_refs`."""
        of_messages = {name: scratch_refs.pop(name) for name in self.messages.scratch}
        block, g = lax.axis_index("block"), lax.axis_index("group")
        return Messages(self.sizes, tile, block, g, *exchanged, **of_messages)

    def multiply(
        self,
        operands_gmem: Any,  # as `operands`
        stored_gmem: Any,  # as `rows`
        sender: Messages,
        *,
        w_smem: Any,  # [products, 64, 128] bfloat16
        ready_barrier: Any,  # [products]
        squares_smem: Any,
        stored_barrier: Any,
    ) -> None:
        """Stores the rows of this block. The products that it adds have then arrived."""
        (*leaves, w_gmem), (sum_gmem, *normed_gmem) = operands_gmem, stored_gmem
        firsts = [sender.group * self._each + i for i in range(self._each)]
        products = [_Product(number, sender.block, self.sizes.own_steps) for number in firsts]
        for one in products:
            one.fetch(w_gmem, w_smem, ready_barrier)
        sender.begin()
        rows_gmem = jax.tree.unflatten(self._tree, leaves)
        self._norm(rows_gmem, sum_gmem, normed_gmem, squares_smem, stored_barrier, sender)

        for one in products:
            plgpu.barrier_wait(ready_barrier.at[one.number])
        sender.receive_rows(normed_gmem[0])
        for one in products:
            x_smem = sender.x_smem.at[one.own_step]
            operands = Operands([w_smem.at[one.number]], x_smem, (), one.step)
            zeros = self.form.zeros(1, self.sizes.tokens, 1)
            (product,) = self.form.add_products(
                zeros, [jnp.float32(1)], operands, lambda: None, self.launch.interpret
            )
            sender.send_products(one.step, one.tile, product)

        sender.receive_products()

    def _norm(
        self,
        rows_gmem: tuple[Any, ...],  # h, Added and scale
        sum_gmem: Any,
        normed_gmem: list[Any],
        squares_smem: Any,
        stored_barrier: Any,
        sender: Messages,
    ) -> None:
        """Norms the rows of this block; sends them to all of the cluster."""
        sizes, block, g = self.sizes, sender.block, sender.group
        R, each = sizes.R, pl.cdiv(sizes.rows, BLOCKS)
        # Rows of the cluster, and of all.
        own = [block + i * BLOCKS for i in range(each)]
        rows = own if sizes.tiles == 1 else [r + sender.first_row for r in own]
        # All rows are loaded before any is normed. A block without a row loads the last one.
        loaded = [self.row_norm.load(jnp.minimum(r, R - 1), R, g, *rows_gmem) for r in rows]

        def norm(i):
            r, own_smem = rows[i], squares_smem.at[pl.ds(i, 1)]
            strips = self.row_norm(loaded[i], g, sum_gmem.at[r], own_smem, stored_barrier)
            for n, (strip, x) in enumerate(strips):
                if i == n == 0:
                    sender.wait_begun()
                column = strip.start * _COLUMNS
                sender.send_row(own[i], column, x.astype(self.dtype), self.row_norm.layout)
                for out_gmem in normed_gmem:
                    out_gmem[r, strip] = rounded(x, out_gmem.dtype)

        exists = [sizes.is_even and (i + 1) * BLOCKS <= sizes.rows for i in range(each)]
        for i, r in enumerate(rows):
            run = functools.partial(norm, i)
            run() if exists[i] else pl.when(r < R)(run)
        if not exists[0]:
            pl.when(rows[0] >= R)(sender.wait_begun)

    def added(self, sender: Messages) -> jax.Array:
        """The logits [experts, tokens] of this block, by warpgroup 0."""
        sizes = self.sizes
        total = plgpu.layout_cast(jnp.zeros((sizes.experts, sizes.tokens)), sizes.totals)
        for step in range(sizes.steps):
            one_smem = sender.products_smem.at[step]
            total = total + plgpu.load(one_smem, layout=sizes.totals, optimized=False)
        return total


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
