"""Acceptance counts: drafts count as accepted only where they became output (docs/algorithm.md)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Acceptance:
    """Counts over some requests.

    Attributes:
      rounds: rounds of draft and verification.
      emitted: tokens that those rounds added to outputs.
      drafted: drafts that the target checked, those after the end of a text included.
      accepted: drafts that became output.
      per_position: in how many rounds the draft at each position became output.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    @classmethod
    def of(cls, items: Iterable) -> Self:
        """Sum over requests, completions or other counts that carry these fields."""
        rounds = emitted = drafted = accepted = 0
        positions: list[int] = []
        for item in items:
            rounds += item.rounds
            emitted += item.emitted
            drafted += item.drafted
            accepted += item.accepted
            mine = item.accepted_per_position
            positions += [0] * (len(mine) - len(positions))
            for i, count in enumerate(mine):
                positions[i] += count
        return cls(rounds, emitted, drafted, accepted, tuple(positions))

    def __sub__(self, before: Self) -> Self:
        """What was counted after `before`, an earlier state of the same counts."""
        earlier = before.per_position or (0,) * len(self.per_position)
        positions = zip(self.per_position, earlier, strict=True)
        return Acceptance(
            self.rounds - before.rounds,
            self.emitted - before.emitted,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in positions),
        )

    @property
    def length(self) -> float:
        """AL: tokens emitted per round, the target's own token included; 1 without rounds."""
        return self.emitted / self.rounds if self.rounds else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of rounds in which each position became output (unconditional, so never increasing)."""
        return tuple(count / self.rounds if self.rounds else 0.0 for count in self.per_position)
