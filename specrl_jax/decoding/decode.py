"""The decode loop: many fused iterations in one compiled call."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.verify.op import Draft
from specrl_jax.core import stand_in
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.replay import replay
from specrl_jax.decoding.state import Cache, ChunkStatistics, EngineConfig, Params, Slots
from specrl_jax.decoding.step import StepOptions, no_draft, speculative_step


class ChunkInputs(NamedTuple):
    """Scalar inputs of one call; changing them compiles nothing."""

    seed: jax.Array  # [] uint32
    max_iterations: jax.Array  # [] int32
    stop_at_rows: jax.Array  # [] int32, end early when no more rows than this still run
    sync_cache: jax.Array  # [] bool, the drafter's cache missed tokens and is updated first


def chunk_inputs(seed: int, max_iterations: int, stop_at_rows: int = 0, sync_cache: bool = False) -> ChunkInputs:
    """Convert host numbers to the inputs of a compiled call."""
    numbers = np.uint32(seed % 2**32), np.int32(max_iterations), np.int32(stop_at_rows), np.bool_(sync_cache)
    return ChunkInputs(*(stand_in(x) for x in numbers))


def decode_chunk(
    params: Params,
    slots: Slots[Cache],
    inputs: ChunkInputs,
    *,
    k: int,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
    shardings: Slots,
) -> tuple[Slots[Cache], ChunkStatistics]:
    """Run up to `inputs.max_iterations` iterations with k drafted tokens."""
    drafter, seed = functions.drafter, inputs.seed
    options = StepOptions(functions.verify, functions.sampling, functions.eos_ids, config.width)

    def target_fn(tokens: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return functions.decode(params, tokens, positions, cache)

    def draft_fn(slots: Slots[Cache], seed: jax.Array) -> tuple[Draft, Cache]:
        return drafter.draft(params, slots, seed, k) if k else no_draft(slots, seed)

    def body(carry: tuple[jax.Array, Slots[Cache]]) -> tuple[jax.Array, Slots[Cache]]:
        i, slots = carry
        # Verification may split rows further than decoding does; pinned, its layout does not spread into the state.
        slots = jax.lax.with_sharding_constraint(slots, shardings)
        return i + 1, speculative_step(slots, seed, draft_fn, target_fn, options)

    def unfinished(carry: tuple[jax.Array, Slots[Cache]]) -> jax.Array:
        i, slots = carry
        goes_on = (i < inputs.max_iterations) & ((~slots.done).sum(dtype=jnp.int32) > inputs.stop_at_rows)
        if slots.mask is None:
            return goes_on
        return goes_on & (slots.mask.used.max() + (k + 1) * config.most_kept <= slots.mask.ids.shape[1])

    if k:
        # Over no tokens if nothing was missed: a loop of no turns does not copy the cache, as a cond would.
        length = jnp.where(inputs.sync_cache, slots.length, 0)
        slots = dataclasses.replace(slots, cache=drafter.sync_cache(params, slots.tokens, length, slots.cache))
    if slots.mask is not None:
        slots = dataclasses.replace(slots, mask=dataclasses.replace(slots.mask, used=jnp.zeros_like(slots.mask.used)))
    before = slots
    count, slots = jax.lax.while_loop(unfinished, body, (jnp.int32(0), slots))
    verifications, drafted, accepted = jax.tree.map(jnp.subtract, _counters(slots), _counters(before))
    replayed = None
    # At most half a chunk, so that the other half is left to be replayed.
    replay_length = min(drafter.length, config.chunk // 2)
    if drafter.replayable and not k and replay_length:
        replayed = replay(
            before, slots, lambda then: drafter.draft(params, then, seed, replay_length)[0], replay_length
        )
    return slots, ChunkStatistics(slots.done, slots.length, count, verifications, drafted, accepted, replayed)


def _counters(slots: Slots) -> tuple[jax.Array, jax.Array, jax.Array]:
    verifications, drafted, accepted = (
        x.sum(axis=0, dtype=jnp.int32) for x in (slots.verifications, slots.drafted, slots.accepted)
    )
    return verifications, drafted, accepted
