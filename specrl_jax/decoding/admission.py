"""Admit drafts of a batch to verification, where an iteration verifies fewer than were drafted.

Verifying costs by the positions of all rows together, and rows differ in how far their drafts can be trusted. Draft i
of a row is worth c_1 ... c_i: the chance that it and all drafts before it are kept, by the confidences c. The most
valuable drafts of all rows are admitted, as many as the budget. A worth never grows along a row, so what is admitted of
a row are its first drafts.

Emitted tokens stay distributed as the target's, under every rule. c_i is a function of what came before draft i, and
the budget is fixed before drafting. Later drafts of a row are worth no more, and stand behind among equals: neither a
draft nor what follows it has a part in its own admission. Taking rows in the order of worth, each draft is admitted
before it is drawn. A threshold on q(x_i), or the best budget in hindsight, would change the distribution
(tests/decoding/test_admission.py enumerates all of these). Confidence-scheduled verification is DSpark's; that it may
not look ahead is its Appendix A.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Paging
from kernels_pallas.verify.types import Draft
from specrl_jax.decoding.pages import pick
from specrl_jax.decoding.state import Slots


class Admitted(NamedTuple):
    """The n positions of each of D shards' forward: its rows' last tokens, then the drafts that are admitted."""

    row: jax.Array  # [D, n] int32, among the rows of the shard
    offset: jax.Array  # [D, n] int32, 0: the row's last committed token; i: its draft i
    taken: jax.Array  # [D, n] bool, False: there are fewer drafts than the budget
    # [D, B / D, k + 1] int32, of a row's position among the n; arbitrary where it is none of them
    flat_index: jax.Array
    admitted: jax.Array  # [B] int32, drafts of each row


def admit(slots: Slots, draft: Draft, budget: int) -> Admitted:
    """Admit the `budget` most valuable of each shard's drafts, of which it has at least as many."""
    (B, k), D = draft.tokens.shape, len(slots.pool.count)
    drafted = k if draft.num_drafted is None else draft.num_drafted
    # A token of the target follows the last draft, and none is committed beyond the limit.
    drafted = jnp.where(slots.done, 0, jnp.minimum(drafted, slots.limit - slots.length - 1))
    worth = jnp.cumprod(jnp.clip(_confidences(slots, draft), 0, 1), axis=1)
    worth = jnp.where(jnp.arange(k)[None] < drafted[:, None], worth, -1.0)
    chosen = jax.vmap(lambda worth: _most_valuable(worth, budget))(worth.reshape(D, -1, k))
    return chosen._replace(admitted=chosen.admitted.reshape(B))


def _most_valuable(worth: jax.Array, budget: int) -> Admitted:
    """Admit up to `budget` drafts of one shard by their worth [B, k]; negative: not drafted."""
    B, k = worth.shape
    # Among equals the first: the lower row, and of one row the earlier draft.
    value, best = jax.lax.top_k(worth.reshape(-1), budget)
    rows, drafts = jnp.arange(B, dtype=jnp.int32), value >= 0
    row = jnp.concatenate([rows, best // k])
    offset = jnp.concatenate([jnp.zeros_like(rows), 1 + best % k])
    taken = jnp.concatenate([jnp.ones(B, bool), drafts])
    index = jnp.broadcast_to(rows[:, None], (B, k + 1))
    index = index.at[jnp.where(taken, row, B), offset].set(jnp.arange(B + budget, dtype=jnp.int32), mode="drop")
    return Admitted(row, offset, taken, flat_index=index, admitted=jnp.zeros(B, jnp.int32).at[best // k].add(drafts))


def _confidences(slots: Slots, draft: Draft) -> jax.Array:
    """Return [B, k] float32 chances that each draft is kept if those before it are.

    The drafter's own where it has some; else the draft's largest probability at each position. Of drafts without
    probabilities, the share of the row's earlier ones that were kept, of those whose predecessors were.
    """
    if draft.logits is None and draft.confidence is not None:  # all rows are the drafter's own
        return draft.confidence
    reached = jnp.minimum(slots.drafted[:, 1:], slots.accepted[:, :-1]).sum(axis=1) + slots.drafted[:, 0]
    acceptance = ((slots.accepted.sum(axis=1) + 1) / (reached + 2)).astype(jnp.float32)[:, None]
    if draft.logits is None:
        return jnp.broadcast_to(acceptance, draft.tokens.shape)
    confidence = draft.confidence
    if confidence is None:
        confidence = largest_probability(draft.logits, slots.sampling.divisor[:, None])
    return jnp.where(draft.deterministic[:, None], acceptance, confidence)


def largest_probability(logits: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return [...] float32: the largest of softmax(logits [..., Vd] / divisor [...])."""
    logits = logits.astype(jnp.float32) / divisor[..., None]
    return jnp.exp(logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1))


def flat_inputs(slots: Slots, inputs: jax.Array, admitted: Admitted) -> tuple[jax.Array, Paging]:
    """Return tokens [D n, 1] and where they stand: each position is a row of its own, over its sequence's pages.

    Args:
      inputs: [B, k + 1] int32, the last committed token of each row and its drafts.
    """
    running = inputs, jnp.where(slots.done, 0, slots.length), slots.table
    tokens, length, table = jax.tree.map(lambda x: pick(x, admitted.row), running)
    offset = admitted.offset.reshape(-1)
    positions = jnp.where(admitted.taken.reshape(-1) & (length > 0), length - 1 + offset, -1)
    return jnp.take_along_axis(tokens, offset[:, None], axis=1), Paging(table, positions[:, None])
