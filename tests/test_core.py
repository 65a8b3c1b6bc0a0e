"""Masked sums and token log-probs against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl_jax.core import Mean, logprobs_and_entropy, masked_max, masked_mean, shift_left


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


def reference_logprobs_and_entropy(logits, tokens, temperature):
    scaled = logits.astype(np.float64) / temperature
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=-1)
    return np.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0], entropy


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logprobs_and_entropy_against_float64(temperature, dtype):
    rng = np.random.default_rng(0)
    logits = jnp.array(3 * rng.normal(size=(4, 5, 37)), dtype)
    tokens = rng.integers(0, 37, size=(4, 5)).astype(np.int32)
    got = logprobs_and_entropy(logits, jnp.array(tokens), temperature)
    # bfloat16 logits are widened before any arithmetic: the reference starts from the rounded values.
    want = reference_logprobs_and_entropy(np.asarray(logits, np.float32), tokens, temperature)
    assert got[0].dtype == got[1].dtype == jnp.float32
    # |logits / T| <= 40, a few roundings of 2**-24 relative to that.
    np.testing.assert_allclose(got[0], want[0], atol=2e-5)
    np.testing.assert_allclose(got[1], want[1], atol=2e-5)


def test_logprobs_and_entropy_of_float64_logits_are_float64():
    rng = np.random.default_rng(2)
    logits, tokens = rng.normal(size=(4, 7)), rng.integers(0, 7, 4).astype(np.int32)
    with jax.enable_x64(True):
        got = logprobs_and_entropy(jnp.array(logits), jnp.array(tokens), 0.7)
        assert got[0].dtype == got[1].dtype == jnp.float64
    for value, want in zip(got, reference_logprobs_and_entropy(logits, tokens, 0.7), strict=True):
        np.testing.assert_allclose(value, want, rtol=0, atol=1e-14)


def test_temperature_zero_is_scored_at_one():
    logits = jnp.array(np.random.default_rng(1).normal(size=(6, 9)), jnp.float32)
    tokens = jnp.arange(6)
    greedy, plain = logprobs_and_entropy(logits, tokens, 0.0), logprobs_and_entropy(logits, tokens, 1.0)
    np.testing.assert_array_equal(greedy[0], plain[0])
    np.testing.assert_array_equal(greedy[1], plain[1])


def test_large_logits_do_not_overflow():
    logits = jnp.array([[1e4, 1e4, -1e4], [-1e4, -1e4, -1e4]])
    logprobs, entropy = logprobs_and_entropy(logits, jnp.array([0, 2]), 1.0)
    # Near 1e4 a float32 is 1e-3 wide.
    np.testing.assert_allclose(logprobs, [-np.log(2), -np.log(3)], atol=2e-3)
    np.testing.assert_allclose(entropy, [np.log(2), np.log(3)], atol=2e-3)


def test_entropy_runs_from_zero_to_log_v():
    uniform, certain = jnp.zeros((8,)), jnp.zeros((8,)).at[3].set(200.0)
    _, entropy = logprobs_and_entropy(jnp.stack([uniform, certain]), jnp.array([0, 3]), 1.0)
    # One ulp at 200 for the certain row: its entropy is a difference of two numbers near 200.
    np.testing.assert_allclose(entropy, [np.log(8), 0.0], atol=2e-5)


def test_shift_left_moves_and_fills_with_zeros():
    x = jnp.arange(6.0).reshape(1, 3, 2)
    np.testing.assert_array_equal(shift_left(x, 1)[0], [[2, 3], [4, 5], [0, 0]])
    np.testing.assert_array_equal(shift_left(x, 3)[0], np.zeros((3, 2)))
