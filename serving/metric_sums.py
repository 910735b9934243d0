"""Adds up the counts of several servers of one engine, so that a scrape is right whichever of them it reaches."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""
Snapshot = Mapping[Key, float]


def key_of(sample: Sample) -> Key:
    """The key of a sample in a snapshot."""
    return sample.name, tuple(sample.labels.items())


class Totals:
    """Counts of all servers of one engine."""

    def __init__(self, snapshots: Sequence[Snapshot]):
        self._snapshots = snapshots

    def of(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name with these labels."""
        return sum(
            value
            for snapshot in self._snapshots
            for (sample, its), value in snapshot.items()
            if sample == name and labels.items() <= dict(its).items()
        )


class Summed:
    """The metrics of a registry, with what other servers have counted added. `generate_latest` takes it.

    A sample that no other server has, such as the engine's own, keeps its value. Times of creation are the
    earliest ones, so that they do not depend on the server that is asked.
    """

    def __init__(self, registry: CollectorRegistry, others: Sequence[Snapshot]):
        self._registry, self._others = registry, others

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [self._summed(sample) for sample in family.samples]
            yield family

    def _summed(self, sample: Sample) -> Sample:
        key = key_of(sample)
        values = [sample.value, *(one[key] for one in self._others if key in one)]
        is_time = sample.name.endswith("_created")
        return sample._replace(value=min(values) if is_time else sum(values))
