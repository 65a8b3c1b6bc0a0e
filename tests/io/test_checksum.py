"""The checksum that tells weights apart: every bit counts, and its place, and no sharding does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.io.digests import checksum


def tree():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(8, 16)).astype(np.float32),
        "b": jnp.asarray(rng.normal(size=(16,)), jnp.bfloat16),
        "c": [rng.integers(0, 9, (8,)).astype(np.int32), rng.normal(size=(8, 16)).astype(np.float32)],
    }


def total(tree):
    return int(jax.jit(checksum)(tree))


@pytest.mark.parametrize("bit", [0, 1, 15, 23, 30, 31])
def test_a_checksum_changes_with_every_bit(bit):
    before = tree()
    changed = before["a"].copy()
    changed.view(np.uint32)[3, 5] ^= np.uint32(1 << bit)
    assert total(before | {"a": changed}) != total(before)


@pytest.mark.parametrize("bit", [0, 15])
def test_a_checksum_changes_with_every_bit_of_a_narrow_leaf(bit):
    before = tree()
    changed = np.asarray(before["b"]).copy()
    changed.view(np.uint16)[7] ^= np.uint16(1 << bit)
    assert total(before | {"b": changed}) != total(before)


@pytest.mark.parametrize("places", [((0, 0), (0, 1)), ((2, 3), (7, 9)), ((0, 5), (5, 0))], ids=str)
def test_a_checksum_changes_where_two_entries_are_swapped(places):
    before = tree()
    changed = before["a"].copy()
    changed[places[0]], changed[places[1]] = before["a"][places[1]], before["a"][places[0]]
    assert total(before | {"a": changed}) != total(before)


def test_a_checksum_changes_where_two_leaves_or_two_rows_are_swapped():
    before = tree()
    rows = before["a"][[1, 0, *range(2, 8)]]
    leaves = before | {"a": before["c"][1], "c": [before["c"][0], before["a"]]}
    transposed = before | {"a": before["a"].reshape(16, 8).T.copy()}
    assert len({total(before), total(before | {"a": rows}), total(leaves), total(transposed)}) == 4


def test_a_checksum_sees_a_zero_leaf():
    """Weights of nothing but zero bits in another number, or at another place."""
    one, two = ({"a": np.zeros(size, np.float32)} for size in (4, 5))
    assert total(one) != total(two)


@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("x", "y"), (("x", "y"), None)], ids=str)
def test_a_checksum_does_not_depend_on_the_sharding(spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    before = tree()
    placed = before | {"a": jax.device_put(before["a"], sharding)}
    assert len(placed["a"].sharding.device_set) == 8
    assert total(placed) == total(before)


def test_a_checksum_changes_with_the_upper_half_of_64_bits():
    with jax.enable_x64(True):
        x = np.arange(3, dtype=np.int64)
        assert total(jnp.asarray(x)) != total(jnp.asarray(x + 2**40))
