"""Metrics of a step against numpy, on values made by hand."""

import types

import numpy as np
import pytest

from specrl_jax.decoding.rollouts import DecodeChunk
from specrl_jax.io.signals import raise_once_set
from specrl_jax.rewards.scorer import Scores
from specrl_jax.training.metrics import mismatch_metrics, reward_metrics, speculation_metrics
from specrl_jax.training.speedup import Workload, measure_speedup
from tests.helpers.training import StopAfter


def test_acceptance_counts_what_was_committed():
    """speculation_metrics on counters written by hand, where no verification is like the next."""
    rollouts = types.SimpleNamespace(
        drafted=np.array([[4, 4, 2], [3, 3, 0]], np.int32),
        accepted=np.array([[3, 1, 1], [2, 0, 0]], np.int32),
        verifications=np.array([4, 3], np.int32),
        policy_tokens=np.array([10, 6], np.int32),
        total={"reverified": 3}.__getitem__,  # verified apart
        # Two programs of one length count together.
        chunks=[
            DecodeChunk(2, 3, 1.0, iterations=2, verifications=4, switch_seconds=0.0, live=5.0),
            DecodeChunk(2, 0, 1.0, iterations=1, verifications=2, switch_seconds=0.0, live=5.0),
            DecodeChunk(1, 3, 1.0, iterations=1, verifications=1, switch_seconds=0.0, live=5.0),
        ],
    )
    assert speculation_metrics(rollouts) == pytest.approx(
        {
            "spec/acceptance_length": 13 / 7,
            "spec/acceptance_rate": 7 / 16,
            "spec/drafted": 16,
            "spec/accepted": 7,
            "spec/draft_length_mean": 16 / 7,
            "spec/acceptance_rate_pos_1": 5 / 7,
            "spec/acceptance_rate_pos_2": 1 / 7,
            "spec/acceptance_rate_pos_3": 1 / 2,
            "spec/share_k_0": 2 / 7,
            "spec/share_k_3": 5 / 7,
        }
    )
    # What nothing reached has no rate.
    rollouts.drafted, rollouts.accepted = rollouts.drafted * [[1, 1, 0]], rollouts.accepted * [[1, 1, 0]]
    assert "spec/acceptance_rate_pos_3" not in speculation_metrics(rollouts)


def test_mismatch_is_what_numpy_says():
    rng = np.random.default_rng(0)
    mask = rng.random((4, 9)) < 0.7
    b = np.where(mask, -rng.random((4, 9)), np.nan).astype(np.float32)
    p = (b + 0.1 * rng.standard_normal((4, 9))).astype(np.float32)
    row = mismatch_metrics(b, p, mask)
    x, y = b[mask].astype(float), p[mask].astype(float)
    expected = [np.mean(np.expm1(y - x) - (y - x)), abs(x - y).mean(), abs(x - y).max()]
    expected.append(np.corrcoef(np.exp(x), np.exp(y))[0, 1])
    assert [*row] == [
        f"rollout_vs_learner/{name}" for name in ("kl", "logprob_abs_mean", "logprob_abs_max", "probs_pearson")
    ]
    np.testing.assert_allclose([*row.values()], expected, rtol=1e-4)


def test_probabilities_that_do_not_vary_correlate_with_nothing():
    zeros = np.zeros((2, 3), np.float32)
    assert "rollout_vs_learner/probs_pearson" not in mismatch_metrics(zeros, zeros, np.ones((2, 3), bool))


def test_faults_of_a_reward_are_counted_by_cause():
    values = np.array([1.0, 0.0, 0.5], np.float32)
    scores = Scores(
        values * 2, {"a": values, "b": values}, values > 0, failures={"timeout": 2, "died": 0}, extracted=[None] * 3
    )
    row = reward_metrics(scores._replace(parts={"steps": np.array([2, np.nan, 3], np.float32)}), 0.25)
    assert row == {
        "reward/part/steps": 2.5,
        "reward/equal_groups": 0.25,
        "reward/mean": 1.0,
        "reward/std": pytest.approx(np.std(values * 2)),
        "reward/accuracy": pytest.approx(2 / 3),
        "reward/unscored": 2,
        "reward/unscored_timeout": 2,
        "reward/a": 0.5,
        "reward/b": 0.5,
    }


def test_a_stopped_speedup_measurement_keeps_the_rounds_it_has():
    class Engine:
        def generate(self, *_, on_progress, **__):
            on_progress(0, 1)
            return types.SimpleNamespace(response_length=np.array([5]))

    # Two generations of warm-up, and two of each round.
    for looks, rounds in ((0, 0), (3, 0), (5, 1), (100, 5)):
        on_progress = raise_once_set(StopAfter(looks, by="on_progress"))
        ratios = measure_speedup(
            Engine(), Engine(), None, work=Workload([[1]], 1, 0), rounds=5, on_progress=on_progress
        )
        assert len(ratios) == rounds
