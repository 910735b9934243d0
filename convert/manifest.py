"""Writer of `manifest.json`: versions, source, and every tensor and parameter with its hash."""

import importlib.metadata
import json
import platform
from pathlib import Path

from convert.plan import Plan, partition
from convert.source import Source
from peagle_jax.checkpoint.converted import DTYPE_NAMES, FORMAT, MANIFEST, Parameter
from peagle_jax.checkpoint.values import NotFinite

_TOOLS = ("peagle-jax", "orbax-checkpoint", "tensorstore", "jax", "numpy")


def versions() -> dict[str, str]:
    """Versions of the packages that write a folder."""
    versions_by_name = {"python": platform.python_version()}
    for name in _TOOLS:
        try:
            versions_by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            versions_by_name[name] = "unknown"
    return versions_by_name


def tensor_json(source: Source) -> dict[str, dict]:
    """Header entries of the source: dtype, shape, file, and the offsets in that file."""
    return {
        name: {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "file": source.tensors.file_of[name],
            "begin": info.begin,
            "end": info.end,
        }
        for name, info in source.tensors.infos.items()
    }


def write_manifest(
    folder: Path,
    plan: Plan,
    parameters: list[Parameter],
    sums: dict[str, str],
    not_finite: dict[str, NotFinite],
) -> None:
    """Args:
    parameters: all written parameters, with hashes.
    sums: sha256 of each source tensor.
    not_finite: counts of the source tensors that hold NaN or infinity.
    """
    source = plan.source
    tensors = tensor_json(source)
    for name, entry in tensors.items():
        entry["sha256"] = sums[name]
    raw = {
        "format": FORMAT,
        "kind": source.kind,
        "model": source.model,
        "tool": versions(),
        "source": {"name": source.label, "files": source.tensors.identity},
        "dropped": source.layout.dropped,
        "not_finite": {name: counts._asdict() for name, counts in not_finite.items()},
        "tensors": tensors,
        "parameters": [
            one.as_json() | {"sharding": partition(one.path, one.shape)} for one in parameters
        ],
    }
    text = json.dumps(raw, separators=(",", ":")).replace('},"', '},\n"').replace("},{", "},\n{")
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
