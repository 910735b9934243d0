"""Pages ahead of a text: one plan for many rounds, and a short pool gets them back."""

import pytest

from peagle_jax.engine.host.scheduler import Scheduler
from tests.engine.fake_engine import FakeEngine, make_config


def engine_of(**changes) -> FakeEngine:
    sizes = dict(J=4, B=2, max_len=128, Z=2, P=None, T=64, R=2) | changes
    return FakeEngine(make_config(**sizes), lag=1)


def plans(engine: FakeEngine, rounds: int) -> list:
    found = []
    for _ in range(rounds):
        calls = engine.dispatch()
        found.append(calls.decode)
        while len(engine.in_flight) > 1:
            engine.commit()
    return found


def test_the_plan_of_a_batch_is_built_once():
    engine = engine_of(P=400)
    for _ in range(2):
        engine.add([3] * 5, max_tokens=90, ignore_eos=True)
    engine.step()
    _, first, *later = plans(engine, 12)  # the first round may have room enough without pages ahead
    assert all(call is first for call in later)
    engine.drain()


@pytest.mark.parametrize("pages", [66, 100, 160, 400])
def test_pages_ahead_return_before_they_run_out(pages):
    """A quarter of the pool stays free of pages ahead of texts, and no request is preempted."""
    engine = engine_of(P=pages)
    for _ in range(2):
        engine.add([3] * 5, max_tokens=110, ignore_eos=True)
    ahead = 0
    for _ in range(400):
        if not engine.scheduler.has_work:
            break
        engine.step()
        scheduler: Scheduler = engine.scheduler
        held = sum(len(request.pages) for request in scheduler.active)
        needed = sum(
            scheduler._pages.num_pages(scheduler._pages.upper_bound(request))
            for request in scheduler.active
        )
        ahead = max(ahead, held - needed)
        if held - needed > 8:
            assert 4 * scheduler.pool.num_free >= pages
    assert (ahead > 8) == (pages > 66)
    assert engine.scheduler.num_preemptions == {66: 4, 100: 1}.get(pages, 0)
    engine.drain()
