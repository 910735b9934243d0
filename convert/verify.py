"""`verify`: a converted folder has every bit that conversion makes of its source."""

import hashlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from convert.plan import make_plan
from convert.source import Source
from convert.writer import Sums
from peagle_jax.checkpoint.converted import Converted, Parameter, as_bytes
from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.checkpoint.values import NotFinite

Progress = Callable[[int], None]


class Mismatch(CheckpointError):
    """A converted folder differs from the conversion of its source."""


def verify(
    source: Source, folder: Path, *, progress: Progress = lambda nbytes: None
) -> tuple[Counter, dict[str, NotFinite]]:
    """Makes every parameter again, and compares bits, sums, headers and the manifest.

    Args:
      progress: called with the bytes of each parameter.
    Returns the number of parameters by transform, and the counts of NaN and infinity.

    Raises:
      Mismatch: the first difference; or `folder` was converted from another checkpoint.
      CheckpointError: a file is missing or broken.
    """
    converted, plan, sums = Converted(folder), make_plan(source), Sums()
    source.layout.check(source.model)
    _check_headers(source, converted)
    wanted = {parameter.path: parameter for parameter in plan.parameters}
    if wrong := sorted(map(str, wanted.keys() ^ converted.parameters.keys())):
        raise Mismatch(f"{folder}: it or its source lacks the parameter {wrong[0]}")
    with ThreadPoolExecutor() as pool:
        for rule in plan.rules:
            stored = converted.parameters[rule.path]
            like = replace(wanted[rule.path], group=stored.group, sha256=stored.sha256)
            if like != stored:
                raise _differs(converted, stored, "the manifest describes another array")
            _check(source, converted, stored, rule, sums, pool)
            progress(stored.nbytes)
    if sums.not_finite != converted.not_finite:
        raise Mismatch(f"{folder}: the manifest counts other NaN and infinite numbers")
    return Counter(rule.transform.name for rule in plan.rules), sums.not_finite


def _check_headers(source: Source, converted: Converted) -> None:
    ours, theirs = converted.tensors, source.checkpoint.tensors
    for name in ours.keys() | theirs.keys():
        pair = [infos.get(name) for infos in (ours, theirs)]
        if None in pair or len({(info.dtype, info.shape) for info in pair}) > 1:
            raise Mismatch(
                f"{converted.folder}: was made of another checkpoint than {source.label}: tensor "
                f"{name!r} differs"
            )
    for file in source.files:
        kept = converted.folder / "source" / f"{file['name']}.header"
        header = kept.read_bytes() if kept.is_file() else b""
        if hashlib.sha256(header).hexdigest() != file["header_sha256"]:
            raise Mismatch(f"{kept}: is not the header of {source.label}'s {file['name']}")


def _check(
    source: Source,
    converted: Converted,
    parameter: Parameter,
    rule: Rule,
    sums: Sums,
    pool: ThreadPoolExecutor,
) -> None:
    """Compares a parameter with what its tensors make, and their sums with the manifest's."""
    parts = [source.read(name) for name in rule.names]
    joined = rule.transform.join(parts)
    sums.add(pool, parameter, parts, joined)
    del parts  # the stored parameter is read a chunk of rows at a time: memory stays small
    wanted = joined if parameter.shape else joined.reshape(1)
    for start, rows in converted.rows(rule.path):
        want, got = as_bytes(wanted[start : start + len(rows)]), as_bytes(rows)
        differs = np.flatnonzero(want != got)
        if len(differs):
            row, more = start + int(differs[0]) // (len(want) // len(rows)), len(rule.names) - 1
            names = f"{rule.names[0]!r}" + (f" and {more} more" if more else "")
            why = f"entry {row} of its first axis is not that of tensor {names}"
            raise _differs(converted, parameter, why)
    for name in rule.names:
        if sums.tensors[name] != converted.manifest["tensors"][name]["sha256"]:
            raise _differs(converted, parameter, f"the manifest's sum of {name!r} is another")
    if sums.parameters[rule.path] != parameter.sha256:
        raise _differs(converted, parameter, "the manifest's sum of it is another")


def _differs(converted: Converted, parameter: Parameter, why: str) -> Mismatch:
    return Mismatch(
        f"{converted.folder}: {parameter.key} in weights/{parameter.group} differs from the "
        f"source: {why}"
    )
