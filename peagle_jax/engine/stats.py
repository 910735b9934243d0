"""Acceptance counts, with vLLM's definitions (peagle-spec 3.11) so that values compare."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Acceptance:
    """Counts over some requests; `per_position[i]` rounds had draft i+1 accepted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    @classmethod
    def of(cls, items: Iterable) -> Self:
        """Sum over requests, completions or other counts that carry these fields."""
        rounds = drafted = accepted = 0
        positions: list[int] = []
        for item in items:
            rounds += item.rounds
            drafted += item.drafted
            accepted += item.accepted
            mine = item.accepted_per_position
            positions += [0] * (len(mine) - len(positions))
            for i, count in enumerate(mine):
                positions[i] += count
        return cls(rounds, drafted, accepted, tuple(positions))

    def __sub__(self, before: Self) -> Self:
        """What was counted after `before`, an earlier state of the same counts."""
        earlier = before.per_position or (0,) * len(self.per_position)
        positions = zip(self.per_position, earlier, strict=True)
        return Acceptance(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in positions),
        )

    @property
    def length(self) -> float:
        """AL: tokens emitted per round, the bonus included: 1 + accepted / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of rounds in which each position was accepted (unconditional, so never increasing)."""
        return tuple(count / self.rounds if self.rounds else 0.0 for count in self.per_position)
