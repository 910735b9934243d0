"""Sampling, controls and log-probabilities on several devices are those of one."""

import jax
import numpy as np
import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from tests import tiny
from tests.programs import one_bucket

HEADS = dict(num_heads=8, num_kv_heads=4)
REQUESTS = (
    dict(temperature=0.0, logprobs=3),
    dict(temperature=1.0, seed=1, logprobs=2),
    dict(temperature=0.8, top_k=9, seed=2),
    dict(temperature=1.2, top_p=0.8, seed=3, presence_penalty=0.5),
    dict(temperature=0.7, min_p=0.1, seed=4, frequency_penalty=0.3),
    dict(temperature=0.0, repetition_penalty=1.3, min_tokens=5),
    dict(temperature=0.0, logit_bias={5: 4.0, 70: -100.0}, logprobs=0),
    dict(temperature=1.0, seed=5, prompt_logprobs=4),
)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [
        rng.integers(2, tiny.TARGET.vocab_size, n).tolist() for n in (1, 7, 17, 30, 5, 3, 9, 12)
    ]


def completions(count: int, head, **changes) -> list:
    config = EngineConfig(
        max_num_seqs=8,
        max_model_len=64,
        page_size=4,
        prefill_chunk=16,
        prefill_rows=2,
        num_draft=3,
        prompt_logprobs=True,
        tensor_parallel=count,
        **changes,
    )
    engine = one_bucket(Engine(tiny.target(**HEADS), head, config))
    params = [SamplingParams(max_tokens=20, **one) for one in REQUESTS]
    return engine.generate(prompts(), params)


def check_equal(found: list, wanted: list) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.error is None
        assert one.tokens == other.tokens
        for name in ("logprobs", "prompt_logprobs"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                check_close(mine, theirs)


def check_close(found, wanted) -> None:
    """Compares nested lists, dicts and tuples of numbers; tokens are whole numbers."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(wanted), rtol=0, atol=1e-4)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("draft_sampling", ["argmax", "sample"])
def test_every_kind_of_request_gets_the_text_of_one_device(count, draft_sampling):
    """The head samples over a vocabulary of its own, smaller than the target's."""
    head = tiny.head(**HEADS, draft_vocab_size=50)
    made = [completions(n, head, draft_sampling=draft_sampling) for n in (count, 1)]
    check_equal(*made)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["peagle", "selector"])
def test_drafts_that_are_accepted_one_by_one_are_those_of_one_device(method):
    head = tiny.head(method, **HEADS, draft_vocab_size=50)
    rules = dict(draft_sampling="sample", verify_method="token")
    check_equal(*(completions(n, head, **rules) for n in (2, 1)))
