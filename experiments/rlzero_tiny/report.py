"""Tables and figure of the six runs of sweep.py: accuracy with and without speculation.

    python -m experiments.launch --config configs/rlzero_tiny.py --sweep experiments/rlzero_tiny/sweep.py
    python -m experiments.rlzero_tiny.report --workdir runs/sweeps/rlzero_tiny_rlzero_tiny

Writes results.csv (one row per step and run) and learning.png beside this file; without --workdir the figure alone,
from results.csv.
"""

import pathlib
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import COLOURS
from experiments.rlzero_tiny.sweep import get_sweep
from experiments.sweep_report import run_report
from experiments.verdicts import welch
from specrl_jax.core import PHASES

HERE = pathlib.Path(__file__).parent
KINDS = {"eagle3": "speculation", "none": "plain"}
FIELDS = (
    ["draft.kind", "seed", "step", "eval/accuracy", "eval/accuracy_greedy", "reward/mean"]
    + [f"time/{phase}" for phase in PHASES]
    + ["time/total", "rollout/tokens_per_second", "rollout_vs_learner/logprob_abs_max", "spec/acceptance_length"]
    + [f"spec/acceptance_rate_pos_{i}" for i in (1, 2, 3)]
    + ["draft/loss", "draft/seconds", "spec/speedup", "spec/speedup_low", "spec/speedup_high"]
)


def run_rows(rows: list[dict[str, Any]], kind: str, seed: int) -> list[dict[str, Any]]:
    return [row for row in rows if (row["draft.kind"], row["seed"]) == (kind, seed)]


def seeds(rows: list[dict[str, Any]]) -> list[int]:
    return sorted({row["seed"] for row in rows})


def plot(rows: list[dict[str, Any]]) -> None:
    figure, (learning, acceptance) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for seed in seeds(rows):
        for kind, style in (("eagle3", "o-"), ("none", "x--")):
            points = [(r["step"], r["eval/accuracy"]) for r in run_rows(rows, kind, seed) if "eval/accuracy" in r]
            label = f"seed {seed}, {KINDS[kind]}"
            learning.plot(*zip(*points, strict=True), style, color=COLOURS[seed], label=label)
        steps = run_rows(rows, "eagle3", seed)[1:]
        lengths = [r["spec/acceptance_length"] for r in steps]
        acceptance.plot([r["step"] for r in steps], lengths, color=COLOURS[seed], label=f"seed {seed}")
    learning.set(xlabel="RL step", ylabel="validation accuracy, sampled, 256 problems", ylim=(0, 1.02))
    acceptance.set(xlabel="RL step", ylabel="tokens per verification, k = 3", ylim=(1, 4))
    for axis in (learning, acceptance):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    figure.savefig(HERE / "learning.png", dpi=110)
    plt.close(figure)


def print_tables(rows: list[dict[str, Any]]) -> None:
    for name in ("eval/accuracy", "eval/accuracy_greedy"):
        after = {}
        for kind in KINDS:
            ends = [(run_rows(rows, kind, seed)[0][name], run_rows(rows, kind, seed)[-1][name]) for seed in seeds(rows)]
            after[kind] = np.array([last for _, last in ends])
            shown = "  ".join(f"{first:.3f} -> {last:.3f} ({last - first:+.3f})" for first, last in ends)
            print(f"{name}  {KINDS[kind]:<12} {shown}")
        difference = welch(after["eagle3"], after["none"]).text("+.4f")
        print(f"{name}  speculation - plain at the end: {difference} (95 %)")
    for seed in seeds(rows):
        steps = run_rows(rows, "eagle3", seed)[1:]
        last = steps[-1]
        print(
            f"seed {seed}: acceptance length {steps[0]['spec/acceptance_length']:.3f} -> "
            f"{np.mean([r['spec/acceptance_length'] for r in steps[-5:]]):.3f} (mean of the last five steps); "
            f"generation {last['spec/speedup']:.2f}x plain ({last['spec/speedup_low']:.2f} to "
            f"{last['spec/speedup_high']:.2f}), 128 sequences"
        )
    for kind in KINDS:
        timed = [r for seed in seeds(rows) for r in run_rows(rows, kind, seed)[2:]]
        shown = "  ".join(f"{p} {np.median([r[f'time/{p}'] for r in timed]):.3f}" for p in (*PHASES, "total"))
        print(f"median step, {KINDS[kind]:<12} {shown} s")


if __name__ == "__main__":
    run_report(__doc__, HERE, get_sweep(), FIELDS, (plot, print_tables))
