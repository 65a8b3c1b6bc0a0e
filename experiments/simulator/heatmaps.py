"""Heat maps of the rows of `grid`, with each value printed in its cell."""

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.simulator.grid import Row

VALUES = {"rollout_speedup": "rollout speedup", "end_to_end_speedup": "end-to-end speedup"}
LABELS = {
    "devices": "devices",
    "lag": "lag, policy versions",
    "k": "k, drafted tokens",
    "kept": "share of drafts kept at each position",
}
BOUNDS = {
    "rollout_speedup": ("rollout_low", "rollout_high"),
    "end_to_end_speedup": ("end_to_end_low", "end_to_end_high"),
}
# Cells of another's results: ((case, x, y) -> text printed in the cell, by the column shown); the cell gets a frame.
Marks = dict[str, dict[tuple[str, float, float], str]]


def heatmaps(
    path: str, titles: Sequence[str], tables: Sequence[list[Row]], *, axes: tuple[str, str], marks: Marks | None = None
) -> None:
    """Draw two maps a table, rollout and end-to-end speedup, over the columns `axes` along x and y.

    One scale of grey for all maps, light is fast; below each value its 90 % interval. Values that do not fit are in
    brackets.
    """
    cells = max(len({row[axes[0]] for row in table}) for table in tables)
    size = (2 * (1.2 + 0.85 * cells), 0.6 + 3.2 * len(tables))
    figure, grid = plt.subplots(len(tables), 2, figsize=size, layout="constrained", squeeze=False)
    every = [row[value] for table in tables for row in table for value in VALUES]
    ends = min(1.0, min(every)), max(1.2, max(every))
    for line, title, table in zip(grid, titles, tables):
        for axis, (value, name) in zip(line, VALUES.items()):
            _heatmap(axis, table, axes, value, ends, title, (marks or {}).get(value, {}))
            axis.set(title=f"{title}: {name}, x plain", xlabel=LABELS[axes[0]], ylabel=LABELS[axes[1]])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _heatmap(
    axis: plt.Axes,
    table: list[Row],
    axes: tuple[str, str],
    value: str,
    ends: tuple[float, float],
    case: str,
    marks: dict[tuple[str, float, float], str],
) -> None:
    x, y = (sorted({row[name] for row in table}) for name in axes)
    cells = np.full((len(y), len(x)), np.nan)
    for row in table:
        cells[y.index(row[axes[1]]), x.index(row[axes[0]])] = row[value]
    low, high = ends
    # Shades start at a quarter so that white digits stay readable on the darkest one.
    axis.imshow(cells, cmap="gray", vmin=low - (high - low) / 3, vmax=high, aspect="auto", origin="lower")
    for row in table:
        shown = f"{row[value]:.2f}" if row["fits"] else f"({row[value]:.2f})"
        color = "white" if row[value] < low + (high - low) / 3 else "black"
        i, j = x.index(row[axes[0]]), y.index(row[axes[1]])
        axis.text(i, j, shown, ha="center", va="bottom", fontsize=8, color=color)
        interval = "{:.2f}\N{EN DASH}{:.2f}".format(*(row[name] for name in BOUNDS[value]))
        axis.text(i, j, interval, ha="center", va="top", fontsize=6, color=color)
        if mark := marks.get((case, row[axes[0]], row[axes[1]])):
            axis.add_patch(plt.Rectangle((i - 0.47, j - 0.47), 0.94, 0.94, fill=False, edgecolor=color, linewidth=2))
            axis.text(i, j + 0.4, mark, ha="center", va="top", fontsize=6, color=color, weight="bold")
    axis.set_xticks(range(len(x)), [f"{v:g}" for v in x])
    axis.set_yticks(range(len(y)), [f"{v:g}" for v in y])
