"""Acceptance counts. A draft counts as accepted only if it became output (docs/algorithm.md)."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.request import at_least


class DeviceMemory(NamedTuple):
    """Bytes of one device: in use, the most since the start of the process, and what jax may
    use."""

    used: int
    peak: int
    limit: int


@dataclass(frozen=True)
class Acceptance:
    """Counts over a set of requests.

    Attributes:
      rounds: draft-and-verify rounds.
      emitted: tokens that these rounds added to outputs.
      drafted: drafts that the target verified, including those after the end of a text.
      accepted: drafts that became output.
      per_position: per draft position, the number of rounds in which that draft became output.
      drafted_per_position: per draft position, the number of rounds that verified that draft.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()
    drafted_per_position: tuple[int, ...] = ()

    @classmethod
    def of(cls, items: Iterable) -> Self:
        """Sum over requests, completions or other counts that carry these fields."""
        rounds = emitted = drafted = accepted = 0
        positions: tuple[int, ...] = ()
        drafted_positions: tuple[int, ...] = ()
        for item in items:
            rounds += item.rounds
            emitted += item.emitted
            drafted += item.drafted
            accepted += item.accepted
            positions = _added(positions, item.accepted_per_position)
            drafted_positions = _added(drafted_positions, item.drafted_per_position)
        return cls(rounds, emitted, drafted, accepted, positions, drafted_positions)

    def __sub__(self, before: Self) -> Self:
        """The counts since `before`, an earlier snapshot of the same counters."""
        less = lambda now, then: _added(now, [-count for count in then])
        return Acceptance(
            self.rounds - before.rounds,
            self.emitted - before.emitted,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            less(self.per_position, before.per_position),
            less(self.drafted_per_position, before.drafted_per_position),
        )

    def as_row(self) -> dict[str, int | float | list[float]]:
        """The counts as reports show them."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.length,
            "acceptance_per_position": list(self.rates),
        }

    @property
    def length(self) -> float:
        """AL, the acceptance length: tokens emitted per round, the target's included; 1 without
        rounds."""
        return self.emitted / self.rounds if self.rounds else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Per position, the share of the rounds that verified its draft in which it became
        output."""
        counts = zip(self.per_position, self.drafted_per_position, strict=True)
        return tuple(accepted / drafted if drafted else 0.0 for accepted, drafted in counts)


def _added(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """Sums by position; missing counts are 0."""
    return tuple(a + b for a, b in itertools.zip_longest(first, second, fillvalue=0))


class RoundCounter:
    """Counts rounds with drafts, those of unfinished requests too."""

    def __init__(self, config: EngineConfig):
        self._drafted = self._emitted = 0
        self._by_accepted = [0] * (config.num_draft + 1)
        self._by_drafted = [0] * (config.num_draft + 1)

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        """Counts a round that verified `drafted` drafts, if any, and added `emitted` tokens to an
        output."""
        if drafted:
            self._emitted += emitted
            self._drafted += drafted
            self._by_accepted[accepted] += 1
            self._by_drafted[drafted] += 1

    @property
    def acceptance(self) -> Acceptance:
        """The sums."""
        rounds, reached = sum(self._by_accepted), tuple(at_least(self._by_accepted))
        verified = tuple(at_least(self._by_drafted))
        return Acceptance(rounds, self._emitted, self._drafted, sum(reached), reached, verified)
