"""Validation accuracy over RL steps with and without speculation (the paper's figures show one run each).

python -m experiments.launch --config configs/rlzero_tiny.py --sweep experiments/accuracy_parity/sweep.py
python -m experiments.accuracy_parity.plot --collect runs/sweeps/rlzero_tiny_accuracy_parity
"""

import pathlib
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from experiments.accuracy_parity.sweep import RUNS, get_sweep
from experiments.claims import GREYS, STYLES, Row, error, line, main, markdown, save
from experiments.engine.bench import distinct, matching
from experiments.verdicts import EQUAL, Claim, Interval, interval, judge_difference, percent, welch

ACCURACY, REWARD = "eval/accuracy", "reward/mean"
KEYS = [ACCURACY, "eval/accuracy_greedy", REWARD, "rollout/response_length_mean", "rollout_vs_learner/logprob_abs_max"]
# Whose rollouts have other noise than those of plain runs, and so must agree within an interval.
UNEQUAL = ("rejection", "block")
WANTED = 0.02  # half of an interval of differences of accuracy
# How a run is scored, quoted beside its table.
SCORE = (
    "The score of a run is the mean of all its measurements after the first update: the training reward of every step "
    "and every sampled evaluation, each counting once. The evaluation at step 0 is left out, since there every run "
    "is the base."
)


def curve(rows: list[Row], run: Row, key: str = ACCURACY) -> tuple[list[int], np.ndarray]:
    """Return (steps, [seeds, steps] values) of the runs with these overrides, at the steps that measured the metric."""
    found = [row for row in matching(rows, **run) if isinstance(row[key], int | float)]
    steps = sorted({row["step"] for row in found})
    return steps, np.array([[r[key] for r in matching(found, seed=s)] for (s,) in distinct(found, "seed")])


def trained(rows: list[Row], run: Row, keys: tuple[str, ...] = (REWARD, ACCURACY)) -> np.ndarray:
    """Return [seeds]: the mean of all values of these metrics after step 0; of both metrics, it is a run's SCORE."""
    later = [row for row in rows if row["step"] > 0]
    return np.concatenate([curve(later, run, key)[1] for key in keys], axis=1).mean(axis=1)


def gap(
    rows: list[Row], run: Row, other: Row, keys: tuple[str, ...] = (REWARD, ACCURACY)
) -> tuple[Interval, float, str]:
    """Return `trained` of `run` minus that of `other` by Welch, the mean of the latter, and what it is over."""
    mine, theirs = trained(rows, run, keys), trained(rows, other, keys)
    return welch(mine, theirs), float(theirs.mean()), f"Welch, {len(mine)} and {len(theirs)} seeds"


def identical(rows: list[Row]) -> bool:
    """Return whether coupled runs have equal metrics at every step with and without speculation."""
    pairs = [[curve(rows, RUNS[name], key)[1] for name in ("plain, coupled", "coupled")] for key in KEYS[:4]]
    return all(np.array_equal(a, b) for a, b in pairs)


def half_width(deviation: float, seeds: int) -> float:
    """Return half of the 95 % interval between two sides of `seeds` runs whose values have this deviation."""
    return float(stats.t.ppf(0.975, 2 * seeds - 2) * deviation * np.sqrt(2 / seeds))


def enough(rows: list[Row]) -> str:
    """Say how many seeds, and how many scored answers of each, give an interval of at most +- WANTED."""
    sides = [trained(rows, RUNS[name]) for name in ("plain", *UNEQUAL)]
    if min(map(len, sides)) < 2:
        return "One seed does not show how far runs differ."
    deviation = float(np.sqrt(np.mean([side.var(ddof=1) for side in sides])))
    right = float(np.mean([trained(rows, RUNS[name], (ACCURACY,)).mean() for name in ("plain", *UNEQUAL)]))
    seeds = next(n for n in range(2, 1000) if half_width(deviation, n) <= WANTED)
    # Half widths of the mean of n answers, each right with probability p: deviation sqrt(p (1 - p) / n).
    answers = [int(np.ceil((half_width(1, n) / WANTED) ** 2 * right * (1 - right))) for n in (3, 5, 10)]
    shown = ", ".join(f"{n:,} for {m}" for n, m in zip(answers, (3, 5, 10)))
    return (
        f"For +- {WANTED}: scores of equal runs have a deviation of {deviation:.3f} over seeds, so {seeds} seeds a "
        f"side are enough. By the sampling of answers alone (accuracy {right:.2f}) a run needs this many of "
        f"them: {shown} seeds."
    )


def table(rows: list[Row]) -> str:
    lines, verdict = [], "identical" if identical(rows) else "NOT identical"
    plain = RUNS["plain"]
    for name, run in RUNS.items():
        _, values = curve(rows, run)
        gaps = ["", "", ""]
        if name == "coupled":  # compared pairwise with plain runs of equal noise, not by an interval
            gaps = [verdict] * 3
        elif name in UNEQUAL:
            parts = [welch(trained(rows, run, (key,)), trained(rows, plain, (key,))) for key in (REWARD, ACCURACY)]
            gaps = [x.text("+.3f") for x in (*parts, gap(rows, run, plain)[0])]
        lines.append([name, f"{interval(values[:, -1])}", interval(trained(rows, run)).text(".3f"), *gaps])
    header = ["", "accuracy at the end", "score", "training reward, minus plain (95 %, Welch)"]
    header += ["evaluations, minus plain", "score, minus plain"]
    return f"{SCORE}\n\n{markdown(header, lines)}\n\n{enough(rows)}"


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for name in UNEQUAL:
        text = f"accuracy over the run (training and validation) with speculation minus plain, {name}"
        made.append(judge_difference(text, "curves overlap (no seeds)", *gap(rows, RUNS[name], RUNS["plain"])))
    same = "identical" if identical(rows) else "different"
    seeds = len(curve(rows, RUNS["coupled"])[1])
    claim = Claim("a run under coupled, with speculation and without", "", same, "not in the paper")
    return [*made, claim._replace(sample=f"bit by bit, {seeds} seeds")]


def draw(rows: list[Row], path: pathlib.Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained", width_ratios=(3, 2))
    for i, name in enumerate(RUNS):
        steps, values = curve(rows, RUNS[name])
        at = np.array(steps) + 0.5 * (i - 2)
        line(left, at, [interval(column) for column in values.T], i, name)
    left.set(xlabel="RL step (lines moved apart sideways)", ylabel="validation accuracy, sampled", xlim=(-2, None))
    left.legend(fontsize=8, loc="lower right")
    _draw_gaps(right, rows)
    save(figure, path)


def _draw_gaps(axis: plt.Axes, rows: list[Row]) -> None:
    """Draw differences to plain runs: training reward, each evaluation, and the score."""
    plain, names = RUNS["plain"], list[str]()
    reference = float(trained(rows, plain).mean())
    for i, name in enumerate(UNEQUAL):
        steps, mine = curve(rows, RUNS[name])
        theirs = curve(rows, plain)[1]
        found = {f"accuracy at step {step}": welch(mine[:, j], theirs[:, j]) for j, step in enumerate(steps)}
        found["training reward"] = welch(*(trained(rows, run, (REWARD,)) for run in (RUNS[name], plain)))
        found["score"] = gap(rows, RUNS[name], plain)[0]
        places = len(names) + np.arange(len(found))
        style: dict[str, Any] = {"fmt": STYLES[i + 1][0], "color": "k", "capsize": 3, "ms": 5}
        axis.errorbar([x.mean for x in found.values()], places, xerr=error(list(found.values())), **style)
        names += [f"{name}: {what}" for what in found]
        for at, x in zip(places, found.values()):
            axis.annotate(x.text("+.3f"), (x.mean, at), (0, 5), textcoords="offset points", ha="center", fontsize=7)
    axis.axvspan(
        -EQUAL * reference, EQUAL * reference, color=GREYS[3], zorder=0, label=f"{percent(EQUAL)} of plain's score"
    )
    axis.axvline(0, color="k", lw=0.8)
    axis.set(yticks=range(len(names)), yticklabels=names, xlabel="minus plain runs (95 %, Welch)")
    axis.set_ylim(len(names) - 0.3, -0.8)
    axis.legend(fontsize=8, loc="lower right")


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
