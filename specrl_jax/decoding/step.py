"""One fused iteration of decoding: draft, verify, commit.

Invariant between iterations, for every row: tokens [0, length) are committed, the cache holds positions
[0, length - 1), and the last committed token is the first input of the next target forward. Plain decoding is the same
iteration with k = 0.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Paging
from kernels_pallas.verify.op import Draft, Noise, Verified, VerifyInputs
from specrl_jax.decoding.admission import admit, flat_inputs
from specrl_jax.decoding.features.base import Committed, Feature
from specrl_jax.decoding.lookup_cache import append
from specrl_jax.decoding.pages import pick
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Cache, Slots

# (tokens [B, Q], where they stand, slots) -> (logits [B, Q, V] float32, slots with the caches after it)
TargetFn = Callable[[jax.Array, Paging, Slots[Cache]], tuple[jax.Array, Slots[Cache]]]
# (slots, seed) -> (draft, cache)
DraftFn = Callable[[Slots[Cache], jax.Array], tuple[Draft, Cache]]
VerifyFn = Callable[[VerifyInputs, Sampling], Verified]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Static arguments of an iteration besides the models."""

    verify: VerifyFn
    sampling: Sampling
    eos_ids: tuple[int, ...]
    width: int = 0  # least positions per forward and verification; those beyond the draft only fix the shape
    budget: int = 0  # drafts of a shard that are verified at most; 0: all
    features: tuple[Feature, ...] = ()


def no_draft(slots: Slots[Cache], seed: jax.Array) -> tuple[Draft, Cache]:
    """Draft nothing: plain decoding, k = 0."""
    B = slots.length.shape[0]
    return Draft(jnp.zeros((B, 0), jnp.int32), None, jnp.zeros((B,), bool)), slots.cache


def speculative_step(
    slots: Slots[Cache], seed: jax.Array, draft_fn: DraftFn[Cache], *, target_fn: TargetFn[Cache], options: StepOptions
) -> Slots[Cache]:
    """Extend every running row by 1 to k + 1 tokens."""
    with jax.named_scope("draft"):
        draft, cache = draft_fn(slots, seed)
        slots = dataclasses.replace(slots, cache=cache)
    with jax.named_scope("verify"):
        last = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)
        inputs = jnp.concatenate([last, jnp.maximum(draft.tokens, 0)], axis=1)
        if not options.budget or draft.tokens.size <= options.budget * len(slots.pool.count):
            inputs = jnp.pad(inputs, ((0, 0), (0, max(0, options.width - inputs.shape[1]))))
            positions = slots.length[:, None] - 1 + jnp.arange(inputs.shape[1])[None]
            logits, slots = target_fn(inputs, slots.place(positions), slots)
        else:
            chosen = admit(slots, draft, options.budget)
            tokens, paging = flat_inputs(slots, inputs, chosen)
            logits, slots = target_fn(tokens, paging, slots)
            logits = pick(logits[:, 0], chosen.flat_index)
            draft = dataclasses.replace(draft, num_drafted=chosen.admitted)
        noise = Noise(seed, slots.rollout_id, slots.length)
        verified = options.verify(VerifyInputs(noise, draft, logits, sampling=slots.sampling), options.sampling)
    with jax.named_scope("commit"):
        slots = _count(slots, draft, verified.num_accepted)
        return commit(slots, verified, options.eos_ids, _draft_positions(draft, verified), options.features)


def _draft_positions(draft: Draft, verified: Verified) -> jax.Array | None:
    """Return what `Slots.draft_positions` holds of the emitted tokens [B, Q] int8; None where nothing was drafted."""
    if not draft.tokens.shape[1]:
        return None
    number = jnp.arange(verified.tokens.shape[1], dtype=jnp.int8)[None]
    # A draft whose other rows have probabilities is deterministic where a lookup replaced it.
    sign = 1 if draft.logits is None else jnp.where(draft.deterministic, -1, 1)[:, None]
    return jnp.where(number < verified.num_accepted[:, None], sign * (number + 1), 0).astype(jnp.int8)


def _count(slots: Slots[Cache], draft: Draft, num_accepted: jax.Array) -> Slots[Cache]:
    """Count the drafts of running rows, before any cut at end-of-text or limit."""
    number = jnp.arange(slots.drafted.shape[1])[None]
    active = ~slots.done[:, None]
    count = draft.tokens.shape[1] if draft.num_drafted is None else draft.num_drafted[:, None]
    return dataclasses.replace(
        slots,
        drafted=slots.drafted + (active & (number < count)),
        accepted=slots.accepted + (active & (number < num_accepted[:, None])),
    )


def commit(
    slots: Slots[Cache],
    verified: Verified,
    eos_ids: tuple[int, ...],
    draft_positions: jax.Array | None = None,
    features: tuple[Feature, ...] = (),
) -> Slots[Cache]:
    """Append the emitted tokens; cut after the first one that ends the response, and at the limit.

    Index arithmetic only: the cache is neither copied nor rolled back.

    Args:
      draft_positions: [B, Q] int8, of the emitted tokens; None: all 0, as the slots hold them already.
    """
    tokens, count = verified.tokens, verified.num_accepted + 1
    offsets = jnp.arange(tokens.shape[1])[None]
    ends = jnp.isin(tokens, jnp.array(eos_ids, jnp.int32))
    looked = {feature.name: feature.look(slots.features[feature.name], tokens) for feature in features}
    for _, stopped in looked.values():
        ends = ends if stopped is None else ends | stopped
    ends &= offsets < count[:, None]
    ended = ends.any(axis=1)
    count = jnp.where(ended, jnp.argmax(ends, axis=1) + 1, count)
    count = jnp.where(slots.done, 0, jnp.minimum(count, slots.limit - slots.length)).astype(jnp.int32)
    S = slots.tokens.shape[1]
    here = offsets < count[:, None]
    where = jnp.where(here, slots.length[:, None] + offsets, S)
    length, committed = slots.length + count, Committed(verified, here, count, where)
    lookup_cache = slots.lookup_cache
    if lookup_cache is not None:
        # The group of a finished row may already belong to another prompt.
        group = jnp.where(slots.done, lookup_cache.tokens.shape[0], slots.group)
        lookup_cache = append(lookup_cache, group, slots.sequence, positions=where, tokens=tokens, length=length)
    return dataclasses.replace(
        slots,
        tokens=write_columns(slots.tokens, where, tokens),
        logprobs=write_columns(slots.logprobs, where, verified.logprobs),
        draft_positions=slots.draft_positions
        if draft_positions is None
        else write_columns(slots.draft_positions, where, draft_positions),
        length=length,
        done=slots.done | ended | (length >= slots.limit),
        verifications=slots.verifications + ~slots.done,
        lookup_cache=lookup_cache,
    ).with_features(features, lambda one, _: one.commit(looked[one.name][0], committed))


def write_columns(buffer: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
    """Write new [B, Q] into buffer [B, S] at columns `where` [B, Q]; column S is dropped."""
    return jax.vmap(lambda row, columns, values: row.at[columns].set(values, mode="drop"))(
        buffer, where, new.astype(buffer.dtype)
    )
