"""Records that the target's forwards make of each token, beside keys and values in their pages; the host collects them.

Of a mixture these are the experts of each token (models/decoder/expert_record.py). A record stands at the position of
its token, so it is of the forward that drew the next one: a refused draft's is overwritten by that of the token
committed in its place, siblings share their prompt's, and one that earlier weights made is overwritten when it is
verified again. The last token of a rollout has not been in a forward and has none.

A finished row's pages are free at once. What stands in them is read before anything else runs on the device.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.pages import gather_pages, release
from specrl_jax.decoding.state import Cache, EngineConfig, Slots

# Tokens that are read at a time: of 30B-A3B, at 384 bytes each, 0.8 MB.
TOKENS = 2048
# (shard, pages [n]) -> `read_records` of the engine's pool
Read = Callable[[np.ndarray, np.ndarray], jax.Array]


def free_finished(slots: Slots[Cache]) -> Slots[Cache]:
    """Free the pages of finished rows; where something is recorded, keep which they were."""
    last = slots.last_pages
    if last is not None:
        last = jnp.where((slots.held.count > 0)[:, None], slots.held.table, last)
    pool, held = release(slots.pool, slots.held, slots.done)
    return dataclasses.replace(slots, pool=pool, held=held, last_pages=last)


def pages_at_once(config: EngineConfig) -> int:
    """Return n, the pages that one call of `read_records` reads."""
    return min(config.columns, -(-TOKENS // config.page_tokens))


def read_records(pool: jax.Array, shard: jax.Array, pages: jax.Array, *, shards: int) -> jax.Array:
    """Return what stands in pages [n] of a shard of a pool [D C, T, N], [n T, N]; any where there is no page."""
    ids = jnp.broadcast_to(jnp.minimum(pages, len(pool) // shards - 1), (shards, len(pages)))
    records = gather_pages(shards, pool, ids)[shard]
    return records.reshape(-1, records.shape[-1])


def start_reading(
    read: Read, shard: np.ndarray, pages: np.ndarray, *, length: np.ndarray, config: EngineConfig
) -> list[list[jax.Array]]:
    """Start to read the records of m rows; `joined_records` puts the parts of each together on the host.

    Args:
      shard: [m] int32.
      pages: [m, P] int32, `Slots.last_pages`.
      length: [m] int32, committed tokens.
    """
    n, T = pages_at_once(config), config.page_tokens
    padded = np.pad(pages, ((0, 0), (0, -pages.shape[1] % n)))
    return [
        [read(shard[i], padded[i, first : first + n]) for first in range(0, -(-tokens // T), n)]
        for i, tokens in enumerate(length - 1)
    ]


def joined_records(parts: list[list[np.ndarray]], length: np.ndarray) -> list[np.ndarray]:
    """Return the records [tokens, N] of each of m rows of `length` [m] committed tokens."""
    return [np.concatenate(pieces)[:tokens] for pieces, tokens in zip(parts, length - 1, strict=True)]
