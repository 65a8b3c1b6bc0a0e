"""Both error rates of a comparison, by drawing: how often the right distribution and others reach a limit."""

import numpy as np
import pytest

from lossless_certify.errors import CertifyError
from lossless_certify.statistics import Rates, compare, compare_samples, draws_needed, entropy_limit, variation_limit

P = np.array([0.4, 0.3, 0.2, 0.05, 0.05, 0.0])


def many_counts(probs, draws, repeats=20_000):
    return np.random.default_rng(0).multinomial(draws, probs, size=repeats) / draws


@pytest.mark.parametrize("draws", [20, 2000])
def test_the_right_distribution_reaches_a_limit_no_more_often_than_stated(draws):
    """20,000 repeats at a chance of 0.05 each: 1,000 expected at most, 1,200 with a chance below 1e-9."""
    shares = many_counts(P, draws)
    distance = 0.5 * np.abs(shares - P).sum(axis=1)
    entropy = np.where(shares > 0, shares * np.log(np.where(shares > 0, shares, 1) / np.where(P > 0, P, 1)), 0).sum(
        axis=1
    )
    for statistic, limit in ((distance, variation_limit), (entropy, entropy_limit)):
        found = (statistic >= limit(len(P), draws, 0.05)).mean()
        assert found < 0.06
        # Not so wide that anything would pass: the limit is within a factor of three of what is typical.
        assert limit(len(P), draws, 0.05) < 3 * np.quantile(statistic, 0.95)


def test_a_distribution_that_is_off_by_the_stated_distance_is_found():
    """At most one in a hundred is missed; 20,000 repeats."""
    rates = Rates(false_alarm=1e-6)
    draws = draws_needed(len(P), 0.05, rates)
    shares = many_counts(P + np.array([-0.05, 0.05, 0, 0, 0, 0]), draws)
    missed = 0.5 * np.abs(shares - P).sum(axis=1) < variation_limit(len(P), draws, rates.false_alarm / 2)
    assert missed.mean() < 0.01


def test_two_samples_of_one_distribution_pass_and_of_two_do_not():
    rng, rates = np.random.default_rng(1), Rates(1e-6)
    draws = 2 * draws_needed(3, 0.05, rates)
    first, second, other = (rng.choice(3, draws, p=p) for p in ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.45, 0.3, 0.25]))
    assert compare_samples(first, second, outcomes=3, rates=rates).passed
    assert compare_samples(first, second, outcomes=3, rates=rates).detectable <= 0.05
    assert not compare_samples(first, other, outcomes=3, rates=rates).passed


def test_outcomes_without_a_chance_are_found_unless_rounding_explains_them():
    for probs in ([0.5, 0.5, 0.0], [0.5, 0.5]):
        for times, passed in ((1, True), (50, False)):
            compared = compare(np.repeat(np.arange(3), [500_000, 500_000, times]), probs, Rates(1e-6))
            assert (compared.passed, compared.impossible) == (passed, times)
        assert compared.statistic == "50 draws of outcomes that have no chance"


def test_probabilities_that_do_not_sum_to_one_are_refused():
    with pytest.raises(CertifyError, match=r"sum to 0\.9, where a distribution was wanted"):
        compare(np.zeros(5, int), [0.4, 0.5], Rates(1e-6))
