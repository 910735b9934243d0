"""K chosen at run time: for each round the number of drafts with the most tokens per second. No jax
here.

A round of K drafts emits 1 + s_1 + .. + s_K tokens for a request, where s_j is the share of rounds
in which draft j passes. `Survival` measures s_j, `RoundTimes` the seconds of a round. Both change
only with committed rounds, so K never depends on drafts that its round verifies (docs/adaptive.md,
"Exactness").
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.round_times import RoundTimes
from peagle_jax.engine.host.shape_choice import Choice

_LARGE = 64
"""Least batch bucket with a program of K = 1."""
DECIDE_EVERY = 16
"""Rounds of a batch bucket between two choices."""
EXPLORE_EVERY = 128
"""Of this many rounds the last two have the largest K: one makes its drafts, the next verifies
them."""
EXPLORE_COST = 0.005
"""Largest share of time that these two rounds may cost, beyond rounds of the chosen K."""
_MEMORY = 256  # verified drafts over which the acceptance of a position is averaged, at least
_FASTEST_DECAY = 0.05  # of the counts, per call: at least 20 calls are averaged
_LEAST_KEPT = 64  # decayed count below which a position that is not verified decays no further
_LEAST_VERIFIED = 12  # decayed count of verified drafts before a position's share is used

_log = logging.getLogger(__name__)


def candidates(most: int, size: int, platform: str) -> tuple[int, ...]:
    """Values of K that compile for the batch bucket `size`, ascending; the last is `most`, J.

    Each is a program to compile and to load, so values that win little are left out. At the times
    of rounds measured on an H200, K = 5 is at most 2 % ahead of 3 and 7, and K = 1 pays in large
    batches only (docs/adaptive.md, "Candidates").
    """
    steps = (0, 3) if platform == "cpu" or size < _LARGE else (0, 1, 3)
    steps += () if platform == "cpu" else (7, 15, 31)
    return (*(k for k in steps if k < most), most)


def exploration_interval(seconds: Mapping[int, float], present: int) -> int:
    """Rounds of K = `present` between two explorations: `EXPLORE_EVERY`, or more where they are
    expensive."""
    most = max(seconds)
    extra = 2 * (seconds[most] / seconds[present] - 1)
    return max(EXPLORE_EVERY - 2, round(extra / EXPLORE_COST))


class Survival:
    """For each position, how often its draft passed in recent rounds in which all drafts before it
    passed.

    The share of rounds in which draft j passes is the product of these conditional shares up to j.
    Rounds of few drafts do not measure later positions, but they change the first factors of the
    product, so all shares follow texts that become easier or harder.

    Args:
      most: J, number of positions.
    """

    def __init__(self, most: int):
        self._verified = [0.0] * most
        self._reached, self._passed = [0.0] * most, [0.0] * most  # after drafts that passed

    def add(self, rows: Iterable[tuple[int, int]]) -> None:
        """Counts one call: (drafts verified, drafts passed) of each row."""
        most = len(self._verified)
        with_drafted, with_passed, with_reached = ([0] * (most + 1) for _ in range(3))
        for drafted, accepted in rows:
            with_drafted[drafted] += 1
            with_passed[accepted] += 1
            with_reached[min(drafted, accepted + 1)] += 1
        in_all = sum(with_drafted[1:])
        new = [0, 0, 0]  # rows that verified draft j, that reached it, and in which it passed
        for j in reversed(range(most)):
            for i, counts in enumerate((with_drafted, with_reached, with_passed)):
                new[i] += counts[j + 1]
            # Counts of positions that are not verified decay too, so that the few rounds of an
            # exploration replace them.
            if new[0] or self._reached[j] > _LEAST_KEPT:
                kept = 1 - min(_FASTEST_DECAY, (new[0] or in_all) / _MEMORY)
                self._verified[j] = kept * self._verified[j] + new[0]
                self._reached[j] = kept * self._reached[j] + new[1]
                self._passed[j] = kept * self._passed[j] + new[2]

    def is_known(self, limit: int) -> bool:
        """Whether enough rounds verified draft `limit`, and with it all before it."""
        return limit == 0 or self._verified[limit - 1] >= _LEAST_VERIFIED

    @property
    def shares(self) -> list[float]:
        """Share of rounds in which draft 1, 2, ... passed; non-increasing. 0 where no draft was
        reached."""
        shares, share = [], 1.0
        for reached, passed in zip(self._reached, self._passed, strict=True):
            share *= passed / reached if reached else 0.0
            shares.append(share)
        return shares


class LoadPolicy:
    """Chooses K by the present load (`adaptive="load"`).

    Args:
      most: J, the K of every bucket until there are measurements.
      times: times of rounds.
    """

    decide_every = DECIDE_EVERY

    def __init__(self, most: int, times: RoundTimes):
        self.times = times
        self.num_changes = 0
        """How often the K of a batch bucket was replaced."""
        self._most = most
        self.start_over()

    def start_over(self) -> None:
        """Forgets what was measured of drafts, and what followed from it: other weights write them.
        Times of rounds stay."""
        most = self._most
        self.rate = 0.0
        """Tokens per second that the last choice predicts; 0 before the first."""
        self._survival = {False: Survival(most), True: Survival(most)}  # greedy, sampled
        self._choices: dict[int, Choice] = {}  # by batch bucket
        self._rounds: Counter[int] = Counter()  # since the last decision, by batch bucket
        self._interval: dict[int, int] = {}  # between explorations, by batch bucket
        self._below_most = 0  # rounds since the last exploration
        self._exploring = 0  # rounds left of an exploration

    def present(self, size: int) -> int:
        """The chosen K of a batch bucket."""
        return self._choices[size].present.num_draft if size in self._choices else self._most

    @property
    def shares(self) -> dict[str, list[float]]:
        """Share of rounds in which draft 1, 2, ... passed, by class of requests."""
        return {
            name: self._survival[is_sampled].shares
            for name, is_sampled in (("greedy", False), ("sampled", True))
        }

    def choose(self, size: int, rows: Sequence[Request], drafts: Sequence[int]) -> int:
        """K of the next round of the batch bucket `size`.

        Args:
          rows: its requests.
          drafts: values of K whose rounds are compiled, ascending; the last is J.
        """
        if len(drafts) == 1 or any(request.holds_k for request in rows):
            return drafts[-1]
        choice = self._choice(size)
        if self._is_due(size):
            self._decide(choice, rows, drafts)
        return drafts[-1] if self._explores(choice) else choice.shape.num_draft

    def record(self, rows: Iterable[tuple[Request, int, int]]) -> None:
        """Counts a committed round: (request, drafts verified, drafts passed) of each row."""
        by_class = {False: [], True: []}
        for request, drafted, passed in rows:
            by_class[_is_sampled(request)].append((drafted, passed))
        for is_sampled, counts in by_class.items():
            self._survival[is_sampled].add(counts)

    def _choice(self, size: int) -> Choice:
        return self._choices.setdefault(size, Choice(RoundShape(size, self._most)))

    def _is_due(self, size: int) -> bool:
        """Counts a round. Returns whether K is decided anew before it."""
        self._rounds[size] += 1
        if self._rounds[size] < self.decide_every:
            return False
        self._rounds[size] = 0
        return True

    def _explores(self, choice: Choice) -> bool:
        """Whether this round is one of the two of an exploration."""
        if self._exploring:
            self._exploring -= 1
            return True
        if choice.trial is not None:  # all its rounds are timed, one after the other
            return False
        shape = choice.shape
        if shape.num_draft == self._most:  # it measures all that an exploration measures
            self._below_most = 0
            return False
        self._below_most += 1
        if self._below_most > self._interval.get(shape.size, EXPLORE_EVERY - 2):
            self._below_most, self._exploring = 0, 1
            return True
        return False

    def _decide(self, choice: Choice, rows: Sequence[Request], drafts: Sequence[int]) -> None:
        present, size = choice.present, choice.present.size
        by_draft = self.times.seconds(size, drafts)
        seconds = {RoundShape(size, k): s for k, s in by_draft.items()}
        tokens = self._tokens(rows, drafts)
        if tokens is None or present not in seconds:
            return
        rates = {shape: tokens[shape.num_draft] / s for shape, s in seconds.items()}
        choice.decide(rates, self.times)
        chosen = choice.present
        self.rate = rates[chosen]
        self._interval[size] = exploration_interval(by_draft, chosen.num_draft)
        if chosen != present:
            self.num_changes += 1
            _log.info(
                "batch size %d: %d drafts per round, predicted %.0f tokens/s; %d drafts gave %.0f",
                size,
                chosen.num_draft,
                rates[chosen],
                present.num_draft,
                rates[present],
            )

    def _tokens(self, rows: Sequence[Request], drafts: Sequence[int]) -> dict[int, float] | None:
        """Expected tokens of a round by K; None until acceptance is measured."""
        tokens = dict.fromkeys(drafts, float(len(rows)))
        for (is_sampled, limit), count in Counter(
            (_is_sampled(request), request.num_draft) for request in rows
        ).items():
            own, other = self._survival[is_sampled], self._survival[not is_sampled]
            known = next((times for times in (own, other) if times.is_known(limit)), None)
            if known is None:
                return None
            shares = known.shares
            for k in drafts:
                tokens[k] += count * sum(shares[: min(k, limit)])
        return tokens


def _is_sampled(request: Request) -> bool:
    return request.params.temperature > 0
