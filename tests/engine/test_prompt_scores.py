"""Log-probabilities of prompts against full forward passes without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams
from peagle_jax.engine.host.request import RequestState
from peagle_jax.method.prompt_scores import BLOCK, score_prompt
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("shared_programs")
CONFIG = EngineConfig(
    num_draft=3,
    max_num_seqs=4,
    max_model_len=96,
    page_size=8,
    prefill_chunk=16,
    prefill_rows=2,
    max_logprobs=3,
    prompt_logprobs=True,
)
rng = np.random.default_rng(7)
PROMPTS = [rng.integers(2, tiny.TARGET.vocab_size, n).tolist() for n in (1, 2, 16, 17, 41)]


@pytest.fixture(scope="module")
def target():
    return tiny.target(**tiny.ONE_LAYER)


@pytest.fixture(scope="module")
def engine(target) -> Engine:
    return one_bucket(Engine(target, tiny.head(**tiny.HEAD_OF_ONE_LAYER), CONFIG))


@pytest.fixture(scope="module")
def reference(target) -> list[np.ndarray]:
    """Log-probabilities [n, V] of the token after each token of a prompt."""
    rows = np.zeros((len(PROMPTS), max(map(len, PROMPTS))), np.int32)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    logprobs = np.asarray(jax.nn.log_softmax(tiny.logits(target, rows)))
    return [logprobs[row, : len(prompt)] for row, prompt in enumerate(PROMPTS)]


def check(prompt: list[int], got: list, want: np.ndarray, num_top: int) -> None:
    assert len(got) == len(prompt)
    assert got[0] is None
    for place, one in enumerate(got[1:], 1):
        row = want[place - 1]
        assert one.logprob == pytest.approx(row[prompt[place]], abs=1e-4)
        assert one.rank == 1 + (row > row[prompt[place]]).sum()
        assert [token for token, _ in one.top] == np.argsort(-row)[:num_top].tolist()
        for token, logprob in one.top:
            assert logprob == pytest.approx(row[token], abs=1e-4)


@pytest.mark.slow
def test_prompts_are_scored_as_the_model_scores_them(engine, reference):
    """Prompts of several chunks, beside others, after the same prompts; the text stays the same."""
    plain = SamplingParams(max_tokens=9)
    texts = [done.tokens for done in engine.generate(PROMPTS, plain)]
    asks = [0, 3, 1, 3, 2]
    params = [SamplingParams(max_tokens=9, prompt_logprobs=n) for n in asks]
    for done, prompt, want, n in zip(
        engine.generate(PROMPTS, params), PROMPTS, reference, asks, strict=True
    ):
        check(prompt, done.prompt_logprobs, want, n)
    mixed = [plain if i % 2 else params[i] for i in range(5)]
    done = engine.generate(PROMPTS, mixed)
    assert [one.tokens for one in done] == texts
    assert [one.prompt_logprobs is None for one in done] == [False, True] * 2 + [False]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_a_preempted_request_has_all_scores(engine, reference, steps):
    params = SamplingParams(max_tokens=9, prompt_logprobs=3)
    request = engine.add_request(PROMPTS[-1], params)
    for _ in range(steps):
        engine.step()
    if request.state in (RequestState.PREFILL, RequestState.RUNNING):
        engine.scheduler._preempt(request)
    while engine.has_work:
        engine.step()
    assert request.preemptions == 1
    check(PROMPTS[-1], request.prompt_logprobs, reference[-1], 3)


def test_an_engine_without_the_program_refuses_the_field(target):
    engine = Engine(target, None, EngineConfig(max_model_len=64))
    with pytest.raises(ConfigError, match="started without prompt_logprobs") as caught:
        engine.validate([5], SamplingParams(prompt_logprobs=0))
    assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize("shape", [(1, 1), (2, BLOCK), (3, 50)])
def test_blocks_do_not_change_scores(shape):
    """Rows that fill no whole block, and more rows than one block."""
    rng = np.random.default_rng(0)
    D, V = 8, 33
    matrix = jnp.asarray(rng.normal(0, 1, (D, V)), jnp.float32)
    hidden = jnp.asarray(rng.normal(0, 1, (*shape, D)), jnp.float32)
    following = rng.integers(0, V, shape)
    scores = jax.jit(lambda h, t: score_prompt(lambda x: x @ matrix, h, t, 4))(hidden, following)
    want = np.asarray(jax.nn.log_softmax(hidden @ matrix, axis=-1))
    chosen = np.take_along_axis(want, following[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores.logprobs, chosen, atol=1e-5)
    np.testing.assert_array_equal(scores.ranks, 1 + (want > chosen[..., None]).sum(-1))
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-want, axis=-1)[..., :4])
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-want, axis=-1)[..., :4], atol=1e-5)


def test_a_backward_pass_keeps_no_logits():
    matrix, hidden = jnp.ones((8, 999)), jnp.ones((2, BLOCK, 8))
    following = jnp.zeros((2, BLOCK), jnp.int32)
    score = lambda hidden: score_prompt(lambda rows: rows @ matrix, hidden, following, 0).logprobs
    _, backward = jax.vjp(score, hidden)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(backward))
    assert kept < score(hidden).nbytes * 999 / 2
