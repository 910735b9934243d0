"""The tokens that top-k, top-p and min-p keep, against a sort in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from peagle_jax.method.sampling import cutoffs

V = 300
INF = np.inf


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The form of GPUs, whose passes are no loop."""
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")


def cutoffs_of(logits, *rules) -> np.ndarray:
    """`cutoffs` of rows [R, V] with rules (temperature, top_k, top_p, min_p) per row."""
    temperature, top_k, top_p, min_p = (np.array(x) for x in zip(*rules, strict=True))
    floats = (x.astype(np.float32) for x in (temperature, top_p, min_p))
    temperature, top_p, min_p = floats
    # A new function, so that nothing compiled before is used.
    return np.asarray(
        jax.jit(lambda *args: cutoffs(*args))(logits, temperature, top_k, top_p, min_p)
    )


def scaled_row(row, temperature) -> np.ndarray:
    """Scaled logits, rounded to float32 as the sampler's: equal ones are ties."""
    with np.errstate(over="ignore"):
        return (row - row.max()) * (np.float32(1) / np.float32(temperature or 1))


def kept_rows(logits, rules) -> np.ndarray:
    found = cutoffs_of(logits, *rules)
    scaled = [scaled_row(row, rule[0]) for row, rule in zip(logits, rules, strict=True)]
    return np.stack(scaled) >= found[:, None]


def definition(row, temperature, top_k=0, top_p=1.0, min_p=0.0) -> tuple[np.ndarray, np.ndarray]:
    """The tokens kept, and all probabilities among those that top-k keeps."""
    scaled = scaled_row(row, temperature).astype(np.float64)
    ordered = np.sort(scaled)[::-1]
    kept = scaled >= ordered[top_k - 1] if 0 < top_k < len(row) else np.ones(len(row), bool)
    weights = np.where(kept, np.exp(scaled), 0)
    if (top_p := np.float32(top_p)) < 1:
        order = np.argsort(-scaled, kind="stable")
        reached = np.cumsum(weights[order]) >= float(top_p) * weights.sum()
        if reached.any():
            kept &= scaled >= scaled[order[np.argmax(reached)]]
    if min_p > 0:
        kept &= scaled >= np.log(np.float32(min_p))
    return kept, weights / weights.sum()


def check(logits, rules) -> None:
    """Equal tokens; with top-p up to the rounding of a sum."""
    for found, row, rule in zip(kept_rows(logits, rules), logits, rules, strict=True):
        wanted, probs = definition(row, *rule)
        assert found[np.argmax(row)]
        if (found != wanted).any():
            top_p, rounding = float(np.float32(rule[2])), 2e-6
            assert top_p < 1, rule
            scaled = scaled_row(row, rule[0])
            least = scaled[found].min()
            assert (found == (scaled >= least)).all()
            assert probs[found].sum() > top_p - rounding, rule
            assert probs[scaled > least].sum() < top_p + rounding, rule


RULES = [
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.7, 40, 1.0, 0.0),
    (1.0, V, 1.0, 0.0),
    (1.0, V + 1, 1.0, 0.0),
    (1.0, 2**31 - 1, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.6, 0, 0.31, 0.0),
    (1.0, 0, 1e-45, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 0.999999, 0.0),
    (100.0, 0, 0.999999, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.8, 20, 0.8, 0.0),
    (1.5, 50, 0.95, 0.02),
    (1e-6, 20, 0.9, 0.0),
    (1e-6, 299, 1.0, 0.0),
    (100.0, 77, 0.5, 0.0),
    (0.0, 20, 0.9, 0.1),
    (0.0, 0, 1.0, 0.0),
]


def random_rows(kind: str, count: int, seed: int, width: int = V) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 3, (count, width)).astype(np.float32)
    if kind == "ties":
        return rng.integers(-3, 4, (count, width)).astype(np.float32)
    if kind == "masked":  # more and more tokens, at last all but one
        for i, row in enumerate(rows):
            row[rng.permutation(width)[: round((width - 1) * i / (count - 1))]] = -INF
    if kind == "one token":
        rows[:, : width - 1] = -INF
    if kind == "far apart":  # scaled logits that overflow, and weights that underflow
        rows *= 1e30
    if kind == "alike":
        rows = 1 + rows * 1e-6
    return rows


@pytest.mark.sampled(3, slow=3)
@pytest.mark.parametrize("kind", ["distinct", "ties", "masked", "one token", "far apart", "alike"])
def test_the_tokens_kept_are_those_of_a_sort(kind, num_cases):
    for case in range(num_cases("filtered rows", 3)):
        check(random_rows(kind, len(RULES), case), RULES)


def test_ties_at_the_border_are_kept_and_count_for_top_p():
    """Three tokens tie at the border of top-k = 2: a quarter each, not a half."""
    row = np.float32([[2, 2, -1, 2, 0, 2]])
    assert kept_rows(row, [(1.0, 2, 1.0, 0.0)]).tolist() == [[True, True, False, True, False, True]]
    row = np.float32([[3, 2, 2, 2, -5, 2]])  # e / (e + 4) is 0.405
    assert kept_rows(row, [(1.0, 2, 0.41, 0.0)])[0].sum() == 5
    assert kept_rows(row, [(1.0, 2, 0.40, 0.0)])[0].sum() == 1


def test_rows_that_are_no_distribution_leave_the_others_alone():
    """Rows with NaN, or without a finite maximum; the engine flags them by other means."""
    logits = random_rows("distinct", len(RULES), 4)
    wanted = cutoffs_of(logits, *RULES)
    bad = logits.copy()
    bad[2, 5] = bad[6] = np.nan
    bad[8, 7] = INF
    bad[13] = -INF
    found = cutoffs_of(bad, *RULES)
    others = np.delete(np.arange(len(RULES)), [2, 6, 8, 13])
    np.testing.assert_array_equal(found[others], wanted[others])


@pytest.mark.sampled(4, slow=1)
@pytest.mark.parametrize("size", [1, 2, 2047, 2048, 2049, 8192])
def test_any_size_of_vocabulary(size):
    """Sums are over spans of 2,048 columns."""
    logits = np.random.default_rng(size).normal(0, 2, (3, size)).astype(np.float32)
    check(logits, [(1.0, 0, 0.9, 0.0), (1.0, 100, 0.8, 0.0), (1.0, 128, 1.0, 0.0)])


def test_cutoffs_without_a_loop_are_the_same(on_a_gpu):
    """Up to rounding: sums of other passes may be added in another order."""
    for kind in ("distinct", "ties"):
        check(random_rows(kind, len(RULES), 9), RULES)


def test_on_a_gpu_nothing_is_sorted_and_nothing_loops(on_a_gpu):
    """A sort or a loop would lie outside of a CUDA graph, or be slow."""
    rule = jnp.ones(4)
    code = (
        jax.jit(lambda *rules: cutoffs(*rules))
        .lower(jnp.zeros((4, V)), rule, jnp.ones(4, int), rule, rule)
        .as_text()
    )
    assert "stablehlo.reduce" in code
    assert "sort" not in code
    assert "while" not in code
