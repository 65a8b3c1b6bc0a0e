"""Counts the drafts that a lookup drafter would have had accepted while nothing was drafted.

Its drafts are functions of committed tokens and are verified by exact match. Both are known after plain decoding, so
the speculation over a chunk's tokens can be repeated without the target, and the controller needs no probe to learn the
acceptance.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from kernels_pallas.verify.reference import within
from specrl_jax.decoding.state import Slots

# slots -> deterministic draft of k tokens
CopyFn = Callable[[Slots], Draft]


def replay(before: Slots, after: Slots, copy_fn: CopyFn, *, k: int) -> jax.Array:
    """Repeat speculation over the tokens committed between two states, all rows at once as the engine would.

    The first verification of a row is not counted: a real one need not have started at that token.

    Args:
      before, after: the slots at the start and the end of a chunk.
      k: tokens of a draft.
    Returns:
      [1 + k] int32: verifications followed by at least k tokens to compare with, and of those the ones that accept
      draft i and all before it.
    """

    def running(length: jax.Array) -> jax.Array:
        return ~before.done & (length + k <= after.length)

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        length, counts = state
        following = jnp.take_along_axis(after.tokens, length[:, None] + jnp.arange(k)[None], axis=1, mode="clip")
        draft = copy_fn(_rewound(after, length))
        accepted = jnp.cumprod(within(draft, draft.tokens == following), axis=1, dtype=jnp.int32)
        counted = (running(length) & (length > before.length))[:, None]
        counts += (counted * jnp.pad(accepted, ((0, 0), (1, 0)), constant_values=1)).sum(axis=0, dtype=jnp.int32)
        return jnp.minimum(length + 1 + accepted.sum(axis=1, dtype=jnp.int32), after.length), counts

    start = before.length, jnp.zeros(1 + k, jnp.int32)
    return jax.lax.while_loop(lambda carry: running(carry[0]).any(), turn, start)[1]


def _rewound(slots: Slots, length: jax.Array) -> Slots:
    """Return the slots as of `length` [B] tokens per row, in the lookup cache too."""
    cache = slots.lookup_cache
    if cache is not None:
        # The group of a row that ended before this chunk may already belong to another prompt; its length is unchanged.
        group = jnp.where(length < slots.length, slots.group, cache.tokens.shape[0])
        cache = cache._replace(length=cache.length.at[group, slots.sequence].set(length, mode="drop"))
    return dataclasses.replace(slots, length=length, lookup_cache=cache)
