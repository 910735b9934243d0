"""The selector: candidates, the walk over them, and its law."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import column_tiles, dispatch
from pallas_kernels.device import CPU, H200
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.method.drafter import DraftInputs, make_drafter
from peagle_jax.method.selector import rows_of, sampled_walk, top, walk
from peagle_jax.models.cache import init_cache
from tests import tiny
from tests.laws import check_law


@pytest.mark.parametrize("chip", [CPU, H200])
@pytest.mark.parametrize("size", [16, 40, 512, 513, 8192, 151936])
def test_top_gives_the_largest_values_in_order(size, chip):
    rng = np.random.default_rng(size)
    values = rng.normal(size=(2, 3, size)).astype(np.float32)
    values[0, 0, : size // 2] = np.nan
    values[1, 1] = np.round(values[1, 1])  # ties
    values[1, 2] = -np.inf
    with dispatch.assume(chip):  # the reference of a GPU may not sort
        reference = jax.jit(partial(top, implementation="reference"), static_argnums=1)
        found, largest = map(np.asarray, reference(jnp.asarray(values), 16))
    clean = np.where(np.isnan(values), -np.inf, values)
    best = np.sort(clean, axis=-1)[..., ::-1][..., :16]
    np.testing.assert_array_equal(largest, best)
    np.testing.assert_array_equal(np.take_along_axis(clean, found, -1), best)
    np.testing.assert_array_equal(found[..., 0], clean.argmax(-1))
    clear = found[np.isfinite(clean).sum(-1) >= 16]
    assert {len(set(row)) for row in clear.tolist()} == {16}, "an index was taken twice"


def walked(best: np.ndarray) -> list[int]:
    taken = [int(best[0, 0])]
    for row in best[1:]:
        taken.append(int(row[taken[-1]]))
    return taken


@pytest.mark.parametrize("num_draft", [1, 2, 7])
def test_a_walk_follows_the_best_candidate_after_each(num_draft):
    rng = np.random.default_rng(0)
    best = rng.integers(0, 5, (6, num_draft, 5)).astype(np.int32)
    taken = np.asarray(walk(jnp.asarray(best)))
    assert taken.tolist() == [walked(one) for one in best]
    rows = np.asarray(
        rows_of(jnp.asarray(best)[..., None] * jnp.ones(5, jnp.int32), jnp.asarray(taken))
    )
    assert (rows[..., 0] == taken).all(), "a row is that of the candidate before it"


def test_a_sampled_walk_has_the_law_that_it_reports(num_cases):
    """Three positions of two candidates and none of them, against the product of the conditional
    laws.

    20000 walks or more over 27 outcomes; at level 1e-3 a test of this size finds an effect of w =
    0.055 with a power of 0.99.
    """
    count = num_cases("sampled walks against their law", 20_000, least=20_000)
    J, C, temperature = 3, 2, 1.7
    rng = np.random.default_rng(1)
    scores = rng.normal(0, 2, (J, C, C)).astype(np.float32)
    values, rest = rng.normal(0, 2, (J, C)).astype(np.float32), np.float32([0.3, 0.0, 0.6])
    keys = jax.random.split(jax.random.key(5), (count, J))
    many = [jnp.broadcast_to(x, (count, *x.shape)) for x in (scores, values, 1 - rest, rest)]
    walked = jax.jit(sampled_walk)(*many[:2], tuple(many[2:]), jnp.full(count, temperature), keys)
    taken, laws = walked
    p = np.exp(np.float64(np.concatenate([scores, values[:, None]], axis=1)) / temperature)
    p *= (1 - rest)[:, None, None] / p.sum(-1, keepdims=True)
    p = np.concatenate([p, np.broadcast_to(rest[:, None, None], (J, C + 1, 1))], axis=-1)
    taken = np.asarray(taken)
    for j in range(J):
        before = taken[:, j - 1] if j else np.zeros(count, int)
        np.testing.assert_allclose(np.asarray(laws)[:, j], p[j, before, :C], atol=1e-6)
    expected = p[0, 0][:, None, None] * p[1][:, :, None] * p[2][None]
    observed = np.bincount(taken @ [9, 3, 1], minlength=27)
    assert observed.reshape(3, 3, 3)[:, C].sum() == 0, "drawn without a chance"
    is_possible = expected.ravel() > 0
    check_law(observed[is_possible], expected.ravel()[is_possible] * count)


def test_walks_at_temperature_0_take_the_argmax():
    scores = jnp.asarray(np.random.default_rng(2).normal(size=(4, 5, 6, 6)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), (4, 5))
    shares = jnp.ones((4, 5)), jnp.zeros((4, 5))
    taken, laws = sampled_walk(scores, scores[..., 0], shares, jnp.zeros(4), keys)
    np.testing.assert_array_equal(taken, walk(jnp.argmax(scores, -1)))
    assert (np.asarray(laws).max(-1) == 1).all()


def proposal(head, sampling: str = "argmax", **options):
    """Drafts of a head after random states, with the tokens' logits left to the head."""
    B, T, J = 3, 4, 5
    target = tiny.target()
    rng = np.random.default_rng(3)
    config = head.config
    width = config.num_taps * config.target_hidden_size
    inputs = DraftInputs(
        tokens=jnp.asarray(rng.integers(0, config.vocab_size, (B, T)), jnp.int32),
        taps=jnp.asarray(rng.normal(size=(B, T, width)), jnp.float32),
        num_real=jnp.array([1, 2, 4], jnp.int32),
        start=jnp.array([0, 3, 9], jnp.int32),
        page_table=1 + jnp.arange(B * 8, dtype=jnp.int32).reshape(B, 8),
        slots=jnp.arange(B, dtype=jnp.int32),
        keys=jax.random.split(jax.random.key(2), B),
        temperature=jnp.array([0.0, 1.0, 2.0]),
    )
    layers = [config.attention(i) for i in range(config.num_layers)]
    sizes = dict(max_num_seqs=B, page_size=4, max_model_len=32)
    cache = init_cache(layers, EngineConfig(num_draft=J, **sizes))
    drafter = make_drafter(head, J, sampling, **options)
    return jax.jit(lambda: drafter.propose(target, inputs, cache)[0])()


@pytest.mark.sampled(2, slow=2)
@pytest.mark.parametrize("sampling", ["argmax", "sample"])
@pytest.mark.parametrize("draft_vocab_size", [128, 50])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_tables_change_no_draft(sampling, draft_vocab_size, own_embedding):
    head = tiny.head("selector", draft_vocab_size=draft_vocab_size, own_embedding=own_embedding)
    if draft_vocab_size < head.config.vocab_size:
        head.d2t.set_value(jnp.arange(draft_vocab_size, dtype=jnp.int32))
    given, computed = proposal(head, sampling, target=tiny.target()), proposal(head, sampling)
    np.testing.assert_array_equal(given.tokens, computed.tokens)
    if sampling == "sample":
        np.testing.assert_allclose(given.probs, computed.probs, atol=1e-5)


def test_tables_are_made_in_pieces(monkeypatch):
    head, target = tiny.head("selector"), tiny.target()
    whole = head.tables(target)
    monkeypatch.setattr("peagle_jax.method.selector._CHUNK", 50)
    for one, other in zip(whole, head.tables(target), strict=True):
        assert one.shape == (head.config.draft_vocab_size, head.config.selector_rank)
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_tables_of_tiled_columns_are_made_by_compiled_products(monkeypatch):
    """Op by op, each number of the products would lie in memory."""
    product, seen = column_tiles.product, []

    def noted(x, tiles):
        seen.append(isinstance(x, jax.core.Tracer))
        return product(x, tiles)

    monkeypatch.setattr(column_tiles, "product", noted)
    head, target = tiny.head("selector", selector_rank=128), tiny.target()
    rows = head.tables(target)
    linear = head.selector.previous
    linear.weight = nnx.Param(column_tiles.arrange(linear.weight[...]))
    for one, other in zip(rows, head.tables(target), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert seen == [True]


def test_an_untrained_selector_changes_no_draft():
    head = tiny.head("selector")
    weight = head.selector.out.weight
    weight.set_value(jnp.zeros_like(weight[...]))
    with_selector, without = proposal(head), proposal(head, selector=False)
    np.testing.assert_array_equal(with_selector.tokens, without.tokens)
    laws = [proposal(head, "sample", selector=selects).probs for selects in (True, False)]
    np.testing.assert_allclose(*laws, atol=1e-6)


def test_a_selector_changes_drafts_after_the_first():
    """Random edges: the first draft, which has its true predecessor, stays."""
    head = tiny.head("selector")
    with_selector, without = (np.asarray(proposal(head, selector=s).tokens) for s in (True, False))
    np.testing.assert_array_equal(with_selector[:, 0], without[:, 0])
    assert (with_selector[:, 1:] != without[:, 1:]).any()


@pytest.mark.sampled(2, slow=0)
@pytest.mark.parametrize("draft_vocab_size", [128, 50, 8])
def test_sampled_drafts_come_with_a_law_of_all_tokens(draft_vocab_size):
    head = tiny.head("selector", draft_vocab_size=draft_vocab_size)
    if draft_vocab_size < head.config.vocab_size:
        head.d2t.set_value(jnp.arange(draft_vocab_size, dtype=jnp.int32))
    found = proposal(head, "sample")
    probs = np.asarray(found.probs)
    assert probs.shape[-1] == head.config.vocab_size
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    assert ([1, draft_vocab_size, draft_vocab_size] == (probs > 0).sum(-1).T).all()
    drawn = np.take_along_axis(probs, np.asarray(found.tokens)[..., None], -1)
    assert (drawn > 0).all()


def test_eagle3_heads_have_no_selector():
    with pytest.raises(ConfigError, match="EAGLE-3 sees its earlier drafts"):
        tiny.head("eagle3", selector_rank=8)
