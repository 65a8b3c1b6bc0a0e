"""Generation speed of n-gram lookup and EAGLE-3, k = 3 (Table 2 of arXiv 2604.26779).

Commands: experiments/claims.py.
"""

import pathlib
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import (
    Row,
    bars,
    benchmark_keys,
    by_seed,
    main,
    markdown,
    numbers,
    save,
    workload_labels,
    workload_name,
)
from experiments.drafting_method.sweep import METHODS, Methods, get_sweep
from experiments.engine.bench import distinct
from experiments.verdicts import SHOWN, Claim, Interval, cost_of, interval, judge_level, judge_ratio, ratio_interval

SIDES = {"k_3": "k = 3", "adaptive": "adaptive"}
KEYS = benchmark_keys(SIDES)
# (acceptance length, generation speedup)
PAPER = {
    ("Zero", "n-gram"): (2.47, 0.7),
    ("Zero", "EAGLE-3"): (3.32, 1.8),
    ("Think", "n-gram"): (2.05, 0.5),
    ("Think", "EAGLE-3"): (2.77, 1.5),
}


def metric(rows: list[Row], workload: str, method: dict[str, Any], key: str) -> np.ndarray:
    """Return [seeds] of a metric for one workload and kind of draft."""
    # A column that only some runs set is empty in the others.
    names = [name for name in ("draft.kind", "draft.cascade") if name in rows[0]]
    return by_seed(rows, f"benchmark/{key}", workload=workload, **{name: method.get(name, "") for name in names})


def table(rows: list[Row], methods: Methods = METHODS) -> str:
    workloads = [w for (w,) in distinct(rows, "workload")]
    header = ["drafts"]
    for w in workloads:
        header += [f"{w}: tokens per verification, k = 3 (paper)", "over plain, k = 3 (paper)", "over plain, adaptive"]
    lines = []
    for name, method in methods.items():
        line = [name]
        for w in workloads:
            paper = PAPER.get((workload_name(w), name), ("", ""))
            for key, theirs in zip(("k_3_acceptance_length", "k_3_over_plain", "adaptive_over_plain"), (*paper, "")):
                of = interval if key.endswith("length") else ratio_interval
                line.append(f"{of(metric(rows, w, method, key))}" + (f" ({theirs})" if theirs else ""))
        lines.append(line)
    return markdown(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for w, name in workload_labels(rows).items():
        for kind, method in METHODS.items():
            tokens, paper = PAPER[workload_name(w), kind]
            speed, lengths = (metric(rows, w, method, f"k_3_{x}") for x in ("over_plain", "acceptance_length"))
            claim = judge_ratio(f"{name}: {kind}, k = 3, generation over plain", paper, "Table 2", speed)
            cost = ratio_interval(lengths / speed).mean
            why = cost_of(cost, tokens / paper)
            # Would the paper's acceptance length at our cost of a verification give another direction?
            if claim.direction == SHOWN and (tokens / cost > 1) != (paper > 1):
                why = f"for another reason, few tokens: {why}"
            made.append(claim._replace(why=why))
            text = f"{name}: {kind}, k = 3, tokens per verification"
            made.append(judge_level(text, tokens, "Table 2", lengths))
        speed = metric(rows, w, METHODS["n-gram"], "adaptive_over_plain")
        made.append(judge_ratio(f"{name}: n-gram under the controller, generation over plain", None, "", speed))
    return made


def draw(rows: list[Row], path: pathlib.Path, methods: Methods = METHODS) -> None:
    labels = workload_labels(rows)
    figure, axes = plt.subplots(len(labels), 1, figsize=(11, 3.6 * len(labels)), layout="constrained", squeeze=False)
    for axis, (w, name) in zip(axes[:, 0], labels.items()):
        for i, (side, label) in enumerate(SIDES.items()):
            speeds = [ratio_interval(metric(rows, w, m, f"{side}_over_plain")) for m in methods.values()]
            bars(axis, i, speeds, label)
        paper = [PAPER.get((workload_name(w), method), (0, 0))[1] for method in methods]
        if any(paper):
            places = np.arange(len(methods)) + 0.27
            axis.bar(places, paper, 0.27, color="1.0", edgecolor="k", label="paper, k = 3")
            numbers(axis, places, [Interval(x or np.nan, x, x) for x in paper])
        axis.axhline(1, color="k", lw=0.8)
        axis.set(xticks=range(len(methods)), xticklabels=methods, title=f"{name}: {w}")
        axis.set_ylabel("generation over plain decoding")
        axis.margins(y=0.15)
        axis.legend(fontsize=8, loc="upper left", ncols=3)
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
