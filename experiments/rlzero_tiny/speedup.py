"""Measure generation with speculation relative to draft.kind=none on the final weights of a run.

    python -m experiments.rlzero_tiny.speedup --workdir runs/rlzero_tiny --output speedup.csv

Both sides run in one process on the same prompts and weights in alternating rounds, at temperature 1 with sampled
drafts. A ratio is that of generated tokens per second; both sides run to their longest rollout.
"""

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import commands
from experiments.claims import write_rows
from experiments.engine.bench import quartiles
from experiments.parts import Parts, make_parts
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.learner.state import RunState
from specrl_jax.planning.plan import make_plan
from specrl_jax.rollout.build import make_rollout
from specrl_jax.sharding import make_mesh
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import abstract_run_state
from specrl_jax.training.resume import open_checkpoints
from specrl_jax.training.speedup import Workload, measure_speedup

PROMPTS = 128


def restored(workdir: str) -> tuple[Parts, RunState, HostState]:
    """Return (parts, state, host state) of the run's last checkpoint."""
    with open(os.path.join(workdir, "config.json")) as file:
        config = ConfigDict(json.load(file)["config"])
    parts = make_parts(config, make_mesh(config.mesh.to_dict()))
    checkpoints = open_checkpoints(parts.learner.plan.config, workdir)
    step = checkpoints.latest()
    assert step is not None, f"{workdir}: no checkpoint"
    return parts, *checkpoints.restore(step, abstract_run_state(parts.learner))


def load(workdir: str) -> tuple[Parts, Any]:
    """Return (parts, weights) of the run's last checkpoint."""
    parts, state, _ = restored(workdir)
    return parts, prepare(parts.learner, parts.rollout, state)[0]


def measure(parts: Parts, weights: Any, slots: int, k: int, rounds: int) -> np.ndarray:
    """Return [rounds] ratios with `slots` concurrent sequences and k drafted tokens."""
    s = parts.learner.plan.config
    config = dataclasses.replace(s, draft=dataclasses.replace(s.draft, length=k))
    config = dataclasses.replace(config, rollout=dataclasses.replace(s.rollout, num_slots=slots))
    rollout = make_rollout(make_plan(config, parts.learner.plan.learner_partition.mesh))
    prompts = [rollout.tokenizer.encode_prompt(problem.prompt) for problem in parts.problems.evaluation][:PROMPTS]
    return measure_speedup(
        rollout.engine, rollout.plain_engine, weights, work=Workload(prompts, 1, seed=0), rounds=rounds
    )


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(slots=([8], [2]), lengths=([1, 2, 3, 5], [1]), rounds=(9, 1))
    parser.add_argument("--workdir", required=True, nargs="+", help="workdirs of finished runs")
    parser.add_argument("--output", required=True, type=pathlib.Path)
    a = parser.parse_args()
    for workdir in a.workdir:
        if not os.path.isdir(os.path.join(workdir, "checkpoints")):
            parser.error(f"--workdir {workdir}: no finished run in it")
    rows = []
    for workdir in a.workdir:
        parts, weights = load(workdir)
        for slots in a.slots:
            for k in a.lengths:
                ratios = measure(parts, weights, slots, k, a.rounds)
                run = os.path.basename(os.path.normpath(workdir))
                rows += [{"run": run, "slots": slots, "k": k, "round": i, "ratio": r} for i, r in enumerate(ratios)]
                print(f"{run}  {slots} sequences, k = {k}: {quartiles(ratios)} times plain decoding", flush=True)
    write_rows(a.output, rows)


if __name__ == "__main__":
    sys.exit(commands.run(main))
