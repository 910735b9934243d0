"""`peagle-convert export`: a converted folder -> its source safetensors files, byte for byte."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.blocks import BY_ENTRY
from convert.partial import check_apart, check_room, opened
from convert.side_files import copy_side_files
from convert.source import layout_of
from peagle_jax.checkpoint.converted import MANIFEST, UNUSED, Converted, Parameter, as_bytes
from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.safetensors import INDEX, CheckpointError
from peagle_jax.checkpoint.transforms import Copy

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Run:
    """Bytes of tensor `name` from `begin` on."""

    name: str
    begin: int
    data: np.ndarray


def rules_of(converted: Converted) -> dict[tuple, Rule]:
    """The rules of a converted folder by parameter path, from its config and its tensors.

    Raises:
      CheckpointError: this version has different rules for these tensors.
    """
    target = converted.folder / "source" / "target"
    _, _, layout = layout_of(converted, converted.folder, target if target.is_dir() else None)
    rules = {rule.path: rule for rule in layout.rules}
    for path, parameter in converted.parameters.items():
        if path[0] == UNUSED:
            rules[path] = Rule(path, parameter.names, Copy())
        rule = rules.get(path)
        if rule is None or not converted.made_by(parameter, rule):
            raise CheckpointError(
                f"{converted.folder}: {parameter.key} was made by other rules than this version's; "
                "export it with the version named in manifest.json"
            )
    if missing := rules.keys() - converted.parameters.keys():
        names = sorted(".".join(map(str, path)) for path in missing)
        raise CheckpointError(f"{converted.folder}: manifest.json lacks {names[0]}")
    return rules


def runs(converted: Converted, parameter: Parameter, rule: Rule) -> Iterator[Run]:
    """The bytes of a parameter's source tensors, each tensor from its beginning to its end."""
    infos = [converted.info(name) for name in rule.names]
    if parameter.in_order:
        yield from _in_order(infos, converted.blocks(parameter))
    elif isinstance(rule.transform, BY_ENTRY):
        begin = 0
        for block in converted.blocks(parameter):
            like = _Like((len(block), *infos[0].shape[1:]), infos[0].dtype)
            data = as_bytes(rule.transform.split(block, [like])[0])
            yield Run(rule.names[0], begin, data)
            begin += data.nbytes
    else:
        parts = rule.transform.split(converted.parameter(parameter.path), infos)
        for name, part in zip(rule.names, parts, strict=True):
            yield Run(name, 0, as_bytes(part))


@dataclass(frozen=True)
class _Like:
    shape: tuple[int, ...]
    dtype: np.dtype


def _in_order(infos, blocks: Iterator[np.ndarray]) -> Iterator[Run]:
    waiting = iter(infos)
    info, begin = next(waiting), 0
    for block in blocks:
        data = as_bytes(block)
        while data.nbytes:
            while begin == info.end - info.begin:
                info, begin = next(waiting), 0
            part = data[: info.end - info.begin - begin]
            yield Run(info.name, begin, part)
            begin, data = begin + part.nbytes, data[part.nbytes :]


def export(folder: Path, final: Path, *, progress: Progress = lambda nbytes: None) -> int:
    """Restores the source in the folder `final`: the same files, byte for byte, and the side files.

    Checks the hash of every tensor against the manifest. Restarts after a killed run; removes its output
    on failure.

    Returns the bytes of the safetensors files.

    Raises:
      CheckpointError: the converted folder is damaged, or `final` is in use, inside of `folder`, or its
        disk is too full.
    """
    converted = Converted(folder)
    rules = rules_of(converted)
    check_apart(final, [folder])
    with opened(final, restart=True) as partial:
        try:
            nbytes = _write(converted, rules, partial.folder, progress)
            partial.finish()
        except BaseException:
            shutil.rmtree(partial.folder, ignore_errors=True)
            raise
    return nbytes


def _write(converted: Converted, rules: dict, folder: Path, progress: Progress) -> int:
    files = converted.manifest["source"]["files"]
    nbytes = sum(file["size"] for file in files)
    check_room(folder, nbytes)
    with ExitStack() as stack:
        descriptors = {}
        for file in files:
            descriptor = os.open(folder / file["name"], os.O_WRONLY | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            _write_header(converted, file, descriptor)
            descriptors[file["name"]] = descriptor
        for path, parameter in converted.parameters.items():
            _write_tensors(converted, parameter, rules[path], descriptors)
            progress(parameter.nbytes)
    copy_side_files(converted.folder, folder)
    (folder / MANIFEST).unlink()
    index = converted.folder / "source" / INDEX
    if index.is_file():
        shutil.copyfile(index, folder / INDEX)
    return nbytes


def _write_header(converted: Converted, file: dict, descriptor: int) -> None:
    path = converted.folder / "source" / f"{file['name']}.header"
    try:
        header = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if hashlib.sha256(header).hexdigest() != file["header_sha256"]:
        raise CheckpointError(f"{path}: is not what was written")
    os.truncate(descriptor, file["size"])
    _pwrite(descriptor, memoryview(header), 0)


def _write_tensors(
    converted: Converted, parameter: Parameter, rule: Rule, descriptors: dict[str, int]
) -> None:
    sums = {name: hashlib.sha256() for name in rule.names}
    for run in runs(converted, parameter, rule):
        tensor = converted.manifest["tensors"][run.name]
        sums[run.name].update(run.data)
        at = tensor["begin"] + run.begin
        _pwrite(descriptors[tensor["file"]], memoryview(run.data), at)
    for name, digest in sums.items():
        if digest.hexdigest() != converted.manifest["tensors"][name]["sha256"]:
            raise CheckpointError(
                f"{converted.folder}: {parameter.key} in weights/{parameter.group} does not give tensor "
                f"{name!r} back as it was; it was changed after it was converted"
            )


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
