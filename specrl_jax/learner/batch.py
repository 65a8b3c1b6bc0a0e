"""What the learner's jitted steps are fed with: rollouts as rows of one of few shapes, minibatch by minibatch."""

import math
from typing import NamedTuple

import numpy as np

from specrl_jax.data.rows import Places, Rows, pack, packed, packed_rows, rows_of
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.training.collect import TrainingBatch

# Numbers of packed rows that there are programs for, as parts of the number of rollouts.
RUNGS = 8


class LearnerBatch(NamedTuple):
    """Minibatch i of n is rows i, i + n, ...: some of every group."""

    rows: Rows
    behaviour: np.ndarray  # [B, T] float32, the rollouts' log-probs of the rows' targets, nats
    advantages: np.ndarray  # [B, T] float32
    teaches: np.ndarray  # [B, T] bool


class Packing(NamedTuple):
    """How rollouts are packed."""

    tokens: int  # of a row; at least those of the longest rollout
    minibatches: int
    unit: int  # that the rows of a minibatch must be a multiple of


def learner_batch(lesson: TrainingBatch, pad_id: int, packing: Packing | None = None) -> LearnerBatch:
    """A rollout a row, of rollout.max_prompt_tokens + max_response_tokens; or packed."""
    r = lesson.rollouts
    rows, behaviour = rollout_rows(r, pad_id)
    by_token = [behaviour, *(np.repeat(x[:, None], rows.tokens.shape[1], axis=1) for x in lesson[1:])]
    if packing:
        places = pack_minibatches(r.length, r.tokens.shape[1], packing)
        rows = packed_rows(rows, places, r.length, pad_id)
        by_token = [packed(x, places, r.length, 0) for x in by_token]
    return LearnerBatch(rows, *by_token)


def rollout_rows(rollouts: Rollouts, pad_id: int) -> tuple[Rows, np.ndarray]:
    """A row each, and their behaviour log-probs [B, T] aligned with the rows' targets."""
    rows = rows_of(rollouts.tokens, rollouts.prompt_length, rollouts.length, pad_id)
    return rows, np.pad(rollouts.logprobs[:, 1:], ((0, 0), (0, 1)))


def pack_minibatches(length: np.ndarray, longest: int, packing: Packing) -> Places:
    """Each minibatch packed by itself, all into the same number of rows: one of at most RUNGS, a multiple of the unit.

    Args:
      length: [R] tokens of the rollouts, at most `longest`.
    """
    n, unit = packing.minibatches, packing.unit
    parts = [pack(length[i::n], packing.tokens) for i in range(n)]
    # First fit leaves no row but the last with fewer rollouts than always fit.
    most = math.ceil(len(length) // n / (packing.tokens // longest))
    rung = unit * math.ceil(most / (RUNGS * unit))
    rows = rung * math.ceil(max(part.rows for part in parts) / rung)
    row, start, segment = (np.zeros(len(length), np.int64) for _ in range(3))
    for i, part in enumerate(parts):
        row[i::n], start[i::n], segment[i::n] = part.row * n + i, part.start, part.segment
    return Places(row, start, segment, rows * n, packing.tokens)


def packing_unit(ways: int, microbatch: int, draft_minibatches: int) -> int:
    """What the rows of a minibatch divide by: devices, microbatches, and those within each update of a draft."""
    return math.lcm(ways, microbatch or 1) * draft_minibatches
