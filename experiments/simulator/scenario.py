"""From a policy, a machine and a workload to the seconds of a step, for many configurations at once.

A `Scenario` holds what all configurations share, `Points` what differs between them.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from experiments.simulator.communication import ONE_DEVICE, Parallelism
from experiments.simulator.cost import DecoderCost
from experiments.simulator.counts import BFLOAT16, Precision
from experiments.simulator.hardware import Hardware
from experiments.simulator.learner import LearnerCost, Workload
from experiments.simulator.memory import DeviceBytes, estimate_bytes, sequences_at_once
from experiments.simulator.rollout import (
    AT_ONCE,
    LENGTHS,
    BatchProfile,
    Drafting,
    EngineSchedule,
    Rollout,
    Steady,
    cumulative_acceptance,
    replica_profile,
    run,
    run_steady,
)
from experiments.simulator.step import PhaseSeconds, StepSeconds, asynchronous
from specrl_jax.drafts.sizes import Head
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import Array

ADAPTIVE = -1  # for k: the best length in every segment
CHUNK = 2048  # configurations evaluated together; bounds the memory of a large grid
JITTER_STEP = 0.05
SPLITS = 32  # ways to divide the devices that are compared, plus one


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What the configurations of a grid share."""

    model: DecoderConfig
    head: Head | None  # None: lookup drafts, or a twin (precision.twin)
    hardware: Hardware
    workload: Workload
    rollout_split: Parallelism = ONE_DEVICE
    learner_split: Parallelism = ONE_DEVICE
    precision: Precision = BFLOAT16
    learner_dtype: str = "bfloat16"
    schedule: EngineSchedule = AT_ONCE
    free_verification: bool = False
    captured_rows: float = np.inf
    in_flight: bool = False  # weights are updated under running responses; see step.asynchronous

    @property
    def decoder(self) -> DecoderCost:
        shared = (self.rollout_split, self.precision, self.free_verification, self.captured_rows)
        return DecoderCost(self.model, self.head, self.hardware, *shared)

    @property
    def learner(self) -> LearnerCost:
        return LearnerCost(self.model, self.head, self.hardware, split=self.learner_split, dtype=self.learner_dtype)

    def on(self, hardware: Hardware) -> "Scenario":
        """Return the scenario on another machine."""
        return dataclasses.replace(self, hardware=hardware)


class Points(NamedTuple):
    """Configurations, [N] each."""

    devices: np.ndarray
    rollout_devices: np.ndarray  # equal to devices: colocated
    lag: np.ndarray  # policy versions; 0 where colocated
    k: np.ndarray  # drafted tokens; 0: none, ADAPTIVE: the best of LENGTHS in every segment
    acceptance: np.ndarray  # acceptance length at `measured_at`, tokens
    measured_at: np.ndarray  # the k of `acceptance`

    @property
    def disaggregated(self) -> np.ndarray:
        return self.rollout_devices < self.devices

    @property
    def learner_devices(self) -> np.ndarray:
        return np.where(self.disaggregated, self.devices - self.rollout_devices, self.devices)

    def repeat(self, n: int) -> "Points":
        """Repeat each point n times."""
        return Points(*(np.repeat(x, n) for x in self))


class Prediction(NamedTuple):
    """Seconds of the configurations, [N] each."""

    step: StepSeconds
    phases: PhaseSeconds
    rollout: Rollout
    steady: Steady  # [N, ADMISSIONS]
    fits: np.ndarray  # bool


class Comparison(NamedTuple):
    """Plain and speculative steps of the same configurations."""

    plain: Prediction
    speculative: Prediction
    rollout: np.ndarray  # [N] speedup of one batch of responses, both on the speculative step's rollout devices
    end_to_end: np.ndarray  # [N] speedup of the step
    plain_rollout_devices: np.ndarray  # [N]
    rollout_devices: np.ndarray  # [N]


class SpeedupSamples(NamedTuple):
    """Results on machines of sampled figures, [D] each."""

    rollout: np.ndarray  # speedup
    end_to_end: np.ndarray  # speedup
    share: np.ndarray  # of generation in a plain step
    plain_step: np.ndarray  # seconds
    step: np.ndarray  # seconds

    def intervals(self) -> list[tuple[float, float]]:
        """Return the 90 % interval of each field."""
        return [(float(np.quantile(x, 0.05)), float(np.quantile(x, 0.95))) for x in self]


def points(
    devices: Array,
    k: Array = 0,
    acceptance: Array = 1.0,
    *,
    rollout_devices: Array | None = None,
    lag: Array = 0,
    measured_at: Array | None = None,
) -> Points:
    """Make points of numbers and arrays that broadcast.

    Args:
      rollout_devices: None: colocated.
      measured_at: k of the acceptance length; None: `k`, the longest of LENGTHS where k is ADAPTIVE.
    """
    rollout_devices = devices if rollout_devices is None else rollout_devices
    measured_at = np.where(np.asarray(k) < 0, LENGTHS[-1], k) if measured_at is None else measured_at
    values = (devices, rollout_devices, lag, k, acceptance, measured_at)
    return Points(*(np.atleast_1d(x) for x in np.broadcast_arrays(*values)))


def predict(s: Scenario, p: Points) -> Prediction:
    """Predict the seconds of every point. On a machine of sampled figures, [D, 1] each, p has D points, or one."""
    count = len(p.devices)
    if count <= CHUNK:
        return _predict(s, p)
    parts = [_predict(s, Points(*(x[i : i + CHUNK] for x in p))) for i in range(0, count, CHUNK)]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def compare(s: Scenario, p: Points, optimize_split: bool = True) -> Comparison:
    """Compare every point with plain decoding; with a lag, `optimize_split` divides the devices of each of the two for
    its own shortest step, else they stay divided as in p.
    """
    plain = p._replace(k=np.zeros_like(p.k))
    on, off = (best_split(s, p), best_split(s, plain)) if optimize_split else (p.rollout_devices, p.rollout_devices)
    slow, fast = predict(s, plain._replace(rollout_devices=off)), predict(s, p._replace(rollout_devices=on))
    same = predict(s, plain._replace(rollout_devices=on)).phases.generate
    return Comparison(
        slow,
        fast,
        same / fast.phases.generate,
        end_to_end=slow.step.total / fast.step.total,
        plain_rollout_devices=off,
        rollout_devices=on,
    )


def sample_speedups(s: Scenario, p: Points, found: Comparison, *, draws: int) -> SpeedupSamples:
    """Evaluate one point, N = 1, on `draws` machines (Hardware.sampled), its devices divided as in `found`."""
    sampled = s.on(s.hardware.sampled(draws))
    fast = p._replace(rollout_devices=found.rollout_devices).repeat(draws)
    same = fast._replace(k=np.zeros_like(fast.k))
    slow = same._replace(rollout_devices=np.repeat(found.plain_rollout_devices, draws))
    speculative, plain, alike = (predict(sampled, x) for x in (fast, slow, same))
    rollout = alike.phases.generate / speculative.phases.generate
    totals = (plain.step.total, speculative.step.total)
    return SpeedupSamples(rollout, totals[0] / totals[1], plain.phases.share(), *totals)


def best_split(s: Scenario, p: Points) -> np.ndarray:
    """Return [N] rollout devices of the shortest step: whole replicas on both sides where there is a lag, else all."""
    tried = whole_splits(s, p)
    found = predict(s, p.repeat(SPLITS - 1)._replace(rollout_devices=tried.ravel()))
    # A split that does not fit is chosen only where none does.
    total = (np.where(found.fits, 1.0, 1e6) * found.step.total).reshape(tried.shape)
    best = tried[np.arange(len(tried)), np.argmin(total, axis=1)].astype(int)
    return np.where(p.lag > 0, best, p.devices)


def whole_splits(s: Scenario, p: Points) -> np.ndarray:
    """Return [N, SPLITS - 1] numbers of rollout devices, whole replicas on both sides; some more than once."""
    unit = s.rollout_split.devices
    shares = np.arange(1, SPLITS) / SPLITS
    replicas = np.maximum(np.round(p.devices[:, None] / unit * shares), 1)
    return np.minimum(replicas * unit, np.maximum(p.devices[:, None] - unit, unit))


def device_bytes(s: Scenario, p: Points) -> DeviceBytes:
    """Estimate the memory of the points, [N, 1] each."""
    return estimate_bytes(
        s.workload,
        s.decoder,
        s.learner,
        learner_devices=p.learner_devices[:, None],
        rollout_devices=np.asarray(p.rollout_devices, float)[:, None],
    )


def at_once(s: Scenario, p: Points) -> np.ndarray:
    """Return how many sequences of a replica run at once, [N, 1]."""
    return sequences_at_once(
        device_bytes(s, p),
        s.workload,
        s.decoder,
        memory_bytes=s.hardware.memory_bytes,
        disaggregated=p.disaggregated[:, None],
        replicas=_replicas(s, p),
    )


def _replicas(s: Scenario, p: Points) -> np.ndarray:
    return np.maximum(np.asarray(p.rollout_devices, float)[:, None] / s.rollout_split.devices, 1.0)


def _predict(s: Scenario, p: Points) -> Prediction:
    column = Points(*(np.asarray(x, float)[:, None] for x in p))
    drafting = Drafting(column.k, cumulative_acceptance(column.acceptance, column.measured_at))
    sizes, memory = device_bytes(s, p), (s.hardware.memory_bytes, p.disaggregated[:, None])
    rollout, steady = generation(s, _replicas(s, p), at_once(s, p), lag=column.lag, drafting=drafting)
    a, learner, w, learners = s.hardware.attained, s.learner, s.workload, column.learner_devices
    prepare = learner.prepare(learners, s.rollout_split, s.precision)
    values = (a.data_seconds, prepare, rollout.seconds, learner.logprob(w, learners), learner.train(w, learners))
    phases = PhaseSeconds(*np.broadcast_arrays(*values))
    step = asynchronous(phases, steady, column.lag, in_flight=s.in_flight, contention=a.contention)
    found = Prediction(step, phases, rollout, steady=steady, fits=sizes.fits(*memory))
    # [N, 1] to [N]; [N, ADMISSIONS] stays.
    return jax.tree.map(lambda x: x[:, 0] if x.shape[-1] == 1 else x, found)


def generation(
    s: Scenario, replicas: np.ndarray, slots: np.ndarray, *, lag: np.ndarray, drafting: Drafting
) -> tuple[Rollout, Steady]:
    """Return one batch by itself, and batches without a gap, in `slots` [N, 1] of a replica."""
    w, decoder = s.workload, s.decoder
    each = np.maximum(np.ceil(w.rollouts / replicas), 1.0)
    slots = np.maximum(slots, 1.0)
    tokens = 1.0 + drafting.accepted[..., 0] if s.schedule.chunk else np.ones_like(each)
    # For responses of more than some hundred tokens the jitter is small beside the spread of the lengths.
    jitter = np.broadcast_to(JITTER_STEP * np.round(drafting.jitter(w.lengths.mean) / JITTER_STEP), each.shape)
    rows = zip(each[:, 0], np.minimum(slots, each)[:, 0], np.broadcast_to(tokens, each.shape)[:, 0], jitter[:, 0])
    profiles = [
        replica_profile(
            w.lengths,
            int(n),
            w.rollouts,
            slots=int(b),
            prompt=w.prompt,
            schedule=s.schedule,
            tokens=float(t),
            jitter=float(j),
        )
        for n, b, t, j in rows
    ]
    rollout = run(decoder, BatchProfile(*map(np.concatenate, zip(*profiles))), drafting)
    # While the learner has one batch, parts of lag + 1 batches are in progress, including the one it waits for.
    most = np.minimum(slots, each * (np.asarray(lag) + 1))
    steady = run_steady(decoder, w.lengths, w.prompt, each=each, most=most, drafting=drafting)
    # A prompt is prefilled once for its group.
    prefill = decoder.prefill(each / w.group * w.prompt, w.prompt)
    return (
        rollout._replace(seconds=rollout.seconds + prefill),
        steady._replace(seconds=steady.seconds + prefill, delay=steady.delay + prefill),
    )
