"""The plan of a conversion: the parameter of each tensor, left-over and missing tensors, memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from convert.source import Source
from peagle_jax.checkpoint.converted import DTYPE_NAMES, UNUSED, Parameter
from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.transforms import Copy, Shape
from peagle_jax.parallel.shares import check_shares, cut_of

BASE_BYTES = 250_000_000
"""Resident memory of Python with jax, Orbax and tensorstore loaded (measured)."""
GROUP = "0000"
"""Folder of the Orbax checkpoint in weights/."""


@dataclass(frozen=True)
class Row:
    """One source tensor, and the parameter it becomes or is a part of; `path` "" if it is none."""

    tensor: str
    dtype: str
    shape: Shape
    path: str = ""
    transform: str = ""
    made_shape: Shape = ()
    note: str = ""

    def __str__(self) -> str:
        made = f"{self.transform} -> {self.path} {[*self.made_shape]}" if self.path else "LEFT OVER"
        note = f"  (not used: {self.note})" if self.note else ""
        return f"{self.tensor}  {self.dtype} {[*self.shape]}  {made}{note}"


@dataclass(frozen=True)
class Plan:
    """A source and the rules of its parameters, in the order of writing. It can be executed if no
    tensor is left over or missing."""

    source: Source
    rules: tuple[Rule, ...]

    @property
    def parameters(self) -> list[Parameter]:
        """What is written, without hashes."""
        return [self._parameter(rule) for rule in self.rules]

    def _parameter(self, rule: Rule) -> Parameter:
        infos = [self.source.checkpoint.tensors[name] for name in rule.names]
        return Parameter(
            path=rule.path,
            names=rule.names,
            transform=rule.transform.name,
            dtype=infos[0].dtype,  # of all: `Table.add` refuses mixed dtypes
            shape=rule.transform.shape([info.shape for info in infos]),
            group=GROUP,
        )

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def peak_bytes(self) -> int:
        """Estimate of peak resident memory: the libraries, and three copies of a parameter (its
        tensors, the result, and memory that is freed and not given back)."""
        return BASE_BYTES + 3 * max((one.nbytes for one in self.parameters), default=0)

    def device_bytes(self, num_devices: int) -> int:
        """Bytes of the parameters that each of several devices holds (docs/parallel.md).

        Raises:
          ConfigError: the devices cannot share the model.
        """
        config, total = self.source.config, 0
        check_shares(config, num_devices)
        parameters = {one.path: one for one in self.parameters if one.path[0] != UNUSED}
        for path, one in parameters.items():
            weight, shape = parameters.get((*path[:-1], "weight"), one), list(one.shape)
            if cut := cut_of(config, path, shape, weight.shape, num_devices):
                shape[cut.axis] = cut.width(num_devices)
            total += prod(shape) * one.dtype.itemsize
        return total

    def rows(self) -> Iterator[Row]:
        """One row for every tensor of the source, in the order of writing; leftovers last."""
        layout, infos = self.source.layout, self.source.checkpoint.tensors
        places = {name: parameter for parameter in self.parameters for name in parameter.names}
        for name in (*places, *layout.leftovers):
            stored = (name, DTYPE_NAMES[infos[name].dtype], infos[name].shape)
            if one := places.get(name):
                yield Row(*stored, one.key, one.transform, one.shape, layout.dropped.get(name, ""))
            else:
                yield Row(*stored)


def make_plan(source: Source) -> Plan:
    """The rules of the model, and a copy of each tensor that it does not use."""
    dropped = enumerate(sorted(source.layout.dropped))
    unused = (Rule((UNUSED, i), (name,), Copy()) for i, name in dropped)
    return Plan(source, (*source.layout.rules, *unused))
