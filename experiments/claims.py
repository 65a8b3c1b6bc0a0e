"""What the folders that reproduce a claim share: their runs, rows, intervals over seeds, README tables and figures.

A folder has sweep.py (what main.py is run with), plot.py, results.csv (a row per run and step, failed runs too), a
figure, and a README whose table plot.py writes between two marks. The workloads are configs, one launch each:

    python -m experiments.launch --config configs/rlzero_tiny.py:small --sweep experiments/FOLDER/sweep.py
    python -m experiments.launch --config configs/rlthink_tiny.py --sweep experiments/FOLDER/sweep.py
    python -m experiments.FOLDER.plot --collect runs/sweeps/rlzero_tiny_small_FOLDER runs/sweeps/rlthink_tiny_FOLDER

and those of 0.6 to 8 billion parameters go the same way on accelerators. Without `--collect` table and figure are made
again from results.csv.
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
# Lines and bars that differ in grey too.
STYLES = ("o-", "s--", "^:", "D-.", "v-", "x--")
GREYS = ("0.15", "0.4", "0.65", "0.85", "1.0")
HATCHES = ("", "//", "..", "xx", "\\\\")


class Interval(NamedTuple):
    """Mean over seeds and half the width of its 95 % interval (Student); nan from a single one, both from none."""

    mean: float
    half: float

    def __str__(self) -> str:
        if np.isnan(self.mean):
            return "not run"
        return f"{self.mean:.2f}" + ("" if np.isnan(self.half) else f" +- {self.half:.2f}")


def interval(values: Sequence[float]) -> Interval:
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Interval(float(values[0]) if n else float("nan"), float("nan"))
    return Interval(float(values.mean()), float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)))


class Claim(NamedTuple):
    """A line of the table that compares this project with the paper."""

    text: str
    paper: str  # value and place
    ours: str
    verdict: str  # reproduced, contradicted, excluded, undecided, one seed, not in the paper, not run


# What the verdicts mean, for whoever reads a table of them.
VERDICTS = (
    "Mean over seeds with a 95 % interval. A ratio is reproduced where all of its interval lies on the paper's side of "
    "1 (a share: of 0), contradicted on the other, excluded where that lies in it and the paper's value does not, "
    "undecided where both do. Where the paper shows no difference: the largest one that the interval leaves. "
    "Simulated: 90 % of the draws; reproduced within 15 % of what the paper simulated, 10 % of what it measured."
)


def faster(text: str, paper: float | None, place: str, ours: Interval, even: float = 1) -> Claim:
    """A ratio of speeds, or a share (`even` 0). Reproduced: the whole interval lies on the paper's side of `even`;
    contradicted: on the other; excluded: `even` lies in it, the paper's value does not; undecided: both do.
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


def alike(text: str, paper: str, gap: float, half: float) -> Claim:
    """A difference (+- half of its 95 % interval) that ought to be none: what the interval still leaves of one."""
    if np.isnan(half):
        verdict = "one seed"
    elif abs(gap) <= half:
        verdict = f"no difference above {abs(gap) + half:.2f}"
    else:
        verdict = f"{'contradicted: ' * bool(paper)}a {'gain' if gap > 0 else 'loss'}"
    return Claim(text, paper, f"{gap:+.3f} +- {half:.3f}", verdict if paper else f"not in the paper: {verdict}")


def seeded(runs: Iterable[Row], seeds: Iterable[int] = SEEDS) -> list[Row]:
    """Every run with every seed; seed by seed, so that an interrupted sweep has whole seeds."""
    runs = list(runs)
    return [run | {"seed": seed, "rollout.seed": seed} for seed in seeds for run in runs]


def workload_name(workload: str) -> str:
    """The paper's name of what a workload stands for."""
    return "Zero" if workload.startswith("rlzero") else "Think"


# ---- rows


def collect(workdirs: Sequence[str], folder: str, sweep: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """A row per run and step of the launcher's workdirs; a run that did not finish has its state and no metrics.

    Args:
      keys: metrics that are kept, where a row has them.
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
    """Of results.csv, with the sweep's values as they were there."""
    truth = {"True": True, "False": False}
    rows = [{name: truth.get(value, value) for name, value in row.items()} for row in read_rows(str(path))]
    return [row for row in rows if row.get("state", "finished") == "finished"]


def by_seed(rows: Sequence[Row], key: str, **where: Any) -> np.ndarray:
    """[seeds] median of a metric over the rows of each seed that have it, in the order of the seeds."""
    found = [row for row in matching(rows, **where) if isinstance(row.get(key), int | float)]
    return np.array([np.median([row[key] for row in matching(found, seed=s)]) for (s,) in distinct(found, "seed")])


def benchmark_keys(sides: Iterable[str]) -> list[str]:
    """Metrics of task=benchmark, of these sides beside plain decoding."""
    return ["benchmark/plain"] + [
        f"benchmark/{side}{what}" for side in sides for what in ("", "_over_plain", "_acceptance_length")
    ]


# ---- what is made of them


def markdown(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def put_table(readme: pathlib.Path, text: str) -> None:
    """`text` in the place of what is between the marks. Raises ValueError where there are none."""
    old = readme.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise ValueError(f"{readme}: expected {BEGIN} and {END} once each")
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{text.strip()}\n{END}{after}")


def bars(axis: plt.Axes, place: int, found: Sequence[Interval], label: str) -> None:
    """The bars of one of three series (`place` 0, 1, 2), with their intervals; group i stands at i."""
    half, places = np.nan_to_num([f.half for f in found]), np.arange(len(found)) + 0.27 * (place - 1)
    style = {"color": GREYS[1 + place], "hatch": HATCHES[place], "edgecolor": "k", "capsize": 3}
    axis.bar(places, [f.mean for f in found], 0.27, yerr=half, label=label, **style)


def line(
    axis: plt.Axes, x: Sequence[float] | np.ndarray, found: Sequence[Interval], style: str, grey: str, label: str
) -> None:
    """A series with its intervals; a single seed has none."""
    half = np.nan_to_num([f.half for f in found])
    axis.errorbar(x, [f.mean for f in found], half, fmt=style, color=grey, capsize=3, label=label)


def save(figure: plt.Figure, path: pathlib.Path) -> None:
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
    """The command line of a folder's plot.py."""
    here = pathlib.Path(plot_file).parent
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--collect", nargs="+", metavar="WORKDIR", help="of the launcher: writes results.csv anew")
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
