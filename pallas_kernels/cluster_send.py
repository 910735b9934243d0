"""What the thread blocks of a cluster send each other, straight to shared memory: PTX of Hopper.

A message is sent by `st.async` to an array of the receiving block, and is counted in bytes at a
barrier of that block, which is used once. A block arms its barriers (`arm`) before the first
barrier of the cluster, and sends after it (`wait_armed`). A block may end after it has received
everything that is sent to it.

Functions without a ref emit operations of one thread (see `mlir_compat`). An array has the same
address in the shared memory of each block of a cluster.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir
from pallas_kernels.weight_tiles.codecs import STEP
from pallas_kernels.weight_tiles.format import swizzled
from pallas_kernels.words import SCALAR, asm, constant, element, plus, shared_address, times

_COLUMNS = 64
"""Columns of 16 bits in a line of 128 bytes, the period of the swizzle."""


def barriers(count: int) -> Any:
    """Scratch of `count` barriers of 64 bits."""
    return plgpu.SMEM((2 * count,), jnp.int32)


def arm(barriers_smem: Any, counts: Sequence[Any]) -> None:
    """Barrier i of this block waits for counts[i] bytes. Then the block arrives at the barrier of
    the cluster.

    All warpgroups call it, before anything is sent. A count is a number, or a scalar int32 known at
    run time.
    """
    inits = [f"@first mbarrier.init.shared::cta.b64 [$0 + {8 * i}], 1;" for i in range(len(counts))]
    scalars = [count for count in counts if not isinstance(count, int)]
    names = (f"${1 + i}" for i in range(len(scalars)))
    sizes = [count if isinstance(count, int) else next(names) for count in counts]
    expected = [
        f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + {8 * i}], {size};"
        for i, size in enumerate(sizes)
    ]
    text = _named(_ARM, INITS="\n".join(inits), EXPECTED="\n".join(expected))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR] * len(scalars)))
    def arm_(_, barriers, *sizes):
        operands = [shared_address(barriers), *(size.registers.item() for size in sizes)]
        asm(text, ",".join(["r"] * len(operands) + ["~{memory}"]), operands)

    arm_(barriers_smem, *scalars)


def wait_armed() -> None:
    """Before the first message is sent: all blocks have armed their barriers."""

    @plgpu.inline_mgpu()
    def wait(_):
        asm("barrier.cluster.wait.acquire.aligned;", "~{memory}", [])

    wait()


def receive(barriers_smem: Any, number: int) -> None:
    """Waits until all bytes of a barrier have arrived."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_, barriers):
        asm(_WAIT, "r,~{memory}", [barrier(barriers, number)])

    wait(barriers_smem)


def send_strip(
    x_smem: Any,  # 16 bits [steps, tokens, 128], swizzled
    barriers_smem: Any,
    number: int,
    r: Any,
    column: Any,
    strip_reg: jax.Array,
    layout: Any,
    own_columns: int,
) -> None:
    """Sends columns of row r from `column` on, each thread four, to the blocks that multiply them.

    Block b multiplies columns [b * own_columns, (b + 1) * own_columns), and has row r of them in
    row r of its x_smem.
    """
    tokens = x_smem.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(x_smem.dtype)), plgpu.RefType(), SCALAR, SCALAR, layout)
    )
    def put(_, x, barriers, r, column, strip):
        r, column = r.registers.item(), column.registers.item()
        (four,) = strip.registers.flat
        column = plus(column, times(thread(), 4))
        block, column = divided(column, own_columns)
        step, column = divided(column, STEP)
        half, column = divided(column, _COLUMNS)
        piece, column = divided(column, 8)  # of 16 bytes, which the swizzle permutes
        eight, line = divided(r, 8)
        place = plus(
            times(step, tokens * STEP * 2),
            times(eight, 8 * STEP * 2),
            times(half, 8 * _COLUMNS * 2),
            times(line, _COLUMNS * 2),
            times(mlir.arith.xori(piece, line), 16),
            times(column, 2),
        )
        words = mlir.bitcast(four, mlir.ir.VectorType.get((2,), mlir.i32()))
        words = [element(words, i) for i in range(2)]
        send(plus(shared_address(x), place), barrier(barriers, number), block, words)

    put(x_smem, barriers_smem, r, column, strip_reg)


_ARM = """{
.reg .pred first;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
INITS
EXPECTED
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
}"""

_WAIT = """{
.reg .pred done;
AGAIN:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;
@!done bra AGAIN;
}"""

_SEND = """{
.reg .b32 entry, peer;
mapa.shared::cluster.u32 entry, $0, $2;
mapa.shared::cluster.u32 peer, $1, $2;
WHERE st.async.shared::cluster.mbarrier::complete_tx::bytes.SIZE [entry], VALUES, [peer];
}"""


def send(place: Any, counted_at: Any, block: Any, words: Sequence[Any], where: Any = None) -> None:
    """Sends one or two words to a place in a block, where a condition holds, counted at a barrier
    there.

    The addresses are those of the own block.
    """
    names = [f"${3 + i}" for i in range(len(words))]
    values = names[0] if len(words) == 1 else f"{{{', '.join(names)}}}"
    size = "b32" if len(words) == 1 else f"v{len(words)}.b32"
    predicate = "" if where is None else f"@${3 + len(words)}"
    text = _named(_SEND, WHERE=predicate, SIZE=size, VALUES=values)
    conditions = [] if where is None else [where]
    constraints = ["r"] * (3 + len(words)) + ["b"] * len(conditions) + ["~{memory}"]
    asm(text, ",".join(constraints), [place, counted_at, block, *words, *conditions])


def _named(text: str, **values: Any) -> str:
    """The text with the words in capitals that have a value."""
    return re.sub(r"\b[A-Z]+\b(?!:)", lambda word: str(values.get(word[0], word[0])), text)


def barrier(barriers: Any, number: int) -> Any:
    """The address of a barrier."""
    return plus(shared_address(barriers), 8 * number)


def thread() -> Any:
    """This thread's number in its warpgroup."""
    number = asm("mov.u32 $0, %tid.x;", "=r", [], mlir.i32())
    return mlir.arith.andi(number, constant(127))


def divided(x: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder."""
    return mlir.arith.divui(x, constant(by)), mlir.arith.remui(x, constant(by))


def bits(number: Any) -> Any:
    """A float32 as a word."""
    return mlir.bitcast(number, mlir.i32())
