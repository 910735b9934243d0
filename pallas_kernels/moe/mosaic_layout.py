"""Registers and shared memory of `mosaic_plan`: layouts of a block's rows, static facts, scratch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe.mosaic_route import ROWS, load_flat, padded_experts


class Rows(NamedTuple):
    """Register layouts of one warpgroup that holds 16 or 32 rows: 8 or 4 threads share a row.

    The wgmma layout needs 64 rows, and would leave most threads idle in a small batch.
    """

    rows: int

    @property
    def wide(self):
        """Layout of [rows, n], n a multiple of 32: a thread holds groups of four columns of its row."""
        if self.rows == 16:
            tiles = (16, 32), (4, 16), (4, 8), (4, 4)
            lanes = -2, -7, -5, -3
        else:
            tiles = (32, 16), (8, 8), (8, 4)
            lanes = -2, -5, -3
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-2 * len(tiles),), lanes, -1)

    @property
    def tall(self):
        """Layout of [8 n, rows]: a row is a column here, held by the threads that hold it in `wide`."""
        if self.rows == 16:
            tiles = (8, 16), (4, 4), (2, 4), (1,)
            return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-6,), (-2, -3, -5, -7), -1)
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 32), (2, 8), (1,))), (-4,), (-2, -3, -5), -1)

    def iota(self, columns: int, axis: int) -> jax.Array:
        shape = self.rows, columns
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.wide)

    def tall_iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.tall)

    def broadcast(self, column: jax.Array, columns: int) -> jax.Array:
        """[rows] -> [rows, columns]."""
        return lax.broadcast_in_dim(column, (self.rows, columns), (0,))

    def load_row(self, row_ref) -> jax.Array:
        """row_ref [columns], in shared or device memory -> [rows, columns], the same in each row."""
        row = plgpu.load(row_ref, layout=self.wide.reduce(0), optimized=False)
        return lax.broadcast_in_dim(row, (self.rows, *row_ref.shape), (1,))


class Own(NamedTuple):
    """The experts first .. first + count, which this device has; `first` is a scalar known at run time."""

    first: Any
    count: int

    def has(self, ids_reg: jax.Array) -> jax.Array:
        local_reg = ids_reg - self.first
        return (local_reg >= 0) & (local_reg < self.count)


class Plan(NamedTuple):
    """Static facts of one call."""

    R: int
    E: int
    top_k: int
    normalize: bool
    tokens: int
    shared: bool

    @property
    def block(self) -> Rows:
        return Rows(16 if self.R <= 128 else 32)

    @property
    def blocks(self) -> int:
        """Blocks of the grid; at most 8, the portable cluster size."""
        return 1 if self.R <= 16 else 4 if self.R <= 64 else 8

    @property
    def padded_rows(self) -> int:
        """Rows of the outputs."""
        return pl.cdiv(self.R, ROWS) * ROWS

    @property
    def columns(self) -> int:
        """Output rows that one block stores."""
        return self.padded_rows if self.blocks == 1 else self.block.rows

    @property
    def Ep(self) -> int:
        return pl.cdiv(self.E, 32) * 32

    @property
    def k8(self) -> int:
        return pl.cdiv(self.top_k, 8) * 8

    @property
    def load_shape(self) -> tuple[int, int]:
        """Logits that a block loads. Without `normalize` the denominator is summed in `route`'s layout of 64
        rows, so that both kernels give the same bits."""
        return (self.block.rows, self.Ep) if self.normalize else (ROWS, padded_experts(self.E))

    def load_flat(self, row_ref) -> jax.Array:
        return load_flat(row_ref, self.Ep)


class Scratch(NamedTuple):
    """Shared memory and barriers of a block; Ep is E padded to 32, k8 is k padded to 8."""

    logits_smem: Any  # float32 [rows, Ep], or [64, padded E] if not normalize; [1, Ep] if unused
    total_smem: Any  # float32 [64], softmax denominators
    hits_smem: Any  # int32 [rows, Ep], 1 << (row % 16) where the row chose the expert
    counts_smem: Any  # int32 [blocks, Ep], rows per expert of each block
    tiles_smem: Any  # int32 [Ep], items per expert
    ends_smem: Any  # int32 [Ep], inclusive prefix sum of the items
    packed_smem: Any  # int32 [2, Ep], first slot << 16 | mask, for each 16 rows
    ids_smem: Any  # int32 [k8, rows], chosen experts
    powers_smem: Any  # float32 [k8, rows], exp(logit - maximum)
    weights_smem: Any  # float32 [k8, columns], output tile
    slots_smem: Any  # int32 [k8, columns], output tile
    loaded_barrier: Any  # a TMA load has arrived
    cluster_barrier: Any  # all blocks have stored their counts


def scratch_types(plan: Plan, staged: bool) -> dict[str, Any]:
    """Scratch of a block, by the fields of `Scratch`."""
    rows, Ep, k8 = plan.block.rows, plan.Ep, plan.k8
    return dict(
        logits_smem=plgpu.SMEM(plan.load_shape if staged else (1, Ep), jnp.float32),
        total_smem=plgpu.SMEM((ROWS,), jnp.float32),
        hits_smem=plgpu.SMEM((rows, Ep), jnp.int32),
        counts_smem=plgpu.SMEM((plan.blocks, Ep), jnp.int32),
        tiles_smem=plgpu.SMEM((Ep,), jnp.int32),
        ends_smem=plgpu.SMEM((Ep,), jnp.int32),
        packed_smem=plgpu.SMEM((2, Ep), jnp.int32),
        ids_smem=plgpu.SMEM((k8, rows), jnp.int32),
        powers_smem=plgpu.SMEM((k8, rows), jnp.float32),
        weights_smem=plgpu.SMEM((k8, plan.columns), jnp.float32),
        slots_smem=plgpu.SMEM((k8, plan.columns), jnp.int32),
        loaded_barrier=plgpu.Barrier(),
        cluster_barrier=plgpu.ClusterBarrier(collective_axes=("block",)),
    )
