"""Acceptance and cost by draft length (Table 4 of arXiv 2604.26779, which has k = 3, 5 and 7).

Commands: experiments/claims.py.
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import (
    STYLES,
    Claim,
    Interval,
    Row,
    benchmark_keys,
    by_seed,
    interval,
    judge_ratio,
    line,
    main,
    markdown,
    save,
    workload_name,
)
from experiments.draft_length.sweep import LENGTHS, get_sweep
from experiments.engine.bench import distinct

CONTROLLER = LENGTHS[-1] + 1.3  # its x position in the figure
SIDES = [*[f"k_{k}" for k in LENGTHS], "adaptive"]
KEYS = benchmark_keys(SIDES)
# (acceptance length, generation speedup) by k
PAPER = {
    "Zero": {3: (3.32, 1.77), 5: (4.35, 1.44), 7: (5.06, 1.21)},
    "Think": {3: (2.77, 1.53), 5: (3.23, 0.84), 7: (3.48, 0.71)},
}


def metric(rows: list[Row], workload: str, side: str, what: str) -> Interval:
    return interval(by_seed(rows, f"benchmark/{side}_{what}", workload=workload))


def adaptive_over_best(rows: list[Row], workload: str) -> Interval:
    """Return the controller's speed relative to the fixed k of the best mean, paired by seed."""
    speed = {side: by_seed(rows, f"benchmark/{side}_over_plain", workload=workload) for side in SIDES}
    best = max((side for side in SIDES if side != "adaptive"), key=lambda side: speed[side].mean())
    return interval(speed["adaptive"] / speed[best])


def table(rows: list[Row]) -> str:
    workloads = [w for (w,) in distinct(rows, "workload")]
    header = ["k"]
    for w in workloads:
        header += [
            f"{w}: tokens per verification (paper)",
            "over plain (paper)",
            "cost of a verification, in plain steps (paper)",
        ]
    lines = []
    for side in SIDES:
        cells = [side.removeprefix("k_")]
        for w in workloads:
            length, speed = (
                by_seed(rows, f"benchmark/{side}_{x}", workload=w) for x in ("acceptance_length", "over_plain")
            )
            paper = PAPER[workload_name(w)].get(int(cells[0]) if cells[0].isdigit() else 0)
            theirs = (*paper, round(paper[0] / paper[1], 2)) if paper else ("", "", "")
            ours = (interval(length), interval(speed), interval(length / speed))
            cells += [f"{a}" + (f" ({b})" if b else "") for a, b in zip(ours, theirs)]
        lines.append(cells)
    last = [f"{w} {adaptive_over_best(rows, w)}" for w in workloads]
    return markdown(header, lines) + f"\n\nThe controller over the best fixed k: {', '.join(last)}."


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for (w,) in distinct(rows, "workload"):
        for k in (5, 7):
            paper = PAPER[workload_name(w)]
            ours = interval(
                by_seed(rows, f"benchmark/k_{k}_over_plain", workload=w)
                / by_seed(rows, "benchmark/k_3_over_plain", workload=w)
            )
            text = f"{workload_name(w)}: generation at k = {k} over that at k = 3"
            made.append(judge_ratio(text, round(paper[k][1] / paper[3][1], 2), "Table 4", ours))
        made.append(
            judge_ratio(
                f"{workload_name(w)}: the controller over the best fixed k", None, "", adaptive_over_best(rows, w)
            )
        )
    return made


def draw(rows: list[Row], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, (w,) in enumerate(distinct(rows, "workload")):
        name, grey = workload_name(w), ("0.0", "0.5")[i % 2]
        for axis, what, column in zip(axes, ("acceptance_length", "over_plain"), (0, 1)):
            points = [metric(rows, w, f"k_{k}", what) for k in LENGTHS]
            line(axis, np.array(LENGTHS) + 0.12 * i, points, STYLES[i], grey, f"{name}, here")
            paper = PAPER[name]
            values = [v[column] for v in paper.values()]
            axis.plot(list(paper), values, STYLES[i][:1] + ":", color=grey, mfc="none", label=f"{name}, paper")
        controller = metric(rows, w, "adaptive", "over_plain")
        line(axes[1], [CONTROLLER + 0.12 * i], [controller], STYLES[i], grey, "")
    axes[1].axhline(1, color="k", lw=0.8)
    axes[0].set(xlabel="draft length k, tokens", ylabel="tokens per verification")
    axes[1].set(xlabel="draft length k, tokens", ylabel="generation speed over plain decoding")
    axes[1].set_xticks([*LENGTHS, CONTROLLER], [*LENGTHS, "controller"])
    for axis in axes:
        axis.legend(fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
