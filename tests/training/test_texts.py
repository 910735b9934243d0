"""Elements by texts: their number, and attention against the masked definition."""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.training.texts import Blocks, TextAttention, blocks_of
from tests.tiny import attend_to

BLOCKS = Blocks((3, 2, 2, 1))


def test_depths_keep_the_paper_shares_of_the_texts():
    assert blocks_of(64, 8).sizes == (64, 51, 40, 32, 26, 20, 16, 13)
    assert blocks_of(2, 4).sizes == (2, 1, 1, 1), "no depth is left out"
    assert blocks_of(5, 9).sizes[-2:] == (1, 1)


def _dense(q, k, v):
    """Every row against the keys of its text, by the rule."""
    S, depth = q.shape[1], BLOCKS.depth
    text = np.concatenate([np.arange(size) for size in BLOCKS.sizes])
    slots = np.arange(S)
    aq, dq, tq = (
        np.broadcast_to(x, (len(depth), S)).reshape(-1)
        for x in (slots, depth[:, None], text[:, None])
    )
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
    ours = lambda *a: (attend_to(TextAttention(BLOCKS), *a, window=None) * weight).sum()
    dense = lambda *a: (_dense(*a) * weight).sum()
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v) for f in (ours, dense))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)
