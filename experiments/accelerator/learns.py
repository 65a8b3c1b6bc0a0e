"""An RL run that learns, with drafts and without: configs/rlzero_tiny.py whole, one seed, and are the tokens the
same?

    python -m experiments.accelerator.learns [--output runs/learns]
    python -m experiments.accelerator.learns --small --output runs/learns_small    # a few steps, on any machine

Both runs use the rule `coupled` and `rollout.parity`, under which every rollout of every step must have the same
tokens. Each is a process of its own, started as a user starts it. Writes `learning.csv` (accuracy, reward and seconds
by step and side), `results.json` and `learning.png` into the folder, and exits with status 1 where tokens differ. The
same command resumes.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.demo.same_tokens import tokens
from experiments.runs import REPOSITORY
from specrl_jax.io.metrics import StepMetrics, read_metrics

SIDES = {"drafts": {}, "plain": {"draft.kind": "none"}}
EXACT = {"rollout.rule": "coupled", "rollout.parity": True, "grpo.old_logprobs": "learner"}
# Of each step, all rollouts are kept, to be compared.
RUN = {"eval.every": 10, "logging.rollouts": 1024, "draft.compare_rounds": 0}
FIELDS = ("side", "step", "eval/accuracy", "reward/mean", "time/total", "time/generate", "rollout/tokens")
SMALL = {"steps": 2, "eval.every": 1, "rollout.max_response_tokens": 8, "grpo.prompts_per_step": 2}


def command(side: str, workdir: Path, small: bool) -> list[str]:
    """Return the command of main.py for one side."""
    values: dict[str, Any] = EXACT | RUN | SIDES[side] | (SMALL if small else {})
    config = "configs/rlzero_tiny.py" + (":smoke" if small else "")
    flags = [f"--config.{name}={value}" for name, value in values.items()]
    return [sys.executable, "main.py", "--config", config, *flags, "--workdir", str(workdir)]


def rollouts_that_differ(folders: list[Path]) -> tuple[int, int]:
    """Return how many rollouts of all steps differ between the two runs, of how many."""
    steps = [sorted(path.name for path in (folder / "rollouts").glob("step_*.jsonl")) for folder in folders]
    if steps[0] != steps[1] or not steps[0]:
        raise RuntimeError(f"the runs kept rollouts of {len(steps[0])} and {len(steps[1])} steps")
    differ = count = 0
    for name in steps[0]:
        first, second = (tokens(folder / "rollouts" / name) for folder in folders)
        count += len(first.keys() | second.keys())
        differ += sum(first.get(i) != second.get(i) for i in first.keys() | second.keys())
    return differ, count


def draw(rows: dict[str, list[StepMetrics]], path: Path) -> None:
    """Draw accuracy by step, and by seconds of the steps before."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for side, found in rows.items():
        seen = [(row["step"], row["eval/accuracy"]) for row in found if "eval/accuracy" in row]
        spent = {row["step"]: sum(r.get("time/total", 0.0) for r in found if r["step"] <= row["step"]) for row in found}
        axes[0].plot([step for step, _ in seen], [a for _, a in seen], "o-", label=side)
        axes[1].plot([spent[step] for step, _ in seen], [a for _, a in seen], "o-", label=side)
    axes[0].set(xlabel="step", ylabel="validation accuracy")
    axes[1].set(xlabel="seconds of steps, compiling among them")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def summary(rows: list[StepMetrics], seconds: float) -> dict[str, Any]:
    """Return accuracies, and the seconds of the process and of its steps but the first, which compiles."""
    steps = [row for row in rows if row["step"] > 1]
    return {
        "accuracy": [row["eval/accuracy"] for row in rows if "eval/accuracy" in row],
        "process_seconds": seconds,
        "step_seconds": sum(row["time/total"] for row in steps),
        "generate_seconds": sum(row["time/generate"] for row in steps),
        "acceptance_length": [row["spec/acceptance_length"] for row in steps if "spec/acceptance_length" in row][-1:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/learns"), help="folder")
    parser.add_argument("--small", action="store_true", help="a few steps of random weights; its figures mean nothing")
    a = parser.parse_args()
    output, found, rows = a.output.resolve(), {}, {}
    output.mkdir(parents=True, exist_ok=True)
    for side in SIDES:
        start = time.perf_counter()
        environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if a.small else {})
        done = subprocess.run(command(side, output / side, a.small), cwd=REPOSITORY, env=environment)
        if done.returncode:
            return done.returncode
        rows[side] = read_metrics(str(output / side))
        found[side] = summary(rows[side], time.perf_counter() - start)
    with open(output / "learning.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({"side": side} | row for side in SIDES for row in rows[side])
    draw(rows, output / "learning.png")
    differ, count = rollouts_that_differ([output / side for side in SIDES])
    config = json.loads((output / "plain" / "config.json").read_text())
    results = {"sides": found, "rollouts": count, "rollouts_that_differ": differ, "versions": config.get("versions")}
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{differ} of {count} rollouts differ; written: {output}/learning.csv, results.json, learning.png")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
