"""Words of 32 bits in MLIR: addresses, loads and inline PTX of one thread (see `mlir_compat`)."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir

SCALAR = plgpu.Layout.WG_SPLAT(())
"""Layout of an argument that is one number."""


def constant(value: int, type_: Any = None) -> Any:
    return mlir.constant(value, type_ or mlir.i32())


def word(x: Any) -> Any:
    """A Python number as a word."""
    return constant(x) if isinstance(x, int) else x


def plus(x: Any, *others: Any) -> Any:
    """The sum of words."""
    for y in others:
        x = mlir.arith.addi(word(x), word(y))
    return x


def times(x: Any, y: Any) -> Any:
    return mlir.arith.muli(word(x), word(y))


def behind(address, offset) -> Any:
    """An address behind another, by bytes of 32 bits or a number."""
    if isinstance(offset, int):
        return mlir.arith.addi(address, constant(offset, i64()))
    return mlir.arith.addi(address, mlir.arith.extui(i64(), offset))


def i64() -> Any:
    return mlir.ir.IntegerType.get_signless(64)


def global_address(ref) -> Any:
    """The address of an array in device memory, 64 bits."""
    return mlir.llvm.ptrtoint(i64(), mlir.memref_ptr(ref))


def shared_address(ref) -> Any:
    """The address of an array in shared memory, 32 bits."""
    return mlir.llvm.ptrtoint(mlir.i32(), mlir.memref_ptr(ref))


def element(vector: Any, i: int) -> Any:
    """Element i of a register."""
    return mlir.vector.extract(vector, [], mlir.ir.DenseI64ArrayAttr.get([i]))


def load(address, word: int) -> Any:
    """Word `word` of 32 bits behind an address."""
    return asm(f"ld.global.b32 $0, [$1 + {4 * word}];", "=r,l", [address], mlir.i32())


def load_words(address, count: int) -> list:
    """The first two or four words behind an address, in one instruction."""
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ld.global.v{count}.b32 {{{names}}}, [${count}];"
    words = mlir.llvm.StructType.get_literal([mlir.i32()] * count)
    words = asm(text, ",".join(["=r"] * count + ["l"]), [address], words)
    return [mlir.llvm.extractvalue(mlir.i32(), words, [i]) for i in range(count)]


def load_address(address, word: int) -> Any:
    """64 bits from word `word` behind an address."""
    return asm(f"ld.global.b64 $0, [$1 + {4 * word}];", "=l,l", [address], i64())


def asm(text: str, constraints: str, operands: list, result: Any = None) -> Any:
    """Inline PTX, which the compiler neither moves nor removes."""
    result = result or mlir.ir.Type.parse("!llvm.void")
    return mlir.llvm.inline_asm(result, operands, text, constraints, has_side_effects=True)


@contextlib.contextmanager
def when(condition) -> Iterator[None]:
    """What is emitted inside runs where the condition is true; None: always."""
    if condition is None:
        yield
        return
    branch = mlir.scf.IfOp(condition)
    with mlir.ir.InsertionPoint(branch.then_block):
        yield
        mlir.scf.yield_([])
