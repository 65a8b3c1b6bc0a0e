"""Effects that the four constants of paper.py leave out, added one at a time.

Each effect has one constant, solved on the named rows and judged on the others.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from experiments.scale_projection.paper import (
    ASYNC,
    ASYNC_DEVICES,
    ASYNC_ROLLOUT,
    DEVICES,
    NGRAM,
    TABLE_4,
    Calibrated,
    Row,
    async_rows,
    row,
)
from specrl_jax.simulator.hardware import ENGINES
from specrl_jax.simulator.scenario import points


class Effect(NamedTuple):
    """One effect with the constant that sets its size."""

    name: str
    constant: str
    value: float
    solved_on: str
    rows: list[Row]  # `use` tells the rows solved on from the rows judged on


def _solve(error: Callable[[float], float], low: float, high: float) -> float:
    """Return the constant of least squared error, searched on a logarithmic scale."""
    found = minimize_scalar(lambda x: error(np.exp(x)), bounds=(np.log(low), np.log(high)), method="bounded")
    return float(np.exp(found.x))


def _squared(rows: list[Row]) -> float:
    return sum(np.log(r["predicted"] / r["measured"]) ** 2 for r in rows)


def captured_graphs(c: Calibrated) -> Effect:
    """Captured graphs end at 512 rows: above, the host launches every kernel."""

    def rows(seconds: float) -> list[Row]:
        machine = c.hardware.with_attained(uncaptured_seconds=seconds)
        with_effect = c._replace(hardware=machine, captured_rows=ENGINES["vllm"].captured_rows)
        return [
            row("Table 4", f"{w}, k = {k}", s, with_effect.speedup(w, k, a), "solved on" if k == 5 else "predicted")
            for w, k, a, s in TABLE_4
        ]

    value = _solve(lambda x: _squared([r for r in rows(x) if r["use"] == "solved on"]), 1e-6, 1e-2)
    return Effect("captured graphs end at 512 rows", "uncaptured_seconds", value, "k = 5, both", rows(value))


def lookups(c: Calibrated) -> list[Effect]:
    """Return three candidate costs of n-gram drafting, one at a time.

    The host searches every running text; or spends a fixed time on each; or batches of mixed lengths use no captured
    graph.
    """

    def searched(seconds: float) -> Calibrated:
        return c._replace(hardware=c.hardware.with_attained(lookup_seconds=seconds))

    def uncaptured(seconds: float) -> Calibrated:
        return c._replace(hardware=c.hardware.with_attained(uncaptured_seconds=seconds), captured_rows=0.0)

    def per_text(seconds: float) -> Calibrated:
        return c._replace(hardware=c.hardware.with_attained(sequence_seconds=seconds))

    def rows(of: Calibrated) -> list[Row]:
        # Plain decoding does not change.
        found = [c.generate(w, 0, 1.0) / of.generate(w, k, a, head=False) for w, k, a, _ in NGRAM]
        uses = ("solved on", "predicted")
        return [row("Table 2", f"{w}, n-gram", s, x, use) for (w, _, _, s), x, use in zip(NGRAM, found, uses)]

    def effect(name: str, constant: str, with_value: Callable[[float], Calibrated], low: float, high: float) -> Effect:
        value = _solve(lambda x: _squared(rows(with_value(x))[:1]), low, high)
        return Effect(name, constant, value, "Zero", rows(with_value(value)))

    return [
        effect("n-gram search on the host", "lookup_seconds", searched, 1e-11, 1e-6),
        effect("n-gram drafting takes the host a time for each text", "sequence_seconds", per_text, 1e-7, 1e-2),
        effect("n-gram batches are never captured", "uncaptured_seconds", uncaptured, 1e-6, 1e-2),
    ]


def learner_floor(c: Calibrated) -> list[Effect]:
    """A part of the learner's phases does not shrink with more devices: 64.6 s on 16 GPUs, 49.3 s on 32."""
    learner = ASYNC["plain"][0] - ASYNC["plain"][1]

    def with_floor(seconds: float) -> Calibrated:
        phases = c.predict("think", points(DEVICES)).phases
        whole = float(phases.logprob[0] + phases.train[0])
        share = c.hardware.attained.learner * whole / (whole - seconds)
        return c._replace(hardware=c.hardware.with_attained(learner=share, learner_seconds=seconds))

    def learner_apart(seconds: float) -> float:
        p = points(ASYNC_DEVICES, rollout_devices=ASYNC_ROLLOUT, lag=1)
        return float(with_floor(seconds).predict("think", p).phases.learner[0])

    def effect(name: str, of: Calibrated) -> Effect:
        rows = async_rows(of)
        # The learner takes most of the plain step.
        rows[0]["use"] = "solved on"
        return Effect(name, "learner_seconds", value, "learner of the plain asynchronous step", rows)

    value = _solve(lambda x: (learner_apart(x) - learner) ** 2, 0.1, 45.0)
    fixed, name = with_floor(value), "part of the learner's seconds is fixed"
    moving = f"{name}; weights change under running responses"
    return [effect(name, fixed), effect(moving, fixed._replace(in_flight=True))]
