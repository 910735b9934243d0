"""Prefill calls of several sizes: which one a call takes, and that the size changes no output."""

import dataclasses

import numpy as np
import pytest

from peagle_jax import Engine, SamplingParams
from peagle_jax.config import ConfigError
from peagle_jax.engine.host.prefill_shapes import (
    PrefillShape,
    choose_shape,
    prefill_shapes,
)
from tests import programs, tiny

pytestmark = pytest.mark.usefixtures("programs_without_controls")

SIZES = dict(num_draft=3, max_num_seqs=4, max_model_len=128, page_size=4)
CONFIG = programs.OneBucketConfig(**SIZES, prefill_chunk=64, prefill_rows=4, small_prefills=True)
LONG = PrefillShape(1, 128)
"""The shape for a long prompt alone: 256 tokens, but no more than a prompt may have."""
SHAPES = [PrefillShape(*shape) for shape in ((1, 16), (1, 64), (4, 16), (4, 64))]


def target():
    return tiny.target(**tiny.ONE_LAYER)


def head():
    return tiny.head(**tiny.HEAD_OF_ONE_LAYER)


def plain_texts(prompts, params) -> list[list[int]]:
    """What plain decoding writes after prefill calls of one shape."""
    config = programs.OneBucketConfig(**SIZES | dict(num_draft=0), prefill_chunk=16)
    done = Engine(target(), None, config).generate(prompts, params)
    return [one.tokens for one in done]


@pytest.mark.parametrize(
    ("remaining", "shape"),
    [
        ([], (1, 16)),
        ([16], (1, 16)),
        ([17], (1, 64)),
        ([1000], (1, 64)),
        ([16, 1], (4, 16)),
        ([17, 1], (4, 64)),
        ([1, 1, 1, 1, 1000], (4, 16)),  # only four prompts are part of the call
    ],
)
def test_a_call_takes_the_least_padding_that_delays_no_prompt(remaining, shape):
    assert choose_shape(SHAPES, remaining) == shape


@pytest.mark.parametrize(
    ("remaining", "shape"),
    [
        ([64], (1, 64)),
        ([65], LONG),
        ([1000], LONG),
        ([1000, 1], (4, 64)),
        ([1, 1000], (4, 64)),
        ([100, 64], (4, 64)),  # as many tokens as the long chunk
        ([128, 64, 64, 64], (4, 64)),
    ],
)
def test_a_long_prompt_takes_a_long_chunk_unless_others_wait(remaining, shape):
    """More than half of it: 65 of 128 tokens."""
    shapes = prefill_shapes(dataclasses.replace(CONFIG, long_prefills=True))
    assert choose_shape(shapes, remaining) == shape
    assert choose_shape(shapes, remaining, may_be_long=False) == choose_shape(SHAPES, remaining)


def test_sliding_windows_have_no_long_chunks():
    """A window's ring holds the rows of a call of `prefill_chunk` tokens and no more."""
    windowed = tiny.target(sliding_windows=(6, None, 6))
    config = Engine(windowed, None, CONFIG).config
    assert not config.long_prefills
    assert prefill_shapes(config) == tuple(SHAPES)
    with pytest.raises(ConfigError, match="long_prefills"):
        Engine(windowed, None, dataclasses.replace(CONFIG, long_prefills=True))
    assert Engine(tiny.target(), None, CONFIG).config.long_prefills


def shapes_of(engine: Engine) -> list[PrefillShape]:
    """Shapes of the prefill calls that the engine dispatches from now on."""
    found, dispatch = [], engine.programs.prefill

    def recorded(state, plan, *args):
        found.append(PrefillShape(*plan.tokens.shape))
        return dispatch(state, plan, *args)

    engine.programs.prefill = recorded
    return found


@pytest.mark.slow
def test_output_does_not_depend_on_the_shapes_of_calls():
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, tiny.TARGET.vocab_size, n).tolist() for n in (3, 40, 90, 16, 5, 70)]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    wanted = plain_texts(prompts, params)
    engine = Engine(target(), head(), CONFIG)
    engine.warm_up()
    shapes = (*SHAPES[:3], LONG, SHAPES[3])
    assert engine.programs.prefills == shapes
    assert engine.programs.num_compiled == engine.num_programs
    found = shapes_of(engine)
    for alone in (1, 2):
        assert engine.generate([prompts[alone]], params)[0].tokens == wanted[alone]
    assert [one.tokens for one in engine.generate(prompts, params)] == wanted
    for some in ([0], [1], [0, 4], [4, 1]):
        done = engine.generate([prompts[i] for i in some], params)
        assert [one.tokens for one in done] == [wanted[i] for i in some]
    assert {*found} == {*shapes}
    assert engine.programs.num_compiled == engine.num_programs  # nothing compiled on the way


@pytest.mark.slow
def test_calls_have_their_full_size_until_smaller_programs_are_compiled():
    engine = Engine(target(), head(), CONFIG)
    engine.warm_up(sizes=[4])
    found, params = shapes_of(engine), SamplingParams(max_tokens=3, ignore_eos=True)
    (first,) = engine.generate([[5, 6, 7]], params)
    assert found == [(4, 64)]
    while engine.compile_next():
        pass
    found.clear()
    (again,) = engine.generate([[5, 6, 7]], params)
    assert found == [(1, 16)]
    assert again.tokens == first.tokens


def test_a_call_that_scores_its_prompt_has_its_full_size():
    config = programs.OneBucketConfig(
        **SIZES, prefill_chunk=32, small_prefills=True, prompt_logprobs=True
    )
    engine = Engine(target(), head(), config)
    found = shapes_of(engine)
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    (scored,) = engine.generate([[5, 6, 7]], params)
    assert found == [(1, 32)]
    assert len(scored.prompt_logprobs) == 3
