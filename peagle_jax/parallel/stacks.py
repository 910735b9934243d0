"""Weights of one shape as one operand: with several devices each operand of a call costs the host
about two microseconds.

A program takes the stacked weights, and begins with slices of them. On a GPU kernels read a slice
where it lies, if it begins where an array may begin (XLA's fusion of slices into custom calls).
Shares of another size stay operands: with zeros behind them XLA copies their slices (four layers of
GPT-OSS-120B for two H200: 26 operands less, but 17 copies and 10 kernels more).
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import dispatch

MOST_BYTES = 1 << 20
"""Largest share of a weight that is stacked. Larger ones would be in memory twice while their stack
is made."""
_ALIGNMENT = 256  # bytes, of each array in memory that XLA allocates on a GPU
_PLATFORMS = ("cuda", "cpu")  # a TPU would copy each slice in every call


class Stacks:
    """Chooses the leaves that become one array: those of one shape, dtype and sharding that are
    small enough.

    Args:
      leaves: arrays or their shapes, each with a `NamedSharding` over the same devices.
    """

    def __init__(self, leaves: Sequence):
        groups: dict[tuple, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if _is_stacked(leaf):
                key = (leaf.shape, leaf.dtype, leaf.sharding.spec)
                groups.setdefault(key, []).append(i)
        self._groups = [group for group in groups.values() if len(group) > 1]
        stacked = {i for group in self._groups for i in group}
        self.alone = [i for i in range(len(leaves)) if i not in stacked]
        """Leaves that stay operands, which are the first."""

    def operands(self, leaves: Sequence) -> list:
        """The arrays, or shapes, that a program takes instead of the leaves."""
        return [*(leaves[i] for i in self.alone), *self.stacks(leaves)]

    def stacks(self, leaves: Sequence) -> list:
        """The operands behind those of `alone`."""
        return [_stacked([leaves[i] for i in group]) for group in self._groups]

    def leaves(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves, or one device's shares of them, from those of `operands`."""
        by_index = dict(zip(self.alone, operands, strict=False))
        stacks = operands[len(self.alone) :]
        for group, stack in zip(self._groups, stacks, strict=True):
            by_index |= zip(group, _unstacked(stack), strict=True)
        return [by_index[i] for i in range(len(by_index))]

    def replace(self, operands: list, take: Sequence[Callable | None]) -> None:
        """Replaces leaves of stacks, see `Devices.replace_weights`."""
        for place, group in enumerate(self._groups, len(self.alone)):
            if any(take[i] is not None for i in group):
                pairs = zip(group, _unstacked(operands[place]), strict=True)
                operands[place] = _stacked([x if take[i] is None else take[i](x) for i, x in pairs])


def _is_stacked(leaf) -> bool:
    size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return size <= MOST_BYTES and size % _ALIGNMENT == 0 and dispatch.platform() in _PLATFORMS


def _stacked(leaves: list):
    """The leaves as one array [n, ...], or its shape; each device stacks its own shares."""
    first, shape = leaves[0], (len(leaves), *leaves[0].shape)
    sharding = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=sharding)
    return jax.jit(jnp.stack, out_shardings=sharding)(leaves)


def _unstacked(stack: jax.Array) -> list:
    if isinstance(stack, jax.core.Tracer):  # one device's shares
        return list(stack)
    sharding = NamedSharding(stack.sharding.mesh, PartitionSpec(*stack.sharding.spec[1:]))
    return jax.jit(list, out_shardings=sharding)(stack)
