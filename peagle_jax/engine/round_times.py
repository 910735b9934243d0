"""Seconds per round by `RoundShape`: measured over idle slots first, then over real rounds. No jax here.

A real round takes longer than one over idle slots, because it reads the keys of whole texts and the host
takes part. So times of real rounds replace the first ones where there are some. A shape without any is
taken to be slower by the same factor as the shape in use.
"""

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from peagle_jax.engine.calls import RoundShape

IDLE_RUNS = 5
"""Timed runs over idle slots, after one that is not timed; the median counts."""
_IDLE_SECONDS = 0.5  # no further idle run of a shape that took as long in all
_WINDOW = 15  # real rounds of a shape whose median is its time
_LEAST = 5  # real rounds of a shape before their median counts
_VALID_ROUNDS = (
    2048  # rounds of the batch bucket after which the median of an unused shape is forgotten
)


def monotone(seconds: Mapping[RoundShape, float]) -> dict[RoundShape, float]:
    """The times, each raised to that of the slowest round with no more rows and no more drafts.

    A round with more sequences or more drafts takes no less time, whatever a measurement says.
    """
    return {
        (size, drafts): max(s for (b, k), s in seconds.items() if b <= size and k <= drafts)
        for size, drafts in seconds
    }


class RoundTimes:
    """What rounds take on this device.

    Args:
      idle: seconds of rounds over idle slots that are known already.
    """

    def __init__(self, idle: Mapping[RoundShape, float] | None = None):
        self._idle = {RoundShape(*shape): s for shape, s in (idle or {}).items()}
        self._level = monotone(self._idle)
        self._runs: dict[RoundShape, list[float]] = {}
        self._rounds: dict[RoundShape, deque[float]] = {}
        self._counts: dict[int, int] = {}  # real rounds by batch bucket
        self._last: dict[RoundShape, int] = {}  # the count of its bucket at a shape's last round

    @property
    def idle(self) -> dict[RoundShape, float]:
        """Median seconds over idle slots, of shapes that are measured."""
        return dict(self._idle)

    def untimed(self, shapes: Iterable[RoundShape]) -> list[RoundShape]:
        """Shapes that need another run over idle slots, those with a first one in front."""
        missing = [shape for shape in shapes if shape not in self._idle]
        return sorted(missing, key=lambda shape: -len(self._runs.get(shape, ())))

    def add_idle_run(self, shape: RoundShape, seconds: float) -> None:
        """Counts a run over idle slots. The first run of a shape is not timed: it allocates memory."""
        runs = self._runs.setdefault(shape, [])
        runs.append(seconds)
        if len(runs) > IDLE_RUNS or (len(runs) > 1 and sum(runs) > _IDLE_SECONDS):
            self._idle[shape] = statistics.median(self._runs.pop(shape)[1:])
            self._level = monotone(self._idle)

    def add_round(self, shape: RoundShape, seconds: float) -> None:
        """Counts a real round."""
        count = self._counts[shape.size] = self._counts.get(shape.size, 0) + 1
        rounds = self._rounds.setdefault(shape, deque(maxlen=_WINDOW))
        if count - self._last.get(shape, count) > _VALID_ROUNDS:
            rounds.clear()
        self._last[shape] = count
        rounds.append(seconds)

    def forget_rounds(self, shape: RoundShape) -> None:
        """Forgets the real rounds of a shape, because it comes into use again after a pause."""
        self._rounds.pop(shape, None)

    def seconds(self, size: int, drafts: Collection[int], present: int) -> dict[int, float]:
        """Seconds per round by K, for those of `drafts` that have a time. They never fall as K grows.

        Args:
          size: batch bucket.
          drafts: values of K.
          present: the K in use.
        """
        factor, now = 1.0, RoundShape(size, present)
        if (real := self._median(now)) is not None and now in self._level:
            factor = real / self._level[now]
        found: dict[int, float] = {}
        for num_draft in sorted(drafts):
            shape = RoundShape(size, num_draft)
            real = self._median(shape)
            if real is None and shape in self._level:
                real = factor * self._level[shape]
            if real is not None:
                found[num_draft] = max(real, *found.values()) if found else real
        return found

    def _median(self, shape: RoundShape) -> float | None:
        rounds: Sequence[float] = self._rounds.get(shape, ())
        age = self._counts.get(shape.size, 0) - self._last.get(shape, 0)
        if len(rounds) < _LEAST or age > _VALID_ROUNDS:
            return None
        return statistics.median(rounds)
