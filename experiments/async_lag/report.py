"""Table of the runs of sweep.py: accuracy, seconds of a step, exposed generation, beside the synchronous runs.

    python -m experiments.async_lag.report --workdir runs/sweeps/rlzero_tiny_async_lag

Writes results.csv (one row a step and run) beside this file.
"""

import os
import pathlib
from typing import Any

import numpy as np

from experiments.async_lag.sweep import PIPELINES, get_sweep
from experiments.launch import make_name
from experiments.sweep_report import run_report
from specrl_jax.io.metrics import read_metrics

FIELDS = ["pipeline", "seed", "step", "time/total", "time/generate", "time/exposed_generation", "time/idle_rollout"]
FIELDS += ["time/prepare", "time/logprob", "time/train", "rollout/lag", "policy/correction", "mismatch/kl"]
FIELDS += ["reward/mean", "eval/accuracy", "eval/accuracy_low", "eval/accuracy_high"]


def collect(workdir: str) -> list[dict[str, Any]]:
    rows = []
    for run in get_sweep():
        (name,) = [name for name, overrides in PIPELINES.items() if overrides.items() <= run.items()]
        found = read_metrics(os.path.join(workdir, make_name(run)))
        rows += [{"pipeline": name, "seed": run["seed"]} | row for row in found]
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    for name in PIPELINES:
        of_name = [row for row in rows if row["pipeline"] == name]
        accuracy = [
            [r["eval/accuracy"] for r in of_name if r["seed"] == s and "eval/accuracy" in r][-1] for s in range(3)
        ]
        steps = [row for row in of_name if "time/total" in row and row["step"] > 5]
        medians = {key: np.median([row[key] for row in steps]) for key in FIELDS if key.startswith("time/")}
        seconds = {key.removeprefix("time/"): f"{value:.2f}" for key, value in medians.items()}
        print(
            f"{name}: accuracy {', '.join(f'{a:.3f}' for a in accuracy)}, spread {np.ptp(accuracy):.3f}; s: {seconds}"
        )


def main() -> None:
    run_report(__doc__, pathlib.Path(__file__).parent, get_sweep(), FIELDS, collect, [print_table])


if __name__ == "__main__":
    main()
