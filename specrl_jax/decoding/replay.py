"""What a drafter that copies would have had accepted while nothing was drafted.

Its drafts are functions of committed tokens and verified by equality. Both are still there after plain decoding, so a
chunk's text can be speculated over again without the target, and the controller learns what drafting is worth now
without a probe.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.verify.reference import within
from specrl_jax.decoding.step import Draft, Slots

# slots -> deterministic draft of k tokens
CopyFn = Callable[[Slots], Draft]


def replay(before: Slots, after: Slots, copy_fn: CopyFn, k: int) -> jax.Array:
    """Speculates again, all rows at once as the engine would, over the tokens committed between two states.

    The first verification of a row is not counted: speculation need not have come to rest there.

    Args:
      before, after: the slots at the start and the end of a chunk.
      k: tokens of a draft.
    Returns:
      [1 + k] int32: verifications that had k tokens after them to be compared with, and those of them that keep draft
      i and all before it.
    """

    def going(length: jax.Array) -> jax.Array:
        return ~before.done & (length + k <= after.length)

    def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        length, counts = carry
        following = jnp.take_along_axis(after.tokens, length[:, None] + jnp.arange(k)[None], axis=1, mode="clip")
        draft = copy_fn(_rewound(after, length))
        kept = jnp.cumprod(within(draft, draft.tokens == following), axis=1, dtype=jnp.int32)
        counted = (going(length) & (length > before.length))[:, None]
        counts += (counted * jnp.pad(kept, ((0, 0), (1, 0)), constant_values=1)).sum(axis=0, dtype=jnp.int32)
        return jnp.minimum(length + 1 + kept.sum(axis=1, dtype=jnp.int32), after.length), counts

    start = before.length, jnp.zeros(1 + k, jnp.int32)
    return jax.lax.while_loop(lambda carry: going(carry[0]).any(), turn, start)[1]


def _rewound(slots: Slots, length: jax.Array) -> Slots:
    """The slots when their rows had `length` [B] tokens: siblings have not read further either."""
    corpus = slots.corpus
    if corpus is not None:
        # The group of a row that ended before this chunk may be another prompt's by now; its length has not changed.
        group = jnp.where(length < slots.length, slots.group, corpus.tokens.shape[0])
        corpus = corpus._replace(length=corpus.length.at[group, slots.member].set(length, mode="drop"))
    return slots.replace(length=length, corpus=corpus)
