"""Advantages against float64 NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specrl_jax.rl.advantages import ADVANTAGES, EPSILON, group_centred, group_normalised, leave_one_out

# A float32 mean over G <= 8 values below 100 in size is off by at most about 8 * 100 * 2**-24 = 5e-5; divided by a
# standard deviation of at least 0.5 that is 1e-4 in an advantage.
REWARDS = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(2, 8)), elements=st.integers(-100, 100).map(float)
)


def reference(rewards):
    """A_i = (r_i - mean(r)) / std(r) in each group (DeepSeekMath, arXiv 2402.03300, section 4.1.2), unbiased std."""
    out = np.zeros(rewards.shape)
    for p, group in enumerate(rewards.astype(np.float64)):
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
        out[p] = [(r - mean) / (std + EPSILON) for r in group]
    return out


@given(REWARDS)
def test_against_float64(rewards):
    advantages = group_normalised(rewards)
    assert advantages.dtype == np.float32 and advantages.shape == rewards.shape
    # The smallest spread of integers, one of eight differing by one, has std 0.35.
    np.testing.assert_allclose(advantages, reference(rewards), atol=2e-4)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 16))
def test_equal_rewards_have_an_advantage_of_exactly_zero(reward, group_size):
    """Exactly: a rounded mean would leave 1e-8 / epsilon, and Adam turns any steady gradient into full steps."""
    advantages = group_normalised(np.full((2, group_size), reward, np.float32))
    np.testing.assert_array_equal(advantages, np.zeros((2, group_size)))


@given(REWARDS, st.randoms(use_true_random=False))
def test_groups_do_not_see_each_other(rewards, random):
    order = random.sample(range(len(rewards)), len(rewards))
    np.testing.assert_array_equal(group_normalised(rewards[order]), group_normalised(rewards)[order])
    np.testing.assert_array_equal(group_normalised(rewards[:1]), group_normalised(rewards)[:1])


@pytest.mark.parametrize("spread", [1e-12, 1e-9])
def test_a_spread_far_below_epsilon_stays_small(spread):
    """Without epsilon a group of nearly equal rewards becomes noise of unit variance."""
    rewards = np.array([[0.0, spread, 0.0, spread]], np.float32)
    assert np.abs(group_normalised(rewards)).max() <= spread / EPSILON


@given(REWARDS)
def test_the_other_advantages_against_float64(rewards):
    """Dr. GRPO (arXiv 2503.20783): r - mean. RLOO (arXiv 2402.14740, eq. 8): r less the mean of the others."""
    G = rewards.shape[1]
    for p, group in enumerate(rewards.astype(np.float64)):
        centred = [r - sum(group) / G for r in group]
        others = [r - (sum(group) - r) / (G - 1) for r in group]
        np.testing.assert_allclose(group_centred(rewards)[p], centred, atol=1e-4)
        np.testing.assert_allclose(leave_one_out(rewards)[p], others, atol=1e-4)


@pytest.mark.parametrize("function", ADVANTAGES.values(), ids=ADVANTAGES)
def test_equal_rewards_and_groups_of_one_have_no_advantage(function):
    np.testing.assert_array_equal(function(np.full((2, 3), 0.1, np.float32)), 0.0)
    np.testing.assert_array_equal(function(np.array([[3.0], [5.0]], np.float32)), 0.0)
