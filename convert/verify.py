"""Compares a converted folder with its source: bits, sums, numbers, and logits where PyTorch is there."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from convert.blocks import blocks_of
from convert.export import rules_of, runs
from convert.numbers import TOLERANCE, compare_numbers
from convert.source import Reader, Source
from peagle_jax.checkpoint.converted import Converted, Parameter, as_bytes
from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.checkpoint.values import NotFinite, NotFiniteCounts

Progress = Callable[[int], None]


class Mismatch(CheckpointError):
    """A converted folder is not what its source makes."""


@dataclass
class Verification:
    """Counts of parameters, and of rows whose numbers were compared.

    `largest` is their largest difference, as a share of the row's largest number. `not_finite` counts NaN and
    infinity in the source's tensors.
    """

    copied: int = 0
    transformed: int = 0
    dequantized: int = 0
    rows: int = 0
    largest: float = 0.0
    not_finite: dict[str, NotFinite] = field(default_factory=dict)


def verify(
    source: Source, folder: Path, *, progress: Progress = lambda nbytes: None
) -> Verification:
    """Compares every tensor and every parameter.

    1. The source's tensors, taken back out of the parameters, have the source's bits and the manifest's
       sums.
    2. Parameters that are not plain copies equal what the source's tensors make, and their sums.
    3. Quantised weights stand for the same numbers (see `numbers`).

    Args:
      progress: called with the bytes of each parameter.
    Raises:
      Mismatch: the first difference; or `folder` was made of another checkpoint.
      CheckpointError: a file is missing or broken.
    """
    converted = Converted(folder)
    rules = rules_of(converted)
    _check_headers(source, converted)
    found, reader, counts = Verification(), Reader(source.tensors), NotFiniteCounts()
    try:
        for path, parameter in converted.parameters.items():
            rule = rules[path]
            _check_bits(converted, parameter, rule, reader, counts)
            if parameter.in_order:
                found.copied += 1
            else:
                _check_made(converted, parameter, rule, reader)
                found.transformed += 1
            if path[-1] == "scale":
                weight = rules[(*path[:-1], "weight")]
                rows, largest = compare_numbers(converted, weight, rule, reader)
                found.dequantized += 1
                found.rows += rows
                found.largest = max(found.largest, largest)
                if largest > TOLERANCE:
                    why = f"its weight's numbers are off by {largest:.2g} of a row's largest"
                    raise _differs(converted, parameter, why)
            progress(parameter.nbytes)
    finally:
        reader.close()
    found.not_finite = counts.found()
    if found.not_finite != converted.not_finite:
        raise Mismatch(
            f"{folder}: the manifest counts other NaN and infinite numbers than the source has"
        )
    return found


def _check_headers(source: Source, converted: Converted) -> None:
    ours, theirs = converted.tensors, source.tensors.infos
    for name in ours.keys() | theirs.keys():
        pair = [infos.get(name) for infos in (ours, theirs)]
        if None in pair or len({(info.dtype, info.shape) for info in pair}) > 1:
            raise Mismatch(
                f"{converted.folder}: was made of another checkpoint than {source.label}: tensor "
                f"{name!r} differs"
            )


def _check_bits(
    converted: Converted, parameter: Parameter, rule: Rule, reader: Reader, counts: NotFiniteCounts
) -> None:
    sums = {name: hashlib.sha256() for name in rule.names}
    for run in runs(converted, parameter, rule):
        want = np.empty(run.data.nbytes, np.uint8)
        reader.read_into(run.name, run.begin, memoryview(want))
        if not np.array_equal(want, run.data):
            raise _differs(converted, parameter, f"tensor {run.name!r} comes out changed")
        sums[run.name].update(want)
        counts.add(run.name, want, converted.info(run.name).dtype)
    for name, digest in sums.items():
        if digest.hexdigest() != converted.manifest["tensors"][name]["sha256"]:
            raise _differs(converted, parameter, f"the manifest's sum of {name!r} is another")


def _check_made(converted: Converted, parameter: Parameter, rule: Rule, reader: Reader) -> None:
    """What the source makes, against what is stored; cut differently than when it was written."""
    stored = hashlib.sha256()
    for data in converted.blocks(parameter):
        stored.update(as_bytes(data))
    made, blocks = hashlib.sha256(), blocks_of(rule, converted.tensors, 3_000_000)
    for block in blocks:
        buffer = np.empty(blocks.largest, np.uint8)
        for piece in block.pieces:
            end = piece.offset + piece.end - piece.begin
            reader.read_into(piece.name, piece.begin, memoryview(buffer)[piece.offset : end])
        made.update(as_bytes(block.make(buffer)))
    if not stored.hexdigest() == made.hexdigest() == parameter.sha256:
        raise _differs(converted, parameter, "it is not what the source's tensors make")


def _differs(converted: Converted, parameter: Parameter, why: str) -> Mismatch:
    return Mismatch(
        f"{converted.folder}: {parameter.key} in weights/{parameter.group} differs from the source: {why}"
    )
