"""The training batch: rollouts with advantages, laid out as fixed-shape rows for the learner's jitted steps."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from specrl_jax.core import stand_in
from specrl_jax.data.rows import KeptTokens, Places, Rows, pack, packed, packed_rows, rows_of
from specrl_jax.decoding.rollouts import Rollouts

# Number of sizes [packed rows] for which programs are compiled.
ROW_BUCKETS = 8


class TrainingBatch(NamedTuple):
    """The rollouts that one step learns from, R = P groups x G."""

    rollouts: Rollouts
    advantages: np.ndarray  # [R] float32
    loss_mask: np.ndarray  # [R] bool, rollouts that enter the loss


class LearnerBatch(NamedTuple):
    """A training batch by token. Minibatch i of n is rows i, i + n, ...: some of every group."""

    rows: Rows
    behaviour: np.ndarray  # [B, T] float32, the rollouts' log-probs of the rows' targets, nats
    advantages: np.ndarray  # [B, T] float32
    loss_mask: np.ndarray  # [B, T] bool


class Packing(NamedTuple):
    """How rollouts are packed."""

    tokens: int  # of a row; at least those of the longest rollout
    minibatches: int
    unit: int  # the rows of a minibatch are a multiple of it


def learner_batch(batch: TrainingBatch, pad_id: int, packing: Packing | None = None) -> LearnerBatch:
    """Lay out rollouts one a row of rollout.max_prompt_tokens + max_response_tokens, or packed."""
    r = batch.rollouts
    rows, behaviour = rollout_rows(r, pad_id)
    by_token = [behaviour, *(np.repeat(x[:, None], rows.tokens.shape[1], axis=1) for x in batch[1:])]
    places = pack_minibatches(r.length, r.tokens.shape[1], packing) if packing else None
    if places:
        rows = packed_rows(rows, places, r.length, pad_id)
        by_token = [packed(x, places, r.length, 0) for x in by_token]
    if r.mask_count.shape[1]:
        rows = dataclasses.replace(rows, kept=_kept_tokens(r, places))
    return LearnerBatch(rows, *by_token)


def _kept_tokens(rollouts: Rollouts, places: Places | None) -> KeptTokens:
    """Lay out the rollouts' sampling masks, aligned with the rows' targets."""
    count = np.pad(rollouts.mask_count[:, 1:], ((0, 0), (0, 1)))
    row = order = np.arange(len(count))
    if places:
        count, row = packed(count, places, rollouts.length, 0), places.row
        order = np.lexsort((places.start, places.row))
    ids = np.full((len(count), ids_per_row(count.shape[1], int(count.sum(axis=1).max()))), -1, np.int32)
    used, masks = np.zeros(len(count), np.int64), rollouts.masks()
    for i in order:
        ids[row[i], used[row[i]] : used[row[i]] + len(masks[i])] = masks[i]
        used[row[i]] += len(masks[i])
    return KeptTokens(stand_in(ids), stand_in(count))


def ids_per_row(tokens: int, most: int) -> int:
    """Return N, room for the `most` ids of a row's sampling masks: `tokens` times a power of two, so N has few values.

    Each compiles the learner's programs.
    """
    return tokens * 2 ** math.ceil(math.log2(max(most / tokens, 1)))


def rollout_rows(rollouts: Rollouts, pad_id: int) -> tuple[Rows, np.ndarray]:
    """Return one row per rollout, and the behaviour log-probs [B, T] aligned with the rows' targets."""
    rows = rows_of(rollouts.tokens, rollouts.prompt_length, rollouts.length, pad_id)
    return rows, np.pad(rollouts.logprobs[:, 1:], ((0, 0), (0, 1)))


def pack_minibatches(length: np.ndarray, longest: int, packing: Packing) -> Places:
    """Pack each minibatch by itself, all into the same number of rows: one of at most ROW_BUCKETS sizes.

    Args:
      length: [R] tokens of the rollouts, at most `longest`.
    """
    n, unit = packing.minibatches, packing.unit
    parts = [pack(length[i::n], packing.tokens) for i in range(n)]
    # First fit leaves no row but the last with fewer rollouts than always fit.
    most = math.ceil(len(length) // n / (packing.tokens // longest))
    bucket = unit * math.ceil(most / (ROW_BUCKETS * unit))
    rows = bucket * math.ceil(max(part.rows for part in parts) / bucket)
    row, start, segment = (np.zeros(len(length), np.int64) for _ in range(3))
    for i, part in enumerate(parts):
        row[i::n], start[i::n], segment[i::n] = part.row * n + i, part.start, part.segment
    return Places(row, start, segment, rows * n, packing.tokens)


def packing_unit(num_shards: int, microbatch: int, draft_minibatches: int) -> int:
    """Return what the rows of a minibatch divide by: shards, microbatches, and those of each draft update."""
    return math.lcm(num_shards, microbatch or 1) * draft_minibatches
