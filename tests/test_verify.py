"""The acceptance rule has exactly the target's law.

The exact tests replace every random number by a grid. All probabilities are quarters, so acceptance
and residual probabilities are multiples of 1/12: with twelve midpoints for each random number the
law is a count, without sampling error.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.method import verify as rule
from peagle_jax.method.sampling import probabilities
from peagle_jax.method.verify import (
    Verdict,
    largest,
    verify,
    verify_blocks,
    verify_greedy,
    verify_sampled,
)
from peagle_jax.parallel.vocabulary import argmax
from tests.laws import check_law
from tests.request_params import request_params

V, J = 4, 2
GRID = (np.arange(12) + 0.5) / 12

# The target: p1, then p2 given the first token, then p3 given two. Zeros are there on purpose.
P1 = np.array([2, 1, 1, 0]) / 4
P2 = np.array([[1, 1, 1, 1], [0, 4, 0, 0], [3, 0, 0, 1], [0, 2, 2, 0]]) / 4
P3 = np.stack([np.roll(P2, i, axis=1) for i in range(V)])
# The drafter, parallel: the second row does not depend on the first draft. It proposes token 3
# first, which the target never says, and never token 1, which the target may say.
Q1 = np.array([1, 0, 2, 1]) / 4
Q2 = np.array([2, 1, 0, 1]) / 4


def target_law() -> np.ndarray:
    """[V, V, V] law of the next three tokens."""
    return P1[:, None, None] * P2[:, :, None] * P3


def draw_on_grid(weights, uniforms):
    """`sample_rows` by inverse cumulative distribution; the "keys" are numbers in (0, 1)."""
    cumulative = jnp.cumsum(weights, axis=-1)
    return (uniforms[:, None] * cumulative[:, -1:] >= cumulative).sum(-1).astype(jnp.int32)


def emitted_law(tokens: np.ndarray, count: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Law [V, V, V] of the next three tokens: emitted ones, the rest left to the target."""
    law = np.zeros((V, V, V))
    for (a, b, c), n, w in zip(tokens, count, weight, strict=True):
        if n == 3:
            law[a, b, c] += w
        elif n == 2:
            law[a, b] += w * P3[a, b]
        else:
            law[a] += w * P2[a][:, None] * P3[a]
    return law


def verify_table(p, drafts, *rest):
    """`verify_sampled` of distributions [B, J+1, V] that are all known."""
    row = lambda n: jnp.take_along_axis(p, n[:, None, None], axis=1)[:, 0]
    p_draft = jnp.take_along_axis(p[:, :-1], drafts[..., None], axis=-1)[..., 0]
    return verify_sampled(p_draft, row, drafts, *rest)


@pytest.mark.sampled(2, slow=2)
@pytest.mark.parametrize("num_draft", [0, 1, 2])
@pytest.mark.parametrize("mode", ["argmax", "sample"])
def test_emitted_tokens_have_exactly_the_targets_joint_law(mode, num_draft, monkeypatch):
    monkeypatch.setattr(rule, "sample_rows", draw_on_grid)
    pairs = itertools.product(range(V), repeat=J) if mode == "sample" else [(2, 0)]
    rows = np.array([(*d, *u) for d in pairs for u in itertools.product(range(12), repeat=J + 1)])
    drafts, uniforms, emit = rows[:, :2], GRID[rows[:, 2:4]], GRID[rows[:, 4]]
    first, second = drafts.T
    p = np.stack([np.broadcast_to(P1, (len(rows), V)), P2[first], P3[first, second]], axis=1)
    q = np.broadcast_to(np.stack([Q1, Q2]), (len(rows), J, V)) if mode == "sample" else None
    tokens, count, _ = verify_table(
        jnp.asarray(p, jnp.float32),
        jnp.asarray(drafts, jnp.int32),
        None if q is None else jnp.asarray(q, jnp.float32),
        jnp.full(len(rows), num_draft),
        jnp.asarray(uniforms, jnp.float32),
        jnp.broadcast_to(jnp.asarray(emit, jnp.float32)[:, None], (len(rows), J + 1)),
    )
    assert np.asarray(count).max() == num_draft + 1
    assert np.asarray(count).min() == 1
    weight = Q1[first] * Q2[second] if mode == "sample" else np.ones(len(rows))
    law = emitted_law(np.asarray(tokens), np.asarray(count), weight / 12**3)
    np.testing.assert_allclose(law, target_law(), atol=1e-12)


def params(B: int, *, temperature=1.0, num_draft=J, **filters):
    seed = jax.random.key_data(jax.random.split(jax.random.key(1), B))
    return request_params(B, seed=seed, temperature=temperature, num_draft=num_draft, **filters)


jitted = jax.jit(verify)
jitted_blocks = jax.jit(verify_blocks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["argmax", "sample", "blocks"])
def test_the_rule_with_its_own_random_numbers_has_the_law_too(mode, num_cases):
    """30000 requests or more over the outcomes of two tokens, at temperature 2.

    At level 1e-3 with at most 19 degrees of freedom a chi-square test of this size finds an effect
    of w = 0.045 (a total variation of about 0.02) with a power of 0.99.
    """
    B = num_cases("sampled rounds against the target's law", 30_000, least=30_000)
    temperature = 2.0
    rng = np.random.default_rng(0)
    table = rng.normal(0, 2, (1 + V, V))  # logits of the first row, and of the second by token
    p = np.asarray(probabilities(jnp.asarray(table), jnp.full(1 + V, temperature)), np.float64)
    q = rng.dirichlet(np.ones(V))
    first = np.full(B, 1) if mode == "argmax" else rng.choice(V, B, p=q)
    logits = np.stack([np.broadcast_to(table[0], (B, V)), table[1 + first]], axis=1)
    probs = None if mode == "argmax" else np.broadcast_to(q, (B, 1, V)).astype(np.float32)
    tokens, count, _ = (jitted_blocks if mode == "blocks" else jitted)(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(first[:, None], jnp.int32),
        probs,
        jnp.broadcast_to(jnp.array([7, 8]), (B, 2)),
        params(B, temperature=temperature, num_draft=1),
    )
    tokens, count = np.asarray(tokens), np.asarray(count)
    assert 0.15 < (count == 2).mean() < 0.9
    accepted = count == 2
    share = p[0] * (np.arange(V) == 1) if mode == "argmax" else np.minimum(p[0] / q, 1) * q
    expected = np.concatenate([(share[:, None] * p[1:]).ravel(), p[0] - share])
    observed = np.concatenate(
        [
            np.bincount(tokens[accepted, 0] * V + tokens[accepted, 1], minlength=V * V),
            np.bincount(tokens[~accepted, 0], minlength=V),
        ]
    )
    assert observed[expected < 1e-12].sum() == 0
    check_law(observed, expected * B)


def one_row(p, q, drafts, u, num_draft=None) -> tuple[list[int], int]:
    """Verdict of a single request; its emitted token is drawn at the middle of the residual."""
    count = len(drafts)
    verdict = verify_table(
        jnp.asarray(p, jnp.float32)[None],
        jnp.asarray(drafts, jnp.int32)[None].reshape(1, count),
        None if q is None else jnp.asarray(q, jnp.float32)[None],
        jnp.array([count if num_draft is None else num_draft]),
        jnp.asarray(u, jnp.float32)[None].reshape(1, count),
        jnp.full((1, count + 1), 0.5),
    )
    return verdict.tokens[0].tolist(), int(verdict.count[0])


@pytest.fixture
def grid(monkeypatch):
    monkeypatch.setattr(rule, "sample_rows", draw_on_grid)


@pytest.mark.parametrize("q", [None, [[0, 1, 0, 0]]])
def test_a_uniform_of_exactly_zero_accepts_no_impossible_token(grid, q):
    p = [[0.5, 0, 0.5, 0], [0.25] * 4]
    assert one_row(p, q, [1], [0.0])[1] == 1
    assert one_row(p, q, [1], [0.0])[0][0] in (0, 2)


def test_a_drafter_that_is_the_target_is_always_accepted(grid):
    almost_one = float(np.nextafter(np.float32(1), np.float32(0)))
    rng = np.random.default_rng(0)
    for p in rng.dirichlet(np.ones(V), 50).astype(np.float32):
        for draft in range(V):
            tokens, count = one_row([p, [0, 0, 0, 1]], [p], [draft], [almost_one])
            assert (tokens, count) == ([draft, 3], 2)


def test_a_rejection_without_residual_falls_back_to_the_target(grid):
    """Rounding can leave p below q everywhere; the token then comes from p."""
    p = np.array([0.5, 0.25, 0.25, 0], np.float32)
    q = np.nextafter(p, np.float32(1))
    q[3] = 0
    almost_one = float(np.nextafter(np.float32(1), np.float32(0)))
    tokens, count = one_row([p, [1, 0, 0, 0]], [q], [2], [almost_one])
    assert count == 1
    assert tokens[0] == 1  # the median of p


@pytest.mark.parametrize("q", [None, [[0, 0, 1, 0]] * 3])
def test_past_a_requests_own_drafts_the_next_token_is_the_targets(grid, q):
    """Row 1 is the bonus of a request with one draft, though drafts of others go on there."""
    p = [[0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert one_row(p, q, [2, 2, 1], [0.0] * 3, num_draft=1) == ([2, 2, 1, 0], 2)
    assert one_row(p, q, [2, 2, 1], [0.0] * 3, num_draft=0) == ([2, 2, 1, 0], 1)
    tokens, count = one_row([[0.25] * 4] * 4, q, [2, 2, 1], [0.9] * 3, num_draft=0)
    assert (tokens[0], count) == (2, 1)  # at 0.5 of all four tokens; without token 2 it would be 1


def test_without_drafts_the_rule_is_plain_sampling(grid):
    assert one_row([[0, 0.25, 0.5, 0.25]], None, [], []) == ([2], 1)


def random_rows(B: int, seed: int, vocab: int = 7, drafts: int = 3):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (B, drafts + 1, vocab)).astype(np.float32)
    best = logits.argmax(-1)[:, :drafts]
    guess = np.where(rng.random((B, drafts)) < 0.7, best, rng.integers(0, vocab, (B, drafts)))
    return logits, guess.astype(np.int32), rng.integers(0, drafts + 1, B).astype(np.int32)


def check_leading(one: Verdict, other: Verdict) -> None:
    """Equal counts, and equal tokens as far as they count."""
    (tokens, count, _), (other_tokens, other_count, _) = one, other
    assert np.array_equal(count, other_count)
    real = np.arange(tokens.shape[1]) < np.asarray(count)[:, None]
    assert np.array_equal(np.where(real, tokens, 0), np.where(real, other_tokens, 0))


def test_greedy_is_the_general_law_of_a_one_hot_target():
    logits, drafts, num_draft = random_rows(200, 0)
    one_hot = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1])
    uniforms = np.random.default_rng(1).random(drafts.shape, np.float32)
    keys = jax.random.split(jax.random.key(0), (200, 4))
    want = verify_greedy(logits.argmax(-1), drafts, num_draft)
    check_leading(verify_table(one_hot, drafts, None, num_draft, uniforms, keys), want)
    assert set(want.count.tolist()) == {1, 2, 3, 4}


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("with_probs", [False, True])
def test_greedy_rows_of_a_mixed_batch_are_greedy_and_rows_do_not_mix(with_probs):
    B = 64
    logits, drafts, num_draft = random_rows(B, 2)
    temperature = np.where(np.arange(B) % 2, 0.9, 0).astype(np.float32)
    q = None
    if with_probs:  # a greedy request's drafts are one-hot, those of others are sampled
        q = np.asarray(jax.nn.softmax(logits[:, :3] + 0.5), np.float32)
        q = np.where(temperature[:, None, None] > 0, q, np.eye(7, dtype=np.float32)[drafts])
    positions = np.arange(B)[:, None] + np.arange(4)
    chosen = params(B, temperature=temperature, num_draft=num_draft)
    mixed = jitted(logits, drafts, q, positions, chosen)
    cold = temperature == 0
    greedy = verify_greedy(logits.argmax(-1), drafts, num_draft)
    pick = lambda verdict, rows: Verdict(*(np.asarray(x)[rows] for x in verdict[:2]))
    check_leading(pick(mixed, cold), pick(greedy, cold))
    order = np.random.default_rng(3).permutation(B)
    moved = jax.tree.map(lambda x: np.asarray(x)[order], (logits, drafts, q, positions, chosen))
    check_leading(jitted(*moved), pick(mixed, order))


def test_an_all_greedy_batch_takes_the_shortcut_with_the_same_result():
    logits, drafts, num_draft = random_rows(64, 4)
    positions = np.tile(np.arange(4), (64, 1))
    got = jitted(logits, drafts, None, positions, params(64, temperature=0.0, num_draft=num_draft))
    check_leading(got, verify_greedy(logits.argmax(-1), drafts, num_draft))


def test_filtered_tokens_are_never_emitted():
    """top-k 2 at every row: whatever the drafts, what comes out is among the two best."""
    positions = np.tile(np.arange(4), (64, 1))
    for seed in range(5, 15):
        logits, drafts, num_draft = random_rows(64, seed)
        chosen = params(64, temperature=1.5, num_draft=num_draft, top_k=2)
        tokens, count, _ = (np.asarray(x) for x in jitted(logits, drafts, None, positions, chosen))
        allowed = np.argsort(-logits, axis=-1)[..., :2]
        real = np.arange(4) < count[:, None]
        assert (tokens[..., None] == allowed).any(-1)[real].all()


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize("with_probs", [False, True])
def test_a_requests_bits_do_not_depend_on_the_filters_of_others(with_probs):
    B, vocab = 64, 4000
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 1.5, (B, J + 1, vocab)).astype(np.float32)
    drafts = logits.argmax(-1)[:, :J].astype(np.int32)
    q = np.asarray(jax.nn.softmax(logits[:, :J] * 0.5), np.float32) if with_probs else None
    positions = np.arange(B)[:, None] + np.arange(J + 1)
    others = np.arange(B) >= B // 2
    top_k = np.where(others, 3, 0)
    alone = jitted(logits, drafts, q, positions, params(B))
    beside = jitted(logits, drafts, q, positions, params(B, top_k=top_k))
    pick = lambda verdict, rows: Verdict(*(np.asarray(x)[rows] for x in verdict[:2]))
    check_leading(pick(beside, ~others), pick(alone, ~others))
    assert (np.asarray(beside.tokens) != np.asarray(alone.tokens))[others].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [17, 4160])
def test_the_largest_logit_and_its_index_are_found_together(width, dtype):
    rng = np.random.default_rng(8)
    logits = jnp.asarray(rng.integers(-3, 4, (40, 3, width)), dtype)  # many are equal
    odd = [jnp.nan, jnp.inf, -jnp.inf]
    for row, number in enumerate(odd):
        logits = logits.at[row, 0, 5].set(number).at[row, 1].set(number).at[row, 2, 3:9].set(number)
    index, value = jax.jit(largest)(logits)
    np.testing.assert_array_equal(index, jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(index, jax.jit(argmax)(logits))
    wide = lambda x: np.asarray(x, np.float32)
    np.testing.assert_array_equal(wide(value), wide(logits).max(-1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
def test_rows_without_a_finite_maximum_are_flagged_and_no_others(temperature, top_k):
    logits, drafts, num_draft = random_rows(6, 9)
    logits[0, 1, 3] = np.nan
    logits[1, 2, 0] = np.inf
    logits[2, 3] = -np.inf
    logits[3, 0, 2] = -np.inf  # a token of probability 0, and not the largest
    chosen = params(6, temperature=temperature, num_draft=num_draft, top_k=top_k)
    positions = np.tile(np.arange(4), (6, 1))
    verdict = jitted(logits, drafts, None, positions, chosen)
    want = np.ones((6, 4), bool)
    want[0, 1] = want[1, 2] = want[2, 3] = False
    np.testing.assert_array_equal(verdict.finite, want)
    assert ((verdict.count >= 1) & (verdict.count <= 4)).all()
    assert ((verdict.tokens >= 0) & (verdict.tokens < 7)).all()
