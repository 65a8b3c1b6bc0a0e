"""Draft token by token: sample each from the draft's logits, feed it to the next step.

Between iterations a draft's cache is right for every token that the last draft started from. A draft first goes over
the last k + 1 committed tokens again. One verification commits at most that many, so provisional cache entries become
true ones whatever was accepted.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Paging
from kernels_pallas.verify.op import Draft, Noise
from specrl_jax.decoding.drafters import CommittedTokens, sample_draft
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.base import DrafterConfig

# Tokens in one forward of a cache synchronisation: bounds its activations at [B, 256, D].
SYNC_BLOCK = 256

Cache = TypeVar("Cache")
# (i, token i - 1 [B], None for i = 0) -> logits [B, Vd]
Step = Callable[[int, jax.Array | None], jax.Array]


def draft_tokens(
    step: Step, slots: Slots, seed: jax.Array, *, k: int, vocab_map: jax.Array | None, config: DrafterConfig
) -> Draft:
    """Draft k tokens from `step`'s logits, each given to its next call: sampled, or the likeliest (config.argmax).

    A likeliest token has no probability to verify with: it is deterministic, as what a lookup copies.
    """
    temperature = jnp.zeros_like(slots.sampling.temperature) if config.argmax else slots.sampling.temperature
    noise, constrain = Noise(seed, slots.rollout_id, slots.length), config.partition.constrain
    tokens: list[jax.Array] = []
    logits: list[jax.Array] = []
    for i in range(k):
        scores = constrain(step(i, tokens[-1] if tokens else None), "batch", "vocab")
        # Sample with a row's whole vocabulary on one device, as verification does, and move the token back at once.
        logits.append(constrain(scores, "sampled_rows", None))
        tokens.append(
            constrain(
                sample_draft(
                    noise, logits[-1], i, vocab_map=vocab_map, sampling=config.sampling, temperature=temperature
                ),
                "batch",
            )
        )
    if config.argmax:
        return Draft(jnp.stack(tokens, axis=1), None, jnp.ones(slots.done.shape, bool))
    deterministic = jnp.zeros(slots.done.shape, bool)
    return Draft(jnp.stack(tokens, axis=1), jnp.stack(logits, axis=1), deterministic, vocab_map=vocab_map)


def in_blocks(update: Callable[[Paging, Cache], Cache], text: CommittedTokens, cache: Cache) -> Cache:
    """Apply update(places [B, Q], cache) to every token of a text, SYNC_BLOCK positions of all rows at a time."""
    size = min(SYNC_BLOCK, text.tokens.shape[1])

    def body(i: jax.Array, cache: Cache) -> Cache:
        positions = i * size + jnp.arange(size)[None]
        return update(Paging(text.table, jnp.where(positions < text.length[:, None], positions, -1)), cache)

    return jax.lax.fori_loop(0, (jnp.max(text.length) + size - 1) // size, body, cache)
