"""Fits recover the constants that made the data, with honest intervals, and refuse too few points."""

import numpy as np
import pytest

from experiments.scale_projection.calibrate import errors, fit
from experiments.simulator.cost import DecoderCost
from experiments.simulator.hardware import HARDWARE
from specrl_jax.errors import InputError
from specrl_jax.models.decoder import preset

BATCHES = np.array([1.0, 2.0, 8.0, 32.0, 128.0, 512.0])
CONTEXTS = np.array([100.0, 30_000.0, 1000.0, 20_000.0, 100.0, 5000.0])


def seconds(values, contexts=CONTEXTS):
    machine = HARDWARE["h100"].with_attained(overlap=0.0, **values)
    return DecoderCost(preset("qwen3_8b"), None, machine).plain(BATCHES, contexts)


TRUTH = {"matmul": 0.6, "memory": 0.7, "host_seconds": 4e-3}
START = {"matmul": 0.9, "memory": 0.9, "host_seconds": 1e-3}


def test_a_fit_recovers_the_constants_that_made_the_data():
    found = fit(seconds, seconds(TRUTH), START)
    assert found.values == pytest.approx(TRUTH, rel=1e-3) and found.scatter < 1e-4 and found.points == 6
    assert all(1 < factor < 1.3 for factor in found.factors.values())


def test_intervals_hold_the_truth_nine_times_in_ten():
    """60 data sets with 5 % noise: between 0.80 and 0.98 of 180 intervals."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(60):
        found = fit(seconds, seconds(TRUTH) * np.exp(0.05 * rng.standard_normal(6)), START)
        held += sum(max(found.values[n] / x, x / found.values[n]) <= found.factors[n] for n, x in TRUTH.items())
    # With three degrees of freedom left, a normal interval of 90 % holds 80.
    assert 0.72 <= held / 180 <= 0.98


def test_unidentified_constants_have_an_infinite_interval():
    """Two constants of which only the product is identified, one without effect, and one that is identified."""
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    start = {"a": 1.0, "b": 1.0, "unused": 1.0, "slope": 1.0}
    found = fit(lambda v: v["a"] * v["b"] + v["slope"] * x, 6.0 + 3.0 * x, start)
    assert [np.isinf(found.factors[name]) for name in start] == [True, True, True, False]
    assert found.values["a"] * found.values["b"] == pytest.approx(6.0, rel=1e-3)
    assert found.values["slope"] == pytest.approx(3.0, rel=1e-3) and found.factors["slope"] < 1.1


def test_more_constants_than_points_are_refused():
    with pytest.raises(InputError, match="3 constants cannot be fitted to 2 points"):
        fit(lambda v: np.ones(2), np.ones(2), START)


def test_errors_are_shares_of_the_measured():
    assert errors(np.array([1.1, 2.0, 2.0]), np.array([1.0, 2.0, 4.0])) == pytest.approx((0.1, 0.5, 3))
