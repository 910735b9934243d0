"""`inspect`: what a folder of any model holds, from its headers."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from convert.source import is_head, unread_keys
from peagle_jax.checkpoint.converted import DTYPE_NAMES, Converted, open_checkpoint
from peagle_jax.checkpoint.fields import named, read_json
from peagle_jax.checkpoint.layout import FP8, PACKED
from peagle_jax.checkpoint.safetensors import Headers, TensorInfo
from peagle_jax.checkpoint.tables import head_names
from peagle_jax.checkpoint.values import NotFinite

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def inspect(folder: Path) -> Iterator[str]:
    """Lines for a user. Reads headers, config.json and the manifest of a converted folder only.

    Raises:
      CheckpointError: no checkpoint, or a broken one.
    """
    checkpoint = open_checkpoint(folder)
    config = folder / "config.json"
    raw = read_json(config) if config.is_file() else {}  # the headers are enough for the rest
    is_converted, infos = isinstance(checkpoint, Converted), checkpoint.tensors
    form = "converted (Orbax)" if is_converted else "safetensors"
    yield f"{folder.absolute().name}: {_kind(checkpoint)}, {_model(raw)}, {form}"
    yield f"quantisation: {_quantization(infos, raw)}"
    yield from unread_text(unread_keys(checkpoint, raw))
    dtypes = Counter()
    for info in infos.values():
        dtypes[DTYPE_NAMES[info.dtype]] += info.end - info.begin
    sizes = ", ".join(f"{name} {size_text(size)}" for name, size in dtypes.items())
    yield f"{len(infos)} tensors, {size_text(dtypes.total())} ({sizes})"
    if is_converted:
        yield not_finite_text(checkpoint.not_finite)
    else:
        for path in checkpoint.files:
            yield f"{path.name}: {size_text(path.stat().st_size)}"
    yield from _lines(infos)


def size_text(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def unread_text(keys: list[str]) -> list[str]:
    """A line of the keys of config.json without effect, if there are any."""
    return [f"keys of config.json that change nothing: {named(keys)}"] if keys else []


def not_finite_text(found: Mapping[str, NotFinite]) -> str:
    """The number of tensors with NaN or infinity, and the first five names."""
    if not found:
        return "all numbers are finite"
    names = [f"{name} ({counts})" for name, counts in sorted(found.items())[:5]]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{len(found)} tensors hold numbers that are not finite: {', '.join(names)}{more}"


def _model(raw: dict) -> str:
    names = raw.get("architectures")
    architectures = f" ({', '.join(map(str, names))})" if isinstance(names, list) and names else ""
    return f"{raw.get('model_type') or 'unknown'}{architectures}"


def _kind(checkpoint: Headers) -> str:
    if not is_head(checkpoint):
        return "target"
    is_peagle = head_names(checkpoint.tensors)("mask_hidden") in checkpoint
    return "P-EAGLE head" if is_peagle else "EAGLE-3 head"


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


def _lines(infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """One for tensors of equal dtype and shape whose names differ in numbers only."""
    counts, sizes = Counter(), Counter()
    for name, info in infos.items():
        key = _NUMBER.sub("*", name), DTYPE_NAMES[info.dtype], info.shape
        counts[key] += 1
        sizes[key] += info.end - info.begin
    for key, count in sorted(counts.items()):
        (name, dtype, shape), times = key, f" x {count}" if count > 1 else ""
        yield f"  {name}{times}  {dtype} {[*shape]}  {size_text(sizes[key])}"
