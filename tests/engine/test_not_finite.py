"""Logits that are not finite end their own request, with an error; other requests are unchanged."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.host.request import NOT_FINITE
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

MAX_TOKENS = 24
LENGTHS = (3, 9, 17, 5)
PROMPTS = [np.random.default_rng(i).integers(2, 100, n).tolist() for i, n in enumerate(LENGTHS)]
BAD = 120  # the token whose embedding is NaN; no prompt holds it
HEALTHY = [SamplingParams(max_tokens=MAX_TOKENS, temperature=t, seed=7) for t in (0.0, 1.0)]
DRAWN = dict(draft_sampling="sample")
METHODS = [("peagle", 3), ("eagle3", 2), ("dflash", 3), ("none", 0)]
FAMILIES = ["llama", "qwen3_moe", "gpt_oss"]


SIZES = dict(
    max_num_seqs=3,
    max_model_len=48,
    page_size=4,
    prefill_chunk=8,
    prefill_rows=2,
    num_pages=3 * 12 + 1,
)


def engine_of(target, method: str, num_draft: int, head=None, **changes) -> Engine:
    head = head or (None if method == "none" else tiny.head(method))
    return one_bucket(Engine(target, head, EngineConfig(num_draft=num_draft, **(SIZES | changes))))


def poisoned(family: str, dtype: str = "float32"):
    """A target whose embedding of one token is NaN."""
    target = tiny.target(dtype=dtype, **tiny.FAMILIES[family])
    rows = target.embed.weight[...]
    target.embed.weight.set_value(rows.at[BAD].set(jnp.nan))
    return target


def check_failed(completion, num_tokens: int | None = None) -> None:
    assert (completion.finish_reason, completion.error) == ("error", NOT_FINITE)
    assert completion.stop_reason is None
    if num_tokens is not None:
        assert len(completion.tokens) == num_tokens
    if completion.tokens:  # the round that failed emitted drafts, none of the target's own
        assert len(completion.tokens) == completion.rounds + completion.accepted
        assert completion.emitted == len(completion.tokens) - 1


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize(
    ("family", "method", "num_draft"),
    [("llama", *method) for method in METHODS] + [(name, "peagle", 3) for name in FAMILIES[1:]],
)
def test_one_bad_token_ends_its_request_alone(family, method, num_draft, caplog):
    """In the prompt or in the text; pages, slots and rings go to the next request."""
    caplog.set_level(logging.ERROR)
    engine = engine_of(poisoned(family), method, num_draft)
    sick = [[5, BAD], [BAD, *range(2, 20)], [*range(2, 30), BAD, 7]]
    mixed = [sick[0], PROMPTS[0], sick[1], PROMPTS[1], PROMPTS[2], sick[2], sick[0], PROMPTS[3]]
    counted = lambda c: (c.tokens, c.rounds, c.accepted_per_position)
    for params in HEALTHY:
        want = [counted(one) for one in engine.generate(PROMPTS, params)]
        caplog.clear()
        before = engine.scheduler.num_not_finite
        done = engine.generate(mixed, params)
        for prompt, completion in zip(mixed, done, strict=True):
            if prompt in sick:
                check_failed(completion, 0)
            else:
                assert counted(completion) == want[PROMPTS.index(prompt)]
        failed = [completion for completion in done if completion.error]
        assert len(done) > len(failed) >= 4
        assert engine.scheduler.num_not_finite - before == len(failed)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == len(failed)
        assert all(line.endswith(NOT_FINITE) for line in lines)
        at = [int(line.split("output token ")[1].split(":")[0]) for line in lines]
        assert sorted(at) == sorted(len(completion.tokens) for completion in failed)
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.config.total_pages - 1


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("family", [*FAMILIES, "gemma4"])
@pytest.mark.parametrize("number", [jnp.nan, jnp.inf])
def test_one_number_of_any_matrix_is_found(family, number):
    """Each matrix of the target in turn, the projection of values and the router among them.

    An expert that no row chose changes nothing, and an infinity may only take a token's probability
    or be clamped away: then all numbers that come out are finite.
    """
    target = tiny.target(**tiny.FAMILIES[family])
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
    engine = engine_of(target, "none", 0, max_num_seqs=1)
    (clean,) = engine.generate([[5, 6, 7]], params)
    weights, num_found = engine.programs._weights, 0
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(target)[0]]
    for index, (path, leaf) in enumerate(zip(paths, weights, strict=True)):
        if leaf.ndim < 2 or "embed" in path:
            continue
        broken = leaf.at[(0,) * (leaf.ndim - 1)].set(number)
        engine.programs._weights = [*weights[:index], broken, *weights[index + 1 :]]
        (done,) = engine.generate([[5, 6, 7]], params)
        if done.finish_reason == "error":
            check_failed(done)
            num_found += 1
            continue
        assert np.isfinite([one.logprob for one in done.logprobs]).all(), path
        if number != number:  # NaN
            assert target.config.experts is not None, path
            assert ".mlp.gate_up" in path or ".mlp.down" in path, path
            assert done.tokens == clean.tokens
    assert num_found >= 8
    engine.programs._weights = weights
    assert engine.generate([[5, 6, 7]], params)[0].tokens == clean.tokens  # in the same pages


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize(
    "rules", [{}, DRAWN, DRAWN | dict(verify_method="token")], ids=["argmax", "block", "token"]
)
@pytest.mark.parametrize(("method", "num_draft"), METHODS[:3])
def test_a_drafter_of_nan_costs_its_drafts_and_nothing_else(method, num_draft, rules):
    target = tiny.target()
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), tiny.head(method))
    engine = engine_of(target, method, num_draft, broken, **rules)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    want = [c.tokens for c in engine_of(target, "none", 0).generate(PROMPTS, params)]
    done = engine.generate(PROMPTS, params)
    assert [c.tokens for c in done] == want
    sampled = engine.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0))
    assert {c.finish_reason for c in sampled} == {"length"}
    if rules:
        assert sum(c.accepted for c in sampled) == 0
    assert engine.scheduler.num_not_finite == 0
