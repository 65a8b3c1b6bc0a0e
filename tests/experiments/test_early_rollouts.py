"""Chances to disagree under shared noise: against draws, by hand, and within the bound by total variation."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.early_rollouts import formula
from experiments.early_rollouts.bound import Disagreement, position_disagreements
from experiments.verdicts import ratio_interval


def chances(p, q):
    return Disagreement(*position_disagreements(*(np.log(x)[None] for x in (p, q)))[:, 0])


def test_two_tokens_by_hand():
    found = chances([0.5, 0.5], [0.8, 0.2])
    # Both draw the first with 1 / (1 + max(1, 1/4)) = 1/2, the second with 1 / (1 + max(1, 4)) = 1/5.
    assert found.variation == pytest.approx(0.3) and found.expected == pytest.approx(0.3)
    assert found.bound == pytest.approx(0.6 / 1.3) and found.entropy == pytest.approx(np.log(2))


def test_the_expected_chance_is_that_of_shared_gumbel_noise():
    """100,000 draws of five tokens: within four standard errors, as a wrong chance by 0.01 would not be."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5), 2)
    noise = rng.gumbel(size=(100_000, 5))
    differ = np.mean((np.log(p) + noise).argmax(1) != (np.log(q) + noise).argmax(1))
    found = chances(p, q)
    assert found.expected == pytest.approx(differ, abs=4 * (0.25 / 100_000) ** 0.5)
    assert abs(found.expected - found.variation) > 0.01 and abs(found.expected - found.bound) > 0.01


@hypothesis.given(st.integers(2, 40), st.integers(0, 10_000), st.floats(0.05, 5.0))
def test_the_chance_lies_between_total_variation_and_its_bound(vocab, seed, scale):
    rng = np.random.default_rng(seed)
    p, q = (np.exp(x) / np.exp(x).sum() for x in rng.normal(0, scale, (2, vocab)))
    found = chances(p, q)
    assert found.variation - 1e-9 <= found.expected <= found.bound + 1e-9


def test_equal_policies_never_disagree():
    same = np.full(7, 1 / 7)
    assert chances(same, same)[:3] == pytest.approx((0, 0, 0), abs=1e-12)


def test_steps_of_one_seed_are_one_number_of_the_formulas_interval():
    """Two seeds whose means are 0.92 and 1.08, each of steps apart: the interval is of two numbers, not of six."""
    common = {"learning_rate": 1e-4, "draft": "none", "share": 1.0, "generate": 1.0, "learn": 1.0, "formula": 2.0}
    ratios = {0: [0.92, 0.8464, 1.0], 1: [1.08, 1.1664, 1.0]}
    rows = [
        common | {"seed": seed, "older": i, "verify": 0.4, "rest": 0.6, "measured": 2 * ratio}
        for seed, some in ratios.items()
        for i, ratio in enumerate(some)
    ]
    expected = ratio_interval([0.92, 1.08])
    line = formula.table(rows).splitlines()[-1]
    assert f"| 6 | 0.40 | 0.60 | 1.00 | 2.00 | 2.00 | {expected} | 0.67 | {expected} |" in line
