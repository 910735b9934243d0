"""`peagle_jax.logprobs`: the engine's log-probabilities, and their gradients."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams, logprobs
from peagle_jax.checkpoint import load_target
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

PROMPTS = [[5, 9, 3], [7] * 40, [11, 2, 90, 4, 4, 8, 1]]
SIZES = dict(max_num_seqs=4, max_model_len=128, page_size=8, prefill_chunk=128, prefill_rows=3)
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.1}
"""On a CPU, where XLA orders sums by the shape of a program; of bfloat16 that of `ties.TIE`."""


@pytest.mark.sampled(1, slow=11)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_those_of_the_engine(family, dtype):
    target = tiny.target(dtype=dtype, **tiny.FAMILIES[family])
    config = EngineConfig(num_draft=2, dtype=dtype, **SIZES)
    engine = one_bucket(Engine(target, tiny.head(dtype=dtype, **tiny.HEAD_OF_ONE_LAYER), config))
    asks = [SamplingParams(max_tokens=30, temperature=1.0, logprobs=0, seed=i) for i in range(3)]
    done = engine.generate(PROMPTS, asks)
    lengths = np.array([len(prompt) + 30 for prompt in PROMPTS])
    tokens = np.full((3, lengths.max()), 3, np.int32)
    for row, prompt, one in zip(tokens, PROMPTS, done, strict=True):
        row[: len(prompt) + 30] = prompt + one.tokens
    starts = np.array(list(map(len, PROMPTS)))
    got = np.asarray(logprobs(target, jnp.asarray(tokens), jnp.asarray(starts), lengths))
    for row, start, end, one in zip(got, starts, lengths, done, strict=True):
        want = [token.logprob for token in one.logprobs]
        np.testing.assert_allclose(row[start:end], np.float32(want), atol=TOLERANCE[dtype])
        assert not row[:start].any()
        assert not row[end:].any()


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "gemma4", "qwen2"])
def test_gradients_are_those_of_finite_differences(family):
    target = tiny.target(**tiny.FAMILIES[family])
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 128, (2, 12)), jnp.int32)
    loss = jax.jit(lambda target: logprobs(target, tokens, jnp.array([3, 5])).sum())
    value, gradient = jax.jit(jax.value_and_grad(loss))(target)
    assert value == pytest.approx(float(loss(target)), abs=1e-4)
    leaves, structure = jax.tree.flatten(target)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    way = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    moved = lambda step: jax.tree.unflatten(
        structure, [leaf + step * each for leaf, each in zip(leaves, way, strict=True)]
    )
    slope = float(sum((g * d).sum() for g, d in zip(jax.tree.leaves(gradient), way, strict=True)))
    assert np.isfinite(slope)
    # On one side a token may change its experts.
    sides = [(float(loss(moved(step))) - float(value)) / step for step in (1e-4, -1e-4)]
    assert min(abs(side - slope) for side in sides) < 0.02 * abs(slope)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        (dict(tokens=np.ones(5, int)), r"tokens: int32 \[5\]"),
        (dict(tokens=np.ones((0, 5), int)), "tokens"),
        (dict(tokens=np.ones((2, 5))), "tokens: float32"),
        (dict(prompt_lengths=[1]), r"prompt_lengths: int32 \[1\] must be whole numbers \[2\]"),
        (dict(lengths=[2, 3, 4]), "lengths"),
    ],
)
def test_arrays_that_do_not_fit_are_named(changed, rule):
    arrays = dict(tokens=np.ones((2, 5), int), prompt_lengths=[1, 1], lengths=[2, 3]) | changed
    with pytest.raises(ConfigError, match=rule):
        logprobs(tiny.target(**tiny.ONE_LAYER), **arrays)


def test_quantised_weights_have_no_gradients():
    target = load_target(Path(__file__).parents[1] / "golden" / "qwen3_moe-fp8", dtype="float32")
    loss = lambda target: logprobs(target, np.ones((1, 4), int), [1]).sum()
    with pytest.raises(ConfigError, match="quantised weights have no gradients"):
        jax.grad(loss)(target)
