"""What a thread of `peer_gather` sends: sums of parts, or weighted sums of the results of experts.

Products and sums are rounded one by one, as in XLA's definition: `mul.rn` and `add.rn` are never
contracted.
"""

from typing import Any

from pallas_kernels import mlir_compat as mlir
from pallas_kernels.peer_gather.mailbox import UNIT_BYTES
from pallas_kernels.words import asm, behind, constant, load, load_words, times


class SumLoads:
    """Loads of the sum of parts [parts, N].

    Args:
      address: of the parts.
      num_parts: parts.
      num_units: units of a message.
      unit_bytes: data in a unit.
      rounded: whether the parts are float32 and are sent as bfloat16.
    """

    def __init__(self, address, num_parts: int, num_units: int, unit_bytes: int, *, rounded: bool):
        self.unit_bytes = unit_bytes
        self._address, self._num_parts, self._rounded = address, num_parts, rounded
        self._words = unit_bytes // 4 * (2 if rounded else 1)
        self._part_bytes = num_units * self._words * 4

    def __call__(self, unit) -> list:
        """The words of a unit."""
        first = behind(self._address, times(unit, 4 * self._words))
        loaded = []
        for part in range(self._num_parts):
            begin, words = behind(first, part * self._part_bytes), []
            for at in range(0, self._words, 4):
                words += load_words(behind(begin, 4 * at), min(4, self._words))
            loaded.append(words)
        if self._num_parts == 1 and not self._rounded:
            return loaded[0]
        total, *others = [[_float(word) for word in words] for words in loaded]
        for words in others:
            total = [_added(x, y) for x, y in zip(total, words, strict=True)]
        return (
            _bfloat16(total)
            if self._rounded
            else [mlir.arith.bitcast(mlir.i32(), x) for x in total]
        )


class MixtureLoads:
    """Loads of the sums `Mixture.added`.

    Args:
      shape: of rows and weights, [k, R'].
      columns: D.
      values, weights, rows: addresses.
    """

    unit_bytes = UNIT_BYTES

    def __init__(self, shape: tuple[int, int], columns: int, values, weights, rows):
        self._shape, self._row_bytes = shape, 2 * columns
        self._values, self._weights, self._rows = values, weights, rows

    def __call__(self, unit) -> list:
        """The words of a unit, eight columns of a row."""
        top_k, stride = self._shape
        units = constant(self._row_bytes // UNIT_BYTES)
        row, column = mlir.arith.divui(unit, units), mlir.arith.remui(unit, units)
        at = times(row, 4)
        sources = [load(behind(self._rows, at), j * stride) for j in range(top_k)]
        weights = [_float(load(behind(self._weights, at), j * stride)) for j in range(top_k)]
        begin, parts = behind(self._values, times(column, UNIT_BYTES)), []
        for source in sources:
            # 64 bits: the results of a long prompt may have more than 4 GB.
            wide = mlir.arith.extui(begin.type, source)
            offset = mlir.arith.muli(wide, constant(self._row_bytes, begin.type))
            parts.append(load_words(mlir.arith.addi(begin, offset), 4))
        total = None
        for words, weight in zip(parts, weights, strict=True):
            values = [_weighted(value, weight) for word in words for value in _widened(word)]
            total = values if total is None else list(map(_added, total, values))
        return _bfloat16(total)


def _float(word) -> Any:
    return mlir.arith.bitcast(mlir.ir.F32Type.get(), word)


def _widened(word) -> list:
    """Two bfloat16, low half first, as float32."""
    low = mlir.arith.shli(word, constant(16))
    high = mlir.arith.andi(word, constant(-(1 << 16)))
    return [_float(low), _float(high)]


def _weighted(value, weight) -> Any:
    """The product; 0 if the weight is 0, also of an undefined value."""
    zero = mlir.arith.constant(weight.type, 0.0)
    has_weight = mlir.arith.cmpf(mlir.arith.CmpFPredicate.UNE, weight, zero)
    product = asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", [value, weight], weight.type)
    return mlir.arith.select(has_weight, product, zero)


def _added(x, y) -> Any:
    return asm("add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], x.type)


def _bfloat16(values: list) -> list:
    """Words of two values each, rounded."""
    # The first operand becomes the upper half.
    round_two = lambda low, high: asm(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], mlir.i32()
    )
    return [round_two(*values[i : i + 2]) for i in range(0, len(values), 2)]
