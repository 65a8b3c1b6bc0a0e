"""Masked sums, means as (sum, count), and shifts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl_jax.core import Mean, masked_max, masked_mean, shift_left


@pytest.mark.parametrize("outside", [np.nan, np.inf, -np.inf])
def test_masked_mean_ignores_what_lies_outside(outside):
    values = jnp.array([[1.0, outside, 3.0], [outside, outside, -10.0]])
    mask = jnp.array([[True, False, True], [False, False, True]])
    mean = masked_mean(values, mask)
    assert (float(mean.total), float(mean.count)) == (-6.0, 3.0)
    assert float(mean.value()) == -2.0


@pytest.mark.parametrize("outside", [np.nan, np.inf])
def test_masked_mean_sends_no_gradient_outside(outside):
    values, mask = jnp.array([2.0, outside]), jnp.array([True, False])
    gradient = jax.grad(lambda v: masked_mean(v, mask).total)(values)
    np.testing.assert_array_equal(gradient, [1.0, 0.0])


@pytest.mark.parametrize("shape", [(3, 2), (0,), (0, 5), ()])
def test_masked_mean_of_an_empty_mask_is_zero(shape):
    mean = masked_mean(jnp.full(shape, jnp.nan), jnp.zeros(shape, bool))
    assert (float(mean.total), float(mean.count), float(mean.value())) == (0.0, 0.0, 0.0)


def test_masked_mean_sums_bfloat16_in_float32():
    # 1001 needs ten bits; a bfloat16 has eight.
    mean = masked_mean(jnp.ones((1001,), jnp.bfloat16), jnp.ones((1001,), bool))
    assert (float(mean.total), float(mean.count)) == (1001.0, 1001.0)


@given(st.lists(st.lists(st.tuples(st.integers(-1000, 1000), st.booleans()), max_size=5), min_size=1, max_size=6))
def test_means_of_parts_add_up_to_the_mean_of_the_whole(parts):
    """Integers below 2**24 are exact in float32, so the sums must be equal, not close."""

    def mean(pairs):
        values = jnp.array([value for value, _ in pairs], jnp.float32)
        return masked_mean(values, jnp.array([kept for _, kept in pairs], bool))

    total = Mean(jnp.float32(0), jnp.float32(0))
    for part in parts:
        total = total + mean(part)
    kept = [value for part in parts for value, keep in part if keep]
    assert (float(total.total), float(total.count)) == (sum(kept), len(kept))
    # One float32 division.
    np.testing.assert_allclose(total.value(), np.mean(kept) if kept else 0.0, rtol=2**-23)


def test_masked_max_sees_the_mask_only():
    values = jnp.array([0.5, jnp.nan, 2.0, jnp.inf])
    assert float(masked_max(values, jnp.array([True, False, True, False]))) == 2.0
    assert float(masked_max(values, jnp.zeros((4,), bool))) == 0.0
    assert float(masked_max(jnp.zeros((0,)), jnp.zeros((0,), bool))) == 0.0


def test_shift_left_moves_and_fills_with_zeros():
    x = jnp.arange(6.0).reshape(1, 3, 2)
    np.testing.assert_array_equal(shift_left(x, 1)[0], [[2, 3], [4, 5], [0, 0]])
    np.testing.assert_array_equal(shift_left(x, 3)[0], np.zeros((3, 2)))
