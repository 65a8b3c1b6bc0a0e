"""Runs with rollouts one and two policy versions behind the learner, and synchronous runs, on the same devices.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.launch \
    --config configs/rlzero_tiny.py --sweep experiments/async_lag/sweep.py
python -m experiments.async_lag.plot --collect runs/sweeps/rlzero_tiny_async_lag
"""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from experiments.accuracy_parity.plot import ACCURACY, curve, gap
from experiments.async_lag.sweep import PIPELINES, get_sweep
from experiments.claims import GREYS, HATCHES, Row, by_seed, error, line, main, markdown, save
from experiments.verdicts import Claim, Interval, interval, judge_difference, ratio_interval

TIMES = [f"time/{name}" for name in ("total", "generate", "exposed_generation", "idle_rollout", "prepare")]
TIMES += ["time/data", "time/logprob", "time/train"]
KEYS = [
    *TIMES,
    "rollout/lag",
    "policy/correction",
    "rollout_vs_learner/kl",
    "spec/acceptance_length",
    "reward/mean",
    ACCURACY,
]
# Columns of the table: times outside the learner's own work.
SHOWN = {"generate": "generation", "exposed_generation": "exposed", "idle_rollout": "rollout devices idle"}
# Not training reward: with lag, the rollouts of a step are those of an earlier policy.
JUDGED = (ACCURACY,)
SETTLED = 5  # first steps to leave out: they compile and fill the queue


def seconds(rows: list[Row], name: str, phase: str) -> np.ndarray:
    """Return [seeds]: median seconds of a phase over the settled steps of each seed."""
    return by_seed([row for row in rows if row["step"] > SETTLED], f"time/{phase}", **PIPELINES[name])


def step_ratio(rows: list[Row], name: str) -> Interval:
    """Return the seconds of a step relative to a synchronous one, paired by seed."""
    return ratio_interval(seconds(rows, name, "total") / seconds(rows, "sync", "total"))


def table(rows: list[Row]) -> str:
    lines = []
    for name, pipeline in PIPELINES.items():
        _, values = curve(rows, pipeline)
        behind = "" if name == "sync" else gap(rows, pipeline, PIPELINES["sync"], JUDGED)[0].text("+.3f")
        times = [f"{interval(seconds(rows, name, phase))}" for phase in ("total", *SHOWN)]
        lines.append([name, f"{interval(values[:, -1])}", behind, f"{step_ratio(rows, name)}", *times])
    header = ["", "accuracy at the end", "over the run, minus sync (95 %, Welch)", "step over sync's", "step, s"]
    return markdown([*header, *[f"{text}, s" for text in SHOWN.values()]], lines)


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for name in ("lag 1", "lag 2"):
        text = f"Zero, asynchronous, {name}: validation accuracy over the run minus synchronous"
        made.append(judge_difference(text, "", *gap(rows, PIPELINES[name], PIPELINES["sync"], JUDGED)))
    return made


def draw(rows: list[Row], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, (name, pipeline) in enumerate(PIPELINES.items()):
        steps, values = curve(rows, pipeline)
        at = np.array(steps) + 0.4 * (i - 1)
        line(axes[0], at, [interval(column) for column in values.T], i, name)
        left = 0.0
        for j, phase in enumerate(("exposed_generation", "prepare", "logprob", "train")):
            value = float(seconds(rows, name, phase).mean())
            label = phase.replace("_", " ") if i == 0 else None
            axes[1].barh(i, value, left=left, color=GREYS[j], hatch=HATCHES[j], edgecolor="k", label=label)
            left += value
        total = interval(seconds(rows, name, "total"))
        axes[1].errorbar(total.mean, i, xerr=error([total]), fmt="none", color="k", capsize=3)
        text = f"{total.mean:.2f} s, {step_ratio(rows, name).mean:.2f} of sync"
        end = total.mean if np.isnan(total.high) else total.high
        axes[1].annotate(text, (end, i), (5, 0), textcoords="offset points", va="center", fontsize=8)
        axes[1].set_xlim(0, max(axes[1].get_xlim()[1], 1.4 * end))
    axes[0].set(xlabel="RL step", ylabel="validation accuracy, sampled", ylim=(0, 1.05))
    axes[0].legend(fontsize=8, loc="lower right")
    axes[1].set(xlabel="seconds of a step", yticks=range(len(PIPELINES)), yticklabels=list(PIPELINES))
    axes[1].invert_yaxis()
    axes[1].legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, path)


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
