"""The cutoffs of top-k and top-p: the kernel against its definition, a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cutoffs.api import cutoffs, has_kernel
from pallas_kernels.cutoffs.mosaic_gpu import _CutoffPlan
from peagle_jax.method import sampling
from peagle_jax.parallel import partition
from tests import test_sampling_filters

INF = np.inf
RULES = [  # scale, top_k, top_p
    (1.0, 0, 1.0),
    (1.0, 1, 1.0),
    (1 / 0.7, 20, 1.0),
    (1.0, 200, 1.0),
    (1.0, 2**31 - 1, 1.0),
    (1.0, 0, 0.9),
    (1 / 0.6, 0, 0.31),
    (1.0, 0, 1e-6),
    (0.01, 0, 0.999999),
    (1.0, 0, 0.0),
    (1.25, 20, 0.8),
    (1.0, 500, 0.99),
    (1e6, 20, 0.9),
]


def random_rows(kind: str, width: int, count: int) -> np.ndarray:
    rows = test_sampling_filters.random_rows(kind, count, seed=width, width=width)
    if kind == "one thread":  # has the largest logits, so that the few do not suffice
        rows[:, 77::128] += 100
    if kind == "sorted":
        rows = np.sort(rows)
    return rows


def found_by(implementation, rows, rules) -> np.ndarray:
    columns = zip((np.float32, np.int32, np.float32), zip(*rules, strict=True), strict=True)
    operands = [jnp.asarray(np.array(values, dtype)) for dtype, values in columns]
    return np.asarray(cutoffs(jnp.asarray(rows), *operands, implementation=implementation))


def check(rows, rules, limits) -> None:
    """Equal limits; with top-p up to the rounding of a sum."""
    wanted = found_by("reference", rows, rules)
    for row, rule, limit, other in zip(rows, rules, limits, wanted, strict=True):
        if limit == other:
            continue
        scale, top_k, top_p = map(np.float32, rule)
        assert top_p < 1, rule
        below = np.abs((row - row.max()) * scale)
        assert limit in below, rule
        kept = below <= np.sort(below)[int(top_k) - 1] if top_k else np.full(len(row), True)
        weights = np.where(kept, np.exp(-below.astype(np.float64)), 0)
        share = lambda mask, weights=weights: weights[mask].sum() / weights.sum()
        assert share(below <= limit) > top_p - 2e-6, rule
        assert share(below < limit) < top_p + 2e-6, rule


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("kind", ["distinct", "ties", "masked", "one thread", "alike", "far apart"])
@pytest.mark.usefixtures("race_free")
def test_the_kernel_is_the_reference(kind):
    rows = random_rows(kind, 8192, len(RULES))
    check(rows, RULES, found_by("mosaic_gpu", rows, RULES))


@pytest.mark.parametrize(
    ("width", "blocks"),
    [
        pytest.param(1024, 2, marks=pytest.mark.exhaustive),
        pytest.param(82_048, 8, marks=pytest.mark.slow),  # the last block has one piece less
        pytest.param(151_936, 8, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("race_free")
def test_any_width(width, blocks):
    assert _CutoffPlan.of(width).blocks == blocks
    rules = [RULES[i] for i in ((2, 5, 10, 11) if blocks < 4 else (5, 10))]
    for kind in ("distinct", "sorted")[: 2 if blocks < 4 else 1]:
        rows = random_rows(kind, width, len(rules))
        check(rows, rules, found_by("mosaic_gpu", rows, rules))


@pytest.mark.slow
@pytest.mark.usefixtures("race_free")
def test_a_row_has_the_same_bits_beside_any_others():
    """Also beside rows with NaN, infinities, and no finite logit, none of which hangs."""
    width = 20_608
    rows = random_rows("distinct", width, 7)
    rules = [RULES[i] for i in (10, 5, 2, 5, 10, 5, 0)]
    alone = [found_by("mosaic_gpu", rows[i : i + 1], rules[i : i + 1]) for i in range(3)]
    rows[3, 5] = rows[4] = np.nan
    rows[4, 7] = INF
    rows[5] = -INF
    found = found_by("mosaic_gpu", rows, rules)
    np.testing.assert_array_equal(found[:3], np.concatenate(alone))
    again = found_by("mosaic_gpu", rows[[5, 1, 3, 2]], [rules[i] for i in (5, 1, 3, 2)])
    np.testing.assert_array_equal(again[[1, 3]], found[[1, 2]])
    assert found[6] == INF


def test_equal_logits_at_the_border_are_all_kept():
    rows = np.zeros((2, 1024), np.float32)
    rows[:, :3] = 3, 2, 1  # e ** 3 of e ** 3 + e ** 2 + e + 1021 is 0.0191
    found = found_by("mosaic_gpu", rows, [(1.0, 4, 1.0), (1.0, 3, 0.5)])
    assert found.tolist() == [3, 0]


def test_the_sampler_takes_the_kernel(monkeypatch):
    """Where it exists; the limits go through min-p, and rows may have several axes."""
    taken = []

    def fake(logits, scale, top_k, top_p):
        taken.append((logits.shape, logits.dtype, scale.shape, top_p.shape))
        return jnp.full(scale.shape, 3.0)

    monkeypatch.setattr(sampling.filters, "has_kernel", lambda logits: True)
    monkeypatch.setattr(sampling.filters, "cutoffs", fake)
    logits, top_k = jnp.zeros((2, 3, 1024), jnp.bfloat16), jnp.full((2, 1), 5)
    found = sampling.cutoffs(logits, 0.5, top_k, 1.0, jnp.array([[0.0], [0.5]]))
    assert taken == [((2, 3, 1024), jnp.float32, (2, 3), (2, 3))]
    np.testing.assert_allclose(found, [[-3.0] * 3, [np.log(0.5)] * 3], rtol=1e-6)


@pytest.mark.slow
def test_devices_that_share_rows_search(monkeypatch):
    """A kernel would find the limits of one device's columns."""
    rows, halves = jnp.asarray(random_rows("distinct", 1024, 3)), (3, 2, 512)
    rules = 0.5, 20, 0.9, 0.0
    wanted = sampling.cutoffs(rows, *rules)
    monkeypatch.setattr(sampling.filters, "has_kernel", lambda logits: True)
    shared = jax.vmap(lambda part: sampling.cutoffs(part, *rules), 1, axis_name=partition.AXIS)
    with partition.over(2):
        found = shared(rows.reshape(halves))
    np.testing.assert_allclose(found, [wanted] * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("width", "dtype", "why"),
    [
        (896, jnp.float32, "896 logits"),
        (1088, jnp.float32, "1088 logits"),
        (2**18 + 128, jnp.float32, "262272 logits"),
        (1024, jnp.bfloat16, "bfloat16"),
    ],
)
def test_the_kernel_says_what_it_cannot_do(width, dtype, why):
    logits = jnp.zeros((1, width), dtype)
    operands = logits, jnp.ones(1), jnp.ones(1, jnp.int32), jnp.ones(1)
    with pytest.raises(NotImplementedError, match=why):
        cutoffs(*operands, implementation="mosaic_gpu")
    assert not has_kernel(logits)
