"""Compares the dequantised values of quantised parameters with those of the source.

The comparison of bits shows that nothing was lost; this one shows that scales and layout mean the same.
Bands of rows at the start, middle and end of each parameter are dequantised as the kernels do
(`pallas_kernels.formats`); the same rows of the source by the definition of its format (`decode`).
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from convert import decode
from convert.expected import Expected, ExpectedScale
from peagle_jax.checkpoint.converted import Converted, Parameter
from peagle_jax.checkpoint.layout import FP8

TOLERANCE = 1e-6
"""Tolerance for rounding, relative to the row's largest value."""
BLOCK, GROUP = 128, 32
"""Rows and columns that share an FP8 scale, columns that share an MXFP4 scale."""
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@np.errstate(over="ignore", invalid="ignore")  # a file may contain infinity and NaN
def compare_numbers(
    converted: Converted, parameter: Parameter, weight: Expected, scale: Expected | ExpectedScale
) -> tuple[int, float]:
    """(number of rows compared, their largest difference relative to the row's largest value).

    Args:
      parameter: the stored weight; its scale is the parameter beside it.
      weight, scale: expected contents, from the source.
    """
    store = converted.store(parameter)
    scales = converted.parameter((*parameter.path[:-1], "scale"))
    rows = parameter.shape[-2]
    compared, largest = 0, 0.0
    for index, start in _bands(parameter):
        band = slice(start, min(start + BLOCK, rows))
        got = _stored_numbers(store[(*index, band)].read().result(), scales[index], start, rows)
        want = _source_numbers(weight, scale, index, band)
        for pair in zip(got, want, strict=True):
            largest = max(largest, _difference(*pair))
        compared += len(got)
    return compared, largest


def _bands(parameter: Parameter) -> Iterator[tuple[tuple[int, ...], int]]:
    """(leading index, first row) of up to three bands of rows, each within one block of scales."""
    *leading, rows, _ = parameter.shape
    per_matrix = -(-rows // BLOCK)
    total = prod(leading) * per_matrix
    for number in sorted({0, total // 2, total - 1}):
        matrix, band = divmod(number, per_matrix)
        yield tuple(map(int, np.unravel_index(matrix, leading))) if leading else (), band * BLOCK


def _stored_numbers(values: np.ndarray, scales: np.ndarray, start: int, rows: int) -> np.ndarray:
    """Dequantises rows of a parameter from `start`; the whole matrix has `rows` rows and the scales."""
    places = np.arange(start, start + len(values))
    scale = scales[places if scales.shape[0] == rows else places // BLOCK]
    if values.dtype != FP8:
        return _mxfp4(values, scale)
    scale = scale.astype(np.float32)  # as a model holds it
    if scale.shape[-1] > 1:
        scale = np.repeat(scale, BLOCK, axis=-1)[:, : values.shape[-1]]
    return values.astype(np.float32) * scale


def _source_numbers(
    weight: Expected, scale: Expected | ExpectedScale, index: tuple[int, ...], band: slice
) -> np.ndarray:
    """The same rows, of the source."""
    if index:
        bits = weight.rows(index[0], index[0] + 1)[0][(*index[1:], band)]
    else:
        bits = weight.rows(band.start, band.stop)
    if isinstance(scale, Expected):
        return decode.mxfp4_numbers(bits, scale.rows(index[0], index[0] + 1)[0][(*index[1:], band)])
    number = int(np.ravel_multi_index(index, scale.leading)) if index else 0
    spread = np.repeat(scale.grid(number)[1][band], decode.BLOCK, axis=-1)[:, : bits.shape[-1]]
    return decode.numbers(bits, weight.dtype) * spread


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [n, groups * 16], low nibble first; scales [n, groups], 2^(s - 127)."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
    numbers = np.where(codes & 8, -1, 1) * _FP4[codes & 7]
    powers = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    grouped = numbers.reshape(*scales.shape, GROUP) * powers[..., None]
    return grouped.reshape(len(blocks), -1).astype(np.float32)


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference relative to the largest value; non-finite values must be equal."""
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return np.inf
    off = np.abs(got[finite].astype(np.float64) - want[finite])
    if not np.isfinite(off).all():
        return np.inf
    top = np.abs(want[finite]).max(initial=0)
    return float(off.max(initial=0) / top) if top else float(off.max(initial=0))
