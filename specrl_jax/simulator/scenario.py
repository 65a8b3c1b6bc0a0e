"""From a policy, a machine and a workload to the seconds of a step, for many configurations at once.

A `Scenario` is what all of them share, `Points` what differs between them.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from specrl_jax.drafts.eagle3.network import Eagle3Config
from specrl_jax.models.qwen3 import Qwen3Config
from specrl_jax.simulator.communication import ONE_DEVICE, Parallelism
from specrl_jax.simulator.cost import BFLOAT16, DecoderCost, Precision
from specrl_jax.simulator.hardware import Array, Hardware
from specrl_jax.simulator.learner import LearnerCost, Workload
from specrl_jax.simulator.memory import memory, most_slots
from specrl_jax.simulator.rollout import (
    AT_ONCE,
    LENGTHS,
    Drafting,
    EngineSchedule,
    Rollout,
    Steady,
    cumulative_acceptance,
    replica_profile,
    run,
    run_steady,
    stack,
)
from specrl_jax.simulator.step import PhaseSeconds, StepSeconds, asynchronous

ADAPTIVE = -1  # for k: the best length in every segment
CHUNK = 2048  # configurations evaluated together; bounds the memory of a large grid
JITTER_STEP = 0.05
SPLITS = 32  # ways to divide the devices that are compared, one less


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What the configurations of a grid share."""

    model: Qwen3Config
    head: Eagle3Config | None  # None: drafts are copied
    hardware: Hardware
    workload: Workload
    rollout_split: Parallelism = ONE_DEVICE
    learner_split: Parallelism = ONE_DEVICE
    precision: Precision = BFLOAT16
    learner_dtype: str = "bfloat16"
    schedule: EngineSchedule = AT_ONCE
    free_verification: bool = False
    captured_rows: float = np.inf
    in_flight: bool = False  # weights change under running responses; see step.asynchronous

    @property
    def decoder(self) -> DecoderCost:
        shared = (self.rollout_split, self.precision, self.free_verification, self.captured_rows)
        return DecoderCost(self.model, self.head, self.hardware, *shared)

    def on(self, hardware: Hardware) -> "Scenario":
        """The same on another machine."""
        return dataclasses.replace(self, hardware=hardware)

    @property
    def learner(self) -> LearnerCost:
        return LearnerCost(self.model, self.head, self.hardware, self.learner_split, self.learner_dtype)


class Points(NamedTuple):
    """Configurations, [N] each."""

    devices: np.ndarray
    rollout_devices: np.ndarray  # as many as devices: colocated
    lag: np.ndarray  # policy versions; 0 where colocated
    k: np.ndarray  # tokens drafted; 0: none, ADAPTIVE: the best of LENGTHS in every segment
    acceptance: np.ndarray  # tokens a verification commits at `measured`
    measured: np.ndarray  # the k that acceptance goes with

    @property
    def apart(self) -> np.ndarray:
        return self.rollout_devices < self.devices

    def at(self, i: int) -> "Points":
        """One of them, N = 1."""
        return _at(self, i)


class Prediction(NamedTuple):
    """[N] each."""

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

    def at(self, i: int) -> "Comparison":
        """Of one of them, N = 1."""
        return _at(self, i)


def points(devices: Array, k: Array = 0, acceptance: Array = 1.0, **others: Array) -> Points:
    """Points of numbers and arrays that broadcast; acceptance goes with k unless `measured` says otherwise.

    Others: rollout_devices (default: colocated), lag (default 0), measured.
    """
    measured = others.get("measured", np.where(np.asarray(k) < 0, LENGTHS[-1], k))
    values = (devices, others.get("rollout_devices", devices), others.get("lag", 0), k, acceptance, measured)
    return Points(*(np.atleast_1d(x) for x in np.broadcast_arrays(*values)))


def predict(s: Scenario, p: Points) -> Prediction:
    """Seconds of every point. With a machine of drawn numbers, [D, 1] each, p has D points, or one."""
    count = len(p.devices)
    if count <= CHUNK:
        return _predict(s, p)
    parts = [_predict(s, Points(*(x[i : i + CHUNK] for x in p))) for i in range(0, count, CHUNK)]
    return _joined(parts)


def compare(s: Scenario, p: Points, split: bool = True) -> Comparison:
    """Every point beside plain decoding.

    Args:
      split: with a lag each of the two has the devices divided for its own shortest step; False: as p says.
    """
    plain = p._replace(k=np.zeros_like(p.k))
    on, off = (best_split(s, p), best_split(s, plain)) if split else (p.rollout_devices, p.rollout_devices)
    slow, fast = predict(s, plain._replace(rollout_devices=off)), predict(s, p._replace(rollout_devices=on))
    same = predict(s, plain._replace(rollout_devices=on)).phases.generate
    return Comparison(slow, fast, same / fast.phases.generate, slow.step.total / fast.step.total, off, on)


class SpeedupSamples(NamedTuple):
    """On machines of drawn numbers, [D] each."""

    rollout: np.ndarray  # speedup
    end_to_end: np.ndarray  # speedup
    share: np.ndarray  # generation's, of a plain step
    plain_step: np.ndarray  # seconds
    step: np.ndarray  # seconds

    def intervals(self) -> list[tuple[float, float]]:
        """90 % of each field."""
        return [tuple(map(float, np.quantile(x, (0.05, 0.95)))) for x in self]


def sample_speedups(
    s: Scenario, p: Points, found: Comparison, draws: int, known: dict[str, float] | None = None
) -> SpeedupSamples:
    """Of one point, N = 1, whose devices are divided as in `found`; `known` as in Hardware.sampled."""
    drawn = s.on(s.hardware.sampled(draws, known=known))
    fast = Points(*(np.repeat(x, draws) for x in p._replace(rollout_devices=found.rollout_devices)))
    same = fast._replace(k=np.zeros_like(fast.k))
    slow = same._replace(rollout_devices=np.repeat(found.plain_rollout_devices, draws))
    speculative, plain, alike = (predict(drawn, x) for x in (fast, slow, same))
    rollout = alike.phases.generate / speculative.phases.generate
    totals = (plain.step.total, speculative.step.total)
    return SpeedupSamples(rollout, totals[0] / totals[1], plain.phases.share(), *totals)


def best_split(s: Scenario, p: Points) -> np.ndarray:
    """[N] rollout devices of the shortest step: whole replicas on both sides where there is a lag, else all."""
    unit = s.rollout_split.devices
    shares = np.arange(1, SPLITS) / SPLITS
    replicas = np.maximum(np.round(p.devices[:, None] / unit * shares), 1)
    tried = np.minimum(replicas * unit, np.maximum(p.devices[:, None] - unit, unit))
    spread = Points(*(np.repeat(x, SPLITS - 1) for x in p))._replace(rollout_devices=tried.ravel())
    found = predict(s, spread)
    # What does not fit is chosen only where nothing does.
    total = np.where(found.fits, 1.0, 1e6) * found.step.total
    total = total.reshape(tried.shape)
    best = tried[np.arange(len(tried)), np.argmin(total, axis=1)].astype(int)
    return np.where(p.lag > 0, best, p.devices)


def _at(tree: NamedTuple, i: int) -> NamedTuple:
    """Entry i of every array, with its axis, in a tree of named tuples."""
    return tree[i : i + 1] if isinstance(tree, np.ndarray) else type(tree)(*(_at(x, i) for x in tree))


def _joined(parts: list) -> NamedTuple:
    """Concatenates a list of equal trees of named tuples."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    return type(first)(*(_joined(list(x)) for x in zip(*parts)))


def _predict(s: Scenario, p: Points) -> Prediction:
    column = Points(*(np.asarray(x, float)[:, None] for x in p))
    drafting = Drafting(column.k, cumulative_acceptance(column.acceptance, column.measured))
    replicas = np.maximum(column.rollout_devices / s.rollout_split.devices, 1.0)
    learners = np.where(p.apart[:, None], column.devices - column.rollout_devices, column.devices)
    sizes = memory(s.workload, s.decoder, s.learner, learners, column.rollout_devices)
    room = (s.hardware.memory_bytes, p.apart[:, None])
    slots = (
        np.ceil(s.workload.slots / replicas) if s.workload.slots else most_slots(sizes, s.workload, s.decoder, *room)
    )
    rollout, steady = generation(s, replicas, slots, column.lag, drafting)
    phases = _phases(s, rollout.seconds, learners)
    step = asynchronous(phases, steady, column.lag, s.in_flight, s.hardware.attained.contention)
    fits = sizes.fits(*room)
    return _flattened(Prediction(step, phases, rollout, steady, fits))


def generation(
    s: Scenario, replicas: np.ndarray, slots: np.ndarray, lag: np.ndarray, drafting: Drafting
) -> tuple[Rollout, Steady]:
    """One batch alone, and batches without a gap, in `slots` [N, 1] of a replica; a prompt is prefilled once."""
    w, decoder = s.workload, s.decoder
    each = np.maximum(np.ceil(w.rollouts / replicas), 1.0)
    slots = np.maximum(slots, 1.0)
    tokens = 1.0 + drafting.accepted[..., 0] if s.schedule.chunk else np.ones_like(each)
    # Of responses of more than some hundred tokens it is nothing beside how their lengths differ.
    jitter = np.broadcast_to(JITTER_STEP * np.round(drafting.jitter(w.lengths.mean) / JITTER_STEP), each.shape)
    rows = zip(each[:, 0], np.minimum(slots, each)[:, 0], np.broadcast_to(tokens, each.shape)[:, 0], jitter[:, 0])
    profiles = [
        replica_profile(w.lengths, int(n), w.rollouts, int(b), w.prompt, s.schedule, float(t), float(j))
        for n, b, t, j in rows
    ]
    rollout = run(decoder, stack(profiles), drafting)
    # While the learner has one batch, parts of as many as the lag allows are under way, the one it waits for included.
    most = np.minimum(slots, each * (np.asarray(lag) + 1))
    steady = run_steady(decoder, w.lengths, w.prompt, each, most, drafting)
    prefill = decoder.prefill(each / w.group * w.prompt, w.prompt)
    return (
        rollout._replace(seconds=rollout.seconds + prefill),
        steady._replace(seconds=steady.seconds + prefill, delay=steady.delay + prefill),
    )


def _phases(s: Scenario, generate: np.ndarray, learners: np.ndarray) -> PhaseSeconds:
    a, learner, w = s.hardware.attained, s.learner, s.workload
    prepare = learner.prepare(learners, s.rollout_split, s.precision.weights)
    values = (a.data_seconds, prepare, generate, learner.logprob(w, learners), learner.train(w, learners))
    return PhaseSeconds(*np.broadcast_arrays(*values))


def _flattened(tree: NamedTuple) -> NamedTuple:
    """[N, 1] to [N], in a tree of named tuples; [N, n] stays."""
    if isinstance(tree, np.ndarray):
        return tree[:, 0] if tree.shape[-1] == 1 else tree
    return type(tree)(*(_flattened(x) for x in tree))
