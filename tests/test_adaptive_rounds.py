"""K chosen at run time by an engine on the device: the same texts and laws, and no compilation."""

import random

import pytest

from bench.oracle import RandomTimes
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.device import round_shapes, round_timer
from peagle_jax.engine.device.stored_times import StoredTimes
from peagle_jax.engine.host import k_by_load
from peagle_jax.engine.host.calls import DecodeCall, RoundShape
from peagle_jax.engine.host.round_times import RoundTimes
from tests import tiny
from tests.test_draft_schedule import (
    TINY_TEXTS,
    WalkConfig,
    check_sampled_law,
    check_walks,
    oracle,
    walk_config,
)
from tests.test_families import LENGTH, naive, prompts, target

DRAFTS = (0, 2, 4)


class GivenTimes(RandomTimes):
    """Seconds by K, which a test changes; the order of real rounds is recorded."""

    def __init__(self, given: dict[int, float]):
        super().__init__()
        self.given, self.rounds = given, []

    def seconds(self, size, drafts):
        return {k: self.given[k] for k in drafts}

    def add_round(self, shape, seconds):
        assert seconds > 0
        self.rounds.append(shape)


@pytest.fixture
def three_k(monkeypatch):
    """Rounds of K = 0, 2 and 4 compile, and each round decides."""
    monkeypatch.setattr(k_by_load.LoadPolicy, "decide_every", 1)
    monkeypatch.setattr(round_shapes, "candidates", lambda most, size, platform: DRAFTS)


def step(engine: Engine, rng: random.Random) -> int | None:
    """One step. Returns the K of its round."""
    engine.step()
    return next((c.num_draft for c, _ in engine._in_flight if isinstance(c, DecodeCall)), None)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize(
    ("family", "method"), [("llama", "oracle"), ("gpt_oss", "peagle"), ("mistral", "eagle3")]
)
def test_output_is_unchanged_by_any_choice_of_k(family, method, three_k, num_cases):
    config = walk_config(
        4, [4], 6, num_pages=50, max_model_len=LENGTH, page_size=4, prefill_chunk=16,
        prefill_rows=2,
    )  # fmt: skip
    config = without_schedule(config)
    head = None if method == "oracle" else tiny.head(method)
    drafter = oracle(family, 4) if method == "oracle" else None
    engine = Engine(target(family), head, config, drafter=drafter, times=RandomTimes())
    engine.warm_up()
    assert engine.programs.rounds == engine.scheduler.rounds == {6: DRAFTS}
    check_walks(engine, family, step, num_cases("walks over a K chosen at run time", 3))
    assert engine.policy.num_changes > 50


def without_schedule(config: WalkConfig) -> WalkConfig:
    fields = {name: getattr(config, name) for name in type(config).__dataclass_fields__}
    return WalkConfig(**(fields | dict(draft_schedule=(), adaptive="load")))


@pytest.mark.sampled(0, slow=0)
@pytest.mark.parametrize(
    ("method", "draft_sampling"),
    [("peagle", "sample"), ("uniform", "sample"), ("peagle", "argmax")],
)
def test_sampled_output_has_the_targets_law_under_any_choice_of_k(
    method, draft_sampling, monkeypatch, num_cases
):
    monkeypatch.setattr(k_by_load.LoadPolicy, "decide_every", 1)
    monkeypatch.setattr(k_by_load, "_LEAST_VERIFIED", 1)
    monkeypatch.setattr(round_shapes, "candidates", lambda most, size, platform: (0, 1, 2))
    config = without_schedule(walk_config(2, [2], 64, draft_sampling=draft_sampling, **TINY_TEXTS))
    count = num_cases("sampled texts under a K chosen at run time", 6000, least=6000)
    engine = check_sampled_law(method, config, Engine.step, count, times=RandomTimes())
    assert engine.policy.num_changes > 20


def make_engine(times: RoundTimes | None) -> Engine:
    config = walk_config(4, [4], 2, max_model_len=LENGTH, page_size=LENGTH, prefill_chunk=LENGTH)
    return Engine(
        target("llama"), None, without_schedule(config), drafter=oracle("llama", 4), times=times
    )


@pytest.mark.slow
def test_k_follows_the_times_down_to_plain_decoding_and_back(three_k):
    times = GivenTimes({0: 1.0, 2: 1.0, 4: 1.0})
    engine = make_engine(times)
    engine.warm_up()
    params, seen = SamplingParams(max_tokens=60, ignore_eos=True), []

    def generate() -> list[int]:
        """K of all rounds of two texts."""
        seen.clear()
        for prompt in prompts()[:2]:
            engine.add_request(prompt, params)
        while engine.has_work:
            seen.append(step(engine, None))
        return [k for k in seen if k is not None]

    assert set(generate()) == {4}
    times.given = {0: 0.01, 2: 1.0, 4: 1.0}
    assert generate()[-20:] == [0] * 20
    assert engine.scheduler.num_draft_at(2) == 0
    times.given = {0: 1.0, 2: 0.1, 4: 1.0}
    assert generate()[-5:] == [2] * 5
    times.given = {0: 1.0, 2: 1.0, 4: 1.0}
    assert generate()[-5:] == [4] * 5
    assert engine.policy.num_changes == 3


@pytest.mark.slow
def test_real_rounds_are_timed_while_the_device_has_work(three_k):
    times = GivenTimes({0: 1.0, 2: 1.0, 4: 1.0})
    engine = make_engine(times)
    engine.warm_up()
    (one,) = engine.generate(prompts()[:1], SamplingParams(max_tokens=1 + 5 * 8, ignore_eos=True))
    # The first round follows a prefill call, and the second is the first to follow a round. The round
    # dispatched before the end of the text was known counts too.
    assert one.rounds - 2 <= len(times.rounds) <= one.rounds
    assert set(times.rounds) == {RoundShape(2, 4)}
    before = len(times.rounds)
    engine.generate(prompts()[:1], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(times.rounds) == before  # after a pause there is nothing to compare with


@pytest.mark.slow
def test_nothing_compiles_after_warm_up_and_a_start_takes_only_the_first_programs(
    three_k, monkeypatch
):
    monkeypatch.setattr(StoredTimes, "load", lambda self: {})  # of an earlier run of this test
    engine = make_engine(None)
    assert engine.num_programs == 5
    engine.warm_up(sizes=engine.config.batch_buckets)
    assert engine.programs.num_compiled == 3
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    texts = [naive("llama")[i][:30] for i in (0, 1)]
    outputs = lambda: [c.tokens for c in engine.generate(prompts()[:2], params)]
    assert outputs() == texts  # K = 4, and no idle rounds delay it
    assert engine._timer.times.idle == {}
    while engine.compile_next():
        assert outputs() == texts
    assert engine.programs.num_compiled == 5
    while engine.time_idle_round():
        pass
    assert set(engine._timer.times.idle) == {RoundShape(2, k) for k in DRAFTS}
    assert outputs() == texts
    assert engine.programs.num_compiled == 5


def test_a_warm_start_has_the_times_of_the_one_before(three_k, monkeypatch, tmp_path):
    given = {RoundShape(2, k): 1.0 + k for k in DRAFTS}
    cold = make_engine(None)
    cold.programs.stored_times.path = tmp_path / "times" / "one.json"
    cold.programs.stored_times.save(given)
    warm = make_engine(None)
    monkeypatch.setattr(warm.programs, "stored_times", cold.programs.stored_times)
    timer = round_timer.RoundTimer(warm.programs, None)
    assert timer.times.idle == given
    assert not timer.has_idle_run()


def test_an_engine_without_a_drafter_has_nothing_to_choose():
    engine = Engine(target("llama"), None, EngineConfig(adaptive="load", max_model_len=LENGTH))
    assert (engine.config.adaptive, engine.policy) == ("off", None)
    assert {shape.num_draft for shape in engine.programs.shapes} == {0}
