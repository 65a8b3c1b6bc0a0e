"""Heat maps of the rows of `grid`, with each value printed in its cell."""

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from specrl_jax.simulator.grid import Row

VALUES = {"rollout_speedup": "rollout speedup", "end_to_end_speedup": "end-to-end speedup"}
LABELS = {
    "devices": "devices",
    "lag": "lag, policy versions",
    "k": "k, drafted tokens",
    "kept": "share of drafts kept at each position",
}


def heatmaps(path: str, titles: Sequence[str], tables: Sequence[list[Row]], axes: tuple[str, str]) -> None:
    """Draw two maps a table, rollout and end-to-end speedup, over the columns `axes` along x and y.

    Light is fast; values that do not fit are in brackets.
    """
    size = (11, 0.6 + 3.2 * len(tables))
    figure, grid = plt.subplots(len(tables), 2, figsize=size, layout="constrained", squeeze=False)
    for line, title, table in zip(grid, titles, tables):
        for axis, (value, name) in zip(line, VALUES.items()):
            _heatmap(axis, table, axes, value)
            axis.set(title=f"{title}: {name}, x plain", xlabel=LABELS[axes[0]], ylabel=LABELS[axes[1]])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _heatmap(axis: plt.Axes, table: list[Row], axes: tuple[str, str], value: str) -> None:
    x, y = (sorted({row[name] for row in table}) for name in axes)
    cells = np.full((len(y), len(x)), np.nan)
    for row in table:
        cells[y.index(row[axes[1]]), x.index(row[axes[0]])] = row[value]
    low, high = min(1.0, np.nanmin(cells)), max(1.2, np.nanmax(cells))
    # Shades start at a quarter so that white digits stay readable on the darkest one.
    axis.imshow(cells, cmap="gray", vmin=low - (high - low) / 3, vmax=high, aspect="auto", origin="lower")
    for row in table:
        shown = f"{row[value]:.2f}" if row["fits"] else f"({row[value]:.2f})"
        color = "white" if row[value] < low + (high - low) / 3 else "black"
        at = (x.index(row[axes[0]]), y.index(row[axes[1]]))
        axis.text(*at, shown, ha="center", va="center", fontsize=8, color=color)
    axis.set_xticks(range(len(x)), [f"{v:g}" for v in x])
    axis.set_yticks(range(len(y)), [f"{v:g}" for v in y])
