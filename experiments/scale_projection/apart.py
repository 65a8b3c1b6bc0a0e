"""Test the model of asynchronous steps on runs with separate rollout devices (experiments/async_lag).

Fitted: the phases of the synchronous run of seed 0, and one constant, `contention`, on that seed's run with lag 1 (one
CPU acts as all devices, so generation and learning slow each other down). Predicted: the synchronous runs of the other
seeds phase by phase, and all other runs with lag 1 and 2. Rows as in ours.py.
"""

import pathlib
from typing import NamedTuple

import numpy as np

from experiments.async_lag import plot
from experiments.async_lag.sweep import PIPELINES
from experiments.claims import finished_rows
from experiments.scale_projection.ours import Row, comparison
from experiments.simulator.rollout import Steady
from experiments.simulator.step import PhaseSeconds, asynchronous
from specrl_jax.core import PHASES

LAGS = {name: pipeline.get("pipeline.lag", 0) for name, pipeline in PIPELINES.items()}
FITTED = "lag 1"


class Measured(NamedTuple):
    phases: dict[str, np.ndarray]  # phase -> [seeds] seconds, of the synchronous runs
    total: dict[str, np.ndarray]  # pipeline -> [seeds] seconds of a step


def measured() -> Measured:
    rows = finished_rows(pathlib.Path(plot.__file__).parent / "results.csv")
    return Measured(
        {phase: plot.seconds(rows, "sync", phase) for phase in PHASES},
        {name: plot.seconds(rows, name, "total") for name in PIPELINES},
    )


def step_seconds(found: Measured, lag: int, contention: float) -> float:
    """Predict the seconds of a step from the synchronous phases of seed 0."""
    phases = PhaseSeconds(*(np.array([[found.phases[phase][0]]]) for phase in PHASES))
    steady = Steady(phases.generate, phases.generate)
    return float(asynchronous(phases, steady, np.array([[lag]]), in_flight=False, contention=contention).total[0, 0])


def solve_contention(found: Measured) -> float:
    """Solve for the contention in [0, 1] that reproduces the fitted cell.

    At 0 a step lasts as long as the longer side, at 1 as long as a synchronous step.
    """
    apart, shared = (step_seconds(found, LAGS[FITTED], c) for c in (0.0, 1.0))
    return float(np.clip((found.total[FITTED][0] - apart) / (shared - apart), 0.0, 1.0))


def check(found: Measured, contention: float) -> list[Row]:
    rows = []
    for phase in PHASES:
        for seed, seconds in enumerate(found.phases[phase]):
            use = "fitted" if seed == 0 else "held out"
            rows.append(comparison(f"split {phase}", f"sync seed={seed}", use, seconds, found.phases[phase][0]))
    for name, totals in found.total.items():
        for seed, seconds in enumerate(totals):
            use = "fitted" if seed == 0 and name in ("sync", FITTED) else "held out"
            predicted = step_seconds(found, LAGS[name], contention)
            rows.append(comparison("split total", f"{name} seed={seed}", use, seconds, predicted))
    return rows
