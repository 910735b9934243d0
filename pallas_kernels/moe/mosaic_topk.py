"""Stage 1 of `mosaic_plan`: the top-k experts of a block's rows and their softmax weights, in registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe.mosaic_layout import Plan
from pallas_kernels.moe.mosaic_route import padded_experts, replace_not_finite, sum_pairwise


def load_logits(plan: Plan, source_ref: Any, bias_gmem: list[Any]) -> jax.Array:
    """The logits plus bias of a block's rows, float32 [rows, Ep] in registers; -inf past E.

    source_ref is float32 [rows or more, Ep or more] in shared or device memory; bias_gmem has [Ep], if any.
    """
    block, E = plan.block, plan.E
    columns = pl.ds(0, plan.Ep)
    part_ref = source_ref.at[pl.ds(0, block.rows), columns]
    x = plgpu.load(part_ref, layout=block.wide, optimized=False)
    if bias_gmem:
        x = x + block.load_row(bias_gmem[0].at[columns]).astype(jnp.float32)
    x = replace_not_finite(x)
    return x if x.shape[1] == E else jnp.where(block.iota(x.shape[1], 1) < E, x, -jnp.inf)


def choose(plan: Plan, logits_reg: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Top k of logits_reg, float32 [rows, Ep]; ties go to the lower id.

    Returns, in registers: the logits with -inf at chosen experts, float32 [rows, Ep]; the chosen logits,
    float32 [k8, rows]; and their ids, int32 [k8, rows].

    Nothing is stored to shared memory in the loop, because each store costs two barriers.
    """
    block, padded = plan.block, padded_experts(plan.E)
    shape = plan.k8, block.rows
    columns = logits_reg.shape[1]
    from_end = padded - block.iota(columns, 1)
    j = block.tall_iota(shape, 0)
    spread = lambda column: lax.broadcast_in_dim(column, shape, (1,))

    def choose(i, carry):
        x, values, ids = carry
        best = jnp.max(x, axis=1)
        ties = jnp.where(x == block.broadcast(best, columns), from_end, 0)
        last = jnp.max(ties, axis=1)
        values = jnp.where(j == i, spread(best), values)
        ids = jnp.where(j == i, spread(padded - last), ids)
        return jnp.where(from_end == block.broadcast(last, columns), -jnp.inf, x), values, ids

    initial = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    return lax.fori_loop(0, plan.top_k, choose, (logits_reg, *initial))


def softmax(plan: Plan, values_reg: jax.Array, total_smem: Any, powers_smem: Any) -> jax.Array:
    """Weights float32 [k8, rows] in registers of the chosen logits values_reg [k8, rows].

    The denominator is total_smem float32 [64], or the sum of the chosen ones if None. powers_smem is
    float32 [k8, rows].
    """
    block = plan.block
    spread = lambda column: lax.broadcast_in_dim(column, values_reg.shape, (1,))
    load = lambda row_smem: plgpu.load(row_smem, layout=block.tall.reduce(0), optimized=False)
    powers = jnp.exp(values_reg - spread(jnp.max(values_reg, axis=0)))
    if total_smem is None:  # summed in the order of the reference
        powers_smem[...] = powers
        total = sum_pairwise([load(powers_smem.at[i]) for i in range(plan.top_k)])
    else:
        total = load(total_smem.at[pl.ds(0, block.rows)])
    # The barrier stops the interpreter's compiler from multiplying by the inverse instead.
    return powers / lax.optimization_barrier(spread(total))
