"""Generation speed by kind of draft (Table 2 of arXiv 2604.26779, which has n-gram lookup and EAGLE-3, k = 3).

Commands: experiments/claims.py.
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import (
    Claim,
    Row,
    bars,
    benchmark_keys,
    by_seed,
    interval,
    judge_ratio,
    main,
    markdown,
    save,
    workload_name,
)
from experiments.drafting_method.sweep import METHODS, get_sweep
from experiments.engine.bench import distinct

SIDES = {"k_3": "k = 3", "adaptive": "adaptive"}
KEYS = benchmark_keys(SIDES)
# (acceptance length, generation speedup)
PAPER = {
    ("Zero", "n-gram"): (2.47, 0.7),
    ("Zero", "EAGLE-3"): (3.32, 1.8),
    ("Think", "n-gram"): (2.05, 0.5),
    ("Think", "EAGLE-3"): (2.77, 1.5),
}


def metric(rows: list[Row], workload: str, method: str, key: str) -> np.ndarray:
    """Return [seeds] of a metric for one workload and method."""
    # A column that only some runs set is empty in the others.
    where = {"draft.cascade": ""} | METHODS[method]
    return by_seed(
        rows, f"benchmark/{key}", workload=workload, **{k: where[k] for k in ("draft.kind", "draft.cascade")}
    )


def table(rows: list[Row]) -> str:
    workloads = [w for (w,) in distinct(rows, "workload")]
    header = ["drafts"]
    for w in workloads:
        header += [f"{w}: tokens per verification, k = 3 (paper)", "over plain, k = 3 (paper)", "over plain, adaptive"]
    lines = []
    for method in METHODS:
        line = [method]
        for w in workloads:
            paper = PAPER.get((workload_name(w), method), ("", ""))
            for key, theirs in zip(("k_3_acceptance_length", "k_3_over_plain", "adaptive_over_plain"), (*paper, "")):
                line.append(f"{interval(metric(rows, w, method, key))}" + (f" ({theirs})" if theirs else ""))
        lines.append(line)
    return markdown(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for (w,) in distinct(rows, "workload"):
        name = workload_name(w)
        for method in METHODS:
            tokens, paper = PAPER.get((name, method), (None, None))
            ours = interval(metric(rows, w, method, "k_3_over_plain"))
            claim = judge_ratio(f"{name}: {method}, k = 3, generation over plain", paper, "Table 2", ours)
            if claim.verdict == "reproduced":
                cost = interval(metric(rows, w, method, "k_3_acceptance_length")).mean / ours.mean
                # Would the paper's acceptance length at our cost of a verification give another verdict?
                if (tokens / cost > 1) != (paper > 1):
                    claim = claim._replace(verdict="reproduced, for another reason (see folder)")
            made.append(claim)
        ours = interval(metric(rows, w, "n-gram", "adaptive_over_plain"))
        made.append(judge_ratio(f"{name}: n-gram under the controller, generation over plain", None, "", ours))
    return made


def draw(rows: list[Row], path: pathlib.Path) -> None:
    workloads = [w for (w,) in distinct(rows, "workload")]
    figure, axes = plt.subplots(1, len(workloads), figsize=(6 * len(workloads), 4), layout="constrained", squeeze=False)
    for axis, w in zip(axes[0], workloads):
        name = workload_name(w)
        for i, (side, label) in enumerate(SIDES.items()):
            bars(axis, i, [interval(metric(rows, w, method, f"{side}_over_plain")) for method in METHODS], label)
        paper = [PAPER.get((name, method), (0, 0))[1] for method in METHODS]
        axis.bar(np.arange(len(METHODS)) + 0.27, paper, 0.27, color="1.0", edgecolor="k", label="paper, k = 3")
        axis.axhline(1, color="k", lw=0.8)
        labels = [method.replace(" ", "\n", 1) for method in METHODS]
        axis.set(xticks=range(len(METHODS)), xticklabels=labels, title=f"{name}: {w}")
        axis.set_ylabel("generation speed over plain decoding")
        axis.legend(fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
