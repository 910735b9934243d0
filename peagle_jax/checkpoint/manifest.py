"""Validation of a converted folder's `manifest.json`, before any of it is used."""

import re
from pathlib import Path

from peagle_jax.checkpoint.fields import Fields
from peagle_jax.checkpoint.safetensors import DTYPES, CheckpointError

_SUM = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[\w.-]+\.safetensors")
_GROUP = re.compile(r"\d{4,}")
_PART = re.compile(r"\w+")
_MOST_BYTES = 2**62


def check_manifest(raw: dict, path: Path) -> None:
    """Refuses a manifest that `peagle-convert` cannot have written: keys, kinds, and references.

    Args:
      raw: the JSON object of `path`.
    Raises:
      CheckpointError: names what is missing or wrong.
    """
    try:
        _check(Fields(raw, str(path)))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; the manifest is damaged, convert the checkpoint again"
        ) from error


def _check(manifest: Fields) -> None:
    sizes = _check_files(manifest.inner("source"))
    tensors = manifest.inner("tensors")
    for name in tensors.raw:
        raw = tensors.inner(name).raw
        _check_tensor(Fields(raw, f"{manifest.where}: tensor {name!r}"), sizes)
    seen: set[str] = set()
    paths = set()
    for parameter in _objects(manifest, "parameters"):
        names = _check_parameter(parameter)
        for name in names:
            if name not in tensors.raw:
                raise manifest.error(f"a parameter holds tensor {name!r}, which is not listed")
            if name in seen:
                raise manifest.error(f"tensor {name!r} is held by two parameters")
            seen.add(name)
        paths.add(tuple(parameter.raw["path"]))
    if len(paths) < len(manifest.raw["parameters"]):
        raise manifest.error("two parameters have one path")
    if missing := sorted(tensors.raw.keys() - seen):
        raise manifest.error(f"tensor {missing[0]!r} is held by no parameter")
    for name, counts in manifest.inner("not_finite").raw.items():
        if name not in tensors.raw or not isinstance(counts, dict):
            raise manifest.error(f"not_finite counts tensor {name!r}, which is not there")
        for key in ("nan", "inf"):
            Fields(counts, manifest.where).count(key, least=0, most=_MOST_BYTES)


def _objects(fields: Fields, key: str) -> list[Fields]:
    items = fields.items(key)
    if not all(isinstance(item, dict) for item in items):
        raise fields.error(f"{key} must be a list of objects")
    return [Fields(item, fields.where) for item in items]


def _matching(fields: Fields, key: str, pattern: re.Pattern) -> str:
    text = fields.text(key)
    if not pattern.fullmatch(text):
        raise fields.error(f"{key} {text!r} is not of the form {pattern.pattern}")
    return text


def _check_files(source: Fields) -> dict[str, tuple[int, int]]:
    """name -> (where contents begin, size)."""
    source.text("name")
    ranges = {}
    for file in _objects(source, "files"):
        name = _matching(file, "name", _FILE)  # a plain name: export writes to it
        _matching(file, "header_sha256", _SUM)
        file.count("mtime_ns", least=-_MOST_BYTES, most=_MOST_BYTES)
        size = file.count("size", most=_MOST_BYTES)
        begin = file.count("header_bytes", most=size)
        if name in ranges:
            raise source.error(f"file {name!r} is listed twice")
        ranges[name] = begin, size
    return ranges


def _check_tensor(tensor: Fields, sizes: dict[str, tuple[int, int]]) -> None:
    """Checks that `safetensors.entry` lacks: the checksum, and the place in its file."""
    _matching(tensor, "sha256", _SUM)
    file = tensor.text("file")
    if file not in sizes:
        raise tensor.error(f"lies in file {file!r}, which is not listed")
    begin, size = sizes[file]
    first = tensor.count("begin", least=begin, most=size)
    tensor.count("end", least=first, most=size)


def _check_parameter(parameter: Fields) -> list[str]:
    """Names of its tensors."""
    path = parameter.items("path")
    for part in path:
        is_number = isinstance(part, int) and not isinstance(part, bool)
        if not is_number and not (isinstance(part, str) and _PART.fullmatch(part)):
            raise parameter.error(f"path {path!r} is not a module path")
    if not path:
        raise parameter.error("a path is empty")
    parameter.text("transform")
    if parameter.text("dtype") not in DTYPES:
        raise parameter.error(f"dtype {parameter.raw['dtype']!r} is unknown")
    for n in parameter.items("shape"):
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= _MOST_BYTES:
            raise parameter.error(f"shape {parameter.raw['shape']!r} is not a shape")
    _matching(parameter, "group", _GROUP)  # the name of a folder
    _matching(parameter, "sha256", _SUM)
    names = parameter.items("names")
    if not names or not all(isinstance(name, str) for name in names):
        raise parameter.error(f"names {names!r} are not names of tensors")
    return names
