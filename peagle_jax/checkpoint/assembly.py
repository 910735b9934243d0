"""One parameter's way from the tensors of a file into host memory: which bytes go where.

Most parameters are their tensors' bytes one after the other, and are read in place: no copy on the
host. Others are transformed or cast a block at a time. Each device's share gets its own bytes only.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from peagle_jax.checkpoint import reads
from peagle_jax.checkpoint.layout import FP8, PACKED, Rule
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError, TensorInfo
from peagle_jax.checkpoint.transforms import IN_ORDER, Copy, Deinterleave, Transpose
from peagle_jax.checkpoint.values import check_scale
from peagle_jax.parallel.shares import Cut, share_of

_BF16 = np.dtype(ml_dtypes.bfloat16)


def stored_dtype(dtype: np.dtype, leaf: str, wanted: str) -> np.dtype:
    """The dtype of a parameter on the device: quantised values and packed scales stay as they are.

    Args:
      dtype: of the file.
      leaf: the last part of the parameter's path.
      wanted: dtype of all that is not quantised.
    """
    if dtype in (FP8, PACKED):
        return dtype
    if leaf == "d2t":
        return np.dtype(np.int32)
    return np.dtype(jnp.float32 if leaf == "scale" else jnp.dtype(wanted))


def cast_into(out: np.ndarray, values: np.ndarray) -> None:
    """`out[...] = values`. A bfloat16 is the upper half of a float32, which numpy shifts without
    the interpreter's lock."""
    if (values.dtype, out.dtype) == (_BF16, np.float32):
        bits = values.view(np.uint16)
        np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = values


@dataclass(frozen=True)
class Sharing:
    """How a parameter is shared.

    Args:
      cut: None: whole.
      ranks: the devices of this process.
      count: of all devices.
    """

    cut: Cut | None = None
    ranks: Sequence[int] = (0,)
    count: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a share."""
        if self.cut is None:
            return shape
        return tuple(
            self.cut.width(self.count) if i == self.cut.axis else n for i, n in enumerate(shape)
        )

    def owners(self) -> Sequence[int]:
        """Ranks with a share of their own; a whole parameter is made once, as that of rank 0."""
        return (0,) if self.cut is None else self.ranks

    def ranges(self, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(first, last, place in the share) of the entries of an axis [size] that a device
        holds."""
        if self.cut is None:
            yield 0, size, 0
            return
        at = 0
        for first, last in self.cut.ranges(rank, self.count):
            yield first, last, at
            at += last - first


class FileAssembly:
    """A parameter on its way. `shares` by rank are complete once its spans are filled.

    Args:
      dtype: of the parameter on the device.
    Attributes:
      nbytes: of host memory that it takes.
      num_read: bytes that are read.
    """

    def __init__(self, checkpoint: Checkpoint, rule: Rule, dtype: np.dtype, sharing: Sharing):
        self.rule, self.dtype, self.sharing = rule, dtype, sharing
        self._infos = [checkpoint.tensors[name] for name in rule.names]
        self._paths = [checkpoint.file_of[name] for name in rule.names]
        self.shape = rule.transform.shape([info.shape for info in self._infos])
        self.shares: dict[int, np.ndarray] = {}
        self._num_left, self._lock = 0, threading.Lock()
        self._raw: np.ndarray | None = None
        self._kind = self._choose()
        share = prod(sharing.shape(self.shape)) * dtype.itemsize
        stored = sum(info.end - info.begin for info in self._infos)
        self.nbytes = stored if self._kind == "whole" else share * len(sharing.owners())
        self.num_read = stored

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """(file, begin, end) of each tensor."""
        pairs = zip(self._paths, self._infos, strict=True)
        return [(str(path), info.begin, info.end) for path, info in pairs]

    def _choose(self) -> str:
        transform, cut, stored = self.rule.transform, self.sharing.cut, self._infos[0].shape
        if self.rule.path[-1] == "scale":
            return "whole"  # small, and checked as a whole
        if isinstance(transform, IN_ORDER) and (cut is None or cut.axis == 0):
            return "in order"
        if isinstance(transform, Copy):
            return "rows"
        keeps_experts = isinstance(transform, Deinterleave) or (
            isinstance(transform, Transpose) and len(stored) > 2
        )
        return "rows" if keeps_experts and (cut is None or cut.axis == 0) else "whole"

    def spans(self, memory: np.ndarray) -> list[reads.Span]:
        """What to read.

        Args:
          memory: uint8 [nbytes], which the shares may lie in.
        """
        if self._kind == "whole":
            self._raw = memory
            spans = list(self._raw_spans())
        else:
            shape = self.sharing.shape(self.shape)
            owners = self.sharing.owners()
            for rank, part in zip(owners, memory.reshape(len(owners), -1), strict=True):
                self.shares[rank] = part.view(self.dtype).reshape(shape)
                self._clear_padding(rank)
            spans = list(self._ordered_spans() if self._kind == "in order" else self._row_spans())
        self._num_left = len(spans)
        if not spans:
            self._finish()
        return spans

    def _clear_padding(self, rank: int) -> None:
        cut = self.sharing.cut
        if cut is not None:
            ((first, last), *more) = cut.ranges(rank, self.sharing.count)
            end = last - first + sum(last - first for first, last in more)
            self.shares[rank][(*[slice(None)] * cut.axis, slice(end, None))] = 0

    def _raw_spans(self) -> Iterator[reads.Span]:
        start = 0
        for path, info in zip(self._paths, self._infos, strict=True):
            out = self._raw[start : start + info.end - info.begin]
            yield from reads.in_place(path, info.name, info.begin, out, self._filled)
            start += len(out)

    def _ordered_spans(self) -> Iterator[reads.Span]:
        """The parameter as one vector: its tensors are ranges of it, and shares are too."""
        size, inner = prod(self.shape), prod(self.shape[1:])
        held = []
        for rank, share in self.shares.items():
            flat = share.reshape(-1)
            step = 1 if self.sharing.cut is None else inner
            for first, last, at in self.sharing.ranges(rank, size):
                held.append((first * step, last * step, flat[at * step :]))
        start = 0
        for path, info in zip(self._paths, self._infos, strict=True):
            count = prod(info.shape)
            for first, last, out in held:
                lo, hi = max(first, start), min(last, start + count)
                if lo < hi:
                    begin = info.begin + (lo - start) * info.dtype.itemsize
                    yield from self._vector_spans(path, info, begin, out[lo - first : hi - first])
            start += count

    def _vector_spans(self, path, info: TensorInfo, begin: int, out: np.ndarray):
        """Spans that read the numbers of a tensor from byte `begin` on into `out` [n], and cast
        them."""
        if info.dtype == self.dtype:
            yield from reads.in_place(path, info.name, begin, out.view(np.uint8), self._filled)
            return
        step = reads.MOST_BYTES // info.dtype.itemsize
        for start in range(0, len(out), step):
            part, at = out[start : start + step], begin + start * info.dtype.itemsize
            place = lambda data, part=part: cast_into(part, data.view(info.dtype))
            size = len(part) * info.dtype.itemsize
            yield reads.Span(path, info.name, at, size, None, place, self._filled)

    def _row_spans(self) -> Iterator[reads.Span]:
        """The only tensor in blocks of its first axis, which is the parameter's too."""
        (info,), (path,), cut = self._infos, self._paths, self.sharing.cut
        rows, row_bytes = info.shape[0], prod(info.shape[1:]) * info.dtype.itemsize
        if not row_bytes:
            return
        by_rows = cut is not None and cut.axis == 0
        spanned = [each for rank in self.shares for each in self.sharing.ranges(rank, rows)]
        step = max(1, reads.MOST_BYTES // row_bytes)
        for first, last in {each[:2] for each in spanned} if by_rows else [(0, rows)]:
            for start in range(first, last, step):
                stop = min(start + step, last)
                place = lambda data, start=start, stop=stop: self._place_rows(data, start, stop)
                begin, size = info.begin + start * row_bytes, (stop - start) * row_bytes
                yield reads.Span(path, info.name, begin, size, None, place, self._filled)

    def _place_rows(self, data: np.ndarray, start: int, stop: int) -> None:
        """Puts rows `start` to `stop` of the tensor, bytes uint8 [n], where the shares have
        them."""
        (info,), cut = self._infos, self.sharing.cut
        stored = data.view(info.dtype).reshape(stop - start, *info.shape[1:])
        value = self.rule.transform.join([stored])
        for rank, share in self.shares.items():
            if cut is None:
                cast_into(share[start:stop], value)
                continue
            before = (slice(None),) * (cut.axis - 1)
            for first, last, at in self.sharing.ranges(rank, self.shape[cut.axis]):
                if cut.axis:
                    index = (slice(start, stop), *before, slice(at, at + last - first))
                    cast_into(share[index], value[(slice(None), *before, slice(first, last))])
                elif first < stop and start < last:
                    lo, hi = max(first, start), min(last, stop)
                    cast_into(
                        share[at + lo - first : at + hi - first], value[lo - start : hi - start]
                    )

    def _filled(self) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._finish()

    def _finish(self) -> None:
        if self._kind != "whole":
            return
        parts, start = [], 0
        for info in self._infos:
            size = info.end - info.begin
            parts.append(self._raw[start : start + size].view(info.dtype).reshape(info.shape))
            start += size
        if self.rule.path[-1] == "scale":
            self._check_scales(parts)
        value = np.asarray(self.rule.transform.join(parts), dtype=self.dtype)
        cut, count = self.sharing.cut, self.sharing.count
        self.shares = {
            rank: value if cut is None else share_of(value, cut, rank, count)
            for rank in self.sharing.owners()
        }
        self._raw = None

    def _check_scales(self, parts: Sequence[np.ndarray]) -> None:
        """All at once, because a call for each of thousands takes longer than reading them; then by
        name."""
        try:
            check_scale(self.rule.names[0], self._raw.view(self._infos[0].dtype))
        except CheckpointError:
            for name, part in zip(self.rule.names, parts, strict=True):
                check_scale(name, part)
            raise
