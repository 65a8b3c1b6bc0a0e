"""What each way to let rollouts and updates follow each other would bring to a scenario (simulator/updates.py)."""

from typing import NamedTuple

import numpy as np

from experiments.simulator.events import make_pace
from experiments.simulator.rollout import Drafting, cumulative_acceptance
from experiments.simulator.scenario import Points, Prediction, Scenario, at_once, predict, whole_splits
from experiments.simulator.updates import (
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
DISAGREEMENTS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3)


class Parts(NamedTuple):
    """What the formula needs of divisions of the devices, [N] each."""

    generate: np.ndarray  # G, seconds: weights move, and one batch is drawn by itself
    learn: np.ndarray  # L, seconds
    verifying: np.ndarray  # v, share of G that verifying all its rollouts takes


def simulate_update(s: Scenario, p: Points, update: Update, *, disagreement: float = 0.0) -> StepAverages:
    """Simulate the steps of one point, N = 1, its devices divided as they are.

    A replica has slots for its part of one step's rollouts or, where that is shorter, for all that may have begun; at
    most as many as find pages.
    """
    w, phases = s.workload, _alone(s, p).phases
    replicas, each = int(_replicas(s, p)[0]), int(_each(s, p)[0])
    outside = Outside(float(phases.prepare[0]), float(phases.learner[0]))
    drafting = Drafting(p.k[:, None], cumulative_acceptance(p.acceptance, p.measured_at)[:, None])
    held = int(at_once(s, p)[0, 0])
    found = []
    begun = 1 + update.ahead * update.fills + update.carry
    for slots in {min(held, each), min(held, int(each * begun))}:
        pace = make_pace(s.decoder, drafting, slots, longest=w.prompt + w.lengths.limit)
        found.append(
            simulate(
                w,
                s.decoder,
                pace,
                replicas=replicas,
                slots=slots,
                update=update,
                outside=outside,
                disagreement=disagreement,
            )
        )
    return min(found)


def divided(s: Scenario, p: Points, update: Update, *, disagreement: float = 0.0) -> Points:
    """Return a point, N = 1, with its devices divided, if for two sides, for the shortest step by the formula."""
    if not update.beside:
        return p._replace(rollout_devices=p.devices)
    tried = np.unique(whole_splits(s, p))
    q = p.repeat(len(tried))._replace(rollout_devices=tried)
    # As in best_split: one that does not fit is chosen only where none does.
    seconds = np.where(_alone(s, q).fits, 1.0, 1e6) * formula(s, q, update, disagreement=disagreement)
    return p._replace(rollout_devices=tried[[np.argmin(seconds)]])


def formula(s: Scenario, p: Points, update: Update, *, disagreement: float) -> np.ndarray:
    """Return [N] seconds of a step by the formula; without `exact` nothing is verified or lost."""
    parts = split_parts(s, p)
    if not update.exact:
        return exact_seconds(parts.generate, parts.learn, 0.0, rest=0.0)
    w = s.workload
    lengths = w.lengths.quantile((np.arange(w.rollouts) + 0.5) / w.rollouts)
    return exact_seconds(parts.generate, parts.learn, parts.verifying, rest=expected_rest(lengths, disagreement))


def split_parts(s: Scenario, p: Points) -> Parts:
    """Return the parts of the formula."""
    w, phases = s.workload, _alone(s, p).phases
    generate, text = phases.prepare + phases.generate, w.prompt / w.group + w.lengths.mean
    verifying = np.asarray(s.decoder.verification(_each(s, p) * text, text))
    return Parts(generate, phases.learner, verifying / generate)


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


def _alone(s: Scenario, p: Points) -> Prediction:
    """Predict one batch after the other."""
    return predict(s, p._replace(lag=np.zeros_like(p.lag)))


def _replicas(s: Scenario, p: Points) -> np.ndarray:
    return np.maximum(p.rollout_devices // s.rollout_split.devices, 1)


def _each(s: Scenario, p: Points) -> np.ndarray:
    """Return [N] most rollouts of a step that a replica has."""
    return -(-s.workload.rollouts // _replicas(s, p))
