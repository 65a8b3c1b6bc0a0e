"""Toy language models with tiny vocabularies, for everything that takes a model as functions.

The target's logits are a table, indexed by a hash of *all* tokens so far and their positions, which are read back from
the cache: a token at a wrong position, a stale entry or an unwritten one changes them. The stateful drafter does the
same with a buffer of its own.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.verify.op import Draft, Noise, verify
from specrl_jax.decoding.controller import Choice
from specrl_jax.decoding.drafters import NO_DRAFTER, Drafter, sample_draft
from specrl_jax.decoding.engine import FixedLength, make_engine
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Slots

HASHES = 11
UNWRITTEN = 3  # fills a fresh cache; 0 would add nothing to a hash


def make_table(seed, V, scale=1.5, out=None):
    """Return logits [HASHES, V, out] float32 by (hash of the prefix, last token); `out` is V unless given."""
    return (scale * np.random.default_rng(seed).normal(size=(HASHES, V, out or V))).astype(np.float32)


def logits_after(table, prefix):
    """Return the toy's next-token logits [V], from its definition."""
    return table[sum((j + 1) * (token + 1) for j, token in enumerate(prefix)) % HASHES, prefix[-1]]


def write(buffer, positions, tokens):
    """Return buffer [B, S] with tokens [B, Q] written at positions [B, Q]; those beyond its end are dropped."""
    return buffer.at[jnp.arange(len(buffer))[:, None], positions].set(tokens, mode="drop")


def look_up(table, tokens, positions, buffer):
    """Return the table's rows [B, Q, out] for tokens [B, Q] and what the buffer [B, S] holds up to their positions."""
    column = jnp.arange(buffer.shape[1])
    terms = (buffer + 1) * (column + 1)[None]
    seen = column[None, None] <= positions[:, :, None]
    return table[jnp.where(seen, terms[:, None], 0).sum(axis=-1) % HASHES, tokens]


def decode(table, tokens, positions, cache):
    """Run the toy as the engine does: cache [B, S] holds the token of each position."""
    cache = write(cache, positions, tokens)
    return look_up(table, tokens, positions, cache), cache


def init_cache(rows, length):
    return jnp.full((rows, length), UNWRITTEN, jnp.int32)


def prefill(table, tokens, positions, cache):
    return write(cache, positions, tokens)


def toy_engine(limits, sampling, eos_ids, pad_id=0, drafter=NO_DRAFTER, devices=1, lengths=None, **functions):
    """Return an engine of the toy, its rows split over `devices`; `functions` replace some of the toy's."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "rows")
    by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows = {field.name: by_row for field in dataclasses.fields(Slots)}
    toy = {"init_cache": init_cache, "prefill": prefill, "decode": decode, "verify": verify} | functions
    model = EngineFunctions(drafter=drafter, sampling=sampling, eos_ids=eos_ids, pad_id=pad_id, **toy)
    shardings = Slots(**rows | {"lookup_cache": everywhere if limits.groups else None})
    lengths = lengths or tuple(range(drafter.length + 1))
    return make_engine(model, limits, shardings, everywhere, lengths)


class Choosing(FixedLength):
    """Choose draft lengths by a function of the number of running rows."""

    def __init__(self, choose):
        super().__init__(choose)

    def choose(self, size, running, live):
        return Choice(self.k(running), None)


def toy_drafter(table, k, temperature, rule="rejection"):
    """Return a drafter that reads the last token only: `table` [V, V]. Sampled at `temperature`; greedy at 0."""
    table, sampling = jnp.array(table), Sampling(temperature, rule=rule)

    def draft(params, slots, seed, k):
        noise = Noise(seed, slots.rollout_id, slots.length)
        token = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)[:, 0]
        tokens, rows = [], []
        for i in range(k):
            rows.append(table[token])
            token = sample_draft(noise, rows[-1], i, None, sampling)
            tokens.append(token)
        return Draft(jnp.stack(tokens, 1), jnp.stack(rows, 1), jnp.zeros(len(token), bool)), slots.cache

    return Drafter(k, draft, lambda params, tokens, length, cache: cache)


class Caches(NamedTuple):
    """The target's cache and the stateful drafter's buffer."""

    target: jax.Array  # [B, S]
    draft: jax.Array  # [B, S]


def stateful_engine(limits, sampling, eos_ids, drafter, pad_id=0, lengths=None):
    """Return an engine of the toy with `stateful_drafter` or `rebuilding_drafter`."""

    def init_both(rows, length):
        return Caches(init_cache(rows, length), init_cache(rows, length))

    def prefill_both(table, tokens, positions, cache):
        return cache._replace(target=prefill(table, tokens, positions, cache.target))

    def decode_target(table, tokens, positions, cache):
        logits, target = decode(table, tokens, positions, cache.target)
        return logits, cache._replace(target=target)

    functions = {"init_cache": init_both, "prefill": prefill_both, "decode": decode_target}
    return toy_engine(limits, sampling, eos_ids, pad_id, drafter, lengths=lengths, **functions)


def stateful_drafter(table, k, temperature, vocab_map=None, rule="rejection"):
    """Return a drafter that reads the whole prefix, `table` [HASHES, V, Vd], from a buffer of its own, by position.

    Like the EAGLE-3 head, a draft writes the last k + 1 committed tokens and relies on the buffer for earlier ones. It
    overwrites the drafted positions with UNWRITTEN, even if their tokens are accepted.
    """
    sampling = Sampling(temperature, rule=rule)

    def draft(params, slots, seed, k):
        window = jnp.maximum(slots.length[:, None] - 1 - jnp.arange(k, -1, -1)[None], 0)
        buffer = write(slots.cache.draft, window, jnp.take_along_axis(slots.tokens, window, axis=1))
        drafted = _draft_on(jnp.array(table), buffer, slots, seed, k, sampling, vocab_map)
        buffer = write(buffer, slots.length[:, None] + jnp.arange(k)[None], jnp.full_like(drafted.tokens, UNWRITTEN))
        return drafted, slots.cache._replace(draft=buffer)

    return Drafter(k, draft, sync_all)


def rebuilding_drafter(table, k, temperature, vocab_map=None):
    """Return a drafter that rebuilds its state each time: `stateful_drafter` must equal it."""

    def draft(params, slots, seed, k):
        buffer = jnp.full_like(slots.tokens, UNWRITTEN)
        buffer = sync_all(None, slots.tokens, slots.length, slots.cache._replace(draft=buffer)).draft
        return _draft_on(jnp.array(table), buffer, slots, seed, k, Sampling(temperature), vocab_map), slots.cache

    return Drafter(k, draft, lambda params, tokens, length, cache: cache)


def sync_all(params, tokens, length, cache):
    """Write every committed token of [B, T] into the drafter's buffer [B, S]."""
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    where = jnp.where(columns < length[:, None], columns, cache.draft.shape[1])
    return cache._replace(draft=write(cache.draft, where, tokens))


def _draft_on(table, buffer, slots, seed, k, sampling, vocab_map):
    """Draft k tokens after the last committed one, from a buffer that holds all tokens up to it."""
    noise = Noise(seed, slots.rollout_id, slots.length)
    token = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)
    tokens, rows = [], []
    for i in range(k):
        positions = slots.length[:, None] - 1 + i
        buffer = write(buffer, positions, token)
        rows.append(look_up(table, token, positions, buffer)[:, 0])
        token = sample_draft(noise, rows[-1], i, vocab_map, sampling)[:, None]
        tokens.append(token[:, 0])
    return Draft(jnp.stack(tokens, 1), jnp.stack(rows, 1), jnp.zeros(len(token), bool), vocab_map)
