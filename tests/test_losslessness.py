"""Speculation never changes the output: greedy token for token, sampled in law."""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.oracle import RandomTimes
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.device import round_shapes
from peagle_jax.engine.host import k_by_load
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.method import selector
from peagle_jax.method.drafter import Proposal
from tests import tiny
from tests.laws import check_law
from tests.programs import OneBucketConfig, one_bucket
from tests.ties import assert_parts_only_at_ties

pytestmark = pytest.mark.usefixtures("programs_without_controls")

MAX_TOKENS = 33
LENGTHS = (1, 2, 7, 16, 17, 30, 41, 5)


def prompts(count: int = 8) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, tiny.TARGET.vocab_size, n).tolist() for n in LENGTHS[:count]]


def engine_config(**changes) -> EngineConfig:
    sizes = dict(max_num_seqs=8, max_model_len=96, page_size=4, prefill_chunk=16, prefill_rows=2)
    return EngineConfig(**(sizes | changes))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OracleDrafter:
    """Has every sequence's true continuation; proposes it shifted by `offset` in the vocabulary.

    Offset 0 is the perfect drafter, offset 1 the adversarial one: plausible ids, always wrong.
    """

    table: jax.Array  # [sequences, positions]
    offset: jax.Array
    num_draft: int = field(metadata=dict(static=True))

    def propose(self, target, inputs, cache):
        last = jnp.take_along_axis(inputs.tokens, jnp.maximum(inputs.num_real - 1, 0)[:, None], 1)
        position = inputs.start + inputs.num_real
        who = jnp.argmax(last == self.table[:, position].T, axis=1)  # which sequence this is
        ahead = position[:, None] + 1 + jnp.arange(self.num_draft)
        drafts = self.table[who[:, None], jnp.minimum(ahead, self.table.shape[1] - 1)]
        return Proposal((drafts + self.offset) % tiny.TARGET.vocab_size, None), cache

    def absorb(self, target, inputs, cache):
        return cache


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module")
def naive(target) -> list[list[int]]:
    """Greedy outputs by full forward passes without any cache: the definition."""
    return tiny.greedy(target, prompts(), MAX_TOKENS)


def oracle_engine(target, naive, num_draft: int, offset: int) -> Engine:
    table = np.zeros((len(naive), 160), np.int32)
    for row, (prompt, output) in enumerate(zip(prompts(), naive, strict=True)):
        text = prompt + output
        table[row, : len(text)] = text
    drafter = OracleDrafter(jnp.asarray(table), jnp.asarray(offset), num_draft)
    return one_bucket(Engine(target, None, engine_config(num_draft=num_draft), drafter=drafter))


@pytest.fixture(scope="module")
def engine_of(target):
    """Engines by method and J, shared by the tests, because compiling takes most of their time."""

    @functools.cache
    def make(method: str, num_draft: int) -> Engine:
        head = None if method == "none" else tiny.head(method)
        return one_bucket(Engine(target, head, engine_config(num_draft=num_draft)))

    return make


@pytest.fixture(scope="module")
def of_every_size(target) -> Engine:
    """An engine that compiles a round for each batch bucket, as batches of that size come."""
    return Engine(target, tiny.head(), engine_config(num_draft=5))


def run(engine: Engine, count: int = 8, **params) -> list[list[int]]:
    done = engine.generate(prompts(count), SamplingParams(max_tokens=MAX_TOKENS, **params))
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.config.total_pages - 1
    return [c.tokens for c in done]


def test_plain_decoding_equals_recomputing_everything(engine_of, naive):
    assert run(engine_of("none", 0)) == naive


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("num_draft", [5, 2, 7, 1])
@pytest.mark.parametrize("method", ["peagle", "selector", "eagle3", "dflash", "dflash2", "dspark"])
def test_output_is_unchanged_by_a_random_head(engine_of, naive, method, num_draft):
    assert run(engine_of(method, num_draft)) == naive


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("num_draft", [7, 1, 2, 5])
def test_output_is_unchanged_by_a_perfect_drafter(target, naive, num_draft):
    engine = oracle_engine(target, naive, num_draft, 0)
    done = engine.generate(prompts(), SamplingParams(max_tokens=MAX_TOKENS))
    assert [c.tokens for c in done] == naive
    # Every draft whose truth the table knows is accepted: fewest rounds that can be.
    fewest = -(-(MAX_TOKENS - 1) // (num_draft + 1))
    assert all(fewest <= c.rounds <= fewest + 1 for c in done)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("num_draft", [7, 1, 2, 5])
def test_output_is_unchanged_by_an_adversarial_drafter(target, naive, num_draft):
    engine = oracle_engine(target, naive, num_draft, 1)
    done = engine.generate(prompts(), SamplingParams(max_tokens=MAX_TOKENS))
    assert [c.tokens for c in done] == naive
    assert Acceptance.of(done).accepted == 0


@pytest.mark.sampled(0, slow=2)
@pytest.mark.parametrize("batch", range(8, 0, -1))
def test_output_is_unchanged_by_the_batch_size(of_every_size, naive, batch):
    assert run(of_every_size, batch) == naive[:batch]


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize(
    ("chunk", "rows", "small"), [(1, 1, False), (5, 3, False), (64, 1, False), (32, 3, True)]
)
def test_output_is_unchanged_by_chunked_prefill(target, naive, chunk, rows, small):
    sizes = dict(prefill_chunk=chunk, prefill_rows=rows, small_prefills=small)
    config = engine_config(num_draft=3, max_num_seqs=4, **sizes)
    assert run(one_bucket(Engine(target, tiny.head(), config))) == naive


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("method", ["selector", "none", "peagle", "eagle3", "dflash2"])
def test_output_is_unchanged_by_preemption(target, naive, method):
    head = None if method == "none" else tiny.head(method)
    config = engine_config(num_draft=0 if head is None else 3, num_pages=34, max_num_seqs=4)
    engine = one_bucket(Engine(target, head, config))
    assert run(engine) == naive
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("method", ["selector", "peagle", "none", "eagle3", "dflash2"])
def test_a_preempted_request_goes_on_as_if_it_had_stayed(target, method):
    """Sampled tokens too: both programs draw the same tokens and make the same next drafts."""
    head, num_draft = (None, 0) if method == "none" else (tiny.head(method), 3)
    params = [SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=i) for i in range(8)]
    results = []
    for num_pages in (None, 34):
        config = engine_config(num_draft=num_draft, num_pages=num_pages, max_num_seqs=4)
        engine = one_bucket(Engine(target, head, config))
        done = engine.generate(prompts(), params)
        results.append([(c.tokens, c.rounds, c.accepted_per_position) for c in done])
        assert bool(engine.scheduler.num_preemptions) == (num_pages is not None)
    assert results[0] == results[1]


def test_output_is_unchanged_by_per_request_draft_counts(engine_of, naive):
    engine = engine_of("peagle", 5)
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, num_speculative_tokens=k)
        for k in (None, 0, 1, 2, 3, 4, 5, 0)
    ]
    done = engine.generate(prompts(), params)
    assert [c.tokens for c in done] == naive
    assert [len(c.accepted_per_position) for c in done] == [5, 0, 1, 2, 3, 4, 5, 0]
    assert done[1].drafted == 0


@pytest.mark.slow
def test_a_pruned_draft_vocabulary_changes_nothing(target, naive):
    head = tiny.head(draft_vocab_size=50)
    ids = np.sort(np.random.default_rng(0).choice(tiny.HEAD.vocab_size, 50, replace=False))
    head.d2t.set_value(jnp.asarray(ids - np.arange(50), jnp.int32))
    assert run(one_bucket(Engine(target, head, engine_config(num_draft=3)))) == naive


@pytest.mark.slow
def test_bfloat16_differs_only_at_ties(target):
    half = tiny.target(dtype="bfloat16")
    head = tiny.head(dtype="bfloat16")
    config = dict(dtype="bfloat16", max_num_seqs=4)
    params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=2)
    plain, spec = (
        one_bucket(Engine(half, draft, engine_config(num_draft=J, **config))).generate(
            prompts(), params
        )
        for draft, J in ((None, 0), (head, 3))
    )
    assert_parts_only_at_ties(plain, spec)


@pytest.mark.sampled(0, slow=2)
@pytest.mark.parametrize("drafts", ["changing K", "block", "sample", "argmax"])
@pytest.mark.parametrize("method", ["selector", "peagle", "eagle3", "dspark", "dflash2"])
def test_sampled_output_has_the_targets_law(method, drafts, monkeypatch, num_cases):
    """Joint law of the first three tokens after a prompt, vocabulary 4, against exact
    probabilities.

    6000 requests or more over 64 outcomes; at level 1e-3 a test of this size finds an effect of w =
    0.12 (a total variation of about 0.05) with a power of 0.99.
    """
    monkeypatch.setattr(k_by_load.LoadPolicy, "decide_every", 1)
    monkeypatch.setattr(k_by_load, "_LEAST_VERIFIED", 1)
    monkeypatch.setattr(round_shapes, "candidates", lambda most, size, platform: (0, 1, 2))
    monkeypatch.setattr(selector, "CANDIDATES", 2)  # half of the tokens are no candidates
    small = dict(vocab_size=4)
    target = tiny.target(seed=3, **small)
    head = tiny.head(method, seed=5, draft_vocab_size=4, **small)
    temperature, prompt = 4.0, [2, 3, 3, 0, 1]
    count = num_cases("sampled texts against the target's law", 6000, least=6000)
    config = OneBucketConfig(
        num_draft=2,
        max_num_seqs=64,
        max_model_len=16,
        page_size=4,
        prefill_chunk=8,
        prefill_rows=16,
        adaptive="load" if drafts == "changing K" else "off",
        draft_sampling="argmax" if drafts == "argmax" else "sample",
        verify_method="block" if drafts in ("block", "argmax") else "token",
        max_logprobs=0,
        max_waiting=count,
    )
    engine = Engine(target, head, config, times=RandomTimes())
    engine.warm_up()
    # Without a seed a request has its number; with one it would keep K.
    params = SamplingParams(max_tokens=3, temperature=temperature)
    done = engine.generate([prompt] * count, params)
    # Two drafts must often be accepted and often be rejected, or the test would show nothing.
    assert 0.1 < Acceptance.of(done).rates[0] < 0.95
    assert drafts != "changing K" or engine.policy.num_changes > 20
    continuations = np.stack(np.meshgrid(*[np.arange(4)] * 2, indexing="ij"), -1).reshape(-1, 2)
    rows = np.concatenate([np.tile(prompt, (16, 1)), continuations], axis=1)
    p = np.exp(np.float64(jax.nn.log_softmax(tiny.logits(target, rows) / temperature)))
    expected, observed = np.zeros((4, 4, 4)), np.zeros((4, 4, 4))
    for row, (a, b) in enumerate(continuations):
        expected[a, b] = p[row, 4, a] * p[row, 5, b] * p[row, 6]
    for completion in done:
        observed[tuple(completion.tokens)] += 1
    check_law(observed, expected * count)
