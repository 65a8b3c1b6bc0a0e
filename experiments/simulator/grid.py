"""Speedups over a grid of configurations, each with its 90 % interval, as rows of a CSV file."""

import csv
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from experiments.simulator.rollout import LENGTHS
from experiments.simulator.scenario import Comparison, Points, Scenario, compare, points, sample_speedups

Row = dict[str, float]  # counts are int, `fits` is bool
LAGS = (0, 1, 2, 4)
DRAWS = 100  # Monte Carlo samples of the assumptions for a cell's intervals
DRAFTED = tuple(k for k in LENGTHS if k)
RATES = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))  # share of drafts accepted at a position, 0.5 to 0.95


def scale_cells(devices: Sequence[int], lags: Sequence[int], k: int, *, acceptance: float) -> tuple[list[Row], Points]:
    """Return cells over devices and lag, at one k, and their points."""
    n, lag = (x.ravel() for x in np.meshgrid(devices, lags))
    cells = [{"devices": int(a), "lag": int(b), "k": k, "acceptance": round(acceptance, 4)} for a, b in zip(n, lag)]
    return cells, points(n, k, acceptance, lag=lag)


def draft_cells(devices: int, lag: int, drafted: Sequence[int], *, rates: Sequence[float]) -> tuple[list[Row], Points]:
    """Return cells over k and the share r of drafts accepted at each position: acceptance length 1 + r + ... + r^k."""
    k, r = (x.ravel() for x in np.meshgrid(drafted, rates))
    acceptance = (r[:, None] ** np.arange(max(drafted) + 1) * (np.arange(max(drafted) + 1) <= k[:, None])).sum(1)
    cells = [
        {"devices": devices, "lag": lag, "k": int(a), "kept": float(b), "acceptance": round(x, 4)}
        for a, b, x in zip(k, r, acceptance)
    ]
    return cells, points(devices, k, acceptance, lag=lag)


def grid_rows(s: Scenario, cells: Sequence[Row], p: Points) -> list[Row]:
    """Return the cells with their speedups, and intervals from the machine's uncertain numbers."""
    found = compare(s, p)
    each = ((x, jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], (p, found))) for i, x in enumerate(cells))
    return [cell | _columns(s, point, one) for cell, (point, one) in each]


def _columns(s: Scenario, p: Points, found: Comparison) -> Row:
    """Return the computed columns of one point, N = 1."""
    plain, fast = found.plain, found.speculative
    rollout, end_to_end, *_ = sample_speedups(s, p, found, draws=DRAWS).intervals()
    return {
        "rollout_speedup": round(float(found.rollout[0]), 4),
        "rollout_low": round(rollout[0], 4),
        "rollout_high": round(rollout[1], 4),
        "end_to_end_speedup": round(float(found.end_to_end[0]), 4),
        "end_to_end_low": round(end_to_end[0], 4),
        "end_to_end_high": round(end_to_end[1], 4),
        "plain_step_s": round(float(plain.step.total[0]), 3),
        "step_s": round(float(fast.step.total[0]), 3),
        "generation_share": round(float(plain.phases.share()[0]), 4),
        "plain_rollout_devices": int(found.plain_rollout_devices[0]),
        "rollout_devices": int(found.rollout_devices[0]),
        "fits": bool(fast.fits[0] & plain.fits[0]),
    }


def write_rows(path: str, rows: Sequence[Mapping[str, object]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
