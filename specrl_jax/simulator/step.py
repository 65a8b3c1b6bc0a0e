"""One RL step: five phases, on the same devices or apart, synchronous or with a lag.

    synchronous    T = data + prepare + generate + logprob + train
    with lag l     T = max(prepare + generation a batch, data + logprob + train, all of the slowest batch / (l + 1))

Devices that share what they run on (`contention` c) add c times the shorter of the first two to the longer.

With a lag l >= 1 the learner works on a batch that was begun up to l versions ago: batch s starts when version s - l is
there, so l + 1 steps last at least as long as one batch takes from its first token to its update. Generation either
ends one batch before it begins the next, or goes on without a gap: then a batch's last responses cost no throughput,
but a fuller device makes each of them slower. How many sequences are admitted is chosen for the shortest step.
"""

from typing import NamedTuple

import numpy as np

from specrl_jax.simulator.hardware import Array
from specrl_jax.simulator.rollout import Steady


class PhaseSeconds(NamedTuple):
    """Seconds of one batch's phases alone, by the paper's names."""

    data: Array
    prepare: Array
    generate: Array
    logprob: Array
    train: Array

    @property
    def learner(self) -> Array:
        return self.data + self.logprob + self.train

    @property
    def total(self) -> Array:
        return self.prepare + self.generate + self.learner

    def share(self) -> Array:
        """Of generation."""
        return self.generate / self.total


class StepSeconds(NamedTuple):
    """Seconds of a step in the long run."""

    total: Array
    generate: Array  # seconds of generation a batch
    exposed: Array  # seconds in which the learner waits for it


def synchronous(phases: PhaseSeconds) -> StepSeconds:
    return StepSeconds(phases.total, phases.generate, phases.prepare + phases.generate)


def asynchronous(
    phases: PhaseSeconds, steady: Steady, lag: Array, in_flight: bool = False, contention: Array = 0.0
) -> StepSeconds:
    """Generation and learner on devices of their own; lag 0 is `synchronous` on the two sets.

    Args:
      phases: of one batch alone, [N, 1] each.
      lag: versions, [N, 1].
      in_flight: weights change under running responses, and a step takes what has ended: no batch waits for its
        slowest response, and the last term above is dropped.
      contention: between 0 and 1, see hardware.Attained.
    """
    generate = np.concatenate([phases.generate, steady.seconds], axis=-1)
    delay = np.concatenate([phases.generate, steady.delay], axis=-1)
    rest = phases.prepare + phases.learner
    whole = (delay + rest) / (np.asarray(lag) + 1)
    producing = phases.prepare + generate
    busy = np.maximum(producing, phases.learner) + contention * np.minimum(producing, phases.learner)
    totals = busy if in_flight else np.maximum(busy, whole)
    best = np.argmin(totals, axis=-1)[..., None]
    chosen = StepSeconds(*(np.take_along_axis(x, best, -1) for x in (totals, generate, totals - phases.learner)))
    waits = np.asarray(lag) == 0
    return StepSeconds(*(np.where(waits, x, y) for x, y in zip(synchronous(phases), chosen)))


def amdahl(share: Array, speedup: Array) -> Array:
    """Most that a synchronous step gains where generation is `share` of it and gets `speedup` times as fast."""
    return 1 / (1 - np.asarray(share) + np.asarray(share) / speedup)
