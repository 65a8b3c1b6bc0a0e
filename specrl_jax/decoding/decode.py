"""The decode loop: many fused iterations in one compiled call."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kernels_pallas.verify.op import Draft
from specrl_jax.core import stand_in
from specrl_jax.decoding.drafters import CommittedTokens
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.pages import missing, release, take
from specrl_jax.decoding.replay import replay
from specrl_jax.decoding.state import Cache, ChunkStatistics, EngineConfig, Params, Slots
from specrl_jax.decoding.step import StepOptions, no_draft, speculative_step


class ChunkInputs(NamedTuple):
    """Inputs of one call; changing them compiles nothing."""

    seed: jax.Array  # [] uint32
    max_iterations: jax.Array  # [] int32
    stop_at_rows: jax.Array  # [D] int32, end early when no more rows of the shards than this still run
    sync_cache: jax.Array  # [] bool, the drafter's cache missed tokens and is updated first


def chunk_inputs(
    seed: int, max_iterations: int, shards: int = 1, *, stop_at_rows: np.ndarray | int = 0, sync_cache: bool = False
) -> ChunkInputs:
    """Convert host numbers to the inputs of a compiled call; `stop_at_rows` of each of D shards, or of all."""
    rows = np.broadcast_to(stop_at_rows, (shards,)).astype(np.int32)
    return ChunkInputs(
        stand_in(np.uint32(seed % 2**32)),
        stand_in(np.int32(max_iterations)),
        stop_at_rows=stand_in(rows),
        sync_cache=stand_in(np.bool_(sync_cache)),
    )


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
    if k:
        # Over no tokens if nothing was missed: a loop of no turns does not copy the cache, as a cond would.
        text = CommittedTokens(slots.tokens, jnp.where(inputs.sync_cache & ~slots.done, slots.length, 0), slots.table)
        slots = dataclasses.replace(slots, cache=drafter.sync_cache(params, text, slots.cache))
    before = slots = begin_chunk(slots, config)
    loop = functools.partial(_iterate, k=k, functions=functions, config=config, shardings=shardings)
    count, enough, slots = _of_each_copy(loop, config, shardings, slots)(params, slots, inputs)
    count, enough, slots = count.max(), enough.all(), end_chunk(slots, config)
    verifications, drafted, accepted = jax.tree.map(jnp.subtract, _counters(slots), _counters(before))
    replayed = None
    # At most half a chunk, so that the other half is left to be replayed.
    replay_length = min(drafter.length, config.chunk // 2)
    if drafter.replayable and not k and replay_length:
        replayed = replay(
            before, slots, lambda then: drafter.draft(params, then, seed, replay_length)[0], k=replay_length
        )
    return slots, ChunkStatistics(
        slots.done,
        slots.length,
        count,
        verifications=verifications,
        drafted=drafted,
        accepted=accepted,
        free=slots.pool.count,
        short=~enough,
        replayed=replayed,
    )


# (params, slots, inputs) -> (iterations [copies], whether the pages of the next one are there [copies], slots)
Loop = Callable[[Params, Slots[Cache], ChunkInputs], tuple[jax.Array, jax.Array, Slots[Cache]]]


def _of_each_copy(
    loop: Loop[Params, Cache], config: EngineConfig, shardings: Slots, slots: Slots[Cache]
) -> Loop[Params, Cache]:
    """Let the devices of each copy of the weights loop by themselves, over their own rows.

    Else the loop's condition is summed over all devices in each iteration. A lookup cache is shared by all rows. Where
    the weights of a copy are split, all copies loop together: inside a map XLA splits a copy's rows over its devices,
    and gathers their text in each iteration.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh if config.copies else None
    if mesh is None or slots.lookup_cache is not None or mesh.size == 1:
        return loop
    if any(mesh.shape[name] > 1 for name in mesh.axis_names if name not in config.copies):
        return loop
    specs = jax.tree.map(lambda sharding: _over(sharding.spec, config.copies), shardings)
    everywhere, by_copy = stand_in(PartitionSpec()), stand_in(PartitionSpec(config.copies))
    inputs = ChunkInputs(everywhere, everywhere, stop_at_rows=by_copy, sync_cache=everywhere)
    return jax.shard_map(
        loop,
        mesh=mesh,
        in_specs=(PartitionSpec(), specs, inputs),
        out_specs=(by_copy, by_copy, specs),
        axis_names=set(config.copies),
        check_vma=False,
    )


def _iterate(
    params: Params,
    slots: Slots[Cache],
    inputs: ChunkInputs,
    *,
    k: int,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
    shardings: Slots,
) -> tuple[jax.Array, jax.Array, Slots[Cache]]:
    """Run the iterations of a chunk."""
    drafter, seed = functions.drafter, inputs.seed
    uncommitted = max(k, drafter.uncommitted) if k else 0
    options = step_options(slots, functions, config, budget=config.budget)
    shardings, target_fn = _here(shardings), functions.target_fn(params)

    def draft_fn(slots: Slots[Cache], seed: jax.Array) -> tuple[Draft, Cache]:
        return drafter.draft(params, slots, seed, k) if k else no_draft(slots, seed)

    # Carried: iterations, whether the pages of the next one are there, slots.
    def body(state: tuple[jax.Array, jax.Array, Slots[Cache]]) -> tuple[jax.Array, jax.Array, Slots[Cache]]:
        i, _, slots = state
        # Verification may split rows further than decoding does; pinned, its layout does not spread into the state.
        slots = jax.lax.with_sharding_constraint(slots, shardings)
        slots = speculative_step(slots, seed, draft_fn, target_fn=target_fn, options=options)
        return i + 1, *reserve(slots, uncommitted, config)

    def unfinished(state: tuple[jax.Array, jax.Array, Slots[Cache]]) -> jax.Array:
        i, enough, slots = state
        running = (~slots.done).sum(dtype=jnp.int32)
        goes_on = (i < inputs.max_iterations) & (running > inputs.stop_at_rows.sum()) & enough
        return goes_on & features_have_room(slots, k + 1, config)

    count, enough, slots = jax.lax.while_loop(unfinished, body, (jnp.int32(0), *reserve(slots, uncommitted, config)))
    return count[None], enough[None], slots


def begin_chunk(slots: Slots[Cache], config: EngineConfig) -> Slots[Cache]:
    """Return the slots with the states of features as a chunk begins."""
    return slots.with_features(config.features, lambda feature, state: feature.begin(state, slots))


def end_chunk(slots: Slots[Cache], config: EngineConfig) -> Slots[Cache]:
    """Return the slots with the states of features after a chunk, and the pages of finished rows free."""
    ended = slots.with_features(config.features, lambda feature, state: feature.end(state, slots))
    if any(feature.keeps_pages for feature in config.features):
        return ended
    pool, held = release(ended.pool, ended.held, ended.done)
    return dataclasses.replace(ended, pool=pool, held=held)


def features_have_room(slots: Slots[Cache], emitted: int, config: EngineConfig) -> bool | jax.Array:
    """Return whether features can take an iteration that emits up to so many tokens of each row."""
    room: bool | jax.Array = True
    for feature in config.features:
        room &= feature.has_room(slots.features[feature.name], emitted)
    return room


def step_options(
    slots: Slots[Cache], functions: EngineFunctions[Params, Cache], config: EngineConfig, *, budget: int = 0
) -> StepOptions:
    rows = len(slots.done) // len(slots.pool.count)  # of a device
    width = max(config.width, -(-functions.least_tokens // rows))
    return StepOptions(
        functions.verify, functions.sampling, functions.eos_ids, width=width, budget=budget, features=config.features
    )


def _here(shardings: Slots) -> Slots:
    """Return shardings without the mesh axes of a `shard_map` that is being traced."""
    context = jax.sharding.get_abstract_mesh()
    if not context.manual_axes:
        return shardings
    axes = [name for name in context.axis_names if name not in context.manual_axes]
    return jax.tree.map(lambda sharding: NamedSharding(context, _over(sharding.spec, axes)), shardings)


def _over(spec: PartitionSpec, names: Sequence[str]) -> PartitionSpec:
    """Return what a spec splits over these mesh axes."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return PartitionSpec(*[tuple(name for name in entry if name in names) or None for entry in entries])


def reserve(slots: Slots[Cache], uncommitted: int, config: EngineConfig) -> tuple[jax.Array, Slots[Cache]]:
    """Take the pages that the next iteration of every running row writes, if all are there; return whether they are.

    It writes up to `uncommitted` positions beyond the last committed token.
    """
    tokens = jnp.where(slots.done, 0, jnp.minimum(slots.length + uncommitted, slots.limit))
    need, enough = missing(slots.pool, slots.held, (tokens + config.page_tokens - 1) // config.page_tokens)
    enough = enough.all()
    # A row holds the pages of the last iteration, which committed at most a token beyond them.
    most = -(-(uncommitted + 1) // config.page_tokens)
    pool, held = take(slots.pool, slots.held, jnp.where(enough, need, 0), most)
    return enough, dataclasses.replace(slots, pool=pool, held=held)


def _counters(slots: Slots) -> tuple[jax.Array, jax.Array, jax.Array]:
    verifications, drafted, accepted = (
        x.sum(axis=0, dtype=jnp.int32) for x in (slots.verifications, slots.drafted, slots.accepted)
    )
    return verifications, drafted, accepted
