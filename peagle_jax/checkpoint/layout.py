"""`Rule`, `Layout` and `Table`: the mapping from the tensors of a file to the parameters of a
model.

A `Table` walks over the parameters of a model and looks up their tensors in a file. The tensors
present decide what is quantised; quantisation lists in config.json are ignored. Without a file it
generates the tensors of an unquantised checkpoint, which is how models are saved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import ml_dtypes
import numpy as np

from peagle_jax.checkpoint.safetensors import CheckpointError, TensorInfo
from peagle_jax.checkpoint.transforms import (
    Concat,
    Copy,
    Merge,
    Scales,
    Shape,
    Stack,
    StackScales,
    Transform,
)

Path = tuple[str | int, ...]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = {np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)}
PACKED = np.dtype(np.uint8)
"""MXFP4 values and scales."""

_MOST_MISSING = 100_000
"""A config.json with absurd sizes would name billions of tensors."""
_MOST_NAMED = 10
_UNUSED = (
    (".rotary_emb.inv_freq", "rope follows from the config"),
    (".input_scale", "activations are not quantised"),
    (".q_scale", "attention is not quantised"),
    (".k_scale", "the KV cache is not quantised"),
    (".v_scale", "the KV cache is not quantised"),
)
"""Suffixes of tensors that are ignored, with the reason."""


class Rule(NamedTuple):
    """Parameter `path` is `transform.join` of the tensors `names`.

    A path that ends in "scale" belongs to the quantised "weight" beside it.
    """

    path: Path
    names: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True)
class Layout:
    """The mapping of a whole file: every tensor is used by a rule, dropped for a reason, or left
    over.

    `missing` are tensors that the model needs and the file lacks. The model can be loaded if
    `missing` and `leftovers` are empty; otherwise `hint` ends the error message.
    """

    rules: list[Rule]
    dropped: dict[str, str]
    leftovers: list[str]
    missing: list[str]
    hint: str = ""

    @property
    def quantized(self) -> bool:
        return any(rule.path[-1] == "scale" for rule in self.rules)

    def check(self, what: str) -> None:
        """Refuses a file that `what` cannot be loaded from.

        Raises:
          CheckpointError: something is missing or left over.
        """
        if problems := self.problems(what):
            raise CheckpointError("; ".join(problems) + self.hint)

    def problems(self, what: str) -> list[str]:
        """What is missing, and what is left over."""
        found = []
        if self.missing:
            more = f" (and {len(self.missing) - 1} more)" if len(self.missing) > 1 else ""
            found.append(f"tensor {self.missing[0]!r} is missing{more}")
        if self.leftovers:
            more = f" and {len(self.leftovers) - 5} more" if len(self.leftovers) > 5 else ""
            found.append(f"tensors without a place in {what}: {self.leftovers[:5]}{more}")
        return found


@dataclass
class Table:
    """Collects rules over `tensors`, or over generated tensors of dtype `invent`.

    `rename` maps the rules' name of a tensor to its name in the file.
    """

    tensors: Mapping[str, TensorInfo]
    rename: Callable[[str], str] = lambda name: name
    invent: np.dtype | None = None
    rules: list[Rule] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)  # sentences
    invented: dict[str, TensorInfo] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.rename(name) in self.tensors

    def plain(
        self, path: Path, names: Sequence[str], *shapes: Shape, transform: Transform | None = None
    ) -> None:
        """A parameter that is never quantised."""
        infos = [self._take(*pair) for pair in zip(names, shapes, strict=True)]
        for info in infos:
            if info is not None and info.dtype not in FLOATS:
                self.misfits.append(
                    f"{info.name} is {info.dtype}; only the matrices of attention, MLP and experts "
                    "may be quantised, this one must be bfloat16, float16 or float32"
                )
        self.add(path, infos, transform or (Copy() if len(names) == 1 else Concat()))

    def vector(self, path: Path, name: str, size: int) -> None:
        self.plain(path, [name], (size,))

    def linear(self, path: Path, bases: Sequence[str], rows: Shape, columns: int) -> None:
        """`weight`, and `scale` if it is FP8, of matrices [rows[i], columns] concatenated along
        rows."""
        infos = [
            self._take(f"{base}.weight", (n, columns)) for base, n in zip(bases, rows, strict=True)
        ]
        join = Copy() if len(bases) == 1 else Concat()
        if self._weight(path, infos, join):
            self._scale(path, bases, Scales(rows, columns))

    def bias(self, path: Path, bases: Sequence[str], rows: Shape) -> None:
        names = [f"{base}.bias" for base in bases]
        self.plain((*path, "bias"), names, *((n,) for n in rows))

    def experts(self, path: Path, bases: Sequence[str], group: Shape, shape: Shape) -> None:
        """`weight` and `scale` of experts that the file stores as one matrix of `shape` per
        expert."""
        infos = [self._take(f"{base}.weight", shape) for base in bases]
        if self._weight(path, infos, Stack(group)):
            self._scale(path, bases, StackScales(group, *shape))

    def packed(self, path: Path, name: str, shape: Shape, transform: Transform) -> None:
        """A uint8 tensor, unchanged: MXFP4 values and scales."""
        info = self._take(name, shape)
        if info is not None and info.dtype != PACKED:
            raise CheckpointError(f"{info.name} is {info.dtype}; MXFP4 is stored as uint8")
        self.add(path, [info], transform)

    def flat(self, path: Path, name: str, size: int, *, axes: int = 1) -> None:
        """A vector that files store with any number of leading axes of size 1; generated ones have
        `axes`."""
        info = self.tensors.get(self.rename(name))
        fits = info is not None and prod(info.shape) == size
        shape = info.shape if fits else (*[1] * (axes - 1), size)
        self.plain(path, [name], shape, transform=Merge())

    def integers(self, path: Path, name: str, size: int) -> None:
        """A vector of whole numbers."""
        info = self._take(name, (size,), np.dtype(np.int64))
        if info is not None and info.dtype.kind != "i":
            raise CheckpointError(f"{info.name} is {info.dtype}, not whole numbers")
        self.add(path, [info], Copy())

    def add(self, path: Path, infos: Sequence[TensorInfo | None], transform: Transform) -> None:
        """A rule for `path`, unless a tensor is missing.

        Raises:
          CheckpointError: the tensors have different dtypes. One parameter has one dtype, and a
            transform does no arithmetic, so that `export` returns every bit of the file.
        """
        present = [info for info in infos if info is not None]
        other = next((info for info in present if info.dtype != present[0].dtype), None)
        if other is not None:
            raise CheckpointError(
                f"{present[0].name} is {present[0].dtype} but {other.name} is {other.dtype}; the "
                f"two are one parameter here, so store them in one dtype ({_common(present)} holds "
                "both exactly)"
            )
        if len(present) == len(infos):
            self.rules.append(Rule(path, tuple(info.name for info in infos), transform))

    def layout(self, drop: Callable[[str], str | None] = lambda name: None) -> Layout:
        """The collected layout. `drop(name)` returns why a tensor may stay unused, or None.

        Raises:
          CheckpointError: names the first tensors of another shape or dtype, and what is missing
            and left over.
        """
        dropped, leftovers = {}, []
        for name in self.tensors:
            if name in self.used:
                continue
            reason = drop(name) or next((why for end, why in _UNUSED if name.endswith(end)), None)
            if reason is None:
                leftovers.append(name)
            else:
                dropped[name] = reason
        made = Layout(self.rules, dropped, leftovers, self.missing)
        if self.misfits:
            more = len(self.misfits) - _MOST_NAMED
            first = [*self.misfits[:_MOST_NAMED], *[f"{more:,} more do not fit"] * (more > 0)]
            raise CheckpointError("; ".join([*first, *made.problems("the model")]))
        return made

    def _take(
        self, name: str, shape: Shape | None, invent: np.dtype | None = None
    ) -> TensorInfo | None:
        """Looks up a tensor and checks its shape. Returns None and records it if it is missing or
        misshapen."""
        name = self.rename(name)
        if self.invent is not None:
            info = TensorInfo(name, invent or self.invent, shape, 0, 0)
            self.invented[name] = info
            return info
        info = self.tensors.get(name)
        if info is None:
            self.missing.append(name)
            if len(self.missing) > _MOST_MISSING:
                raise CheckpointError(
                    f"tensor {self.missing[0]!r} is missing (and more than {_MOST_MISSING:,} "
                    "others): config.json describes another model"
                )
            return None
        self.used.add(name)
        if shape is not None and info.shape != shape:
            self.misfits.append(f"{name} has shape {info.shape}, the config says {shape}")
            return None
        return info

    def _weight(self, path: Path, infos: Sequence[TensorInfo | None], join: Transform) -> bool:
        """Adds the weight's rule. Returns whether the weight is quantised."""
        present = [info for info in infos if info is not None]
        quantized = [info for info in present if info.dtype == FP8]
        if quantized and len(quantized) < len(present):
            plain = next(info for info in present if info.dtype != FP8)
            raise CheckpointError(
                f"{quantized[0].name} is FP8 but {plain.name} is {plain.dtype}; the two are one "
                "matrix here: both must be quantised or neither"
            )
        for info in present:
            if info.dtype != FP8 and info.dtype not in FLOATS:
                self.misfits.append(
                    f"{info.name} is {info.dtype}; a weight can be bfloat16, float16, float32 or "
                    "FP8 (float8_e4m3fn)"
                )
        self.add((*path, "weight"), infos, join)
        return bool(quantized)

    def _scale(self, path: Path, bases: Sequence[str], transform: Transform) -> None:
        infos = []
        for base in bases:
            ends = [
                end for end in ("weight_scale_inv", "weight_scale") if self.has(f"{base}.{end}")
            ]
            if self.has(f"{base}.weight") and not ends:
                raise CheckpointError(
                    f"{self.rename(base + '.weight')} is FP8 but the file holds neither its "
                    "weight_scale_inv nor its weight_scale; without one it has no values"
                )
            if ends:
                infos.append(self._take(f"{base}.{ends[0]}", None))
        for info in infos:
            if info.dtype not in FLOATS:
                raise CheckpointError(f"{info.name} is {info.dtype}; an FP8 scale is a float")
        if len(infos) < len(bases):
            return  # of missing weights
        try:
            transform.shape([info.shape for info in infos])
        except CheckpointError as error:  # the shape of a weight may be wrong too
            self.misfits.append(f"{infos[0].name}: {error}")
            return
        self.add((*path, "scale"), infos, transform)


def _common(infos: Sequence[TensorInfo]) -> np.dtype:
    """The narrowest float dtype that holds all values of the tensors exactly."""
    dtypes = {info.dtype for info in infos}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    alone = sum(dtype.itemsize == widest.itemsize for dtype in dtypes) == 1
    return widest if alone else np.dtype(np.float32)  # float16 and bfloat16
