"""N-gram drafts: what is copied, and that texts and their law stay the target's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.config import ConfigError
from peagle_jax.exclusions import NGRAM_DRAFTS, NGRAM_LONGEST
from peagle_jax.method.ngram import lookup
from tests import programs, tiny
from tests.programs import one_bucket

MAX_TOKENS = 40


def copied(text: list[int], least: int) -> list[int] | None:
    """`lookup` of one text by its definition; the first token is not part of the history."""
    newest = len(text) - 1
    best = (0, 0)
    for end in range(1, newest):
        length = 0
        while (
            length < NGRAM_LONGEST
            and end - length >= 1
            and text[end - length] == text[newest - length]
        ):
            length += 1
        best = max(best, (length, end))
    length, end = best
    if length < least:
        return None
    return [text[end + 1 + i % (newest - end)] for i in range(NGRAM_DRAFTS)]


@pytest.mark.sampled(2, slow=2)
@pytest.mark.parametrize("least", [1, 2, 6, NGRAM_LONGEST])
def test_lookup_copies_after_the_latest_of_the_longest_matches(least, num_cases):
    rng = np.random.default_rng(least)
    count, width = num_cases("texts whose n-grams are looked up", 60), 64
    texts = [
        rng.integers(0, rng.integers(2, 5), rng.integers(1, width + 1)).tolist()
        for _ in range(count)
    ]
    texts[0] = [9, *[1, 2, 3] * 12]
    texts[1] = [5, *range(24), *range(24)][:width]
    rows = np.full((count, width), 7, np.int32)  # what lies behind a text must not matter
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    newest = jnp.array([len(text) - 1 for text in texts])
    drafts, found = jax.jit(lookup, static_argnums=2)(jnp.asarray(rows), newest, least)
    for text, row, is_found in zip(texts, np.asarray(drafts), np.asarray(found), strict=True):
        want = copied(text, least)
        assert is_found == (want is not None)
        assert want is None or row.tolist() == want


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with programs.shared(controls=False):
        yield


@pytest.fixture(scope="module")
def target():
    return tiny.target(**tiny.ONE_LAYER)


def prompts() -> list[list[int]]:
    """Texts of several lengths; some repeat themselves, so that matches exist from the first round on."""
    rng = np.random.default_rng(7)
    random = [rng.integers(2, tiny.TARGET.vocab_size, n).tolist() for n in (1, 7, 16, 30)]
    return [*random, [*random[1]] * 4, [*random[2]] * 2, [5] * 9, [3, 4] * 11]


def config(**changes) -> EngineConfig:
    sizes = dict(max_num_seqs=4, max_model_len=96, page_size=4, prefill_chunk=16, prefill_rows=2)
    return EngineConfig(**(sizes | changes))


def both_rounds(engine: Engine) -> Engine:
    """The engine, with the two rounds of its largest batch bucket; smaller batches are padded."""
    most = max(engine.config.batch_buckets)
    engine._compile([shape for shape in engine.programs.shapes if shape.size == most])
    return engine


def run(engine: Engine, params) -> list[list[int]]:
    done = engine.generate(prompts(), params)
    engine.scheduler.check_integrity()
    return [one.tokens for one in done]


GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return run(one_bucket(Engine(target, None, config(num_draft=0))), GREEDY)


@pytest.mark.sampled(0, slow=2)
@pytest.mark.parametrize("changes", [{}, dict(num_pages=34), dict(prefix_caching=False)])
@pytest.mark.parametrize("method", ["peagle", "selector", "eagle3", "none"])
def test_output_is_unchanged_by_ngrams(target, plain, method, changes):
    """Greedy, mixed lengths, more prompts than slots, preempted where pages are few."""
    head = None if method == "none" else tiny.head(method, **tiny.HEAD_OF_ONE_LAYER)
    engine = both_rounds(Engine(target, head, config(num_draft=3, ngram=2, **changes)))
    assert run(engine, GREEDY) == plain
    assert bool(engine.scheduler.num_preemptions) == ("num_pages" in changes)
    counts = engine.scheduler.counts.ngram
    assert counts.rounds > 0
    assert counts.accepted > 0, "the target repeats itself, and the drafts follow"
    assert {shape.num_draft for shape in engine.programs.compiled} >= {NGRAM_DRAFTS}
    # A second run meets the histories of the first one in the same slots.
    assert run(engine, GREEDY) == plain


def test_a_request_may_ask_for_fewer_drafts(target, plain):
    engine = both_rounds(
        Engine(target, tiny.head(**tiny.HEAD_OF_ONE_LAYER), config(num_draft=3, ngram=2))
    )
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, num_speculative_tokens=k) for k in (0, 1, 5, 15) * 2
    ]
    assert run(engine, params) == plain


@pytest.mark.slow
def test_the_text_of_a_seed_depends_neither_on_other_requests_nor_on_what_is_compiled():
    """Its rounds have all drafts, also before the smaller program is compiled. The vocabulary has 4 tokens, so
    most texts have matches."""
    engine = one_bucket(
        Engine(
            tiny.target(seed=3, vocab_size=4), None, config(num_draft=0, ngram=2, max_logprobs=0)
        )
    )
    texts = [[0, 2, 3, 1, 2, 3, 1, 2, 3], [1], [2, 2, 2, 1, 3]]
    sampled = [SamplingParams(max_tokens=24, temperature=4.0, seed=seed) for seed in range(3)]
    early = [one.tokens for one in engine.generate(texts, sampled)]
    both_rounds(engine)
    alone = [
        engine.generate(*one)[0].tokens for one in zip(([t] for t in texts), sampled, strict=True)
    ]
    beside = engine.generate([*texts, [3, 1] * 9], [*sampled, GREEDY])
    assert early == alone == [one.tokens for one in beside[:3]]
    assert engine.scheduler.counts.ngram.accepted > 10


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("drafts", ["sample", "block", "argmax"])
def test_sampled_output_has_the_targets_law(drafts, num_cases):
    """Joint law of three tokens after a prompt that repeats itself, vocabulary 4, against exact probabilities.

    6000 requests or more over 64 outcomes; at level 1e-3 a test of this size finds an effect of w = 0.12.
    """
    small, prompt, temperature = dict(vocab_size=4), [0, 2, 3, 1, 2, 3, 1, 2, 3], 4.0
    target = tiny.target(seed=3, **small)
    count = num_cases("sampled texts with n-grams against the target's law", 6000, least=6000)
    sizes = dict(
        max_num_seqs=64, max_model_len=32, page_size=4, prefill_chunk=12, prefill_rows=16, max_logprobs=0,
        max_waiting=count, draft_sampling="argmax" if drafts == "argmax" else "sample",
        verify_method="block" if drafts == "block" else "token",
    )  # fmt: skip
    head = tiny.head(seed=5, draft_vocab_size=4, **small)
    engine = both_rounds(Engine(target, head, EngineConfig(num_draft=2, ngram=2, **sizes)))
    params = [SamplingParams(max_tokens=3, temperature=temperature, seed=s) for s in range(count)]
    done = engine.generate([prompt] * count, params)
    counts = engine.scheduler.counts.ngram
    # Without both outcomes the test could not fail.
    assert 0.1 < counts.accepted / counts.rounds < 0.9
    tokens = np.array([one.tokens for one in done])
    texts = np.array(list(itertools.product(range(4), repeat=2)))
    rows = np.concatenate([np.tile(prompt, (16, 1)), texts], axis=1)
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    hidden, _, _ = target(rows, positions, [None] * 3, tiny.causal_attention)
    p = np.asarray(jax.nn.softmax(target.unembed(hidden) / temperature, axis=-1), np.float64)
    n = len(prompt)
    law = np.stack([q[n - 1, a] * q[n, b] * q[n + 1] for q, (a, b) in zip(p, texts, strict=True)])
    observed = np.bincount(tokens @ [16, 4, 1], minlength=64)
    expected = count * law.ravel() / law.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(ngram=-1), "must lie between 0"),
        (dict(ngram=17), "must lie between 0"),
        (dict(ngram=6, adaptive="load"), "set adaptive to off"),
        (dict(ngram=6, num_draft=15), "must be below 15"),
    ],
)
def test_what_ngrams_exclude_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)
