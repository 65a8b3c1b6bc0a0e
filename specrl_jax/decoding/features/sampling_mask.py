"""Sampling masks: the token ids that top-k and top-p kept at each response token, for a learner that replays them.

A chunk records them in a buffer, which the host collects after it. A chunk ends before a row's C ids could be too few:
[B, S, K] ids would be gigabytes.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.features.base import Committed, Feature
from specrl_jax.decoding.features.reverify import Reverification
from specrl_jax.decoding.pages import where_rows
from specrl_jax.decoding.state import EngineConfig, PrefillBatch, Slots
from specrl_jax.decoding.step import write_columns

# Token ids that a row can record in one chunk, 64 KiB: with top_p a token keeps a few, seldom 512.
LARGEST = 16384


@flax.struct.dataclass
class MaskBuffer:
    """The ids of one chunk."""

    count: jax.Array  # [B, S] int32, ids kept, by absolute position; 0 elsewhere
    ids: jax.Array  # [B, C] int32, of the chunk's tokens, one token after the other
    used: jax.Array  # [B] int32, entries of `ids`


@dataclasses.dataclass(frozen=True)
class SamplingMasks(Feature):
    """Records `mask_ids` of each rollout, token by token, and `mask_count` [R, S], how many belong to each token."""

    most_kept: int  # K, tokens that top-k and top-p keep at most

    name = "sampling_mask"
    parts = ("mask_ids",)

    def empty(self, config: EngineConfig, longest: int) -> MaskBuffer:
        """Return a buffer of what a chunk may need, or of LARGEST ids and two iterations."""
        again = config.feature(Reverification)
        longest = max(longest, again.at_once(config) if again and not again.keeps else 0)
        iteration = (longest + 1) * self.most_kept
        capacity = min(config.chunk * iteration, max(LARGEST, 2 * iteration))
        B = config.num_slots
        count, ids = (jnp.zeros((B, columns), jnp.int32) for columns in (config.cache_length, capacity))
        return MaskBuffer(count, ids, jnp.zeros(B, jnp.int32))

    def start(self, state: MaskBuffer, batch: PrefillBatch, length: jax.Array) -> MaskBuffer:
        return dataclasses.replace(state, count=where_rows(batch.fresh, jnp.zeros_like(state.count), state.count))

    def begin(self, state: MaskBuffer, slots: Slots) -> MaskBuffer:
        """Return the buffer without the ids of the last chunk, which the host has collected."""
        return dataclasses.replace(state, used=jnp.zeros_like(state.used))

    def has_room(self, state: MaskBuffer, emitted: int) -> jax.Array:
        return state.used.max() + emitted * self.most_kept <= state.ids.shape[1]

    def commit(self, state: MaskBuffer, committed: Committed) -> MaskBuffer:
        """Append the ids kept at the committed tokens."""
        mask = committed.verified.mask
        assert mask is not None, "a mask is recorded where top-k or top-p is on"
        count = jnp.where(committed.here, mask.count, 0)
        end = state.used[:, None] + jnp.cumsum(count, axis=1)
        ids = state.ids
        # All K ids of a token are written; the next token's overwrite what it did not keep.
        for i in range(count.shape[1]):
            start = end[:, i] - count[:, i]
            ids = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
                ids, mask.ids[:, i], start
            )
        return MaskBuffer(write_columns(state.count, committed.where, count), ids, end[:, -1])

    def after_chunk(self, batch: ActiveBatch) -> None:
        state = batch.slots.features[self.name]
        ids, used = batch.fetch((state.ids, state.used))
        for row in batch.rows[used[batch.rows] > 0]:
            batch.buffer.append("mask_ids", batch.scheduler.owner[row], ids[row, : used[row]].copy())

    def columns(self, state: MaskBuffer) -> dict[str, Any]:
        return {"mask_count": state.count}


def most_kept_of(config: EngineConfig) -> int:
    """Return K of an engine; 0: it records no masks."""
    masks = config.feature(SamplingMasks)
    return masks.most_kept if masks else 0
