"""Validation accuracy of runs whose rollouts have int8 or float8 weights, and how far rollouts and learner are apart.

python -m experiments.launch --config configs/rlzero_tiny.py --sweep experiments/quantized_rollouts/sweep.py
python -m experiments.quantized_rollouts.plot --collect runs/sweeps/rlzero_tiny_quantized_rollouts
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.accuracy_parity.plot import ACCURACY, curve
from experiments.claims import STYLES, Claim, Interval, Row, interval, judge_difference, line, main, markdown, save
from experiments.quantized_rollouts.sweep import WEIGHTS, get_sweep

KL, WEIGHT = "rollout_vs_learner/kl", "policy/correction"
KEYS = [ACCURACY, "eval/accuracy_greedy", "reward/mean", KL, "rollout_vs_learner/logprob_abs_max", WEIGHT]


def differences(rows: list[Row], name: str) -> tuple[Interval, Interval]:
    """Return the accuracy minus that with float32 weights, at the end and over the run, paired by seed."""
    mine, theirs = (curve(rows, WEIGHTS[x])[1] for x in (name, "float32"))
    return interval((mine - theirs)[:, -1]), interval((mine - theirs).mean(axis=1))


def table(rows: list[Row]) -> str:
    lines = []
    for name, weights in WEIGHTS.items():
        accuracy, kl, weight = (curve(rows, weights, key)[1] for key in (ACCURACY, KL, WEIGHT))
        gaps = differences(rows, name)
        shown = ["" if name == "float32" else f"{gap.mean:+.3f} +- {gap.half:.3f}" for gap in gaps]
        numbers = (f"{kl.mean():.1e}", f"{kl.max():.1e}", f"{weight.mean():.4f}")
        lines.append([name, f"{interval(accuracy[:, -1])}", *shown, *numbers])
    header = ["rollouts' weights", "accuracy at the end", "minus float32 (95 %, paired by seed)"]
    header += [
        "over the run, minus float32",
        "KL to the learner, nats a token: mean",
        "largest step",
        "importance weight",
    ]
    return markdown(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    text = "Zero, int8 rollouts: validation accuracy over the run minus float32 rollouts"
    gap = differences(rows, "int8")[1]
    return [judge_difference(text, "", gap.mean, gap.half)]


def draw(rows: list[Row], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, (name, weights) in enumerate(WEIGHTS.items()):
        steps, values = curve(rows, weights)
        at = np.array(steps) + 0.3 * (i - 1)
        line(axes[0], at, [interval(column) for column in values.T], STYLES[i], str(0.3 * i), name)
        steps, values = curve(rows, weights, KL)
        axes[1].plot(steps, values.mean(axis=0), color=str(0.3 * i), label=name)
    axes[0].set(xlabel="RL step", ylabel="validation accuracy, sampled", ylim=(0, 1.05))
    axes[1].set(xlabel="RL step", ylabel="KL to the learner, nats a token", yscale="log")
    axes[0].legend(fontsize=8, loc="lower right")
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
