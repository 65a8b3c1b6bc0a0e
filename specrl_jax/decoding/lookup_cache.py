"""Texts on the device for lookup drafters: rollouts of the groups being decoded, and earlier ones of their prompts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LookupCache(NamedTuple):
    """M sequences of each of C groups, prompt and response by absolute position, as in `Slots.tokens`.

    Sequences 0..G-1 are the rollouts of this step, running and finished, the others those of earlier epochs.

    Memory: C * M * (S + 1) * 4 bytes; 64 groups of 16 + 8 sequences of 4,096 tokens take 25 MB. Replicated: the rows of
    a group may be on several devices.
    """

    tokens: jax.Array  # [C, M, S] int32
    length: jax.Array  # [C, M] int32, valid tokens, from position 0; 0: no text


def empty_lookup_cache(groups: int, sequences: int, length: int) -> LookupCache:
    """Return a cache of shape [C, M, S] without texts."""
    return LookupCache(jnp.zeros((groups, sequences, length), jnp.int32), jnp.zeros((groups, sequences), jnp.int32))


def insert(cache: LookupCache, group: jax.Array, tokens: jax.Array, *, length: jax.Array) -> LookupCache:
    """Replace all texts of groups `group` [P] by `tokens` [P, M, S] of `length` [P, M].

    Groups of C and above are dropped; the others are distinct.
    """
    return LookupCache(
        cache.tokens.at[group].set(tokens, mode="drop"),
        cache.length.at[group].set(length, mode="drop"),
    )


def append(
    cache: LookupCache,
    group: jax.Array,
    sequence: jax.Array,
    *,
    positions: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
) -> LookupCache:
    """Write new tokens of some sequences by scattering B * Q numbers.

    Args:
      group, sequence: [B] int32, distinct pairs; rows of group C are dropped.
      positions: [B, Q] int32 of `tokens`; S is dropped.
      tokens: [B, Q] int32.
      length: [B] int32, valid tokens of each sequence afterwards.
    """
    return LookupCache(
        cache.tokens.at[group[:, None], sequence[:, None], positions].set(tokens, mode="drop"),
        cache.length.at[group, sequence].set(length, mode="drop"),
    )
