"""Seconds per round by `RoundShape`: measured over idle slots first, then over real rounds. No jax
here.

A real round takes longer than one over idle slots, because it reads the keys of whole texts and
includes the host's work. A device may also be slower at some times than at others. So two values of
K are compared by the ratio of their times only: first the ratio over idle slots, then that of the
real rounds just before and just after K changed. The corrections of two values of K are
interpolated for the values between them. A ratio expires after `_VALID_ROUNDS` rounds: one that was
measured while the device was slow would otherwise exclude a K for good.
"""

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from peagle_jax.engine.host.calls import RoundShape

IDLE_RUNS = 5
"""Timed runs over idle slots, after one that is not timed; the median counts."""
_IDLE_SECONDS = 0.5  # total seconds of a shape's idle runs after which it gets no further one
_WINDOW = 15  # real rounds whose median is the present time
_LEAST = 8  # real rounds of a shape, without another one between them, before their median counts
_WEIGHT = 0.5
"""Weight of a new ratio in its average with the known one of real rounds. A ratio over idle slots
is replaced."""
_VALID_ROUNDS = 4096  # rounds of a batch bucket after which an unused shape has its idle time again


def monotone(seconds: Mapping[RoundShape, float]) -> dict[RoundShape, float]:
    """The times, each raised to that of the slowest round with no more rows and no more drafts.

    A round with more sequences or more drafts takes no less time, so a smaller measurement is
    noise.
    """
    return {
        shape: max(s for other, s in seconds.items() if _is_less(other, shape)) for shape in seconds
    }


def _is_less(a: RoundShape, b: RoundShape) -> bool:
    """Whether a round of `a` computes no more rows than one of `b`."""
    return a.size <= b.size and a.num_draft <= b.num_draft


@dataclass
class _Run:
    """Real rounds of one shape in a row, the newest at the end."""

    shape: RoundShape
    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        """Median of the last rounds; None if there are too few."""
        return statistics.median(self.rounds[-_WINDOW:]) if len(self.rounds) >= _LEAST else None


class RoundTimes:
    """Times of rounds on this device, by shape.

    Args:
      idle: seconds of rounds over idle slots that are known already.
    """

    def __init__(self, idle: Mapping[RoundShape, float] | None = None):
        self._idle = {RoundShape(*shape): s for shape, s in (idle or {}).items()}
        self._level = monotone(self._idle)
        self._learned: dict[RoundShape, float] = {}  # of real rounds; only the ratios count
        self._counts: Counter[int] = Counter()  # real rounds by batch bucket
        self._last: dict[RoundShape, int] = {}  # the count of its bucket at a shape's last round
        self._tried: dict[RoundShape, int] = {}
        """The count of its bucket when a shape last had enough rounds in a row, or a trial of it
        began."""
        self._runs: dict[RoundShape, list[float]] = {}  # over idle slots
        self._present: dict[int, _Run] = {}  # by batch bucket
        self._before: dict[int, _Run] = {}  # the run before it with enough rounds

    @property
    def idle(self) -> dict[RoundShape, float]:
        """Median seconds over idle slots, of shapes that are measured."""
        return dict(self._idle)

    def untimed(self, shapes: Iterable[RoundShape]) -> list[RoundShape]:
        """Shapes that need another run over idle slots, in an order that alternates between those
        of a batch bucket: their times are compared, and a busy moment must not fall on one of them
        only."""
        missing = [shape for shape in shapes if shape not in self._idle]
        return sorted(missing, key=lambda shape: (shape.size, len(self._runs.get(shape, ()))))

    def add_idle_run(self, shape: RoundShape, seconds: float) -> None:
        """Counts a run over idle slots. The first run of a shape is not timed: it allocates
        memory."""
        runs = self._runs.setdefault(shape, [])
        runs.append(seconds)
        if len(runs) > IDLE_RUNS or (len(runs) > 1 and sum(runs) > _IDLE_SECONDS):
            self._idle[shape] = statistics.median(self._runs.pop(shape)[1:])
            self._level = monotone(self._idle)

    def add_round(self, shape: RoundShape, seconds: float) -> None:
        """Counts a real round."""
        self._counts[shape.size] += 1
        if shape in self._learned and not self._is_valid(shape):
            del self._learned[shape]
        self._last[shape] = self._counts[shape.size]
        run = self._present.get(shape.size)
        if run is None or run.shape != shape:
            if run is not None and run.median is not None:
                self._before[shape.size] = run
            run = self._present[shape.size] = _Run(shape)
        run.rounds.append(seconds)
        del run.rounds[:-_WINDOW]
        if run.median is not None:
            self._tried[shape] = self._counts[shape.size]
        if len(run.rounds) == _LEAST:
            self._learn(self._before.pop(shape.size, None), run)

    def begin_trial(self, shape: RoundShape) -> None:
        """Marks `shape` as tried, whether or not the rounds that follow measure it."""
        self._tried[shape] = self._counts[shape.size]

    def is_tried(self, shape: RoundShape) -> bool:
        """Whether real rounds measured `shape`, or a trial of it began, in the last `_VALID_ROUNDS`
        rounds."""
        last = self._tried.get(shape)
        return last is not None and self._counts[shape.size] - last <= _VALID_ROUNDS

    def is_measured(self, shape: RoundShape) -> bool:
        """Whether the latest rounds of its batch bucket are of `shape`, and enough of them for a
        median."""
        run = self._present.get(shape.size)
        return run is not None and run.shape == shape and run.median is not None

    def seconds(self, size: int, drafts: Collection[int]) -> dict[int, float]:
        """Seconds per round of the batch bucket `size` by K, for those of `drafts` that have a
        time.

        They never fall as K grows.
        """
        factor, run = 1.0, self._present.get(size)
        if run is not None and run.median is not None and (cost := self._cost(run.shape)):
            factor = run.median / cost
        costs = {shape: self._cost(shape) for shape in (RoundShape(size, k) for k in drafts)}
        known = monotone({shape: factor * cost for shape, cost in costs.items() if cost})
        return {shape.num_draft: seconds for shape, seconds in known.items()}

    def _cost(self, shape: RoundShape) -> float | None:
        """Seconds of a round up to a factor that all shapes of its bucket share; None if not
        known."""
        level = self._level.get(shape)
        return None if level is None else level * math.exp(self._correction(shape, level))

    def _correction(self, shape: RoundShape, level: float) -> float:
        """Logarithm of the ratio of the cost to the idle time `level`.

        It is interpolated linearly in the logarithm of the idle time between shapes with real
        rounds, and constant beyond the smallest and the largest of them.
        """
        corrections = {}  # by logarithm of the idle time
        for other, cost in self._learned.items():
            if other.size == shape.size and other in self._level and self._is_valid(other):
                if other == shape:
                    return math.log(cost / level)
                corrections[math.log(self._level[other])] = math.log(cost / self._level[other])
        if not corrections:
            return 0.0
        x, knots = math.log(level), sorted(corrections)
        index = bisect.bisect(knots, x)
        if index in (0, len(knots)):
            return corrections[knots[max(0, index - 1)]]
        below, above = knots[index - 1], knots[index]
        share = (x - below) / (above - below)
        return (1 - share) * corrections[below] + share * corrections[above]

    def _is_valid(self, shape: RoundShape) -> bool:
        """Whether the shape had a real round in the last `_VALID_ROUNDS` rounds."""
        return self._counts[shape.size] - self._last[shape] <= _VALID_ROUNDS

    def _learn(self, before: _Run | None, after: _Run) -> None:
        """Corrects the cost of a shape by the rounds before and after it came into use."""
        if before is None or before.shape == after.shape:
            return
        base, known = self._cost(before.shape), self._cost(after.shape)
        if base and known:
            self._learned[before.shape] = base
            measured = base * after.median / before.median
            weight = _WEIGHT if after.shape in self._learned else 1.0
            self._learned[after.shape] = known * (measured / known) ** weight
