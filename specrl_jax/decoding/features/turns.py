"""Rollouts of several turns: they go on with tokens that an environment wrote, once it has answered a turn."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Paging
from specrl_jax.core import stand_in
from specrl_jax.decoding.drafters import CommittedTokens
from specrl_jax.decoding.features.base import Feature, Lowerable
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.lookup_cache import LookupCache, append
from specrl_jax.decoding.pages import join, missing, pick, split, take, where_rows
from specrl_jax.decoding.programs import EnginePrograms, Program
from specrl_jax.decoding.state import Cache, EngineConfig, Params, PrefillBatch, Slots


@dataclasses.dataclass(frozen=True)
class SeveralTurns(Feature):
    """Lets rows go on; its state is the first column [B] int32 of each row's turn. Calls have `EndedTurns`."""

    name = "turns"
    by_size = ("extend",)
    keeps_pages = True

    def empty(self, config: EngineConfig, longest: int) -> jax.Array:
        return jnp.zeros(config.num_slots, jnp.int32) + 1

    def start(self, state: jax.Array, batch: PrefillBatch, length: jax.Array) -> jax.Array:
        return where_rows(batch.fresh, length, state)

    def describe(self, programs: EnginePrograms, program: Program, params: Any) -> Lowerable:
        extending = functools.partial(extend, functions=programs.functions, config=programs.config)
        jitted = jax.jit(extending, donate_argnums=1, out_shardings=programs.shardings)
        row = stand_in(jax.ShapeDtypeStruct((program.size,), jnp.int32))
        tokens = stand_in(jax.ShapeDtypeStruct((program.size, programs.config.cache_length), jnp.int32))
        return jitted, (params, programs.abstract(program.size)[0], Extension(tokens, row, row, limit=row))


class Extension(NamedTuple):
    """Tokens to append to some rows, which have ended a turn."""

    tokens: jax.Array  # [B, S] int32, by absolute position
    added: jax.Array  # [B] int32, tokens to append; 0: the row stays as it is
    start: jax.Array  # [B] int32, the first position that the cache lacks
    limit: jax.Array  # [B] int32, most committed tokens of the row at the end of its next turn


def extend(
    params: Params,
    slots: Slots[Cache],
    new: Extension,
    *,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
) -> Slots[Cache]:
    """Append tokens to rows, prefill what their caches lack in pieces, and let them run again.

    The cache then holds all positions but the last, as between two iterations: no position is computed twice. The
    pages must be free.
    """
    chosen, length = new.added > 0, slots.length + new.added
    at = jnp.arange(slots.tokens.shape[1])[None]
    added = (at >= slots.length[:, None]) & (at < length[:, None])
    tokens = jnp.where(added, new.tokens, slots.tokens)
    pages = jnp.where(chosen, (length + config.page_tokens - 1) // config.page_tokens, 0)
    need, _ = missing(slots.pool, slots.held, pages)
    pool, held = take(slots.pool, slots.held, need, config.columns)
    slots = dataclasses.replace(
        slots,
        tokens=tokens,
        length=length,
        limit=jnp.where(chosen, new.limit, slots.limit),
        done=slots.done & ~chosen,
        features=slots.features | {SeveralTurns.name: jnp.where(chosen, length, slots.features[SeveralTurns.name])},
        lookup_cache=_append(slots, jnp.where(added, at, at.shape[1]), tokens, length),
        pool=pool,
        held=held,
    )
    return dataclasses.replace(slots, cache=_prefill(params, slots, new, functions, config))


def _append(slots: Slots[Cache], positions: jax.Array, tokens: jax.Array, length: jax.Array) -> LookupCache | None:
    """Return the lookup cache with what was added at `positions` [B, S]; S: nothing."""
    cache = slots.lookup_cache
    if cache is None:
        return None
    group = jnp.where(length > slots.length, slots.group, cache.tokens.shape[0])
    return append(cache, group, slots.sequence, positions=positions, tokens=tokens, length=length)


def _prefill(
    params: Params,
    slots: Slots[Cache],
    new: Extension,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
) -> Cache:
    """Prefill positions [start, length - 1) of the rows, `prefill_rows` at a time in pieces of `prefill_tokens`."""
    D = config.shards
    rows_per_shard = len(slots.done) // D
    n, size = min(config.prefill_rows // D, rows_per_shard), min(config.prefill_tokens, config.cache_length)
    chosen = split(new.added > 0, D)
    order = jnp.argsort(~chosen, axis=1, stable=True).astype(jnp.int32)  # [D, B / D], those of a shard first
    rows = jax.tree.map(lambda x: pick(x, order), (slots.tokens, slots.length, slots.table, new.start, new.added > 0))

    def prefill_some(i: jax.Array, cache: Cache) -> Cache:
        def some(x: jax.Array) -> jax.Array:
            return join(jax.lax.dynamic_slice_in_dim(split(x, D), i * n, n, 1))

        tokens, length, table, start, here = jax.tree.map(some, rows)
        end = jnp.where(here, length - 1, 0)

        def piece(j: jax.Array, cache: Cache) -> Cache:
            positions = start[:, None] + j * size + jnp.arange(size)[None]
            part = jnp.take_along_axis(tokens, positions, axis=1, mode="clip")
            paging = Paging(table, jnp.where(positions < end[:, None], positions, -1))
            return functions.prefill(params, part, paging, cache=cache)

        pieces = (jnp.maximum(end - start, 0).max() + size - 1) // size
        cache = jax.lax.fori_loop(0, pieces, piece, cache)
        if not functions.drafter.length:
            return cache
        return functions.drafter.sync_cache(params, CommittedTokens(tokens, jnp.where(here, length, 0), table), cache)

    blocks = (chosen.sum(axis=1, dtype=jnp.int32).max() + n - 1) // n
    return jax.lax.fori_loop(0, blocks, prefill_some, slots.cache)
