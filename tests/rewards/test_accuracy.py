"""pass@k and maj@n against enumeration, and the coverage of the interval."""

import itertools

import numpy as np
import pytest

from specrl_jax.rewards.accuracy import accuracy_metrics, interval, majority_at_n, pass_at_k


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    correct = np.array([*itertools.product([False, True], repeat=n)])
    for k in range(1, n + 1):
        expected = [np.mean([any(subset) for subset in itertools.combinations(row, k)]) for row in correct]
        np.testing.assert_allclose(pass_at_k(correct, k), expected, atol=1e-12)


def test_pass_at_1_of_many_samples_is_the_mean_and_pass_at_n_any():
    correct = np.random.default_rng(0).random((50, 64)) < 0.02
    np.testing.assert_allclose(pass_at_k(correct, 1), correct.mean(axis=1), atol=1e-12)
    np.testing.assert_allclose(pass_at_k(correct, 64), correct.any(axis=1), atol=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_more_than_the_samples_cannot_be_drawn(k):
    with pytest.raises(ValueError, match=f"pass@{k} of 4"):
        pass_at_k(np.zeros((1, 4), bool), k)


@pytest.mark.parametrize("n", range(1, 6))
def test_majority_is_the_mean_over_all_ways_to_break_ties(n):
    for answers in itertools.product(["a", "b", "c", None], repeat=n):
        votes = [answer for answer in answers if answer is not None]
        tied = {a for a in votes if votes.count(a) == max(map(votes.count, votes))}
        expected = np.mean([winner == "b" for winner in tied]) if tied else 0.0
        correct = np.array([[answer == "b" for answer in answers]])
        assert majority_at_n(correct, [answers])[0] == pytest.approx(expected)


def test_the_interval_covers_the_true_mean():
    """400 sets of 100 problems solved with chance 0.3: the share covered is 0.95 +- 0.011 (one standard deviation), and
    the bootstrap's own bias at 100 problems about -0.01. Below 0.90 by chance less than once in 1e5; an interval for
    80 % instead of 95 would cover 0.80.
    """
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = interval((rng.random(100) < 0.3).astype(float))
        covered += low <= 0.3 <= high
    assert 0.90 < covered / 400 < 0.99


def test_metrics_of_one_sample_are_the_accuracy_alone():
    row = accuracy_metrics(np.array([[True], [False]]), [["1"], ["2"]], "eval/")
    assert row.keys() == {"eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/pass_at_k"}
    assert row["eval/accuracy"] == row["eval/pass_at_k"] == 0.5


def test_metrics_of_several_samples():
    correct = np.array([[True, True, False, False, True, False], [False] * 6])
    row = accuracy_metrics(correct, [["1", "1", "2", "3", "1", None], [None] * 6], "eval/a/")
    names = {name.removeprefix("eval/a/") for name in row if not name.endswith(("_low", "_high"))}
    assert names == {"accuracy", "pass_at_2", "pass_at_4", "pass_at_6", "pass_at_k", "majority"}
    assert (row["eval/a/accuracy"], row["eval/a/pass_at_6"], row["eval/a/majority"]) == (0.25, 0.5, 0.5)
    assert row["eval/a/accuracy_low"] <= 0.25 <= row["eval/a/accuracy_high"]


def test_no_majority_without_extracted_answers():
    row = accuracy_metrics(np.zeros((2, 2), bool), [[None, None]] * 2, "")
    assert "majority" not in row
