"""The functions that put sequences into the slots and take rows out of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Paging, Table
from kernels_pallas.verify.types import RowSampling
from specrl_jax.decoding.drafters import CommittedTokens
from specrl_jax.decoding.functions import EngineFunctions, with_rows, without_rows
from specrl_jax.decoding.lookup_cache import LookupCache, append, empty_lookup_cache, insert
from specrl_jax.decoding.pages import (
    PagePool,
    PageTable,
    empty_pool,
    gather_pages,
    join,
    missing,
    no_pages,
    pick,
    release,
    scatter_pages,
    share,
    split,
    take,
    where_rows,
)
from specrl_jax.decoding.state import Cache, EngineConfig, Params, PrefillBatch, Prompts, Slots


def empty_slots(functions: EngineFunctions[Params, Cache], config: EngineConfig) -> tuple[Slots[Cache], Prompts]:
    """Return finished slots of the largest batch size, and an empty prompt a shard as the one carried over."""
    B, S, T, D, C = config.num_slots, config.cache_length, config.max_prompt_tokens, config.shards, config.shard_pages
    k = functions.drafter.length

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    slots = Slots(
        tokens=jnp.full((B, S), functions.pad_id, jnp.int32),
        logprobs=jnp.zeros((B, S), jnp.float32),
        draft_positions=jnp.zeros((B, S), jnp.int8),
        prompt_length=zeros(B) + 1,
        length=zeros(B) + 1,
        limit=zeros(B) + S,
        done=jnp.ones((B,), bool),
        rollout_id=jnp.zeros((B,), jnp.uint32),
        verifications=zeros(B),
        drafted=zeros(B, k),
        accepted=zeros(B, k),
        group=zeros(B) + config.groups,
        sequence=zeros(B),
        lookup_cache=empty_lookup_cache(config.groups, config.sequences, S) if config.groups else None,
        cache=functions.init_cache(D * C, config.page_tokens),
        pool=empty_pool(D, C),
        held=no_pages(B, config.columns, C),
        sampling=RowSampling(jnp.ones(B, jnp.float32), zeros(B), jnp.ones(B, jnp.float32)),
        features={feature.name: feature.empty(config, k) for feature in config.features},
        remembered=functions.empty_rows(B),
    )
    return slots, Prompts(zeros(D, T), zeros(D) + 1, no_pages(D, config.columns, C), functions.empty_rows(D))


def refill(
    params: Params,
    slots: Slots[Cache],
    carried: Prompts,
    batch: PrefillBatch,
    *,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
) -> tuple[Slots[Cache], Prompts]:
    """Prefill the new prompts and start a rollout in every fresh slot; return the slots and the prompts to carry over.

    Rollouts are scheduled prompt by prompt, so a shard starts at most one group in part, and carries one prompt over.

    Siblings share the pages of their prompt that end before its last token. The page of the last token is copied for
    each: the first iteration writes that token again, with equal values, and what follows. Entries of a page's former
    holder are overwritten before anything reads them.
    """
    D = config.shards
    prompts, pool, cache = _prefill(params, slots, batch, functions, config)
    prompts = jax.tree.map(lambda *both: join(jnp.concatenate([split(x, D) for x in both], axis=1)), carried, prompts)

    tokens, length = (pick(x, split(batch.source, D)) for x in (prompts.tokens, prompts.length))
    pool, cache, held = _start_rows(slots, pool, cache, prompts=prompts, batch=batch, length=length, config=config)
    # Siblings go on from copies of what the layers remember of their prompt.
    remembered = jax.tree.map(
        lambda x, old: where_rows(batch.fresh, pick(x, split(batch.source, D)), old),
        prompts.remembered,
        slots.remembered,
    )
    slots = dataclasses.replace(slots, pool=pool, cache=cache, held=held, remembered=remembered)
    slots = _start(slots, batch, tokens, length, functions.pad_id)
    slots = slots.with_features(config.features, lambda feature, state: feature.start(state, batch, length))

    source = batch.carried_source
    is_carried = source[:, None] == jnp.arange(len(prompts.length) // D)[None]
    pool, held = release(slots.pool, prompts.held, ~is_carried.reshape(-1))
    carried = jax.tree.map(lambda x: pick(x, jnp.maximum(source, 0)[:, None]), prompts._replace(held=held))
    return dataclasses.replace(slots, pool=pool), carried


def _start(slots: Slots[Cache], batch: PrefillBatch, tokens: jax.Array, length: jax.Array, pad_id: int) -> Slots[Cache]:
    """Set everything but the pages of the fresh slots, which answer prompts `tokens` [B, T] of `length` [B]."""
    fresh, S = batch.fresh, slots.tokens.shape[1]
    lookup_cache = _insert(slots.lookup_cache, batch, tokens, length)
    tokens = jnp.pad(tokens, ((0, 0), (0, S - tokens.shape[1])), constant_values=pad_id)

    start = functools.partial(where_rows, fresh)

    def clear(old: jax.Array) -> jax.Array:
        return start(jnp.zeros_like(old), old)

    return dataclasses.replace(
        slots,
        tokens=start(tokens, slots.tokens),
        logprobs=clear(slots.logprobs),
        draft_positions=clear(slots.draft_positions),
        prompt_length=start(length, slots.prompt_length),
        length=start(length, slots.length),
        limit=start(length + batch.response, slots.limit),
        done=slots.done & ~fresh,
        rollout_id=start(batch.rollout_id, slots.rollout_id),
        verifications=clear(slots.verifications),
        drafted=clear(slots.drafted),
        accepted=clear(slots.accepted),
        group=start(batch.group, slots.group),
        sequence=start(batch.sequence, slots.sequence),
        lookup_cache=lookup_cache,
        sampling=jax.tree.map(start, batch.sampling, slots.sampling),
    )


def _prefill(
    params: Params,
    slots: Slots[Cache],
    batch: PrefillBatch,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
) -> tuple[Prompts, PagePool, Cache]:
    """Prefill the new prompts, `prefill_rows` at a time in pieces of `prefill_tokens`: a prompt costs what it holds."""
    D, T = config.shards, config.page_tokens
    size = min(config.prefill_tokens, config.max_prompt_tokens)
    held = no_pages(len(batch.length), config.columns, config.shard_pages)
    need, _ = missing(slots.pool, held, (batch.length + T - 1) // T)
    pool, held = take(slots.pool, held, need, -(-config.max_prompt_tokens // T))
    padded = jnp.pad(batch.tokens, ((0, 0), (0, -config.max_prompt_tokens % size)))

    def prefill_some(i: jax.Array, carry: tuple[Cache, Any]) -> tuple[Cache, Any]:
        n = config.prefill_rows // D

        def some(x: jax.Array) -> jax.Array:
            return join(jax.lax.dynamic_slice_in_dim(split(x, D), i * n, n, 1))

        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            return join(jax.lax.dynamic_update_slice_in_dim(split(x, D), split(new, D), i * n, 1))

        tokens, length, pages = some(padded), some(batch.length), some(held.table)
        table = Table(pages, pages)

        def piece(j: jax.Array, carry: Any) -> Any:
            positions = j * size + jnp.arange(size)[None]
            part = jax.lax.dynamic_slice_in_dim(tokens, j * size, size, 1)
            paging = Paging(table, jnp.where(positions < length[:, None], positions, -1))
            return without_rows(functions.prefill(params, part, paging, cache=with_rows(carry[0], carry[1])))

        cache, all_rows = carry
        begun = cache, jax.tree.map(some, all_rows)
        cache, rows = jax.lax.fori_loop(0, (length.max() + size - 1) // size, piece, begun)
        all_rows = jax.tree.map(put, all_rows, rows)
        if functions.drafter.length:
            cache = functions.drafter.sync_cache(params, CommittedTokens(tokens, length, table), cache)
        return cache, all_rows

    # Those of a shard stand first.
    most = (batch.length.reshape(D, -1) > 0).sum(axis=1, dtype=jnp.int32).max()
    blocks = (most * D + config.prefill_rows - 1) // config.prefill_rows
    begun = slots.cache, functions.empty_rows(len(batch.length))
    cache, rows = jax.lax.fori_loop(0, blocks, prefill_some, begun)
    return Prompts(batch.tokens, batch.length, held, rows), pool, cache


def _start_rows(
    slots: Slots[Cache],
    pool: PagePool,
    cache: Cache,
    prompts: Prompts,
    batch: PrefillBatch,
    length: jax.Array,
    config: EngineConfig,
) -> tuple[PagePool, Cache, PageTable]:
    """Give the fresh slots their pages: those of the prompt that end before its last token, and a copy of the next."""
    D, C, fresh = config.shards, config.shard_pages, batch.fresh
    full = jnp.where(fresh, (length - 1) // config.page_tokens, 0)
    pool, shared = share(pool, prompts.held, batch.source, full)
    held = jax.tree.map(functools.partial(where_rows, fresh), shared, slots.held)
    pool, held = take(pool, held, fresh.astype(jnp.int32), 1)
    tables = pick(prompts.held.table, split(batch.source, D))
    original = split(jnp.take_along_axis(tables, full[:, None], axis=1)[:, 0], D)
    copy = jnp.take_along_axis(held.table, full[:, None], axis=1)[:, 0]
    copy = split(jnp.where(fresh, copy, C), D)
    # One array after the other: the copies of one are all that exist beside the cache. Behind a barrier: XLA would read
    # and write in one fusion, and copy the whole array for it, twice.

    def copied(x: jax.Array) -> jax.Array:
        return scatter_pages(D, x, copy, values=jax.lax.optimization_barrier(gather_pages(D, x, original)))

    return pool, jax.tree.map(copied, cache), held


def _insert(cache: LookupCache | None, batch: PrefillBatch, tokens: jax.Array, length: jax.Array) -> LookupCache | None:
    """Return the lookup cache with the new groups' earlier rollouts and the fresh rows' prompts."""
    if cache is None:
        return None
    assert batch.texts is not None and batch.text_length is not None, "there are texts where there is a lookup cache"
    cache = insert(cache, batch.new_group, batch.texts, length=batch.text_length)
    group = jnp.where(batch.fresh, batch.group, cache.tokens.shape[0])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return append(cache, group, batch.sequence, positions=positions, tokens=tokens, length=length)


def compact(rows: Slots[Cache], rest: Slots[Cache], kept: jax.Array) -> Slots[Cache]:
    """Return the slots of rows `kept` [D, B' / D] int32, numbers within each shard, in this order; no page is moved.

    Args:
      rows: `Slots.by_row`.
      rest: the slots, of which only what is not by row is read.
    """
    taken = jax.tree.map(lambda x: pick(x, kept), rows)
    return dataclasses.replace(taken, lookup_cache=rest.lookup_cache, cache=rest.cache, pool=rest.pool)
