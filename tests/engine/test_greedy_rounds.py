"""Batches of greedy requests run a program without branches, all others the general one."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import timing
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.device.program import GreedyRound, Prefill, Round
from peagle_jax.engine.host.calls import RoundShape
from tests import programs, tiny
from tests.programs import small_engine

pytestmark = pytest.mark.usefixtures("shared_programs")

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [5, 3]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
STOPS = SamplingParams(max_tokens=12, stop_ids=tuple(range(0, 128, 9)))
NEEDS_BRANCH = {
    "temperature": SamplingParams(max_tokens=5, temperature=0.7, ignore_eos=True),
    "logprobs": SamplingParams(max_tokens=5, logprobs=1, ignore_eos=True),
    "penalty": SamplingParams(max_tokens=5, presence_penalty=0.5, ignore_eos=True),
    "bias": SamplingParams(max_tokens=5, logit_bias={4: 1.0}, ignore_eos=True),
}


def config(greedy_rounds: bool, kind=EngineConfig, **changes) -> EngineConfig:
    sizes = dict(num_draft=2, max_num_seqs=2, max_model_len=48, page_size=4)
    return kind(greedy_rounds=greedy_rounds, **(sizes | changes))


ONE_BUCKET = config(True, programs.OneBucketConfig)
CALLS_OF_THREE = replace(ONE_BUCKET, rounds_per_call=3, max_model_len=128, page_size=128)
"""A call of three rounds for greedy requests; one page, so that a planned call serves many rounds.
"""


@pytest.fixture(scope="module")
def plain_texts() -> list[list[int]]:
    """What plain decoding writes for `PROMPTS`."""
    plain = replace(ONE_BUCKET, greedy_rounds=False, num_draft=0)
    engine = Engine(tiny.target(**tiny.ONE_LAYER), None, plain)
    return texts(engine, [GREEDY] * 4)


def ready(config: EngineConfig) -> Engine:
    engine = small_engine(config)
    engine.warm_up()
    return engine


def texts(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    return [done.tokens for done in engine.generate(PROMPTS[: len(params)], params)]


def watched(engine: Engine) -> list:
    """The programs that the engine runs from now on."""
    ran, dispatch = [], engine.programs._dispatch
    engine.programs._dispatch = lambda call, *rest: ran.append(call) or dispatch(call, *rest)
    return ran


@pytest.mark.slow
def test_greedy_requests_alone_run_no_branch(plain_texts):
    engine = ready(ONE_BUCKET)
    ran = watched(engine)
    assert texts(engine, [GREEDY] * 4) == plain_texts
    assert {call for call in ran if not isinstance(call, Prefill)} == {
        GreedyRound(RoundShape(2, 2))
    }


def test_sampled_drafts_leave_greedy_requests_their_program_and_their_text(plain_texts):
    """Rounds of greedy requests keep no law of their drafts; rounds with others do not need it."""
    drawn = replace(CALLS_OF_THREE, draft_sampling="sample", verify_method="block")
    sampled = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    engine, general = ready(drawn), ready(replace(drawn, greedy_rounds=False, rounds_per_call=1))
    ran = watched(engine)
    assert texts(engine, [GREEDY] * 4) == plain_texts
    assert {type(call) for call in ran} == {Prefill, GreedyRound}
    # A greedy request begins alone, goes on beside a sampled one, and ends alone.
    for together in ([GREEDY, sampled], [replace(GREEDY, max_tokens=45), sampled]):
        assert texts(engine, together) == texts(general, together)
    assert texts(engine, [GREEDY, sampled])[0] == plain_texts[0]


def test_greedy_rounds_compile_after_the_first_round_of_each_batch_size():
    engine = small_engine(config(True, adaptive="load"))
    shapes = engine.programs.shapes
    first, others = tuple(map(Round, shapes[:2])), tuple(map(Round, shapes[2:]))
    assert engine.programs.rounds_of_any == (*first, *map(GreedyRound, shapes[:2]), *others)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("rounds_per_call", [1, 3])
def test_texts_survive_any_sequence_of_both_programs(rounds_per_call, num_cases):
    """Requests come, are preempted and aborted at random: the batch changes in most rounds."""
    sizes = dict(num_pages=13, prefix_caching=False, rounds_per_call=rounds_per_call)
    engine = ready(config(True, **sizes))
    kinds = (GREEDY, STOPS, *NEEDS_BRANCH.values())
    jobs = [(p, params) for p in PROMPTS for params in kinds]
    plain = Engine(tiny.target(**tiny.ONE_LAYER), None, config(False, num_draft=0))
    plain.warm_up(sizes=[2])
    exact = [not params.temperature for _, params in jobs]
    wanted = [done.tokens for done in plain.generate(*zip(*jobs, strict=True))]
    ran = watched(engine)
    for seed in range(num_cases("walks over greedy and other requests", 6)):
        rng, requests = random.Random(seed), []
        todo = [rng.randrange(len(jobs)) for _ in range(20)]
        while todo or engine.has_work:
            while todo and rng.random() < 0.4:
                requests.append(engine.add_request(*jobs[todo[-1]], request_id=todo.pop()))
            engine.step()
            if requests and rng.random() < 0.02:
                engine.abort(rng.choice(requests))
            engine.scheduler.check_integrity()
        for request in requests:
            length = len(request.output)
            if exact[request.id]:
                assert request.output == wanted[request.id][:length]
                assert length == len(wanted[request.id]) or request.finish_reason == "abort"
    kinds = [type(call) for call in ran if not isinstance(call, Prefill)]
    changes = sum(a is not b for a, b in itertools.pairwise(kinds))
    assert changes > 10


@pytest.mark.slow
def test_every_round_of_a_call_is_reported_on_its_own(plain_texts):
    engine = ready(CALLS_OF_THREE)
    seen = []
    note = lambda request, tokens: seen.append((request.id, request.last_round, tokens))
    done = engine.generate(PROMPTS, GREEDY, on_update=note)
    assert [one.tokens for one in done] == plain_texts
    for number, one in enumerate(done):
        (_, none, _), *rounds = [each for each in seen if each[0] == number]
        assert none is None  # the first token is prefill's
        assert [made.tokens for _, made, _ in rounds] == [len(t) for *_, t in rounds]
        assert len(rounds) == one.rounds
        assert sum(len(made.drafts) for _, made, _ in rounds) == one.drafted


@pytest.mark.slow
def test_a_request_may_be_aborted_between_two_rounds_of_a_call(plain_texts):
    engine = ready(CALLS_OF_THREE)
    aborted, other = (engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2])
    seen = Counter()

    def on_update(request, tokens):
        seen[request.id] += 1
        if request is aborted and seen[request.id] == 3:  # of prefill, and of two rounds
            engine.abort(request)

    while engine.has_work:
        engine.step(on_update)
        engine.scheduler.check_integrity()
    assert (seen[aborted.id], aborted.finish_reason) == (3, "abort")
    assert aborted.in_flight == aborted.unread_drafts == 0
    assert aborted.output == plain_texts[0][: len(aborted.output)]
    assert other.output == plain_texts[1]


@pytest.mark.slow
def test_a_program_that_is_ready_late_takes_over_between_two_calls():
    """A planned call is used again for many rounds, but not by a program that runs more of them."""
    texts = []
    for is_late in (False, True):
        engine = small_engine(CALLS_OF_THREE)
        engine.warm_up(sizes=[2])
        request = engine.add_request([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(5):
            engine.step()
        while is_late and engine.compile_next():
            pass
        while engine.has_work:
            engine.step()
        texts.append(request.output)
    assert texts[0] == texts[1]


def test_the_time_of_a_call_is_divided_by_its_rounds(monkeypatch):
    engine = Engine(tiny.target(**tiny.ONE_LAYER), None, replace(CALLS_OF_THREE, num_draft=0))
    engine.warm_up()
    clock = iter(range(0, 9999, 6))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    measured = timing.drive(engine, PROMPTS[:2], params, concurrency=2)
    assert measured.ms_per_round == 2000.0  # 6 seconds for three rounds
    assert measured.timed_rounds > 9
