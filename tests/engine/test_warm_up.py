"""Compiling some batch sizes first, and the others later."""

import pytest

from peagle_jax import EngineConfig, SamplingParams
from tests.programs import small_engine

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.slow
def test_rounds_of_greedy_requests_alone_compile_without_those_of_others():
    sizes = dict(num_draft=2, max_num_seqs=2, max_model_len=64, page_size=4, greedy_rounds=True)
    engine, whole = (small_engine(EngineConfig(**sizes)) for _ in range(2))
    engine.warm_up(only_greedy=True)
    assert engine.scheduler.rounds == {1: (2,), 2: (2,)}
    num_compiled = engine.programs.num_compiled
    assert num_compiled == engine.num_programs - 2
    whole.warm_up()
    run = lambda engine, params: [one.tokens for one in engine.generate(PROMPTS, params)]
    assert run(engine, PARAMS) == run(whole, PARAMS)
    assert engine.programs.num_compiled == num_compiled
    sampled = SamplingParams(max_tokens=8, temperature=1.0, seed=1)
    assert run(engine, sampled) == run(whole, sampled)  # they compile when they come
    assert engine.programs.num_compiled > num_compiled
