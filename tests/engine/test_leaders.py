"""Prompts with the same beginning that arrive at once: the beginning is computed once."""

import pytest

from peagle_jax.engine.host.request import Request
from tests.engine.fake_engine import FakeEngine, check_finished, make_config

Z, CHUNK, SHARED, OWN = 4, 8, 40, 5


def make_engine(windows=(), saved=0, pages=None, idle_prefills=4, **sizes) -> FakeEngine:
    config = make_config(
        Z=Z, P=pages, T=CHUNK, saved=saved, **dict(J=2, B=8, max_len=64, R=4) | sizes
    )
    return FakeEngine(config, windows=windows, idle_prefills=idle_prefills)


def add(engine: FakeEngine, beginning: list[int], own: int, **fields) -> Request:
    return engine.add([*beginning, *[own] * OWN], max_tokens=3, ignore_eos=True, **fields)


def drain(engine: FakeEngine) -> int:
    """Runs all requests, and returns the number of prompt tokens that were computed."""
    computed = 0
    while engine.scheduler.has_work:
        computed += sum(int(call.plan.count.sum()) for call in engine.dispatch().prefills)
        while len(engine.in_flight) > engine.lag:
            engine.commit()
    engine.drain()
    return computed


BEGINNING = [(3 * i) % 50 for i in range(SHARED)]
WHOLE = SHARED + OWN
REST = WHOLE - (SHARED // Z - 1) * Z
"""Tokens that a follower computes: the last page of the beginning has another token after it."""


@pytest.mark.parametrize(("windows", "saved"), [((), 0), ((6, 11), 2)])
def test_a_beginning_that_all_rows_of_a_call_share_is_computed_once(windows, saved):
    engine = make_engine(windows, saved)
    requests = [add(engine, BEGINNING, own) for own in range(4)]
    assert drain(engine) == WHOLE + 3 * REST
    assert [request.num_cached for request in requests] == [0, *[WHOLE - REST] * 3]
    for request in requests:
        check_finished(request, engine)


def test_without_saved_rings_windows_are_computed_for_each_row():
    engine = make_engine((6, 11))
    requests = [add(engine, BEGINNING, own) for own in range(4)]
    assert drain(engine) == 4 * WHOLE
    for request in requests:
        check_finished(request, engine)


def test_an_urgent_request_does_not_wait_for_another():
    engine = make_engine(R=2, idle_prefills=1)
    leader = add(engine, BEGINNING, 1)
    engine.step()
    urgent = add(engine, BEGINNING, 2, priority=-1)
    (call,) = engine.dispatch().prefills
    assert call.requests == (urgent, leader)
    engine.drain()
    for request in (leader, urgent):
        check_finished(request, engine)


@pytest.mark.parametrize("windows", [(), (6,)])
def test_a_follower_goes_on_if_its_leader_ends(windows):
    engine = make_engine(windows, 2, idle_prefills=1)
    leader, follower = add(engine, BEGINNING, 1), add(engine, BEGINNING, 2)
    for _ in range(3):
        engine.step()
    assert not follower.pages
    engine.abort(leader)
    engine.step()
    assert follower.pages
    assert follower.num_cached == (0 if windows else 3 * CHUNK), "no ring was saved here"
    engine.drain()
    check_finished(follower, engine)


@pytest.mark.parametrize(("size", "computes"), [(70, 70 + 7 * (70 - 68)), (64, 8 * 64)])
def test_answers_of_one_prompt_share_a_prefill_of_one_chunk(size, computes):
    """The last token of a prompt is computed for each; short prompts are not worth a call."""
    engine = FakeEngine(make_config(J=2, B=8, max_len=96, R=8, Z=Z, P=None, T=128))
    prompt = [(3 * i) % 50 for i in range(size)]
    requests = [engine.add(prompt, max_tokens=3, ignore_eos=True) for _ in range(8)]
    assert drain(engine) == computes
    for request in requests:
        check_finished(request, engine)
