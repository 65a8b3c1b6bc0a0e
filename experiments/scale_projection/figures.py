"""Figures of the validation: predicted over measured."""

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

Row = dict[str, Any]
PANELS = {
    "iteration c": "c of an iteration, 107 M",
    "rollout c": "c over whole rollouts, 3.5 M",
    "rollout c, 20 M": "c over whole rollouts, 20.6 M",
}
PHASES = ("data", "prepare", "generate", "logprob", "train", "total")
VIEWS = {"free verification": "o", "this project's loop": "s", "vLLM by public sweeps": "v"}


def plot_ours(path: str, rows: Sequence[Row]) -> None:
    """Plot predicted against measured c and predicted / measured phases; fitted cells hollow, held-out cells filled."""
    figure, grid = plt.subplots(1, 4, figsize=(16, 4.2), layout="constrained")
    for axis, (name, title) in zip(grid, PANELS.items()):
        _against(axis, [r for r in rows if r["set"] == name], title)
    last = grid[-1]
    for x, phase in enumerate(PHASES):
        for use, face in (("fitted", "none"), ("held out", "black")):
            kept = [r for r in rows if (r["set"], r["use"]) == (f"step {phase}", use)]
            y = [r["predicted"] / r["measured"] for r in kept]
            last.scatter([x] * len(y), y, s=26, facecolors=face, edgecolors="black", label=None if x else use)
    last.axhspan(0.9, 1.1, color="0.85", zorder=0, label="within 10 %")
    last.axhline(1.0, color="black", linewidth=0.8)
    last.set(title="phases of an RL step, 3.5 M", ylabel="predicted / measured seconds", ylim=(0.75, 1.25))
    last.set_xticks(range(len(PHASES)), PHASES, rotation=30)
    last.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _against(axis: plt.Axes, rows: Sequence[Row], title: str) -> None:
    for use, face in (("fitted", "none"), ("held out", "black")):
        xy = np.array([(r["measured"], r["predicted"]) for r in rows if r["use"] == use])
        if len(xy):
            axis.scatter(xy[:, 0], xy[:, 1], s=22, facecolors=face, edgecolors="black", label=use)
    ends = np.array([0.9, 7.0])
    axis.plot(ends, ends, "k-", linewidth=0.8)
    axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.85", zorder=0, label="within 10 %")
    axis.set(title=title, xscale="log", yscale="log", xlim=ends, ylim=ends)
    axis.set(xlabel="measured c, plain iterations", ylabel="predicted c, plain iterations")
    ticks = [1, 1.5, 2, 3, 4, 6]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left")


def plot_paper(path: str, predicted: Sequence[Row], large: Sequence[Row]) -> None:
    """Plot predicted / measured with the nulls (left) and three views of the 235B rows (right); numbers are printed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(17, 8), layout="constrained", width_ratios=(5, 4))
    _measured_rows(left, predicted)
    _large_rows(right, [r for r in large if r["lengths"] == "zero" and r["use"] == "predicted"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _measured_rows(axis: plt.Axes, rows: Sequence[Row]) -> None:
    for i, r in enumerate(rows):
        axis.plot(np.array([r["low"], r["high"]]) / r["measured"], [i, i], "-", color="0.6", linewidth=5, zorder=1)
        axis.plot(1 + r["error"], i, "o", color="black", zorder=3)
        axis.plot(1 + r["null_error"], i, "x", color="black", markersize=8, zorder=2)
        shown = f"{r['predicted']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        axis.text(6.2, i, shown, fontsize=9, va="center", ha="left")
    axis.plot([], [], "o", color="black", label="predicted, median of the draws")
    axis.plot([], [], "-", color="0.6", linewidth=5, label="90 % of the draws")
    axis.plot([], [], "x", color="black", markersize=8, label="null: ideal speculation, Amdahl's law")
    axis.axvspan(0.9, 1.1, color="0.9", zorder=0, label="within 10 %")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [f"{r['table']}: {r['row']}, {r['measured']:.2f}" for r in rows], fontsize=9)
    axis.invert_yaxis()
    axis.set(
        xscale="log",
        xlim=(0.6, 14),
        xlabel="predicted / measured",
        title="measured by the paper, 8B; value beside each name",
    )
    axis.set_xticks([0.7, 1, 1.5, 2, 3, 5], ["0.7", "1", "1.5", "2", "3", "5"])
    axis.minorticks_off()
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, -0.17), ncols=2)


def _large_rows(axis: plt.Axes, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys((r["table"], r["row"]) for r in rows))
    for offset, (view, marker) in zip((-0.22, 0.0, 0.22), VIEWS.items()):
        for i, r in enumerate(r for r in rows if r["view"] == view):
            y = i + offset
            axis.plot([r["low"], r["high"]], [y, y], "-", color="0.6", linewidth=3, zorder=1)
            label = view if i == 0 else None
            axis.plot(
                r["predicted"], y, marker, color="black", markerfacecolor="white", markersize=7, label=label, zorder=3
            )
            axis.text(max(r["high"], r["predicted"]) + 0.08, y, f"{r['predicted']:.2f}", fontsize=8, va="center")
    paper = {(r["table"], r["row"]): r["measured"] for r in rows}
    for i, name in enumerate(names):
        axis.barh(i, 0.3 * paper[name], left=0.85 * paper[name], height=0.8, color="0.9", zorder=0)
        axis.plot(
            [paper[name]] * 2, [i - 0.4, i + 0.4], "-", color="black", label=None if i else "the paper's simulator"
        )
    axis.set_yticks(range(len(names)), [f"{case}:\n{row}, {paper[case, row]:.2f}" for case, row in names], fontsize=9)
    axis.invert_yaxis()
    title = "Qwen3-235B-A22B, simulated by both"
    axis.set(xlabel="speedup (lines: 90 % of the draws; bands: 15 % around the paper's)", title=title, xlim=(1, 8.6))
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=9, loc="lower right")
