"""Texts on the device that drafters copy from: rollouts of the groups in flight, and earlier ones of their prompts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LookupCache(NamedTuple):
    """M texts of each of C groups, prompt and response by absolute position, as in `Slots.tokens`.

    Members 0..G-1 are the rollouts of this step, running and finished, the rest those of earlier epochs.

    Memory: C * M * (S + 1) * 4 bytes; 64 groups of 16 + 8 texts of 4,096 tokens take 25 MB. Whole on every device:
    the rows of a group may be on several.
    """

    tokens: jax.Array  # [C, M, S] int32
    length: jax.Array  # [C, M] int32, valid tokens, from position 0; 0: no text


def empty_corpus(groups: int, members: int, length: int) -> LookupCache:
    """C, M, S."""
    return LookupCache(jnp.zeros((groups, members, length), jnp.int32), jnp.zeros((groups, members), jnp.int32))


def admit(corpus: LookupCache, group: jax.Array, tokens: jax.Array, length: jax.Array) -> LookupCache:
    """The corpus with all texts of groups `group` [P] replaced by `tokens` [P, M, S] of `length` [P, M].

    Groups of C and above are dropped; the others are distinct.
    """
    return LookupCache(
        corpus.tokens.at[group].set(tokens, mode="drop"),
        corpus.length.at[group].set(length, mode="drop"),
    )


def record(
    corpus: LookupCache, group: jax.Array, member: jax.Array, positions: jax.Array, tokens: jax.Array, length: jax.Array
) -> LookupCache:
    """The corpus with new tokens of some texts, B * Q numbers scattered.

    Args:
      group: [B] int32; rows of group C are dropped. The other rows' (group, member) are distinct.
      member: [B] int32.
      positions: [B, Q] int32 of `tokens`; S is dropped.
      tokens: [B, Q] int32.
      length: [B] int32 of the whole texts from now on.
    """
    return LookupCache(
        corpus.tokens.at[group[:, None], member[:, None], positions].set(tokens, mode="drop"),
        corpus.length.at[group, member].set(length, mode="drop"),
    )
