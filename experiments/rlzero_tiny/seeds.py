"""`rlzero_tiny` over three seeds: runs them one after the other, then writes results.csv and learning.png.

    python -m experiments.rlzero_tiny.seeds --workdir runs/rlzero_tiny_seeds

A run that is finished in the workdir is not run again.
"""

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import time

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
SEEDS = (0, 1, 2)
FIELDS = (
    "seed",
    "step",
    "eval/accuracy",
    "eval/accuracy_greedy",
    "reward/mean",
    "time/data",
    "time/prepare",
    "time/generate",
    "time/logprob",
    "time/train",
    "time/total",
    "rollout/tokens_per_second",
)


def run(seed: int, workdir: str) -> list[dict]:
    """Metrics rows of one seed; weights are the same base, data order and all sampling differ."""
    command = [sys.executable, "main.py", "--config", "configs/rlzero_tiny.py", "--workdir", workdir]
    command += [f"--config.seed={seed}", f"--config.rollout.seed={seed}"]
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=HERE.parents[1], stdout=subprocess.DEVNULL)
    print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    with open(os.path.join(workdir, "metrics.jsonl")) as file:
        return [{"seed": seed} | json.loads(line) for line in file]


def write(rows: list[dict]) -> None:
    with open(HERE / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot() -> None:
    """Reads results.csv alone."""
    with open(HERE / "results.csv") as file:
        rows = list(csv.DictReader(file))
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, seed in enumerate(SEEDS):
        for name, style, label in (("eval/accuracy", "o-", "sampled"), ("eval/accuracy_greedy", "s", "greedy")):
            points = [(int(r["step"]), float(r[name])) for r in rows if int(r["seed"]) == seed and r[name]]
            axis.plot(*zip(*points, strict=True), style, color=f"C{index}", label=f"seed {seed}, {label}")
    axis.set(xlabel="RL step", ylabel="validation accuracy, 256 problems", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=3, loc="lower right")
    figure.savefig(HERE / "learning.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, help="folder for the three runs")
    workdir = parser.parse_args().workdir
    rows = [row for seed in SEEDS for row in run(seed, os.path.join(workdir, f"seed_{seed}"))]
    write(rows)
    plot()
    for seed in SEEDS:
        first, last = [row for row in rows if row["seed"] == seed][:: len(rows) // len(SEEDS) - 1]
        for name in ("eval/accuracy", "eval/accuracy_greedy"):
            print(f"seed {seed} {name}: {first[name]:.3f} -> {last[name]:.3f} ({last[name] - first[name]:+.3f})")


if __name__ == "__main__":
    main()
