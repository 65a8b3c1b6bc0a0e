"""Records that the target's forwards make of each token, beside keys and values in their pages; the host collects them.

Of a mixture these are the experts of each token (models/decoder/expert_record.py). A record stands at the position of
its token, so it is of the forward that drew the next one: a refused draft's is overwritten by that of the token
committed in its place, siblings share their prompt's, and one that earlier weights made is overwritten when it is
verified again. The last token of a rollout has not been in a forward and has none.

A finished row's pages are free at once. What stands in them is read before anything else runs on the device.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.features.base import Feature, Lowerable
from specrl_jax.decoding.pages import gather_pages
from specrl_jax.decoding.programs import EnginePrograms, Program
from specrl_jax.decoding.state import EngineConfig, Slots

# Tokens that are read at a time: of 30B-A3B, at 384 bytes each, 0.8 MB.
TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class RouterRecords(Feature):
    """Collects the `experts` of each finished rollout; its state are the pages [B, P] int32 of a row when it ended."""

    recorded: Callable[[Any], jax.Array] = operator.attrgetter("experts")  # cache -> pool [C, T, N] of the records

    name = "router_records"
    once = ("read_records",)
    parts = ("experts",)

    def empty(self, config: EngineConfig, longest: int) -> jax.Array:
        return jnp.zeros((config.num_slots, config.columns), jnp.int32)

    def end(self, state: jax.Array, slots: Slots) -> jax.Array:
        return jnp.where((slots.held.count > 0)[:, None], slots.held.table, state)

    def describe(self, programs: EnginePrograms, program: Program, params: Any) -> Lowerable:
        config, number = programs.config, jax.ShapeDtypeStruct((), jnp.int32)
        pool = self.recorded(programs.abstract(program.size)[0].cache)
        jitted = jax.jit(functools.partial(read_records, shards=config.shards), out_shardings=programs.whole)
        return jitted, (pool, number, jax.ShapeDtypeStruct((_pages_at_once(config),), jnp.int32))

    def collect(self, batch: ActiveBatch, rows: np.ndarray) -> None:
        """Copy what was recorded of those that the call waits for."""
        rows = rows[batch.scheduler.owner[rows] < batch.scheduler.requests.asked]
        if not len(rows):
            return
        requests, config, pool = batch.scheduler.owner[rows], batch.config, self.recorded(batch.slots.cache)
        n, pages = _pages_at_once(config), batch.fetch(batch.slots.features[self.name])[rows]
        shard = (rows // (batch.size // config.shards)).astype(np.int32)
        padded = np.pad(pages, ((0, 0), (0, -pages.shape[1] % n)))
        recorded = batch.buffer.values["length"][requests] - 1
        # Asked for together, then fetched.
        pieces = [
            [
                batch.run("read_records", pool, shard[i], padded[i, first : first + n])
                for first in range(0, -(-tokens // config.page_tokens), n)
            ]
            for i, tokens in enumerate(recorded)
        ]
        for request, tokens, found in zip(requests, recorded, batch.fetch(pieces), strict=True):
            batch.buffer.append("experts", request, np.concatenate(found)[:tokens])


def _pages_at_once(config: EngineConfig) -> int:
    """Return n, the pages that one call of `read_records` reads."""
    return min(config.columns, -(-TOKENS // config.page_tokens))


def read_records(pool: jax.Array, shard: jax.Array, pages: jax.Array, *, shards: int) -> jax.Array:
    """Return what stands in pages [n] of a shard of a pool [D C, T, N], [n T, N]; any where there is no page."""
    ids = jnp.broadcast_to(jnp.minimum(pages, len(pool) // shards - 1), (shards, len(pages)))
    records = gather_pages(shards, pool, ids)[shard]
    return records.reshape(-1, records.shape[-1])
