"""Figures of one run, from its metrics rows."""

import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from specrl_jax.core import PHASES
from specrl_jax.io.metrics import Row


def plot_run(rows: list[Row], workdir: str) -> str:
    """Plot accuracy, time, lengths, rollout-learner KL and speculation over steps. Return the path of plots/run.png."""
    speculates = any("spec/acceptance_length" in row for row in rows)
    columns = 3 if speculates else 2
    figure, axes = plt.subplots(2, columns, figsize=(5.5 * columns, 7), layout="constrained")
    _learning(axes[0, 0], rows)
    steps = [row for row in rows if "time/total" in row]
    _phases(axes[0, 1], steps)
    _pair(axes[1, 0], steps, "rollout/response_length_mean", "tokens per response", "policy/entropy", "entropy, nats")
    _pair(axes[1, 1], steps, "rollout_vs_learner/kl", "rollout-learner KL, nats", "policy/grad_norm", "gradient norm")
    if speculates:
        _acceptance(axes[0, 2], steps)
        _pair(axes[1, 2], steps, "draft/loss", "draft loss", "draft/grad_norm", "draft gradient norm")
    for axis in axes.flat:
        axis.set_xlabel("RL step")
        axis.grid(alpha=0.3)
    folder = os.path.join(workdir, "plots")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "run.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _series(rows: list[Row], name: str) -> tuple[list[float], list[float]]:
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _learning(axis: plt.Axes, rows: list[Row]) -> None:
    axis.plot(*_series(rows, "reward/mean"), label="training reward", color="tab:gray")
    axis.plot(*_series(rows, "eval/accuracy"), "o-", label="validation, sampled")
    axis.plot(*_series(rows, "eval/accuracy_greedy"), "s", label="validation, greedy")
    axis.set_ylim(0, 1.02)
    axis.set_title("accuracy")
    axis.legend()


def _phases(axis: plt.Axes, rows: list[Row]) -> None:
    values = [[row[f"time/{phase}"] for row in rows] for phase in PHASES]
    axis.stackplot([row["step"] for row in rows], values, labels=PHASES)
    # The first step compiles and would dominate the scale.
    later = [row["time/total"] for row in rows[1:]] or [row["time/total"] for row in rows] or [1.0]
    axis.set_ylim(0, 1.2 * max(later))
    axis.set_title("seconds per step, by phase (step 1 compiles)")
    axis.legend(loc="upper right", ncols=len(PHASES), fontsize=7)


def _acceptance(axis: plt.Axes, rows: list[Row]) -> None:
    rates = sorted({name for row in rows for name in row if name.startswith("spec/acceptance_rate_pos_")})
    for name in rates:
        axis.plot(*_series(rows, name), label=f"draft {name.rpartition('_')[2]} accepted", alpha=0.8)
    axis.set_ylim(0, 1.02)
    axis.set_ylabel("share of verifications")
    axis.legend(loc="lower left", fontsize=8)
    other = axis.twinx()
    other.plot(*_series(rows, "spec/acceptance_length"), color="black", label="tokens per verification")
    other.set_ylim(0, 1.02 * (len(rates) + 1))
    other.set_ylabel("tokens per verification (black)")
    axis.set_title("acceptance")


def _pair(axis: plt.Axes, rows: list[Row], left: str, left_label: str, right: str, right_label: str) -> None:
    axis.plot(*_series(rows, left), color="tab:blue")
    axis.set_ylabel(left_label, color="tab:blue")
    other = axis.twinx()
    other.plot(*_series(rows, right), color="tab:orange")
    other.set_ylabel(right_label, color="tab:orange")
