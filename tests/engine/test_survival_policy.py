"""How many drafts a round verifies: decisions of `SurvivalPolicy` without a device."""

import itertools
import random

import numpy as np
import pytest

from bench.rows import RESULTS, read
from bench.synthetic import accepted_by_text
from peagle_jax.config import EngineConfig
from peagle_jax.engine import survival
from peagle_jax.engine.adaptive import DECIDE_EVERY, EXPLORE_EVERY
from peagle_jax.engine.calls import DecodeCall, RoundShape
from peagle_jax.engine.request import Request
from peagle_jax.engine.round_times import RoundTimes
from peagle_jax.engine.survival import Spread, SurvivalPolicy
from peagle_jax.plan import SURVIVAL_BINS, SurvivalReport
from peagle_jax.sampling_params import SamplingParams

SIZE, J = 16, 7
RAGGED = (16, 32, 64)
WHOLE = RoundShape(SIZE, J)
SHAPES = [*(RoundShape(SIZE, k) for k in (0, 3, J)), *(RoundShape(SIZE, J, r) for r in RAGGED)]
CONFIG = EngineConfig(num_draft=J, max_num_seqs=SIZE, adaptive="survival")


def bins_of(survivals: np.ndarray, counted: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Histogram and sums [K, SURVIVAL_BINS] of survivals [B, K], of those that are `counted` [B, K]."""
    counted = np.ones_like(survivals) if counted is None else counted
    found = []
    for weights in (counted, counted * survivals):
        columns = zip(survivals.T, weights.T, strict=True)
        found.append(
            [np.bincount((s * SURVIVAL_BINS).astype(int), w, SURVIVAL_BINS) for s, w in columns]
        )
    return tuple(np.reshape(one, (-1, SURVIVAL_BINS)) for one in found)


def full(value: float, num_draft: int = J) -> tuple[np.ndarray, ...]:
    return bins_of(np.full((SIZE, num_draft), value))


def test_the_likeliest_drafts_are_those_of_a_sort(num_cases):
    rng = np.random.default_rng(0)
    for _ in range(num_cases("spreads of survival", 20)):
        survivals = rng.random((SIZE, J)) * 0.999
        spread = Spread(J)
        spread.add(*bins_of(survivals), SIZE)
        for number, k in itertools.product((0, 1, 16, 50, SIZE * J, 1000), (0, 1, 3, J)):
            wanted = np.sort(survivals[:, :k].ravel())[::-1][:number].sum()
            assert spread.accepted(SIZE, k, number) == pytest.approx(wanted, abs=0.03 * number)
            # Half of the requests have half of the drafts.
            assert spread.accepted(8, k, number // 2) == pytest.approx(
                wanted / 2, abs=0.02 * number + 1
            )
        all_of_three = spread.accepted(SIZE, 3, 3 * SIZE)
        assert all_of_three == pytest.approx(survivals[:, :3].sum())


def test_a_spread_follows_a_change():
    spread = Spread(J)
    for value in [0.925] * 100 + [0.325] * 100:
        spread.age()
        spread.add(*full(value), SIZE)
    assert spread.accepted(1, J, J) == pytest.approx(0.325 * J, rel=0.02)
    for _ in range(100):
        spread.age()
    spread.add(*full(0.925), SIZE)
    found = spread.accepted(1, J, J) / J
    assert found == pytest.approx(0.6 * 0.325 + 0.4 * 0.925, rel=0.02), "the only one in 100 rounds"


def test_rounds_of_few_drafts_say_how_later_drafts_change():
    spread = Spread(J)
    spread.add(*full(0.9, 3), SIZE)
    assert not spread.is_known
    spread.add(*bins_of(np.tile(0.8 ** np.arange(1, J + 1), (SIZE, 1))), SIZE)
    for _ in range(200):
        spread.age()
        spread.add(*bins_of(np.tile(0.5 * 0.8 ** np.arange(1, 4), (SIZE, 1))), SIZE)
    wanted = 0.5 * 0.8 ** np.arange(1, J + 1)
    for k in (1, 3, 5, J):
        assert spread.accepted(1, k, k) == pytest.approx(wanted[:k].sum(), rel=0.01)
    # The later drafts are old, so one round of all drafts weighs enough.
    spread.add(*full(0.9), SIZE)
    found = spread.accepted(1, J, J) - spread.accepted(1, 3, 3)
    assert found == pytest.approx(0.6 * wanted[3:].sum() + 0.4 * 4 * 0.9, rel=0.01)


class Driven:
    """A policy that serves requests whose drafts have given survivals, [B, J]."""

    def __init__(self, seconds: dict[RoundShape, float], survivals: np.ndarray):
        self.size = len(survivals)
        self.config = EngineConfig(num_draft=J, max_num_seqs=self.size, adaptive="survival")
        self.policy = SurvivalPolicy(J, RoundTimes(seconds))
        self.policy.ragged = {self.size: self.config.ragged_rows(self.size)}
        self.dense = tuple(sorted(s.num_draft for s in seconds if not s.num_rows)) or (0, J)
        self.survivals = survivals
        self.rng = random.Random(0)

    def requests(self, **fields) -> list[Request]:
        rows = [
            Request(id=i, prompt=[1], params=SamplingParams(**fields), num_draft=J, seed=i)
            for i in range(self.size)
        ]
        for slot, request in enumerate(rows):
            request.slot, request.pending = slot, J
        return rows

    def run(self, rounds: int, **fields) -> list[RoundShape]:
        """Shapes of the rounds; all drafts of the likeliest rows pass as their survival says."""
        rows, shapes = self.requests(**fields), []
        for _ in range(rounds):
            shapes.append(self.policy.shape(self.size, rows, self.dense))
            call = DecodeCall.build(rows, shapes[-1], self.config)
            for request in rows:
                request.pending = call.num_draft
            self.commit(call)
        return shapes

    def commit(self, call: DecodeCall) -> None:
        report, passed = self.result(call)
        rows = zip(call.requests, report.verified.tolist(), passed.tolist(), strict=True)
        self.policy.commit(call, [*rows], report)

    def result(self, call: DecodeCall) -> tuple[SurvivalReport, np.ndarray]:
        survivals = self.survivals[:, : call.num_draft]
        may_verify = np.array(call.drafted)[:, None] > np.arange(call.num_draft)
        least = np.sort(survivals[may_verify])[::-1][: call.shape.num_verified]
        chosen = may_verify & (survivals >= (least[-1] if len(least) else 2.0))
        verified, expected = chosen.sum(axis=1), survivals[chosen].sum()
        report = SurvivalReport(verified, expected, *bins_of(survivals, may_verify))
        lucky = np.array([[self.rng.random()] for _ in range(self.size)])
        return report, (chosen & (lucky < survivals)).sum(axis=1)


HALF = np.where(np.arange(SIZE)[:, None] < SIZE // 2, 0.97, 0.02) + np.linspace(
    0, 0.01, SIZE * J
).reshape(SIZE, J)
"""Half of the requests have drafts that stand, the drafts of the others fall."""


def linear(per_row: float) -> dict[RoundShape, float]:
    """Seconds of rounds: a second, and some for each row of the target."""
    return {shape: 1.0 + per_row * (SIZE + shape.num_verified) for shape in SHAPES}


@pytest.mark.parametrize(
    ("per_row", "num_verified"), [(0.0, SIZE * J), (0.01, 64), (0.05, 64), (0.3, 32)]
)
def test_rows_are_verified_while_they_pay(per_row, num_verified):
    """56 of 112 drafts stand, and 64 rows verify them all."""
    shapes = Driven(linear(per_row), HALF).run(10 * DECIDE_EVERY)
    assert shapes[0] == WHOLE
    assert shapes[-1].num_verified == num_verified


ALIKE = np.tile(0.75 ** np.arange(1, J + 1), (SIZE, 1)) + np.arange(SIZE)[:, None] / 1e4
"""The drafts of all requests are equally likely, so a selection gains nothing."""


def test_few_drafts_are_made_where_a_selection_gains_nothing():
    """A ragged round makes seven drafts for each request, which costs as much as here half of the target's rows."""
    made = lambda shape: 1.0 + 0.01 * (shape.num_verified + 0.5 * shape.size * shape.num_draft)
    driven = Driven({shape: made(shape) for shape in SHAPES}, ALIKE)
    shapes = driven.run(40 * DECIDE_EVERY)
    assert shapes[-1] == RoundShape(SIZE, 3)
    assert set(shapes) >= {RoundShape(SIZE, 3), WHOLE}
    assert driven.policy.present(SIZE) == 3
    assert driven.policy.num_verified == {SIZE: 3 * SIZE}
    # Half of the requests have no more drafts that stand: the same batch gains by a selection then.
    driven.survivals = HALF
    assert driven.run(1000)[-1] == RoundShape(SIZE, J, 64)
    driven.survivals = ALIKE
    assert driven.run(1000)[-1] == RoundShape(SIZE, 3)


def test_the_best_fixed_k_of_measured_rounds_is_chosen():
    """Milliseconds of the 30 B shape with 128 requests on an H200, those of (0), (7, 128) and (7, 256) estimated, and
    acceptance of texts (docs/adaptive.md). Without dense rounds between K = 0 and 7, (7, 512) is chosen."""
    size = 128
    dense = {0: 14.2, 3: 23.96, 5: 26.89, J: 34.87}
    ragged = {size: 22.0, 2 * size: 25.0, 4 * size: 27.58}
    times = {RoundShape(size, k): ms for k, ms in dense.items()}
    times |= {RoundShape(size, J, number): ms for number, ms in ragged.items()}
    texts = accepted_by_text(read([RESULTS / "headroom.jsonl"]), J, "own")
    accepted = [np.minimum(text, J) for text in texts if text]
    survivals = np.array([[(text > j).mean() for j in range(J)] for text in accepted]) * 0.999
    survivals = np.random.default_rng(0).permutation(survivals)[:size]
    assert Driven(times, survivals).run(5 * DECIDE_EVERY)[-1] == RoundShape(size, 5)
    fewer = {shape: ms for shape, ms in times.items() if shape.num_draft in (0, J)}
    assert Driven(fewer, survivals).run(5 * DECIDE_EVERY)[-1] == RoundShape(size, J, 4 * size)


def test_drafts_that_never_stand_are_not_verified():
    driven = Driven(linear(0.02), np.full((SIZE, J), 0.01))
    assert driven.run(10 * DECIDE_EVERY)[-1] == RoundShape(SIZE, 0)
    assert driven.policy.present(SIZE) == 0
    driven.survivals = HALF
    shapes = driven.run(5000)
    assert shapes[-1] == RoundShape(SIZE, J, 64), "explorations find out"
    assert driven.policy.present(SIZE) == J


def test_explorations_verify_all_drafts_and_are_rare():
    shapes = Driven(linear(0.01), HALF).run(2000)[500:]
    share = sum(shape == WHOLE for shape in shapes) / len(shapes)
    assert 0.001 < share < 0.05


def test_requests_with_a_seed_of_their_own_verify_all_drafts():
    driven = Driven(linear(0.3), HALF)
    driven.run(10 * DECIDE_EVERY)
    assert set(driven.run(40, temperature=1.0, seed=5)) == {WHOLE}
    assert driven.run(1)[0] != WHOLE


def test_small_batches_choose_k_as_by_load():
    policy = SurvivalPolicy(J, RoundTimes({(8, k): 1.0 + 9 * k for k in (0, J)}))
    rows = Driven({}, HALF).requests()[:8]
    for _ in range(40):
        assert policy.shape(8, rows, (0, J)) in {RoundShape(8, 0), RoundShape(8, J)}
        policy.record([(request, J, 0) for request in rows])
    assert policy.shape(8, rows, (0, J)) == RoundShape(8, 0)
    assert policy.num_verified == {}


def test_only_explorations_count_while_all_drafts_are_verified():
    """The first rounds count until a spread is known."""
    driven = Driven(linear(0.0), HALF)
    policy, rows, counted = driven.policy, driven.requests(), []
    for _ in range(1000):
        shape = policy.shape(SIZE, rows, (0, J))
        assert shape == WHOLE
        call = DecodeCall.build(rows, shape, CONFIG, counts=policy.must_count(shape))
        counted.append(call.counts)
        assert call.is_greedy != call.counts
        report, passed = driven.result(call)
        outcome = [(one, J, int(n)) for one, n in zip(call.requests, passed, strict=True)]
        policy.commit(call, outcome, report if call.counts else None)
    assert counted[0]
    at = [i for i, one in enumerate(counted) if one][1:]
    assert at[1::2] == [i + 1 for i in at[::2]], "one makes drafts, the next one verifies them"
    assert 10 < len(at) <= 1000 / EXPLORE_EVERY * 2 + 2
    assert policy.num_changes == 0


def test_counts_compare_what_was_expected_with_what_passed():
    driven = Driven(linear(0.01), HALF)
    driven.run(300)
    counts = driven.policy.counts
    assert counts.rounds == 300
    assert counts.accepted == pytest.approx(counts.expected, rel=0.05)
    assert 40 < counts.verified / counts.rounds < 112


def test_rounds_after_one_of_fewer_drafts_say_nothing_about_survival(monkeypatch):
    added = []
    monkeypatch.setattr(survival.Spread, "add", lambda self, *args: added.append(args))
    driven = Driven(linear(0.3), HALF)
    rows = driven.requests()
    rows[0].num_draft = 2
    for pending in (0, 3, J):
        for request in rows:
            request.pending = pending
        shape = driven.policy.shape(SIZE, rows, (0, J))
        driven.commit(DecodeCall.build(rows, shape, CONFIG))
    assert [number for *_, number in added] == [SIZE]
