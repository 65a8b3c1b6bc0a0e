"""Toy language models with tiny vocabularies, for everything that takes a model as functions.

The target's logits are a table looked up by a hash of *all* tokens so far with their positions, read back from the
cache. A token at a wrong position, a stale entry or one that was never written changes them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.drafters import NO_DRAFTER, Drafter, sample_draft
from specrl_jax.decoding.engine import make_engine
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.speculative import Draft, Slots
from specrl_jax.decoding.verification import Noise

HASHES = 11
UNWRITTEN = 3  # what fills a fresh cache: not 0, which would add nothing to a hash


def make_table(seed, V, scale=1.5):
    """[HASHES, V, V] float32 logits by (hash of the prefix, last token)."""
    return (scale * np.random.default_rng(seed).normal(size=(HASHES, V, V))).astype(np.float32)


def logits_after(table, prefix):
    """[V]: the toy's next-token logits, from its definition."""
    return table[sum((j + 1) * (token + 1) for j, token in enumerate(prefix)) % HASHES, prefix[-1]]


def decode(table, tokens, positions, cache):
    """The toy as the engine sees it: cache [B, S] holds the token of every position."""
    B, S = cache.shape
    cache = cache.at[jnp.arange(B)[:, None], positions].set(tokens, mode="drop")
    column = jnp.arange(S)
    terms = (cache + 1) * (column + 1)[None]
    seen = column[None, None] <= positions[:, :, None]
    hashed = jnp.where(seen, terms[:, None], 0).sum(axis=-1) % HASHES
    return table[hashed, tokens], cache


def prefill(cache_length):
    def fill(table, tokens, positions):
        cache = jnp.full((len(tokens), cache_length), UNWRITTEN, jnp.int32)
        return cache.at[jnp.arange(len(tokens))[:, None], positions].set(tokens)

    return fill


def toy_engine(limits, sampling, eos_ids, pad_id=0, drafter=NO_DRAFTER, prefill_fn=None, devices=1):
    """The engine over the toy, its rows dealt over so many devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "rows")
    by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    return make_engine(
        prefill_fn or prefill(limits.cache_length),
        decode,
        lambda cache, rows: cache[rows],
        limits,
        sampling,
        eos_ids,
        pad_id,
        shardings=Slots(**{field.name: by_row for field in dataclasses.fields(Slots)}),
        drafter=drafter,
    )


def toy_drafter(table, k, temperature):
    """A drafter that knows the last token only: `table` [V, V]. Sampled at `temperature`; greedy at 0."""
    table = jnp.array(table)

    def draft(params, slots, seed, k):
        noise = Noise(seed, slots.rollout_id, slots.length)
        token = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)[:, 0]
        tokens, rows = [], []
        for i in range(k):
            rows.append(table[token])
            token = sample_draft(noise, rows[-1], i, None, Sampling(temperature))
            tokens.append(token)
        return Draft(jnp.stack(tokens, 1), jnp.stack(rows, 1), jnp.zeros(len(token), bool), None), slots.cache

    return Drafter(k, draft, lambda params, tokens, length, cache: cache)
