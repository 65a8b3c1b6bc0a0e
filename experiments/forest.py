"""One figure of all ratios: the paper's value, ours with its interval, and simulated ones, each claim a line."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from experiments.claims import COLOURS, error
from experiments.verdicts import EQUAL, Claim

PAPER, MEASURED, SIMULATED = "D", "o", "s"
TICKS = (0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7)


def draw(found: Sequence[tuple[str, Claim]], path: pathlib.Path) -> None:
    """Draw the ratios of (folder, claim) that the paper has too, with their numbers at the right; write a PNG."""
    lines = [(folder, claim, ratio) for folder, claim in found if (ratio := claim.ratio) is not None]
    figure, axis = plt.subplots(figsize=(15, 0.32 * len(lines) + 1.6), layout="constrained")
    for at, (_, claim, ratio) in enumerate(lines):
        marker, colour = (SIMULATED, COLOURS[1]) if claim.simulated else (MEASURED, COLOURS[0])
        style: dict[str, Any] = {"fmt": marker, "color": colour, "capsize": 3, "ms": 6}
        axis.errorbar([ratio.mean], [at], xerr=error([ratio]), **style)
        assert claim.paper_ratio is not None  # as with every ratio
        axis.plot([claim.paper_ratio], [at], PAPER, color="k", mfc="none", ms=7, zorder=3)
        shown = f"{claim.paper_ratio:.2f}   {ratio}   {claim.direction}; {claim.size}"
        axis.annotate(shown, (1.01, at), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    for at in range(1, len(lines)):
        if lines[at][0] != lines[at - 1][0]:
            axis.axhline(at - 0.5, color="0.8", lw=0.8)
    axis.annotate("paper   here   direction; size", (1.01, 1.01), xycoords="axes fraction", fontsize=9)
    axis.axvspan(1 - EQUAL, 1 + EQUAL, color="0.9", zorder=0)
    axis.axvline(1, color="k", lw=0.8)
    axis.plot([], [], PAPER, color="k", mfc="none", ms=7, label="the paper")
    axis.plot([], [], MEASURED, color=COLOURS[0], label="measured here, 95 %")
    axis.plot([], [], SIMULATED, color=COLOURS[1], label="simulated here")
    axis.set(xscale="log", xlabel=f"ratio (grey: no difference, {100 * EQUAL:.0f} %)", ylim=(len(lines) - 0.4, -0.7))
    low, high = axis.get_xlim()
    axis.set_xticks(ticks := [t for t in TICKS if low < t < high], [f"{t:g}" for t in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks(range(len(lines)), [claim.text for _, claim, _ in lines], fontsize=9)
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=9, loc="lower right", ncols=3, bbox_to_anchor=(0.98, 1.0))
    figure.savefig(path, dpi=100)
    plt.close(figure)
