"""Sampling controls in the engine: the text with drafts is the one without."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.host.calls import DecodeCall, RoundShape
from peagle_jax.engine.host.request import RequestState
from peagle_jax.method import step
from tests import tiny
from tests.programs import one_bucket
from tests.test_losslessness import OracleDrafter

J, EOS, STOP, V = 3, 5, 17, tiny.TARGET.vocab_size
pytestmark = pytest.mark.usefixtures("shared_programs")
CONFIG = EngineConfig(
    num_draft=J, max_num_seqs=4, max_model_len=96, page_size=8, prefill_chunk=16, prefill_rows=2
)
PROMPTS = [[7, 9, 11, 60], [3, 4, 7], [80, 81, 82, 83, 84], [21]]
ALLOWED = tuple(range(30, 60))
CONTROLS = {
    "bias": dict(logit_bias={3: 4.0, 9: -100.0, 40: 6.0, 41: 6.0}),
    "allowed": dict(allowed_token_ids=ALLOWED),
    "min_tokens": dict(logit_bias={EOS: 60.0, STOP: 60.0}, stop_ids=(STOP,), min_tokens=12),
    "repetition": dict(repetition_penalty=3.0),
    "frequency": dict(frequency_penalty=1.5),
    "presence": dict(presence_penalty=-2.0),
    "together": dict(
        logit_bias={EOS: 3.0, 9: -4.0, 40: 2.0},
        allowed_token_ids=(EOS, 9, *range(30, 100)),
        min_tokens=10,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
    ),
}


def params(name: str | None) -> SamplingParams:
    return SamplingParams(max_tokens=32, **(CONTROLS[name] if name else {}))


@pytest.fixture(scope="module")
def target():
    return tiny.target(eos_ids=(EOS,))


@pytest.fixture(scope="module")
def plain(target) -> Engine:
    return one_bucket(Engine(target, None, CONFIG))


@pytest.fixture(scope="module")
def texts(plain) -> dict[str | None, list[list[int]]]:
    """Greedy texts of plain decoding by controls."""
    run = lambda name: [done.tokens for done in plain.generate(PROMPTS, params(name))]
    return {name: run(name) for name in (None, *CONTROLS)}


@pytest.fixture(scope="module")
def drafting(target, texts):
    """Engines whose drafter has the texts of some controls, but for every fifth position."""

    def make(name: str | None) -> Engine:
        table = np.zeros((len(PROMPTS), 160), np.int32)
        for row, (prompt, output) in enumerate(zip(PROMPTS, texts[name], strict=True)):
            table[row, : len(prompt + output)] = prompt + output
        table[:, 4::5] += 1
        drafter = OracleDrafter(jnp.asarray(table % V), jnp.asarray(0), J)
        return one_bucket(Engine(target, None, CONFIG, drafter=drafter))

    return make


def test_controls_change_texts(texts):
    for name in CONTROLS:
        assert all(text != other for text, other in zip(texts[name], texts[None], strict=True))
    assert all(set(text) <= set(ALLOWED) for text in texts["allowed"])
    for text in texts["min_tokens"]:
        assert len(text) == 13
        assert not {EOS, STOP} & set(text[:12])
        assert text[12] in (EOS, STOP)


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("name", CONTROLS)
def test_drafts_do_not_change_a_text_with_controls(drafting, texts, name):
    done = drafting(name).generate(PROMPTS, params(name))
    assert [one.tokens for one in done] == texts[name]
    assert sum(one.accepted for one in done) > sum(one.rounds for one in done) / 2


def test_preempted_requests_and_neighbours_keep_their_texts(drafting, texts):
    """Slots change hands between requests with and without controls, and with other ones."""
    engine = drafting("together")
    names = ["together", None, "repetition", None, "frequency", "together", None, "presence"]
    requests = [engine.add_request(PROMPTS[i % 4], params(name)) for i, name in enumerate(names)]
    scheduler, num_steps = engine.scheduler, 0
    while engine.has_work:
        engine.step()
        num_steps += 1
        active = scheduler.active
        if num_steps % 4 == 0 and active and active[-1].state is RequestState.RUNNING:
            scheduler._preempt(active[-1])
    assert scheduler.num_preemptions > 5
    for i, (name, request) in enumerate(zip(names, requests, strict=True)):
        assert request.output == texts[name][i % 4]


@pytest.mark.parametrize("draft_sampling", ["argmax", "sample"])
def test_forced_drafts_replace_the_drafters_and_are_certain(draft_sampling):
    config = replace(CONFIG, draft_sampling=draft_sampling)
    state = step.init_state(tiny.TARGET, tiny.HEAD, config)
    stored = np.arange(4 * J).reshape(4, J).astype(np.int32)
    state = replace(state, drafts=state.drafts.at[:4].set(stored))
    if draft_sampling == "sample":
        state = replace(state, draft_probs=state.draft_probs + 1 / V)
    plan = DecodeCall.build([], RoundShape(4, J), config).plan
    forced = plan.forced.copy()
    forced[1, 0], forced[2, 1] = 99, 98
    plan = jax.tree.map(jnp.asarray, plan._replace(slots=np.arange(4), forced=forced))
    inputs = step.RoundInputs.of(state, plan, J)
    want = np.where(forced >= 0, forced, stored)
    np.testing.assert_array_equal(inputs.drafts, want)
    np.testing.assert_array_equal(inputs.tokens[:, 1:], want)
    if draft_sampling == "sample":
        assert inputs.draft_probs[1, 0, 99] == inputs.draft_probs[2, 1, 98] == 1
        np.testing.assert_allclose(inputs.draft_probs.sum(-1), 1, rtol=1e-5)
        assert (inputs.draft_probs[0] < 0.5).all()


def test_the_largest_numbers_that_are_accepted_run(plain):
    """Nothing ends a text beyond the engine's length, so `min_tokens` may be any number."""
    largest = SamplingParams(
        max_tokens=2**70,
        min_tokens=2**70,
        temperature=100.0,
        top_k=2**31 - 1,
        seed=2**63 - 1,
        stop_ids=(STOP,),
        logit_bias={V - 1: 100.0, EOS: 100.0},
        repetition_penalty=100.0,
        frequency_penalty=2.0,
        presence_penalty=2.0,
    )
    asked = [largest, replace(largest, temperature=0.0, seed=None), params(None)]
    made = plain.generate(PROMPTS[:3], asked)
    for prompt, one in zip(PROMPTS[:2], made, strict=False):
        assert one.finish_reason == "length"
        assert len(prompt) + len(one.tokens) == CONFIG.max_model_len
        assert not {EOS, STOP} & {*one.tokens}
