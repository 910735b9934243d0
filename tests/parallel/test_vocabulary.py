"""Reductions over a vocabulary that several devices share equal those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from peagle_jax.method import sampling
from peagle_jax.method.prompt_scores import score_prompt
from peagle_jax.method.selector import candidates
from peagle_jax.method.verify import largest, verify
from peagle_jax.parallel import partition, vocabulary
from peagle_jax.parallel.partition import AXIS
from peagle_jax.parallel.shares import vocabulary_rows
from tests.request_params import request_params

V = 43


def on_devices(count: int, f, logits, *values):
    """f(logits, *values) with columns of logits on `count` devices; all results are compared."""
    width = vocabulary_rows(logits.shape[-1], count)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, count * width - logits.shape[-1])]
    wide = jnp.pad(logits, padding, constant_values=-jnp.inf)
    columns = PartitionSpec(*[None] * (logits.ndim - 1), AXIS)

    def local(logits, values):
        with partition.over(count):
            return jax.tree.map(lambda x: x[None], f(logits, *values))

    mesh = Mesh(np.array(jax.devices()[:count]), (AXIS,))
    specs = dict(in_specs=(columns, PartitionSpec()), out_specs=PartitionSpec(AXIS))
    found = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))(wide, values)
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    return jax.tree.map(lambda x: x[0], found)


def rows_with_ties(rng) -> np.ndarray:
    """Rows of few different values, some with NaN, infinity, or nothing above -inf."""
    logits = rng.integers(-3, 4, (16, V)).astype(np.float32)
    logits[1, 40] = logits[2, 3] = logits[2, 30] = np.nan
    logits[3, 20] = np.inf
    logits[4] = -np.inf
    logits[5, :40] = -np.inf
    return logits


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize("count", [2, 4])
def test_the_largest_is_that_of_the_whole_row(count, num_cases):
    for case in range(num_cases("rows with ties over devices", 4)):
        logits = rows_with_ties(np.random.default_rng(case))
        for f in (largest, vocabulary.argmax, vocabulary.maximum):
            for one, other in zip(
                jax.tree.leaves(on_devices(count, f, logits)),
                jax.tree.leaves(f(logits)),
                strict=True,
            ):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("width", [1, 128, 300, 150_000])
def test_totals_are_sums_with_small_errors(width):
    """150,000 numbers that are added one after the other are off by 1e-5."""
    arrays = np.random.default_rng(0).random((3, 2, width)).astype(np.float32)
    totals = lambda arrays: vocabulary.totals([vocabulary.in_spans(x, 0) for x in arrays])
    found = jax.jit(totals)(list(arrays))
    np.testing.assert_allclose(found, arrays.astype(np.float64).sum(-1), rtol=3e-6)
    counts = (arrays > 0.5).astype(np.int32)
    np.testing.assert_array_equal(totals(counts), counts.sum(-1))


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize("count", [2, 8])
def test_tokens_are_found_on_their_devices(count):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, V)).astype(np.float32))
    tokens = jnp.array([0, 42, 31, 32, 7])
    found = on_devices(count, vocabulary.at_tokens, logits, tokens)
    np.testing.assert_array_equal(found, vocabulary.at_tokens(logits, tokens))


@pytest.mark.parametrize("count", [2, 8])
def test_candidates_of_a_selector_are_those_of_the_whole_row(count, num_cases):
    """Also where a device has fewer columns than there are candidates."""
    for case in range(num_cases("rows with ties over devices", 4)):
        logits = rows_with_ties(np.random.default_rng(case))
        found = on_devices(count, lambda x: candidates(x, V), logits)
        for one, other in zip(found, candidates(logits, V), strict=True):
            np.testing.assert_array_equal(one, other)
        assert (found[0] < V).all()


def rules(rows: int, **changes):
    seed = [[0, row] for row in range(rows)]
    return request_params(rows, **dict(seed=seed, temperature=1.0, num_draft=2) | changes)


@pytest.mark.sampled(1, slow=4)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        dict(temperature=0.0),
        dict(),
        dict(top_k=5),
        dict(top_p=0.7),
        dict(min_p=0.2, temperature=0.6),
        dict(top_k=1000, top_p=0.999),
    ],
)
def test_a_verdict_is_that_of_one_device(count, changes):
    """The same tokens from the same seeds: the noise of a token does not depend on the devices."""
    B, J = 64, 2
    rng = np.random.default_rng(3)
    logits = jnp.asarray(2 * rng.normal(size=(B, J + 1, V)).astype(np.float32))
    drafts = jnp.asarray(rng.integers(0, V, (B, J), dtype=np.int32))
    positions = jnp.broadcast_to(jnp.arange(J + 1), (B, J + 1)) + 10
    params = rules(B, **changes)
    rule = lambda logits, drafts, positions, params: verify(logits, drafts, None, positions, params)
    found = on_devices(count, rule, logits, drafts, positions, params)
    wanted = rule(logits, drafts, positions, params)
    np.testing.assert_array_equal(found.count, wanted.count)
    real = np.arange(J + 1) < np.asarray(wanted.count)[:, None]
    np.testing.assert_array_equal(np.where(real, found.tokens, 0), np.where(real, wanted.tokens, 0))


def filters(rows: int) -> tuple:
    """Temperature, top-k, top-p and min-p of rows, each kind of rule in turn."""
    kinds = [
        (0.8, 6, 1.0, 0.0),
        (1.0, V, 1.0, 0.0),
        (1.0, 1000, 1.0, 0.0),
        (100.0, 30, 1.0, 0.0),
        (1e-6, 12, 1.0, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.0, 3, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
    ]
    chosen = [kinds[i % len(kinds)] for i in range(rows)]
    temperature, top_k, top_p, min_p = (np.array(x) for x in zip(*chosen, strict=True))
    return temperature.astype(np.float32), top_k, top_p.astype(np.float32), min_p


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize("count", [2, 4])
def test_cutoffs_are_those_of_one_device(count, num_cases):
    """Also of ties at the border of two devices, NaN, hardly any token, and padding."""
    for case in range(num_cases("rows with ties over devices", 2)):
        rng = np.random.default_rng(case)
        logits = np.concatenate([rows_with_ties(rng), rng.normal(0, 2, (16, V))]).astype(np.float32)
        rule = filters(len(logits))
        found = on_devices(count, sampling.cutoffs, logits, *rule)
        np.testing.assert_array_equal(found, jax.jit(sampling.cutoffs)(logits, *rule))


def test_a_pass_of_cutoffs_is_one_message():
    rule = filters(3)
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    specs = dict(in_specs=PartitionSpec(None, AXIS), out_specs=PartitionSpec(), check_vma=False)
    local = jax.shard_map(lambda logits: sampling.cutoffs(logits, *rule), mesh=mesh, **specs)
    with partition.over(2):
        code = jax.jit(local).lower(np.zeros((3, 64), np.float32)).as_text()
    # The maximum; of each filter the first pass, and the others in a loop.
    assert code.count("stablehlo.all_gather") == 1 + 2 * 2


def check_scores(found, wanted) -> None:
    """Tokens and ranks are equal, log-probabilities up to the order of a sum."""
    for one, other in zip(found, wanted, strict=True):
        if one.dtype == jnp.int32:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=2e-6)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize(("count", "num_top"), [(2, 5), (4, V), (8, 20)])
def test_log_probabilities_are_those_of_one_device(count, num_top, num_cases):
    """With ties, and more tokens than a device has columns; never padding."""
    for case in range(num_cases("rows with ties over devices", 2)):
        rng = np.random.default_rng(case)
        logits = rng.integers(-3, 4, (4, 4, V)).astype(np.float32)
        logits[1, :, :40] = logits[2, 3, 1:] = logits[3, 0, :-1] = -np.inf
        tokens = rng.integers(0, V, (4, 4), dtype=np.int32)

        def score(logits, tokens):
            logprobs = vocabulary.log_softmax(logits)
            return sampling.at_tokens(logprobs, tokens), *vocabulary.top(logprobs, num_top)

        found = on_devices(count, score, logits, tokens)
        check_scores(found, score(logits, tokens))
        assert (found[1] < V).all()


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize("count", [2, 8])
def test_scores_of_a_prompt_are_those_of_one_device(count):
    """70 rows are two blocks."""
    rng = np.random.default_rng(2)
    weight = rng.integers(-1, 2, (6, V)).astype(np.float32)  # so there are ties
    hidden = rng.integers(-2, 3, (2, 35, 6)).astype(np.float32)
    following = rng.integers(0, V, (2, 35), dtype=np.int32)

    def score(weight, hidden, following):
        finite = jnp.where(jnp.isfinite(weight), weight, 0)
        unembed = lambda rows: vocabulary.real(rows @ finite, V)
        return score_prompt(unembed, hidden, following, 10)

    given = weight, hidden, following
    check_scores(on_devices(count, score, *given), score(*given))
