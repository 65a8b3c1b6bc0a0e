"""Project speedups over grids of configurations, and time ten thousand configurations.

    python -m experiments.scale_projection.grid

Writes scale.csv and draft.csv, a heat map of each, and speed.csv beside this file: speedups over GPUs and lag, and over
k and acceptance, for Qwen3-8B and Qwen3-235B-A22B on GB200, with this project's loop and with vLLM's host constants.
Puts the table of speculation and lag into README.md.
Values are medians and intervals 90 % of the draws of `paper.py` that Table 1 allows. Workloads are those of `paper.py`
and `large.py`, except for the number of sequences: as many as find pages for their live tokens in the memory that the
learner leaves. Takes some minutes on one core.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments import commands
from experiments.claims import markdown, show_table
from experiments.scale_projection import large, paper, public
from experiments.scale_projection.ours import Row
from experiments.simulator.grid import DRAFTED, LAGS, RATES, draft_cells, scale_cells, write_rows
from experiments.simulator.heatmaps import Marks, heatmaps
from experiments.simulator.scenario import Points, Scenario, compare, points, predict
from experiments.verdicts import Interval

HERE = pathlib.Path(__file__).parent


class Case(NamedTuple):
    """One model's grids. `k` and `acceptance` belong to the scale grid, `devices` to the draft grid."""

    name: str
    scenario: Callable[[paper.Calibrated], Scenario]
    all_devices: tuple[int, ...]
    devices: int
    k: int
    acceptance: float


def limited_by_memory(s: Scenario) -> Scenario:
    """Return the scenario with as many concurrent sequences as fit in memory by this project's arithmetic."""
    return dataclasses.replace(s, workload=dataclasses.replace(s.workload, slots=0))


CASES = (
    Case("8B", lambda c: limited_by_memory(c.scenario("zero")), (16, 32, 64, 128, 256), 32, 3, 3.32),
    Case(
        "235B",
        lambda c: limited_by_memory(large.large_scenario(c, "zero", free=False)),
        (256, 512, 1024, 2048),
        512,
        5,
        4.0,
    ),
)


LOOPS: dict[str, Callable[[paper.Calibrated], paper.Calibrated]] = {"our loop": large.fused, "vLLM": lambda c: c}
# The paper's cells: column -> (case, x, y) -> its value. Of the draft grid the cells of nearest acceptance.
SCALE_MARKS: Marks = {
    "rollout_speedup": {("8B, vLLM", 32, 0): "paper 1.77", ("235B, our loop", 2048, 2): "paper 3.5"},
    "end_to_end_speedup": {("8B, vLLM", 32, 0): "paper 1.41", ("235B, our loop", 2048, 2): "paper 2.5"},
}
DRAFT_MARKS: Marks = {
    "rollout_speedup": {
        ("8B, vLLM", 0.9, 3): "paper 1.77",
        ("8B, vLLM", 0.85, 5): "paper 1.44",
        ("8B, vLLM", 0.85, 7): "paper 1.21",
        ("235B, our loop", 0.8, 3): "paper 2.72",
        ("235B, our loop", 0.85, 7): "paper 4.07",
    },
    "end_to_end_speedup": {
        ("8B, vLLM", 0.9, 3): "paper 1.41",
        ("235B, our loop", 0.8, 3): "paper 1.70",
        ("235B, our loop", 0.85, 7): "paper 1.96",
    },
}


def drawn_rows(scenarios: Sequence[Scenario], cells: Sequence[Row], p: Points) -> list[Row]:
    """Return the cells with medians over the scenarios, and their 90 % intervals."""
    found = [compare(s, p) for s in scenarios]
    speedups = {"rollout": np.array([x.rollout for x in found]), "end_to_end": np.array([x.end_to_end for x in found])}
    columns = {
        f"{name}_{what}": np.quantile(values, share, axis=0)
        for name, values in speedups.items()
        for what, share in (("speedup", 0.5), ("low", 0.05), ("high", 0.95))
    }
    columns["plain_step_s"] = np.median([x.plain.step.total for x in found], axis=0)
    columns["step_s"] = np.median([x.speculative.step.total for x in found], axis=0)
    columns["generation_share"] = np.median([x.plain.phases.share() for x in found], axis=0)
    fits = np.mean([x.plain.fits & x.speculative.fits for x in found], axis=0) > 0.5
    return [
        cell | {name: round(float(x[i]), 4) for name, x in columns.items()} | {"fits": bool(fits[i])}
        for i, cell in enumerate(cells)
    ]


def grids(kept: Sequence[paper.Calibrated]) -> tuple[list[Row], list[Row]]:
    """Compute the rows of the scale grid and of the draft grid; column `case` names the model and the loop."""
    scale, draft = list[Row](), list[Row]()
    for case in CASES:
        for loop, view in LOOPS.items():
            scenarios, name = [case.scenario(view(c)) for c in kept], {"case": f"{case.name}, {loop}"}
            cells = scale_cells(case.all_devices, LAGS, case.k, acceptance=case.acceptance)
            scale += [name | r for r in drawn_rows(scenarios, *cells)]
            draft += [name | r for r in drawn_rows(scenarios, *draft_cells(case.devices, 0, DRAFTED, rates=RATES))]
    return scale, draft


def lag_table(scale: Sequence[Row]) -> str:
    """Return the Markdown table of what speculation gains at each lag, and lag with and without speculation."""
    lines = []
    for case in CASES:
        for loop in LOOPS:
            name = f"{case.name}, {loop}"
            first, *_ = own = [r for r in scale if (r["case"], r["devices"]) == (name, case.devices)]
            for r in own[:3]:
                gain = Interval(*(r[f"end_to_end_{end}"] for end in ("speedup", "low", "high")))
                plain, fast = r["plain_step_s"], r["step_s"]
                over = [first["plain_step_s"] / plain, first["step_s"] / fast, first["plain_step_s"] / fast]
                shown = (f"{x:.2f}" for x in over)
                lines.append([f"{name}, {case.devices} GPUs", r["lag"], f"{plain:.0f}", f"{fast:.0f}", gain, *shown])
    head = [
        "",
        "lag",
        "plain step, s",
        "speculative, s",
        "speculation gains",
        "lag gains, plain",
        "lag gains, speculative",
    ]
    return markdown([*head, "both"], lines)


def plot(path: str, rows: list[Row], axes: tuple[str, str], marks: Marks) -> None:
    names = list(dict.fromkeys(r["case"] for r in rows))
    heatmaps(path, names, [[r for r in rows if r["case"] == name] for name in names], axes=axes, marks=marks)


def timed(s: Scenario, count: int) -> Row:
    """Time `count` different configurations of one model, adaptive ones included."""
    rng = np.random.default_rng(0)
    devices = s.rollout_split.devices * rng.integers(2, 64, count)
    rollout_devices = np.maximum(devices // (2 * s.rollout_split.devices), 1) * s.rollout_split.devices
    lag = rng.integers(0, 5, count)
    k = rng.choice([-1, 0, 1, 2, 3, 5, 7], count)
    acceptance = 1 + rng.random(count) * np.where(k < 0, 7, k)
    asked = points(devices, k, acceptance, rollout_devices=np.where(lag, rollout_devices, devices), lag=lag)
    start = time.perf_counter()
    predict(s, asked)
    return {"configurations": count, "layers": s.model.layers, "seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(draws=(60, 2, "draws behind every interval that Table 1 allows"))
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder of rows, figures and page")
    a = parser.parse_args()
    hosts = public.calibrate()
    kept = paper.worlds(a.draws, {name: hosts.factors[name] for name in hosts.values}).kept
    scale, draft = grids(kept)
    write_rows(str(a.output / "scale.csv"), scale)
    write_rows(str(a.output / "draft.csv"), draft)
    show_table(a.output, HERE, lag_table(scale), "lag")
    plot(str(a.output / "scale.png"), scale, ("devices", "lag"), SCALE_MARKS)
    plot(str(a.output / "draft.png"), draft, ("kept", "k"), DRAFT_MARKS)
    speed = [{"case": case.name} | timed(case.scenario(paper.calibrate()), 10_000) for case in CASES]
    write_rows(str(a.output / "speed.csv"), speed)
    for r in speed:
        print(f"{r['case']}: {r['configurations']} configurations in {r['seconds']} s")
    print(f"{len(scale)} rows of scale.csv, {len(draft)} of draft.csv")


if __name__ == "__main__":
    sys.exit(commands.run(main))
