"""Table and figure of RL on the rooms: what frozen and online heads keep as the policy moves.

    python -m experiments.launch --config configs/rlzero_tiny.py:rooms --sweep experiments/rooms/sweep.py --jobs 2
    python -m experiments.rooms.drift --workdir runs/sweeps/rlzero_tiny_rooms_rooms

Writes results.csv (one row per step and run) and drift.png beside this file; without --workdir the figure alone.
"""

import os
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import COLOURS, STYLES, save
from experiments.rooms.bases import HEADS, folder
from experiments.rooms.sweep import get_sweep
from experiments.sweep_report import run_report
from experiments.sweeps import make_name
from specrl_jax.io.metrics import read_metrics

HERE = pathlib.Path(__file__).parent
LENGTH = "spec/acceptance_length"
SHOWN = {LENGTH: "tokens a verification, k = 3", "reward/mean": "reward", "rollout/response_length_mean": "tokens"}
FIELDS = ["head", "online", "seed", "step", *SHOWN]
WINDOW = 5  # steps averaged


def collect(workdir: str) -> list[dict[str, Any]]:
    """Return the metrics rows of every run with its head and base."""
    rows = []
    for run in get_sweep():
        (head,) = [name for name, kind in HEADS.items() if run["draft.path"] == folder("rooms", kind, run["seed"])]
        which = {"head": head, "online": int(run["draft.online"]), "seed": run["seed"]}
        rows += [which | row for row in read_metrics(os.path.join(workdir, make_name(run)))]
    return rows


def series(rows: list[dict[str, Any]], name: str, head: str, online: int) -> np.ndarray:
    """Return [seeds, steps] of a metric."""
    found = [row for row in rows if (row["head"], row["online"]) == (head, online) and name in row]
    seeds = sorted({row["seed"] for row in found})
    return np.array([[row[name] for row in found if row["seed"] == seed] for seed in seeds])


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the means of the first and of the last steps, by seed."""
    for name, label in SHOWN.items():
        print(label)
        for head in HEADS:
            for online in (0, 1):
                found = series(rows, name, head, online)
                ends = [(values[:WINDOW].mean(), values[-WINDOW:].mean()) for values in found]
                shown = "   ".join(f"{first:.3f} -> {last:.3f}" for first, last in ends)
                print(f"  {head} head, {'online' if online else 'frozen'}: {shown}")


def plot(rows: list[dict[str, Any]]) -> None:
    """Draw one panel a metric and one line a head: the mean over seeds, the band from the lowest to the highest."""
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(15, 4), layout="constrained")
    for axis, (name, label) in zip(axes, SHOWN.items(), strict=True):
        for i, (head, online) in enumerate((head, online) for head in HEADS for online in (0, 1)):
            found = series(rows, name, head, online)
            steps = np.arange(1, found.shape[1] + 1)
            style = {
                "color": COLOURS[i],
                "ms": 4,
                "markevery": 4,
                "label": f"{head}, {'online' if online else 'frozen'}",
            }
            axis.plot(
                steps, found.mean(axis=0), STYLES[i], label=f"{head}, {'online' if online else 'frozen'}", **style
            )
            axis.fill_between(steps, found.min(axis=0), found.max(axis=0), color=COLOURS[i], alpha=0.2, lw=0)
        axis.set(xlabel="RL step", ylabel=label)
    axes[0].legend(fontsize=9)
    save(figure, HERE / "drift.png")


if __name__ == "__main__":
    run_report(__doc__, HERE, get_sweep(), FIELDS, collect, (plot, print_table))
