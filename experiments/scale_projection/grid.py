"""Project speedups over grids of configurations, and time ten thousand configurations.

    python -m experiments.scale_projection.grid

Writes scale.csv and draft.csv, a heat map of each, and speed.csv beside this file: speedups with intervals over GPUs
and lag, and over k and acceptance, for Qwen3-8B and Qwen3-235B-A22B on GB200, with this project's loop and with vLLM's
host constants as fitted to the paper's 8B runs. Workloads are those of `paper.py` and `large.py`, except for the number
of sequences: as many as find pages for their live tokens in the memory that the learner leaves. Takes a minute on one
core.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.scale_projection import effects, large, paper
from specrl_jax.simulator.grid import DRAFTED, LAGS, RATES, Row, draft_rows, scale_rows, write_rows
from specrl_jax.simulator.hardware import HARDWARE
from specrl_jax.simulator.heatmaps import heatmaps
from specrl_jax.simulator.scenario import Scenario, points, predict

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


def grids(c: paper.Calibrated, graphs: effects.Effect) -> tuple[list[Row], list[Row]]:
    """Compute the rows of the scale grid and of the draft grid; column `case` names the model and the loop."""
    scale, draft = [], []
    for case in CASES:
        for loop, calibrated in (("our loop", large.fused(c)), ("vLLM", large.vllm(c, graphs))):
            s, name = case.scenario(calibrated), {"case": f"{case.name}, {loop}"}
            known = large.constant_errors(calibrated)
            scale += [name | r for r in scale_rows(s, case.all_devices, LAGS, case.k, case.acceptance, known)]
            draft += [name | r for r in draft_rows(s, case.devices, 0, DRAFTED, RATES, known)]
    return scale, draft


def plot(path: str, rows: list[Row], axes: tuple[str, str]) -> None:
    names = list(dict.fromkeys(r["case"] for r in rows))
    heatmaps(path, names, [[r for r in rows if r["case"] == name] for name in names], axes)


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
    c = paper.calibrate(HARDWARE["gb200"])
    scale, draft = grids(c, effects.captured_graphs(c))
    write_rows(str(HERE / "scale.csv"), scale)
    write_rows(str(HERE / "draft.csv"), draft)
    plot(str(HERE / "scale.png"), scale, ("devices", "lag"))
    plot(str(HERE / "draft.png"), draft, ("kept", "k"))
    speed = [{"case": case.name} | timed(case.scenario(c), 10_000) for case in CASES]
    write_rows(str(HERE / "speed.csv"), speed)
    for r in speed:
        print(f"{r['case']}: {r['configurations']} configurations in {r['seconds']} s")
    print(f"{len(scale)} rows of scale.csv, {len(draft)} of draft.csv")


if __name__ == "__main__":
    main()
