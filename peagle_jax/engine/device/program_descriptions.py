"""Texts that describe what a program is made of: functions, static parts of trees, source files.

Equal descriptions stand for equal behaviour. What cannot be described so is refused, because its
program could be mistaken for another: functions that no module names (lambdas, closures), and
classes of other packages. These may have an attribute `program_key`, a text that changes whenever
their programs do.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib
import json
from collections.abc import Mapping, Set
from pathlib import Path

import jax
import numpy as np

PACKAGES = ("peagle_jax", "pallas_kernels")
"""Their sources are part of the key of each program (`sources`)."""

_VERSIONED = (*PACKAGES, "jax", "jaxlib", "flax", "numpy", "builtins", "collections", "functools")
"""Packages whose version or sources are part of the key."""

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...))


class NotDescribed(Exception):
    """Nothing describes this object; the message names it."""


def describe(thing) -> str:
    """A description of a static value.

    Raises:
      NotDescribed: its behaviour has no name.
    """
    if (key := getattr(thing, "program_key", None)) is not None:
        return f"{getattr(thing, '__qualname__', type(thing).__qualname__)} {key}"
    if isinstance(thing, enum.Enum):
        return f"{describe(type(thing))}.{thing.name}"
    if isinstance(thing, _PLAIN):
        return repr(thing)
    if isinstance(thing, np.dtype):
        return f"dtype {thing.name}"
    if isinstance(thing, np.generic):
        return f"{thing.dtype.name} {thing.item()!r}"
    if isinstance(thing, Mapping):
        return _listed(thing, (f"{describe(k)}: {describe(v)}" for k, v in thing.items()))
    if isinstance(thing, Set):
        return _listed(thing, sorted(map(describe, thing)))
    if isinstance(thing, tuple | list):
        return _listed(thing, map(describe, thing))
    if isinstance(thing, functools.partial):
        return f"partial{describe((thing.func, thing.args, thing.keywords))}"
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
        return describe(type(thing)) + describe(fields)
    return _named(thing)


def _listed(thing, parts) -> str:
    return f"{describe(type(thing))}({', '.join(parts)})"


def _named(thing) -> str:
    """Module and name of a class or function of a package whose version is known."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if thing is type(None):
        return "None"
    if module is not None and name is not None and module.split(".")[0] in _VERSIONED:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part, None)
        if target is thing:
            return f"{module}.{name}"
    raise NotDescribed(f"{thing!r} has no `program_key`")


def describe_tree(structure: jax.tree_util.PyTreeDef) -> str:
    """A description of the structure of a tree: of the types of its nodes and their static parts.

    Raises:
      NotDescribed: as in `describe`.
    """
    parts, left = [], [structure]
    while left:
        node = left.pop()
        data, children = node.node_data(), node.children()
        parts.append(f"{len(children)}" if data is None else f"{describe(data)} {len(children)}")
        left += children
    return "\n".join(parts)


def source_digest(file: str | Path) -> str:
    """SHA-256 of a source file."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def sources() -> str:
    """SHA-256 of the names and contents of all Python files of `PACKAGES`, read once for each
    process."""
    files = []
    for package in PACKAGES:
        root = Path(importlib.import_module(package).__file__).parent
        paths = sorted(root.rglob("*.py"))
        files += [
            (package, path.relative_to(root).as_posix(), source_digest(path)) for path in paths
        ]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
