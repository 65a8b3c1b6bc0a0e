"""Digests: every bit, place, dtype and shape counts, and no sharding does; values that are not finite are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specrl_jax.io.digests import array_digests, device_digests, json_digest

DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool")


def digest(x):
    return device_digests({"x": jnp.asarray(x)})[0]["x"]


def flipped(x, *bits):
    """Return a copy of an array with these bits of its bytes flipped."""
    data = np.array(x)
    flat = data.view(np.uint8).reshape(-1)
    for bit in bits:
        flat[bit // 8] ^= 1 << (bit % 8)
    return data


X = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    x = np.array([1, 0, 1], jnp.dtype(dtype))
    bits = range(0, 24, 8) if dtype == "bool" else range(8 * x.nbytes)
    found = {digest(x), *(digest(flipped(x, bit)) for bit in bits)}
    assert len(found) == 1 + len(bits)


def test_the_upper_half_of_64_bits_counts():
    with jax.enable_x64(True):
        x = np.array([1.0, 2.0])
        assert len({digest(x), *(digest(flipped(x, bit)) for bit in range(128))}) == 129
        assert device_digests({"x": jnp.array([0.0, np.nan])})[1] == ["x"]


def test_changes_that_cancel_in_a_sum_count():
    """Two signs, all signs, two values exchanged, two rows exchanged."""
    rows = X[[1, 0, 2]]
    swapped = X.copy().reshape(-1)
    swapped[[3, 40]] = swapped[[40, 3]]
    others = [flipped(X, 31, 63), -X, swapped.reshape(X.shape), rows, X[:, ::-1], X[..., ::-1]]
    assert len({digest(x) for x in [X, *others]}) == 1 + len(others)


def test_dtype_shape_and_name_count():
    zeros = np.zeros((4, 6), np.float32)
    found = [digest(zeros), digest(zeros.reshape(6, 4)), digest(zeros.view(np.int32)), digest(zeros.reshape(24))]
    assert len(set(found)) == 4
    assert device_digests({"x": X})[0] != device_digests({"y": X})[0]


@pytest.mark.parametrize("spec", [(), ("a",), (None, "b"), (("a", "b"),)])
def test_the_sharding_does_not_count(spec):
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert digest(jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))) == digest(x)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_that_is_not_finite_is_named(bad, dtype):
    x = jnp.ones((3, 4), dtype)
    largest = jnp.full((2,), jnp.finfo(dtype).max)
    tree = {"good": x, "bad": {"x": x.at[2, 1].set(bad)}, "largest": largest, "ids": jnp.full(3, -1), "none": None}
    assert device_digests(tree)[1] == ["bad/x"]


def test_host_arrays_and_json():
    a, b = np.arange(4), np.arange(4)
    b[3] |= 1 << 40
    assert array_digests({"x": a}) != array_digests({"x": b}) != array_digests({"x": b.reshape(2, 2)})
    assert json_digest({"b": (1, 2), "a": 0.1}) == json_digest({"a": 0.1, "b": [1, 2]})
    assert json_digest([0.1]) != json_digest([0.10000000000000002])
