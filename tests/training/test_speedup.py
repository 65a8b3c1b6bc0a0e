"""The ratio of the closing comparison, with its interval."""

import numpy as np
import pytest

from specrl_jax.training.speedup import mean_ratio


def test_the_interval_of_five_rounds():
    """Logarithms of 2 and -1, 0, 0, 0, 1: standard error sqrt(0.1); Student's quantile for 4 degrees of freedom."""
    mean, low, high = mean_ratio(2 * np.exp([0.0, -1.0, 0.0, 1.0, 0.0]))
    half = np.exp(2.7764451 * np.sqrt(0.1))
    assert (mean, low, high) == (pytest.approx(2.0), pytest.approx(2 / half), pytest.approx(2 * half))


def test_the_interval_holds_the_true_ratio_nineteen_times_of_twenty():
    """Of 4000 draws: 0.95 +- 0.015 is four standard errors."""
    rng = np.random.default_rng(0)
    found = [mean_ratio(1.5 * np.exp(0.1 * rng.standard_normal(5))) for _ in range(4000)]
    assert np.mean([low <= 1.5 <= high for _, low, high in found]) == pytest.approx(0.95, abs=0.015)


def test_a_ratio_and_its_inverse_have_the_same_interval():
    ratios = np.array([1.2, 1.5, 1.1])
    mean, low, high = mean_ratio(ratios)
    assert mean_ratio(1 / ratios) == pytest.approx((1 / mean, 1 / high, 1 / low))
