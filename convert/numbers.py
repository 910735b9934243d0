"""Whether a quantised parameter stands for the numbers that its source stands for.

Bits say that nothing was lost; this says that it was put in the right place. Bands of rows from the
beginning, the middle and the end of each parameter are dequantised as the kernels do it
(`pallas_kernels.formats` says how), the same rows of the source by the definition of its format.
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from convert.source import Reader
from peagle_jax.checkpoint.converted import Converted, Parameter
from peagle_jax.checkpoint.layout import FP8, Rule
from peagle_jax.checkpoint.safetensors import TensorInfo
from peagle_jax.checkpoint.transforms import Concat, Deinterleave, Stack

TOLERANCE = 1e-6
"""Most that rounding explains, as a share of a row's largest number."""
BLOCK, GROUP = 128, 32
"""Rows and columns that share an FP8 scale, columns that share an MXFP4 scale."""
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

Place = tuple[int, tuple[int, ...]]
"""A row of the source: which of the rule's tensors, and the index of the row in it."""


@np.errstate(over="ignore", invalid="ignore")  # infinities and NaN may be in a file
def compare_numbers(
    converted: Converted, weight: Rule, scale: Rule, reader: Reader
) -> tuple[int, float]:
    """(rows compared, their largest difference as a share of the row's largest number)."""
    parameter = converted.parameters[weight.path]
    store, scales = converted.store(parameter), converted.parameter(scale.path)
    matrix_rows = parameter.shape[-2]
    compared, largest = 0, 0.0
    for index, start in _bands(parameter):
        stop = min(start + BLOCK, matrix_rows)
        values = store[(*index, slice(start, stop))].read().result()
        for row in range(start, stop):
            place = _place(weight, converted, (*index, row))
            want = _source_row(converted, weight, scale, place, reader)
            got = _stored_row(values[row - start], scales[index], row, matrix_rows)
            largest = max(largest, _difference(got, want))
        compared += stop - start
    return compared, largest


def _bands(parameter: Parameter) -> Iterator[tuple[tuple[int, ...], int]]:
    """(leading index, first row) of up to three runs of rows that share a block of scales."""
    *leading, rows, _ = parameter.shape
    per_matrix = -(-rows // BLOCK)
    total = prod(leading) * per_matrix
    for number in sorted({0, total // 2, total - 1}):
        matrix, band = divmod(number, per_matrix)
        yield tuple(map(int, np.unravel_index(matrix, leading))) if leading else (), band * BLOCK


def _stored_row(values: np.ndarray, scales: np.ndarray, row: int, rows: int) -> np.ndarray:
    """A row of a parameter; its matrix has `rows` of them and scales [Sn, Sk], Sn rows or blocks."""
    scale = scales[row if scales.shape[0] == rows else row // BLOCK]
    if values.dtype != FP8:
        return _mxfp4(values, scale)
    scale = scale.astype(np.float32)  # as a model holds it
    scale = scale if len(scale) == 1 else np.repeat(scale, BLOCK)[: len(values)]
    return values.astype(np.float32) * scale


def _place(rule: Rule, converted: Converted, index: tuple[int, ...]) -> Place:
    """Where the row `index` of a parameter comes from."""
    shapes = [converted.info(name).shape for name in rule.names]
    if isinstance(rule.transform, Deinterleave):
        expert, is_up, row = index
        return 0, (expert, 2 * row + is_up)
    if isinstance(rule.transform, Stack):
        *leading, row = index
        of = (*converted.parameters[rule.path].shape[: len(leading)],)
        return int(np.ravel_multi_index(leading, of)), (row,)
    if isinstance(rule.transform, Concat):
        (row,) = index
        for number, shape in enumerate(shapes):
            if row < shape[0]:
                return number, (row,)
            row -= shape[0]
    return 0, index  # copied, or with its last axes merged


def _source_row(
    converted: Converted, weight: Rule, scale: Rule, place: Place, reader: Reader
) -> np.ndarray:
    number, index = place
    info, scale_info = (converted.info(rule.names[number]) for rule in (weight, scale))
    row = _read(info, index, reader)
    if info.dtype != FP8:
        return _mxfp4(row, _read(scale_info, index, reader))
    return row.astype(np.float32) * _fp8_scales(scale_info, info.shape, index[0], reader)


def _fp8_scales(info: TensorInfo, shape: tuple[int, ...], row: int, reader: Reader) -> np.ndarray:
    """One scale for each column of a row, or for all of them."""
    if prod(info.shape) == 1:
        return _read(info, (), reader).astype(np.float32).reshape(())
    if info.shape[0] == shape[0]:
        scales = _read(info, (row,), reader)
    else:
        scales = _read(info, (row // BLOCK,), reader)
    scales = scales.astype(np.float32).reshape(-1)
    return scales if len(scales) == 1 else np.repeat(scales, BLOCK)[: shape[1]]


def _read(info: TensorInfo, index: tuple[int, ...], reader: Reader) -> np.ndarray:
    """`tensor[index]`, from its bytes."""
    rest = info.shape[len(index) :]
    out = np.empty(prod(rest) * info.dtype.itemsize, np.uint8)
    at = int(np.ravel_multi_index(index, info.shape[: len(index)])) if index else 0
    reader.read_into(info.name, at * out.nbytes, memoryview(out))
    return out.view(info.dtype).reshape(rest)


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [groups, 16] or [groups * 16], low nibble first; scales [groups], 2^(s - 127)."""
    codes = np.stack([blocks.reshape(-1) & 15, blocks.reshape(-1) >> 4], axis=-1)
    numbers = np.where(codes & 8, -1, 1) * _FP4[codes & 7]
    powers = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    return (numbers.reshape(-1, GROUP) * powers[:, None]).reshape(-1).astype(np.float32)


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    """As a share of the largest number; what is not finite must be equal."""
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return np.inf
    off = np.abs(got[finite].astype(np.float64) - want[finite])
    if not np.isfinite(off).all():
        return np.inf
    top = np.abs(want[finite]).max(initial=0)
    return float(off.max(initial=0) / top) if top else float(off.max(initial=0))
