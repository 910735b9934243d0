"""The walk over candidates: the kernel against its definition, and the definition by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.candidate_walk import api

SCALE = 1 / 16


def operands(drafts: int, rank: int, dtype, sequences: int = 2) -> tuple[jax.Array, ...]:
    """ids, values, states and both tables; values fall along the candidates, as those of `top`
    do."""
    keys = jax.random.split(jax.random.key(drafts), 5)
    chosen = (sequences, drafts, api.CANDIDATES)
    shapes = (sequences, drafts, rank), (100, rank), (100, rank)
    states, before, after = map(jax.random.normal, keys[2:], shapes)
    ids = jax.random.randint(keys[0], chosen, 0, 100)
    values = -jnp.sort(-jax.random.normal(keys[1], chosen), axis=-1)
    return ids, values, states, before.astype(dtype), after.astype(dtype)


def run(operands, implementation):
    found = api.candidate_walk(*operands, scale=SCALE, implementation=implementation)
    return tuple(map(np.asarray, found))


def by_hand(ids, values, states, before, after) -> tuple[np.ndarray, np.ndarray]:
    ids, values, states, before, after = (
        np.asarray(x) for x in (ids, values, states, before, after)
    )
    B, J, C = ids.shape
    edges, taken = np.zeros((B, J, C, C)), np.zeros((B, J), int)
    for b in range(B):
        for d in range(1, J):
            x = np.float64(before[ids[b, d - 1]]) + states[b, d]
            edges[b, d] = SCALE * (x / (1 + np.exp(-x))) @ np.float64(after[ids[b, d]]).T
            taken[b, d] = (values[b, d] + edges[b, d, taken[b, d - 1]]).argmax()
    return taken, edges


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("drafts", [1, 2, 7])
def test_the_definition_by_hand(drafts):
    given = operands(drafts, 32, jnp.float32)
    taken, edges = run(given, "reference")
    wanted = by_hand(*given)
    np.testing.assert_allclose(edges, wanted[1], atol=2e-6)
    np.testing.assert_array_equal(taken, wanted[0])
    assert drafts == 1 or (taken[:, 1:] > 0).any()


@pytest.mark.parametrize(
    ("drafts", "rank", "dtype"),
    [
        pytest.param(2, 64, jnp.float32, marks=pytest.mark.slow),  # a warpgroup with one draft
        (4, 64, jnp.bfloat16),  # two, one of them with a draft less
        pytest.param(7, 256, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(9, 64, jnp.float32, marks=pytest.mark.slow),  # more drafts than two each
    ],
)
@pytest.mark.usefixtures("race_free")
def test_the_kernel_is_the_reference(drafts, rank, dtype):
    given = operands(drafts, rank, dtype)
    (taken, edges), (wanted, scores) = (run(given, name) for name in ("mosaic_gpu", "reference"))
    np.testing.assert_allclose(edges, scores, atol=1e-5)
    np.testing.assert_array_equal(taken, wanted)


@pytest.mark.usefixtures("race_free")
def test_equal_candidates_are_taken_by_index():
    ids, values, states, before, after = operands(3, 64, jnp.float32)
    taken, _ = run(
        (ids, jnp.zeros_like(values), states, before, jnp.zeros_like(after)), "mosaic_gpu"
    )
    assert (taken == 0).all()


def test_candidates_without_a_chance_are_not_taken():
    """A logit of -inf, as of a row with fewer finite logits than candidates."""
    ids, values, *rest = operands(3, 64, jnp.float32)
    values = values.at[:, :, 1:].set(-jnp.inf)
    for name in ("mosaic_gpu", "reference"):
        assert (run((ids, values, *rest), name)[0] == 0).all()


@pytest.mark.parametrize(
    ("drafts", "rank", "dtype", "why"),
    [
        (17, 64, jnp.float32, "17 drafts"),
        (3, 320, jnp.float32, "rank 320"),
        (3, 64, jnp.float16, "float16"),
        (16, 256, jnp.bfloat16, "shared memory"),
    ],
)
def test_the_kernel_says_what_it_cannot_do(drafts, rank, dtype, why):
    given = operands(drafts, rank, dtype)
    with pytest.raises(NotImplementedError, match=why):
        run(given, "mosaic_gpu")
    assert run(given, None)[0].shape == (2, drafts)
