"""Kill a run (`kill -9`) at random moments, half of them during a save, and resume it by the same command.

    python -m experiments.robustness.kills --kills 20 --output experiments/robustness/kills.json

One run of configs/rlzero_tiny.py:smoke with a checkpoint every step is not interrupted. Then, for each kill, the same
run in another workdir is killed and started again by the same command, without cleaning up. At the end the last
checkpoint (parameters, moments, draft, data position, host state) and all metrics except times must be bit-equal to
those of the uninterrupted run.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.rlzero_tiny.speedup import restored
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.workdir import versions

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 30
OVERRIDES = {"steps": STEPS, "checkpoint.every": 1, "draft.adaptive": False, "draft.compare_rounds": 0}
TIMED = ("time/", "perf/", "draft/seconds", "rollout/tokens_per_second")


def start(workdir: str) -> subprocess.Popen:
    command = [sys.executable, "main.py", "--config", "configs/rlzero_tiny.py:smoke", "--workdir", workdir]
    command += [f"--config.{key}={value}" for key, value in OVERRIDES.items()]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(workdir: str) -> None:
    """Run the command to its end. Raises RuntimeError with its output if it fails."""
    process = start(workdir)
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(said)


def kill_at(workdir: str, reached: Callable[[], bool]) -> bool:
    """Start the command and kill it when `reached` holds; return False if it ended before."""
    process = start(workdir)
    while process.poll() is None and not reached():
        time.sleep(0.0005)
    process.kill()
    process.communicate()
    return process.returncode < 0


def rows_written(workdir: str) -> int:
    path = os.path.join(workdir, "metrics.jsonl")
    return pathlib.Path(path).read_bytes().count(b"\n") if os.path.exists(path) else 0


def saving(workdir: str) -> bool:
    """Return whether a checkpoint is half written."""
    folder = os.path.join(workdir, "checkpoints")
    return os.path.isdir(folder) and any("tmp" in name for name in os.listdir(folder))


def kept(workdir: str) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """Return (state, host state, metrics rows without times) of a finished run."""
    _, state, host = restored(workdir)
    rows = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(workdir)]
    return jax.device_get(state), host.values, rows


def equal(one: Any, other: Any) -> bool:
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b, equal_nan=True)), one[0], other[0])
    return all(jax.tree.leaves(same)) and one[1:] == other[1:]


def killed_once(workdir: str, rng: random.Random, in_a_save: bool) -> dict[str, Any]:
    """Kill one run, finish it, and return what was found at the moment of the kill."""
    row, delay = rng.randint(1, STEPS - 2), rng.uniform(0, 0.3)
    ready = []

    def reached() -> bool:
        if rows_written(workdir) <= row:
            return False
        if in_a_save:
            return saving(workdir)
        ready.append(time.monotonic())
        return time.monotonic() - ready[0] >= delay

    was_killed = kill_at(workdir, reached)
    found = {"killed": was_killed, "rows": rows_written(workdir), "half_written_checkpoint": saving(workdir)}
    finish(workdir)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    rng, results = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        alone = os.path.join(folder, "alone")
        finish(alone)
        expected = kept(alone)
        for i in range(arguments.kills):
            workdir = os.path.join(folder, f"killed_{i}")
            found = killed_once(workdir, rng, in_a_save=i % 2 == 1)
            results.append(found | {"bit_equal": equal(kept(workdir), expected)})
            print(f"kill {i}: {results[-1]}", flush=True)
    good = sum(result["bit_equal"] for result in results)
    report = {"bit_equal": good, "kills": results, "steps": STEPS, "versions": versions()}
    pathlib.Path(arguments.output).write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"{good} of {len(results)} runs ended bit-equal; {sum(r['half_written_checkpoint'] for r in results)} in a save"
    )
    sys.exit(good < len(results))


if __name__ == "__main__":
    main()
