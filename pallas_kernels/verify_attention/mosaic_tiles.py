"""Row tiles and key blocks of attention in shared memory: queries in, results out, e4m3 to
bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir
from pallas_kernels.verify_attention.mosaic_plan import AttentionPlan

_WIDEN_COLUMNS = 64
# Register layout of the e4m3 conversion: a warp holds 8 rows of 16 elements, 4 per thread.
_WIDENING = plgpu.Layout.TILED(plgpu.Tiling(((32, 16), (8, 16), (4,))), (-5,), (-3, -2), -1)


def load_queries(
    plan: AttentionPlan, q_gmem, q_smem, plain_smem, ready_barrier, group_barrier, place
) -> None:
    """Loads the rows of one tile into swizzled q_smem; rows past the tile stay uninitialised.

    Args:
      q_gmem: bfloat16 [B, T, K, G, H].
      q_smem: bfloat16 [rows, H].
      plain_smem: bfloat16 [H / columns, rows, columns], in a layout that TMA writes G rows at a
        time; None if `plan.aligned`.
      ready_barrier: completed by the copies.
      group_barrier: synchronises the warpgroups.
      place: (sequence, row tile, kv head, warpgroup).
    """
    _copy_queries(plan, q_gmem, q_smem, plain_smem, ready_barrier, place)
    group, chunks = place[-1], plan.H // plan.columns
    if not plan.aligned:
        # TMA cannot write part of an 8-row swizzle tile, so the copy goes through registers.
        @pl.when(group == 0)
        def _():
            for i in range(chunks):
                columns = pl.ds(i * plan.columns, plan.columns)
                q_smem[:, columns] = plgpu.load(
                    plain_smem.at[i], layout=plgpu.Layout.WGMMA, optimized=False
                )
            plgpu.commit_smem()

        plgpu.barrier_arrive(group_barrier)
        plgpu.barrier_wait(group_barrier)


def _copy_queries(plan: AttentionPlan, q_gmem, q_smem, plain_smem, ready_barrier, place) -> None:
    """Copies the rows of one tile to q_smem if `plan.aligned`, else to plain_smem; as
    `load_queries`."""
    b, tile, kv, group = place
    chunks = plan.H // plan.columns

    @pl.when(group == 0)
    def _():
        @pl.loop(0, plan.tile_queries)
        def _(t):
            query = jnp.minimum(tile * plan.tile_queries + t, plan.T - 1)
            rows = pl.ds(t * plan.G, plan.G)
            if plan.aligned:
                plgpu.copy_gmem_to_smem(q_gmem.at[b, query, kv], q_smem.at[rows], ready_barrier)
                return
            for i in range(chunks):
                columns = pl.ds(i * plan.columns, plan.columns)
                plgpu.copy_gmem_to_smem(
                    q_gmem.at[b, query, kv, :, columns], plain_smem.at[i, rows], ready_barrier
                )

    plgpu.barrier_wait(ready_barrier)


def copy_key_block(
    plan: AttentionPlan, sources, pages_gmem, block_smem, ready_barriers, kv, share
) -> None:
    """Starts the copies of the keys and values of a key block.

    Args:
      sources: pages and keys, `Walk.sources`.
      pages_gmem: K and V, [P, Z, K, H].
      block_smem: K [key_block, H], and of each warpgroup V [key_block, columns].
      ready_barriers: of K and of V.
      kv: kv head.
      share: V has the columns of this one of `AttentionPlan.shares`.
    """
    k_pages_gmem, v_pages_gmem = pages_gmem
    k_smem, *v_groups_smem = block_smem
    k_ready_barrier, v_ready_barrier = ready_barriers
    for where, keys in sources:
        plgpu.copy_gmem_to_smem(k_pages_gmem.at[(*where, kv)], k_smem.at[keys], k_ready_barrier)
    for where, keys in sources:
        for g, v_smem in enumerate(v_groups_smem):
            columns = pl.ds((share * plan.groups + g) * plan.columns, plan.columns)
            plgpu.copy_gmem_to_smem(
                v_pages_gmem.at[(*where, kv, columns)], v_smem.at[keys], v_ready_barrier
            )


def store_result(plan: AttentionPlan, result_reg, out_gmem, out_smem, group_barrier, place) -> None:
    """Stores a finished tile through out_smem, which other warpgroups may still read, to device
    memory.

    Args:
      result_reg: bfloat16 [rows, columns] in registers.
      out_gmem: bfloat16 [B, T, K, G, H].
      out_smem: bfloat16 [rows, columns].
      group_barrier: synchronises the warpgroups.
      place: (sequence, row tile, kv head, first column of the head dim).
    """
    b, tile, kv, first_column = place
    if plan.groups > 1:
        plgpu.barrier_arrive(group_barrier)
        plgpu.barrier_wait(group_barrier)
    out_smem[...] = result_reg
    plgpu.commit_smem()

    first_query = tile * plan.tile_queries

    @pl.loop(0, jnp.minimum(plan.tile_queries, plan.T - first_query))
    def _(t):
        plgpu.copy_smem_to_gmem(
            out_smem.at[pl.ds(t * plan.G, plan.G)],
            out_gmem.at[b, first_query + t, kv, :, pl.ds(first_column, plan.columns)],
        )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_split(plan: AttentionPlan, out_reg: jax.Array, part_gmem: Any, interpret: Any) -> None:
    """Stores the rows of a tile that exist, float32 [rows, columns] in registers, to
    [tile_rows, columns]."""
    if plan.tile_rows == plan.tile.rows:
        part_gmem[...] = out_reg
        return
    if interpret is not None:
        part_gmem[...] = out_reg[: plan.tile_rows]
        return
    layout = plan.tile.layout

    # Inline MLIR: Mosaic cuts registers at multiples of the whole tile only.
    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def store(_, out, part):
        # The rows of a thread: two with wgmma's layout, in turns along its registers, and one with
        # tcgen05's.
        rows = [row for (row,) in layout.reduce(1).to_mgpu().thread_idxs(out.shape[:1])]
        columns = [column for _, column in layout.to_mgpu().thread_idxs(out.shape)]
        for i, row in enumerate(rows):
            end = mlir.constant(plan.tile_rows, row.type)
            exists = mlir.arith.cmpi(mlir.arith.CmpIPredicate.ult, row, end)
            with mlir.ir.InsertionPoint(mlir.scf.IfOp(exists).then_block):
                for j in range(i, len(columns), len(rows)):
                    mlir.vector.store(out.registers.flat[j], part, [row, columns[j]])
                mlir.scf.yield_([])

    store(out_reg, part_gmem)


def widen(raw_smem: Any, wide_smem: Any) -> None:
    """Converts e4m3 raw_smem [keys, n] to bfloat16 wide_smem [keys, n]; exact."""

    @pl.loop(0, raw_smem.shape[-1] // _WIDEN_COLUMNS)
    def _(i):
        columns = pl.ds(i * _WIDEN_COLUMNS, _WIDEN_COLUMNS)
        # There is no direct conversion from e4m3 to bfloat16.
        numbers = plgpu.load(raw_smem.at[:, columns], layout=_WIDENING, optimized=False)
        wide_smem[:, columns] = numbers.astype(jnp.float32).astype(jnp.bfloat16)

    plgpu.commit_smem()
