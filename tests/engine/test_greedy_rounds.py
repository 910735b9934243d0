"""Batches of greedy requests run a program without branches; every other batch runs the general one."""

import itertools
import random

import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.calls import RoundShape
from peagle_jax.engine.programs import GreedyRound
from tests import programs, tiny

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [5, 3]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
NEEDS_BRANCH = {
    "temperature": SamplingParams(max_tokens=5, temperature=0.7, ignore_eos=True),
    "logprobs": SamplingParams(max_tokens=5, logprobs=1, ignore_eos=True),
    "penalty": SamplingParams(max_tokens=5, presence_penalty=0.5, ignore_eos=True),
    "bias": SamplingParams(max_tokens=5, logit_bias={4: 1.0}, ignore_eos=True),
}


def config(greedy_rounds: bool, **changes) -> EngineConfig:
    sizes = dict(num_draft=2, max_num_seqs=2, max_model_len=48, page_size=4)
    return EngineConfig(greedy_rounds=greedy_rounds, **(sizes | changes))


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with programs.shared():
        yield


def ready(greedy_rounds: bool) -> Engine:
    engine = Engine(tiny.target(), tiny.head(), config(greedy_rounds))
    engine.warm_up()
    return engine


def texts(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    return [done.tokens for done in engine.generate(PROMPTS[: len(params)], params)]


def watched(engine: Engine) -> list:
    """The keys of the programs that the engine runs from now on."""
    ran, dispatch = [], engine.programs._dispatch
    engine.programs._dispatch = lambda key, *rest: ran.append(key) or dispatch(key, *rest)
    return ran


@pytest.mark.slow
def test_a_greedy_round_has_no_branch():
    engine = ready(True)
    assert engine.programs.num_compiled == engine.num_programs == 2 + 2 * 2
    for size in (1, 2):
        shape = RoundShape(size, 2)
        assert "conditional(" in engine.programs._compiled[shape].as_text()
        assert "conditional(" not in engine.programs._compiled[GreedyRound(shape)].as_text()


@pytest.mark.parametrize("other", NEEDS_BRANCH)
def test_the_text_of_a_greedy_request_does_not_depend_on_the_program(other):
    params = [GREEDY, NEEDS_BRANCH[other], GREEDY, GREEDY]
    engine = ready(True)
    ran = watched(engine)
    assert texts(engine, params) == texts(ready(False), params)
    rounds = [key for key in ran if not isinstance(key, str)]
    with_branch = [key for key in rounds if isinstance(key, RoundShape)]
    assert 0 < len(with_branch) < len(rounds)  # the other request ends before the greedy ones


def test_greedy_requests_alone_run_no_branch():
    engine = ready(True)
    ran = watched(engine)
    assert texts(engine, [GREEDY] * 4) == texts(ready(False), [GREEDY] * 4)
    assert {key for key in ran if not isinstance(key, str)} <= {
        GreedyRound(RoundShape(size, 2)) for size in (1, 2)
    }


def test_only_argmax_drafts_have_greedy_rounds():
    sampled = config(True, draft_sampling="sample")
    engine = Engine(tiny.target(), tiny.head(), sampled)
    assert engine.programs.round_keys == engine.programs.shapes


def test_greedy_rounds_compile_after_the_first_round_of_each_batch_size():
    engine = Engine(tiny.target(), tiny.head(), config(True, adaptive="load"))
    shapes = engine.programs.shapes
    greedy = tuple(GreedyRound(shape) for shape in shapes[:2])
    assert engine.programs.round_keys == (*shapes[:2], *greedy, *shapes[2:])


@pytest.mark.slow
def test_texts_survive_any_sequence_of_both_programs(num_cases):
    """Requests come, are preempted and are aborted at random, so the batch changes in most rounds."""
    engine = Engine(tiny.target(), tiny.head(), config(True, num_pages=13, prefix_caching=False))
    engine.warm_up()
    jobs = [(p, params) for p in PROMPTS for params in (GREEDY, *NEEDS_BRANCH.values())]
    plain = Engine(tiny.target(), None, config(False, num_draft=0))
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
            assert length == len(wanted[request.id]) or request.finish_reason == "abort"
            if exact[request.id]:
                assert request.output == wanted[request.id][:length]
    kinds = [type(key) for key in ran if not isinstance(key, str)]
    changes = sum(a is not b for a, b in itertools.pairwise(kinds))
    assert changes > 10
