"""The choice of K at run time, as pure functions and with the scheduler."""

import random

import pytest

from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.k_by_load import (
    DECIDE_EVERY,
    LoadPolicy,
    candidates,
)
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.round_times import RoundTimes
from tests.engine.fake_engine import make_request

J = 7
DRAFTS = (0, 1, 3, 5, 7)
FLAT = {(8, k): 1.0 for k in DRAFTS}  # drafts cost nothing
STEEP = {(8, k): 1.0 + k for k in DRAFTS}  # each draft costs as much as a token is worth


def greedy(count: int = 8, num_draft: int = J) -> list[Request]:
    return [make_request(i, [1], num_draft) for i in range(count)]


class Driven:
    """A policy, with rounds whose drafts pass with given shares."""

    def __init__(self, times: dict, shares: list[float], *, lag: int = 1, rows=None, seed=0):
        self.policy = LoadPolicy(J, RoundTimes(times))
        self.shares, self.rows = shares, rows or greedy()
        self.rng, self.lag = random.Random(seed), lag
        self.made, self.uncommitted, self.chosen = J, [], []
        self.size, self.real = 8, {}  # real: seconds of rounds by K

    def passed(self, drafted: int) -> int:
        for j in range(drafted):
            before = self.shares[j - 1] if j else 1.0
            if self.rng.random() * before >= self.shares[j]:
                return j
        return drafted

    def run(self, rounds: int, drafts=DRAFTS) -> list[int]:
        for _ in range(rounds):
            k = self.policy.choose(self.size, self.rows, drafts)
            verified = [min(k, self.made, request.num_draft) for request in self.rows]
            counts = [(r, n, self.passed(n)) for r, n in zip(self.rows, verified, strict=True)]
            self.made = k
            self.uncommitted.append(counts)
            if len(self.uncommitted) > self.lag:
                self.policy.record(self.uncommitted.pop(0))
            if k in self.real:
                noise = self.rng.lognormvariate(0, 0.03)
                self.policy.times.add_round(RoundShape(self.size, k), noise * self.real[k])
            self.chosen.append(k)
        return self.chosen[-rounds:]


GOOD, BAD = [0.95**i for i in range(1, 8)], [0.05] * 7


def test_candidates_end_with_j_and_are_few_on_a_cpu():
    assert candidates(7, 8, "gpu") == (0, 3, 7)
    assert candidates(7, 64, "gpu") == (0, 1, 3, 7)
    assert candidates(7, 8, "cpu") == (0, 3, 7)
    for platform in ("cpu", "gpu", "tpu"):
        for most in range(1, 33):
            found = candidates(most, 4, platform)
            assert list(found) == sorted(set(found))
            assert (found[0], found[-1]) == (0, most)


def test_expensive_drafts_that_fail_are_given_up_and_taken_up_again():
    driven = Driven(STEEP, BAD)
    assert driven.run(400)[-50:].count(0) >= 48
    assert driven.policy.present(8) == 0
    driven.shares = [1.0] * 7
    driven.policy.times = RoundTimes(FLAT)
    driven.run(5000)
    assert driven.policy.present(8) == J
    assert driven.policy.num_changes == 2


def test_noise_changes_k_seldom():
    """K = 3 and 5 are equally fast: small differences decide, and hysteresis ignores them."""
    shares = [0.8**i for i in range(1, 8)]
    tokens = {k: 1 + sum(shares[:k]) for k in DRAFTS}
    worse = {0: 1.2, 1: 1.2, 3: 1.0, 5: 1.0, 7: 1.2}
    driven = Driven({(8, k): worse[k] * tokens[k] for k in DRAFTS}, shares)
    chosen = driven.run(20_000)
    assert driven.policy.present(8) in (3, 5)
    assert driven.policy.num_changes < 20_000 / DECIDE_EVERY / 10
    assert sum(k in (3, 5) for k in chosen[2000:]) > 0.97 * len(chosen[2000:])


def test_the_choice_counts_each_requests_own_limit_and_class():
    driven = Driven(FLAT, GOOD, rows=greedy(4) + greedy(4, num_draft=0))
    driven.run(100)
    assert driven.policy.rate == pytest.approx(8 + 4 * sum(GOOD), rel=0.1)
    plain = Driven(STEEP, GOOD, rows=greedy(8, num_draft=0))
    assert plain.run(200)[-50:].count(0) >= 48
    sampled = [make_request(i, [1], J, temperature=1.0) for i in range(8)]
    driven = Driven(FLAT, GOOD, rows=sampled)
    driven.run(100)
    shares = driven.policy.shares
    assert shares["sampled"][0] > 0.8
    assert shares["greedy"] == [0.0] * J


def test_a_sampled_request_with_a_seed_keeps_k_at_j():
    seeded = make_request(99, [1], J, temperature=1.0)
    object.__setattr__(seeded.params, "seed", 5)
    driven = Driven(STEEP, BAD)
    assert 0 in driven.run(400)
    driven.rows = [*greedy(7), seeded]
    assert set(driven.run(50)) == {J}
    object.__setattr__(seeded.params, "temperature", 0.0)
    assert 0 in driven.run(50)


SHARES = [0.80, 0.63, 0.51, 0.41, 0.35, 0.30, 0.26]
# milliseconds of a round by batch size and K: Qwen3-Coder-30B-A3B in FP8 blocks on an H200
REAL = {
    8: {0: 5.9, 1: 8.5, 3: 10.0, 5: 10.5, 7: 10.7},
    32: {0: 9.8, 1: 10.9, 3: 12.1, 5: 14.2, 7: 14.9},
    128: {0: 13.6, 1: 18.0, 3: 23.3, 5: 26.5, 7: 34.0},
}
IDLE = {  # what a round over idle slots may seem to take, by K
    "right": lambda real, k: real[k],
    "a constant": lambda real, k: 1.0,
    "by rows": lambda real, k: 1.0 + k,
    "1.6 from 3 to 5": lambda real, k: {0: 0.5, 1: 0.7, 3: 1.0, 5: 1.6, 7: 2.2}[k],
    "hardly more than plain": lambda real, k: 1.0 if k < 3 else 1.9 + 0.1 * k,
}


@pytest.mark.sampled(2, slow=5)
@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("size", REAL)
def test_the_choice_comes_within_two_percent_of_the_best_k(size, idle, num_cases):
    """Real rounds correct wrong times over idle slots."""
    real = REAL[size]
    tokens = {k: 1 + sum(SHARES[:k]) for k in DRAFTS}
    fastest = max(tokens[k] / real[k] for k in DRAFTS)
    for seed in range(num_cases("runs with wrong idle times", 2)):
        driven = Driven({(size, k): IDLE[idle](real, k) for k in DRAFTS}, SHARES, seed=seed)
        driven.size, driven.rows = size, greedy(size)
        driven.real = {k: ms * 1e-3 for k, ms in real.items()}
        chosen = driven.run(1500)
        spent = sum(real[k] for k in chosen[300:])
        assert sum(tokens[k] for k in chosen[300:]) / spent > 0.98 * fastest
        final = driven.policy.present(size)
        assert tokens[final] / real[final] > 0.98 * fastest
