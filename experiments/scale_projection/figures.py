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
VIEWS = {"free verification": "o", "this project's loop": "s", "as measured in vLLM at 8B": "v"}


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
            axis.scatter(*xy.T, s=22, facecolors=face, edgecolors="black", label=use)
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


def plot_paper(path: str, predicted: Sequence[Row], effects: Sequence[Any], large: Sequence[Row]) -> None:
    """Plot predicted / measured without and with the named effects (left) and three views of the 235B rows (right)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 7), layout="constrained", width_ratios=(3, 2))
    _measured_rows(left, predicted, effects)
    _large_rows(right, [r for r in large if r["lengths"] == "zero" and r["use"] == "predicted"])
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _measured_rows(axis: plt.Axes, predicted: Sequence[Row], effects: Sequence[Any]) -> None:
    best: dict[tuple[str, str], Row] = {}
    for r in (r for e in effects for r in e.rows if r["use"] != "solved on"):
        key = (r["table"], r["row"])
        best[key] = min(r, best.get(key, r), key=lambda x: abs(x["error"]))
    for i, r in enumerate(predicted):
        first = i == 0
        axis.plot(np.array([r["low"], r["high"]]) / r["measured"], [i, i], "-", color="0.6", linewidth=4)
        axis.plot(1 + r["error"], i, "o", color="black", label="4 fitted constants" if first else None)
        if found := best.get((r["table"], r["row"])):
            axis.plot(1 + found["error"], i, "^", color="black", markerfacecolor="white", markersize=9)
    hollow = {"color": "black", "markerfacecolor": "white", "markersize": 9}
    axis.plot([], [], "^", **hollow, label="with the effect that was left out")
    axis.plot([], [], "-", color="0.6", linewidth=4, label="90 %, assumptions and noise drawn, constants fitted anew")
    axis.axvspan(0.9, 1.1, color="0.9", zorder=0, label="within 10 %")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(predicted)), [f"{r['table']}: {r['row']}" for r in predicted], fontsize=9)
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="predicted / measured", title="the paper's measured rows that nothing was fitted to")
    axis.set_xticks([0.7, 1, 1.5, 2, 3, 4], ["0.7", "1", "1.5", "2", "3", "4"])
    axis.minorticks_off()
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=9, loc="upper right")


def _large_rows(axis: plt.Axes, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys((r["table"], r["row"]) for r in rows))
    for view, marker in VIEWS.items():
        kept = {(r["table"], r["row"]): r["predicted"] for r in rows if r["view"] == view}
        y = [kept[name] for name in names]
        axis.plot(y, range(len(y)), marker, color="black", markerfacecolor="white", markersize=9, label=view)
        for r in (r for r in rows if r["view"] == view):
            at = names.index((r["table"], r["row"]))
            axis.plot([r["low"], r["high"]], [at, at], "-", color="0.4", linewidth=1.5, zorder=1)
    paper = {(r["table"], r["row"]): r["measured"] for r in rows}
    for i, name in enumerate(names):
        axis.barh(i, 0.3 * paper[name], left=0.85 * paper[name], height=0.5, color="0.85", zorder=0)
    x = [paper[name] for name in names]
    axis.plot(x, range(len(names)), "x", color="black", markersize=9, label="its simulator")
    axis.set_yticks(range(len(names)), [f"{case}:\n{row}" for case, row in names], fontsize=9)
    axis.invert_yaxis()
    title = "Qwen3-235B-A22B, simulated by both"
    axis.set(xlabel="speedup (lines 90 %, bands 15 % around the paper's)", title=title, xlim=(1, 5.2))
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=9, loc="lower right")
