"""Validation accuracy over RL steps with and without speculation (the paper's figures show one run each).

python -m experiments.launch --config configs/rlzero_tiny.py --sweep experiments/accuracy_parity/sweep.py
python -m experiments.accuracy_parity.plot --collect runs/sweeps/rlzero_tiny_accuracy_parity
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.accuracy_parity.sweep import RUNS, get_sweep
from experiments.claims import STYLES, Claim, Row, interval, judge_difference, line, main, markdown, save, welch
from experiments.engine.bench import distinct, matching

ACCURACY = "eval/accuracy"
KEYS = [
    ACCURACY,
    "eval/accuracy_greedy",
    "reward/mean",
    "rollout/response_length_mean",
    "rollout_vs_learner/logprob_abs_max",
]


def curve(rows: list[Row], run: Row, key: str = ACCURACY) -> tuple[list[int], np.ndarray]:
    """Return (steps, [seeds, steps] values) of the runs with these overrides, at the steps that measured the metric."""
    found = [row for row in matching(rows, **run) if isinstance(row[key], int | float)]
    steps = sorted({row["step"] for row in found})
    return steps, np.array([[r[key] for r in matching(found, seed=s)] for (s,) in distinct(found, "seed")])


def difference(rows: list[Row], run: Row, other: Row) -> tuple[float, float]:
    """Return (mean, half of the 95 % interval) of mean accuracy over the run, `run` - `other`, by Welch over seeds."""
    return welch(*(curve(rows, x)[1].mean(axis=1) for x in (run, other)))


def identical(rows: list[Row]) -> bool:
    """Return whether coupled runs have equal metrics at every step with and without speculation."""
    pairs = [[curve(rows, RUNS[name], key)[1] for name in ("plain, coupled", "coupled")] for key in KEYS[:4]]
    return all(np.array_equal(a, b) for a, b in pairs)


def table(rows: list[Row]) -> str:
    lines, verdict = [], "identical" if identical(rows) else "NOT identical"
    for name in RUNS:
        _, values = curve(rows, RUNS[name])
        gap = "" if "plain" in name else "{:+.3f} +- {:.3f}".format(*difference(rows, RUNS[name], RUNS["plain"]))
        if name == "coupled":  # compared pairwise with plain runs of equal noise, not by an interval
            gap = verdict
        lines.append([name, f"{interval(values[:, -1])}", f"{interval(values.mean(axis=1))}", gap])
    header = ["", "accuracy at the end", "mean over the run", "minus plain (95 %, Welch)"]
    return (
        markdown(header, lines) + f"\n\nCoupled, with speculation and without: {verdict} at every step of every seed."
    )


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for name in ("rejection", "block"):
        text = f"validation accuracy over the run with speculation minus plain, {name}"
        made.append(judge_difference(text, "curves overlap (no seeds)", *difference(rows, RUNS[name], RUNS["plain"])))
    same = "identical" if identical(rows) else "different"
    return [*made, Claim("a run under coupled, with speculation and without", "", same, "not in the paper")]


def draw(rows: list[Row], path: pathlib.Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, name in enumerate(RUNS):
        steps, values = curve(rows, RUNS[name])
        at = np.array(steps) + 0.4 * (i - 2)
        line(axis, at, [interval(column) for column in values.T], STYLES[i], str(0.15 * i), name)
    axis.set(xlabel="RL step", ylabel="validation accuracy, sampled, 256 problems", ylim=(0, 1.05))
    axis.legend(fontsize=8, loc="lower right")
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
