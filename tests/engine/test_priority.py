"""Priorities and fairness in the scheduler, against `FakeDevice`."""

import random

import pytest

from peagle_jax.engine.host.request import RequestState
from tests.engine.fake_device import VOCAB
from tests.engine.fake_engine import FakeEngine, check_finished, make_config

ROOMY = dict(max_len=64, Z=4, P=None, T=8)


def test_the_most_urgent_request_leaves_the_queue_first():
    engine = FakeEngine(make_config(J=1, B=1, R=1, **ROOMY))
    requests = [engine.add([1], max_tokens=3, priority=p) for p in (0, 5, -1, 0)]
    order = []
    while engine.scheduler.has_work:
        engine.step()
        order += [one for one in engine.scheduler.active if one not in order]
    first, later, urgent, second = requests
    assert order == [urgent, first, second, later]


def test_a_waiting_request_takes_nothing_from_a_running_one():
    engine = FakeEngine(make_config(J=1, B=1, R=1, **ROOMY))
    running = engine.add([1], max_tokens=30, ignore_eos=True, priority=9)
    engine.step()
    urgent = engine.add([2], max_tokens=3, priority=-9)
    while not running.is_finished:
        engine.step()
        assert not urgent.output
    assert (running.preemptions, engine.scheduler.num_preemptions) == (0, 0)
    engine.drain()
    check_finished(urgent, engine)


def test_memory_is_taken_from_the_least_urgent_request_though_it_is_older():
    engine = FakeEngine(make_config(J=1, B=2, max_len=24, Z=2, P=13, T=64, R=2))
    old = engine.add([1] * 8, num_draft=0, max_tokens=16, ignore_eos=True, priority=1)
    urgent = engine.add([2] * 6, num_draft=0, max_tokens=16, ignore_eos=True)
    engine.drain()
    assert old.preemptions > 0
    assert urgent.preemptions == 0
    for request in (old, urgent):
        check_finished(request, engine)


def test_a_stream_of_urgent_requests_starves_others_only_while_it_lasts(num_cases):
    """All end with the tokens they have alone."""
    for seed in range(num_cases("streams of urgent requests", 5)):
        rng = random.Random(seed)
        engine = FakeEngine(make_config(J=3, B=3, max_len=48, Z=4, P=16, T=7, R=1), seed=seed)
        patient = engine.add([seed] * 9, max_tokens=20, priority=1)
        urgent = []
        for _ in range(200):
            while engine.scheduler.num_places > 1:
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
                urgent.append(engine.add(prompt, max_tokens=rng.randint(2, 20)))
            engine.step()
            assert not patient.output
        engine.drain()
        for request in [patient, *urgent]:
            check_finished(request, engine)


@pytest.mark.parametrize("rows", [1, 3])
def test_long_prompts_do_not_delay_rounds_by_more_than_a_call(rows, num_cases):
    """Every running request is in every round, and between two rounds lies one call of R chunks."""
    for seed in range(num_cases("mixes of long prompts and running requests", 4)):
        rng = random.Random(seed)
        engine = FakeEngine(make_config(J=2, B=6, R=rows, **ROOMY), seed=seed)
        running = [engine.add([5], max_tokens=60, ignore_eos=True) for _ in range(2)]
        while any(request.state is not RequestState.RUNNING for request in running):
            engine.step()
        most = 0
        while not all(request.is_finished for request in running):
            if engine.scheduler.num_places:
                engine.add(
                    [rng.randrange(VOCAB) for _ in range(rng.choice([1, 9, 60]))], max_tokens=2
                )
            due = engine.due()
            step = engine.dispatch()
            decoded = [] if step.decode is None else [*filter(None, step.decode.requests)]
            assert decoded == due
            if due:
                most = max(most, len(step.prefills))
            for call in step.prefills:
                assert len(call.requests) == rows
                assert max(call.plan.count) <= engine.config.prefill_chunk
            while len(engine.in_flight) > engine.lag:
                engine.commit()
        assert most == 1
        engine.drain()


def test_without_requests_that_decode_a_step_has_several_prefill_calls():
    engine = FakeEngine(make_config(J=1, B=3, R=1, **ROOMY), idle_prefills=4)
    requests = [engine.add([id] * 30, max_tokens=9, ignore_eos=True) for id in range(3)]
    numbers = []
    while any(request.num_prefilled < 30 for request in requests):
        numbers.append(len(engine.dispatch().prefills))
        while len(engine.in_flight) > engine.lag:
            engine.commit()
    assert numbers == [4, 1, 1, 1, 1, 1, 1, 1, 1], (
        "four chunks a prompt; the first decodes after four"
    )
    engine.drain()
