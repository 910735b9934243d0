"""What the blocks of `mosaic_norm` send each other: rows, products
and logits.

Each goes straight to shared memory, to an array of the receiving block, by `st.async`, and is
counted in bytes at a barrier of that block, which is used once. A block arms its barriers before
the first cluster barrier, and sends after it. A block ends after it has received everything that is
sent to it.

    message    from                                    to
    rows       the block that norms the row            the block that multiplies these columns
    products   the block that multiplies a step        the block that adds these experts' products
    logits     the block that adds products            block 0, in `norm_and_route`

Each cluster has a tile of the rows, and sends nothing to others.

Mosaic's interpreter has no shared memory of other blocks. There the messages go through device
memory, with barriers of the cluster in place of the counted bytes, so that its race detector checks
what is read when.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cluster_send
from pallas_kernels.cluster_send import barrier, bits, divided, send, thread
from pallas_kernels.dispatch import Launch
from pallas_kernels.weight_tiles.codecs import STEP
from pallas_kernels.weight_tiles.format import swizzled
from pallas_kernels.words import SCALAR, constant, element, plus, shared_address, times

BLOCKS = 8
"""Blocks of the cluster, the portable maximum."""
TILE = 64
"""Experts of one product."""
EXPERTS = 128

_ROWS, _PRODUCTS, _LOGITS = range(3)


class Sizes(NamedTuple):
    """Static facts of one call: R rows of D columns, in products of `tokens` rows, those of one
    cluster."""

    R: int
    D: int
    tokens: int

    @property
    def tiles(self) -> int:
        """Clusters."""
        return pl.cdiv(self.R, self.tokens)

    @property
    def rows(self) -> int:
        """Rows of the first cluster, the most."""
        return min(self.R, self.tokens)

    @property
    def is_even(self) -> bool:
        """Whether all clusters have the same number of rows."""
        return self.R % self.rows == 0

    @property
    def steps(self) -> int:
        """Steps of 128 columns."""
        return self.D // STEP

    @property
    def own_steps(self) -> int:
        """Those of one block."""
        return self.steps // BLOCKS

    @property
    def experts(self) -> int:
        """Experts whose products one block adds: 16, those of one warp of a product."""
        return EXPERTS // BLOCKS

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that one block receives."""
        return self.own_steps * STEP * 2

    @property
    def received(self) -> tuple[int, int, int]:
        """Bytes of rows and products that each block of the first cluster receives, and of logits
        that block 0 does."""
        rows = self.rows * self.row_bytes
        return rows, self.steps * self.experts * self.tokens * 4, EXPERTS * self.tokens * 4

    @property
    def totals(self) -> Any:
        """Layout of logits [experts, tokens] in registers: thread i has some tokens of expert i /
        8."""
        return plgpu.Layout.WG_STRIDED((self.experts, self.tokens), self.tokens // BLOCKS)


class Memory(NamedTuple):
    """What a kernel needs for the messages: more outputs, and scratch by the fields of
    `Messages`."""

    out: tuple[jax.ShapeDtypeStruct, ...]
    scratch: dict[str, Any]


def memory(
    sizes: Sizes, logits_shape: tuple[int, int] | None, groups: int, launch: Launch
) -> Memory:
    """Without `logits_shape` no logits are sent."""
    received = dict(
        x_smem=plgpu.SMEM(
            (sizes.own_steps, sizes.tokens, STEP), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)
        ),
        products_smem=plgpu.SMEM((sizes.steps, sizes.experts, sizes.tokens), jnp.float32),
    )
    if logits_shape is not None:
        received |= dict(logits_smem=plgpu.SMEM(logits_shape, jnp.float32))
    if launch.interpret is None:
        return Memory((), received | dict(barriers_smem=cluster_send.barriers(len(received))))
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    out = (float32(sizes.tiles, sizes.steps, EXPERTS, sizes.tokens),)
    if logits_shape is not None:
        out += (float32(sizes.tokens, EXPERTS),)
    barrier = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=groups)
    return Memory(out, received | dict(cluster_barrier=barrier))


@dataclass(frozen=True)
class Messages:
    """The messages of one block.

    Attributes:
      tile, block, group: the indices of the cluster, of the block and of the warpgroup.
      x_smem: bfloat16 [own steps, tokens, 128], the columns that this block multiplies.
      products_smem: float32 [steps, experts, tokens], the products that this block adds.
      logits_smem: float32 [tokens or more, 128], received by block 0; None if no logits are sent.
      barriers_smem: int32 [2 n], a barrier of 64 bits for each of the n messages; on a GPU.
      products_gmem, logits_gmem, cluster_barrier: in the interpreter.
    """

    sizes: Sizes
    tile: Any
    block: Any
    group: Any
    products_gmem: Any = None
    logits_gmem: Any = None
    x_smem: Any = None
    products_smem: Any = None
    logits_smem: Any = None
    barriers_smem: Any = None
    cluster_barrier: Any = None

    @property
    def first_row(self) -> Any:
        """Of the cluster, a number if it is the only one."""
        return 0 if self.sizes.tiles == 1 else self.tile * self.sizes.tokens

    @property
    def _interpreted(self) -> bool:
        return self.barriers_smem is None

    def begin(self) -> None:
        """Before anything is sent: arms the barriers, and arrives at the barrier of the cluster."""
        if self._interpreted:
            return
        counts = self.sizes.received if self.logits_smem is not None else self.sizes.received[:2]
        if not self.sizes.is_even:
            rows = jnp.minimum(self.sizes.R - self.first_row, self.sizes.rows)
            counts = rows * self.sizes.row_bytes, *counts[1:]
        cluster_send.arm(self.barriers_smem, counts)

    def wait_begun(self) -> None:
        """Before the first message is sent: all blocks have armed their barriers."""
        if self._interpreted:
            return
        cluster_send.wait_armed()

    def send_row(self, r: Any, column: Any, strip_reg: jax.Array, layout: Any) -> None:
        """Sends the columns of the cluster's row r from `column` on, each thread four, to the
        blocks that multiply them.

        In the interpreter the row's result in device memory is what the blocks read.
        """
        if self._interpreted:
            return
        columns = self.sizes.own_steps * STEP
        cluster_send.send_strip(
            self.x_smem, self.barriers_smem, _ROWS, r, column, strip_reg, layout, columns
        )

    def receive_rows(self, normed_gmem: Any) -> None:
        """All rows of the cluster have arrived in x_smem, where the MMA may read them."""
        if not self._interpreted:
            self._wait(_ROWS)
            plgpu.commit_smem()  # threads have stored them, and the MMA reads them
            return
        self._meet()

        @pl.when(self.group == 0)
        def _():
            tiles = self.sizes.own_steps * (STEP // normed_gmem.shape[-1])
            columns = pl.ds(self.block * tiles, tiles)
            for i in range(self.sizes.rows):
                # A cluster with fewer rows has the last one several times.
                row = normed_gmem[jnp.minimum(self.first_row + i, self.sizes.R - 1), columns]
                self.x_smem[:, i] = row.reshape(self.sizes.own_steps, STEP)

        self._meet()

    def send_products(self, step: Any, tile: Any, product_reg: jax.Array) -> None:
        """Sends a product [64 experts, tokens] to the four blocks that add these experts, one from
        each warp."""
        if self._interpreted:
            self.products_gmem[self.tile, step, pl.ds(tile * TILE, TILE)] = product_reg
            return
        experts, tokens = self.sizes.experts, self.sizes.tokens

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR, plgpu.Layout.WGMMA)
        )
        def put(_, products, barriers, step, tile, product):
            step, tile = step.registers.item(), tile.registers.item()
            warp, lane = divided(thread(), 32)
            row, pair = divided(lane, 4)
            block = plus(times(tile, TILE // experts), warp)
            place = plus(times(step, experts * tokens), times(row, tokens), times(pair, 2))
            start = plus(shared_address(products), times(place, 4))
            # Registers [0, t, 0, 0, j, ...]: row 8 j + lane / 4 of the warp, tokens 8 t + 2 (lane %
            # 4) and the next.
            both = product.registers.reshape(tokens // 8, 2)
            for t in range(tokens // 8):
                for j in range(2):
                    words = [bits(element(both[t, j], i)) for i in range(2)]
                    place = plus(start, 4 * (8 * j * tokens + 8 * t))
                    send(place, barrier(barriers, _PRODUCTS), block, words)

        put(self.products_smem, self.barriers_smem, step, tile, product_reg)

    def receive_products(self) -> None:
        """All products have arrived in products_smem, which warpgroup 0 reads."""
        if not self._interpreted:
            self._wait(_PRODUCTS)
            return
        self._meet()

        @pl.when(self.group == 0)
        def _():
            own = pl.ds(self.block * self.sizes.experts, self.sizes.experts)
            self.products_smem[...] = self.products_gmem[self.tile, :, own]

    def send_logits(self, totals_reg: jax.Array) -> None:
        """Sends the logits [experts, tokens] of this block to block 0, from warpgroup 0."""
        experts, tokens = self.sizes.experts, self.sizes.tokens
        if self._interpreted:
            self.logits_gmem[:, pl.ds(self.block * experts, experts)] = totals_reg.T
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, self.sizes.totals))
        def put(_, logits, barriers, block, totals):
            (some,) = totals.registers.flat
            expert, token = divided(thread(), BLOCKS)
            count = tokens // BLOCKS
            place = plus(
                times(token, count * EXPERTS), times(block.registers.item(), experts), expert
            )
            start = plus(shared_address(logits), times(place, 4))
            for i in range(count):
                place = plus(start, 4 * i * EXPERTS)
                words = [bits(element(some, i))]
                send(place, barrier(barriers, _LOGITS), constant(0), words)

        put(self.logits_smem, self.barriers_smem, self.block, totals_reg)

    def receive_logits(self) -> None:
        """All logits have arrived in logits_smem, for warpgroup 0 of block 0."""
        if not self._interpreted:
            self._wait(_LOGITS)
            return
        self.logits_smem[pl.ds(0, self.sizes.tokens)] = self.logits_gmem[...]

    def finish(self) -> None:
        """In the interpreter: the logits of all blocks are stored."""
        if self._interpreted:
            self._meet()

    def _meet(self) -> None:
        plgpu.barrier_arrive(self.cluster_barrier)
        plgpu.barrier_wait(self.cluster_barrier)

    def _wait(self, message: int) -> None:
        cluster_send.receive(self.barriers_smem, message)
