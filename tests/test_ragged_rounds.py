"""Ragged rounds in an engine: the same texts and laws under any sequence of R and K."""

import itertools
import random
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from bench.random_times import RandomTimes
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine import adaptive
from peagle_jax.engine.calls import DecodeCall, RoundShape, timed_plan
from peagle_jax.engine.round_times import RoundTimes
from peagle_jax.step import RoundInputs
from peagle_jax.structured import Structured
from tests import tiny
from tests.engine.test_structured import PROMPTS, SCHEMAS
from tests.json_vocabulary import END, json_tokenizer
from tests.programs import shared
from tests.test_draft_schedule import TINY_TEXTS, check_sampled_law, check_texts, oracle, walk
from tests.test_families import LENGTH, MAX_TOKENS, naive, prompts, target


@dataclass(frozen=True, kw_only=True)
class OneSize(EngineConfig):
    """One batch bucket; ragged rounds whatever its size."""

    adaptive: str = "survival"
    numbers: tuple[int, ...] = (2, 7)  # values of R

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        return (self.max_num_seqs,)

    def ragged_rows(self, batch_size: int) -> tuple[int, ...]:
        return self.numbers


class GivenTimes(RandomTimes):
    """Seconds by R, 0 for a round of all drafts; a round of K = 0 is the slowest."""

    def __init__(self, given: dict[int, float]):
        super().__init__()
        self.given = given

    def seconds_of(self, shapes):
        return {s: self.given[s.num_rows] if s.num_draft else 100.0 for s in shapes}


@pytest.fixture
def every_round_decides(monkeypatch):
    monkeypatch.setattr(adaptive.LoadPolicy, "decide_every", 1)


def shape_of(engine: Engine) -> RoundShape | None:
    """The shape of the round that was dispatched last."""
    calls = [call for call, _ in engine._in_flight if isinstance(call, DecodeCall)]
    return calls[0].shape if calls else None


def make_engine(family: str, method: str, times: RoundTimes, **changes) -> Engine:
    """An engine of up to six requests and J = 4. Those of one family and method share their programs."""
    config = OneSize(
        num_draft=4, max_num_seqs=6, num_pages=50, max_model_len=LENGTH, page_size=4,
        prefill_chunk=16, prefill_rows=2, **changes,
    )  # fmt: skip
    head = None if method == "oracle" else tiny.head(method)
    drafter = oracle(family, 4) if method == "oracle" else None
    with shared():
        return Engine(target(family), head, config, drafter=drafter, times=times)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "oracle"), ("gpt_oss", "peagle"), ("gemma4", "eagle3"), ("qwen3_moe", "peagle")],
)
def test_output_is_unchanged_by_any_sequence_of_rows(
    family, method, every_round_decides, num_cases
):
    """Also with requests without drafts, aborts, preemption, and rows of padding."""
    # With the oracle, rounds that verify all drafts have a loop of their own, which does not count survival.
    greedy = dict(greedy_rounds=True, rounds_per_call=2) if method == "oracle" else {}
    engine = make_engine(family, method, RandomTimes(), **greedy)
    engine.warm_up()
    num_programs = engine.programs.num_compiled
    assert num_programs == engine.num_programs
    assert sorted(engine.programs.shapes) == SHAPES
    seen = []

    def step(engine: Engine, rng: random.Random) -> RoundShape | None:
        engine.step()
        seen.append(shape_of(engine))
        return seen[-1]

    for seed in range(num_cases("walks over rows of ragged rounds", 2)):
        check_texts(walk(engine, random.Random(seed), step)[0], family)
    pairs = set(itertools.pairwise(seen))
    assert set(itertools.product(SHAPES, SHAPES)) <= pairs
    assert engine.scheduler.num_preemptions > 0
    assert engine.programs.num_compiled == num_programs
    counts = engine.policy.counts
    assert counts.rounds > 50
    assert 0 <= counts.accepted <= counts.verified
    if method == "oracle":
        assert counts.accepted > 0.5 * counts.verified


SHAPES = [*(RoundShape(6, k) for k in (0, 3, 4)), RoundShape(6, 4, 2), RoundShape(6, 4, 7)]


@pytest.mark.slow
def test_timed_rounds_read_different_tokens_and_leave_no_trace():
    engine = make_engine("llama", "oracle", RandomTimes())
    engine.warm_up()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for prompt in prompts()[:2]:
        engine.add_request(prompt, params)
    requests = [*engine.scheduler.waiting]
    while not all(request.output for request in requests):
        engine.step()

    def of_requests() -> list[np.ndarray]:
        """The state of all slots and pages but the dummies."""
        state = engine._state
        slots = (state.length, state.last_token, state.drafts, state.params)
        slots = [leaf[:-1] for leaf in jax.tree.leaves((*slots, state.survival.confidence))]
        pages = [leaf[1:] for leaf in jax.tree.leaves(state.target_cache)]
        return [np.array(leaf) for leaf in (*slots, *pages)]

    before = of_requests()
    for shape in SHAPES:
        plan = timed_plan(shape, engine.target_config.vocab_size, engine.config)
        inputs = RoundInputs.of(engine._state, plan, shape.num_draft)
        assert len(np.unique(inputs.tokens)) > 0.7 * inputs.tokens.size
        assert inputs.params.num_draft.tolist() == [shape.num_draft] * 6
        engine._state, seconds = engine.programs.time_idle(engine._state, shape)
        assert seconds > 0
    for one, other in zip(before, of_requests(), strict=True):
        np.testing.assert_array_equal(one, other)
    while engine.has_work:
        engine.step()
    assert [request.output for request in requests] == [naive("llama")[i][:30] for i in (0, 1)]


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize(
    ("method", "draft_sampling"),
    [*itertools.product(("peagle", "eagle3"), ("sample", "argmax"))],
)
def test_sampled_output_has_the_targets_law_under_any_sequence_of_rows(
    method, draft_sampling, every_round_decides, num_cases
):
    config = OneSize(
        num_draft=2, max_num_seqs=64, numbers=(20, 64), draft_sampling=draft_sampling,
        **TINY_TEXTS,
    )  # fmt: skip
    count = num_cases("sampled texts of ragged rounds", 6000, least=6000)
    engine = check_sampled_law(method, config, Engine.step, count, times=RandomTimes())
    assert engine.policy.num_changes > 20


@pytest.mark.slow
def test_rows_follow_the_times(every_round_decides):
    times = GivenTimes({0: 1.0, 2: 1.0, 7: 1.0})
    engine = make_engine("llama", "oracle", times)
    engine.warm_up()
    params = SamplingParams(max_tokens=30, ignore_eos=True)

    def last_shape(**changes) -> RoundShape:
        requests = [engine.add_request(p, replace(params, **changes)) for p in prompts()[:3]]
        shapes = []
        while engine.has_work:
            engine.step()
            shapes.append(shape_of(engine))
        outputs = [request.output for request in requests]
        if not changes:
            assert outputs == [naive("llama")[i][:30] for i in range(3)]
        return [shape for shape in shapes if shape is not None][-1]

    assert last_shape() == RoundShape(6, 4), "no gain, no change"
    times.given = {0: 1.0, 2: 0.1, 7: 1.0}
    assert last_shape() == RoundShape(6, 4, 2)
    assert engine.policy.num_verified == {6: 2}
    times.given = {0: 1.0, 2: 1.0, 7: 0.6}
    assert last_shape() == RoundShape(6, 4, 7)
    counts = engine.policy.counts
    assert counts.accepted == pytest.approx(counts.expected, rel=0.3)
    # A request with a seed of its own repeats its text, so its rounds verify all drafts.
    assert last_shape(temperature=1.0, seed=3) == RoundShape(6, 4)
    assert last_shape() == RoundShape(6, 4, 7)


@pytest.mark.exhaustive
def test_logprobs_are_those_of_plain_decoding(every_round_decides):
    engine = make_engine("llama", "oracle", GivenTimes({0: 1.0, 7: 0.01}), numbers=(7,))
    engine._compile([shape for shape in engine.programs.shapes if shape.num_draft])
    plain = Engine(target("llama"), None, replace(engine.config, num_draft=0, adaptive="off"))
    params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True)
    done, wanted = (e.generate(prompts(), params) for e in (engine, plain))
    assert shape_of(engine) is None
    assert engine.policy.num_verified == {6: 7}
    for one, other in zip(done, wanted, strict=True):
        assert one.tokens == other.tokens
        logprobs = lambda c: [p.logprob for p in c.logprobs]
        np.testing.assert_allclose(logprobs(one), logprobs(other), atol=1e-4)
        assert [[t for t, _ in p.top] for p in one.logprobs] == [
            [t for t, _ in p.top] for p in other.logprobs
        ]


@pytest.mark.exhaustive
def test_constrained_and_penalised_requests_keep_their_texts(every_round_decides, tmp_path):
    """Masks and counts belong to a row of a sequence, wherever the row lies among the flat ones."""
    tokenizer = json_tokenizer(tmp_path)
    model = tiny.target(**tiny.ONE_LAYER, eos_ids=(tokenizer.added[END],))
    config = OneSize(num_draft=4, max_num_seqs=6, max_model_len=160, page_size=4, prefill_chunk=16)
    params = [SamplingParams(structured=Structured.json_schema(s), max_tokens=40) for s in SCHEMAS]
    params += [
        SamplingParams(max_tokens=40, ignore_eos=True, **fields)
        for fields in (
            dict(frequency_penalty=1.5, presence_penalty=0.5),
            dict(repetition_penalty=1.7),
            dict(logit_bias={5: 3.0, 7: -100.0}),
            dict(allowed_token_ids=(3, 4, 5, 6)),
        )
    ]
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    outputs, head = [], tiny.head(**tiny.HEAD_OF_ONE_LAYER)
    for engine in (
        Engine(model, head, config, tokenizer=tokenizer, times=RandomTimes()),
        Engine(model, None, replace(config, num_draft=0, adaptive="off"), tokenizer=tokenizer),
    ):
        engine.warm_up()
        outputs.append([done.tokens for done in engine.generate(texts, params)])
    assert outputs[0] == outputs[1]


def test_small_batches_have_no_ragged_rounds():
    config = EngineConfig(num_draft=7, max_num_seqs=64, adaptive="survival")
    rows = {size: config.ragged_rows(size) for size in config.batch_buckets}
    assert rows == {
        1: (),
        2: (),
        4: (),
        8: (),
        16: (16, 32, 64),
        32: (32, 64, 128),
        64: (64, 128, 256),
    }
    assert config.has_survival
    assert not replace(config, max_num_seqs=8).has_survival
    assert not replace(config, adaptive="load").has_survival
    assert replace(config, num_draft=2).ragged_rows(16) == (16,)
