"""One fused iteration of decoding: draft, verify, commit.

Invariant between iterations, for every row: tokens [0, length) are committed, the cache holds positions
[0, length - 1), and the last committed token is pending: it is the first input of the next target forward. Plain
decoding is the same iteration with nothing drafted.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft, Noise, Verified, VerifyInputs, verify
from specrl_jax.decoding.lookup_cache import LookupCache, record
from specrl_jax.decoding.sampling import Sampling


@flax.struct.dataclass
class Slots:
    """State of B sequences being decoded."""

    tokens: jax.Array  # [B, S] int32, prompt and response by absolute position
    logprobs: jax.Array  # [B, S] float32, nats, of response tokens by absolute position; 0 elsewhere
    prompt_length: jax.Array  # [B] int32, tokens
    length: jax.Array  # [B] int32, committed tokens, prompt included
    limit: jax.Array  # [B] int32, `length` never exceeds it
    done: jax.Array  # [B] bool
    rollout_id: jax.Array  # [B] uint32
    verifications: jax.Array  # [B] int32, target forwards this row took part in
    drafted: jax.Array  # [B, longest draft] int32, verifications that drafted at least i + 1 tokens
    accepted: jax.Array  # [B, longest draft] int32, those of them that kept draft i and all before it
    group: jax.Array  # [B] int32, its prompt's group in the corpus; the number of groups where it has none
    member: jax.Array  # [B] int32, which of its group's rollouts it is
    corpus: LookupCache | None  # texts that drafters copy from; None where none does
    cache: Any  # the target's and the drafter's, opaque here


# (tokens [B, Q], positions [B, Q], cache) -> (logits [B, Q, V] float32, cache)
TargetFn = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
# (slots, seed) -> (draft, cache)
DraftFn = Callable[[Slots, jax.Array], tuple[Draft, Any]]
VerifyFn = Callable[[VerifyInputs, Sampling], Verified]


def no_draft(slots: Slots, seed: jax.Array) -> tuple[Draft, Any]:
    """Plain decoding: k = 0."""
    B = slots.length.shape[0]
    return Draft(jnp.zeros((B, 0), jnp.int32), None, jnp.zeros((B,), bool)), slots.cache


def speculative_step(
    slots: Slots,
    seed: jax.Array,
    draft_fn: DraftFn,
    target_fn: TargetFn,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    verify_fn: VerifyFn = verify,
    width: int = 0,
) -> Slots:
    """Extends every row that is not done by 1 to k + 1 tokens.

    Args:
      width: forward and verification are over at least this many positions, those beyond the draft of no use.
    """
    with jax.named_scope("draft"):
        draft, cache = draft_fn(slots, seed)
    with jax.named_scope("verify"):
        last = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)
        inputs = jnp.concatenate([last, jnp.maximum(draft.tokens, 0)], axis=1)
        inputs = jnp.pad(inputs, ((0, 0), (0, max(0, width - inputs.shape[1]))))
        positions = slots.length[:, None] - 1 + jnp.arange(inputs.shape[1])[None]
        logits, cache = target_fn(inputs, positions, cache)
        noise = Noise(seed, slots.rollout_id, slots.length)
        verified = verify_fn(VerifyInputs(noise, draft, logits), sampling)
    with jax.named_scope("commit"):
        slots = _count(slots.replace(cache=cache), draft, verified.num_accepted)
        return commit(slots, verified.tokens, verified.logprobs, verified.num_accepted + 1, eos_ids)


def _count(slots: Slots, draft: Draft, num_accepted: jax.Array) -> Slots:
    """Counts drafts of rows that were not done, before any cut at end-of-text or limit."""
    place = jnp.arange(slots.drafted.shape[1])[None]
    active = ~slots.done[:, None]
    count = draft.tokens.shape[1] if draft.num_drafted is None else draft.num_drafted[:, None]
    return slots.replace(
        drafted=slots.drafted + (active & (place < count)),
        accepted=slots.accepted + (active & (place < num_accepted[:, None])),
    )


def commit(slots: Slots, tokens: jax.Array, logprobs: jax.Array, count: jax.Array, eos_ids: tuple[int, ...]) -> Slots:
    """Appends the first `count` [B] of `tokens` [B, Q]: cut after the first end-of-text, and at the limit.

    Index arithmetic only: nothing of the cache is copied or rolled back.
    """
    offsets = jnp.arange(tokens.shape[1])[None]
    is_eos = jnp.isin(tokens, jnp.array(eos_ids, jnp.int32)) & (offsets < count[:, None])
    ended = is_eos.any(axis=1)
    count = jnp.where(ended, jnp.argmax(is_eos, axis=1) + 1, count)
    count = jnp.where(slots.done, 0, jnp.minimum(count, slots.limit - slots.length)).astype(jnp.int32)
    S = slots.tokens.shape[1]
    where = jnp.where(offsets < count[:, None], slots.length[:, None] + offsets, S)
    length = slots.length + count
    corpus = slots.corpus
    if corpus is not None:
        # The group of a finished row may be another prompt's by now.
        group = jnp.where(slots.done, corpus.tokens.shape[0], slots.group)
        corpus = record(corpus, group, slots.member, where, tokens, length)
    return slots.replace(
        tokens=_put(slots.tokens, where, tokens),
        logprobs=_put(slots.logprobs, where, logprobs),
        length=length,
        done=slots.done | ended | (length >= slots.limit),
        verifications=slots.verifications + ~slots.done,
        corpus=corpus,
    )


def _put(buffer: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
    """buffer [B, S] with new [B, Q] at columns `where` [B, Q]; column S is dropped."""
    return jax.vmap(lambda row, columns, values: row.at[columns].set(values, mode="drop"))(
        buffer, where, new.astype(buffer.dtype)
    )
