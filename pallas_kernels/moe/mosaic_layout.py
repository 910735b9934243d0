"""Registers and shared memory of `mosaic_plan`: layouts of a block's rows, static facts, scratch.

A block has 16 or 32 rows. Warp w has rows w, w + 4, w + 8 .. in whole: wgmma's layout needs 64
rows, and would leave most threads idle in a small batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cluster_send
from pallas_kernels.moe.paths import ROWS, Routing, padded_experts


class Own(NamedTuple):
    """The experts first .. first + count, which this device has; `first` is a scalar known at run
    time."""

    first: Any
    count: int

    def has(self, ids_reg: jax.Array) -> jax.Array:
        local_reg = ids_reg - self.first
        return (local_reg >= 0) & (local_reg < self.count)


class Plan(NamedTuple):
    """Static facts of one call. `interpreted`: it runs in Mosaic's interpreter, see
    `mosaic_lanes`."""

    R: int
    E: int
    top_k: int
    normalize: bool
    tokens: int
    shared: bool
    interpreted: bool

    @classmethod
    def of(cls, R: int, E: int, routing: Routing) -> "Plan":
        interpreted = routing.launch.interpret is not None
        rule = routing.top_k, routing.normalize, routing.tokens, routing.shared
        return cls(R, E, *rule, interpreted)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 16 if self.R <= 128 else 32

    @property
    def loaded_rows(self) -> int:
        """Rows of a block that are loaded: those that exist, if it is the only one, in fours."""
        return pl.cdiv(self.R, 4) * 4 if self.blocks == 1 else self.rows

    @property
    def wide(self):
        """Layout of [4 n, Ep]: a lane has Ep / 32 adjacent columns of row 4 i + warp in register
        i."""
        tiles = (4, self.Ep), (self.Ep // 32,)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-3,), (-2,), -1)

    @property
    def tall(self):
        """Layout of [k8, rows]: a row is a column here, and a lane has entry 8 q + lane % 8 of the
        columns 16 p + 4 (lane / 8) + warp in register [q, p]."""
        return plgpu.Layout.TILED(plgpu.Tiling(((8, 16), (8, 4), (1,))), (-2,), (-4, -3), -1)

    def tall_iota(self, axis: int) -> jax.Array:
        """The index along an axis of [k8, rows]."""
        shape = self.k8, self.rows
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.tall)

    @property
    def blocks(self) -> int:
        """Blocks of the grid; at most 8, the portable cluster size."""
        return 1 if self.R <= 16 else 4 if self.R <= 64 else 8

    @property
    def padded_rows(self) -> int:
        """Rows of the outputs."""
        return pl.cdiv(self.R, ROWS) * ROWS

    @property
    def Ep(self) -> int:
        """E padded to 32, 64 or 128, so that a lane has 1, 2 or 4 experts, which one instruction
        loads."""
        return 32 * pl.next_power_of_2(pl.cdiv(self.E, 32))

    @property
    def k8(self) -> int:
        return pl.cdiv(self.top_k, 8) * 8

    @property
    def load_shape(self) -> tuple[int, int]:
        """Logits that a block loads. Without `normalize` the denominator is summed in `route`'s
        layout of 64 rows, so that both kernels give the same bits."""
        return (self.rows, self.Ep) if self.normalize else (ROWS, padded_experts(self.E))


class Scratch(NamedTuple):
    """Shared memory and barriers of a block; Ep is E padded to 32, 64 or 128, k8 is k padded to
    8."""

    logits_smem: Any  # float32 [rows, Ep], or [64, padded E] if not normalize; [1, Ep] if unused
    total_smem: Any  # float32 [64], softmax denominators
    keys_smem: Any  # int32 [k8 * rows], keys and ids that `choose` passes from lane to lane
    ids_smem: Any  # int32 [k8 * rows]
    masks_smem: Any  # int32 [Ep], bit r is set if row r of the block chose the expert
    counts_smem: Any  # int32 [blocks, Ep], rows per expert of each block
    ends_smem: Any  # int32 [Ep], inclusive prefix sum of the items
    base_smem: Any  # int32 [Ep], first slot of the expert's rows in this block
    loaded_barrier: Any = None  # a TMA load has arrived
    cluster_barrier: Any = None  # all blocks have stored their counts, in the interpreter
    barriers_smem: Any = (
        None  # int32 [2], one barrier of 64 bits: the counts of all blocks have arrived, on a GPU
    )


def scratch_types(plan: Plan, staged: bool) -> dict[str, Any]:
    """Scratch of a block, by the fields of `Scratch`."""
    Ep = plan.Ep
    if plan.blocks == 1:
        exchanged = {}
    elif plan.interpreted:
        exchanged = dict(cluster_barrier=plgpu.ClusterBarrier(collective_axes=("block",)))
    else:
        exchanged = dict(barriers_smem=cluster_send.barriers(1))
    return dict(
        logits_smem=plgpu.SMEM(plan.load_shape if staged else (1, Ep), jnp.float32),
        total_smem=plgpu.SMEM((ROWS,), jnp.float32),
        keys_smem=plgpu.SMEM((plan.k8 * plan.rows,), jnp.int32),
        ids_smem=plgpu.SMEM((plan.k8 * plan.rows,), jnp.int32),
        masks_smem=plgpu.SMEM((Ep,), jnp.int32),
        counts_smem=plgpu.SMEM((plan.blocks, Ep), jnp.int32),
        ends_smem=plgpu.SMEM((Ep,), jnp.int32),
        base_smem=plgpu.SMEM((Ep,), jnp.int32),
        loaded_barrier=plgpu.Barrier(),
        **exchanged,
    )
