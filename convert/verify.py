"""Compares a converted folder with its source: bits, hashes, and dequantised values.

`expected` specifies the result and `decode` reads the source; neither shares code with the converter.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from convert.decode import SourceTensors
from convert.expected import (
    Expected,
    ExpectedScale,
    as_it_is,
    expected_parameters,
    may_be_unused,
    stored_grid,
)
from convert.numbers import TOLERANCE, compare_numbers
from convert.source import Source
from peagle_jax.checkpoint.converted import (
    DTYPE_NAMES,
    UNUSED,
    Converted,
    Parameter,
    as_bytes,
    sum_of_sums,
)
from peagle_jax.checkpoint.safetensors import DTYPES, CheckpointError
from peagle_jax.checkpoint.values import NotFinite, NotFiniteCounts

Progress = Callable[[int], None]


class Mismatch(CheckpointError):
    """A converted folder differs from the conversion of its source."""


@dataclass
class Verification:
    """Result: number of parameters, and of rows whose dequantised values were compared.

    `largest` is their largest difference, relative to the row's largest value. `not_finite` counts NaN
    and infinity in the source's tensors.
    """

    copied: int = 0
    transformed: int = 0
    dequantized: int = 0
    rows: int = 0
    largest: float = 0.0
    not_finite: dict[str, NotFinite] = field(default_factory=dict)


class _Seen:
    """Hashes and NaN counts of the source's tensors, computed while they are read."""

    def __init__(self):
        self._digests, self._counts = {}, NotFiniteCounts()
        self.source: SourceTensors | None = None

    def __call__(self, name: str, data: np.ndarray) -> None:
        self._digests.setdefault(name, hashlib.sha256()).update(data)
        self._counts.add(name, data, DTYPES[self.source.dtypes[name]])

    def sum_of(self, name: str) -> str:
        return self._digests.get(name, hashlib.sha256()).hexdigest()  # an empty one is never read

    def not_finite(self) -> dict[str, NotFinite]:
        return self._counts.found()


def verify(
    source: Source, folder: Path, *, progress: Progress = lambda nbytes: None
) -> Verification:
    """Compares every tensor and every parameter.

    1. The parameters match the source's tensor names, and every needed tensor is used.
    2. Every bit of every parameter is the expected bit of the source; FP8 scales are equal for every row
       and every 128 columns. The manifest's hashes match the source and the parameters.
    3. Quantised weights have the same values (see `numbers`).

    Args:
      progress: called with the bytes of each parameter.
    Raises:
      Mismatch: the first difference; or `folder` was converted from another checkpoint.
      CheckpointError: a file is missing or broken.
    """
    converted, seen = Converted(folder), _Seen()
    _check_headers(source, converted)
    tensors = seen.source = SourceTensors(source.tensors.folder, seen)
    expected = _expected(tensors, converted)
    result = Verification()
    for parameter in converted.parameters.values():
        want = expected[parameter.key]
        _check_form(converted, parameter, want)
        check = _check_bits if isinstance(want, Expected) else _check_scale
        _check_sums(converted, parameter, want, check(converted, parameter, want), seen)
        if parameter.in_order:
            result.copied += 1
        else:
            result.transformed += 1
        if parameter.path[-1] == "scale":
            weight = converted.parameters[*parameter.path[:-1], "weight"]
            rows, largest = compare_numbers(converted, weight, expected[weight.key], want)
            result.dequantized += 1
            result.rows += rows
            result.largest = max(result.largest, largest)
            if largest > TOLERANCE:
                why = f"its weight's numbers are off by {largest:.2g} of a row's largest"
                raise _differs(converted, parameter, why)
        progress(parameter.nbytes)
    result.not_finite = seen.not_finite()
    if result.not_finite != converted.not_finite:
        raise Mismatch(
            f"{folder}: the manifest counts other NaN and infinite numbers than the source has"
        )
    return result


def _check_headers(source: Source, converted: Converted) -> None:
    ours, theirs = converted.tensors, source.tensors.infos
    for name in ours.keys() | theirs.keys():
        pair = [infos.get(name) for infos in (ours, theirs)]
        if None in pair or len({(info.dtype, info.shape) for info in pair}) > 1:
            raise Mismatch(
                f"{converted.folder}: was made of another checkpoint than {source.label}: tensor "
                f"{name!r} differs"
            )
    for file in source.tensors.files:
        kept = converted.folder / "source" / f"{file.name}.header"
        header = kept.read_bytes() if kept.is_file() else b""
        if hashlib.sha256(header).hexdigest() != file.header_sha256:
            raise Mismatch(f"{kept}: is not the header of {source.label}'s {file.name}")


def _expected(tensors: SourceTensors, converted: Converted) -> dict[str, Expected | ExpectedScale]:
    """The expected parameters, from the source's names and the tensors stored as unused.

    Raises:
      Mismatch: a parameter is missing or unexpected, or a tensor belongs to no parameter.
    """
    expected = expected_parameters(tensors)
    unused = [one for one in converted.parameters.values() if one.path[0] == UNUSED]
    names = [name for one in unused for name in one.names]
    for name in names:
        if not may_be_unused(tensors, name):
            raise Mismatch(
                f"{converted.folder}: tensor {name!r} is kept as unused; the model needs it"
            )
    # A duplicate of another tensor may be used or unused.
    expected = {key: one for key, one in expected.items() if not set(one.names) <= set(names)} | {
        one.key: as_it_is(tensors, one.names) for one in unused if len(one.names) == 1
    }
    stored = {one.key for one in converted.parameters.values()}
    if wrong := sorted(expected.keys() ^ stored):
        what = "lacks" if wrong[0] in expected else "holds a parameter that no tensor makes,"
        raise Mismatch(f"{converted.folder}: {what} {wrong[0]}")
    placed = {name for one in expected.values() for name in one.names}
    if lost := sorted(tensors.dtypes.keys() - placed):
        raise Mismatch(f"{converted.folder}: no parameter holds tensor {lost[0]!r}")
    return expected


def _check_form(converted: Converted, parameter: Parameter, want: Expected | ExpectedScale) -> None:
    dtype = DTYPE_NAMES[parameter.dtype]
    if dtype != want.dtype:
        raise _differs(converted, parameter, f"it is {dtype}, its tensors are {want.dtype}")
    shape = parameter.shape if isinstance(want, Expected) else parameter.shape[:-2]
    wanted = want.shape if isinstance(want, Expected) else want.leading
    if shape != wanted:
        raise _differs(converted, parameter, f"it is {shape}, its tensors make {wanted}")


def _check_bits(converted: Converted, parameter: Parameter, want: Expected) -> str:
    """Returns the sum of the stored bytes."""
    stored, start = hashlib.sha256(), 0
    for block in converted.blocks(parameter):
        stop = start + (len(block) if block.ndim else 1)
        rows = as_bytes(want.rows(start, stop))
        data = as_bytes(block)
        if not np.array_equal(rows, data):
            raise _differs(converted, parameter, _where(want, start, rows, data))
        if not parameter.in_order:
            stored.update(data)
        start = stop
    return stored.hexdigest()


def _where(want: Expected, start: int, rows: np.ndarray, data: np.ndarray) -> str:
    """Which row differs first."""
    height = max(want.shape[0] if want.shape else 1, 1)
    row_bytes = max(len(rows) // height, 1)
    row = start + int(np.flatnonzero(rows != data)[0]) // row_bytes
    return f"entry {row} of its first axis is not that of {_named(want)}"


def _named(want: Expected | ExpectedScale) -> str:
    more = f" and {len(want.names) - 1} more" if len(want.names) > 1 else ""
    return f"tensor {want.names[0]!r}{more}"


def _check_scale(converted: Converted, parameter: Parameter, want: ExpectedScale) -> str:
    """Returns the sum of the stored bytes."""
    scales = converted.parameter(parameter.path)
    matrices = scales.reshape(-1, *scales.shape[-2:])
    for i, one in enumerate(matrices):
        grid = stored_grid(one, want.matrix)
        if grid is None:
            raise _differs(converted, parameter, f"scales of {one.shape} fit no {want.matrix}")
        bits, _ = want.grid(i)
        if as_bytes(grid).tobytes() != as_bytes(bits).tobytes():
            why = f"a row has not the scale of {_named(want)}"
            raise _differs(converted, parameter, why)
    return hashlib.sha256(as_bytes(scales)).hexdigest()


def _check_sums(
    converted: Converted,
    parameter: Parameter,
    want: Expected | ExpectedScale,
    stored: str,
    seen: _Seen,
) -> None:
    names = want.names
    if parameter.names != names:
        raise _differs(
            converted, parameter, f"the manifest does not say that it is made of {_named(want)}"
        )
    for name in names:
        if seen.sum_of(name) != converted.manifest["tensors"][name]["sha256"]:
            raise _differs(converted, parameter, f"the manifest's sum of {name!r} is another")
    expected = sum_of_sums([seen.sum_of(name) for name in names]) if parameter.in_order else stored
    if expected != parameter.sha256:
        raise _differs(converted, parameter, "the manifest's sum of it is another")


def _differs(converted: Converted, parameter: Parameter, why: str) -> Mismatch:
    return Mismatch(
        f"{converted.folder}: {parameter.key} in weights/{parameter.group} differs from the source: {why}"
    )
