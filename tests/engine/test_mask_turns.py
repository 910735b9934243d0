"""Costly masks take turns: requests of others wait for a bounded time of masks in each round."""

from collections import Counter

import pytest

from peagle_jax.engine.host.mask_turns import SECONDS
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.structured.grammar import Matcher
from peagle_jax.engine.structured.mask_threads import MaskThreads
from tests.engine.fake_engine import FakeEngine
from tests.engine.test_constrained_rounds import GRAMMARS, matcher_of
from tests.engine.test_scheduler import make_config

J = 2
CORES = 2


class _Costly(Matcher):
    """A matcher whose masks always take as long as `cost` says."""

    cost = 0.0

    @property
    def seconds(self) -> float:
        return self.cost

    @seconds.setter
    def seconds(self, measured: float) -> None:
        pass


def add(engine: FakeEngine, number: int, caller: str, cost: float | None) -> Request:
    matcher = None
    if cost is not None:
        plain = matcher_of(GRAMMARS[4])
        matcher = _Costly(plain.matcher, MaskThreads(CORES), plain.eos_ids, plain.num_words)
        matcher.cost = cost
    return engine.add(
        [number], max_tokens=500, ignore_eos=True, salt=(caller, f"{number}"), matcher=matcher
    )


def rounds_of(requests: list[tuple[str, float | None]], steps: int = 60) -> tuple[Counter, float]:
    """How many rounds each request was in, and the longest time of a round's masks."""
    engine = FakeEngine(make_config(J=J, B=8, max_len=600, Z=8, P=None, T=16, R=8))
    added = [add(engine, number + 1, *one) for number, one in enumerate(requests)]
    engine.step()
    count, longest = Counter(), 0.0
    for _ in range(steps):
        calls = engine.dispatch()
        rows = [r for r in calls.decode.requests if r is not None] if calls.decode else []
        count.update(added.index(row) for row in rows)
        masks = sum((1 + J) * row.matcher.seconds for row in rows if row.matcher is not None)
        longest = max(longest, masks / CORES)
        engine.commit()
    return count, longest


@pytest.mark.parametrize("cost", [0.5, 1.2])
def test_costly_requests_take_turns_beside_others(cost):
    """`cost`: the masks of one request as a share of the time for all."""
    mask = cost * SECONDS * CORES / (1 + J)
    count, longest = rounds_of([("a", None), *[("b", mask)] * 4, ("c", mask / 50)])
    assert longest <= (1.0 if cost <= 1 else cost + 1.0) * SECONDS
    assert count[0] >= 50, "a request without constraint goes in every round"
    assert count[5] >= 25, "so does a caller with cheap masks in every second one, as ever"
    turns = [count[place] for place in (1, 2, 3, 4)]
    assert min(turns) > 1, "each comes in turn"
    assert max(turns) - min(turns) <= 1
    assert sum(turns) * cost <= 0.6 * count[5], "all of a caller together have its share"


def test_cheap_requests_all_go_in_each_round():
    mask = SECONDS * CORES / (1 + J) / 10
    count, _ = rounds_of([("a", None), *[("b", mask)] * 3, *[("c", mask)] * 3])
    assert len({count[place] for place in range(1, 7)}) == 1
