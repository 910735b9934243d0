"""Rows of training against what serving computes, and the gradient of the embedding."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.device import H200
from peagle_jax.training import drafter, embedding, passes, recipe
from peagle_jax.training.trainer import cast, split_model
from tests import tiny
from tests.tiny import causal_attention
from tests.training.small import head_options, three_texts


def _naive_rows(target, head, tokens, fused, anchor, depths, feed_back):
    """Logits at depths 0..depths-1 of one anchor: the prefix, then the chain, as serving."""
    S = tokens.shape[0]
    fused = fused[None, : anchor + 1]
    rows = tokens[None, 1 : anchor + 2]
    if not feed_back:
        mask = jnp.full((1, depths - 1), head.config.mask_token_id)
        state = jnp.broadcast_to(
            head.fuse(head.mask_hidden[...]), (1, depths - 1, tiny.HEAD.hidden_size)
        )
        rows = jnp.concatenate([rows, mask], 1)
        states = jnp.concatenate([fused, state], 1)
        positions = jnp.arange(rows.shape[1])[None]
        out, _ = head(target, rows, states, positions, [None] * 2, causal_attention)
        return head.logits(target, out[0, anchor:])
    states, logits = fused, []
    for d in range(depths):
        positions = jnp.arange(rows.shape[1])[None]
        out, _ = head(target, rows, states, positions, [None] * 2, causal_attention)
        logits.append(head.logits(target, out[0, -1]))
        if anchor + d + 2 >= S:
            break
        rows = jnp.concatenate([rows, tokens[None, anchor + d + 2, None]], 1)
        states = jnp.concatenate([states, head.feedback(out[:, -1:])], 1)
    return jnp.stack(logits)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_training_rows_are_what_serving_computes(method):
    target = tiny.target()
    head = tiny.head(method, num_layers=2, own_embedding=method == "peagle")
    text = three_texts()
    options = head_options(batch=3)
    taps = tiny.HEAD.taps

    @jax.jit
    def trained_on(target, head):
        valid = passes.slot_is_trained(text)
        run = passes.run_target(target, text, taps)
        rows = drafter.all_rows(head, target, run, valid, options)
        return passes.compare(head, target, run, options, rows)

    @jax.jit
    def served(target, head):
        positions = jnp.broadcast_to(jnp.arange(12), text.tokens.shape)
        hidden, tapped, _ = target(text.tokens, positions, [None] * 3, causal_attention, taps=taps)
        return jax.nn.log_softmax(target.unembed(hidden)), head.fuse(tapped)

    outcome = trained_on(target, head)
    kl, used = (np.asarray(x).reshape(3, 4, 12) for x in (outcome.kl, outcome.used))
    full, fused = served(target, head)
    full = np.asarray(full)
    for a in (0, 1, 5, 9):  # the first, one before a prompt ends, one within, the last
        rows = lambda tokens, fused, a=a: jax.nn.log_softmax(
            _naive_rows(target, head, tokens, fused, a, 4, method == "eagle3")
        )
        for b, logits in enumerate(np.asarray(jax.jit(jax.vmap(rows))(text.tokens, fused))):
            for d in range(min(4, len(logits))):
                P, L = int(text.prompt[b]), int(text.length[b])
                trained = a >= P - 1 and a + d <= L - 3
                assert used[b, d, a] == trained
                if trained:
                    p = full[b, a + d + 1]
                    want = (np.exp(p) * (p - logits[d])).sum()
                    np.testing.assert_allclose(kl[b, d, a], want, rtol=2e-3, atol=2e-5)


def test_lookup_gradient_adds_up_repeated_tokens(monkeypatch):
    monkeypatch.setattr(embedding, "_CHUNK", 4)
    weight = jax.random.normal(jax.random.key(0), (9, 3))
    tokens = jnp.array([[1, 1, 8, 0, 1], [2, 8, 1, 3, 3]])
    g = jax.random.normal(jax.random.key(1), (2, 5, 3))
    ours = jax.grad(lambda w: (embedding.lookup(w, tokens) * g).sum())(weight)
    plain = jax.grad(lambda w: (w[tokens] * g).sum())(weight)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_a_loss_can_be_traced_around_the_kernels_of_the_target():
    """Kernels have no derivatives, and those that write to pages are not plain functions."""
    plain = tiny.target(head_dim=64, hidden_size=128)
    weights, merge_target = split_model(plain)
    target = merge_target(cast(weights, jnp.bfloat16))
    config = recipe.head_config(target.config, method="peagle", layers=1, mask_token_id=1)
    head = drafter.init_head(dataclasses.replace(config, taps=(0, 1, 2)), target, 0)
    params, merge = split_model(head)
    loss = partial(drafter.head_loss, merge, (0, 1, 2), head_options(batch=3))
    step = jax.grad(lambda params, *rest: loss(params, *rest)[0])
    with dispatch.assume(H200), dispatch.references(rounded=True):
        traced = str(jax.make_jaxpr(step)(params, target, three_texts(), jax.random.key(0)))
    assert "rope_write" in traced
