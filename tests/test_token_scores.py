"""Log-probabilities of output tokens: by definition in float64, and with drafts as without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.method.adjust import Adjustments
from peagle_jax.method.plan import RAW, SAMPLED
from peagle_jax.method.token_scores import sampled_logits, score, score_rows
from tests import tiny
from tests.programs import one_bucket
from tests.test_adjust import PROMPT, J, V, batch, packed, params, reference
from tests.test_losslessness import OracleDrafter
from tests.test_sampling_filters import definition


@jax.jit
def scored(logits, tokens, drafts, positions, params, adjustments):
    law = lambda: sampled_logits(logits, drafts, positions, params, adjustments)
    return score_rows(logits, tokens, params.scored, 3, law)


def law(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float):
    """Log-probabilities [V] in float64 of one row; greedy rows count as temperature 1."""
    if temperature == 0:
        temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
    kept, _ = definition(logits, temperature, int(top_k), top_p, min_p)
    logprobs = np.where(kept, (logits - logits.max()) / temperature, -np.inf)
    return logprobs - np.log(np.exp(logprobs).sum())


def test_scores_are_those_of_the_law_that_samples(num_cases):
    B = num_cases("rows scored under their law", 60, least=20)
    rng = np.random.default_rng(4)
    controls, ones = batch(B, 5)
    logits = rng.normal(0, 2, (B, J + 1, V)).astype(np.float32)
    drafts = rng.integers(0, V, (B, J)).astype(np.int32)
    mask = rng.random((B, J + 1, V)) < 0.5
    mask[..., 0] = True
    adjusts, constrained, mode = rng.integers(0, (2, 2, 3), (B, 3)).T
    rules = dict(
        temperature=rng.choice([0.0, 0.7, 1.0, 3.0], B),
        top_k=rng.choice([0, 1, 5, 60], B),
        top_p=rng.choice([1.0, 0.3, 0.9], B),
        min_p=rng.choice([0.0, 0.02, 0.4], B),
    )
    rows = params(B, adjusts=adjusts)._replace(scored=jnp.asarray(mode))
    rows = rows._replace(
        **{name: jnp.asarray(x, rows[i].dtype) for i, (name, x) in enumerate(rules.items(), 1)}
    )
    start = np.array([PROMPT + len(one["output"]) for one in ones])
    positions = start[:, None] + np.arange(J + 1)
    tokens = rng.integers(0, V, (B, J + 1)).astype(np.int32)
    given = Adjustments(controls, np.arange(B), jnp.asarray(constrained), packed(mask))
    chosen, ids, top = map(np.asarray, scored(logits, tokens, drafts, positions, rows, given))
    plain = dict(bias={}, base=0.0, ends=(), min_tokens=0, repetition=1, frequency=0, presence=0)
    for b in np.flatnonzero(mode):
        one = ones[b] if adjusts[b] else ones[b] | plain
        for j in range(J + 1):
            want = law(logits[b, j].astype(np.float64), 0, 0, 1, 0)
            if mode[b] == SAMPLED:
                own = reference(
                    logits[b, j],
                    drafts[b, :j].tolist(),
                    one,
                    mask[b, j] if constrained[b] else None,
                )
                want = law(own, *(np.float32(x[b]) for x in rules.values()))
            np.testing.assert_allclose(chosen[b, j], want[tokens[b, j]], rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(top[b, j], np.sort(want)[::-1][:3], rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(want[ids[b, j]], top[b, j], rtol=2e-5, atol=2e-5)
    # A raw row among sampled ones has the bits that it has alone, and so has a neutral sampled row.
    raw = mode == RAW
    alone = score(jnp.asarray(logits), jnp.asarray(tokens), 3)
    for got, want in zip((chosen, ids, top), alone, strict=True):
        np.testing.assert_array_equal(got[raw], np.asarray(want)[raw])
    neutral = params(B, temperature=1.0)._replace(scored=jnp.full(B, SAMPLED))
    for got, want in zip(
        scored(logits, tokens, drafts, positions, neutral, None), alone, strict=True
    ):
        np.testing.assert_array_equal(got, want)


PROMPTS = [[5, 9, 3], [7] * 20, [11, 2, 90, 4, 4, 8, 1]]
ASKS = (
    dict(logprobs_mode="raw"),
    dict(repetition_penalty=1.4, frequency_penalty=0.3, min_tokens=9),
    dict(temperature=0.4, top_k=4, top_p=0.9, min_p=0.02, presence_penalty=0.5, seed=3),
)


def test_scores_of_drafts_are_those_of_plain_decoding(shared_programs):
    """Sampled texts depend on the number of drafts: they are compared up to where they part."""
    sizes = dict(max_num_seqs=3, max_model_len=64, page_size=8, prefill_chunk=32, prefill_rows=3)
    target = tiny.target(**tiny.ONE_LAYER)
    asked = dict(max_tokens=20, logprobs=2, logprobs_mode="sampled")

    def run(texts: np.ndarray, num_draft: int) -> list:
        drafter = OracleDrafter(jnp.asarray(texts), jnp.asarray(0), 3)
        engine = Engine(target, None, EngineConfig(num_draft=3, **sizes), drafter=drafter)
        asks = [SamplingParams(num_speculative_tokens=num_draft, **asked | one) for one in ASKS]
        return one_bucket(engine).generate(PROMPTS, asks)

    texts = np.zeros((3, 100), np.int32)
    plain = run(texts, 0)
    for row, prompt, one in zip(texts, PROMPTS, plain, strict=True):
        row[: len(prompt) + 20] = prompt + one.tokens
    spec = run(texts, 3)
    assert all(one.accepted > 0 for one in spec[:2])
    for one, other in zip(plain, spec, strict=True):
        same = next(
            (
                i
                for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True))
                if len(set(pair)) > 1
            ),
            len(one.tokens),
        )
        assert same > 0
        for a, b in zip(one.logprobs[:same], other.logprobs[:same], strict=True):
            # Up to rounding: on a CPU XLA orders sums by the shape of a round.
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
        assert all(2 >= len(each.top) >= 1 for each in one.logprobs)
