"""Heat maps of the rows of `grid`: a number in every cell, shades that stay apart in print."""

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

VALUES = {"rollout_speedup": "rollout speedup", "end_to_end_speedup": "end-to-end speedup"}


LABELS = {
    "devices": "devices",
    "lag": "lag, policy versions",
    "k": "k, drafted tokens",
    "kept": "share of drafts kept at each position",
}


def heatmaps(path: str, titles: Sequence[str], tables: Sequence[list[dict[str, Any]]], axes: tuple[str, str]) -> None:
    """A line of two maps, rollout and end to end, for each table; light is fast, in brackets what does not fit.

    Args:
      axes: columns of the rows along x and along y.
    """
    size = (11, 0.6 + 3.2 * len(tables))
    figure, grid = plt.subplots(len(tables), 2, figsize=size, layout="constrained", squeeze=False)
    for line, title, table in zip(grid, titles, tables):
        for axis, (value, name) in zip(line, VALUES.items()):
            _heatmap(axis, table, axes, value)
            axis.set(title=f"{title}: {name}, x plain", xlabel=LABELS[axes[0]], ylabel=LABELS[axes[1]])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _heatmap(axis: plt.Axes, table: list[dict[str, Any]], axes: tuple[str, str], value: str) -> None:
    x, y = (sorted({row[name] for row in table}) for name in axes)
    cells = np.full((len(y), len(x)), np.nan)
    for row in table:
        cells[y.index(row[axes[1]]), x.index(row[axes[0]])] = row[value]
    low, high = min(1.0, np.nanmin(cells)), max(1.2, np.nanmax(cells))
    # From a quarter up: the darkest shade still carries white digits.
    axis.imshow(cells, cmap="gray", vmin=low - (high - low) / 3, vmax=high, aspect="auto", origin="lower")
    for row in table:
        shown = f"{row[value]:.2f}" if row["fits"] else f"({row[value]:.2f})"
        color = "white" if row[value] < low + (high - low) / 3 else "black"
        at = (x.index(row[axes[0]]), y.index(row[axes[1]]))
        axis.text(*at, shown, ha="center", va="center", fontsize=8, color=color)
    axis.set_xticks(range(len(x)), [f"{v:g}" for v in x])
    axis.set_yticks(range(len(y)), [f"{v:g}" for v in y])
