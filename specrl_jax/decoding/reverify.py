"""Verify what a rollout drew before under other weights: its longest prefix that the weights at hand draw too is kept.

Under `coupled`, and greedily, a rollout is a function F of the weights and of the noise of its id. Tokens that earlier
weights drew with that noise are a draft for the present ones: verified like any other, kept up to the first place where
F draws another token, which is taken instead. What follows is decoded as ever. So a rollout that began under earlier
weights is exactly a sample of the present ones, and its log-probs are theirs.

This is a draft without probabilities, `k` tokens at a time, by rows that still have such tokens; all others hold still.
It counts in no statistics of acceptance: what the drafter is worth shows in the tokens after it.

Partial rollouts (continuation.py) keep their tokens whatever the weights at hand would draw. The same loop then only
computes keys and values: nothing is drawn, and the head over the vocabulary does not run.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Paging
from kernels_pallas.verify.op import Draft, SamplingMask, Verified, VerifyInputs
from specrl_jax.decoding.decode import (
    ChunkInputs,
    mask_has_room,
    reserve,
    step_options,
    with_empty_mask,
    with_stop_state,
)
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.records import free_finished
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Cache, EngineConfig, Params, Slots
from specrl_jax.decoding.step import speculative_step

# Tokens verified at a time: with the one before them as many queries of a row as the attention kernels take.
AT_ONCE = 15


class Reverified(NamedTuple):
    """Statistics of one call, small enough to fetch after every call."""

    done: jax.Array  # [B] bool
    length: jax.Array  # [B] int32
    iterations: jax.Array  # [] int32
    unverified: jax.Array  # [] bool: rows have tokens that are not verified yet
    free: jax.Array  # [D] int32, free pages
    short: jax.Array  # [] bool: the next iteration would need more


def reverify_chunk(
    params: Params,
    slots: Slots[Cache],
    inputs: ChunkInputs,
    *,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
    shardings: Slots,
) -> tuple[Slots[Cache], Reverified]:
    """Verify tokens of earlier weights until none are left, up to `inputs.max_iterations` times.

    With config.earlier "keep" they are all kept.
    """
    k, keeps = at_once(config), config.earlier == "keep"
    options = step_options(slots, functions, config)
    slots, shardings = with_stop_state(with_empty_mask(slots), shardings, functions)

    def target_fn(tokens: jax.Array, paging: Paging, cache: Cache) -> tuple[jax.Array, Cache]:
        return functions.decode(params, tokens, paging, cache=cache)

    def draft_fn(slots: Slots[Cache], seed: jax.Array) -> tuple[Draft, Cache]:
        # Where all are kept, the last of them takes the place of the token that a verification draws.
        return earlier_tokens(slots, k, all_but_last=keeps), slots.cache

    def body(state: tuple[jax.Array, jax.Array, Slots[Cache]]) -> tuple[jax.Array, jax.Array, Slots[Cache]]:
        i, _, slots = state
        slots = jax.lax.with_sharding_constraint(slots, shardings)
        verifies = has_earlier_tokens(slots)
        verify = functools.partial(_keep, slots) if keeps else options.verify
        stepped = speculative_step(
            dataclasses.replace(slots, done=~verifies),
            inputs.seed,
            draft_fn,
            target_fn=target_fn,
            options=dataclasses.replace(options, verify=verify),
        )
        return i + 1, *_reserved(_after(slots, stepped, verifies))

    def _reserved(slots: Slots[Cache]) -> tuple[jax.Array, Slots[Cache]]:
        enough, taken = reserve(dataclasses.replace(slots, done=~has_earlier_tokens(slots)), k, config)
        return enough, dataclasses.replace(taken, done=slots.done)

    def unfinished(state: tuple[jax.Array, jax.Array, Slots[Cache]]) -> jax.Array:
        i, enough, slots = state
        goes_on = (i < inputs.max_iterations) & has_earlier_tokens(slots).any() & enough
        return goes_on & (keeps or mask_has_room(slots, k, config))  # no masks are recorded of tokens that are kept

    count, enough, slots = jax.lax.while_loop(unfinished, body, (jnp.int32(0), *_reserved(slots)))
    slots = free_finished(dataclasses.replace(slots, stop_state=None))
    unverified = has_earlier_tokens(slots).any()
    free = slots.pool.count
    return slots, Reverified(slots.done, slots.length, count, unverified=unverified, free=free, short=~enough)


def at_once(config: EngineConfig) -> int:
    """Return how many tokens are verified at a time: under rollout.parity in the one shape of every forward."""
    return config.width - 1 if config.width else AT_ONCE


def has_earlier_tokens(slots: Slots[Cache]) -> jax.Array:
    """Return [B] bool: rows that run and have tokens of earlier weights behind their last committed token."""
    assert slots.earlier is not None
    return ~slots.done & (slots.earlier.length > slots.length)


def earlier_tokens(slots: Slots[Cache], k: int, all_but_last: bool) -> Draft:
    """Return the next k of each row's tokens of earlier weights as a draft."""
    assert slots.earlier is not None
    count = jnp.clip(slots.earlier.length - all_but_last - slots.length, 0, k).astype(jnp.int32)
    return Draft(_next_earlier(slots, k), None, jnp.ones_like(slots.done), num_drafted=count)


def _next_earlier(slots: Slots[Cache], k: int) -> jax.Array:
    assert slots.earlier is not None
    positions = slots.length[:, None] + jnp.arange(k)[None]
    return jnp.take_along_axis(slots.earlier.tokens, positions, axis=1, mode="clip")


def _keep(slots: Slots[Cache], inputs: VerifyInputs, sampling: Sampling) -> Verified:
    """Return all drafts and the token after them as if verified; their log-probs and masks are those of the host."""
    count, (B, k) = inputs.draft.num_drafted, inputs.draft.tokens.shape
    assert count is not None
    nothing = jnp.zeros((B, k + 1), jnp.int32)
    mask = SamplingMask(nothing[..., None], nothing) if slots.mask is not None else None
    return Verified(_next_earlier(slots, k + 1), count, jnp.zeros((B, k + 1), jnp.float32), mask=mask)


def _after(slots: Slots[Cache], stepped: Slots[Cache], verifies: jax.Array) -> Slots[Cache]:
    """Return the state after an iteration: the counters of drafts as before it, and what is still to be verified."""
    assert slots.earlier is not None
    last = stepped.length[:, None] - 1
    drawn, earlier = (
        jnp.take_along_axis(tokens, last, axis=1)[:, 0] for tokens in (stepped.tokens, slots.earlier.tokens)
    )
    # All tokens before the last agreed, or they would not have been kept.
    agrees = (drawn == earlier) & (stepped.length <= slots.earlier.length)
    length = jnp.where(verifies & ~agrees, 0, slots.earlier.length)
    kept = jnp.where(verifies, stepped.length - slots.length - ~agrees, 0)
    return dataclasses.replace(
        stepped,
        done=jnp.where(verifies, stepped.done, slots.done),
        verifications=slots.verifications,
        drafted=slots.drafted,
        accepted=slots.accepted,
        draft_positions=slots.draft_positions,
        earlier=slots.earlier._replace(length=length, num_kept=slots.earlier.num_kept + kept),
    )
