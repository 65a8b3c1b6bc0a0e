"""Collect rows, compute intervals over seeds, judge claims and write tables and figures for the claim folders.

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
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from experiments.engine.bench import distinct, matching, read_rows
from experiments.runs import atomic_write
from experiments.sweeps import make_name
from specrl_jax.io.metrics import read_metrics

Row = dict[str, Any]
SEEDS = range(3)
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
# Lines and bars that stay distinct without colour.
STYLES = ("o-", "s--", "^:", "D-.", "v-", "x--")
GREYS = ("0.15", "0.4", "0.65", "0.85", "1.0")
HATCHES = ("", "//", "..", "xx", "\\\\")


class Interval(NamedTuple):
    """Mean over seeds and half the width of its 95 % interval (Student).

    `half` is nan for a single seed; both are nan without seeds.
    """

    mean: float
    half: float

    def __str__(self) -> str:
        if np.isnan(self.mean):
            return "not run"
        return f"{self.mean:.2f}" + ("" if np.isnan(self.half) else f" +- {self.half:.2f}")


def interval(values: Sequence[float]) -> Interval:
    """Compute the mean and the half width of its 95 % interval (Student)."""
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Interval(float(values[0]) if n else float("nan"), float("nan"))
    return Interval(float(values.mean()), float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)))


def welch(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Compute (mean of a - mean of b, half width of its 95 % interval) for two samples, by Welch's test."""
    found = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    return float(np.mean(a) - np.mean(b)), float(found.high - found.low) / 2


class Claim(NamedTuple):
    """One line of the table that compares this project with the paper."""

    text: str
    paper: str  # value and its table in the paper
    ours: str
    verdict: str  # reproduced, contradicted, excluded, undecided, one seed, not in the paper, not run


# Explains the verdicts beside a table of them.
VERDICTS = (
    "Mean over seeds with a 95 % interval. A ratio is reproduced if its whole interval lies on the paper's side of 1 "
    "(a share: of 0), contradicted if the interval lies on the other side, excluded if 1 lies in the interval and the "
    "paper's value does not, undecided if both do. Where the paper shows no difference: the largest one that the "
    "interval allows. Simulated: 90 % of the draws; reproduced within 15 % of a value that the paper simulated, 10 % "
    "of one that it measured."
)


def judge_ratio(text: str, paper: float | None, place: str, ours: Interval, even: float = 1) -> Claim:
    """Judge a ratio of speeds (`even` 1) or a share (`even` 0) against the paper's value.

    reproduced: the whole interval lies on the paper's side of `even`; contradicted: on the other side;
    excluded: `even` lies in the interval, the paper's value does not; undecided: both lie in it.
    """
    if np.isnan(ours.mean):
        return Claim(text, "" if paper is None else f"{paper} ({place})", "", "not run")
    if paper is None:
        return Claim(text, "", f"{ours}", "not in the paper")
    low, high = ours.mean - ours.half, ours.mean + ours.half
    verdict = "one seed" if np.isnan(ours.half) else "undecided"
    if paper < low or paper > high:
        verdict = "excluded"
    if low > even or high < even:
        verdict = "reproduced" if (low > even) == (paper > even) else "contradicted"
    return Claim(text, f"{paper} ({place})", f"{ours}", verdict)


def judge_difference(text: str, paper: str, gap: float, half: float) -> Claim:
    """Judge a difference `gap` +- `half` (95 %) that should be zero: state the largest one that the interval allows."""
    if np.isnan(half):
        verdict = "one seed"
    elif abs(gap) <= half:
        verdict = f"no difference above {abs(gap) + half:.2f}"
    else:
        verdict = f"{'contradicted: ' * bool(paper)}a {'gain' if gap > 0 else 'loss'}"
    return Claim(text, paper, f"{gap:+.3f} +- {half:.3f}", verdict if paper else f"not in the paper: {verdict}")


def seeded(runs: Iterable[Row], seeds: Iterable[int] = SEEDS) -> list[Row]:
    """Return every run with every seed, ordered by seed, so that an interrupted sweep has complete seeds."""
    runs = list(runs)
    return [run | {"seed": seed, "rollout.seed": seed} for seed in seeds for run in runs]


def workload_name(workload: str) -> str:
    """Return the paper's name of a workload."""
    return "Zero" if workload.startswith("rlzero") else "Think"


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
            known = {"workload": workload} | run
            if not finished:
                rows.append(known | {"state": "failed" if os.path.exists(place) else "not run"})
                continue
            found = [row for row in read_metrics(place) if row["step"] > 0]
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
    truth = {"True": True, "False": False}
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


def put_table(page: pathlib.Path, text: str) -> None:
    """Replace what stands between the two marks of a page. Raises ValueError unless it has each mark once."""
    old = page.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise ValueError(f"{page}: expected {BEGIN} and {END} once each")
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{text.strip()}\n{END}{after}")


def bars(axis: plt.Axes, place: int, found: Sequence[Interval], label: str) -> None:
    """Draw the bars of one of three series (`place` 0, 1, 2) with their intervals; group i stands at x = i."""
    half, places = np.nan_to_num([f.half for f in found]), np.arange(len(found)) + 0.27 * (place - 1)
    style = {"color": GREYS[1 + place], "hatch": HATCHES[place], "edgecolor": "k", "capsize": 3}
    axis.bar(places, [f.mean for f in found], 0.27, yerr=half, label=label, **style)


def line(
    axis: plt.Axes, x: Sequence[float] | np.ndarray, found: Sequence[Interval], style: str, grey: str, label: str
) -> None:
    """Draw a series with its intervals; a single seed has none."""
    half = np.nan_to_num([f.half for f in found])
    axis.errorbar(x, [f.mean for f in found], half, fmt=style, color=grey, capsize=3, label=label)


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
