"""Compiling some batch sizes first, and the others later."""

import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from tests import tiny

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.slow
def test_rounds_take_the_next_larger_batch_until_smaller_ones_are_compiled():
    config = EngineConfig(num_draft=2, max_num_seqs=4, max_model_len=64, page_size=4)
    engine = Engine(tiny.target(), tiny.head(), config)
    engine.warm_up(sizes=[4])
    assert engine.programs.rounds == engine.scheduler.rounds == {4: (2,)}
    padded = [c.tokens for c in engine.generate(PROMPTS, PARAMS)]
    assert engine.programs.rounds == {4: (2,)}
    engine.warm_up(sizes=[1])
    assert engine.scheduler.rounds == {1: (2,), 4: (2,)}
    assert engine.compile_next()
    assert not engine.programs.missing
    assert not engine.compile_next()
    engine.warm_up()
    assert tuple(engine.scheduler.rounds) == config.batch_buckets == (1, 2, 4)
    assert engine.programs.num_compiled == engine.num_programs == 5
    assert [c.tokens for c in engine.generate(PROMPTS, PARAMS)] == padded
