"""Speedups over a grid of configurations, as rows of a CSV file and as heat maps."""

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np

from specrl_jax.simulator.rollout import LENGTHS
from specrl_jax.simulator.scenario import Comparison, Scenario, compare, points

Row = dict[str, Any]
LAGS = (0, 1, 2, 4)
DRAFTED = tuple(k for k in LENGTHS if k)
RATIOS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))  # share of drafts kept at a position, 0.5 to 0.95


def scale_rows(s: Scenario, devices: Sequence[int], lags: Sequence[int], k: int, acceptance: float) -> list[Row]:
    """Over devices and lag, at one k."""
    n, lag = (x.ravel() for x in np.meshgrid(devices, lags))
    found = compare(s, points(n, k, acceptance, lag=lag))
    return [
        {"devices": int(n[i]), "lag": int(lag[i]), "k": k, "acceptance": acceptance} | _columns(found, i)
        for i in range(len(n))
    ]


def draft_rows(s: Scenario, devices: int, lag: int, drafted: Sequence[int], ratios: Sequence[float]) -> list[Row]:
    """Over k and the share of drafts kept at each position, r: the acceptance length is 1 + r + ... + r^k."""
    k, r = (x.ravel() for x in np.meshgrid(drafted, ratios))
    acceptance = (r[:, None] ** np.arange(max(drafted) + 1) * (np.arange(max(drafted) + 1) <= k[:, None])).sum(1)
    found = compare(s, points(devices, k, acceptance, lag=lag))
    return [
        {"devices": devices, "lag": lag, "k": int(k[i]), "kept": float(r[i]), "acceptance": round(acceptance[i], 4)}
        | _columns(found, i)
        for i in range(len(k))
    ]


def _columns(found: Comparison, i: int) -> Row:
    plain, fast = found.plain, found.speculative
    return {
        "rollout_speedup": round(float(found.rollout[i]), 4),
        "end_to_end_speedup": round(float(found.end_to_end[i]), 4),
        "plain_step_s": round(float(plain.step.total[i]), 3),
        "step_s": round(float(fast.step.total[i]), 3),
        "generation_share": round(float(plain.phases.share()[i]), 4),
        "plain_rollout_devices": int(found.plain_rollout_devices[i]),
        "rollout_devices": int(found.rollout_devices[i]),
        "fits": bool(fast.fits[i] & plain.fits[i]),
    }


def write_rows(path: str, rows: Sequence[Row]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
