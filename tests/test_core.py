"""Masked sums, means as (sum, count), shifts, and files that cannot be written."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl_jax.core import Mean, atomic_write, masked_max, masked_mean, naming, shift_left


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


@pytest.mark.parametrize(
    ("error", "number", "file"),
    [
        (OSError(28, "No space left on device"), 28, "a/file"),
        (OSError(28, "No space left on device", "b"), 28, "b"),
        (ValueError("Error while serializing: I/O error: File too large (os error 27)"), 27, "a/file"),
        (ValueError("Failed writing: \"d\": to file 4: No space [os_error_code='28']"), 28, "a/file"),
    ],
)
def test_what_the_system_refuses_names_the_file(error, number, file):
    """Also by libraries that raise errors of their own: safetensors, tensorstore."""
    with pytest.raises(OSError) as found, naming("a/file"):
        raise error
    assert (found.value.errno, found.value.filename) == (number, file)
    assert found.value.strerror == os.strerror(number) or error.args[1:] == ("No space left on device",)


@pytest.mark.parametrize("error", [ConnectionError("gone"), ValueError("3 of 4 written"), KeyError("a")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as found, naming("a/file"):
        raise error
    assert found.value is error


def test_a_file_that_could_not_be_replaced_stays(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(OSError, match="No space"), atomic_write(str(path)) as file:
        file.write("half")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old" and [x.name for x in tmp_path.iterdir()] == ["a.json"]
