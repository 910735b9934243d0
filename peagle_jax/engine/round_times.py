"""Seconds per round by `RoundShape`: measured over idle slots first, then over real rounds. No jax here.

A real round takes longer than one over idle slots, because it reads the keys of whole texts and the host
takes part; and a device may be slower at some times than at others. So two values of K are compared only by
their ratio: first that over idle slots, then that of the real rounds just before and just after K changed.
What such rounds correct for two values of K, they correct for those in between as well. A ratio that was
measured in a bad moment would keep a K out of use for ever, so it is forgotten after a while.
"""

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peagle_jax.engine.calls import RoundShape

IDLE_RUNS = 5
"""Timed runs over idle slots, after one that is not timed; the median counts."""
_IDLE_SECONDS = 0.5  # no further idle run of a shape that took as long in all
_WINDOW = 15  # real rounds whose median is the present time
_LEAST = 8  # real rounds of a shape, without another one between them, before their median counts
_WEIGHT = 0.5
"""Weight of a new ratio in its average with the known one of real rounds. A ratio over idle slots is replaced."""
_VALID_ROUNDS = 4096  # rounds of a batch bucket after which an unused shape has its idle time again


def monotone(seconds: Mapping[RoundShape, float]) -> dict[RoundShape, float]:
    """The times, each raised to that of the slowest round with no more rows and no more drafts.

    A round with more sequences or more drafts takes no less time, whatever a measurement says.
    """
    return {
        shape: max(s for other, s in seconds.items() if _is_less(other, shape)) for shape in seconds
    }


def _is_less(a: RoundShape, b: RoundShape) -> bool:
    """Whether a round of `a` computes no more rows than one of `b`, of the drafter and of the target."""
    return a.size <= b.size and a.num_draft <= b.num_draft and a.num_verified <= b.num_verified


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
        """The count of its bucket when a shape last had enough rounds in a row, or a trial of it began."""
        self._runs: dict[RoundShape, list[float]] = {}  # over idle slots
        self._present: dict[int, _Run] = {}  # by batch bucket
        self._before: dict[int, _Run] = {}  # the run before it with enough rounds

    @property
    def idle(self) -> dict[RoundShape, float]:
        """Median seconds over idle slots, of shapes that are measured."""
        return dict(self._idle)

    def untimed(self, shapes: Iterable[RoundShape]) -> list[RoundShape]:
        """Shapes that need another run over idle slots, in an order that alternates between those of a batch
        bucket: their times are compared, and a busy moment must not fall on one of them only."""
        missing = [shape for shape in shapes if shape not in self._idle]
        return sorted(missing, key=lambda shape: (shape.size, len(self._runs.get(shape, ()))))

    def add_idle_run(self, shape: RoundShape, seconds: float) -> None:
        """Counts a run over idle slots. The first run of a shape is not timed: it allocates memory."""
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
        """Rounds of `shape` follow that are to measure it: `is_tried` from now on, whatever they show."""
        self._tried[shape] = self._counts[shape.size]

    def is_tried(self, shape: RoundShape) -> bool:
        """Whether `shape` was measured by real rounds, or a trial of it began, not long ago."""
        last = self._tried.get(shape)
        return last is not None and self._counts[shape.size] - last <= _VALID_ROUNDS

    def is_measured(self, shape: RoundShape) -> bool:
        """Whether the last rounds of its batch bucket were enough of `shape` to measure it."""
        run = self._present.get(shape.size)
        return run is not None and run.shape == shape and run.median is not None

    def seconds(self, size: int, drafts: Collection[int]) -> dict[int, float]:
        """Seconds per round of the batch bucket `size` by K, for those of `drafts` that have a time.

        They never fall as K grows.
        """
        found = self.seconds_of([RoundShape(size, num_draft) for num_draft in drafts])
        return {shape.num_draft: seconds for shape, seconds in found.items()}

    def seconds_of(self, shapes: Sequence[RoundShape]) -> dict[RoundShape, float]:
        """Seconds per round by shape, for those of `shapes` that have a time; all are of one batch bucket.

        They never fall as a round computes more rows.
        """
        factor, run = 1.0, self._present.get(shapes[0].size)
        if run is not None and run.median is not None and (cost := self._cost(run.shape)):
            factor = run.median / cost
        costs = {shape: self._cost(shape) for shape in shapes}
        return monotone({shape: factor * cost for shape, cost in costs.items() if cost})

    def _cost(self, shape: RoundShape) -> float | None:
        """Seconds of a round up to a factor that all shapes of its bucket share; None if not known."""
        level = self._level.get(shape)
        return None if level is None else level * math.exp(self._correction(shape, level))

    def _correction(self, shape: RoundShape, level: float) -> float:
        """Logarithm of the cost over the idle time `level`. Between shapes with real rounds it is interpolated by
        the logarithms of their idle times, beyond the last of them it is that of the last."""
        known = {}  # corrections by logarithm of the idle time
        for other, cost in self._learned.items():
            if other.size == shape.size and other in self._level and self._is_valid(other):
                if other == shape:
                    return math.log(cost / level)
                known[math.log(self._level[other])] = math.log(cost / self._level[other])
        if not known:
            return 0.0
        at, places = math.log(level), sorted(known)
        place = bisect.bisect(places, at)
        if place in (0, len(places)):
            return known[places[max(0, place - 1)]]
        below, above = places[place - 1], places[place]
        share = (at - below) / (above - below)
        return (1 - share) * known[below] + share * known[above]

    def _is_valid(self, shape: RoundShape) -> bool:
        """Whether the shape had a round not long ago."""
        return self._counts[shape.size] - self._last[shape] <= _VALID_ROUNDS

    def _learn(self, before: _Run | None, after: _Run) -> None:
        """Corrects the cost of a shape by the rounds before and after it came into use."""
        if before is None or before.shape == after.shape:
            return
        base, known = self._cost(before.shape), self._cost(after.shape)
        if base and known:
            self._learned[before.shape] = base
            found = base * after.median / before.median
            weight = _WEIGHT if after.shape in self._learned else 1.0
            self._learned[after.shape] = known * (found / known) ** weight
