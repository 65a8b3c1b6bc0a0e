"""What an engine runs on: both models in rollout form, their caches, and the checksum that tells weights apart."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.models import cache as kv


class Weights(NamedTuple):
    """Both models in rollout form, moved by one `prepare`."""

    policy: Any
    draft: Any  # None: no drafter with weights
    vocab_map: jax.Array | None  # [Vd] int32, target id of each draft id; None: they are the same
    checksum: jax.Array  # [] uint32, of every bit of the above


class Caches(NamedTuple):
    """The engine's cache where a drafter keeps one beside the target's."""

    target: kv.KVCache
    draft: Any


def checksum(tree: Any) -> jax.Array:
    """[] uint32 of every bit of a tree's arrays, and of their order; the same however they are sharded."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.zeros_like(bits)
        for axis in range(bits.ndim):
            place = place * jnp.uint32(bits.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        # A sum of integers does not depend on its order, so neither on the sharding.
        total = _scramble(total) + jnp.sum(_scramble(_scramble(place) ^ bits), dtype=jnp.uint32)
    return total


def _scramble(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (Appleby, public domain): every input bit moves every output bit."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
