"""What the replay of the rollouts' experts spares (`policy.router_replay`): the learner without it."""

from typing import NamedTuple

import jax
import numpy as np

from specrl_jax import distributed
from specrl_jax.learner.batch import LearnerBatch
from specrl_jax.learner.state import RunState
from specrl_jax.training.build import Learner

# Of so many rows one is compared: an estimate for an eighth of a forward pass.
ROWS_PER_COMPARED = 8


class Compared(NamedTuple):
    """Some rows of a step where the policy chooses its experts itself."""

    behaviour: np.ndarray  # [B, T] float32, nats, the rollouts' log-probs
    logprobs: np.ndarray  # [B, T] float32, nats, the learner's
    differing: np.ndarray  # [B, T] float32, share of the rollouts' experts that it does not choose
    mask: np.ndarray  # [B, T] bool


def compare_experts(learner: Learner, state: RunState, batch: LearnerBatch) -> Compared | None:
    """Score one row in ROWS_PER_COMPARED with the policy's own experts; None where none are replayed.

    More rows where the devices of `batch` could not share them evenly.
    """
    B, num_shards = len(batch.rows.tokens), learner.packing.num_shards
    if batch.rows.experts is None:
        return None
    every = compared_every(B, num_shards)
    rows, behaviour = jax.tree.map(lambda x: x[::every], (batch.rows, batch.behaviour))
    found = learner.unreplayed_step(learner.merged(state.policy), learner.place(rows))
    logprobs, differing = (distributed.to_host(x) for x in found)
    return Compared(behaviour, logprobs, differing, rows.mask)


def compared_every(rows: int, num_shards: int) -> int:
    """Return n, of which one row each is compared: ROWS_PER_COMPARED, or less where `num_shards` could not share."""
    return next(n for n in range(ROWS_PER_COMPARED, 0, -1) if rows % (n * num_shards) == 0)
