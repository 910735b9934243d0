"""`peagle-convert inspect`: summary of a folder from its headers, optionally contents; any model."""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.source import Reader, Tensors, is_head, tensors_of, unread_keys
from peagle_jax.checkpoint.converted import DTYPE_NAMES, Converted, is_converted
from peagle_jax.checkpoint.fields import read_json
from peagle_jax.checkpoint.layout import FP8, PACKED
from peagle_jax.checkpoint.safetensors import Checkpoint, TensorInfo
from peagle_jax.checkpoint.tables import head_names
from peagle_jax.checkpoint.values import NotFinite, NotFiniteCounts

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Line:
    """One line of the summary: tensors of equal dtype and shape whose names differ in numbers only."""

    name: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Summary:
    """`kind` is "target", "P-EAGLE head" or "EAGLE-3 head"; `model` is the name in config.json.

    `unread_keys` are keys of config.json without effect, for supported families. `not_finite` is None if
    contents were not read.
    """

    name: str
    form: str
    files: dict[str, int]
    kind: str
    model: str
    quantization: str
    unread_keys: list[str]
    dtypes: dict[str, int]
    lines: list[Line]
    not_finite: dict[str, NotFinite] | None

    @property
    def num_tensors(self) -> int:
        return sum(line.count for line in self.lines)

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.lines)


def inspect(folder: Path, *, every: bool = False, values: bool = False) -> Summary:
    """Reads headers, config.json and the manifest of a converted folder only, unless `values`.

    Args:
      every: one line per tensor instead of one line for all layers.
      values: also read all contents and count NaN and infinity (a converted folder stores the counts).
    Raises:
      CheckpointError: no checkpoint, or a broken one.
    """
    if is_converted(folder):
        converted = Converted(folder)
        infos, form = converted.tensors, "converted (Orbax)"
        not_finite = converted.not_finite
        sizes = Counter()
        for parameter in converted.parameters.values():
            sizes[f"weights/{parameter.group}"] += parameter.nbytes
    else:
        tensors = tensors_of(Checkpoint(folder))
        infos, form = tensors.infos, "safetensors"
        not_finite = count_not_finite(tensors) if values else None
        sizes = {file.name: file.size for file in tensors.files}
    raw = _config(folder)
    dtypes = Counter()
    for info in infos.values():
        dtypes[DTYPE_NAMES[info.dtype]] += info.end - info.begin
    return Summary(
        name=folder.absolute().name,
        form=form,
        files=dict(sizes),
        kind=_kind(infos),
        model=_model(raw),
        quantization=_quantization(infos, raw),
        unread_keys=unread_keys("head" if is_head(infos) else "target", raw),
        dtypes=dict(dtypes),
        lines=_lines(infos, every),
        not_finite=not_finite,
    )


def count_not_finite(tensors: Tensors) -> dict[str, NotFinite]:
    """Counts NaN and infinity by tensor, for tensors that have any. Reads all contents in 1 MiB steps."""
    counts, buffer = NotFiniteCounts(), np.empty(1 << 20, np.uint8)
    with closing(Reader(tensors)) as reader:
        for name, info in tensors.infos.items():
            size = info.end - info.begin
            for begin in range(0, size, buffer.nbytes):
                part = buffer[: size - begin]
                reader.read_into(name, begin, memoryview(part))
                counts.add(name, part, info.dtype)
    return counts.found()


def not_finite_text(found: Mapping[str, NotFinite]) -> str:
    """One line for users: the number of tensors with NaN or infinity, and the first five names."""
    if not found:
        return "all numbers are finite"
    named = [f"{name} ({counts})" for name, counts in sorted(found.items())[:5]]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{len(found)} tensors hold numbers that are not finite: {', '.join(named)}{more}"


def _config(folder: Path) -> dict:
    """config.json, or an empty dict: a summary needs only the headers."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def _model(raw: dict) -> str:
    names = raw.get("architectures")
    named = f" ({', '.join(map(str, names))})" if isinstance(names, list) and names else ""
    return f"{raw.get('model_type') or 'unknown'}{named}"


def _kind(infos: Mapping[str, TensorInfo]) -> str:
    if not is_head(infos):
        return "target"
    return "P-EAGLE head" if head_names(infos)("mask_hidden") in infos else "EAGLE-3 head"


def _quantization(infos: Mapping[str, TensorInfo], raw: dict) -> str:
    """Quantisation by the tensors present; config.json's name for it in brackets."""
    formats = []
    packed = sum(name.endswith("_blocks") and i.dtype == PACKED for name, i in infos.items())
    if packed:
        formats.append(f"MXFP4, {packed} tensors")
    forms = Counter(
        _scale_form(name, info, infos) for name, info in infos.items() if info.dtype == FP8
    )
    formats += [f"FP8 E4M3 with {form}, {count} tensors" for form, count in sorted(forms.items())]
    stated = raw.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    return "; ".join(formats or ["none"]) + (f" ({method})" if method else "")


def _scale_form(name: str, info: TensorInfo, infos: Mapping[str, TensorInfo]) -> str:
    scale = infos.get(f"{name}_scale_inv") or infos.get(f"{name}_scale")
    if scale is None:
        return "no scale"
    if scale.shape in ((), (1,), (1, 1)):
        return "one scale a tensor"
    return "a scale a row" if scale.shape[:1] == info.shape[:1] else "a scale a block"


def _lines(infos: Mapping[str, TensorInfo], every: bool) -> list[Line]:
    counts: dict[tuple, list[int]] = {}
    for name, info in infos.items():
        shown = name if every else _NUMBER.sub("*", name)
        entry = counts.setdefault((shown, DTYPE_NAMES[info.dtype], info.shape), [0, 0])
        entry[0] += 1
        entry[1] += info.end - info.begin
    return [
        Line(name, count, dtype, shape, nbytes)
        for (name, dtype, shape), (count, nbytes) in sorted(counts.items())
    ]
