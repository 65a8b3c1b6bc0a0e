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
from typing import Any, NamedTuple, Self

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from experiments.engine.bench import distinct, matching, read_rows
from experiments.runs import atomic_write
from experiments.sweeps import make_name
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.plots import COLOURS

Row = dict[str, Any]
SEEDS = range(3)
# Lines and bars that stay distinct without colour.
STYLES = ("o-", "s--", "^:", "D-.", "v-", "x--")
GREYS = ("0.15", "0.4", "0.65", "0.85", "1.0")
HATCHES = ("", "//", "..", "xx", "\\\\")


class Interval(NamedTuple):
    """A central value and the ends of its interval.

    The ends are nan for a single seed; all three are nan without seeds.
    """

    mean: float
    low: float
    high: float

    def text(self, spec: str = ".2f") -> str:
        """Return "mean (low to high)", the mean alone for a single seed, "not run" without seeds."""
        if np.isnan(self.mean):
            return "not run"
        ends = "" if np.isnan(self.low) else f" ({self.low:{spec}} to {self.high:{spec}})"
        return f"{self.mean:{spec}}{ends}"

    def __str__(self) -> str:
        return self.text()

    def scaled(self, factor: float, add: float = 0.0) -> Self:
        """Return the interval of factor * x + add; `factor` must be positive."""
        return type(self)(*(factor * x + add for x in self))


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Compute the mean over seeds and its 95 % interval (Student)."""
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Interval(float(values[0]) if n else float("nan"), float("nan"), float("nan"))
    mean, half = float(values.mean()), float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Compute the geometric mean of positive ratios and its 95 % interval: Student on their logarithms (log-t).

    The ends are asymmetric, positive, and those of the inverse ratio are their inverses.
    """
    return Interval(*(float(np.exp(x)) for x in interval(np.log(np.asarray(values, float)))))


def welch(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> Interval:
    """Compute the mean of a - the mean of b with its 95 % interval for two unpaired samples, by Welch's test."""
    found = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    return Interval(float(np.mean(a) - np.mean(b)), float(found.low), float(found.high))


# ---- verdicts


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


EQUAL = 0.05  # largest difference that counts as none, relative
NEAR = 0.15  # of the paper's value, for sizes
# The one rule, quoted beside every table of claims.
RULE = (
    "**Direction.** Ratios have 95 % log-t intervals: Student's t on the logarithms of the paired ratios. *shown*: the "
    "interval lies on the paper's side of 1; *opposite*: on the other; *undecided*: it contains 1. Where the paper has "
    f"no difference (at most {percent(EQUAL)}): *shown* within {percent(EQUAL)} of none, *opposite* outside, "
    "*undecided* across that bound. Shares have t on their values, and 0 for 1; levels (tokens per verification) have "
    f"no direction. **Size.** *within the interval*: ours contains the paper's value; else *within {percent(NEAR)}* of "
    "it, *larger* or *smaller*. Simulated: 90 % of the draws in place of 95 %."
)
SHOWN, OPPOSITE, UNDECIDED = "shown", "opposite", "undecided"
ABSENT, NOT_RUN, ONE_SEED = "not in the paper", "not run", "one seed"
SIZES = (WITHIN, NEARBY, LARGER, SMALLER) = ("within the interval", f"within {percent(NEAR)}", "larger", "smaller")


class Claim(NamedTuple):
    """One line of the table that compares this project with the paper."""

    text: str
    paper: str = ""  # value and its table in the paper
    here: str = ""
    direction: str = NOT_RUN
    size: str = ""
    sample: str = ""  # what the interval is over, and how its values are paired
    why: str = ""
    values: tuple[float, ...] = ()  # one a seed, by which a sample shown in several folders is recognised
    # On the axis of ratios, where 1 is no difference; None: not a ratio.
    paper_ratio: float | None = None
    ratio: Interval | None = None
    simulated: bool = False


def direction(paper: float, ours: Interval, even: float = 1) -> str:
    """Return the direction of a ratio (`even` 1) or a share (`even` 0) by RULE."""
    if np.isnan(ours.mean):
        return NOT_RUN
    if np.isnan(ours.low):
        return ONE_SEED
    if even and abs(paper - even) <= EQUAL + 1e-9:  # ratios of two decimals: 1.05 - 1 is above 0.05 in float64
        low, high = even - EQUAL, even + EQUAL
        if ours.low >= low and ours.high <= high:
            return SHOWN
        return OPPOSITE if ours.high < low or ours.low > high else UNDECIDED
    if ours.low <= even <= ours.high:
        return UNDECIDED
    return SHOWN if (ours.mean > even) == (paper > even) else OPPOSITE


def size(paper: float, ours: Interval) -> str:
    """Return the size of a value relative to the paper's by RULE."""
    if np.isnan(ours.mean):
        return ""
    if ours.low <= paper <= ours.high:
        return WITHIN
    if abs(ours.mean / paper - 1) <= NEAR:
        return NEARBY
    return LARGER if ours.mean > paper else SMALLER


def judge_ratio(
    text: str, paper: float | None, place: str, values: Sequence[float] | np.ndarray, by: str = "seed", why: str = ""
) -> Claim:
    """Judge paired ratios against the paper's (None: it has none) in its table `place`.

    Args:
      by: what pairs them, "seed" or "round".
    """
    ours = ratio_interval(values)
    claim = Claim(text, _paper(paper, place), f"{ours}", sample=paired(len(values), by), why=why, values=tuple(values))
    if np.isnan(ours.mean):
        return claim._replace(here="")
    if paper is None:
        return claim._replace(direction=ABSENT)
    verdicts = {"direction": direction(paper, ours), "size": size(paper, ours)}
    return claim._replace(**verdicts, paper_ratio=paper, ratio=ours)


def judge_share(text: str, paper: float, place: str, values: Sequence[float] | np.ndarray) -> Claim:
    """Judge a share, which may be negative, against the paper's: its no difference is 0."""
    ours = interval(values)
    verdicts = (direction(paper, ours, even=0), size(paper, ours))
    return Claim(text, _paper(paper, place), f"{ours}", *verdicts, paired(len(values)), values=tuple(values))


def judge_level(text: str, paper: float, place: str, values: Sequence[float] | np.ndarray) -> Claim:
    """Judge the size of a level; it has no direction."""
    ours = interval(values)
    what = NOT_RUN if np.isnan(ours.mean) else ""
    sample = f"{len(values)} seed{'s' * (len(values) != 1)}"
    return Claim(text, _paper(paper, place), f"{ours}", what, size(paper, ours), sample, values=tuple(values))


def judge_difference(text: str, paper: str, gap: Interval, reference: float, sample: str) -> Claim:
    """Judge a difference that is none in the paper (`paper`: how it says so; '': it does not) by its equivalence bound.

    Args:
      reference: value of the side that is subtracted, to which the bound is relative.
    """
    ratio = gap.scaled(1 / reference, 1.0)
    found = direction(1.0, ratio)
    claim = Claim(text, paper, gap.text("+.3f"), found, size(1.0, ratio), sample)
    if not paper:
        return claim._replace(direction=ABSENT, size="", why=f"no difference at {percent(EQUAL)}: {found}")
    return claim._replace(paper_ratio=1.0, ratio=ratio)


def judge_simulated(text: str, paper: float, place: str, ours: Interval, why: str = "") -> Claim:
    """Judge a simulated ratio, whose interval holds 90 % of its draws."""
    verdicts = (direction(paper, ours), size(paper, ours))
    sample = "simulated, 90 % of the draws"
    claim = Claim(text, _paper(paper, place), f"{ours}", *verdicts, sample, why)
    return claim._replace(paper_ratio=paper, ratio=ours, simulated=True)


def cost_of(ours: float | np.floating, paper: float) -> str:
    """Say what a verification costs: tokens per verification over the speed relative to plain decoding."""
    return f"an iteration in plain ones: {ours:.2f} here, {paper:.2f} in the paper"


def paired(count: int, by: str = "seed") -> str:
    return f"paired by {by}, {count} {by}{'s' * (count != 1)}"


def _paper(value: float | None, place: str) -> str:
    return "" if value is None else f"{value} ({place})"


def mark_shared(found: Sequence[tuple[str, Claim]]) -> list[tuple[str, Claim]]:
    """Name, in the samples of (folder, claim), the other folders that show the very same values."""
    folders: dict[tuple[float, ...], dict[str, None]] = {}
    for folder, claim in found:
        folders.setdefault(claim.values, {})[folder] = None
    marked = []
    for folder, claim in found:
        others = [name for name in folders[claim.values] if name != folder] if len(claim.values) > 1 else []
        sample = claim.sample + (f"; the same measurement as in {' and '.join(others)}" if others else "")
        marked.append((folder, claim._replace(sample=sample)))
    return marked


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
            known = {"workload": workload} | run
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


def error(found: Sequence[Interval]) -> np.ndarray:
    """Return [2, points]: distances of the ends of intervals from their means, as errorbar takes them."""
    return np.nan_to_num([[f.mean - f.low for f in found], [f.high - f.mean for f in found]])


def bars(axis: plt.Axes, place: int, found: Sequence[Interval], label: str) -> None:
    """Draw the bars of one of three series (`place` 0, 1, 2) with intervals and numbers; group i stands at x = i."""
    places = np.arange(len(found)) + 0.27 * (place - 1)
    style = {"color": GREYS[1 + place], "hatch": HATCHES[place], "edgecolor": "k", "capsize": 3}
    axis.bar(places, [f.mean for f in found], 0.27, yerr=error(found), label=label, **style)
    numbers(axis, places, found)


def line(axis: plt.Axes, x: Sequence[float] | np.ndarray, found: Sequence[Interval], i: int, label: str) -> None:
    """Draw series i with its intervals; a single seed has none."""
    style = {"fmt": STYLES[i], "color": COLOURS[i], "capsize": 3, "ms": 5}
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
