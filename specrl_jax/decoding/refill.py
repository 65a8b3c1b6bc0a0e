"""The functions that put sequences into the slots and take rows out of them."""

import dataclasses

import jax
import jax.numpy as jnp

from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.lookup_cache import LookupCache, append, empty_lookup_cache, insert
from specrl_jax.decoding.state import Cache, EngineConfig, MaskBuffer, Params, PrefillBatch, Prompts, Slots

# Token ids of a sampling mask that a row can record in one chunk, 64 KiB: with top_p a token keeps a few, seldom 512.
LARGEST_MASK = 16384


def empty_slots(functions: EngineFunctions[Params, Cache], config: EngineConfig) -> tuple[Slots[Cache], Prompts]:
    """Return finished slots of the largest batch size, and an empty prompt as the one carried over."""
    B, S, T = config.num_slots, config.cache_length, config.max_prompt_tokens
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
        cache=functions.init_cache(B, S),
        mask=MaskBuffer(zeros(B, S), zeros(B, _mask_capacity(config, k)), zeros(B)) if config.most_kept else None,
    )
    return slots, Prompts(zeros(1, T), zeros(1) + 1, functions.init_cache(1, T))


def _mask_capacity(config: EngineConfig, longest: int) -> int:
    """Return C, the ids that a row can record in one chunk: what a chunk may need, or LARGEST_MASK and two iterations.

    Args:
      longest: tokens of the longest draft.
    """
    iteration = (longest + 1) * config.most_kept
    return min(config.chunk * iteration, max(LARGEST_MASK, 2 * iteration))


def refill(
    params: Params,
    slots: Slots[Cache],
    carried: Prompts,
    batch: PrefillBatch,
    *,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
) -> tuple[Slots[Cache], Prompts]:
    """Prefill the new prompts and start a rollout in every fresh slot; return the slots and the prompt to carry over.

    Rollouts are scheduled prompt by prompt, so at most one group is started in part, and one prompt carried over.

    The first iteration writes the cache entry of the prompt's last token again, with equal values. Entries of padding,
    and those of a slot's former rollout, lie at or beyond that position and are overwritten before anything reads them.
    """
    pool = _prefill(params, carried, batch, functions, config)
    prompts = jax.tree.map(lambda x: x[batch.source], pool)
    fresh = batch.fresh
    _B, S = slots.tokens.shape
    tokens = jnp.pad(prompts.tokens, ((0, 0), (0, S - prompts.tokens.shape[1])), constant_values=functions.pad_id)

    def start(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(fresh, range(1, old.ndim)), new, old)

    slots = dataclasses.replace(
        slots,
        tokens=start(tokens, slots.tokens),
        logprobs=start(jnp.zeros_like(slots.logprobs), slots.logprobs),
        draft_positions=start(jnp.zeros_like(slots.draft_positions), slots.draft_positions),
        prompt_length=start(prompts.length, slots.prompt_length),
        length=start(prompts.length, slots.length),
        limit=start(prompts.length + config.max_response_tokens, slots.limit),
        done=slots.done & ~fresh,
        rollout_id=start(batch.rollout_id, slots.rollout_id),
        verifications=start(jnp.zeros_like(slots.verifications), slots.verifications),
        drafted=start(jnp.zeros_like(slots.drafted), slots.drafted),
        accepted=start(jnp.zeros_like(slots.accepted), slots.accepted),
        group=start(batch.group, slots.group),
        sequence=start(batch.sequence, slots.sequence),
        lookup_cache=_insert(slots.lookup_cache, batch, prompts),
        cache=jax.tree.map(lambda new, old: _overwrite(old, new, fresh), prompts.cache, slots.cache),
        mask=slots.mask
        and dataclasses.replace(slots.mask, count=start(jnp.zeros_like(slots.mask.count), slots.mask.count)),
    )
    return slots, jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, batch.carry, 1), pool)


def _prefill(
    params: Params,
    carried: Prompts,
    batch: PrefillBatch,
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
) -> Prompts:
    """Return the prompt carried over and the new ones, [1 + P]; prefills `prefill_rows` of the new ones at a time."""
    r, T = config.prefill_rows, config.max_prompt_tokens
    positions = jnp.broadcast_to(jnp.arange(T), (r, T))

    def prefill_some(i: jax.Array, pool: Cache) -> Cache:
        tokens, length = (jax.lax.dynamic_slice_in_dim(x, i * r, r) for x in (batch.tokens, batch.length))
        # Always true, but different in each turn: XLA would lift a prefill that is the same in all turns (r = P) out of
        # the loop, where it would run at every refill, even of no prompt.
        tokens = jnp.where(i * r < batch.num_prompts, tokens, 0)
        cache = functions.prefill(params, tokens, positions, functions.init_cache(r, T))
        if functions.drafter.length:
            cache = functions.drafter.sync_cache(params, tokens, length, cache)
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, 1 + i * r, 0), pool, cache)

    def join(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.concatenate([old, new])

    pool = jax.tree.map(join, carried.cache, functions.init_cache(config.prompts, T))
    pool = jax.lax.fori_loop(0, (batch.num_prompts + r - 1) // r, prefill_some, pool)
    return Prompts(join(carried.tokens, batch.tokens), join(carried.length, batch.length), pool)


def _insert(cache: LookupCache | None, batch: PrefillBatch, prompts: Prompts) -> LookupCache | None:
    """Return the lookup cache with the new groups' earlier rollouts and the fresh rows' prompts."""
    if cache is None:
        return None
    assert batch.texts is not None and batch.text_length is not None, "there are texts where there is a lookup cache"
    cache = insert(cache, batch.new_group, batch.texts, batch.text_length)
    group = jnp.where(batch.fresh, batch.group, cache.tokens.shape[0])
    positions = jnp.broadcast_to(jnp.arange(prompts.tokens.shape[1]), prompts.tokens.shape)
    return append(cache, group, batch.sequence, positions, prompts.tokens, prompts.length)


def _overwrite(buffer: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
    """Replace, in `rows` [B] bool of buffer [B, ...], the leading part of each axis that `new` [B, ...] covers."""
    covered = tuple(slice(0, n) for n in new.shape)
    mask = jnp.expand_dims(rows, range(1, new.ndim))
    return buffer.at[covered].set(jnp.where(mask, new, buffer[covered]))


def compact(slots: Slots[Cache], rows: jax.Array) -> Slots[Cache]:
    """Return the slots of `rows` [B'] int32, in this order."""
    taken = jax.tree.map(lambda x: x[rows], dataclasses.replace(slots, lookup_cache=None))
    return dataclasses.replace(taken, lookup_cache=slots.lookup_cache)
