"""The embedded model by default: both heads are lossless and have a useful acceptance length."""

import functools

import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.cli.loading import load_weights
from peagle_jax.engine.host.stats import Acceptance
from tests.programs import one_bucket

PROMPTS = (
    "def quicksort(xs):",
    "class Stack:",
    "import os\nimport sys\n\n\ndef main():",
    'def is_prime(n):\n    """Returns whether n is a prime number."""',
    "for i in range(10):",
)
MAX_TOKENS, LONG = 48, 128


@functools.cache
def generate(method: str, num_draft: int, max_tokens: int = MAX_TOKENS):
    target, head, tokenizer = load_weights(None, None, method=method, dtype="float32")
    config = EngineConfig(num_draft=num_draft, max_num_seqs=2, max_model_len=256, prefill_chunk=32)
    engine = one_bucket(Engine(target, head, config, tokenizer=tokenizer))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return engine.generate(PROMPTS, params)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("num_draft", [7, 1, 5])
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_output_is_unchanged_by_a_trained_head(method, num_draft):
    plain = [done.tokens for done in generate("none", 0)]
    drafted = generate(method, num_draft, max_tokens=LONG)
    assert [done.tokens[:MAX_TOKENS] for done in drafted] == plain


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_drafts_of_a_trained_head_are_accepted(method):
    assert Acceptance.of(generate(method, 7, max_tokens=LONG)).length >= 2.7
