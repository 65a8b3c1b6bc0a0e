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
from jax.sharding import PartitionSpec

from kernels_pallas.attention.op import Paging, Table, write_pool
from kernels_pallas.mapping import on_each_device
from kernels_pallas.verify.op import Draft, Noise, verify
from specrl_jax.decoding.draft_lengths import Choice, FixedLength
from specrl_jax.decoding.drafters import NO_DRAFTER, CommittedTokens, Drafter, sample_draft
from specrl_jax.decoding.engine import make_engine
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.programs import PREEMPTION
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


def write(buffer, paging, tokens):
    """Return buffer [C, T] with tokens [B, Q] written where they stand."""
    return write_pool(buffer, paging.table.write, paging.positions, new=tokens)


def look_up(table, tokens, paging, buffer):
    """Return the table's rows [B, Q, out] for tokens [B, Q] and what the buffer [C, T] holds up to their positions."""
    pages = buffer.at[paging.table.read].get(mode="fill", fill_value=UNWRITTEN)
    return _hashed(table, tokens, paging.positions, pages.reshape(len(tokens), -1))


def _hashed(table, tokens, positions, text):
    column = jnp.arange(text.shape[1])
    terms = (text + 1) * (column + 1)[None]
    seen = column[None, None] <= positions[:, :, None]
    return table[jnp.where(seen, terms[:, None], 0).sum(axis=-1) % HASHES, tokens]


def decode(table, tokens, paging, cache):
    """Run the toy as the engine does: the cache holds the token of each position."""
    cache = write(cache, paging, tokens)
    return look_up(table, tokens, paging, cache), cache


def init_cache(pages, tokens):
    return jnp.full((pages, tokens), UNWRITTEN, jnp.int32)


def prefill(table, tokens, paging, cache):
    return write(cache, paging, tokens)


def toy_engine(limits, sampling, eos_ids, pad_id=0, drafter=NO_DRAFTER, devices=1, lengths=None, **functions):
    """Return an engine of the toy, its rows split over `devices`; `functions` replace some of the toy's."""
    copies = ("rows",) if devices > 1 else ()
    limits = dataclasses.replace(limits, shards=devices, prefill_rows=devices * limits.prefill_rows, copies=copies)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "rows")
    by_row = jax.sharding.NamedSharding(mesh, PartitionSpec("rows"))
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    rows = {field.name: by_row for field in dataclasses.fields(Slots)}
    toy = {"init_cache": init_cache, "prefill": prefill, "decode": decode, "verify": verify} | functions
    if devices > 1:
        # Each device has its own pages, numbered from 0.
        inputs, rows_spec = (PartitionSpec(), *[PartitionSpec("rows")] * 3), PartitionSpec("rows")
        for name in ("prefill", "decode"):
            # Asked anew by each trace: inside a copy's loop the arrays are a device's own already.
            toy[name] = lambda *arrays, cache, fn=toy[name]: on_each_device(fn, mesh, inputs, out_specs=rows_spec)(
                *arrays, cache
            )
    model = EngineFunctions(drafter=drafter, sampling=sampling, eos_ids=eos_ids, pad_id=pad_id, **toy)
    shardings = Slots(**rows | {"lookup_cache": everywhere if limits.groups else None})
    lengths = lengths or tuple(range(drafter.length + 1))
    return make_engine(model, limits, shardings, prompt_shardings=by_row, lengths=lengths)


def watched(engine):
    """Return a list that gets the name of each program of preemption as it runs."""
    names, inner = [], engine.compiled.run

    def run(kind, *rest):
        names.extend({kind} & PREEMPTION.keys())
        return inner(kind, *rest)

    engine.compiled.run = run
    return names


class Choosing(FixedLength):
    """Choose draft lengths by a function of the number of running rows."""

    def __init__(self, choose, first=0):
        super().__init__(choose)
        object.__setattr__(self, "begins", first)

    def first(self, size):
        return self.begins

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
            token = sample_draft(noise, rows[-1], i, vocab_map=None, sampling=sampling)
            tokens.append(token)
        return Draft(jnp.stack(tokens, 1), jnp.stack(rows, 1), jnp.zeros(len(token), bool)), slots.cache

    return Drafter(k, draft, lambda params, text, cache: cache)


class Caches(NamedTuple):
    """The target's cache and the stateful drafter's buffer."""

    target: jax.Array  # [C, T]
    draft: jax.Array  # [C, T]


def stateful_engine(limits, sampling, eos_ids, drafter, pad_id=0, lengths=None, **more):
    """Return an engine of the toy with `stateful_drafter` or `rebuilding_drafter`."""

    def init_both(pages, tokens):
        return Caches(init_cache(pages, tokens), init_cache(pages, tokens))

    def prefill_both(table, tokens, paging, cache):
        return cache._replace(target=prefill(table, tokens, paging, cache.target))

    def decode_target(table, tokens, paging, cache):
        logits, target = decode(table, tokens, paging, cache.target)
        return logits, cache._replace(target=target)

    functions = {"init_cache": init_both, "prefill": prefill_both, "decode": decode_target}
    return toy_engine(limits, sampling, eos_ids, pad_id, drafter, lengths=lengths, **functions, **more)


def stateful_drafter(table, k, temperature, vocab_map=None, rule="rejection"):
    """Return a drafter that reads the whole prefix, `table` [HASHES, V, Vd], from a buffer of its own, by position.

    Like the EAGLE-3 head, a draft writes the last k + 1 committed tokens and relies on the buffer for earlier ones. It
    overwrites the drafted positions with UNWRITTEN, even if their tokens are accepted. `temperature`: None: the rows'.
    """
    sampling = Sampling(1.0 if temperature is None else temperature, rule=rule)

    def draft(params, slots, seed, k):
        window = jnp.maximum(slots.length[:, None] - 1 - jnp.arange(k, -1, -1)[None], 0)
        buffer = write(slots.cache.draft, slots.place(window), jnp.take_along_axis(slots.tokens, window, axis=1))
        own = slots.sampling.temperature if temperature is None else None
        drafted = _draft_on(jnp.array(table), buffer, slots, seed, k, sampling, vocab_map, own)
        ahead = slots.place(slots.length[:, None] + jnp.arange(k)[None])
        buffer = write(buffer, ahead, jnp.full_like(drafted.tokens, UNWRITTEN))
        return drafted, slots.cache._replace(draft=buffer)

    return Drafter(k, draft, sync_all)


def rebuilding_drafter(table, k, temperature, vocab_map=None):
    """Return a drafter that rebuilds its state each time: `stateful_drafter` must equal it."""

    def draft(params, slots, seed, k):
        text = CommittedTokens(slots.tokens, slots.length, Table(slots.held.table, slots.held.table))
        buffer = sync_all(None, text, Caches(None, jnp.full_like(slots.cache.draft, UNWRITTEN))).draft
        return _draft_on(jnp.array(table), buffer, slots, seed, k, Sampling(temperature), vocab_map), slots.cache

    return Drafter(k, draft, lambda params, text, cache: cache)


def sync_all(params, text, cache):
    """Write every committed token into the drafter's buffer."""
    columns = jnp.broadcast_to(jnp.arange(text.tokens.shape[1]), text.tokens.shape)
    paging = Paging(text.table, jnp.where(columns < text.length[:, None], columns, -1))
    return cache._replace(draft=write(cache.draft, paging, text.tokens))


def _draft_on(table, buffer, slots, seed, k, sampling, vocab_map, temperature=None):
    """Draft k tokens after the last committed one, from a buffer that holds all tokens up to it."""
    noise = Noise(seed, slots.rollout_id, slots.length)
    token = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)
    tokens, rows = [], []
    for i in range(k):
        paging = slots.place(slots.length[:, None] - 1 + i)
        buffer = write(buffer, paging, token)
        rows.append(look_up(table, token, paging, buffer)[:, 0])
        token = sample_draft(noise, rows[-1], i, vocab_map=vocab_map, sampling=sampling, temperature=temperature)[
            :, None
        ]
        tokens.append(token[:, 0])
    return Draft(jnp.stack(tokens, 1), jnp.stack(rows, 1), jnp.zeros(len(token), bool), vocab_map=vocab_map)
