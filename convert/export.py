"""`export`: a converted folder as the safetensors files that it was made of, byte for byte."""

import hashlib
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from convert.output import copy_side_files, new_folder
from convert.source import layout_of
from peagle_jax.checkpoint.converted import MANIFEST, UNUSED, Converted, Parameter, as_bytes
from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.safetensors import INDEX, CheckpointError
from peagle_jax.checkpoint.transforms import Copy

Progress = Callable[[int], None]


def rules_of(converted: Converted) -> dict[tuple, Rule]:
    """The rules of a converted folder by parameter path, from its config and its tensors.

    Raises:
      CheckpointError: this version has different rules for these tensors.
    """
    target = converted.folder / "source" / "target"
    _, _, layout = layout_of(converted, target if target.is_dir() else None)
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


def export(folder: Path, final: Path, *, progress: Progress = lambda nbytes: None) -> int:
    """Restores the source in the folder `final`: the same files, byte for byte, and the side files.

    Checks the hash of every tensor against the manifest.

    Returns the bytes of the safetensors files.

    Raises:
      CheckpointError: the converted folder is damaged, or `final` is in use, inside of `folder`, or
        its disk is too full.
    """
    converted = Converted(folder)
    rules, files = rules_of(converted), converted.manifest["source"]["files"]
    nbytes = sum(file["size"] for file in files)
    with new_folder(final, nbytes, [folder]) as made, ExitStack() as stack:
        opened = {}
        for file in files:
            opened[file["name"]] = stack.enter_context((made / file["name"]).open("wb"))
            opened[file["name"]].write(_header(converted, file))
        for path, parameter in converted.parameters.items():
            _write_tensors(converted, parameter, rules[path], opened)
            progress(parameter.nbytes)
        copy_side_files(converted.folder, made)
        (made / MANIFEST).unlink()
        if (index := converted.folder / "source" / INDEX).is_file():
            shutil.copyfile(index, made / INDEX)
    return nbytes


def _header(converted: Converted, file: dict) -> bytes:
    path = converted.folder / "source" / f"{file['name']}.header"
    try:
        header = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if hashlib.sha256(header).hexdigest() != file["header_sha256"]:
        raise CheckpointError(f"{path}: is not what was written")
    return header


def _write_tensors(converted: Converted, parameter: Parameter, rule: Rule, opened: dict) -> None:
    infos = [converted.info(name) for name in rule.names]
    parts = rule.transform.split(converted.parameter(parameter.path), infos)
    for name, part in zip(rule.names, parts, strict=True):
        tensor, data = converted.manifest["tensors"][name], as_bytes(part)
        if hashlib.sha256(data).hexdigest() != tensor["sha256"]:
            raise CheckpointError(
                f"{converted.folder}: {parameter.key} in weights/{parameter.group} does not give "
                f"tensor {name!r} back as it was; it was changed after it was converted"
            )
        opened[tensor["file"]].seek(tensor["begin"])
        opened[tensor["file"]].write(data)
