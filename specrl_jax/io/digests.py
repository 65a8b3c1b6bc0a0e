"""Digests of arrays: a change of any bit of a value, of its dtype, shape or name is found.

Of a checkpoint, host values are hashed by xxh3. Arrays on devices are not: their shards may lie in several processes,
and are others under the mesh of the run that reads them, so a hash of bytes would need every array whole on one host.
Their digest is two sums over 32-bit words, each mixed with its place: every device adds up its shards in one pass, and
the result is the same under every mesh. The mixing is a bijection, so a change within one word always changes both
sums; one of several words escapes with a chance of about 2^-60.

Weights of an engine are told apart by one sum of that kind, `checksum`: 32 bits of all of them, computed in the program
that makes them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from specrl_jax import distributed

# Of the keys of the two sums.
SEEDS = (0x9E3779B9, 0x7F4A7C15)


class LeafDigest(NamedTuple):
    """Dtype, shape and digest of one array, as a checkpoint records them."""

    dtype: str
    shape: tuple[int, ...]
    digest: str  # hexadecimal


def device_digests(tree: object) -> tuple[dict[str, LeafDigest], list[str]]:
    """Return (digest of each array of a tree by its name, names of the arrays with a value that is not finite).

    The order of all processes' calls must be the same: arrays may be spread over them.
    """
    leaves = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    # One after the other: where arrays are spread over processes, several programs under way can wait for each other.
    values = [distributed.to_host(_sums(leaf)) for leaf in leaves.values()]
    digests = {
        name: LeafDigest(leaf.dtype.name, leaf.shape, f"{sums[0]:08x}{sums[1]:08x}")
        for (name, leaf), sums in zip(leaves.items(), values)
    }
    return digests, [name for name, sums in zip(leaves, values) if sums[2]]


def name_of(path: jax.tree_util.KeyPath) -> str:
    """Return the name of a leaf: its path's keys, joined by slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def array_digests(arrays: Mapping[str, np.ndarray]) -> dict[str, LeafDigest]:
    """Return the digest of each host array."""
    return {
        name: LeafDigest(x.dtype.name, x.shape, xxhash.xxh3_128_hexdigest(np.ascontiguousarray(x).data))
        for name, x in arrays.items()
    }


def json_digest(value: object) -> str:
    """Return the digest of a JSON value, the same after it was written and read."""
    return xxhash.xxh3_128_hexdigest(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode())


def checksum(tree: object) -> jax.Array:
    """Return [] uint32 of every bit of a tree's arrays and of their order; independent of the sharding."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        total = _scramble(total) + _sum_of_bits(leaf)
    return total


@jax.jit
def _sum_of_bits(leaf: jax.Array) -> jax.Array:
    """Return [] uint32 of an array's bits and of their places. Jitted: one trace for all layers."""
    words = _words(leaf)
    place = jnp.zeros_like(words)
    for axis in range(words.ndim):
        place = place * jnp.uint32(words.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    # An integer sum does not depend on its order, so not on the sharding.
    return jnp.sum(_scramble(_scramble(place) ^ words), dtype=jnp.uint32)


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Return [3] uint32: two sums of x's mixed words, and 1 where a value is not finite."""
    x = jnp.atleast_1d(x)
    words, bad = _words(x), (~jnp.isfinite(x)).astype(jnp.uint32)
    if words.ndim > x.ndim:  # two words a value
        bad = jnp.broadcast_to(bad[..., None], words.shape)
    axis, zero = words.ndim - 1, jnp.uint32(0)
    one, two = (_keys(words.shape, seed) for seed in SEEDS)
    mixed = _scramble(words ^ one)
    # One pass over the array: on CPU a reduction of several operands over the last axis is one loop, and several times
    # as fast as one of a single operand.
    *sums, bad = jax.lax.reduce(
        (mixed, mixed * (two | jnp.uint32(1)), bad),
        (zero, zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1], jnp.maximum(a[2], b[2])),
        (axis,),
    )
    return jnp.stack([*map(_folded, sums, SEEDS), jnp.max(bad)])


def _folded(sums: jax.Array, seed: int) -> jax.Array:
    """Return the sum [] of mixed sums over the remaining axes, the last first."""
    for axis in reversed(range(sums.ndim)):
        sums = jnp.sum(_scramble(sums ^ _keys(sums.shape, seed)), axis=axis, dtype=jnp.uint32)
    return sums


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of each value as uint32, with a last axis of two for values of 64 bits."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = min(8 * x.dtype.itemsize, 32)
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32)


def _keys(shape: Sequence[int], seed: int) -> jax.Array:
    """Return pseudo-random keys of the places along the last axis, repeated to [shape] uint32."""
    axis = len(shape) - 1
    keys = _scramble(jax.lax.iota(jnp.uint32, shape[axis]) + jnp.uint32(seed * len(shape) % 2**32))
    # Behind the barrier they are computed once, not again in every row.
    return jax.lax.broadcast_in_dim(jax.lax.optimization_barrier(keys), shape, (axis,))


def _scramble(x: jax.Array) -> jax.Array:
    """Apply the finaliser of MurmurHash3 (Appleby, public domain): a bijection; a bit affects half of the others."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
