"""The EAGLE-3 head as the engine's drafter: which pairs it goes over, and when.

Between iterations the head's keys and values are right for every pair that the last draft went over with true features.
A draft goes over the last k + 1 pairs again, which covers whatever one verification can have committed: provisional
entries (from the head's own outputs) become true ones, and nothing has to be chosen by how much was accepted.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.decoding.drafters import Drafter, sample_draft
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.speculative import Draft, Slots
from specrl_jax.decoding.verification import Noise
from specrl_jax.models import cache as kv
from specrl_jax.models import eagle3
from specrl_jax.sharding import Partitioner

# Pairs at once in a catch-up: bounds its activations at [B, 256, D].
CATCH_UP_BLOCK = 256


class Weights(NamedTuple):
    """What an engine runs on: both models in rollout form, moved by one `prepare`."""

    policy: Any
    draft: Any  # None: no drafter
    vocab_map: jax.Array | None  # [Vd] int32, target id of each draft id
    checksum: jax.Array  # [] uint32, of every bit of the above


class Caches(NamedTuple):
    """The engine's cache where an EAGLE-3 head drafts."""

    target: kv.KVCache
    draft: eagle3.DraftCache


def eagle3_drafter(
    config: eagle3.Eagle3Config, length: int, sampling: Sampling, dtype: jnp.dtype, partition: Partitioner
) -> Drafter:
    """Drafts up to `length` tokens with the head in `Weights`; its input embedding is the policy's.

    Args:
      dtype: of the head's activations.
    """

    def embed(params: Weights, tokens: jax.Array) -> jax.Array:
        return partition.constrain(params.policy["embed"][tokens].astype(dtype), "batch", None, None)

    def committed(
        params: Weights, tokens: jax.Array, pairs: jax.Array, cache: eagle3.DraftCache
    ) -> tuple[jax.Array, jax.Array]:
        """(hidden, embedded) of pairs [B, Q] whose features and tokens are both there."""
        features = jnp.take_along_axis(cache.features, pairs[:, :, None, None], axis=1, mode="clip")
        following = jnp.take_along_axis(tokens, pairs + 1, axis=1, mode="clip")
        return eagle3.project_features(params.draft, features), embed(params, following)

    def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches]:
        noise = Noise(seed, slots.rollout_id, slots.length)
        # The last committed pair is length - 2. A prompt shorter than the window repeats pair 0, with equal results.
        pairs = jnp.maximum(slots.length[:, None] - 2 - jnp.arange(k, -1, -1)[None], 0)
        hidden, embedded = committed(params, slots.tokens, pairs, slots.cache.draft)
        cache = eagle3.write_pairs(
            params.draft, config, hidden[:, :-1], embedded[:, :-1], pairs[:, :-1], slots.cache.draft
        )
        a, last, pair = hidden[:, -1:], embedded[:, -1:], pairs[:, -1:]
        tokens, logits = [], []
        for i in range(k):
            a, cache = eagle3.extend(params.draft, config, a, last, pair, cache)
            a = partition.constrain(a, "batch", None, None)
            # A row's whole vocabulary on one device to sample from it, as in verification, and back at once.
            scores = partition.constrain(eagle3.draft_logits(params.draft, config, a), "batch", None, "vocab")
            logits.append(partition.constrain(scores, "sampled_rows", None, None)[:, 0])
            token = sample_draft(noise, logits[-1], i, params.vocab_map, sampling)
            tokens.append(partition.constrain(token, "batch"))
            last, pair = embed(params, tokens[-1][:, None]), slots.length[:, None] - 1 + i
        certain = jnp.zeros(slots.done.shape, bool)
        drafted = Draft(jnp.stack(tokens, axis=1), jnp.stack(logits, axis=1), certain, params.vocab_map)
        return drafted, slots.cache._replace(draft=cache)

    def catch_up(params: Weights, tokens: jax.Array, length: jax.Array, cache: Caches) -> Caches:
        S = cache.draft.features.shape[1]
        size = min(CATCH_UP_BLOCK, S)

        def block(i: jax.Array, draft_cache: eagle3.DraftCache) -> eagle3.DraftCache:
            pairs = jnp.broadcast_to(i * size + jnp.arange(size)[None], (tokens.shape[0], size))
            hidden, embedded = committed(params, tokens, pairs, draft_cache)
            return eagle3.write_pairs(params.draft, config, hidden, embedded, pairs, draft_cache)

        blocks = (jnp.max(length) - 1 + size - 1) // size
        return cache._replace(draft=jax.lax.fori_loop(0, blocks, block, cache.draft))

    return Drafter(length, draft, catch_up)


def record_features(cache: eagle3.DraftCache, positions: jax.Array, features: jax.Array) -> eagle3.DraftCache:
    """The target's features [B, Q, 3, D] of positions [B, Q], kept for the drafts and catch-ups to come."""
    return cache._replace(features=kv.write_tokens(cache.features, positions, features))


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
