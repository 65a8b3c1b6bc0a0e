"""What each way to let rollouts and updates follow each other would bring to a scenario (simulator/updates.py)."""

from typing import NamedTuple

import numpy as np

from specrl_jax.simulator.events import make_pace
from specrl_jax.simulator.rollout import Drafting, cumulative_acceptance
from specrl_jax.simulator.scenario import Points, Scenario, at_once, predict, whole_splits
from specrl_jax.simulator.updates import (
    SYNCHRONOUS,
    Outside,
    StepAverages,
    Update,
    exact_seconds,
    expected_rest,
    simulate,
)

# Name -> the way; how far ahead and how much is carried are examples.
MODES = {
    "synchronous": SYNCHRONOUS,
    "carry a quarter": Update(carry=0.25),
    "lookahead": Update(ahead=1, exact=True),
    "inflight": Update(ahead=1, beside=True),
    "exact": Update(ahead=1, beside=True, exact=True),
    "exact, slots stay free": Update(ahead=1, fills=False, beside=True, exact=True),
}
# Chances of a disagreement per token and version at which `exact` is simulated to find where it gains nothing.
DISAGREEMENTS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


class Parts(NamedTuple):
    """What the formula needs of a division of the devices."""

    generate: float  # G, seconds: weights move, and one batch is drawn by itself
    learn: float  # L, seconds
    verifying: float  # v, share of G that verifying all its rollouts takes


def simulate_update(s: Scenario, p: Points, update: Update, disagreement: float = 0.0) -> StepAverages:
    """Simulate the steps of one point, N = 1, its devices divided as they are."""
    w, phases = s.workload, predict(s, p._replace(lag=np.zeros_like(p.lag))).phases
    replicas, slots = _replicas(s, p), _slots(s, p)
    drafting = Drafting(p.k[:, None], cumulative_acceptance(p.acceptance, p.measured_at)[:, None])
    pace = make_pace(s.decoder, drafting, slots, w.prompt + w.lengths.limit)
    outside = Outside(float(phases.prepare[0]), float(phases.learner[0]))
    return simulate(w, s.decoder, pace, replicas, slots, update, outside, disagreement)


def divided(s: Scenario, p: Points, update: Update, disagreement: float = 0.0) -> Points:
    """Return a point, N = 1, with its devices divided, if for two sides, for the shortest step by the formula."""
    if not update.beside:
        return p._replace(rollout_devices=p.devices)
    tried = whole_splits(s, p)[0]
    verified = disagreement if update.exact else 0.0
    rest = expected_rest(_lengths(s), verified)
    seconds = []
    for devices in tried:
        parts = split_parts(s, p._replace(rollout_devices=np.array([devices])))
        seconds.append(exact_seconds(parts.generate, parts.learn, parts.verifying * update.exact, rest))
    return p._replace(rollout_devices=tried[[int(np.argmin(seconds))]])


def split_parts(s: Scenario, p: Points) -> Parts:
    """Return the parts of the formula at one point, N = 1."""
    w, phases = s.workload, predict(s, p._replace(lag=np.zeros_like(p.lag))).phases
    generate = float(phases.prepare[0] + phases.generate[0])
    each = -(-w.rollouts // _replicas(s, p))
    text = w.prompt / w.group + w.lengths.mean
    return Parts(generate, float(phases.learner[0]), float(s.decoder.verification(each * text, text)) / generate)


def break_even(disagreements: np.ndarray, seconds: np.ndarray, without: float) -> float:
    """Return the disagreement per token at which a step takes the seconds of one `without`; 0: never less, inf: always.

    Interpolated in the logarithm between the simulated ones; below the smallest above 0 in its value.
    """
    longer = np.flatnonzero(seconds >= without)
    if not len(longer):
        return np.inf
    i = int(longer[0])
    if not i:
        return 0.0
    share = (without - seconds[i - 1]) / (seconds[i] - seconds[i - 1])
    if not disagreements[i - 1]:
        return float(share * disagreements[i])
    return float(disagreements[i - 1] * (disagreements[i] / disagreements[i - 1]) ** share)


def _lengths(s: Scenario) -> np.ndarray:
    return s.workload.lengths.quantile((np.arange(s.workload.rollouts) + 0.5) / s.workload.rollouts)


def _replicas(s: Scenario, p: Points) -> int:
    return max(int(p.rollout_devices[0]) // s.rollout_split.devices, 1)


def _slots(s: Scenario, p: Points) -> int:
    """Return the sequences of a replica at once: those that find pages, at most its part of one step's."""
    return int(min(at_once(s, p)[0, 0], -(-s.workload.rollouts // _replicas(s, p))))
