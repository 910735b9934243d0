"""How many drafts a round verifies in all, chosen at run time (`adaptive="survival"`). No jax here.

A ragged round verifies the R drafts with the largest survival over all requests (`peagle_jax.survival`). So
it emits a token for each request and, on average, the sum of these survivals. `Spread` has the survival of
recent drafts, `RoundTimes` the seconds of a round. Both change only with committed rounds
(docs/adaptive.md, "Survival").
"""

import logging
from collections.abc import Sequence

import numpy as np

from peagle_jax.engine.adaptive import LoadPolicy
from peagle_jax.engine.calls import DecodeCall, RoundShape
from peagle_jax.engine.choice import Choice
from peagle_jax.engine.request import Request
from peagle_jax.engine.round_times import RoundTimes
from peagle_jax.engine.stats import SurvivalCounts
from peagle_jax.plan import SURVIVAL_BINS, SurvivalReport

_KEPT = 0.95  # of the spread, per round: it is an average over about 20 rounds
_LEAST_KEPT = 0.6  # of the spread, by one round after many that said nothing

_log = logging.getLogger(__name__)


class Spread:
    """Number of drafts of one request by their survival, averaged over rounds."""

    def __init__(self):
        self._drafts: np.ndarray | None = None  # [SURVIVAL_BINS] float64
        self._kept = 1.0

    @property
    def is_known(self) -> bool:
        return self._drafts is not None

    def age(self) -> None:
        """Counts a round, whether it says something or not."""
        self._kept = max(_LEAST_KEPT, _KEPT * self._kept)

    def add(self, histogram: np.ndarray, num_requests: int) -> None:
        """Adds a round that `age` counted; `histogram` [SURVIVAL_BINS] is of all its drafts."""
        new = np.asarray(histogram, np.float64) / num_requests
        old = new if self._drafts is None else self._drafts
        self._drafts = self._kept * old + (1 - self._kept) * new
        self._kept = 1.0

    def accepted(self, num_requests: int, num_rows: int) -> float:
        """Expected accepted drafts of a round that verifies the `num_rows` likeliest of all requests."""
        drafts = num_requests * self._drafts[::-1]  # the likeliest first
        before = np.cumsum(drafts) - drafts
        verified = np.clip(num_rows - before, 0, drafts)
        survival = (np.arange(SURVIVAL_BINS)[::-1] + 0.5) / SURVIVAL_BINS
        return float(verified @ survival)


class SurvivalPolicy(LoadPolicy):
    """Chooses R for batch buckets with ragged rounds, and K for the others as `LoadPolicy` does.

    Args:
      most: J.
      times: what rounds take.
    """

    def __init__(self, most: int, times: RoundTimes):
        super().__init__(most, times)
        self._spread = Spread()
        self._counts = False
        """Whether the next round is one of an exploration, or nothing is known yet."""

    @property
    def num_verified(self) -> dict[int, int]:
        """Most drafts that a round verifies in all, by batch bucket with ragged rounds."""
        return {
            size: choice.present.num_verified
            for size, choice in self._choices.items()
            if self.ragged.get(size)
        }

    def shape(self, size: int, rows: Sequence[Request], drafts: Sequence[int]) -> RoundShape:
        """The next round of the batch bucket `size`.

        Args:
          rows: its requests.
          drafts: values of K whose rounds are compiled, ascending; the last is J.
        """
        ragged = self.ragged.get(size, ())
        if not ragged:
            return super().shape(size, rows, drafts)
        most = drafts[-1]
        whole = RoundShape(size, most)
        # The text of a seed depends on the drafts that are verified.
        if any(request.holds_k for request in rows):
            return whole
        choice = self._choice(size)
        if self._is_due(size):
            choices = [RoundShape(size, k) for k in drafts]
            choices += [RoundShape(size, most, number) for number in ragged]
            self._decide_shape(choice, len(rows), choices)
        explores = self._explores(choice)
        self._counts = explores or not self._spread.is_known
        return whole if explores else choice.shape

    def must_count(self, shape: RoundShape) -> bool:
        """Whether the next round, of `shape`, must count the survival of its drafts: an exploration, and the first
        rounds. Ragged rounds count anyway."""
        return self._counts and bool(self.ragged.get(shape.size))

    def _shows_all(self, shape: RoundShape) -> bool:
        """Rounds of all drafts need not count."""
        return False

    def commit(
        self,
        call: DecodeCall,
        rows: Sequence[tuple[Request, int, int]],
        report: SurvivalReport | None,
    ) -> None:
        """Takes the outcome of a round, see `LoadPolicy.commit`."""
        super().commit(call, rows, report)
        if report is None:
            return
        # After a round without drafts there is nothing to verify, whatever the drafter is worth.
        num_fresh = sum(
            drafted > 0 or request.num_draft == 0
            for request, drafted in zip(call.requests, call.drafted, strict=False)
        )
        if most := sum(call.drafted):
            # Drafts of a round that did not count are not in the histogram.
            num_fresh *= report.histogram.sum() / most
        self._spread.age()
        if num_fresh and call.num_draft == self._most:
            self._spread.add(report.histogram, num_fresh)
        # The report also has the requests that ended while the round ran.
        verified = sum(drafted for _, drafted, _ in rows)
        share = verified / max(1, int(report.verified.sum()))
        before = self.counts
        self.counts = SurvivalCounts(
            before.rounds + 1,
            before.verified + verified,
            before.accepted + sum(passed for _, _, passed in rows),
            before.expected + share * float(report.expected),
        )

    def _decide_shape(
        self, choice: Choice, num_requests: int, shapes: Sequence[RoundShape]
    ) -> None:
        """Replaces the round in use where another of `shapes` is faster."""
        seconds, present = self.times.seconds_of(shapes), choice.present
        if not self._spread.is_known or present not in seconds:
            return
        tokens = {
            shape: num_requests + self._spread.accepted(num_requests, shape.num_verified)
            for shape in seconds
        }
        rates = {shape: tokens[shape] / seconds[shape] for shape in seconds}
        if self._replace(choice, rates, seconds):
            chosen = choice.present
            _log.info(
                "batch size %d: rounds of %d drafts verify at most %d in all, predicted %.0f tokens/s; "
                "%d drafts, of which %d are verified, gave %.0f",
                chosen.size, chosen.num_draft, chosen.num_verified, rates[chosen],
                present.num_draft, present.num_verified, rates[present],
            )  # fmt: skip
