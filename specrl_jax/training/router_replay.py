"""Compare the learner with and without router replay (`policy.router_replay`)."""

from typing import NamedTuple

import jax
import numpy as np

from specrl_jax import distributed
from specrl_jax.learner.batch import LearnerBatch
from specrl_jax.learner.state import RunState
from specrl_jax.training.build import Learner

# Of so many microbatches one is compared: an estimate for an eighth of a forward pass.
MICROBATCHES_PER_COMPARED = 8


class Compared(NamedTuple):
    """Some rows of a step where the policy chooses its experts itself."""

    behaviour: np.ndarray  # [B, T] float32, nats, the rollouts' log-probs
    logprobs: np.ndarray  # [B, T] float32, nats, the learner's
    differing: np.ndarray  # [B, T] float32, share of the rollouts' experts that it does not choose
    mask: np.ndarray  # [B, T] bool


def compare_experts(learner: Learner, state: RunState, batch: LearnerBatch) -> Compared | None:
    """Score one microbatch in MICROBATCHES_PER_COMPARED, of rows that lie apart, with the policy's own experts.

    None where none are replayed.
    """
    if batch.rows.experts is None:
        return None
    (B, T), params = batch.rows.tokens.shape, learner.merged(state.policy)
    size = learner.packing.microbatch(T)
    compared = -(-B // size // MICROBATCHES_PER_COMPARED) * size
    rows, behaviour = jax.tree.map(lambda x: x[:: B // compared][:compared], (batch.rows, batch.behaviour))
    found = [learner.unreplayed_step(params, part) for part in learner.microbatches(rows)]
    logprobs, differing = (np.concatenate([distributed.to_host(x) for x in parts]) for parts in zip(*found))
    return Compared(behaviour, logprobs, differing, mask=rows.mask)
