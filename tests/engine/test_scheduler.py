"""The scheduler against `FakeDevice`, a model of the device in plain Python."""

import random
from collections import Counter

import numpy as np
import pytest

from peagle_jax.engine.host.request import Request, RequestState
from peagle_jax.engine.host.scheduler import QueueFull, Scheduler
from tests.engine.fake_engine import (
    EOS,
    FakeEngine,
    check_counts,
    check_finished,
    ends_in_seventeen,
    expected,
    make_config,
    make_request,
    random_prompt,
)

CONFIGS = {
    "plain": make_config(J=0, B=5, max_len=40, Z=4, P=14, T=64, R=1),
    "one draft": make_config(J=1, B=3, max_len=33, Z=1, P=60, T=5, R=1),
    "tiny pool": make_config(J=3, B=6, max_len=48, Z=4, P=16, T=7, R=1),
    "one request fits": make_config(J=5, B=4, max_len=50, Z=3, P=18, T=64, R=2),
    "long drafts": make_config(J=7, B=6, max_len=60, Z=8, P=20, T=8, R=3),
    "changing K": make_config(J=5, B=6, max_len=48, Z=4, P=20, T=7, R=1),
    "roomy": make_config(J=4, B=7, max_len=64, Z=16, P=None, T=16, R=2),
    "windows": make_config(J=3, B=4, max_len=64, Z=2, P=60, T=6, R=2),
    "saved windows": make_config(J=3, B=4, max_len=64, Z=2, P=60, T=6, R=3, saved=5),
    "one saved window": make_config(J=2, B=5, max_len=48, Z=4, P=20, T=8, R=2, saved=1),
    "plain with a window": make_config(J=0, B=3, max_len=48, Z=4, P=20, T=5, R=1),
}
WINDOWS = {
    "saved windows": (5, 11, 100),
    "one saved window": (6,),
    "windows": (5, 11, 100),
    "plain with a window": (7,),
}
PRIORITIES = (0, 0, 0, 0, -1, 0, 0, 2**31 - 1)
SALTS = [(None, None), (None, None), (None, "a"), ("a", None)]


def add_random(engine: FakeEngine, rng: random.Random, earlier: list[Request]) -> Request | None:
    try:
        return engine.add(
            random_prompt(rng, engine.config.max_model_len - 1, earlier),
            salt=rng.choice(SALTS),
            num_draft=rng.randint(0, engine.config.num_draft),
            max_tokens=rng.choice([1, 2, rng.randint(1, 70)]),
            stop_ids=rng.choice([(), (), (3,), (EOS, 5)]),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 0, 2]),
            priority=PRIORITIES[len(engine.streams) % len(PRIORITIES)],
            stop_checker=rng.choice([None, None, ends_in_seventeen]),
        )
    except QueueFull:
        assert engine.scheduler.num_places == 0
        return None


@pytest.mark.sampled(4, slow=15)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_every_request_gets_its_own_text_in_any_mix(name, seed, lag, num_cases):
    run_random(
        name, seed, lag, num_cases("rounds of random requests in the scheduler", 1500, least=1500)
    )


def run_random(name: str, seed: int, lag: int, num_rounds: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(CONFIGS[name], lag=lag, seed=seed, windows=WINDOWS.get(name, ()))
    if name == "changing K":
        engine.vary_k(random.Random(seed))
    requests: list[Request] = []
    for _ in range(num_rounds):
        while rng.random() < 0.4:
            request = add_random(engine, rng, requests)
            requests += [request] if request else []
        engine.dispatch()
        if requests and rng.random() < 0.03:  # between dispatch and commit
            engine.abort(rng.choice(requests[-20:]))
        while len(engine.in_flight) > lag:
            engine.commit()
        if requests and rng.random() < 0.03:
            engine.abort(rng.choice(requests[-20:]))
    engine.drain()
    for request in requests:
        check_finished(request, engine)
    if num_rounds >= 600:
        check_variety(name, engine, requests)
    drafting = [request for request in requests if request.num_draft]
    wanted = [sum(getattr(r, f) for r in drafting) for f in ("drafted", "accepted")]
    counts = engine.scheduler.acceptance
    assert [counts.drafted, counts.accepted, sum(counts.per_position)] == [*wanted, wanted[1]]


def check_variety(name: str, engine: FakeEngine, requests: list[Request]) -> None:
    """Every kind of event has happened."""
    assert engine.device.num_found >= engine.scheduler.prefixes.num_found > 0
    rings = engine.scheduler.prefixes.saved_rings
    assert bool(rings.num_saved) == bool(engine.config.saved_rings)
    assert rings.num_restored or name != "saved windows"
    reasons = Counter(request.finish_reason for request in requests)
    assert min(reasons["stop"], reasons["length"], reasons["abort"]) > 0
    if name != "roomy":
        assert engine.scheduler.num_preemptions > 0
    assert engine.num_refused or not engine.config.num_draft


def test_long_prompts_go_chunk_by_chunk_and_decode_after_the_last_one():
    config = make_config(J=2, B=3, max_len=32, Z=4, P=None, T=4, R=2)
    scheduler = Scheduler(config, eos_ids=[])
    scheduler.idle_prefills = 1
    sampling = dict(temperature=0.5, top_k=9, top_p=0.75, min_p=0.25, logprobs=3, max_tokens=8)
    request = make_request(0, list(range(10, 20)), 1, seed=(5 << 32) + 7, **sampling)
    scheduler.add(request)
    for start, count, next_token in [(0, 4, 14), (4, 4, 18), (8, 2, -1)]:
        assert request.committed == start
        plan = scheduler.schedule()
        assert plan.decode is None
        (prefill,) = plan.prefills
        assert prefill.requests == (request, None)
        assert [prefill.samples(row) for row in (0, 1)] == [next_token < 0, False]
        assert prefill.last == (next_token < 0,)
        chunk = [*range(10 + start, 10 + start + count), 0, 0][:4]
        table = [*request.pages, 0, 0, 0, 0]  # 14 of 32 positions are mapped
        for name, dtype, rows in [
            ("slots", "int32", [request.slot, 3]),
            ("tokens", "int32", [chunk, [0] * 4]),
            ("start", "int32", [start, 0]),
            ("count", "int32", [count, 0]),
            ("next_token", "int32", [next_token, -1]),
            ("page_table", "int32", [table, [0] * 8]),
            ("temperature", "float32", [0.5, 0]),
            ("top_k", "int32", [9, 0]),
            ("top_p", "float32", [0.75, 1]),
            ("min_p", "float32", [0.25, 0]),
            ("seed", "uint32", [[5, 7], [0, 0]]),
            ("num_draft", "int32", [1, 0]),
            ("scored", "int32", [1, 0]),
        ]:
            array = getattr(prefill.plan, name, None)
            array = getattr(prefill.plan.params, name) if array is None else array
            assert (array.dtype, array.tolist()) == (dtype, rows), name
    assert (request.state, request.committed) == (RequestState.RUNNING, 10)
    plan = scheduler.schedule()  # the first token is not known yet
    assert not plan.prefills
    assert plan.decode.requests == (request,)
    decode = plan.decode.plan
    assert decode.slots.dtype == decode.page_table.dtype == np.int32
    assert decode.page_table.shape == (1, config.pages_per_seq)
    assert (request.in_flight, request.rounds_in_flight) == (2, 1)


@pytest.mark.parametrize(("lag", "num_draft"), [(0, 0), (1, 0), (0, 3), (1, 3)])
def test_no_round_is_dispatched_whose_tokens_could_not_be_used(lag, num_draft):
    config = make_config(J=num_draft, B=4, max_len=24, Z=4, P=None, T=64, R=1)
    engine = FakeEngine(config, lag=lag)
    by_count = [
        engine.add([1, 2, 3], num_draft=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 9)
    ]
    by_length = engine.add([1] * 20, num_draft=0, max_tokens=50, ignore_eos=True)
    engine.drain()
    assert engine.num_rows == 0 + 1 + 8 + 3
    assert [request.rounds for request in [*by_count, by_length]] == [0, 1, 8, 3]


@pytest.mark.parametrize("state", ["waiting", "prefill", "running"])
def test_an_abort_frees_at_once_and_a_stale_result_reaches_nobody(state):
    config = make_config(J=2, B=1, max_len=32, Z=4, P=9, T=4, R=1)
    engine = FakeEngine(config)
    first = engine.add([7] * 10)
    for _ in range({"waiting": 0, "prefill": 2, "running": 4}[state]):
        engine.step()
    assert first.state is RequestState(state)
    engine.abort(first)
    engine.abort(first)
    assert engine.scheduler.pool.num_free == config.total_pages - 1
    assert not engine.scheduler.has_work
    second = engine.add([8] * 3, max_tokens=9)  # takes the slot while the old round runs
    output = list(first.output)
    engine.drain()
    check_finished(first, engine)
    check_finished(second, engine)
    assert first.output == output
    assert first.finish_reason == "abort"


def preempted_pair(**young_fields) -> tuple[FakeEngine, Request, Request]:
    """Two requests in a pool for one, stepped to where the younger was preempted in flight."""
    engine = FakeEngine(make_config(J=1, B=2, max_len=24, Z=2, P=13, T=64, R=2))
    old = engine.add([1] * 8, num_draft=0, max_tokens=16, ignore_eos=True)
    young = engine.add([2] * 6, num_draft=0, max_tokens=16, ignore_eos=True, **young_fields)
    while not young.preemptions:
        engine.dispatch()
        if not young.preemptions and len(engine.in_flight) > 1:
            engine.commit()
    return engine, old, young


def test_a_preempted_request_takes_in_its_results_before_it_returns():
    engine, old, young = preempted_pair()
    assert young.in_flight == 1
    assert engine.scheduler.waiting[0] is young
    before = len(young.output)
    engine.scheduler.abort(old)  # pages and a slot are there; its tokens are not all known
    assert not engine.scheduler.schedule().prefills
    while engine.in_flight:
        engine.commit()
    assert (len(young.output), young.in_flight) == (before + 1, 0)
    plan = engine.dispatch()
    (prefill,) = plan.prefills
    assert prefill.requests[0] is young
    # All but the newest token, which rides along: the next round goes on where the last one ended.
    assert prefill.plan.start[0] + prefill.plan.count[0] == len(young.prompt) + before
    assert 0 < prefill.plan.count[0] <= 3, "its pages were still known"
    assert prefill.plan.next_token[0] == young.output[-1]
    assert (prefill.last, prefill.samples(0)) == ((True,), False)
    assert (young.in_flight, young.rounds) == (0, before)
    engine.drain()
    check_counts(young)
    assert young.output == expected(young, 24)[0]


def test_a_preempted_request_can_finish_while_it_waits():
    probe = preempted_pair()[2]
    in_flight = expected(probe, 24)[0][len(probe.output)]
    engine, old, young = preempted_pair(stop_ids=(in_flight,))
    assert young.state is RequestState.WAITING
    while engine.in_flight:
        engine.commit()
    assert young.finish_reason == "stop"
    assert engine.scheduler.num_waiting == 0
    engine.drain()
    check_finished(young, engine)
    check_finished(old, engine)


def test_surplus_pages_return_at_commit_if_less_than_a_quarter_of_the_pool_is_free():
    engine = FakeEngine(make_config(J=4, B=1, max_len=128, Z=1, P=None, T=128, R=1), lag=0)
    request = engine.add([3] * 97, num_draft=0, max_tokens=30, ignore_eos=True)
    engine.step()
    for _ in range(8):
        engine.dispatch()
        engine.dispatch()
        assert len(request.pages) == request.committed + 5 + 8  # one round unknown, and lookahead
        engine.commit()
        engine.commit()
        assert len(request.pages) == request.committed + 8
