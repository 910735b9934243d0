"""Reads one device's share of a parameter: only its bytes of a checkpoint, where the stored form allows it.

A share of a memory-mapped file touches the pages of its slices, and a share of a converted folder the chunks
that hold it. So the host holds one share of one parameter at a time, whatever the number of devices.
"""

from math import prod

import numpy as np

from peagle_jax.checkpoint.converted import Converted, joined
from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.safetensors import Checkpoint
from peagle_jax.checkpoint.transforms import Concat, Deinterleave, Merge, Stack, Transpose
from peagle_jax.parallel.shares import Cut, padded_share, share_of


def read_share(
    checkpoint: Checkpoint | Converted, rule: Rule, cut: Cut, rank: int, count: int
) -> np.ndarray:
    """Device `rank`'s share of the parameter that `rule` makes.

    Raises:
      CheckpointError: as `converted.joined`.
    """
    if rule.path[-1] == "scale":  # small, and checked as a whole
        return share_of(joined(checkpoint, rule), cut, rank, count)
    ranges = cut.ranges(rank, count)
    if isinstance(checkpoint, Converted):
        return padded_share(checkpoint.slices(rule, cut.axis, ranges), cut, count)
    tensors = rule.names
    match rule.transform:
        case Concat() if cut.axis == 0 and len(cut.parts) == len(tensors):
            pieces = zip(tensors, _within_parts(cut, ranges), strict=True)
            return np.concatenate([checkpoint.read(name)[slice(*each)] for name, each in pieces])
        case Stack(group) if cut.axis == 0:
            first, last = (edge * prod(group) for edge in ranges[0])
            return rule.transform.join([checkpoint.read(name) for name in tensors[first:last]])
        case Deinterleave() | Transpose() | Merge() if cut.axis == 0 and len(ranges) == 1:
            stored = checkpoint.read(tensors[0])
            if stored.ndim > 1 and stored.shape[0] == cut.parts[0].size:
                return rule.transform.join([stored[slice(*ranges[0])]])
    return share_of(joined(checkpoint, rule), cut, rank, count)


def _within_parts(cut: Cut, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges, one for each part of the cut, counted from the beginning of their parts."""
    starts = np.cumsum([0, *(part.size for part in cut.parts)])[:-1].tolist()
    pairs = zip(ranges, starts, strict=True)
    return [(first - start, last - start) for (first, last), start in pairs]
