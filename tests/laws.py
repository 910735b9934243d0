"""Whether what was drawn has a law."""

import numpy as np
from scipy import stats


def check_law(observed, expected) -> None:
    """Chi-square test at level 1e-3; rare outcomes are pooled, as the approximation needs."""
    observed, expected = np.ravel(observed), np.ravel(expected)
    common = expected >= 5
    f_obs = np.append(observed[common], observed[~common].sum())
    f_exp = np.append(expected[common], expected[~common].sum())
    some = f_exp >= 5
    assert some.sum() > 3
    f_obs, f_exp = f_obs[some], f_exp[some]
    assert stats.chisquare(f_obs, f_exp * f_obs.sum() / f_exp.sum()).pvalue > 1e-3
