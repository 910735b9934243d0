"""The scheduler against `FakeDevice`, a model of the device in plain Python."""

import random
from collections import Counter

import pytest

from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.scheduler import QueueFull
from peagle_jax.engine.host.stats import Acceptance
from tests.engine.fake_engine import (
    EOS,
    FakeEngine,
    check_finished,
    ends_in_seventeen,
    make_config,
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
    drafting = Acceptance.of(request for request in requests if request.num_draft)
    left = engine.scheduler.acceptance - drafting
    assert not any((left.drafted, left.accepted, *left.per_position, *left.drafted_per_position))
    if name != "changing K":  # a request counts its rounds without drafts too
        assert (left.rounds, left.emitted) == (0, 0)


def check_variety(name: str, engine: FakeEngine, requests: list[Request]) -> None:
    """Every kind of event has happened."""
    assert engine.device.num_found >= engine.scheduler.prefixes.num_found > 0
    rings = engine.scheduler.prefixes.saved_rings
    assert bool(rings.num_saved) == bool(engine.config.saved_rings)
    assert rings.num_restored or name != "saved windows"
    reasons = Counter(request.finish_reason for request in requests)
    assert min(reasons["stop"], reasons["length"], reasons["abort"]) > 0
    on_a_draft = [len(one.output) == one.rounds + one.accepted > 0 for one in requests]
    assert any(on_a_draft) or not engine.config.num_draft
    if name != "roomy":
        assert engine.scheduler.num_preemptions > 0
    assert engine.num_refused or not engine.config.num_draft


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
