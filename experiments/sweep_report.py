"""Command line of a sweep's report: write the rows of all runs to results.csv, then the figure and the tables."""

import argparse
import csv
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from experiments.engine.bench import read_rows
from experiments.sweeps import make_name
from specrl_jax.io.metrics import read_metrics

# Metrics rows of every run with the overrides that identify the run
Table = list[dict[str, Any]]


def stored_rows(path: pathlib.Path) -> Table:
    """Return the rows of a results.csv without their empty cells."""
    return [{name: value for name, value in row.items() if value != ""} for row in read_rows(str(path))]


def run_report(
    doc: str,
    folder: pathlib.Path,
    sweep: Sequence[dict[str, Any]],
    fields: Sequence[str],
    shows: Sequence[Callable[[Table], None]],
    named: Callable[[dict[str, Any]], dict[str, Any]] = lambda run: run,
) -> None:
    """Read the launcher's `--workdir`, write results.csv in `folder` and call each of `shows` with its rows.

    A row is one of a run's metrics, with what `named` makes of the run's entry in the sweep. Without `--workdir` the
    rows are those of results.csv. A missing run ends the command with one line.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--workdir", default="", help="the launcher's workdir; rewrites results.csv")
    workdir = parser.parse_args().workdir
    if workdir:
        found = [(run, read_metrics(os.path.join(workdir, make_name(run)))) for run in sweep]
        for run, rows in found:
            if not rows:
                parser.error(f"--workdir {workdir}: the run {make_name(run)} is missing; launch the sweep first")
        with open(folder / "results.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(named(run) | row for run, rows in found for row in rows)
    for show in shows:
        show(stored_rows(folder / "results.csv"))
