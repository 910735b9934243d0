"""Operations of one lane on words of 32 bits, for work that arrays of a warpgroup express badly.

An array of Mosaic has no element at a computed place, no prefix sum, and no maximum in one
instruction. The functions here emit operations of one thread (see `mlir_compat`), inside a function
of `plgpu.inline_mgpu`. A word is an int32; a condition is an i1. Addresses of shared memory have 32
bits.

Hazards: `largest`, `lanes_where`, `of_lane`, `add_lane_below` and `sync_warp` need all 32 lanes of
a warp, and `sync_warpgroup` and `or_at` all threads of the warpgroup, so none may be in a branch
that some of them take. No other function waits for threads.

Mosaic's interpreter has no lanes: callers give it the same result in jnp. `tests/kernels/lanes.py`
has each of these operations in numpy, for 32 lanes at a time, and runs the kernels' lane code with
them. The PTX here runs on a GPU only.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir
from pallas_kernels import words
from pallas_kernels.cluster_send import bits
from pallas_kernels.words import asm

SCALAR, word, plus, times = words.SCALAR, words.word, words.plus, words.times
address, global_address = words.shared_address, words.global_address
LOWEST = -(2**31)
"""The smallest word."""
_ALL = "0xffffffff"
_PREDICATE = mlir.arith.CmpIPredicate


def minus(x: Any, y: Any) -> Any:
    return mlir.arith.subi(word(x), word(y))


def divided(x: Any, by: int) -> Any:
    """x / by rounded down, of x >= 0."""
    return mlir.arith.divui(x, word(by))


def bit_and(x: Any, y: Any) -> Any:
    """Bits that are set in both words, or whether both conditions are true."""
    return mlir.arith.andi(x, word(y))


def bit_or(x: Any, y: Any) -> Any:
    return mlir.arith.ori(x, word(y))


def bit_xor(x: Any, y: Any) -> Any:
    """Bits that differ."""
    return mlir.arith.xori(x, word(y))


def left(x: Any, n: Any) -> Any:
    """x << n, n < 32."""
    return mlir.arith.shli(word(x), word(n))


def right(x: Any, n: int) -> Any:
    """x >> n with copies of the sign."""
    return mlir.arith.shrsi(x, word(n))


def larger(x: Any, y: Any) -> Any:
    return mlir.arith.maxsi(x, word(y))


def smaller(x: Any, y: Any) -> Any:
    return mlir.arith.minsi(x, word(y))


def equal(x: Any, y: Any) -> Any:
    return mlir.arith.cmpi(_PREDICATE.eq, x, word(y))


def less(x: Any, y: Any) -> Any:
    return mlir.arith.cmpi(_PREDICATE.slt, word(x), word(y))


def select(condition: Any, x: Any, y: Any) -> Any:
    return mlir.arith.select(condition, word(x), word(y))


def _pure(text: str, constraints: str, operands: list) -> Any:
    """A word by PTX that only computes, which the compiler may move and share."""
    return mlir.llvm.inline_asm(mlir.i32(), operands, text, constraints)


def popcount(x: Any) -> Any:
    """Number of set bits."""
    return _pure("popc.b32 $0, $1;", "=r,r", [x])


def thread() -> Any:
    """This thread's number in its warpgroup."""
    return bit_and(_pure("mov.u32 $0, %tid.x;", "=r", []), 127)


def largest(x: Any) -> Any:
    """The largest word of the warp, in one instruction."""
    return asm(f"redux.sync.max.s32 $0, $1, {_ALL};", "=r,r", [x], mlir.i32())


def lanes_where(condition: Any) -> Any:
    """Bit l is set if the condition holds in lane l."""
    return asm(f"vote.sync.ballot.b32 $0, $1, {_ALL};", "=r,b", [condition], mlir.i32())


def of_lane(x: Any, lane: Any) -> Any:
    """The word x of another lane."""
    text = f"shfl.sync.idx.b32 $0, $1, $2, 31, {_ALL};"
    return asm(text, "=r,r,r", [x, word(lane)], mlir.i32())


def add_lane_below(x: Any, distance: int) -> Any:
    """x plus the x of the lane that is `distance` below, if there is one."""
    text = f"""{{
.reg .b32 other;
.reg .pred exists;
shfl.sync.up.b32 other|exists, $1, {distance}, 0, {_ALL};
@!exists mov.b32 other, 0;
add.s32 $0, $1, other;
}}"""
    return asm(text, "=r,r", [x], mlir.i32())


def sync_warp() -> None:
    """Lanes of a warp wait for each other, and see what each has stored."""
    asm(f"bar.warp.sync {_ALL};", "~{memory}", [])


def sync_warpgroup() -> None:
    """The warpgroup's threads wait for each other, and see what each has stored."""
    mlir.warpgroup_barrier()


def load(place: Any, count: int = 1) -> list:
    """`count` words of shared memory from an address on, which is a multiple of 4 * count if that
    is a power of two."""
    wide = next(n for n in (4, 2, 1) if count % n == 0)
    loaded = []
    for first in range(0, count, wide):
        if wide == 1:
            text = f"ld.shared.b32 $0, [$1 + {4 * first}];"
            loaded.append(asm(text, "=r,r,~{memory}", [place], mlir.i32()))
            continue
        names = ", ".join(f"${i}" for i in range(wide))
        text = f"ld.shared.v{wide}.b32 {{{names}}}, [${wide} + {4 * first}];"
        struct = mlir.llvm.StructType.get_literal([mlir.i32()] * wide)
        struct = asm(text, ",".join(["=r"] * wide + ["r", "~{memory}"]), [place], struct)
        loaded += [mlir.llvm.extractvalue(mlir.i32(), struct, [i]) for i in range(wide)]
    return loaded


def store(place: Any, x: Any, where: Any = None) -> None:
    """Stores a word to shared memory, where a condition holds."""
    _stored("st.shared.b32", "r", place, x, where)


def store_words(place: Any, found: list) -> None:
    """Stores words to shared memory from an address on, as `load` reads them."""
    wide = next(n for n in (4, 2, 1) if len(found) % n == 0)
    for first in range(0, len(found), wide):
        to = plus(place, 4 * first)
        if wide == 1:
            store(to, found[first])
            continue
        names = ", ".join(f"${1 + i}" for i in range(wide))
        text = f"st.shared.v{wide}.b32 [$0], {{{names}}};"
        constraints = ",".join(["r"] * (1 + wide) + ["~{memory}"])
        asm(text, constraints, [to, *found[first : first + wide]])


def store_global(place: Any, offset: Any, x: Any, where: Any = None) -> None:
    """Stores a word to device memory, `offset` bytes behind an address."""
    _stored("st.global.b32", "l", words.behind(place, offset), x, where)


def or_shared(place: Any, x: Any) -> None:
    """Sets bits of a word in shared memory, atomically: the order of threads does not matter."""
    _stored("red.shared.or.b32", "r", place, x, None)


def _stored(instruction: str, kind: str, place: Any, x: Any, where: Any) -> None:
    if where is None:
        asm(f"{instruction} [$0], $1;", f"{kind},r,~{{memory}}", [place, word(x)])
    else:
        text = f"@$2 {instruction} [$0], $1;"
        asm(text, f"{kind},r,b,~{{memory}}", [place, word(x), where])


def loop(count: int, body: Callable[[Any, list], list], carry: list) -> list:
    """Runs carry = body(i, carry) for i < count, emitted as a loop that is not unrolled.

    Code that runs once is limited by instruction fetch, so the compiler must not unroll it: it does
    not know the step, which is 1 because the number of a multiprocessor has less than 20 bits.
    """
    if count == 1:
        return body(word(0), carry)
    step = asm(
        "{ mov.u32 $0, %smid; shr.u32 $0, $0, 20; add.u32 $0, $0, 1; }", "=r", [], mlir.i32()
    )
    steps = mlir.scf.ForOp(word(0), word(count), step, carry)
    with mlir.ir.InsertionPoint(steps.body):
        mlir.scf.yield_(body(steps.induction_variable, list(steps.inner_iter_args)))
    return list(steps.results)


def scalar(x: Any) -> Any:
    """The word of an argument of layout SCALAR."""
    return x.registers.item()


def elements(array: Any) -> list:
    """What this thread has of an array of 32-bit numbers, as words, in the order of its
    registers."""
    found = []
    for register in array.registers.flat:
        for i in range(mlir.ir.VectorType(register.type).shape[0]):
            found.append(bits(words.element(register, i)))
    return found


def array(found: list, shape: tuple[int, ...], dtype: Any, layout: Any) -> Any:
    """The array int32 or float32 whose elements these words are, in a layout with one element per
    register."""
    layout = layout.to_mgpu()
    is_float = dtype == jnp.float32
    type_ = mlir.ir.F32Type.get() if is_float else mlir.i32()
    vector = mlir.ir.VectorType.get((1,), type_)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i, x in enumerate(found):
        registers.flat[i] = mlir.vector.broadcast(vector, mlir.bitcast(x, type_))
    signed = None if is_float else True
    return mlir.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def gather(table_smem: Any, ids_reg: jax.Array, layout: Any, interpreted: bool) -> jax.Array:
    """table_smem[ids_reg], int32, for a table [n] and ids in a layout with one element per
    register.

    Hazard: the table must be stored, and a barrier passed, before.
    """
    if interpreted:
        return jnp.take(table_smem[...], ids_reg, mode="clip")
    shape = ids_reg.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout),
    )
    def look_up(_, table, ids):
        start = address(table)
        found = [load(plus(start, times(x, 4)))[0] for x in elements(ids)]
        return array(found, shape, jnp.int32, layout)

    return look_up(table_smem, ids_reg)


def or_at(
    table_smem: Any, ids_reg: jax.Array, bits_reg: jax.Array, layout: Any, interpreted: bool
) -> None:
    """Sets bits_reg in table_smem[ids_reg], and waits until the whole warpgroup has.

    Hazard: table_smem must be zeros, and a barrier passed, before.

    Args:
      table_smem: int32 [n], zeros.
      ids_reg, bits_reg: int32 of one shape. No bit is given twice for one id.
    """
    if interpreted:
        at = jnp.arange(table_smem.shape[0])
        chosen = jnp.where(ids_reg[..., None] == at, bits_reg[..., None], 0)
        table_smem[...] = chosen.reshape(-1, at.size).sum(0, dtype=jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def put(_, table, ids, bits):
        start = address(table)
        for x, bit in zip(elements(ids), elements(bits), strict=True):
            or_shared(plus(start, times(x, 4)), bit)
        sync_warpgroup()

    put(table_smem, ids_reg, bits_reg)
