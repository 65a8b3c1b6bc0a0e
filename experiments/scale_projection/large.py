"""Simulate the paper's simulated rows of Qwen3-235B-A22B without fitting to them, and their sensitivity."""

import dataclasses

import numpy as np

from experiments.scale_projection.effects import Effect, captured_graphs
from experiments.scale_projection.paper import (
    DRAFT_VOCAB,
    FULLEST,
    LIMIT,
    Calibrated,
    Row,
    calibrate,
    learner_work,
    row,
)
from specrl_jax.models.qwen3 import PRESETS
from specrl_jax.simulator.communication import Parallelism
from specrl_jax.simulator.cost import Precision, head_config
from specrl_jax.simulator.hardware import ENGINES, HARDWARE
from specrl_jax.simulator.learner import Workload
from specrl_jax.simulator.lengths import LogNormalLengths
from specrl_jax.simulator.scenario import Points, Scenario, compare, points, sample_speedups

LARGE_ROLLOUTS = 4096  # the paper's
DRAWS = 200  # draws of the assumptions
# (GPUs, lag, k, acceptance length, rollout speedup, end to end)
LARGE = [
    (512, 0, 3, 3.0, 2.72, 1.70),
    (512, 0, 7, 5.0, 4.07, 1.96),
    (2048, 2, 5, 4.0, 3.5, 2.5),
]
LARGE_SPLIT = Parallelism(tensor=4, expert=8)  # configs/rlzero_235b_a22b.py
FLOAT8 = Precision("float8", "float8", "bfloat16")


def large_scenario(c: Calibrated, workload: str, free: bool) -> Scenario:
    """Return Qwen3-235B-A22B with 4,096 rollouts in FP8; lengths and learner as in the 8B runs."""
    model = PRESETS["qwen3_235b_a22b"]
    lengths = LogNormalLengths(min(c.means[workload], FULLEST * LIMIT), LIMIT, c.spread)
    return Scenario(
        model,
        head_config(model, DRAFT_VOCAB),
        c.hardware,
        learner_work(LARGE_ROLLOUTS, lengths, 512 // LARGE_SPLIT.tensor),
        LARGE_SPLIT,
        LARGE_SPLIT,
        FLOAT8,
        free_verification=free,
        captured_rows=c.captured_rows,
    )


def colocated_plan(p: Points) -> Points:
    """Return the colocated plan without lag, which we take the paper's rollout speedups to mean."""
    return p._replace(lag=np.zeros_like(p.lag))


def large_rows(c: Calibrated, workload: str, free: bool) -> list[Row]:
    """Compute rollout and end-to-end speedups; with a lag, each side with its best split, and two other readings."""
    s, out = large_scenario(c, workload, free), []
    for devices, lag, k, acceptance, rollout, whole in LARGE:
        case = f"{devices} GPUs, lag {lag}, k = {k}"
        p = points(devices, k, acceptance, lag=lag)
        found, colocated = compare(s, p), compare(s, colocated_plan(p))
        share = {"share": round(float(colocated.plain.phases.share()[0]), 3)}
        alone, drawn = (
            sample_speedups(s, colocated_plan(p), colocated, DRAWS, constant_errors(c)),
            sample_speedups(s, p, found, DRAWS, constant_errors(c)),
        )
        out.append(row(case, "rollout", rollout, colocated.rollout[0]) | share | _interval(alone.rollout))
        out.append(row(case, "end to end", whole, found.end_to_end[0]) | share | _interval(drawn.end_to_end))
        if lag:
            half = compare(s, p._replace(rollout_devices=p.devices // 2), optimize_split=False)
            others = {"colocated, no lag": colocated.end_to_end[0], "half of the GPUs each": half.end_to_end[0]}
            out += [row(case, f"end to end, {name}", whole, x, "another reading") for name, x in others.items()]
    return out


def constant_errors(c: Calibrated) -> dict[str, float]:
    """Return the uncertainty of the fitted constants in use; the others have the ranges of the assumptions."""
    used = {name: c.fit.factors[name] for name in ("learner", "draft_seconds")}
    return {n: x for n, x in used.items() if getattr(c.hardware.attained, n) == c.fit.values[n]}


def _interval(values: np.ndarray) -> dict[str, float]:
    return dict(zip(("low", "high"), (round(float(x), 4) for x in np.quantile(values, (0.05, 0.95)))))


# ---- three views of drafting and verification


def assumed(c: Calibrated) -> Calibrated:
    """Return the scenario as the hardware table assumes, without the fitted host seconds per draft."""
    return c._replace(hardware=c.hardware.with_attained(draft_seconds=HARDWARE["gb200"].attained.draft_seconds))


def fused(c: Calibrated) -> Calibrated:
    """Return the scenario with this project's loop: one fused program, one host synchronisation per chunk."""
    return c._replace(hardware=c.hardware.with_engine(ENGINES["fused"]))


def vllm(c: Calibrated, effect: Effect) -> Calibrated:
    """Return the scenario with vLLM's costs as fitted to the 8B runs: host seconds per draft, captured graphs."""
    machine = c.hardware.with_attained(uncaptured_seconds=effect.value)
    return c._replace(hardware=machine, captured_rows=ENGINES["vllm"].captured_rows)


# ---- sensitivity of the simulated rows


def sensitivity() -> list[Row]:
    """Compute the six simulated rows (free verification) and Table 4's (captured graphs), one assumption changed."""
    gb200 = HARDWARE["gb200"]
    others = {
        "as assumed": gb200,
        "host_seconds as in this project's loop": gb200.with_attained(host_seconds=ENGINES["fused"].host_seconds),
        "host_seconds 1 ms": gb200.with_attained(host_seconds=1e-3),
        "host_seconds 4 ms": gb200.with_attained(host_seconds=4e-3),
        "memory 0.65": gb200.with_attained(memory=0.65),
        "mixture 0.35": gb200.with_attained(mixture=0.35),
        "mixture 1": gb200.with_attained(mixture=1.0),
    }
    rows = [changed_row(name, calibrate(machine)) for name, machine in others.items()]
    rows += [changed_row(f"spread of ln(length) {x}", calibrate(gb200, x)) for x in (0.6, 1.1)]
    c = calibrate(gb200)
    w = large_scenario(c, "zero", free=True).workload
    x = w.lengths
    workloads = {
        "235B: lengths of Think": large_scenario(c, "think", free=True).workload,
        "235B: 4,096 sequences at once": dataclasses.replace(w, slots=LARGE_ROLLOUTS),
        "235B: texts half as long": dataclasses.replace(w, lengths=LogNormalLengths(x.mean / 2, x.limit / 2, x.spread)),
    }
    return rows + [changed_row(name, c, workload) for name, workload in workloads.items()]


def changed_row(name: str, c: Calibrated, workload: Workload | None = None) -> Row:
    """Return one changed case; the workload defaults to RL-Zero's."""
    s, out = large_scenario(assumed(c), "zero", free=True), {"changed": name}
    s = dataclasses.replace(s, workload=workload or s.workload)
    for devices, lag, k, acceptance, _, _ in LARGE:
        p = points(devices, k, acceptance, lag=lag)
        out[f"{devices}, k = {k}: rollout"] = round(float(compare(s, colocated_plan(p)).rollout[0]), 3)
        out[f"{devices}, k = {k}: end to end"] = round(float(compare(s, p).end_to_end[0]), 3)
    worst = max(abs(r["error"]) for r in captured_graphs(c).rows)
    return out | {"Table 4 with captured graphs, worst error": round(worst, 3)}
