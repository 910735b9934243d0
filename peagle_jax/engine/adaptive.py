"""K chosen at run time: for each round the number of drafts with the most tokens per second. No jax here.

A round of K drafts emits 1 + s_1 + .. + s_K tokens for a request, where s_j is the share of rounds in which
draft j passes. `Survival` measures s_j, `RoundTimes` the seconds of a round. Both change only with committed
rounds, so K never depends on drafts that its round verifies (docs/adaptive.md, "Exactness").
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from peagle_jax.engine.calls import DecodeCall, RoundShape
from peagle_jax.engine.request import Request
from peagle_jax.engine.round_times import RoundTimes
from peagle_jax.engine.stats import SurvivalCounts
from peagle_jax.plan import SurvivalReport

LEAST_GAIN = 0.03
"""Share of tokens per second by which another K must be faster to replace the one in use."""
DECIDE_EVERY = 16
"""Rounds of a batch bucket between two choices."""
EXPLORE_EVERY = 128
"""Rounds below the largest K before two at the largest K: one makes its drafts, the next verifies them."""
EXPLORE_COST = 0.005
"""Largest share of time that these two rounds may take beyond what rounds of the chosen K take."""
_MEMORY = 256  # verified drafts over which the acceptance of a position is averaged, at least
_FASTEST_DECAY = 0.05  # of the counts, per call: at least 20 calls are averaged
_LEAST_VERIFIED = 12  # decayed count of verified drafts before a position's share is used

_log = logging.getLogger(__name__)


def candidates(most: int, size: int, platform: str) -> tuple[int, ...]:
    """Values of K that compile for the batch bucket `size`, ascending; the last is `most`, J.

    On a CPU a program compiles for seconds on the cores that also serve, so there are fewer.
    """
    steps = (0, 3) if platform == "cpu" else (0, 1, 3, 5, 7, 11, 15, 23, 31)
    return (*(k for k in steps if k < most), most)


def best(rates: Mapping[int, float], present: int, least_gain: float) -> int:
    """The K with the largest rate, the smaller of equal ones; `present` unless the gain is large enough."""
    fastest = min(rates, key=lambda k: (-rates[k], k))
    return fastest if rates[fastest] > (1 + least_gain) * rates[present] else present


def exploration_interval(seconds: Mapping[int, float], present: int) -> int:
    """Rounds of K = `present` between two explorations: `EXPLORE_EVERY`, or more where they are expensive."""
    most = max(seconds)
    extra = 2 * (seconds[most] / seconds[present] - 1)
    return max(EXPLORE_EVERY - 2, round(extra / EXPLORE_COST))


class Survival:
    """For each position, the share of recent rounds in which its draft passed, of those that verified it.

    Args:
      most: J, number of positions.
    """

    def __init__(self, most: int):
        self._verified, self._passed = [0.0] * most, [0.0] * most

    def add(self, rows: Iterable[tuple[int, int]]) -> None:
        """Counts one call: (drafts verified, drafts passed) of each row.

        A position that no row verified keeps its counts.
        """
        most = len(self._verified)
        with_drafted, with_passed = [0] * (most + 1), [0] * (most + 1)
        for drafted, accepted in rows:
            with_drafted[drafted] += 1
            with_passed[accepted] += 1
        verified = passed = 0  # rows that verified draft j, and rows in which it passed
        for j in reversed(range(most)):
            verified += with_drafted[j + 1]
            passed += with_passed[j + 1]
            if verified:
                kept = 1 - min(_FASTEST_DECAY, verified / _MEMORY)
                self._verified[j] = kept * self._verified[j] + verified
                self._passed[j] = kept * self._passed[j] + passed

    def is_known(self, limit: int) -> bool:
        """Whether enough rounds verified draft `limit`, and with it all before it."""
        return limit == 0 or self._verified[limit - 1] >= _LEAST_VERIFIED

    @property
    def shares(self) -> list[float]:
        """By position; non-increasing. 0 where no draft was verified."""
        shares, least = [], 1.0
        for verified, passed in zip(self._verified, self._passed, strict=True):
            least = min(least, passed / verified if verified else 0.0)
            shares.append(least)
        return shares


class LoadPolicy:
    """Chooses K by the present load (`adaptive="load"`).

    Args:
      most: J, the K of every bucket until there are measurements.
      times: what rounds take.
    """

    decide_every = DECIDE_EVERY

    def __init__(self, most: int, times: RoundTimes):
        self.times = times
        self.ragged: Mapping[int, Sequence[int]] = {}
        """Ragged rounds that may run: values of R by batch bucket, ascending. Any thread replaces it."""
        self.counts = SurvivalCounts()
        """Only of a policy with ragged rounds."""
        self.num_changes = 0
        """How often the K of a batch bucket was replaced."""
        self.rate = 0.0
        """Tokens per second that the last choice predicts; 0 before the first."""
        self._most = most
        self._survival = {False: Survival(most), True: Survival(most)}  # greedy, sampled
        self._present: dict[int, int] = {}  # by batch bucket
        self._rounds: Counter[int] = Counter()  # since the last decision, by batch bucket
        self._interval: dict[int, int] = {}  # between explorations, by batch bucket
        self._below_most = 0  # rounds since the last exploration
        self._exploring = 0  # rounds left of an exploration

    def present(self, size: int) -> int:
        """The chosen K of a batch bucket."""
        return self._present.get(size, self._most)

    @property
    def shares(self) -> dict[str, list[float]]:
        """Share of rounds in which draft 1, 2, ... passed, by class of requests."""
        return {
            name: self._survival[is_sampled].shares
            for name, is_sampled in (("greedy", False), ("sampled", True))
        }

    @property
    def num_verified(self) -> dict[int, int]:
        """Most drafts that a round verifies in all, by batch bucket with ragged rounds: none here."""
        return {}

    def shape(self, size: int, rows: Sequence[Request], drafts: Sequence[int]) -> RoundShape:
        """The next round of the batch bucket `size`; arguments as in `choose`."""
        return RoundShape(size, self.choose(size, rows, drafts))

    def commit(
        self,
        call: DecodeCall,
        rows: Sequence[tuple[Request, int, int]],
        report: SurvivalReport | None,
    ) -> None:
        """Takes the outcome of a round: `rows` as in `record`, and the report of its survival, if any."""
        # A ragged round verifies likely drafts only, so it does not show how often drafts pass.
        if not call.shape.num_rows:
            self.record(rows)

    def choose(self, size: int, rows: Sequence[Request], drafts: Sequence[int]) -> int:
        """K of the next round of the batch bucket `size`.

        Args:
          rows: its requests.
          drafts: values of K whose rounds are compiled, ascending; the last is J.
        """
        if len(drafts) == 1 or any(request.holds_k for request in rows):
            return drafts[-1]
        self._rounds[size] += 1
        if self._rounds[size] >= self.decide_every:
            self._rounds[size] = 0
            self._decide(size, rows, drafts)
        num_draft = self.present(size)
        return drafts[-1] if self._explores(size, num_draft) else num_draft

    def record(self, rows: Iterable[tuple[Request, int, int]]) -> None:
        """Counts a committed round: (request, drafts verified, drafts passed) of each row."""
        found = {False: [], True: []}
        for request, drafted, passed in rows:
            found[_is_sampled(request)].append((drafted, passed))
        for is_sampled, counts in found.items():
            self._survival[is_sampled].add(counts)

    def _explores(self, size: int, num_draft: int) -> bool:
        """Whether this round is one of the two of an exploration."""
        if self._exploring:
            self._exploring -= 1
            return True
        if num_draft == self._most:
            self._below_most = 0
            return False
        self._below_most += 1
        if self._below_most > self._interval.get(size, EXPLORE_EVERY - 2):
            self._below_most, self._exploring = 0, 1
            return True
        return False

    def _decide(self, size: int, rows: Sequence[Request], drafts: Sequence[int]) -> None:
        present = self.present(size)
        seconds = self.times.seconds(size, drafts)
        tokens = self._tokens(rows, drafts)
        if tokens is None or present not in seconds:
            return
        rates = {k: tokens[k] / seconds[k] for k in seconds}
        chosen = best(rates, present, LEAST_GAIN)
        self.rate = rates[chosen]
        self._interval[size] = exploration_interval(seconds, chosen)
        if chosen == present:
            return
        self._present[size] = chosen
        self.num_changes += 1
        _log.info(
            "batch size %d: %d drafts per round, predicted %.0f tokens/s; %d drafts gave %.0f",
            size,
            chosen,
            rates[chosen],
            present,
            rates[present],
        )

    def _tokens(self, rows: Sequence[Request], drafts: Sequence[int]) -> dict[int, float] | None:
        """Expected tokens of a round by K; None until acceptance is measured."""
        tokens = dict.fromkeys(drafts, float(len(rows)))
        for (is_sampled, limit), count in Counter(
            (_is_sampled(request), request.num_draft) for request in rows
        ).items():
            own, other = self._survival[is_sampled], self._survival[not is_sampled]
            known = next((one for one in (own, other) if one.is_known(limit)), None)
            if known is None:
                return None
            shares = known.shares
            for k in drafts:
                tokens[k] += count * sum(shares[: min(k, limit)])
        return tokens


def _is_sampled(request: Request) -> bool:
    return request.params.temperature > 0
