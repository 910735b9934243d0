"""How many drafts a round verifies in all, chosen at run time (`adaptive="survival"`). No jax here.

A ragged round verifies the R drafts with the largest survival over all requests (`peagle_jax.survival`). So
it emits a token for each request and, on average, the sum of these survivals. A round of K drafts that
verifies them all emits the sum of the survival of the first K. `Spread` has the survival of recent drafts,
`RoundTimes` the seconds of a round. Both change only with committed rounds (docs/adaptive.md, "Survival").
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
_LEAST_KEPT = 0.6  # of the spread, when a round is added after many that were not counted

_log = logging.getLogger(__name__)


class Spread:
    """Number of drafts of one request by position and survival, averaged over rounds.

    Args:
      most: J, number of positions.
    """

    def __init__(self, most: int):
        shape = (most, SURVIVAL_BINS)
        self._drafts = np.zeros(shape)  # of one request
        self._sums = np.zeros(shape)  # of their survival
        self._kept = np.ones(most)
        """Share of each position's average that stays when a new round is added, in 0..1. It falls with each round
        that does not count the position."""
        self.is_known = False
        """Whether a round of J drafts was added."""

    def age(self) -> None:
        """Counts a round, also one that `add` does not use."""
        self._kept = np.maximum(_LEAST_KEPT, _KEPT * self._kept)

    def add(self, histogram: np.ndarray, sums: np.ndarray, num_requests: float) -> None:
        """Adds a round that `age` counted.

        A round of K < J drafts does not measure later positions: their survival is scaled by the change of that
        of draft K. Such rounds are used only after a round of J drafts.

        Args:
          histogram, sums: [K, SURVIVAL_BINS], see `SurvivalReport`; of all its drafts.
        """
        num_draft, most = len(histogram), len(self._drafts)
        if not num_draft or not (self.is_known or num_draft == most):
            return
        kept = self._kept[:num_draft, None] if self.is_known else 0.0
        before = self._sums[num_draft - 1].sum()
        for known, new in ((self._drafts, histogram), (self._sums, sums)):
            known[:num_draft] = kept * known[:num_draft] + (1 - kept) * new / num_requests
        if before > 0:
            self._sums[num_draft:] *= self._sums[num_draft - 1].sum() / before
        self._kept[:num_draft], self.is_known = 1.0, True

    def accepted(self, num_requests: int, num_draft: int, num_rows: int) -> float:
        """Expected accepted drafts of a round that verifies the `num_rows` likeliest of the first `num_draft` drafts
        of all requests."""
        # Sums over positions, the bin with the largest survival first.
        drafts, sums = (
            num_requests * table[:num_draft].sum(axis=0)[::-1]
            for table in (self._drafts, self._sums)
        )
        before = np.cumsum(drafts) - drafts
        verified = np.clip(num_rows - before, 0, drafts)
        return float(
            sums @ np.divide(verified, drafts, out=np.zeros_like(drafts), where=drafts > 0)
        )


class SurvivalPolicy(LoadPolicy):
    """Chooses R or K for batch buckets with ragged rounds, and K for the others as `LoadPolicy` does.

    Args:
      most: J.
      times: times of rounds.
    """

    def __init__(self, most: int, times: RoundTimes):
        super().__init__(most, times)
        self._spread = Spread(most)
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
        # The text of a request with a seed depends on which drafts are verified.
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
        """Never: a round that verifies all drafts may run without counting survival."""
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
        self._spread.age()
        if num_requests := _num_shown(call, report):
            self._spread.add(report.histogram, report.sums, num_requests)
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
            shape: num_requests
            + self._spread.accepted(num_requests, shape.num_draft, shape.num_verified)
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


def _num_shown(call: DecodeCall, report: SurvivalReport) -> float:
    """Number of requests whose drafts are in the report's histogram; 0 if the report cannot be used."""
    num_fresh = 0
    for request, drafted in zip(call.rows, call.drafted, strict=True):
        wanted = min(call.num_draft, request.num_draft)
        # The round before made fewer drafts than this one may verify, so later positions are missing.
        if 0 < drafted < wanted:
            return 0.0
        num_fresh += drafted == wanted
    # Drafts of a round that did not count are not in the histogram.
    num_drafts = sum(call.drafted)
    return num_fresh * float(report.histogram.sum()) / num_drafts if num_drafts else num_fresh
