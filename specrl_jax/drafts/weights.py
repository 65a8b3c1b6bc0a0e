"""Weights and caches of an engine, target and draft side by side, and the checksum that identifies weights."""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specrl_jax.core import Params
from specrl_jax.io.digests import scramble
from specrl_jax.models import cache as kv

Cache = TypeVar("Cache")


class Weights(NamedTuple):
    """Target and draft in the inference layout, made by one `prepare`."""

    policy: Params
    draft: Params  # empty for a draft without weights; of a twin those that the policy has in more bits
    vocab_map: jax.Array | None  # [Vd] int32, target id of each draft id; None = the same ids
    checksum: jax.Array  # [] uint32, of every bit of what the above were made of, in their dtype, and of `vocab_map`


class Caches(NamedTuple, Generic[Cache]):
    """The engine's cache where it is more than the target's keys and values."""

    target: kv.KVCache
    draft: Cache  # as `DraftModel.init_cache` makes it; None: the draft has none
    experts: jax.Array | None = None  # [C, T, L k], those of the target's forwards (policy.router_replay)


def checksum(tree: object) -> jax.Array:
    """Return [] uint32 of every bit of a tree's arrays and of their order; independent of the sharding."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        total = scramble(total) + _sum_of_bits(leaf)
    return total


@jax.jit
def _sum_of_bits(leaf: jax.Array) -> jax.Array:
    """Return [] uint32 of an array's bits and of their places. Jitted: one trace for all layers."""
    width = min(8 * leaf.dtype.itemsize, 32)  # two words for a value of 64 bits
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    place = jnp.zeros_like(bits)
    for axis in range(bits.ndim):
        place = place * jnp.uint32(bits.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    # An integer sum does not depend on its order, so not on the sharding.
    return jnp.sum(scramble(scramble(place) ^ bits), dtype=jnp.uint32)
