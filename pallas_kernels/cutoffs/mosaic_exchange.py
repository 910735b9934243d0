"""How the thread blocks of a cluster add up numbers: each warp sends its own to the shared memory
of all blocks.

Every block has room for the numbers of all warps of its cluster, and a barrier that counts the
bytes that arrive. A warp sends (`st.async`) and waits at its block's barrier; then it reads all
numbers, one warp's a lane, and adds them. All warps of the cluster add them in the same order, so
all have the same bits. No other barrier is needed:

- Numbers go to a slot, and two slots take turns in the passes of a search. A warp sends to a slot
  again after it has waited at the other one, where each warp sends only after it has read the
  first.
- The barrier of a slot cannot complete before its block has armed it, so bytes may arrive before.
- A block whose last wait is over is sent nothing more, so it may end.

Mosaic's interpreter has no shared memory of other blocks. There the numbers go through device
memory, with the same slots and a barrier of the cluster in place of the counted bytes, so that its
race detector checks the turns of slots.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir
from pallas_kernels.dispatch import Launch
from pallas_kernels.words import asm, element, shared_address

WARPS, LANES = 4, 32
PART = plgpu.Layout.TILED(plgpu.Tiling(((1, 4, 32), (1,))), (-3,), (-2,), -1)
LAYOUT = PART.reduce(0)
"""Row s of [4, 32] lies in warp s, column c in lane c. In `PART` so do those of each [4, 32] of
[n, 4, 32]."""

_SUMS, _BYTES = 3, 16
"""Most numbers of a warp, and the bytes that it sends."""
MAXIMA, MASSES = 2, 3
"""Slots that are used once, beside 0 and 1 of the passes of a search."""
_SLOTS = 4
_NUMBERS, _BARRIERS = _SLOTS * LANES * 4, _SLOTS * 2
"""32-bit words of the slots, and of their barriers behind them."""


class ExchangeMemory(NamedTuple):
    """What a kernel needs to exchange numbers: more outputs, and scratch by the fields of
    `Exchange`."""

    out: tuple[jax.ShapeDtypeStruct, ...]
    scratch: dict[str, Any]


def memory(rows: int, blocks: int, launch: Launch) -> ExchangeMemory:
    if launch.interpret is None:
        words = plgpu.SMEM((_NUMBERS + _BARRIERS,), jnp.int32)
        return ExchangeMemory((), dict(slots_smem=words))
    numbers = jax.ShapeDtypeStruct((rows, _SLOTS, blocks, _SUMS, WARPS), jnp.float32)
    barrier = plgpu.ClusterBarrier(collective_axes=("block",))
    return ExchangeMemory((numbers,), dict(cluster_barrier=barrier))


@dataclass(frozen=True)
class Exchange:
    """The exchanges of one block of a row's cluster.

    Attributes:
      blocks: of the cluster: 2, 4 or 8.
      row, block: the indices of the block.
      slots_smem: int32, on a GPU.
      numbers_gmem: float32 [rows, slots, blocks, 3, 4], and `cluster_barrier`: in the interpreter.
    """

    blocks: int
    row: Any
    block: Any
    numbers_gmem: Any = None
    slots_smem: Any = None
    cluster_barrier: Any = None

    def begin(self) -> None:
        """Before the first exchange of the block; waits for the cluster."""
        if self.slots_smem is not None:

            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
            def begin(_, slots):
                asm(_BEGIN, "r,~{memory}", [shared_address(slots)])

            begin(self.slots_smem)

    def __call__(self, numbers: Sequence[jax.Array], slot: Any, turn: Any = 0) -> list[jax.Array]:
        """Numbers of the warps of this block, [4] each -> those of the cluster.

        Each is [4, 32], all rows equal: column 4 b + w has the number of warp w in block b. With
        fewer than eight blocks the columns repeat.

        Args:
          numbers: float32, at most three.
          turn: how often the slot was used before, modulo 2.
        """
        if self.slots_smem is None:
            return self._interpreted(numbers, slot)
        made = plgpu.ShapeDtypeStruct((WARPS, LANES), jnp.float32, layout=LAYOUT)
        scalar = plgpu.Layout.WG_SPLAT(())

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), scalar, scalar, *[LAYOUT.reduce(1)] * len(numbers)),
            return_type=[made] * len(numbers),
        )
        def exchange(_, slots, slot, turn, *numbers):
            numbers = [element(x.registers.item(), 0) for x in numbers]
            turns = (x.registers.item() for x in (slot, turn))
            return [
                _each(x) for x in _exchange(shared_address(slots), *turns, numbers, self.blocks)
            ]

        return exchange(self.slots_smem, jnp.int32(slot), jnp.int32(turn), *numbers)

    def totals(self, parts: Sequence[jax.Array], slot: Any, turn: Any = 0) -> list[jax.Array]:
        """Sums of float32 [4, 32] over the cluster: [4] each, all equal."""
        column = plgpu.broadcasted_iota(jnp.int32, (WARPS, LANES), 1, layout=LAYOUT)
        once = lambda x: jnp.where(column < WARPS * self.blocks, x, 0.0)
        numbers = self([jnp.sum(x, axis=1) for x in parts], slot, turn)
        return [jnp.sum(once(x), axis=1) for x in numbers]

    def _interpreted(self, numbers: Sequence[jax.Array], slot: Any) -> list[jax.Array]:
        sent = [*numbers, *[numbers[-1]] * (_SUMS - len(numbers))]
        self.numbers_gmem[self.row, slot, self.block] = jnp.stack(sent)
        plgpu.barrier_arrive(self.cluster_barrier)
        plgpu.barrier_wait(self.cluster_barrier)
        found = self.numbers_gmem[self.row, slot]
        repeat = lambda x: jnp.tile(x.reshape(-1), LANES // (WARPS * self.blocks))
        each = [repeat(found[:, i]) for i in range(len(numbers))]
        return [jnp.broadcast_to(x, (WARPS, LANES)) for x in each]


def _each(number: Any) -> Any:
    """Each thread's number as an array [4, 32]."""
    layout = LAYOUT.to_mgpu()
    registers = np.empty(layout.registers_shape((WARPS, LANES)), dtype=object)
    registers.fill(mlir.vector.broadcast(mlir.ir.VectorType.get((1,), number.type), number))
    return mlir.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


_BEGIN = """{
.reg .pred first;
.reg .b32 thread, barrier;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
add.u32 barrier, $0, BARRIERS;
@first mbarrier.init.shared::cta.b64 [barrier], 1;
@first mbarrier.init.shared::cta.b64 [barrier + 8], 1;
@first mbarrier.init.shared::cta.b64 [barrier + 16], 1;
@first mbarrier.init.shared::cta.b64 [barrier + 24], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;
}""".replace("BARRIERS", str(4 * _NUMBERS))

_EXCHANGE = """{
.reg .pred arms, sends, done;
.reg .b32 lane, warp, rank, numbers, barrier, entry, peer;
mov.u32 lane, %laneid;
mov.u32 warp, %tid.x;
setp.eq.u32 arms, warp, 0;
shr.u32 warp, warp, 5;
mov.u32 rank, %cluster_ctarank;
mad.lo.u32 numbers, $5, SLOT, $4;
mad.lo.u32 barrier, $5, 8, $4;
add.u32 barrier, barrier, BARRIERS;
@arms mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], EXPECTED;
setp.lt.u32 sends, lane, BLOCKS;
mad.lo.u32 entry, rank, 4, warp;
mad.lo.u32 entry, entry, BYTES, numbers;
@sends mapa.shared::cluster.u32 entry, entry, lane;
@sends mapa.shared::cluster.u32 peer, barrier, lane;
@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [entry], {$7, $8, $9, $9}, [peer];
AGAIN:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [barrier], $6;
@!done bra AGAIN;
and.b32 entry, lane, MASK;
mad.lo.u32 entry, entry, BYTES, numbers;
ld.shared::cta.v4.f32 {$0, $1, $2, $3}, [entry];
}"""  # noqa: E501


def _exchange(address: Any, slot: Any, turn: Any, numbers: list, blocks: int) -> list:
    """Lane b of a warp sends its numbers to block b. Then lane 4 b + w reads those of warp w in
    block b.

    Thread 0 arms the block's barrier: it completes when all numbers of the cluster have arrived.
    """
    sizes = dict(
        SLOT=LANES * _BYTES,
        BARRIERS=4 * _NUMBERS,
        EXPECTED=blocks * WARPS * _BYTES,
        BLOCKS=blocks,
        BYTES=_BYTES,
        MASK=blocks * WARPS - 1,
    )
    text = re.sub(r"\b[A-Z]+\b(?!:)", lambda word: str(sizes.get(word[0], word[0])), _EXCHANGE)
    sent = [*numbers, *[numbers[-1]] * (_SUMS - len(numbers))]
    number = mlir.ir.F32Type.get()
    made = mlir.llvm.StructType.get_literal([number] * 4)
    constraints = ",".join(["=f"] * 4 + ["r"] * 3 + ["f"] * _SUMS + ["~{memory}"])
    values = asm(text, constraints, [address, slot, turn, *sent], made)
    return [mlir.llvm.extractvalue(number, values, [i]) for i in range(len(numbers))]
