"""Elements by texts: attention against the masked definition, loss and gradients against anchors'."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ConfigError
from peagle_jax.training import cod, passes
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.texts import Blocks, TextAttention, blocks_of
from peagle_jax.training.trainer import split_model
from tests import tiny
from tests.tiny import attend_to
from tests.training.test_heads import _options, _run

BLOCKS = Blocks((3, 2, 2, 1))


def test_depths_keep_the_paper_shares_of_the_texts():
    assert blocks_of(64, 8, 0.8, 0.2).sizes == (64, 51, 40, 32, 26, 20, 16, 13)
    assert blocks_of(2, 4, 0.5, 0.1).sizes == (2, 1, 1, 1), "no depth is left out"
    assert blocks_of(5, 3, 1.0, 0.0).sizes == (5, 5, 5)


def _as_elements(blocks: Blocks, valid: jax.Array) -> cod.Elements:
    """The same elements in the layout of `cod`: every block holds all anchors of every text, in order."""
    B, S = valid.shape
    depths = len(blocks.sizes)
    anchor = jnp.tile(jnp.arange(S, dtype=jnp.int32), (B, depths))
    ahead = lambda d: jnp.pad(valid[:, d:], ((0, 0), (0, d)))
    kept = lambda d: (jnp.arange(B) < blocks.sizes[d])[:, None]
    used = jnp.concatenate([valid & ahead(d) & kept(d) for d in range(depths)], axis=1)
    return cod.Elements(anchor, used, S, (S,) * (depths - 1))


def _dense(q, k, v):
    """Every row against the keys of its text, by the rule."""
    S, depth = q.shape[1], BLOCKS.depth
    text = np.concatenate([np.arange(size) for size in BLOCKS.sizes])
    slots = np.arange(S)
    aq, dq, tq = (np.broadcast_to(x, (len(depth), S)).reshape(-1) for x in
                  (slots, depth[:, None], text[:, None]))  # fmt: skip
    context = (dq[None] == 0) & (aq[None] <= aq[:, None])
    chain = (aq[None] == aq[:, None]) & (dq[None] <= dq[:, None])
    allowed = (tq[None] == tq[:, None]) & (context | chain)
    flat = lambda x: jnp.repeat(x.reshape(-1, *x.shape[2:]), q.shape[2] // x.shape[2], axis=1)
    q_, k_, v_ = map(flat, (q, k, v))
    scores = jnp.einsum("tnh,snh->nts", q_, k_) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), -1)
    return jnp.einsum("nts,snh->tnh", weights, v_).reshape(q.shape)


def test_attention_and_its_gradients_equal_the_masked_definition():
    R, S = sum(BLOCKS.sizes), 7
    keys = jax.random.split(jax.random.key(3), 4)
    q, weight = (2 * jax.random.normal(key, (R, S, 4, 8)) for key in keys[:2])
    k, v = (jax.random.normal(key, (R, S, 2, 8)) for key in keys[2:])
    ours = lambda *a: (attend_to(TextAttention(BLOCKS, "xla"), *a, window=None) * weight).sum()
    dense = lambda *a: (_dense(*a) * weight).sum()
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v) for f in (ours, dense))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)


def _text(S=12):
    tokens = jax.random.randint(jax.random.key(5), (3, S), 3, tiny.TARGET.vocab_size)
    return passes.Text(tokens, jnp.array([2, 4, 5]), jnp.array([S, S - 2, S - 1]))


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("fields", [
    dict(), dict(loss="ce"), dict(loss="tv", step_decay=0.7, sharpen=0.6),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_the_same_elements_by_anchors(fields):
    target, text = tiny.target(), _text()
    head = tiny.head()
    head.embed = TrainedEmbed(head.embed)
    params, merge = split_model(head)
    valid = passes.slot_is_trained(text)

    @partial(jax.jit, static_argnames="elements")
    @partial(jax.value_and_grad, has_aux=True)
    def loss(params, elements):
        model, run = merge(params), _run(target, text)
        options = _options(**fields, elements=elements)
        if elements == "texts":
            rows = passes.text_rows(model, target, run, valid, BLOCKS, options)
        else:
            rows = passes.parallel_rows(model, target, run, _as_elements(BLOCKS, valid), options)
        outcome = passes.compare(model, target, run, options, rows)
        report = [(x * outcome.used).sum() for x in (outcome.kl, outcome.match)]
        return outcome.total, (outcome.count, report)

    got, want = (loss(params, elements) for elements in ("texts", "anchors"))
    assert float(want[0][0]) > 1
    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, got, want)


def test_only_some_heads_and_options_fit_texts():
    for fields in (dict(segments=2), dict(query_chunk=5)):
        with pytest.raises(ConfigError, match="--microbatches"):
            _options(elements="texts", **fields)
    with pytest.raises(ConfigError, match="--elements texts"):
        _options(weights="dpace")
    with pytest.raises(ConfigError, match="--repeat-weight"):
        _options(repeat_weight=1.5)


@pytest.mark.slow
def test_pace_weights_come_from_the_probability_of_the_texts_tokens():
    """One anchor at a time, by the definition: w_j = sum over m >= j of the product of the paces up to m."""
    target, text, head = tiny.target(), _text(), tiny.head()
    valid, run = passes.slot_is_trained(text), _run(target, text)
    options = _options(elements="texts", weights="dpace")
    whole = Blocks((3, 3, 3, 3))

    @jax.jit
    def made(head):
        rows = passes.text_rows(head, target, run, valid, whole, options)
        return rows, jax.nn.softmax(head.logits(target, rows.out))

    rows, probs = made(head)
    probs = np.asarray(probs).reshape(4, 3, 12, -1)
    used, got = (np.asarray(x).reshape(4, 3, 12) for x in (rows.used, rows.importance))
    tokens = np.asarray(text.tokens)
    for b in range(3):
        for a in range(12):
            paces = [
                0.5 * probs[d, b, a, tokens[b, a + d + 2]] + 0.5 if used[d, b, a] else 0.0
                for d in range(4)
            ]
            products = np.cumprod(paces)
            want = [products[j:].sum() for j in range(4)]
            np.testing.assert_allclose(got[:, b, a], want, rtol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["texts", "anchors", "eagle3"])
def test_repeats_weigh_less_whatever_the_elements(kind):
    text = passes.Text(jnp.tile(jnp.arange(3, 15), (2, 2)), jnp.array([2, 4]), jnp.array([24, 24]))
    target, head = tiny.target(), tiny.head("eagle3" if kind == "eagle3" else "peagle")
    valid, run = passes.slot_is_trained(text), _run(target, text)

    @partial(jax.jit, static_argnames="repeat_weight")
    def importance(head, repeat_weight):
        options = _options(repeat_weight=repeat_weight, num_depths=2)
        if kind == "texts":
            rows = passes.text_rows(head, target, run, valid, Blocks((2, 2)), options)
            return rows.importance.reshape(2, 2, 24).swapaxes(0, 1)
        if kind == "anchors":
            elements = cod.all_elements(valid, 2)
            rows = passes.parallel_rows(head, target, run, elements, options)
        else:
            rows = passes.unrolled_rows(head, target, run, valid, options)
        return rows.importance.reshape(2, 2, 24)

    plain, less = (np.asarray(importance(head, weight)) for weight in (1.0, 0.25))
    # x_19 is the first token that ends eight which occurred before; slot 18 has seen it.
    repeat = np.arange(24) >= 18
    assert plain[..., repeat].any()
    np.testing.assert_allclose(less, plain * np.where(repeat, 0.25, 1.0), rtol=1e-6)
