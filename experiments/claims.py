"""Collect the rows of the claim folders, and write their tables and figures.

A claim folder has sweep.py (the overrides of each run), plot.py, results.csv (one row per run and step, failed runs
included), a figure, and a README whose table plot.py writes between two marks. Each workload is one config and one
launch:

    python -m experiments.launch --config configs/rlzero_tiny.py:small --sweep experiments/FOLDER/sweep.py
    python -m experiments.launch --config configs/rlthink_tiny.py --sweep experiments/FOLDER/sweep.py
    python -m experiments.FOLDER.plot --collect runs/sweeps/rlzero_tiny_small_FOLDER runs/sweeps/rlthink_tiny_FOLDER

Configs of 0.6 to 8 billion parameters run the same way on accelerators. Without `--collect`, plot.py redraws table and
figure from results.csv.
"""

import argparse
import csv
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.engine.bench import distinct, matching, read_rows
from experiments.runs import atomic_write
from experiments.sweeps import make_name
from experiments.verdicts import Interval
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.plots import COLOURS

Row = dict[str, Any]
SEEDS = range(3)
# Lines and bars that stay distinct without colour.
STYLES = ("o-", "s--", "^:", "D-.", "v-", "x--")
GREYS = ("0.15", "0.4", "0.65", "0.85", "1.0")
HATCHES = ("", "//", "..", "xx", "\\\\")


def seeded(runs: Iterable[Row], seeds: Iterable[int] = SEEDS) -> list[Row]:
    """Return every run with every seed, ordered by seed, so that an interrupted sweep has complete seeds."""
    runs = list(runs)
    return [run | {"seed": seed, "rollout.seed": seed} for seed in seeds for run in runs]


def workload_name(workload: str) -> str:
    """Return the paper's name of a workload."""
    return "Zero" if workload.startswith("rlzero") else "Think"


def workload_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return workload -> the paper's name, with our own behind it where several workloads share one."""
    workloads = [w for (w,) in distinct(rows, "workload")]
    names = [workload_name(w) for w in workloads]
    return {w: name if names.count(name) == 1 else f"{name} ({w})" for w, name in zip(workloads, names)}


# ---- rows


def collect(workdirs: Sequence[str], folder: str, sweep: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Read one row per run and step from the launcher's workdirs.

    A run that did not finish gets one row with its state and no metrics.

    Args:
      keys: metrics to keep; '' where a row lacks one.
    """
    rows = []
    for workdir in workdirs:
        workload = os.path.basename(os.path.normpath(workdir)).removesuffix("_" + folder)
        for run in sweep:
            place = os.path.join(workdir, make_name(run))
            finished = os.path.exists(os.path.join(place, "finished.json"))
            known: Row = {"workload": workload} | run
            if not finished:
                rows.append(known | {"state": "failed" if os.path.exists(place) else "not run"})
                continue
            # The row of step 0 holds the evaluation before training; some folders keep nothing of it.
            found = [row for row in read_metrics(place) if row["step"] > 0 or any(key in row for key in keys)]
            rows += [known | {"state": "finished"} | {k: row.get(k, "") for k in ("step", *keys)} for row in found]
    return rows


def write_rows(path: pathlib.Path, rows: Sequence[Row]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def finished_rows(path: pathlib.Path) -> list[Row]:
    """Read the rows of finished runs from results.csv, with booleans restored."""
    truth: dict[object, object] = {"True": True, "False": False}
    rows = [{name: truth.get(value, value) for name, value in row.items()} for row in read_rows(str(path))]
    return [row for row in rows if row.get("state", "finished") == "finished"]


def by_seed(rows: Sequence[Row], key: str, **where: Any) -> np.ndarray:
    """Return [seeds]: the median of metric `key` over the rows of each seed that have it."""
    found = [row for row in matching(rows, **where) if isinstance(row.get(key), int | float)]
    return np.array([np.median([row[key] for row in matching(found, seed=s)]) for (s,) in distinct(found, "seed")])


def benchmark_keys(sides: Iterable[str]) -> list[str]:
    """Return the names of task=benchmark's metrics for these sides and for plain decoding."""
    return ["benchmark/plain"] + [
        f"benchmark/{side}{what}" for side in sides for what in ("", "_over_plain", "_acceptance_length")
    ]


# ---- tables and figures


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def marks(name: str = "results") -> tuple[str, str]:
    """Return the lines between which a page has what is written by a command."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def put_table(page: pathlib.Path, text: str, name: str = "results") -> None:
    """Replace what stands between the two marks `name` of a page. Raises ValueError unless it has each once."""
    begin, end = marks(name)
    old = page.read_text()
    if old.count(begin) != 1 or old.count(end) != 1:
        raise ValueError(f"{page}: expected {begin} and {end} once each")
    before, after = old.split(begin)[0], old.split(end)[1]
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


def show_table(folder: pathlib.Path, home: pathlib.Path, text: str, name: str = "results") -> None:
    """Print a table; write it into the page of `home` where the rows were written there, too."""
    print(text)
    if folder == home:
        put_table(home / "README.md", text, name)


def error(found: Sequence[Interval]) -> np.ndarray:
    """Return [2, points]: distances of the ends of intervals from their means, as errorbar takes them."""
    return np.nan_to_num([[f.mean - f.low for f in found], [f.high - f.mean for f in found]])


def bars(axis: plt.Axes, place: int, found: Sequence[Interval], label: str) -> None:
    """Draw the bars of one of three series (`place` 0, 1, 2) with intervals and numbers; group i stands at x = i."""
    places = np.arange(len(found)) + 0.27 * (place - 1)
    style: dict[str, Any] = {"color": GREYS[1 + place], "hatch": HATCHES[place], "edgecolor": "k", "capsize": 3}
    axis.bar(places, [f.mean for f in found], 0.27, yerr=error(found), label=label, **style)
    numbers(axis, places, found)


def line(axis: plt.Axes, x: Sequence[float] | np.ndarray, found: Sequence[Interval], i: int, label: str) -> None:
    """Draw series i with its intervals; a single seed has none."""
    style: dict[str, Any] = {"fmt": STYLES[i], "color": COLOURS[i], "capsize": 3, "ms": 5}
    axis.errorbar(x, [f.mean for f in found], error(found), label=label, **style)


def numbers(axis: plt.Axes, x: Sequence[float] | np.ndarray, found: Sequence[Interval]) -> None:
    """Print each mean above its interval."""
    for at, f in zip(x, found):
        top = f.mean if np.isnan(f.high) else f.high
        if not np.isnan(f.mean):
            axis.annotate(f"{f.mean:.2f}", (at, top), (0, 3), textcoords="offset points", ha="center", fontsize=7)


def save(figure: plt.Figure, path: pathlib.Path) -> None:
    """Add grids, write the figure and close it."""
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    plot_file: str,
    doc: str,
    sweep: Sequence[Row],
    keys: Sequence[str],
    table: Callable[[list[Row]], str],
    draw: Callable[[list[Row], pathlib.Path], None],
) -> None:
    """Run the command line of a folder's plot.py."""
    here = pathlib.Path(plot_file).parent
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--collect", nargs="+", metavar="WORKDIR", help="the launcher's workdirs; rewrites results.csv")
    workdirs = parser.parse_args().collect or []
    for workdir in workdirs:
        if not os.path.isdir(workdir):
            parser.error(f"--collect {workdir}: no such folder; launch the sweep first")
    if workdirs:
        write_rows(here / "results.csv", collect(workdirs, here.name, sweep, keys))
    rows = finished_rows(here / "results.csv")
    put_table(here / "README.md", table(rows))
    draw(rows, here / "figure.png")
    print(table(rows))
