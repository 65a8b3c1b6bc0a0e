"""Table and figure of RL on the rooms: what frozen and online heads keep as the policy moves.

    python -m experiments.launch --config configs/rlzero_tiny.py:rooms --sweep experiments/rooms/sweep.py --jobs 2
    python -m experiments.rooms.drift --workdir runs/sweeps/rlzero_tiny_rooms_rooms

Writes results.csv (one row per step and run), drift.png and the table of README.md; without --workdir the last two.
"""

import itertools
import pathlib
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import COLOURS, STYLES, markdown, put_table, save
from experiments.online_adaptation.report import PAPER
from experiments.rooms.bases import HEADS, folder
from experiments.rooms.sweep import get_sweep
from experiments.sweep_report import run_report
from experiments.verdicts import Claim, interval, judge_share, ratio_interval

HERE = pathlib.Path(__file__).parent
LENGTH = "spec/acceptance_length"
SHOWN = {LENGTH: "tokens per verification, k = 3", "reward/mean": "reward", "rollout/response_length_mean": "tokens"}
FIELDS = ["draft.path", "draft.online", "seed", "step", *SHOWN]
WINDOW = 5  # steps averaged
# Heads that a generic one may catch up with.
BEST = ("in-domain, online", "in-domain, frozen")
RUNS = {f"{head}, {name}": (head, online) for head in HEADS for name, online in (("frozen", False), ("online", True))}


def series(rows: list[dict[str, Any]], metric: str, head: str, online: bool) -> np.ndarray:
    """Return [bases, steps] of a metric."""
    found = [row for row in rows if str(row["draft.online"]) == str(online) and metric in row]
    seeds = sorted({row["seed"] for row in found})
    paths = {seed: folder("rooms", HEADS[head], seed) for seed in seeds}
    return np.array(
        [[row[metric] for row in found if (row["seed"], row["draft.path"]) == (s, paths[s])] for s in seeds]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table: the first and the last WINDOW steps of each head, and the ratio of the two."""
    lines = []
    for name, (head, online) in RUNS.items():
        found = {metric: series(rows, metric, head, online) for metric in SHOWN}
        first, last = (
            {m: x[:, window].mean(axis=1) for m, x in found.items()} for window in (slice(WINDOW), slice(-WINDOW, None))
        )
        ends = [f"{interval(first[m])} -> {interval(last[m])}" for m in SHOWN]
        lines.append([name, ends[0], ratio_interval(last[LENGTH] / first[LENGTH]), *ends[1:]])
    return markdown(["head", SHOWN[LENGTH], "last over first", *list(SHOWN.values())[1:]], lines)


def gap_closed(rows: list[dict[str, Any]], best: str) -> np.ndarray:
    """Return [bases], the share of a frozen generic head's gap to the head `best` that learning closes in the end."""
    last = {name: series(rows, LENGTH, *run)[:, -WINDOW:].mean(axis=1) for name, run in RUNS.items()}
    low = last["generic, frozen"]
    return (last["generic, online"] - low) / (last[best] - low)


def gap_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for best in BEST:
        closed = gap_closed(rows, best)
        lines.append([best, ", ".join(f"{share:.2f}" for share in closed), interval(closed)])
    return markdown(["gap to the head", "closed, by base", "mean"], lines)


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judge the gap that learning closes, over bases; in the paper the heads' tokens are those of Table 5, RL-Zero."""
    generic, online, best = (PAPER[name][0] for name in ("generic, offline", "generic, online", "in-domain, online"))
    text = "Zero, rooms: share of a frozen generic head's gap to an online in-domain one that learning closes, 25 steps"
    return [judge_share(text, round((online - generic) / (best - generic), 2), "Table 5", gap_closed(rows, BEST[0]))]


def plot(rows: list[dict[str, Any]]) -> None:
    """Draw one panel a metric and one line a head: the mean over bases, the band from the lowest to the highest."""
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(15, 4), layout="constrained")
    for (axis, (metric, label)), (i, name) in itertools.product(zip(axes, SHOWN.items(), strict=True), enumerate(RUNS)):
        found = series(rows, metric, *RUNS[name])
        steps = np.arange(1, found.shape[1] + 1)
        axis.plot(steps, found.mean(axis=0), STYLES[i], color=COLOURS[i], ms=4, markevery=4, label=name)
        axis.fill_between(steps, found.min(axis=0), found.max(axis=0), color=COLOURS[i], alpha=0.2, lw=0)
        axis.set(xlabel="RL step", ylabel=label)
    axes[0].legend(fontsize=9)
    save(figure, HERE / "drift.png")


def write_table(rows: list[dict[str, Any]]) -> None:
    put_table(HERE / "README.md", table(rows), "drift")
    put_table(HERE / "README.md", gap_table(rows), "gap")


if __name__ == "__main__":
    run_report(__doc__, HERE, get_sweep(), FIELDS, (plot, write_table))
