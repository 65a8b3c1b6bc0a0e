"""This project's own steps with rollouts on devices of their own (experiments/async_lag): the law of a lag, tested.

Fitted: the phases of the synchronous run of seed 0, and one constant, `contention`, on that seed's run one version
ahead: one CPU pretends to be all devices, so generation and learning take time from each other. Predicted: the
synchronous runs of the other seeds phase by phase, and every other step of one and two versions ahead. Rows as in
ours.py.
"""

import pathlib
from typing import NamedTuple

import numpy as np

from experiments.async_lag import plot
from experiments.async_lag.sweep import PIPELINES
from experiments.claims import finished_rows
from experiments.scale_projection.ours import Row, comparison
from specrl_jax.core import PHASES
from specrl_jax.simulator.rollout import Steady
from specrl_jax.simulator.step import PhaseSeconds, asynchronous

LAGS = {name: pipeline.get("pipeline.lag", 0) for name, pipeline in PIPELINES.items()}
FITTED = "lag 1"


class Measured(NamedTuple):
    phases: dict[str, np.ndarray]  # [seeds] seconds by phase, of the synchronous runs
    total: dict[str, np.ndarray]  # [seeds] seconds of a step by pipeline


def measured() -> Measured:
    rows = finished_rows(pathlib.Path(plot.__file__).parent / "results.csv")
    return Measured(
        {phase: plot.seconds(rows, "sync", phase) for phase in PHASES},
        {name: plot.seconds(rows, name, "total") for name in PIPELINES},
    )


def step_seconds(found: Measured, lag: int, contention: float) -> float:
    """Of a step by the synchronous phases of seed 0; batches follow each other without gaining anything."""
    phases = PhaseSeconds(*(np.array([[found.phases[phase][0]]]) for phase in PHASES))
    return float(asynchronous(phases, Steady(phases.generate, phases.generate), [[lag]], False, contention).total[0, 0])


def solve_contention(found: Measured) -> float:
    """Such that the fitted cell comes out, if it can: between 0 and 1, where a step is no shorter than the longer side
    and no longer than a synchronous one."""
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
