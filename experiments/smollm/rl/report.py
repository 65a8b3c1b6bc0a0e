"""Write the table and the figure of RL on SmolLM2-135M.

    python -m experiments.launch --config configs/smollm2_135m.py --sweep experiments/smollm/rl/sweep.py
    python -m experiments.smollm.rl.report --workdir runs/sweeps/smollm2_135m_rl

Writes results.csv (one row per step and run, step 0 before training), the table of ../README.md and rl.png; without
--workdir table and figure alone, from results.csv.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.claims import STYLES, error, markdown, put_table, save
from experiments.engine import bench
from experiments.smollm.rl.sweep import get_sweep
from experiments.sweep_report import run_report
from experiments.verdicts import Interval
from specrl_jax.io.plots import COLOURS

Row = dict[str, Any]
HERE = pathlib.Path(__file__).parent
ACCURACY = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
FORMAT, KEPT = "reward/answer_line_format", "spec/acceptance_length"
FIELDS = ["head", "seed", "step", *ACCURACY, "eval/accuracy_greedy", "reward/math", FORMAT]
FIELDS += ["rollout/response_length_mean", KEPT, "rollout_vs_learner/kl", "time/generate", "time/train", "time/total"]
ASKED = 0.15  # of a run's gain in correctness, format apart
WINDOW = 5  # steps averaged


def name_run(run: Row) -> Row:
    return {"head": "learning" if run["draft.online"] else "frozen", "seed": run["seed"]}


def accuracies(rows: Sequence[Row]) -> dict[int, Interval]:
    """Return step -> share of the validation problems answered rightly, sampled as in training."""
    return {row["step"]: Interval(*(row[name] for name in ACCURACY)) for row in rows if ACCURACY[0] in row}


def series(rows: Sequence[Row], name: str) -> dict[int, float]:
    """Return step -> a metric of the steps that have it."""
    return {row["step"]: row[name] for row in rows if name in row}


def change(rows: Sequence[Row], name: str) -> str:
    """Return the means of a metric over the first and the last WINDOW steps."""
    values = [*series(rows, name).values()]
    return f"{np.mean(values[:WINDOW]):.2f} to {np.mean(values[-WINDOW:]):.2f}"


def write_table(rows: list[Row]) -> None:
    """Print what each run gained, what its drafts kept and how long a step took; write it into the page."""
    lines = []
    for head, seed in bench.distinct(rows, "head", "seed"):
        run = bench.matching(rows, head=head, seed=seed)
        found = accuracies(run)
        first, last = found[min(found)], found[max(found)]
        gain = f"{last.mean - first.mean:+.2f}" + (" (**missed**)" if last.mean - first.mean < ASKED else "")
        seconds = np.median([*series(run, "time/total").values()])
        lines.append([head, seed, max(found), first.text(), last.text(), gain, change(run, FORMAT), change(run, KEPT)])
        lines[-1].append(f"{seconds:.0f}")
    names = ["head", "seed", "steps", "right before", "right after", "gain", "format"]
    text = markdown([*names, "tokens per verification", "seconds a step"], lines)
    print(text)
    put_table(HERE.parent / "README.md", text, "rl")


def draw(rows: list[Row]) -> None:
    """Draw correctness and format, and tokens per verification, by step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for i, (head, seed) in enumerate(bench.distinct(rows, "head", "seed")):
        run = bench.matching(rows, head=head, seed=seed)
        found, look = accuracies(run), {"color": COLOURS[i], "ms": 4, "label": f"{head} head, seed {seed}"}
        means = [interval.mean for interval in found.values()]
        left.errorbar([*found], means, error([*found.values()]), fmt=STYLES[i], capsize=3, **look)
        left.plot(*zip(*series(run, FORMAT).items()), ":", color=COLOURS[i], label=f"its format, seed {seed}")
        right.plot(*zip(*series(run, KEPT).items()), STYLES[i], **look)
    left.set(xlabel="RL step", ylabel="share", ylim=(0, 1), title="Right answers (256 problems); format (rollouts)")
    right.set(xlabel="RL step", ylabel="tokens per verification, k = 3", title="What the drafts kept")
    for axis in (left, right):
        axis.legend(fontsize=8)
    save(figure, HERE / "rl.png")


if __name__ == "__main__":
    run_report(__doc__, HERE, get_sweep(), FIELDS, (write_table, draw), name_run)
