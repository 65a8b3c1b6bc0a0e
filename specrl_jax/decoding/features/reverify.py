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
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.verify.op import Draft, SamplingMask, Verified, VerifyInputs
from specrl_jax.core import stand_in
from specrl_jax.decoding import decode
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.features.base import Feature, Lowerable
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.pages import where_rows
from specrl_jax.decoding.programs import EnginePrograms, Program
from specrl_jax.decoding.requests import Requests
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Cache, EngineConfig, Params, PrefillBatch, Slots
from specrl_jax.decoding.step import speculative_step

# Tokens verified at a time: with the one before them as many queries of a row as the attention kernels take.
AT_ONCE = 15


class Earlier(NamedTuple):
    """Tokens that earlier weights drew with the noise of the same rollouts, to be verified."""

    tokens: jax.Array  # [B, S] int32, prompt and response by absolute position
    length: jax.Array  # [B] int32, tokens; 0 once one of them was not kept
    num_kept: jax.Array  # [B] int32, response tokens that were kept


@dataclasses.dataclass(frozen=True)
class Reverification(Feature):
    """Lets rollouts begin with tokens of earlier weights, and counts those kept in `reverified` [R].

    Those of a refill's input are `Earlier.tokens` and `Earlier.length`; 0: none.
    """

    keeps: bool = False  # all of them; else those that the weights at hand draw too

    name = "reverify"
    once = ("reverify",)

    def empty(self, config: EngineConfig, longest: int) -> Earlier:
        B, S = config.num_slots, config.cache_length
        return Earlier(jnp.zeros((B, S), jnp.int32), jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32))

    def start(self, state: Earlier, batch: PrefillBatch, length: jax.Array) -> Earlier:
        tokens, until = batch.features[self.name]
        given = Earlier(tokens, until, jnp.zeros_like(state.num_kept))
        return jax.tree.map(functools.partial(where_rows, batch.fresh), given, state)

    def at_once(self, config: EngineConfig) -> int:
        """Return how many tokens are verified at a time: under rollout.parity in the one shape of every forward."""
        return config.width - 1 if config.width else AT_ONCE

    def describe(self, programs: EnginePrograms, program: Program, params: Any) -> Lowerable:
        return programs.describe_chunk(functools.partial(reverify_chunk, feature=self), program.size, params)

    def refill_input(self, config: EngineConfig, requests: Requests, starts: dict[int, int]) -> Any:
        B, S = config.num_slots, config.cache_length
        tokens, length = np.zeros((B, S), np.int32), np.zeros(B, np.int32)
        for row, request in starts.items():
            if (response := requests.earlier.get(int(requests.ids(np.array(request))))) is not None:
                text = np.concatenate([requests.prompt(request), response])[:S]
                tokens[row, : len(text)], length[row] = text, len(text)
        return stand_in(tokens), stand_in(length)

    def entered(self, batch: ActiveBatch, state: Any, length: Any) -> None:
        """Verify what earlier weights drew of these rows."""
        unverified = bool(np.any(np.asarray(state[1]) > length))
        while unverified:
            inputs, active = decode.chunk_inputs(batch.seed, batch.config.chunk, batch.config.shards), batch.active
            batch.slots, found = batch.run("reverify", batch.params, batch.slots, inputs)
            found = batch.fetch(found)
            unverified = bool(found.unverified)
            batch.take_chunk(active, found)
            batch.behind = float("inf")  # the drafter has not seen these tokens

    def columns(self, state: Earlier) -> dict[str, Any]:
        return {"reverified": state.num_kept}


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
    inputs: decode.ChunkInputs,
    *,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
    shardings: Slots,
    feature: Reverification,
) -> tuple[Slots[Cache], Reverified]:
    """Verify tokens of earlier weights until none are left, up to `inputs.max_iterations` times."""
    k, keeps = feature.at_once(config), feature.keeps
    options, slots = decode.step_options(slots, functions, config), decode.begin_chunk(slots, config)

    def draft_fn(slots: Slots[Cache], seed: jax.Array) -> tuple[Draft, Cache]:
        # Where all are kept, the last of them takes the place of the token that a verification draws.
        count = jnp.clip(_earlier(slots).length - keeps - slots.length, 0, k).astype(jnp.int32)
        return Draft(_next_earlier(slots, k), None, jnp.ones_like(slots.done), num_drafted=count), slots.cache

    def body(state: tuple[jax.Array, jax.Array, Slots[Cache]]) -> tuple[jax.Array, jax.Array, Slots[Cache]]:
        i, _, slots = state
        slots = jax.lax.with_sharding_constraint(slots, shardings)
        verifies = _has_earlier_tokens(slots)
        verify = functools.partial(_keep, slots) if keeps else options.verify
        stepped = speculative_step(
            dataclasses.replace(slots, done=~verifies),
            inputs.seed,
            draft_fn,
            target_fn=functions.target_fn(params),
            options=dataclasses.replace(options, verify=verify),
        )
        return i + 1, *_reserved(_after(slots, stepped, verifies))

    def _reserved(slots: Slots[Cache]) -> tuple[jax.Array, Slots[Cache]]:
        enough, taken = decode.reserve(dataclasses.replace(slots, done=~_has_earlier_tokens(slots)), k, config)
        return enough, dataclasses.replace(taken, done=slots.done)

    def unfinished(state: tuple[jax.Array, jax.Array, Slots[Cache]]) -> jax.Array:
        i, enough, slots = state
        goes_on = (i < inputs.max_iterations) & _has_earlier_tokens(slots).any() & enough
        return goes_on & (
            keeps or decode.features_have_room(slots, k + 1, config)
        )  # no masks are recorded of tokens that are kept

    count, enough, slots = jax.lax.while_loop(unfinished, body, (jnp.int32(0), *_reserved(slots)))
    slots = decode.end_chunk(slots, config)
    unverified, free = _has_earlier_tokens(slots).any(), slots.pool.count
    return slots, Reverified(slots.done, slots.length, count, unverified=unverified, free=free, short=~enough)


def _earlier(slots: Slots) -> Earlier:
    return cast(Earlier, slots.features[Reverification.name])


def _has_earlier_tokens(slots: Slots[Cache]) -> jax.Array:
    """Return [B] bool: rows that run and have tokens of earlier weights behind their last committed token."""
    return ~slots.done & (_earlier(slots).length > slots.length)


def _next_earlier(slots: Slots[Cache], k: int) -> jax.Array:
    positions = slots.length[:, None] + jnp.arange(k)[None]
    return jnp.take_along_axis(_earlier(slots).tokens, positions, axis=1, mode="clip")


def _keep(slots: Slots[Cache], inputs: VerifyInputs, sampling: Sampling) -> Verified:
    """Return all drafts and the token after them as if verified; their log-probs and masks are those of the host."""
    count, (B, k) = inputs.draft.num_drafted, inputs.draft.tokens.shape
    assert count is not None
    nothing = jnp.zeros((B, k + 1), jnp.int32)
    mask = SamplingMask(nothing[..., None], nothing) if "sampling_mask" in slots.features else None
    return Verified(_next_earlier(slots, k + 1), count, jnp.zeros((B, k + 1), jnp.float32), mask=mask)


def _after(slots: Slots[Cache], stepped: Slots[Cache], verifies: jax.Array) -> Slots[Cache]:
    """Return the state after an iteration: the counters of drafts as before it, and what is still to be verified."""
    earlier, last = _earlier(slots), stepped.length[:, None] - 1
    drawn, before = (jnp.take_along_axis(tokens, last, axis=1)[:, 0] for tokens in (stepped.tokens, earlier.tokens))
    # All tokens before the last agreed, or they would not have been kept.
    agrees = (drawn == before) & (stepped.length <= earlier.length)
    length = jnp.where(verifies & ~agrees, 0, earlier.length)
    kept = jnp.where(verifies, stepped.length - slots.length - ~agrees, 0)
    return dataclasses.replace(
        stepped,
        done=jnp.where(verifies, stepped.done, slots.done),
        verifications=slots.verifications,
        drafted=slots.drafted,
        accepted=slots.accepted,
        draft_positions=slots.draft_positions,
        features=stepped.features
        | {Reverification.name: earlier._replace(length=length, num_kept=earlier.num_kept + kept)},
    )
