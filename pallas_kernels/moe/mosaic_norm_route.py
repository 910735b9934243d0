"""Norm, router and plan of a few rows in one kernel, for Hopper: one cluster of eight blocks.

It computes what three kernels compute, with the same bits: `add_rms_norm`, the router's product
(`block_gemm`) and `mosaic_plan.route_and_plan`. The first two are `mosaic_norm_product.Clusters`,
here with one cluster. Block 0 receives the logits from all, and `plan_rows` routes.

Hazard: the warpgroups of a block reduce in one scratch memory, see `mosaic_norm_product`. The
plan's reductions stay within a warp.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch
from pallas_kernels.moe import mosaic_plan, mosaic_route
from pallas_kernels.moe.mosaic_layout import Plan, Scratch, scratch_types
from pallas_kernels.moe.mosaic_norm_product import Clusters, takes
from pallas_kernels.moe.mosaic_norm_send import BLOCKS, Sizes
from pallas_kernels.moe.mosaic_plan import Results, plan_rows, prepare

MOST_ROWS = 16
"""Rows of one block of the plan, two for each block of the norm."""


def fits(R: int, E: int, D: int, dtype: jnp.dtype, top_k: int, device: Device) -> bool:
    """Whether the kernel takes R rows of D columns, and E experts.

    16 rows of 4,096 columns exceed the shared memory of a block.
    """
    is_few = R <= MOST_ROWS and mosaic_plan.fits(R, E, top_k)
    return is_few and takes(E, D, dtype, device)


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
      h plus the parts [R, D], its norm [R, D] in each of `out_dtypes`; then weights, slots, experts
      and num_items of `route_and_plan`.
    Raises:
      ValueError: the arguments exceed the limits of the kernel, or the first of `out_dtypes` is not
        bfloat16.
    """
    (R, D), E = h.shape, weight.shape[0]
    if not fits(R, E, D, h.dtype, top_k, launch.device):
        raise ValueError(f"{h.shape=} {h.dtype=} {weight.shape=} exceed the limits of this kernel")
    sizes = Sizes(R, D, 8 if R <= 8 else 16)
    plan = Plan(R, E, top_k, normalize, tokens, shared, launch.interpret is not None)
    norm = h, parts, bias, scale, weight, eps, out_dtypes
    clusters = Clusters(sizes, *norm, plan.load_shape, launch)
    num_rows = clusters.num_rows
    planned = scratch_types(plan, staged=False)
    for received in ("logits_smem", "loaded_barrier"):
        planned.pop(received)

    def body(*refs, **scratch_refs):
        """refs: the operands of `clusters`; the router's bias [E], if any; rows; the plan's
        results; `exchanged`."""
        given, refs = refs[: len(clusters.operands)], refs[len(clusters.operands) :]
        bias_gmem, made = refs[: len(biases)], refs[len(biases) :]
        rows_gmem, made = made[:num_rows], made[num_rows:]
        results_gmem, exchanged = Results(*made[:4]), made[4:]
        sender = clusters.messages_of(0, exchanged, scratch_refs)
        of_plan = {name: scratch_refs.pop(name) for name in planned}
        scratch = Scratch(**of_plan, logits_smem=sender.logits_smem)
        clusters.multiply(given, rows_gmem, sender, **scratch_refs)

        @pl.when(sender.group == 0)
        def _():
            sender.send_logits(clusters.added(sender))

        sender.finish()

        @pl.when((sender.block == 0) & (sender.group == 0))
        def _():
            prepare(plan, results_gmem, scratch)
            sender.receive_logits()
            of = plan, 0, sender.logits_smem, bias_gmem, None, items
            plan_rows(*of, results_gmem, [], scratch)

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
