"""Seconds of a step by phase, with and without speculation (Table 1 of arXiv 2604.26779).

Commands: experiments/claims.py.
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import GREYS, HATCHES, Row, by_seed, error, main, markdown, save, workload_labels, workload_name
from experiments.engine.bench import distinct, matching
from experiments.step_breakdown.sweep import get_sweep
from experiments.verdicts import Claim, Interval, cost_of, interval, judge_level, judge_ratio, ratio_interval
from specrl_jax.core import PHASES

SPEED = "rollout/tokens_per_second"
KEYS = [f"time/{phase}" for phase in (*PHASES, "total")] + [SPEED, "spec/acceptance_length", "rollout/tokens"]
KINDS = {"none": "AR", "eagle3": "spec"}
# Seconds, Table 1: data, prepare, generate, logprob, train, total.
PAPER = {
    ("Zero", "AR"): (0.2, 1.9, 100.0, 17.8, 31.3, 151.2),
    ("Zero", "spec"): (0.2, 2.1, 56.6, 18.1, 30.5, 107.5),
    ("Think", "AR"): (0.3, 2.1, 133.6, 17.9, 31.4, 185.3),
    ("Think", "spec"): (0.2, 1.6, 87.0, 18.1, 30.5, 137.4),
}
# The paper's values of `Saved`, in the order of its table.
PAPER_SAVED = {"Zero": (0.661, 1.77, 1.41, 1.40, 0.99, 3.32), "Think": (0.721, 1.54, 1.35, 1.34, 0.97, 2.77)}


def timed(rows: list[Row]) -> list[Row]:
    """Leave out the first step of each run, which compiles."""
    return [row for row in rows if row["step"] > 1]


def seconds(rows: list[Row], workload: str, kind: str, phase: str) -> Interval:
    """Compute the seconds of a phase over the seeds of one workload and kind of draft."""
    return interval(by_seed(timed(rows), f"time/{phase}", workload=workload, **{"draft.kind": kind}))


class Saved:
    """Speedups of one workload, paired by seed; every field is [seeds]."""

    def __init__(self, rows: list[Row], workload: str) -> None:
        seeds = [{row["seed"] for row in matching(rows, workload=workload, **{"draft.kind": k})} for k in KINDS]
        both = [row for row in timed(rows) if row["seed"] in set.intersection(*seeds)]

        def by_kind(key: str, kind: str) -> np.ndarray:
            return by_seed(both, key, workload=workload, **{"draft.kind": kind})

        plain, spec = ({p: by_kind(f"time/{p}", kind) for p in (*PHASES, "total")} for kind in KINDS)
        self.share = plain["generate"] / plain["total"]
        # By tokens per second: rollouts have equal distributions, not equal tokens.
        self.generation = by_kind(SPEED, "eagle3") / by_kind(SPEED, "none")
        self.step = plain["total"] / spec["total"]
        self.bound = 1 / (self.share / self.generation + 1 - self.share)
        rest = [p for p in PHASES if p != "generate"]
        self.others = sum(spec[p] for p in rest) / sum(plain[p] for p in rest)
        self.acceptance = by_kind("spec/acceptance_length", "eagle3")


def table(rows: list[Row]) -> str:
    workloads = [w for (w,) in distinct(rows, "workload")]
    columns = [(w, kind) for w in workloads for kind in KINDS]
    header = ["seconds of a step", *[f"{w}, {KINDS[k]} (paper)" for w, k in columns]]
    lines = []
    for i, phase in enumerate((*PHASES, "total")):
        cells = [f"{seconds(rows, w, k, phase)} ({PAPER[workload_name(w), KINDS[k]][i]})" for w, k in columns]
        lines.append([phase, *cells])
    saved = {w: Saved(rows, w) for w in workloads}
    names = {
        "share": "generation's share s of a plain step",
        "generation": "generation speedup S",
        "step": "step speedup",
        "bound": "step speedup expected from s and S, 1 / (s / S + 1 - s)",
        "others": "other phases relative to the plain step",
        "acceptance": "tokens per verification",
    }
    second = []
    for i, (name, text) in enumerate(names.items()):
        of = interval if name in ("share", "acceptance") else ratio_interval
        second.append(
            [text, *[f"{of(getattr(s, name))} ({PAPER_SAVED[workload_name(w)][i]})" for w, s in saved.items()]]
        )
    return markdown(header, lines) + "\n\n" + markdown(["", *[f"{w} (paper)" for w in workloads]], second)


def claims(rows: list[Row]) -> list[Claim]:
    found = []
    for w, label in workload_labels(rows).items():
        saved, (_, generation, step, *_, length) = Saved(rows, w), PAPER_SAVED[workload_name(w)]
        name = f"{label}: EAGLE-3, k = 3, "
        why = cost_of(ratio_interval(saved.acceptance / saved.generation).mean, length / generation)
        found.append(judge_ratio(name + "generation over plain", generation, "Table 1", saved.generation, why=why))
        found.append(judge_ratio(name + "step over plain", step, "Table 1", saved.step))
        found.append(judge_level(name + "tokens per verification in RL", length, "Table 2", saved.acceptance))
    return found


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Draw the phases, ours and the paper's, with the seconds of a step and the speedups at the ends of the bars."""
    labels = workload_labels(rows)
    bars = [(w, k) for w in labels for k in KINDS]
    figure, axes = plt.subplots(1, 2, figsize=(13, 0.6 * len(bars) + 1.8), layout="constrained", sharey=True)
    places, names = range(len(bars)), [f"{labels[w]}, {KINDS[k]}" for w, k in bars]
    ours = {p: [seconds(rows, w, k, p).mean for w, k in bars] for p in PHASES}
    theirs = {p: [PAPER[workload_name(w), KINDS[k]][i] for w, k in bars] for i, p in enumerate(PHASES)}
    titles = ("here: " + ", ".join(labels), "arXiv 2604.26779: Qwen3-8B, 32 GB200")
    for axis, found, title in zip(axes, (ours, theirs), titles):
        left = np.zeros(len(bars))
        for i, phase in enumerate(PHASES):
            grey, hatch = GREYS[i], HATCHES[i]
            axis.barh(places, found[phase], left=left, color=grey, hatch=hatch, edgecolor="k", label=phase)
            left += found[phase]
        axis.set(xlabel="seconds of a step", title=title, yticks=list(places), yticklabels=names)
        axis.title.set_fontsize(9)
        axis.set_xlim(0, 1.35 * left.max())
    total = [seconds(rows, w, k, "total") for w, k in bars]
    axes[0].errorbar([t.mean for t in total], places, xerr=error(total), fmt="none", color="k", capsize=3)
    for at, (w, kind) in enumerate(bars):
        saved, (_, generation, step, *_) = Saved(rows, w), PAPER_SAVED[workload_name(w)]
        ratios = [(ratio_interval(saved.generation).mean, ratio_interval(saved.step).mean), (generation, step)]
        ends = [np.nanmax(total[at]), PAPER[workload_name(w), KINDS[kind]][-1]]
        shown = [total[at].mean, ends[1]]
        for axis, end, value, ratio in zip(axes, ends, shown, ratios):
            gains = "" if KINDS[kind] == "AR" else "\ngeneration {:.2f}x, step {:.2f}x".format(*ratio)
            style = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            axis.annotate(f"{value:.1f} s{gains}", (end, at), (5, 0), **style)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8, loc="upper right")
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
