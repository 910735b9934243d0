"""Splits a parameter into blocks of bounded size: the bytes to read, and the transform to apply.

A block is a range of rows along axis 0 of a parameter, and one chunk on disk. Three cases:

- the parameter is the concatenation of its tensors' bytes (copy, merge, concatenate, stack): a block is a
  byte range of this concatenation, across tensor boundaries;
- one tensor is re-ordered within each entry of its leading axis (experts): a block is a range of entries;
- anything else (scales) is small: one block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.safetensors import TensorInfo
from peagle_jax.checkpoint.transforms import IN_ORDER, Deinterleave, Shape, Transpose

BLOCK_BYTES = 32_000_000
"""Below glibc's maximum mmap threshold (32 MiB): larger buffers would page-fault on every reuse."""
BY_ENTRY = (Deinterleave, Transpose)
_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `end` of tensor `name`, to be read to `offset` of the block's buffer."""

    name: str
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Block:
    """`make(buffer)` returns `parameter[index]`, contiguous, after all pieces were read into the buffer.

    The result may be a view of the buffer.
    """

    index: tuple[slice, ...]
    pieces: tuple[Piece, ...]
    nbytes: int
    make: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Blocks:
    """The blocks of one parameter. `step` is the number of rows per block; `copied` says whether the
    parameter is the concatenation of its tensors' bytes."""

    rule: Rule
    infos: tuple[TensorInfo, ...]
    shape: Shape
    dtype: np.dtype
    step: int
    copied: bool
    largest: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def chunk(self) -> Shape:
        """Shape of a chunk on disk."""
        return (self.step, *(max(n, 1) for n in self.shape[1:])) if self.shape else ()

    @property
    def chunk_bytes(self) -> int:
        return prod(self.chunk) * self.dtype.itemsize

    def __iter__(self) -> Iterator[Block]:
        if not self.nbytes:
            return
        if self.copied:
            yield from _runs(self)
        elif isinstance(self.rule.transform, BY_ENTRY):
            yield from _entries(self)
        else:
            yield _whole(self)


def blocks_of(rule: Rule, tensors, limit: int = BLOCK_BYTES) -> Blocks:
    """Cuts a parameter so that a block has at most `limit` bytes, but at least one row or entry.

    Args:
      tensors: name -> TensorInfo of the source.
    """
    infos = tuple(tensors[name] for name in rule.names)
    shape = rule.transform.shape([info.shape for info in infos])
    (dtype,) = {info.dtype for info in infos}  # `Table.add` refuses mixed dtypes
    copied = isinstance(rule.transform, IN_ORDER)
    rows = shape[0] if shape else 1
    row_bytes = max(prod(shape[1:]) * dtype.itemsize, 1)
    if copied or isinstance(rule.transform, BY_ENTRY):
        step = _step(rows, max(limit // row_bytes, 1))
        largest = step * row_bytes
    else:
        step = max(rows, 1)
        largest = sum(_aligned(info.end - info.begin) for info in infos)
    return Blocks(rule, infos, shape, dtype, step, copied, largest)


def _step(rows: int, most: int) -> int:
    """Rows per block, at most `most`, so that all blocks have about equal size."""
    num_blocks = max(-(-rows // most), 1)
    return max(-(-rows // num_blocks), 1)


def _rows(blocks: Blocks) -> Iterator[tuple[int, int]]:
    rows = blocks.shape[0] if blocks.shape else 1
    for start in range(0, rows, blocks.step):
        yield start, min(start + blocks.step, rows)


def _index(blocks: Blocks, start: int, stop: int) -> tuple[slice, ...]:
    return (slice(start, stop),) if blocks.shape else ()


def _runs(blocks: Blocks) -> Iterator[Block]:
    row_bytes = blocks.nbytes // (blocks.shape[0] if blocks.shape else 1)
    ends = np.cumsum([info.end - info.begin for info in blocks.infos]).tolist()
    for start, stop in _rows(blocks):
        shape = (stop - start, *blocks.shape[1:]) if blocks.shape else ()
        pieces = tuple(_overlaps(blocks.infos, ends, start * row_bytes, stop * row_bytes))
        size = (stop - start) * row_bytes
        make = _viewer(blocks.dtype, shape, size)
        yield Block(_index(blocks, start, stop), pieces, size, make)


def _viewer(dtype: np.dtype, shape: Shape, size: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda buffer: buffer[:size].view(dtype).reshape(shape)


def _overlaps(
    infos: Sequence[TensorInfo], ends: list[int], begin: int, end: int
) -> Iterator[Piece]:
    """Pieces of the tensors for bytes `begin` to `end` of their concatenation."""
    first = int(np.searchsorted(ends, begin, side="right"))
    for info, stop in zip(infos[first:], ends[first:], strict=True):
        start = stop - (info.end - info.begin)
        if start >= end:
            return
        low, high = max(begin, start), min(end, stop)
        if low < high:
            yield Piece(info.name, low - start, high - start, low - begin)


def _entries(blocks: Blocks) -> Iterator[Block]:
    (info,) = blocks.infos
    entry_bytes = (info.end - info.begin) // info.shape[0]
    for start, stop in _rows(blocks):
        size = (stop - start) * entry_bytes
        view = _viewer(info.dtype, (stop - start, *info.shape[1:]), size)
        piece = Piece(info.name, start * entry_bytes, stop * entry_bytes, 0)
        make = lambda buffer, view=view: np.ascontiguousarray(
            blocks.rule.transform.join([view(buffer)])
        )
        yield Block(_index(blocks, start, stop), (piece,), size, make)


def _whole(blocks: Blocks) -> Block:
    pieces, views, offset = [], [], 0
    for info in blocks.infos:
        size = info.end - info.begin
        pieces.append(Piece(info.name, 0, size, offset))
        views.append((offset, size, info))
        offset += _aligned(size)

    def make(buffer: np.ndarray) -> np.ndarray:
        parts = [
            buffer[at : at + size].view(info.dtype).reshape(info.shape) for at, size, info in views
        ]
        joined = blocks.rule.transform.join(parts)
        return np.ascontiguousarray(joined).reshape(blocks.shape)

    return Block(
        _index(blocks, 0, blocks.shape[0] if blocks.shape else 1), tuple(pieces), offset, make
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
