"""The plan of a conversion: the parameter of each tensor, left-over and missing tensors, memory cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from convert.blocks import BLOCK_BYTES, Blocks, blocks_of
from convert.source import Source
from peagle_jax.checkpoint.converted import DTYPE_NAMES, UNUSED, Parameter
from peagle_jax.checkpoint.layout import Path, Rule
from peagle_jax.checkpoint.transforms import Copy, Shape
from peagle_jax.parallel.partition import AXIS
from peagle_jax.parallel.shares import check_shares, cut_of

GROUP_BYTES = 2_000_000_000
"""Maximum bytes per group of several parameters. A killed run repeats at most one group."""
IN_FLIGHT_BYTES = 300_000_000
WORKERS = 3
BASE_BYTES = 250_000_000
"""Resident memory of Python with jax, Orbax and tensorstore loaded (measured)."""


@dataclass(frozen=True)
class Row:
    """One source tensor, and the parameter it becomes or is a part of."""

    tensor: str
    dtype: str
    shape: Shape
    nbytes: int
    path: str  # "" for leftovers
    transform: str
    made_dtype: str
    made_shape: Shape
    sharding: str
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Parameters of one Orbax checkpoint."""

    name: str
    members: tuple[Blocks, ...]

    @property
    def nbytes(self) -> int:
        return sum(member.nbytes for member in self.members)


@dataclass(frozen=True)
class Plan:
    """A source and its output groups. The plan can be executed if nothing is left over or missing."""

    source: Source
    groups: tuple[Group, ...]

    @property
    def leftovers(self) -> list[str]:
        return self.source.layout.leftovers

    @property
    def missing(self) -> list[str]:
        return self.source.layout.missing

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def peak_bytes(self) -> int:
        """Estimate of peak resident memory: the imported libraries, and per thread three buffers of a
        re-ordered block (input, output, temporary)."""
        members = [member for group in self.groups for member in group.members]
        return BASE_BYTES + 3 * WORKERS * max(
            (m.largest for m in members if not m.copied), default=0
        )

    def device_bytes(self, num_devices: int) -> int:
        """Bytes of the parameters that each of several devices holds (docs/parallel.md).

        Raises:
          ConfigError: the devices cannot share the model.
        """
        config, total = self.source.config, 0
        check_shares(config, num_devices)
        members = {m.rule.path: m for group in self.groups for m in group.members}
        for path, member in members.items():
            if path[0] == UNUSED:
                continue
            weight = members.get((*path[:-1], "weight"), member)
            shape = list(member.shape)
            if cut := cut_of(config, path, shape, weight.shape, num_devices):
                shape[cut.axis] = cut.width(num_devices)
            total += prod(shape) * member.dtype.itemsize
        return total

    def parameters(self) -> list[Parameter]:
        """All parameters to write, with empty hashes."""
        return [_parameter(member, group.name) for group in self.groups for member in group.members]

    def rows(self) -> Iterator[Row]:
        """One row for every tensor of the source, in the order of writing; leftovers last."""
        for group in self.groups:
            for member in group.members:
                yield from self._rows(member)
        for name in self.leftovers:
            yield self._row(name, "", "", None)

    def _rows(self, member: Blocks) -> Iterator[Row]:
        rule = member.rule
        note = self.source.layout.dropped.get(rule.names[0], "")
        for name in rule.names:
            yield self._row(name, ".".join(map(str, rule.path)), note, member)

    def _row(self, name: str, path: str, note: str, member: Blocks | None) -> Row:
        info = self.source.tensors.infos[name]
        parameter = member and (
            member.rule.transform.name,
            DTYPE_NAMES[member.dtype],
            member.shape,
            partition(member.rule.path, member.shape),
        )
        dtype = DTYPE_NAMES[info.dtype]
        size = info.end - info.begin
        return Row(name, dtype, info.shape, size, path, *(parameter or ("", "", (), "")), note)


def make_plan(
    source: Source, *, in_flight: int = IN_FLIGHT_BYTES, group_bytes: int = GROUP_BYTES
) -> Plan:
    """Cuts a source into groups of consecutive parameters.

    Args:
      in_flight: maximum bytes of blocks in memory, unless a single entry of a tensor is larger.
      group_bytes: maximum size of a group; a larger parameter gets its own group.
    """
    infos = source.tensors.infos
    limit = max(min(BLOCK_BYTES, in_flight // (3 * WORKERS)), 1)
    unused = [
        Rule((UNUSED, i), (name,), Copy()) for i, name in enumerate(sorted(source.layout.dropped))
    ]
    packed: list[list[Blocks]] = []
    room = 0
    for rule in (*source.layout.rules, *unused):
        blocks = blocks_of(rule, infos, limit)
        if not packed or blocks.nbytes > room:
            packed.append([])
            room = group_bytes
        packed[-1].append(blocks)
        room -= blocks.nbytes
    groups = tuple(Group(f"{i:04d}", tuple(members)) for i, members in enumerate(packed))
    return Plan(source, groups)


def _parameter(member: Blocks, group: str) -> Parameter:
    rule = member.rule
    return Parameter(
        path=rule.path,
        names=rule.names,
        transform=rule.transform.name,
        dtype=member.dtype,
        shape=member.shape,
        group=group,
    )


_ROWS = ("qkv", "gate_up", "embed", "lm_head")
_COLUMNS = ("out", "down")


def partition(path: Path, shape: Shape) -> str:
    """Suggested sharding of a parameter over the mesh axis of the engine, as a PartitionSpec in text.

    Rows of q/k/v and of gate/up, columns of the projections back (their biases are added once, so they
    are replicated), experts along E, embeddings along the vocabulary; the rest is replicated. A scale
    follows its weight where it has more than one entry along that axis.
    """
    module, leaf = path[-2] if len(path) > 1 else "", path[-1]
    is_expert = module in ("gate_up", "down") and len(shape) + (leaf == "bias") > 2
    axis = None
    if is_expert or module in _ROWS or leaf == "sinks":
        axis = 0
    elif module in _COLUMNS and leaf != "bias":
        axis = len(shape) - 1
    if axis is None or shape[axis] == 1:
        return "P()"
    names = [f'"{AXIS}"' if i == axis else "None" for i in range(axis + 1)]
    return f"P({', '.join(names)})"
