"""The figure of one measurement: iterations beside roofline and simulator, speedups beside published ones."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from experiments.accelerator.compare import PUBLISHED, speedups_by_cell
from experiments.accelerator.parts import Row
from experiments.accelerator.sizes import RATES

ITERATIONS, ROLLOUTS, OTHERS = "tab:blue", "tab:green", "tab:gray"
COLORS = {
    ITERATIONS: "expected from measured iterations",
    ROLLOUTS: "measured, long-tailed rollouts",
    OTHERS: "published, other systems",
}
MARKS = {"measured": ("ms", "o"), "roofline": ("roofline_ms", "|"), "simulator": ("simulated_ms", "x")}
MOST_CELLS = 6  # in the right half
MOST_SPEEDUP = 5.0  # of its axis; 1 + k = 4 tokens per verification are the most there can be


def draw(cells: list[Row], sides: list[Row], title: str, path: str) -> None:
    """Write the figure.

    Args:
      cells: rows of the decode cells, with `simulated_ms`.
      sides: rows of the long-tailed rollouts.
    """
    bars = [
        (f"{s['model']}, B {s['rows']}, {s['live']:,} live, r {rate}", s[f"r={rate}"], ITERATIONS)
        for s in speedups_by_cell(cells)[:MOST_CELLS]
        for rate in RATES[1:]
    ]
    bars += [(f"long tail, {s['draft']}", s["speedup"], ROLLOUTS) for s in sides if "speedup" in s]
    bars += [(p.what + (f", batch {p.batch}" if p.batch else ""), p.speedup, OTHERS) for p in PUBLISHED]
    height = max(0.28 * max(len(cells), len(bars)) + 1.6, 4)
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, height))
    draw_iterations(left, cells)
    draw_speedups(right, bars)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_iterations(axes: Axes, cells: list[Row]) -> None:
    names = [f"{c['model']}, B {c['rows']}, {c['live']:,} live, k {c['k']}" for c in cells]
    for label, (key, marker) in MARKS.items():
        found = [(c[key], i) for i, c in enumerate(cells) if (c[key] or 0) > 0]
        if found:
            axes.plot(*zip(*found), marker, label=label, markersize=8, markeredgewidth=2, linestyle="none")
    axes.set(yticks=range(len(cells)), yticklabels=names, xlabel="ms of an iteration, all layers", xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.invert_yaxis()
    axes.legend(loc="lower left")  # the cells at the bottom hold the most tokens and take the longest


def draw_speedups(axes: Axes, bars: list[tuple[str, float, str]]) -> None:
    """Draw (name, speedup, color) from top to bottom."""
    at = range(len(bars))
    axes.barh(at, [value for _, value, _ in bars], color=[color for *_, color in bars])
    for i, (_, value, _) in enumerate(bars):
        axes.text(min(max(value, 0), 0.94 * MOST_SPEEDUP), i, f" {value:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(yticks=at, yticklabels=[name for name, *_ in bars], xlabel="speedup over plain decoding")
    axes.set_xlim(0, min(1.12 * max(value for _, value, _ in bars), MOST_SPEEDUP))
    axes.set_ylim(-0.5, len(bars) + 3.5)  # room for the legend
    axes.invert_yaxis()
    present = {color for *_, color in bars}
    handles = [Patch(color=c, label=label) for c, label in COLORS.items() if c in present]
    axes.legend(handles=handles, loc="lower right")
