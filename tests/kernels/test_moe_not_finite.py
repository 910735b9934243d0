"""Rows of NaN in a mixture of experts reach no other row."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import mosaic_route
from tests.kernels.test_moe_mosaic import (
    both_chips,
    experts,
    launch,
    logits_of,
    mix,
    race_free,
    rows,
)


@pytest.mark.sampled(0, slow=1)
@race_free
@pytest.mark.parametrize(("R", "options"), [(5, dict(normalize=False)), (70, dict())])
@both_chips
def test_a_row_of_nan_stays_alone(R, options):
    """A row of NaN, one with a single NaN among its router's logits, one with an infinity there."""
    weights, x, logits = experts("bf16", E=16, F=64), rows(R), logits_of(R, 16)
    want = np.asarray(mix(x, logits, weights, **options))
    x = x.at[1].set(jnp.nan)
    logits = logits.at[1].set(jnp.nan).at[3, 7].set(jnp.nan).at[4, 2].set(jnp.inf)
    for implementation in ("mosaic_gpu", "reference"):
        got = np.asarray(mix(x, logits, weights, implementation, **options))
        assert np.isnan(got[[1, 3, 4]]).all()
        if implementation == "mosaic_gpu":
            others = [row for row in range(R) if row not in (1, 3, 4)]
            np.testing.assert_array_equal(got[others], want[others])
    _, ids, *_ = mosaic_route.route(logits, None, 4, True, launch())
    ids = np.sort(np.asarray(ids)[:, :R].T)
    assert ids.min() >= 0
    assert ids.max() < 16
    assert (np.diff(ids) > 0).all()  # no two alike
