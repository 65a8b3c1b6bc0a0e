"""Acceptance and cost by draft length (Table 4 of arXiv 2604.26779, which has k = 3, 5 and 7).

Commands: experiments/claims.py. What long drafts gain by the number of concurrent sequences is computed from the rows
of experiments.engine.controller --drafters eagle3 --output experiments/draft_length/by_sequences.csv.
"""

import pathlib
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import (
    Row,
    benchmark_keys,
    by_seed,
    line,
    main,
    markdown,
    numbers,
    save,
    workload_labels,
    workload_name,
)
from experiments.draft_length.sweep import LENGTHS, get_sweep
from experiments.engine.bench import by_round, distinct, matching, read_rows
from experiments.sweeps import config_of
from experiments.verdicts import Claim, Interval, cost_of, interval, judge_level, judge_ratio, ratio_interval

BY_SEQUENCES = pathlib.Path(__file__).parent / "by_sequences.csv"
DRAFTER, BASE, LONG = "eagle3", 3, (5, 7)  # Table 4 has these lengths relative to k = BASE
CONTROLLER = LENGTHS[-1] + 1.3  # its x position in the figure
SIDES = [*[f"k_{k}" for k in LENGTHS], "adaptive"]
KEYS = benchmark_keys(SIDES)
# (acceptance length, generation speedup) by k
PAPER = {
    "Zero": {3: (3.32, 1.77), 5: (4.35, 1.44), 7: (5.06, 1.21)},
    "Think": {3: (2.77, 1.53), 5: (3.23, 0.84), 7: (3.48, 0.71)},
}


def metric(rows: list[Row], workload: str, side: str, what: str) -> Interval:
    """Return the interval of a metric: log-t for speeds relative to plain decoding."""
    of = ratio_interval if what == "over_plain" else interval
    return of(by_seed(rows, f"benchmark/{side}_{what}", workload=workload))


def adaptive_over_best(rows: list[Row], workload: str) -> np.ndarray:
    """Return [seeds]: the controller's speed relative to the fixed k of the best mean."""
    speed = {side: by_seed(rows, f"benchmark/{side}_over_plain", workload=workload) for side in SIDES}
    best = max((side for side in SIDES if side != "adaptive"), key=lambda side: speed[side].mean())
    return speed["adaptive"] / speed[best]


def sequences(rows: list[Row], workload: str) -> int:
    """Return how many sequences a workload decodes at once: as the sweep or else the workload's config says."""
    overridden = {row.get("rollout.num_slots", "") for row in matching(rows, workload=workload)} - {""}
    return overridden.pop() if len(overridden) == 1 else config_of(workload).rollout.num_slots


def long_over_short(rows: list[Row], slots: int, k: int) -> np.ndarray:
    """Return [rounds]: generation at k over that at k = BASE with `slots` sequences at once, of by_sequences.csv."""
    found = [row for row in matching(rows, drafter=DRAFTER, slots=slots) if row["round"] > 0]
    return by_round(found, "tokens_per_second", who=k) / by_round(found, "tokens_per_second", who=BASE)


def cost_at(rows: list[Row], slots: int, k: int) -> np.ndarray:
    """Return [rounds]: an iteration at k over a plain one, with `slots` sequences at once, of by_sequences.csv."""
    found = [row for row in matching(rows, drafter=DRAFTER, slots=slots) if row["round"] > 0]
    plain, speed = (by_round(found, "tokens_per_second", who=who) for who in ("none", k))
    return by_round(found, "acceptance_length", who=k) * plain / speed


def all_slots(rows: list[Row]) -> list[int]:
    return sorted(slots for (slots,) in distinct(matching(rows, drafter=DRAFTER), "slots"))


def paper_ratio(name: str, k: int) -> float:
    """Return Table 4's generation at k over that at k = BASE."""
    return round(PAPER[name][k][1] / PAPER[name][BASE][1], 2)


def table(rows: list[Row]) -> str:
    workloads = list(workload_labels(rows))
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
            ours = (interval(length), ratio_interval(speed), ratio_interval(length / speed))
            cells += [f"{a}" + (f" ({b})" if b else "") for a, b in zip(ours, theirs)]
        lines.append(cells)
    last = ", ".join(f"{w} {ratio_interval(adaptive_over_best(rows, w))}" for w in workloads)
    return f"{markdown(header, lines)}\n\nThe controller over the best fixed k: {last}.\n\n{sequences_table()}"


def sequences_table() -> str:
    """Return what long drafts gain by the number of concurrent sequences."""
    measured = read_rows(str(BY_SEQUENCES))
    lines = [
        [slots, len(long_over_short(measured, slots, LONG[0]))]
        + [f"{ratio_interval(long_over_short(measured, slots, k))}" for k in LONG]
        for slots in all_slots(measured)
    ]
    return markdown(["sequences at once", "rounds", *[f"k = {k} over k = {BASE}" for k in LONG]], lines)


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for w, label in workload_labels(rows).items():
        paper, slots = PAPER[workload_name(w)], sequences(rows, w)
        at_once = f"{slots} sequence{'s' * (slots != 1)} at once"
        speed = {k: by_seed(rows, f"benchmark/k_{k}_over_plain", workload=w) for k in paper}
        for k in LONG:
            text = f"{label}: generation at k = {k} over that at k = {BASE}, {at_once}"
            cost = ratio_interval(by_seed(rows, f"benchmark/k_{k}_acceptance_length", workload=w) / speed[k])
            why = cost_of(cost.mean, paper[k][0] / paper[k][1])
            ours = speed[k] / speed[BASE]
            made.append(judge_ratio(text, paper_ratio(workload_name(w), k), "Table 4", ours, why=why))
        for k, (length, _) in paper.items():
            ours = by_seed(rows, f"benchmark/k_{k}_acceptance_length", workload=w)
            made.append(judge_level(f"{label}: EAGLE-3, k = {k}, tokens per verification", length, "Table 4", ours))
        text = f"{label}: the controller over the best fixed k, {at_once}"
        made.append(judge_ratio(text, None, "", adaptive_over_best(rows, w)))
    return [*made, *claims_at_many_sequences(read_rows(str(BY_SEQUENCES)))]


def claims_at_many_sequences(measured: list[Row]) -> list[Claim]:
    """Judge Table 4 by the rows of by_sequences.csv with the most sequences at once: one process and one seed."""
    most = all_slots(measured)[-1]
    made = []
    for k in LONG:
        text = f"Zero, the tiny base: generation at k = {k} over that at k = {BASE}, {most} sequences at once"
        values, paper = long_over_short(measured, most, k), PAPER["Zero"][k]
        claim = judge_ratio(text, paper_ratio("Zero", k), "Table 4", values, "round")
        why = cost_of(ratio_interval(cost_at(measured, most, k)).mean, paper[0] / paper[1])
        made.append(claim._replace(why=why, sample=f"{claim.sample} of one process and seed"))
    return made


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Draw one row of two panels a workload, and beside them what long drafts gain by concurrent sequences."""
    labels = workload_labels(rows)
    figure = plt.figure(figsize=(17, 4.2 * len(labels)), layout="constrained")
    grid = figure.add_gridspec(len(labels), 3)
    for i, (w, label) in enumerate(labels.items()):
        paper, axes = PAPER[workload_name(w)], [figure.add_subplot(grid[i, j]) for j in (0, 1)]
        for axis, what, column in zip(axes, ("acceptance_length", "over_plain"), (0, 1)):
            points = [metric(rows, w, f"k_{k}", what) for k in LENGTHS]
            line(axis, LENGTHS, points, 0, "here")
            numbers(axis, LENGTHS, points)
            theirs = [v[column] for v in paper.values()]
            axis.plot(list(paper), theirs, "D:", color="k", mfc="none", label="the paper, Qwen3-8B")
            for k, x in zip(paper, theirs):
                axis.annotate(f"{x}", (k, x), (0, -13), textcoords="offset points", ha="center", fontsize=7)
            axis.set(xlabel="draft length k, tokens", title=f"{label}: {w}")
        controller = [metric(rows, w, "adaptive", "over_plain")]
        line(axes[1], [CONTROLLER], controller, 0, "")
        numbers(axes[1], [CONTROLLER], controller)
        axes[1].axhline(1, color="k", lw=0.8)
        axes[0].set_ylabel("tokens per verification")
        axes[1].set_ylabel("generation over plain decoding")
        axes[1].set_xticks([*LENGTHS, CONTROLLER], [*map(str, LENGTHS), "controller"])
    _draw_sequences(figure.add_subplot(grid[:, 2]), read_rows(str(BY_SEQUENCES)))
    for axis in figure.axes:
        axis.margins(y=0.12)
        axis.legend(fontsize=8)
    save(figure, path)


def _draw_sequences(axis: plt.Axes, measured: list[Row]) -> None:
    slots = all_slots(measured)
    for i, k in enumerate(LONG):
        found = [ratio_interval(long_over_short(measured, n, k)) for n in slots]
        at = np.array(slots) * (1 + 0.15 * i)
        line(axis, at, found, i, f"k = {k} over k = {BASE}")
        for x, f in zip(at, found):
            style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "ha": "right" if i == 0 else "left"}
            axis.annotate(f"{f.mean:.2f}", (x, f.mean), (6 * i - 3, 3), **style)
    axis.axhline(1, color="k", lw=0.8)
    axis.set(xscale="log", xlabel="sequences at once", ylabel=f"generation over that at k = {BASE}")
    axis.set_title("by concurrency: the tiny base (by_sequences.csv)")
    axis.set_xticks(slots, [f"{n}" for n in slots])
    axis.minorticks_off()


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
