"""Seconds of one RL step from its five phases, on shared or separate devices, synchronous or with a lag.

    synchronous    T = data + prepare + generate + logprob + train
    with lag l     T = max(prepare + generate, data + logprob + train, all phases of the slowest batch / (l + 1))

If the two device sets share hardware (`contention` c), c times the shorter of the first two terms is added.

With a lag l >= 1 the learner works on a batch that started up to l versions ago: batch s starts when version s - l is
available, so l + 1 steps last at least as long as one batch from its first token to its update. Generation either
finishes one batch before the next starts, or runs without gaps: then the last responses of a batch cost no throughput,
but a fuller device slows each of them down. The number of concurrent sequences is chosen for the shortest step.
"""

from typing import NamedTuple

import numpy as np

from experiments.simulator.rollout import Steady
from specrl_jax.models.flops import Array


class PhaseSeconds(NamedTuple):
    """Seconds of each phase of one batch by itself, by the paper's names."""

    data: np.ndarray
    prepare: np.ndarray
    generate: np.ndarray
    logprob: np.ndarray
    train: np.ndarray

    @property
    def learner(self) -> np.ndarray:
        return self.data + self.logprob + self.train

    @property
    def total(self) -> np.ndarray:
        return self.prepare + self.generate + self.learner

    def share(self) -> np.ndarray:
        """Share of generation in the sum of the phases."""
        return self.generate / self.total


class StepSeconds(NamedTuple):
    """Average seconds of a step in the long run."""

    total: np.ndarray
    generate: np.ndarray  # generation of one batch
    exposed: np.ndarray  # the learner waits for generation


def synchronous(phases: PhaseSeconds) -> StepSeconds:
    return StepSeconds(phases.total, phases.generate, phases.prepare + phases.generate)


def asynchronous(
    phases: PhaseSeconds, steady: Steady, lag: Array, *, in_flight: bool = False, contention: Array = 0.0
) -> StepSeconds:
    """Return the step with generation and learner on separate devices; lag 0 is `synchronous` on the two sets.

    Args:
      phases: of one batch by itself, [N, 1] each.
      lag: policy versions, [N, 1].
      in_flight: weights are updated under running responses and a step takes whatever has finished: no batch waits for
        its slowest response, and the last term above is dropped.
      contention: between 0 and 1, see hardware.Attained.
    """
    generate = np.concatenate([phases.generate, steady.seconds], axis=-1)
    delay = np.concatenate([phases.generate, steady.delay], axis=-1)
    rest = phases.prepare + phases.learner
    latency = (delay + rest) / (np.asarray(lag) + 1)
    producing = phases.prepare + generate
    busy = np.maximum(producing, phases.learner) + contention * np.minimum(producing, phases.learner)
    totals = busy if in_flight else np.maximum(busy, latency)
    best = np.argmin(totals, axis=-1)[..., None]
    chosen = StepSeconds(*(np.take_along_axis(x, best, -1) for x in (totals, generate, totals - phases.learner)))
    waits = np.asarray(lag) == 0
    return StepSeconds(*(np.where(waits, x, y) for x, y in zip(synchronous(phases), chosen)))


def amdahl(share: Array, speedup: Array) -> Array:
    """Return the largest speedup of a synchronous step whose generation, `share` of it, is `speedup` times faster."""
    return 1 / (1 - np.asarray(share) + np.asarray(share) / speedup)
