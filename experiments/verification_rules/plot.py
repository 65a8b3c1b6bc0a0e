"""Acceptance length and generation speed under each exact verification rule.

Commands: experiments/claims.py.
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import Row, bars, benchmark_keys, by_seed, main, markdown, save, workload_labels
from experiments.engine.bench import distinct
from experiments.verdicts import Claim, Interval, interval, judge_ratio, ratio_interval
from experiments.verification_rules.sweep import LENGTHS, RULES, get_sweep

KEYS = benchmark_keys(f"k_{k}" for k in LENGTHS)
WHAT = {"acceptance_length": "tokens per verification", "over_plain": "generation speed over plain decoding"}


def metric(rows: list[Row], workload: str, rule: str, k: int, what: str) -> np.ndarray:
    return by_seed(rows, f"benchmark/k_{k}_{what}", workload=workload, **{"rollout.rule": rule})


def shown(rows: list[Row], workload: str, rule: str, k: int, what: str) -> Interval:
    """Return a metric's interval: log-t for speeds relative to plain decoding."""
    of = ratio_interval if what == "over_plain" else interval
    return of(metric(rows, workload, rule, k, what))


def table(rows: list[Row]) -> str:
    workloads = [w for (w,) in distinct(rows, "workload")]
    columns = [(w, k, what) for w in workloads for k in LENGTHS for what in WHAT]
    header = [
        "rule",
        *[f"{w}, k = {k}: {'tokens per verification' if 'acc' in x else 'over plain'}" for w, k, x in columns],
    ]
    return markdown(header, [[rule, *[shown(rows, w, rule, k, x) for w, k, x in columns]] for rule in RULES])


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    k = LENGTHS[-1]
    for w, label in workload_labels(rows).items():
        for rule in RULES[1:]:
            ours, base = (metric(rows, w, x, k, "acceptance_length") for x in (rule, "rejection"))
            text = f"{label}: tokens per verification, k = {k}, {rule} over rejection"
            made.append(judge_ratio(text, None, "", ours / base))
    return made


def draw(rows: list[Row], path: pathlib.Path) -> None:
    labels = workload_labels(rows)
    cells = [(w, k) for w in labels for k in LENGTHS]
    figure, axes = plt.subplots(1, 2, figsize=(13, 4), layout="constrained")
    for axis, (what, label) in zip(axes, WHAT.items()):
        for i, rule in enumerate(RULES):
            bars(axis, i, [shown(rows, w, rule, k, what) for w, k in cells], rule)
        axis.set(xticks=range(len(cells)), xticklabels=[f"{labels[w]}, k = {k}" for w, k in cells], ylabel=label)
        axis.legend(fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
