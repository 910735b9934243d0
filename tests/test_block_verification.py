"""Block verification has exactly the target's law, and accepts no fewer drafts than token by token.

The tests enumerate every path of drafts of small random drafters, so they have no sampling error.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.method.sampling import accept_uniforms, block_uniforms, request_keys
from peagle_jax.method.verify import block_law, verify, verify_blocks
from tests.test_verify import J, V, params


def drafts_of_all(size: int, count: int) -> np.ndarray:
    """Every sequence of `count` drafts, [size**count, count]."""
    return np.array([*itertools.product(range(size), repeat=count)]).reshape(-1, count)


def laws_along(tree: np.ndarray, drafts: np.ndarray, rows: int) -> np.ndarray:
    """Laws [N, rows, V] after the first 0, 1, .. drafts; `tree[j]` maps j tokens to a law."""
    size = len(tree[0])
    of = lambda j: np.broadcast_to(tree[j][tuple(drafts[:, :j].T)], (len(drafts), size))
    return np.stack([of(j) for j in range(rows)], axis=1)


def random_tree(rng, size: int, depth: int) -> list[np.ndarray]:
    """A law [V] after each text of up to `depth` tokens; some tokens are impossible."""
    tree = []
    for j in range(depth + 1):
        weights = rng.dirichlet(np.full(size, 0.7), size=(size,) * j)
        is_largest = weights == weights.max(-1, keepdims=True)
        weights = np.where((rng.random(weights.shape) < 0.2) & ~is_largest, 0.0, weights)
        tree.append(weights / weights.sum(-1, keepdims=True))
    return [np.broadcast_to(law, (size,) * j + (size,)) for j, law in enumerate(tree)]


def block_outcome(p_tree, q_tree, size: int, num_draft: int, most: int):
    """(law of the next most + 1 tokens, expected number of accepted drafts) by blocks."""
    drafts = drafts_of_all(size, most)
    p, q = laws_along(p_tree, drafts, most + 1), laws_along(q_tree, drafts, most)
    block = block_law(
        jnp.asarray(p, jnp.float32),
        jnp.asarray(drafts),
        jnp.asarray(q, jnp.float32),
        jnp.full(len(drafts), num_draft),
    )
    chance, residual = (np.asarray(x, np.float64) for x in block)
    drawn = np.take_along_axis(q, drafts[..., None], -1)[..., 0].prod(1)
    law, accepted = np.zeros((size,) * (most + 1)), 0.0
    for path, p_at, weight, chances, residuals in zip(
        drafts, p, drawn, chance, residual, strict=True
    ):
        if weight == 0:
            continue
        for n in range(most + 1):
            ends = weight * chances[n] * np.prod(1 - chances[n + 1 :])
            if ends == 0:
                continue
            accepted += n * ends
            token_law = residuals[n] if residuals[n].any() else p_at[n]
            token_law = token_law / token_law.sum()
            for token in range(size):
                text = (*path[:n], token)
                rest = ends * token_law[token]
                law[text] += rest * _rest(p_tree, text, most)
    return law, accepted


def _rest(tree, text: tuple, most: int) -> np.ndarray | float:
    """The target's law of the tokens after `text`, up to most + 1 in all."""
    law = 1.0
    for j in range(len(text), most + 1):
        following = tree[j][text]
        law = np.asarray(law)[..., None] * following
    return law


def token_accepted(p_tree, q_tree, size: int, num_draft: int) -> float:
    """Expected number of accepted drafts of the rule token by token."""
    if num_draft == 0:
        return 0.0
    drafts = drafts_of_all(size, num_draft)
    p, q = laws_along(p_tree, drafts, num_draft), laws_along(q_tree, drafts, num_draft)
    at = lambda x: np.take_along_axis(x, drafts[..., None], -1)[..., 0]
    drawn = at(q).prod(1)
    ratio = np.where(at(q) > 0, np.minimum(1, at(p) / np.maximum(at(q), 1e-30)), 0)
    return float((drawn * np.cumprod(ratio, axis=1).sum(1)).sum())


@pytest.mark.parametrize("num_draft", [0, 1, 2, 3])
def test_block_verification_has_exactly_the_targets_joint_law(num_draft, num_cases):
    """Every path of random drafters, whose law may depend on the drafts before."""
    size, most = 3, 3
    rng = np.random.default_rng(num_draft)
    gains = []
    for _ in range(num_cases("laws of block verification", 15)):
        p_tree, q_tree = random_tree(rng, size, most), random_tree(rng, size, most - 1)
        law, accepted = block_outcome(p_tree, q_tree, size, num_draft, most)
        np.testing.assert_allclose(law, _rest(p_tree, (), most), atol=3e-6)
        gains.append(accepted - token_accepted(p_tree, q_tree, size, num_draft))
    assert min(gains) > -1e-5, "fewer drafts are accepted than token by token"
    assert (max(gains) > 1e-3) == (num_draft > 1)


def test_a_block_of_the_targets_own_drafts_is_accepted_whole():
    """p equals q: no residual is left after any draft but the last."""
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3, 2)
    drafts = drafts_of_all(3, 2)
    p = jnp.asarray(laws_along(tree, drafts, 3), jnp.float32)
    block = block_law(p, jnp.asarray(drafts), p[:, :2], jnp.full(len(drafts), 2))
    drawn = np.asarray(jnp.take_along_axis(p[:, :2], drafts[..., None], -1))[..., 0].prod(1) > 0
    np.testing.assert_allclose(np.asarray(block.chance)[drawn, 2], 1, atol=1e-6)


@pytest.mark.slow
def test_blocks_and_tokens_agree_for_greedy_rows_and_for_argmax_drafts():
    rng = np.random.default_rng(4)
    B = 64
    logits = jnp.asarray(rng.normal(0, 2, (B, J + 1, V)), jnp.float32)
    drafts = jnp.asarray(rng.integers(0, V, (B, J)), jnp.int32)
    q = jnp.asarray(rng.dirichlet(np.ones(V), (B, J)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(J + 1), (B, J + 1))
    greedy, drawn = params(B, temperature=0.0), params(B, temperature=1.0)
    for probs, own in ((q, greedy), (None, drawn)):
        results = [rule(logits, drafts, probs, positions, own) for rule in (verify, verify_blocks)]
        for token, block in zip(*results, strict=True):
            np.testing.assert_array_equal(token, block)


def test_each_round_has_uniforms_of_its_own():
    """A block's end depends on uniforms of later positions, which a later round tests."""
    keys, positions = request_keys(params(1)), jnp.arange(8)[None]
    rounds = [block_uniforms(keys, positions, jnp.array([newest])) for newest in (3, 4, 3)]
    assert (rounds[0] != rounds[1]).all()
    assert (rounds[0] == rounds[2]).all()
    assert (rounds[0] != accept_uniforms(keys, positions)).all()


def test_a_block_without_drafts_is_a_token_of_the_target():
    """Rounds with K = 0 are those of adaptive K."""
    p = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(V), size=(2, 1)), jnp.float32)
    none = jnp.zeros((2, 0), jnp.int32)
    law, *_ = block_law(p, none, jnp.zeros((2, 0, V)), jnp.zeros(2, jnp.int32))
    assert law.shape == (2, 1)


def test_drafts_behind_one_without_a_law_count_as_none():
    """The law of draft 2 is NaN: the outcome is that of one draft."""
    rng = np.random.default_rng(4)
    p_tree, q_tree = (random_tree(rng, 4, depth) for depth in (3, 2))
    q_tree = [q_tree[0], np.full_like(q_tree[1], np.nan), np.full_like(q_tree[2], np.nan)]
    drafts = drafts_of_all(4, 3)
    p, q = laws_along(p_tree, drafts, 4), laws_along([*q_tree], drafts, 3)
    given = (jnp.asarray(p, jnp.float32), jnp.asarray(drafts), jnp.asarray(q, jnp.float32))
    block = block_law(*given, jnp.full(len(drafts), 3))
    wanted = block_law(*given, jnp.full(len(drafts), 1))
    np.testing.assert_array_equal(block.chance, wanted.chance)
    np.testing.assert_array_equal(block.residual, wanted.residual)
    assert np.isfinite(block.residual).all()
