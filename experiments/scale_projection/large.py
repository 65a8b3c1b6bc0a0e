"""Simulate the paper's simulated rows of Qwen3-235B-A22B without fitting to them, and their sensitivity."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.scale_projection import paper
from experiments.simulator.communication import Parallelism
from experiments.simulator.counts import Precision
from experiments.simulator.hardware import ENGINES, HARDWARE
from experiments.simulator.heads import head_config
from experiments.simulator.learner import Workload
from experiments.simulator.lengths import LogNormalLengths
from experiments.simulator.scenario import Points, Scenario, compare, points
from specrl_jax.models.decoder import PRESETS

LARGE_ROLLOUTS = 4096  # the paper's


class Case(NamedTuple):
    """One simulated row of the paper."""

    devices: int
    lag: int
    k: int
    acceptance: float
    rollout: float  # speedup
    end_to_end: float  # speedup
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.devices} GPUs, lag {self.lag}, k = {self.k}{self.note}"

    @property
    def points(self) -> Points:
        return points(self.devices, self.k, self.acceptance, lag=self.lag)


CASES = (
    Case(512, 0, 3, 3.0, 2.72, 1.70),
    Case(512, 0, 7, 5.0, 4.07, 1.96),
    Case(512, 0, 7, 8.0, 6.49, 2.22, " with all accepted"),  # its best cell
    Case(2048, 2, 5, 4.0, 3.5, 2.5),
)
REPLICA = 32  # devices: 4 x 8 in configs/rlzero_235b_a22b.py
FLOAT8 = Precision("float8", "float8", "bfloat16")


# ---- three views of drafting and verification


class View(NamedTuple):
    """How drafts and verification are priced."""

    name: str
    of: Callable[[paper.Calibrated], paper.Calibrated]
    free: bool = False  # verification


def _nearly_free(c: paper.Calibrated) -> paper.Calibrated:
    """Return the scenario with the hardware table's 0.1 ms a draft, and every batch captured."""
    draft = HARDWARE["gb200"].attained.draft_seconds
    return c._replace(hardware=c.hardware.with_attained(draft_seconds=draft), captured_rows=np.inf)


def fused(c: paper.Calibrated) -> paper.Calibrated:
    """Return the scenario with this project's loop: one fused program, one host synchronisation per chunk."""
    return c._replace(hardware=c.hardware.with_engine(ENGINES["fused"]), captured_rows=np.inf)


VIEWS = (
    View("free verification", _nearly_free, free=True),
    View("this project's loop", fused),
    View("vLLM by public sweeps", lambda c: c),
)


def large_scenario(c: paper.Calibrated, workload: str, free: bool) -> Scenario:
    """Return Qwen3-235B-A22B with 4,096 rollouts in FP8; lengths and learner as in the 8B runs."""
    model, tensor = PRESETS["qwen3_235b_a22b"], c.undisclosed.large_tensor
    split = Parallelism(tensor, REPLICA // tensor)
    return Scenario(
        model,
        head_config(model, paper.DRAFT_VOCAB),
        c.hardware,
        workload=paper.learner_work(LARGE_ROLLOUTS, c.lengths(workload), 512 // tensor),
        rollout_split=split,
        learner_split=split,
        precision=FLOAT8,
        free_verification=free,
        captured_rows=c.captured_rows,
    )


def colocated_plan(p: Points) -> Points:
    """Return the colocated plan without lag, which we take the paper's rollout speedups to mean."""
    return p._replace(lag=np.zeros_like(p.lag))


def large_rows(s: Scenario) -> list[paper.Row]:
    """Compute rollout and end-to-end speedups; with a lag, each side with its best split, and two other readings."""
    out = []
    for case in CASES:
        p = case.points
        found, colocated = compare(s, p), compare(s, colocated_plan(p))
        share = {"share": round(float(colocated.plain.phases.share()[0]), 3)}
        out.append(paper.row(case.name, "rollout", case.rollout, colocated.rollout[0]) | share)
        out.append(paper.row(case.name, "end to end", case.end_to_end, found.end_to_end[0]) | share)
        if case.lag:
            half = compare(s, p._replace(rollout_devices=p.devices // 2), optimize_split=False)
            others = {"colocated, no lag": colocated.end_to_end[0], "half of the GPUs each": half.end_to_end[0]}
            out += [
                paper.row(case.name, f"end to end, {name}", case.end_to_end, x, "another reading") | share
                for name, x in others.items()
            ]
    return out


def view_rows(c: paper.Calibrated, view: View, workload: str) -> list[paper.Row]:
    return large_rows(large_scenario(view.of(c), workload, view.free))


# ---- sensitivity


def sensitivity() -> list[paper.Row]:
    """Change one assumption at a time: speedups of 8B generation, and the 235B rows with free verification."""
    rows = [changed_row("as assumed", paper.calibrate())]
    for name, values in paper.PRIORS.items():
        for value in values:
            if value != getattr(paper.CENTRE, name):
                changed: Any = {name: value}
                rows.append(
                    changed_row(f"{name} {value:g}", paper.calibrate(undisclosed=paper.CENTRE._replace(**changed)))
                )
    attained = {
        "overlap 1": {"overlap": 1.0},
        "host_seconds 2 ms": {"host_seconds": 2e-3},
        "memory 0.65": {"memory": 0.65},
        "mixture 0.35": {"mixture": 0.35},
        "mixture 1": {"mixture": 1.0},
    }
    rows += [
        changed_row(name, paper.calibrate(paper.machine().with_attained(**values))) for name, values in attained.items()
    ]
    rows.append(changed_row("8B: every batch is captured", paper.calibrate(captured_rows=np.inf)))
    c = paper.calibrate()
    w = large_scenario(c, "zero", free=True).workload
    x = w.lengths
    assert isinstance(x, LogNormalLengths)
    workloads = {
        "235B: lengths of Think": large_scenario(c, "think", free=True).workload,
        "235B: 4,096 sequences at once": dataclasses.replace(w, slots=LARGE_ROLLOUTS),
        "235B: texts half as long": dataclasses.replace(w, lengths=LogNormalLengths(x.mean / 2, x.limit / 2, x.spread)),
    }
    return rows + [changed_row(name, c, workload) for name, workload in workloads.items()]


def changed_row(name: str, c: paper.Calibrated, workload: Workload | None = None) -> paper.Row:
    """Return one changed case; the 235B workload defaults to RL-Zero's."""
    view, out = VIEWS[0], paper.Row({"changed": name})
    cells = [(w, 3, paper.EAGLE[w]) for w in paper.EAGLE] + [(w, k, a) for w, k, a, _ in paper.TABLE_4 if k == 7]
    out |= {f"8B, {w}, k = {k}": round(c.speedup(w, k, a), 3) for w, k, a in cells}
    s = large_scenario(view.of(c), "zero", view.free)
    s = dataclasses.replace(s, workload=workload or s.workload)
    for case in CASES:
        short = f"{case.devices}, k = {case.k}{case.note}"
        out[f"{short}: rollout"] = round(float(compare(s, colocated_plan(case.points)).rollout[0]), 3)
        out[f"{short}: end to end"] = round(float(compare(s, case.points).end_to_end[0]), 3)
    return out | {"possible": paper.possible(c)}
