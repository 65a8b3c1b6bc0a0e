"""Figures of one run, from its metrics rows."""

import functools
import io
import os
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from specrl_jax.core import PHASES, naming
from specrl_jax.io.metrics import StepMetrics, plain_seconds
from specrl_jax.io.progress import compiles

# Okabe and Ito's, which colour-blind readers tell apart, with a grey for their green: no red stands beside a green.
COLOURS = ("#0072b2", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999999")
# Metric and label of the left and of the right axis.
PAIRS = (
    ("rollout/response_length_mean", "response length, tokens", "policy/entropy", "entropy, nats per token"),
    ("rollout_vs_learner/kl", "rollout-learner KL, nats per token", "policy/grad_norm", "gradient norm"),
    ("draft/loss", "draft loss", "draft/grad_norm", "draft gradient norm"),
)


def plot_run(rows: list[StepMetrics], workdir: str) -> str:
    """Plot accuracy, time, lengths, rollout-learner KL and speculation over steps. Return the path of plots/run.png.

    What the run has no values of gets no panel.
    """
    panels = panels_of(rows)
    columns = 3 if len(panels) > 4 else min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure = plt.figure(figsize=(5.5 * columns, 3.5 * lines), layout="constrained")
    grid = figure.add_gridspec(lines, columns)
    for i, draw in enumerate(panels):
        line, column = divmod(i, columns)
        end = columns if i == len(panels) - 1 else column + 1  # the last one fills its line
        axis = figure.add_subplot(grid[line, column:end])
        _draw(axis, draw, rows)
    folder = os.path.join(workdir, "plots")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "run.png")
    with naming(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def panel_svg(draw: Callable[[plt.Axes], None], rows: list[StepMetrics]) -> tuple[str, str]:
    """Return one panel as an SVG image, and what it shows in words."""
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    _draw(axis, draw, rows)
    image = io.StringIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    plt.close(figure)
    return image.getvalue(), " and ".join(one.get_ylabel() for one in figure.axes) + " over RL steps"


def _draw(axis: plt.Axes, draw: Callable[[plt.Axes], None], rows: list[StepMetrics]) -> None:
    axis.set_prop_cycle(color=COLOURS)
    draw(axis)
    axis.set_xlabel("RL step")
    axis.set_xlim(rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.grid(alpha=0.3)


def panels_of(rows: list[StepMetrics]) -> list[Callable[[plt.Axes], None]]:
    """Return what draws each panel that has values."""
    panels: list[Callable[[plt.Axes], None]] = [functools.partial(_learning, rows=rows)]
    if steps := [row for row in rows if "time/total" in row]:
        panels.append(functools.partial(_phases, rows=steps))
    if _series(steps, "spec/acceptance_length")[0]:
        panels.append(functools.partial(_acceptance, rows=steps))
    pairs = [pair for pair in PAIRS if _series(steps, pair[0])[0]]
    return [*panels, *(functools.partial(_pair, rows=steps, pair=pair) for pair in pairs)]


def _series(rows: list[StepMetrics], name: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _learning(axis: plt.Axes, rows: list[StepMetrics]) -> None:
    axis.plot(*_series(rows, "reward/mean"), ".-", label="training reward, mean", color="tab:gray")
    axis.plot(*_series(rows, "eval/accuracy"), "o-", label="validation accuracy, sampled")
    if (greedy := _series(rows, "eval/accuracy_greedy"))[0]:
        axis.plot(*greedy, "s", label="validation accuracy, greedy")
    low, high = axis.get_ylim()
    axis.set_ylim(min(0, low), max(1.02, high))
    axis.set_ylabel("share of right answers; reward")
    axis.legend()


def _phases(axis: plt.Axes, rows: list[StepMetrics]) -> None:
    # As wide as a step, so that a run of one shows it.
    edges = np.repeat([row["step"] for row in rows], 2) + np.tile([-0.5, 0.5], len(rows))
    axis.stackplot(edges, [np.repeat([row[f"time/{p}"] for row in rows], 2) for p in PHASES], labels=PHASES)
    # A step that compiles, as the first, would dominate the scale.
    later = [row for row in rows[1:] if not compiles(row)] or rows
    plain = [plain_seconds(row, rows[-1]) for row in rows]
    plain_known = [seconds for seconds in plain if seconds is not None]
    if len(plain_known) == len(rows):
        axis.plot(edges, np.repeat(plain_known, 2), "k--", label="plain decoding")
    tallest = max(max(row["time/total"], plain_seconds(row, rows[-1]) or 0.0) for row in later)
    axis.set_ylim(0, 1.25 * tallest)
    axis.set_ylabel("seconds")
    axis.set_title("time of a step, by phase (steps that compile, as the first, are cut)")
    axis.legend(loc="upper right", ncols=3, fontsize=7)


def _acceptance(axis: plt.Axes, rows: list[StepMetrics]) -> None:
    rates = sorted({name for row in rows for name in row if name.startswith("spec/acceptance_rate_pos_")})
    for name in rates:
        axis.plot(*_series(rows, name), ".-", label=f"draft {name.rpartition('_')[2]} accepted", alpha=0.8)
    axis.set_ylim(0, 1.02)
    axis.set_ylabel("share of verifications")
    if rates:
        axis.legend(loc="lower left", fontsize=8)
    other = axis.twinx()
    other.plot(*_series(rows, "spec/acceptance_length"), ".-", color="black")
    other.set_ylim(0, 1.02 * (len(rates) + 1))
    other.set_ylabel("tokens per verification (black)")
    axis.set_title("acceptance")


def _pair(axis: plt.Axes, rows: list[StepMetrics], pair: tuple[str, str, str, str]) -> None:
    for side, name, label, color in ((axis, *pair[:2], "tab:blue"), (axis.twinx(), *pair[2:], "tab:orange")):
        side.plot(*_series(rows, name), ".-", color=color)
        side.set_ylabel(label, color=color)
        side.ticklabel_format(axis="y", useOffset=False)
