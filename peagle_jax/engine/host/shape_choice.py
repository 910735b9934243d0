"""The shape of a batch bucket's rounds: the one with the most tokens per second. No jax here.

The predicted tokens per second of a shape are computed from its time over idle slots until real
rounds correct it. So a shape without recent real rounds, whose prediction is not far below that of
the present shape, is tried for some rounds.
"""

from collections.abc import Mapping

from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.round_times import RoundTimes

LEAST_GAIN = 0.015
"""Share of tokens per second by which another shape must be faster to replace the one in use."""
TRY_ABOVE = 0.7
"""A shape is tried if its prediction is above this share of the present tokens per second: times
over idle slots may be wrong by the rest, and a trial costs a few rounds in thousands."""
_LONGEST_TRIAL = 4
"""Decisions after which a trial ends without a time: rounds between prefill calls are not timed."""


def best(rates: Mapping, present, least_gain: float):
    """The key with the largest rate, the smaller of equal ones; `present` unless the gain is large
    enough."""
    fastest = min(rates, key=lambda k: (-rates[k], k))
    return fastest if rates[fastest] > (1 + least_gain) * rates[present] else present


def promising(
    rates: Mapping[RoundShape, float], present: RoundShape, times: RoundTimes
) -> RoundShape | None:
    """The untried shape with the largest rate, if it is not far below that of `present`."""
    least = TRY_ABOVE * rates[present]
    untried = [s for s in rates if s != present and rates[s] > least and not times.is_tried(s)]
    return max(untried, key=lambda shape: (rates[shape], shape), default=None)


class Choice:
    """The shape of a batch bucket's rounds.

    Args:
      present: the shape until there are rates.
    """

    def __init__(self, present: RoundShape):
        self.present = present
        """The chosen shape."""
        self.trial: RoundShape | None = None
        """The shape that runs in its place at the moment."""
        self._decisions_left = 0  # of the trial

    @property
    def shape(self) -> RoundShape:
        """The shape of the next round."""
        return self.trial or self.present

    def decide(self, rates: Mapping[RoundShape, float], times: RoundTimes) -> None:
        """Replaces the shape in use where another one is faster, and begins and ends trials.

        Args:
          rates: tokens per second by shape, `present` among them.
          times: the times from which `rates` were computed.
        """
        if self.trial is not None and not times.is_measured(self.trial) and self._decisions_left:
            self._decisions_left -= 1
            return
        self.trial = None
        self.present = best(rates, self.present, LEAST_GAIN)
        # The ratio of two shapes is learned from rounds side by side, so the present one is
        # measured first.
        if times.is_tried(self.present):
            self.trial = promising(rates, self.present, times)
        if self.trial is not None:
            times.begin_trial(self.trial)
            self._decisions_left = _LONGEST_TRIAL - 1
