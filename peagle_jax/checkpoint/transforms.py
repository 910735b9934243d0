"""Transforms: tensors of a file -> one parameter (`join`), and back bit for bit (`split`). numpy
only.

`join` returns a view where numpy can, otherwise one copy. `join` also accepts parts that are sliced
along their leading expert axis, and a subset of stacked experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol

import numpy as np

from pallas_kernels.blocks import BLOCK
from peagle_jax.checkpoint.safetensors import CheckpointError

Shape = tuple[int, ...]


class Like(Protocol):
    """Shape and dtype of a tensor: an array or a `TensorInfo`."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype: ...


class Transform(Protocol):
    """`split(join(parts), parts)` is `parts`, to the last bit.

    `shape` computes the shape of `join`'s result from the parts' shapes.

    Raises:
      CheckpointError: (all three) the parts do not fit together.
    """

    name: ClassVar[str]

    def shape(self, shapes: Sequence[Shape]) -> Shape: ...

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray: ...

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class Copy:
    """The tensor as it is."""

    name: ClassVar[str] = "copy"

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0]

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]:
        return [_as(array, like[0])]


@dataclass(frozen=True)
class Merge:
    """The last `axes` axes as one: all of [1, 1, X] -> [X], MXFP4 blocks [E, D, G, 16] -> [E, D,
    16G]."""

    axes: int | None = None
    name: ClassVar[str] = "merge axes"

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        (shape,) = shapes
        kept = 0 if self.axes is None else len(shape) - self.axes
        return (*shape[:kept], prod(shape[kept:]))

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].reshape(self.shape([parts[0].shape]))

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]:
        return [_as(array.reshape(like[0].shape), like[0])]


@dataclass(frozen=True)
class Concat:
    """Rows of one tensor after the other: q, k, v -> qkv."""

    name: ClassVar[str] = "concatenate"

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]:
        edges = np.cumsum([part.shape[0] for part in like])[:-1]
        return [_as(rows, part) for rows, part in zip(np.split(array, edges), like, strict=True)]


@dataclass(frozen=True)
class Stack:
    """One tensor an expert, or `group` of them: gate 0, up 0, gate 1, ... [F, D] -> [E, 2, F,
    D]."""

    group: Shape = ()
    name: ClassVar[str] = "stack experts"

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (len(shapes) // prod(self.group), *self.group, *shapes[0])

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(parts).reshape(self.shape([part.shape for part in parts]))

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]:
        flat = array.reshape(len(like), *array.shape[1 + len(self.group) :])
        return [_as(leaf, part) for leaf, part in zip(flat, like, strict=True)]


IN_ORDER = (Copy, Merge, Concat, Stack)
"""Transforms whose result has the bytes of the tensors, one after the other."""


@dataclass(frozen=True)
class Deinterleave:
    """GPT-OSS's alternating rows of gate and up: [E, 2F, ...] -> [E, 2, F, ...].

    Groups [E, 2F, G, 16] of packed bytes become [E, 2, F, 16G]. `transposed` is the form that
    transformers saves, with the rows last: [E, D, 2F] -> [E, 2, F, D].
    """

    transposed: bool = False
    name: ClassVar[str] = "de-interleave"

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        E, *rest = shapes[0]
        rows, *inner = reversed(rest) if self.transposed else rest
        return (E, 2, rows // 2, *([prod(inner)] if inner else []))

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        (x,) = parts
        x = x.swapaxes(1, 2) if self.transposed else x
        E, rows, *inner = x.shape
        return (
            x.reshape(E, rows // 2, 2, *inner).swapaxes(1, 2).reshape(self.shape([parts[0].shape]))
        )

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]:
        E, _, F, *inner = array.shape
        rows = array.swapaxes(1, 2).reshape(E, 2 * F, *inner)
        rows = rows.swapaxes(1, 2) if self.transposed else rows.reshape(like[0].shape)
        return [_as(rows, like[0])]


@dataclass(frozen=True)
class Transpose:
    """Transposes the last two axes: GPT-OSS as transformers saves it, [E, F, D] -> [E, D, F]."""

    name: ClassVar[str] = "transpose"

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        *outer, rows, columns = shapes[0]
        return (*outer, columns, rows)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].swapaxes(-1, -2)

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]:
        return [_as(array.swapaxes(-1, -2), like[0])]


@dataclass(frozen=True)
class Scales:
    """FP8 scales of matrices [rows[i], columns] that are concatenated along rows -> [Sn, Sk].

    A file has one scale per 128 x 128 block [ceil(n/128), ceil(k/128)], per row [n, 1] or [n], or
    per tensor [] or [1]. The result has block scales if the row counts of all matrices but the last
    are multiples of 128, so that block boundaries coincide; otherwise it has row scales [n, Sk].

    >>> Scales((256, 100), 300).shape([(2, 3), (1, 3)])
    (3, 3)
    >>> Scales((100, 256), 300).shape([(1, 3), (2, 3)])
    (356, 3)
    """

    rows: Shape
    columns: int
    name: ClassVar[str] = "join scales"

    def _plan(self, shapes: Sequence[Shape]) -> tuple[list[Shape], bool, int]:
        """(each part's shape as a matrix, whether blocks stay, Sk)."""
        grids = [_grid(*of, self.columns) for of in zip(shapes, self.rows, strict=True)]
        blocks = [grid[0] == _ceil(n) for grid, n in zip(grids, self.rows, strict=True)]
        # [] and [1] say the same for every block, but blocks only stay where a file has them.
        blocks = [b and len(shape) == 2 for b, shape in zip(blocks, shapes, strict=True)]
        stay = all(blocks) and not any(n % BLOCK for n in self.rows[:-1])
        return grids, stay, max(grid[1] for grid in grids)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        grids, stay, columns = self._plan(shapes)
        return (sum(grid[0] for grid in grids) if stay else sum(self.rows), columns)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        grids, stay, columns = self._plan([part.shape for part in parts])
        out = []
        for part, grid, n in zip(parts, grids, self.rows, strict=True):
            scale = np.broadcast_to(part.reshape(grid), (grid[0], columns))
            if not stay and grid[0] != n:
                scale = np.repeat(scale, n if grid[0] == 1 else BLOCK, axis=0)[:n]
            out.append(scale)
        return np.concatenate(out)

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]:
        grids, stay, _ = self._plan([part.shape for part in like])
        parts, start = [], 0
        for part, grid, n in zip(like, grids, self.rows, strict=True):
            height = grid[0] if stay else n
            scale = array[start : start + height, : grid[1]]
            start += height
            if not stay and grid[0] != n:
                scale = scale[::BLOCK] if grid[0] > 1 else scale[:1]
            parts.append(_as(scale.reshape(part.shape), part))
        return parts


@dataclass(frozen=True)
class StackScales:
    """`Stack` for the FP8 scales of experts' matrices [rows, columns]: -> [E, *group, Sn, Sk]."""

    group: Shape
    rows: int
    columns: int
    name: ClassVar[str] = "stack scales"

    @property
    def _one(self) -> Scales:
        return Scales((self.rows,), self.columns)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        results = {self._one.shape([shape]) for shape in set(shapes)}
        if len(results) > 1:
            raise CheckpointError("the experts' scales have different forms")
        return Stack(self.group).shape([results.pop()] * len(shapes))

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        shapes = {part.shape for part in parts}
        if any(shape != self._one.shape([shape]) for shape in shapes):
            parts = [self._one.join([part]) for part in parts]
        return Stack(self.group).join(parts)

    def split(self, array: np.ndarray, like: Sequence[Like]) -> list[np.ndarray]:
        flat = array.reshape(len(like), *array.shape[-2:])
        return [self._one.split(*of)[0] for of in zip(flat, ([part] for part in like), strict=True)]


def _as(array: np.ndarray, like: Like) -> np.ndarray:
    """The array in another's dtype: nothing to do but for a model that was loaded in a wider
    one."""
    return array.astype(like.dtype, copy=False)


def _ceil(n: int) -> int:
    return -(-n // BLOCK)


def _grid(shape: Shape, rows: int, columns: int) -> Shape:
    """A scale's shape as [Sn, Sk]; [1, 1] where it is one for the whole matrix."""
    if prod(shape) == 1:
        return (1, 1)
    if shape == (rows,):
        return (rows, 1)
    if len(shape) == 2 and shape[0] in (rows, _ceil(rows)) and shape[1] in (1, _ceil(columns)):
        return shape
    raise CheckpointError(
        f"an FP8 scale of shape {shape} does not fit a weight [{rows}, {columns}]; known are one "
        f"scale for each 128 x 128 block [{_ceil(rows)}, {_ceil(columns)}], each row [{rows}, 1] "
        "or the tensor"
    )
