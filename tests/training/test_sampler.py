"""The engine as a sampler of tunix."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

from peagle_jax import ConfigError, Engine, EngineConfig
from peagle_jax.cli.loading import load_weights
from peagle_jax.training.sampler import _LEFT_OUT, EngineSampler, SamplerOutput
from tests.programs import one_bucket


@pytest.mark.slow
def test_answers_come_in_the_form_of_tunix_and_follow_new_weights():
    target, head, tokenizer = load_weights(None, None, method=None, dtype="float32")
    config = EngineConfig(num_draft=3, max_num_seqs=4, max_model_len=64)
    sampler = EngineSampler(one_bucket(Engine(target, head, config, tokenizer=tokenizer)))
    asked = dict(temperature=1.0, seed=5, multi_sampling=2)
    out = sampler(["x = [", "def f("], 6, max_prompt_length=12, pad_output=True, **asked)
    assert out.padded_prompt_tokens.shape == (4, 12)
    assert out.padded_prompt_tokens[0].tolist()[-len(sampler.tokenize("x = [")) :] == (
        sampler.tokenize("x = [")
    )
    assert out.tokens.shape == (4, 6)
    assert [len(row) for row in out.logprobs] == [6] * 4
    assert len(set(map(bytes, out.tokens))) > 2
    again = sampler(["x = [", "def f("], 6, return_logits=False, return_logprobs=True, **asked)
    np.testing.assert_array_equal(np.stack(again.tokens), out.tokens)
    sampler.update_params(jax.tree.map(lambda x: 0.9 * x, target))
    moved = sampler(["x = [", "def f("], 6, **asked)
    assert moved.logprobs != again.logprobs
    assert sampler.transformer_state["norm"]["weight"][...].tolist() == (
        (0.9 * target.norm.weight[...]).tolist()
    )
    refused = dict(echo=True, return_logits=True, beam_size=2, multi_sampling=0)
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=name):
            sampler("x", 1, **{name: value})
    with pytest.raises(ConfigError, match="give prompts"):
        sampler([], 1)


def test_the_interface_is_that_of_the_released_package():
    base = pytest.importorskip("tunix.generate.base_sampler")
    fields = lambda kind: [field.name for field in dataclasses.fields(kind)]
    assert fields(SamplerOutput) == fields(base.SamplerOutput)
    names = lambda kind: set(inspect.signature(kind.__call__).parameters)
    assert names(base.BaseSampler) - names(EngineSampler) == set(_LEFT_OUT) - {"eos_tokens"}
    assert all(hasattr(EngineSampler, name) for name in base.BaseSampler.__abstractmethods__)
