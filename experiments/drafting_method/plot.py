"""Generation speed by kind of draft (Table 2 of arXiv 2604.26779, which has n-gram lookup and EAGLE-3, k = 3).

Commands: experiments/claims.py.
"""

import pathlib

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
from experiments.drafting_method.sweep import METHODS, get_sweep
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
                of = interval if key.endswith("length") else ratio_interval
                line.append(f"{of(metric(rows, w, method, key))}" + (f" ({theirs})" if theirs else ""))
        lines.append(line)
    return markdown(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for w, name in workload_labels(rows).items():
        for method in METHODS:
            tokens, paper = PAPER.get((workload_name(w), method), (None, None))
            speed, lengths = (metric(rows, w, method, f"k_3_{x}") for x in ("over_plain", "acceptance_length"))
            claim = judge_ratio(f"{name}: {method}, k = 3, generation over plain", paper, "Table 2", speed)
            if tokens:
                cost = ratio_interval(lengths / speed).mean
                why = cost_of(cost, tokens / paper)
                # Would the paper's acceptance length at our cost of a verification give another direction?
                if claim.direction == SHOWN and (tokens / cost > 1) != (paper > 1):
                    why = f"for another reason, few tokens: {why}"
                claim = claim._replace(why=why)
            made.append(claim)
            if tokens:
                text = f"{name}: {method}, k = 3, tokens per verification"
                made.append(judge_level(text, tokens, "Table 2", lengths))
        speed = metric(rows, w, "n-gram", "adaptive_over_plain")
        made.append(judge_ratio(f"{name}: n-gram under the controller, generation over plain", None, "", speed))
    return made


def draw(rows: list[Row], path: pathlib.Path) -> None:
    labels = workload_labels(rows)
    figure, axes = plt.subplots(len(labels), 1, figsize=(11, 3.6 * len(labels)), layout="constrained", squeeze=False)
    for axis, (w, name) in zip(axes[:, 0], labels.items()):
        for i, (side, label) in enumerate(SIDES.items()):
            bars(axis, i, [ratio_interval(metric(rows, w, m, f"{side}_over_plain")) for m in METHODS], label)
        paper = [PAPER.get((workload_name(w), method), (0, 0))[1] for method in METHODS]
        places = np.arange(len(METHODS)) + 0.27
        axis.bar(places, paper, 0.27, color="1.0", edgecolor="k", label="paper, k = 3")
        numbers(axis, places, [Interval(x or np.nan, x, x) for x in paper])
        axis.axhline(1, color="k", lw=0.8)
        axis.set(xticks=range(len(METHODS)), xticklabels=METHODS, title=f"{name}: {w}")
        axis.set_ylabel("generation over plain decoding")
        axis.margins(y=0.15)
        axis.legend(fontsize=8, loc="upper left", ncols=3)
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
