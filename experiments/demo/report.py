"""Table of the demo's seeds: accuracy, speedup of rollouts, accepted drafts, shares of a step.

    python -m experiments.launch --config configs/demo.py --sweep experiments/demo/sweep.py --jobs 1
    python -m experiments.demo.report --workdir runs/sweeps/demo_demo

Writes results.csv (one row per step and seed) beside this file. A plain step is a step of the run with the seconds of
its rollouts times the speedup of the closing comparison, and without those of the draft's training.
"""

import pathlib

import numpy as np

from experiments.claims import markdown
from experiments.demo.sweep import get_sweep
from experiments.engine.bench import distinct, matching
from experiments.sweep_report import Table, run_report
from specrl_jax.core import PHASES

HERE = pathlib.Path(__file__).parent
SPEEDUP = ["spec/speedup", "spec/speedup_low", "spec/speedup_high"]
FIELDS = (
    ["seed", "step", "eval/accuracy", "reward/mean", "rollout/response_length_mean"]
    + [f"time/{phase}" for phase in PHASES]
    + ["time/total", "draft/seconds", "rollout/tokens_per_second", "spec/acceptance_length", *SPEEDUP]
    + ["rollout_vs_learner/logprob_abs_max"]
)


def plain_share(steps: Table) -> float:
    """Return the share of generation in a plain step, of medians over all steps but the first, which compiles."""
    generate, total, draft = (
        float(np.median([row[name] for row in steps[1:]])) for name in ("time/generate", "time/total", "draft/seconds")
    )
    plain = generate * steps[-1]["spec/speedup"]
    return plain / (total - generate - draft + plain)


def print_table(rows: Table) -> None:
    """Print a line per seed."""
    header = ["seed", "accuracy, sampled", "rollouts' speedup", "accepted of k", "generation's share of a plain step"]
    print(markdown(header, [_cells(matching(rows, seed=seed)) for (seed,) in sorted(distinct(rows, "seed"))]))


def _cells(run: Table) -> list[str]:
    first, *steps = run
    last = steps[-1]
    before, after = first["eval/accuracy"], last["eval/accuracy"]
    speedup, low, high = (last[name] for name in SPEEDUP)
    accepted = float(np.median([row["spec/acceptance_length"] for row in steps])) - 1
    return [
        f"{first['seed']}",
        f"{before:.3f} -> {after:.3f} ({after - before:+.3f})",
        f"{speedup:.2f} ({low:.2f} to {high:.2f})",
        f"{accepted:.2f}",
        f"{plain_share(steps):.0%}",
    ]


if __name__ == "__main__":
    run_report(__doc__, HERE, get_sweep(), FIELDS, (print_table,))
