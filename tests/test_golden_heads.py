"""P-EAGLE and EAGLE-3 heads against speculators: logits when serving, logits and losses in
training.

The drafter's logits are seen through `draft_sampling="sample"`: at temperature 1 the proposal's
probabilities are their softmax.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.checkpoint import load_head, load_target
from peagle_jax.config import EngineConfig
from peagle_jax.method import drafter as serving
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import Proposal, make_drafter
from peagle_jax.training import passes as training
from peagle_jax.training.picked import pick
from peagle_jax.training.texts import Blocks
from peagle_jax.training.trainer import split_model
from tests.rounds import Rig

GOLDEN = Path(__file__).parent / "golden"
TRAINED = ("peagle-1", "peagle-4", "peagle-pruned", "peagle-norms")
PEAGLE = (*TRAINED, "peagle-qwen3")  # the last has sliding windows, which are served only
BLOCKS = ("dflash", "dflash2", "dspark")
EAGLE = ("eagle3", "eagle31")
ATOL = 5e-4  # logits and log-probabilities; both reach 20
ANCHORS = (0, 3, 9, 12, 16, 20)  # prompts of P = anchor + 1 tokens; 0, 9 and 20 are golden


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "expected" / f"{name}.safetensors")


@cache
def target():
    return load_target(GOLDEN / "qwen3", dtype="float32")


@cache
def head(name: str) -> DraftHead:
    return load_head(GOLDEN / name, target().config, dtype="float32")


def num_draft(name: str) -> int:
    return expected(name)["ttt_logits" if name in EAGLE else "chain_logits"].shape[
        name not in EAGLE
    ]


def draft_ids(head: DraftHead) -> np.ndarray:
    """Target ids of the draft vocabulary."""
    ids = np.arange(head.config.draft_vocab_size)
    return ids if head.d2t is None else ids + np.asarray(head.d2t[...])


def log_softmax(logits) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))


def serving_rig(name: str, sampling: str = "sample") -> Rig:
    """The golden text in every slot, drafted for by head `name`; samples ignore its selector."""
    K, text = num_draft(name), expected("sequence")["tokens"]
    config = EngineConfig(
        num_draft=K, max_num_seqs=len(ANCHORS), max_model_len=40, page_size=4, prefill_chunk=21,
        draft_sampling=sampling,
    )  # fmt: skip
    drafter = make_drafter(head(name), K, sampling, selector=sampling == "argmax")
    return Rig(target(), drafter, config, np.tile(text, (len(ANCHORS), 1)))


def drafter_logprobs(rig: Rig, state) -> tuple[np.ndarray, np.ndarray]:
    """Anchor of every slot [B], and what the drafter says from there [B, K, Vd]."""
    probs = np.asarray(state.draft_probs)[: rig.num_rows][..., draft_ids(rig.drafter.head)]
    return np.asarray(state.length)[: rig.num_rows] - 1, np.log(probs)


def served(name: str, choose=serving._choose) -> dict[int, list[np.ndarray]]:
    """Log-probabilities [K, Vd] by anchor, from prefills and from rounds that end there."""
    seen = {anchor: [] for anchor in range(len(expected("sequence")["tokens"]) + 4)}
    rig, rng = serving_rig(name), np.random.default_rng(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "_choose", choose)
        state, _ = rig.prefill(rig.new_state(), 0, np.array(ANCHORS) + 1)
        for _ in range(6):
            at, logprobs = drafter_logprobs(rig, state)
            for anchor, rows in zip(at, logprobs, strict=True):
                seen[anchor].append(rows)
            # Random steps that stop at the golden anchors; the first slot takes the longest ones.
            steps = rng.integers(1, num_draft(name) + 2, len(at))
            steps[0] = num_draft(name) + 1
            stop = np.select([at < 9, at < 20, at < 27], [9, 20, 27], at + 1)
            state, _ = rig.round(state, np.minimum(steps, stop - at) - 1)
    return seen


@pytest.fixture(scope="module", params=PEAGLE)
def parallel(request):
    """(name, log-probabilities by anchor) of a P-EAGLE head in the engine's own step."""
    return request.param, served(request.param)


@pytest.mark.sampled(0, slow=1)
def test_the_engine_drafts_with_the_golden_logits(parallel):
    name, seen = parallel
    golden = zip(expected(name)["chain_anchor"], expected(name)["chain_logits"], strict=True)
    for anchor, logits in golden:
        assert len(seen[anchor]) >= (1 if anchor == 0 else 2), "once by prefill, once by a round"
        for got in seen[anchor]:
            np.testing.assert_allclose(got, log_softmax(logits), atol=ATOL)


def by_the_text(name: str) -> dict[int, list[np.ndarray]]:
    """As `served`, where the drafts that a head sees are the tokens of the text."""
    text = jnp.asarray(np.pad(expected("sequence")["tokens"], (0, 12)), jnp.int32)
    real = serving._choose

    def choose(head, logits, positions, inputs, sampling):
        return Proposal(text[positions], real(head, logits, positions, inputs, sampling).probs)

    return served(name, choose)


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_engine_drafts_blocks_with_the_golden_logits(name):
    seen = by_the_text(name) if name == "dspark" else served(name)
    golden = zip(expected(name)["chain_anchor"], expected(name)["chain_logits"], strict=True)
    for anchor, logits in golden:
        assert len(seen[anchor]) >= (1 if anchor == 0 else 2), "once by prefill, once by a round"
        for got in seen[anchor]:
            np.testing.assert_allclose(got, log_softmax(logits), atol=2e-5)


def test_the_selector_of_a_block_drafter_takes_the_golden_walk():
    rig = serving_rig("dflash2", "argmax")
    state, _ = rig.prefill(rig.new_state(), 0, np.array(ANCHORS) + 1)
    drafts = np.asarray(state.drafts)[
        [ANCHORS.index(a) for a in expected("dflash2")["chain_anchor"]]
    ]
    np.testing.assert_array_equal(drafts, expected("dflash2")["walk"])


@pytest.fixture(scope="module", params=EAGLE)
def autoregressive(request):
    """As `parallel`, of an EAGLE-3 head whose fed-back drafts are the tokens of the text."""
    return request.param, by_the_text(request.param)


@pytest.mark.sampled(0, slow=1)
def test_the_engine_drafts_step_by_step_with_the_golden_logits(autoregressive):
    name, seen = autoregressive
    want = log_softmax(expected(name)["ttt_logits"])  # [K, n, Vd]
    K, n, _ = want.shape
    compared = 0
    for anchor in range(n):
        depths = min(K, n - anchor)  # past the end of the text there is nothing to compare with
        for got in seen[anchor]:
            np.testing.assert_allclose(got[:depths], want[:depths, anchor], atol=ATOL)
            compared += 1
    assert compared >= 20


def options(K: int) -> training.HeadOptions:
    return training.HeadOptions(
        texts=Path(), batch=1, num_depths=K, dtype="float32", loss_chunk=16, repeat_weight=1.0
    )


@cache
def target_run() -> training.Run:
    tokens = jnp.asarray(expected("sequence")["tokens"])[None]
    text = training.Text(tokens, jnp.array([6]), jnp.array([tokens.shape[1]]))
    return training.run_target(target(), text, target().config.default_taps)


@pytest.mark.sampled(0, slow=2)
def test_the_trainer_computes_what_the_engine_computes(parallel):
    """Elements (a, 0) .. (a, K-1) of the trainer are slots a .. a+K-1 of a serving round."""
    name, seen = parallel
    K, run, tutor = num_draft(name), target_run(), target()
    S = run.tokens.shape[1]

    @jax.jit
    def logits(model):
        valid = jnp.ones((1, S), bool)
        rows = training.text_rows(model, tutor, run, valid, Blocks((1,) * K), options(K))
        return model.logits(tutor, rows.out)

    if name not in TRAINED:
        with pytest.raises(ValueError, match="sliding windows are not trained"):
            logits(head(name))
        return
    trained = log_softmax(logits(head(name)).reshape(K, S, -1))
    anchors = [anchor for anchor in range(S - 1) if seen[anchor]]
    assert len(anchors) >= 12
    for anchor in anchors:
        for got in seen[anchor]:
            np.testing.assert_allclose(got, trained[:, anchor], atol=ATOL)


def cod_sample(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Of the golden sample: whether an element (depth, anchor) is trained, [K, S]; its elements."""
    want, K, S = expected(name), num_draft(name), target_run().tokens.shape[1]
    pairs = np.stack([want["cod_depth"], want["cod_anchor"]], axis=1)
    mask = np.r_[expected("sequence")["loss_mask"], 0]  # slot p counts if its token x_{p+1} does
    used = np.zeros((K, S), bool)
    for depth, anchor in pairs:
        slot = anchor + depth
        used[depth, anchor] = slot < S - 1 and mask[slot + 1] > 0
    return used, pairs


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("name", TRAINED)
def test_logits_loss_and_gradients_of_a_cod_sample_are_the_golden_ones(name):
    """Elements do not see each other beyond their chains, so the others may be computed too."""
    want, (used, pairs) = expected(name), cod_sample(name)
    (K, S), used = used.shape, jnp.asarray(used)
    params, merge = split_model(head(name))
    run, tutor, chosen = target_run(), target(), options(num_draft(name))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        model = merge(params)
        valid = jnp.ones((1, S), bool)
        rows = training.text_rows(model, tutor, run, valid, Blocks((1,) * K), chosen)
        rows = rows._replace(used=used, importance=used.astype(jnp.float32))
        outcome = training.compare(model, tutor, run, chosen, rows)
        return outcome.total / (outcome.used.sum() + 1e-5), model.logits(tutor, rows.out)

    (value, logits), grads = loss(params)
    np.testing.assert_allclose(logits[*pairs.T], want["cod_logits"], atol=ATOL)
    np.testing.assert_allclose(value, want["cod_loss"], rtol=1e-4)
    close = partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-5)
    close(grads["first.hidden_norm.weight"], want["grad_hidden_norm"])
    close(grads["mask_hidden"], want["grad_mask_hidden"])
    close(grads["embed.weight"][head(name).config.mask_token_id], want["grad_mask_embedding"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EAGLE)
def test_logits_loss_and_gradient_of_the_training_time_test_are_the_golden_ones(name):
    """speculators counts row p of step s when slot p + s does; the trainer also wants p."""
    want, K, run, tutor = expected(name), num_draft(name), target_run(), target()
    S = run.tokens.shape[1]
    mask = np.r_[expected("sequence")["loss_mask"], np.zeros(K, int)]
    used = np.array([[p + s < S - 1 and mask[p + s + 1] > 0 for p in range(S)] for s in range(K)])
    weight = used / (used.sum(axis=1, keepdims=True) + 1e-5)
    flat = lambda x: jnp.asarray(x.reshape(1, -1))
    params, merge = split_model(head(name))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        model, valid = merge(params), jnp.ones((1, S), bool)
        rows = training.unrolled_rows(model, tutor, run, valid, options(K))
        rows = rows._replace(used=flat(used), importance=flat(weight))
        outcome = training.compare(model, tutor, run, options(K), rows)
        return outcome.total, (outcome.kl, model.logits(tutor, rows.out)[0])

    (value, (kl, logits)), grads = loss(params)
    logits, kl = np.asarray(logits).reshape(K, S, -1), np.asarray(kl).reshape(K, S)
    for s in range(K):
        np.testing.assert_allclose(
            logits[s, : S - 1 - s], want["ttt_logits"][s, : S - 1 - s], atol=ATOL
        )
    np.testing.assert_allclose((kl * weight).sum(axis=1), want["ttt_losses"], rtol=1e-4)
    np.testing.assert_allclose(value, want["ttt_loss"], rtol=1e-4)
    got = grads["first.hidden_norm.weight"]
    np.testing.assert_allclose(got, want["grad_hidden_norm"], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("anchors", [None, 6])
def test_logits_loss_and_gradient_of_blocks_are_the_golden_ones(anchors):
    """With some anchors and with all; a window that is longer than the text is none."""
    want, K, run, tutor = expected("dflash"), num_draft("dflash"), target_run(), target()
    (S,), chain = run.tokens.shape[1:], want["chain_anchor"]
    mask = np.r_[expected("sequence")["loss_mask"], np.zeros(K, int)]
    trained = load_head(GOLDEN / "dflash", tutor.config, dtype="float32")
    for layer in trained.layers:
        layer.attention.config = replace(layer.attention.config, window=None)
    params, merge = split_model(trained)
    # The golden anchors weigh most, so they are among those that are picked.
    weight = jnp.zeros((1, S)).at[0, chain].set(1.0)
    picked = anchors and pick(jax.random.key(0), jnp.ones((1, S), bool), weight, anchors)
    columns = [list(range(S) if picked is None else picked.slots[0]).index(a) for a in chain]
    used = np.zeros((K, S if picked is None else anchors), bool)
    for column, anchor in zip(columns, chain, strict=True):
        used[:, column] = [mask[anchor + d + 2] > 0 for d in range(K)]

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        model, valid = merge(params), jnp.ones((1, S), bool)
        rows = training.block_rows(model, tutor, run, valid, options(K), picked)
        decay = jnp.exp(-jnp.arange(K) / 4)[:, None] * used
        rows = rows._replace(used=used.reshape(1, -1), importance=decay.reshape(1, -1))
        outcome = training.compare(model, tutor, run, options(K), rows)
        return outcome.total / (used.sum() + 1e-5), model.logits(tutor, rows.out)[0]

    (value, logits), grads = loss(params)
    logits = np.asarray(logits).reshape(*used.shape, -1)[:, columns]
    np.testing.assert_allclose(np.swapaxes(logits, 0, 1), want["chain_logits"], atol=2e-5)
    np.testing.assert_allclose(value, want["block_loss"], rtol=1e-5)
    got = grads["context_norm.weight"]
    np.testing.assert_allclose(got, want["grad_context_norm"], rtol=1e-4, atol=1e-6)
