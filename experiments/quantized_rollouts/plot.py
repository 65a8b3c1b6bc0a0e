"""Validation accuracy of runs whose rollouts have int8 or float8 weights, and how far rollouts and learner are apart.

python -m experiments.launch --config configs/rlzero_tiny.py --sweep experiments/quantized_rollouts/sweep.py
python -m experiments.quantized_rollouts.plot --collect runs/sweeps/rlzero_tiny_quantized_rollouts
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.accuracy_parity.plot import ACCURACY, SCORE, curve, trained
from experiments.claims import COLOURS, Row, line, main, markdown, save
from experiments.quantized_rollouts.sweep import WEIGHTS, get_sweep
from experiments.verdicts import Claim, Interval, interval, judge_difference, paired

KL, WEIGHT = "rollout_vs_learner/kl", "policy/correction"
KEYS = [ACCURACY, "eval/accuracy_greedy", "reward/mean", KL, "rollout_vs_learner/logprob_abs_max", WEIGHT]


def differences(rows: list[Row], name: str) -> tuple[Interval, Interval]:
    """Return the accuracy at the end and the SCORE, each minus that with float32 weights, paired by seed."""
    mine, theirs = (curve(rows, WEIGHTS[x])[1][:, -1] for x in (name, "float32"))
    return interval(mine - theirs), interval(trained(rows, WEIGHTS[name]) - trained(rows, WEIGHTS["float32"]))


def table(rows: list[Row]) -> str:
    lines = []
    for name, weights in WEIGHTS.items():
        accuracy, kl, weight = (curve(rows, weights, key)[1] for key in (ACCURACY, KL, WEIGHT))
        gaps = differences(rows, name)
        shown = ["" if name == "float32" else gap.text("+.3f") for gap in gaps]
        numbers = (f"{kl.mean():.1e}", f"{kl.max():.1e}", f"{weight.mean():.4f}")
        lines.append([name, f"{interval(accuracy[:, -1])}", *shown, *numbers])
    header = ["rollouts' weights", "accuracy at the end", "minus float32 (95 %, paired by seed)"]
    header += ["score, minus float32", "KL to the learner, nats a token: mean", "largest step", "importance weight"]
    return f"{SCORE}\n\n{markdown(header, lines)}"


def claims(rows: list[Row]) -> list[Claim]:
    text, base = "Zero, int8 rollouts: accuracy over the run minus float32 rollouts", trained(rows, WEIGHTS["float32"])
    return [judge_difference(text, "", differences(rows, "int8")[1], float(base.mean()), paired(len(base)))]


def draw(rows: list[Row], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, (name, weights) in enumerate(WEIGHTS.items()):
        steps, values = curve(rows, weights)
        at = np.array(steps) + 0.3 * (i - 1)
        line(axes[0], at, [interval(column) for column in values.T], i, name)
        steps, values = curve(rows, weights, KL)
        axes[1].plot(steps, values.mean(axis=0), "-", color=COLOURS[i], label=name)
    axes[0].set(xlabel="RL step", ylabel="validation accuracy, sampled", ylim=(0, 1.05))
    axes[1].set(xlabel="RL step", ylabel="KL to the learner, nats a token", yscale="log")
    axes[0].legend(fontsize=8, loc="lower right")
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
