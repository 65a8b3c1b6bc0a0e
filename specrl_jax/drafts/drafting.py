"""Drafters with weights: what they go over before they draft, and how one drafted token leads to the next.

Between iterations their keys and values are right for everything that the last draft went over. A draft goes over the
last k + 1 committed tokens again, which covers whatever one verification can have committed: provisional entries become
true ones, and nothing has to be chosen by how much was accepted.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Noise
from specrl_jax.decoding.drafters import Drafter, sample_draft
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.step import Draft, Slots
from specrl_jax.drafts.recurrent import DraftCache
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.models import cache as kv
from specrl_jax.models import qwen3
from specrl_jax.sharding import Partitioner

# Tokens at once in a catch-up: bounds its activations at [B, 256, D].
CATCH_UP_BLOCK = 256


class RecurrentHead(Protocol):
    """A head over pairs (hidden state of position t, token t + 1), fed its own outputs beyond the target's."""

    def write_pairs(self, params: Any, hidden: Any, embedded: Any, pairs: Any, cache: DraftCache) -> DraftCache: ...
    def extend(self, params: Any, hidden: Any, embedded: Any, pairs: Any, cache: DraftCache) -> Any: ...
    def logits(self, weights: Weights, a: jax.Array) -> jax.Array: ...


def recurrent_drafter(
    head: RecurrentHead, length: int, sampling: Sampling, dtype: jnp.dtype, partition: Partitioner
) -> Drafter:
    """Drafts up to `length` tokens with an EAGLE-3 or MTP head; its input embedding is the policy's.

    Args:
      dtype: of the head's activations.
    """

    def embed(params: Weights, tokens: jax.Array) -> jax.Array:
        return partition.constrain(params.policy["embed"][tokens].astype(dtype), "batch", None, None)

    def committed(
        params: Weights, tokens: jax.Array, pairs: jax.Array, cache: DraftCache
    ) -> tuple[jax.Array, jax.Array]:
        """(hidden, embedded) of pairs [B, Q] whose hidden states and tokens are both there."""
        hidden = jnp.take_along_axis(cache.hidden, pairs[:, :, None], axis=1, mode="clip")
        following = jnp.take_along_axis(tokens, pairs + 1, axis=1, mode="clip")
        return hidden.astype(dtype), embed(params, following)

    def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches]:
        # The last committed pair is length - 2. A prompt shorter than the window repeats pair 0, with equal results.
        pairs = jnp.maximum(slots.length[:, None] - 2 - jnp.arange(k, -1, -1)[None], 0)
        hidden, embedded = committed(params, slots.tokens, pairs, slots.cache.draft)
        cache = head.write_pairs(params.draft, hidden[:, :-1], embedded[:, :-1], pairs[:, :-1], slots.cache.draft)
        a, last, pair = hidden[:, -1:], embedded[:, -1:], pairs[:, -1:]

        def step(i: int, token: jax.Array | None) -> jax.Array:
            nonlocal a, cache, last, pair
            if token is not None:
                last, pair = embed(params, token[:, None]), slots.length[:, None] - 2 + i
            a, cache = head.extend(params.draft, a, last, pair, cache)
            a = partition.constrain(a, "batch", None, None)
            return head.logits(params, a)[:, 0]

        drafted = draft_tokens(step, slots, seed, k, params.vocab_map, sampling, partition)
        return drafted, slots.cache._replace(draft=cache)

    def catch_up(params: Weights, tokens: jax.Array, length: jax.Array, cache: Caches) -> Caches:
        def block(positions: jax.Array, cache: DraftCache) -> DraftCache:
            hidden, embedded = committed(params, tokens, positions, cache)
            return head.write_pairs(params.draft, hidden, embedded, positions, cache)

        # The last committed token has no pair yet.
        return cache._replace(draft=in_blocks(block, tokens, jnp.max(length) - 1, cache.draft))

    return Drafter(length, draft, catch_up)


def policy_drafter(
    config: qwen3.Qwen3Config, length: int, sampling: Sampling, dtype: jnp.dtype, partition: Partitioner
) -> Drafter:
    """Drafts up to `length` tokens with a smaller policy that has a cache of its own."""

    def forward(
        params: Weights, tokens: jax.Array, positions: jax.Array, cache: kv.KVCache
    ) -> tuple[jax.Array, kv.KVCache]:
        out = qwen3.forward(
            params.draft, config, tokens, positions, partition, cache=cache, dtype=dtype, return_logits=False
        )
        return out.hidden, out.cache

    def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches]:
        positions = jnp.maximum(slots.length[:, None] - 1 - jnp.arange(k, -1, -1)[None], 0)
        hidden, cache = forward(
            params, jnp.take_along_axis(slots.tokens, positions, axis=1), positions, slots.cache.draft
        )

        def step(i: int, token: jax.Array | None) -> jax.Array:
            nonlocal hidden, cache
            if token is not None:
                hidden, cache = forward(params, token[:, None], slots.length[:, None] - 1 + i, cache)
            return qwen3.lm_head_logits(params.draft, config, hidden[:, -1:], partition)[:, 0]

        drafted = draft_tokens(step, slots, seed, k, None, sampling, partition)
        return drafted, slots.cache._replace(draft=cache)

    def catch_up(params: Weights, tokens: jax.Array, length: jax.Array, cache: Caches) -> Caches:
        def block(positions: jax.Array, cache: kv.KVCache) -> kv.KVCache:
            return forward(params, jnp.take_along_axis(tokens, positions, axis=1, mode="clip"), positions, cache)[1]

        return cache._replace(draft=in_blocks(block, tokens, jnp.max(length), cache.draft))

    return Drafter(length, draft, catch_up)


def draft_tokens(
    step: Any,
    slots: Slots,
    seed: jax.Array,
    k: int,
    vocab_map: jax.Array | None,
    sampling: Sampling,
    partition: Partitioner,
) -> Draft:
    """k tokens, each sampled from `step(i, token i - 1 [B] or None) -> logits [B, Vd]` and fed to the next."""
    noise = Noise(seed, slots.rollout_id, slots.length)
    tokens, logits = [], []
    for i in range(k):
        scores = partition.constrain(step(i, tokens[-1] if tokens else None), "batch", "vocab")
        # A row's whole vocabulary on one device to sample from it, as in verification, and back at once.
        logits.append(partition.constrain(scores, "sampled_rows", None))
        tokens.append(partition.constrain(sample_draft(noise, logits[-1], i, vocab_map, sampling), "batch"))
    certain = jnp.zeros(slots.done.shape, bool)
    return Draft(jnp.stack(tokens, axis=1), jnp.stack(logits, axis=1), certain, vocab_map)


def in_blocks(block: Any, tokens: jax.Array, count: jax.Array, cache: Any) -> Any:
    """block(positions [B, Q], cache) -> cache, over positions [0, count) of every row and some beyond."""
    size = min(CATCH_UP_BLOCK, tokens.shape[1])

    def body(i: jax.Array, cache: Any) -> Any:
        return block(jnp.broadcast_to(i * size + jnp.arange(size)[None], (tokens.shape[0], size)), cache)

    return jax.lax.fori_loop(0, (count + size - 1) // size, body, cache)
