"""Measure what a frozen EAGLE-3 head adds to the train phase.

    python -m experiments.step_breakdown.train_phase --rounds 40 --output experiments/step_breakdown/train_phase.csv

Between the processes of `sweep.py` the speed of a shared machine varies by more than that. Here one process trains on
the same rollouts of rlzero_tiny:small with and without the head in turn; the order alternates. The CSV has one row per
round, in seconds.
"""

import sys
import time
from typing import Any

import jax

from configs import rlzero_tiny
from experiments import commands
from experiments.engine import bench
from experiments.grpo_step.packing import make_training_batch
from experiments.parts import Parts, make_parts
from experiments.verdicts import interval
from specrl_jax.data.rows import Rows
from specrl_jax.learner.batch import learner_batch
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.sharding import make_mesh
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_state
from specrl_jax.training.update import score, update

KINDS = ("none", "eagle3")


def make_case(kind: str, variant: str) -> Parts:
    config = rlzero_tiny.get_config(variant)
    config.draft.kind, config.draft.online = kind, False
    if kind == "none":
        config.draft.path = ""
    return make_parts(config, make_mesh(config.mesh.to_dict()))


def first_step(parts: Parts) -> tuple[Rows, LossInputs]:
    """Return the rows and loss inputs of one step, with the learner's old log-probs."""
    state = initial_state(parts.learner)
    rollouts = make_training_batch(parts, prepare(parts.learner, parts.rollout, state)[0])
    batch = learner_batch(rollouts, parts.rollout.tokenizer.pad_id, parts.learner.packing)
    old: Any = score(parts.learner, state.policy.params, batch.rows)
    return batch.rows, LossInputs(old, None, batch.advantages)  # type: ignore[arg-type]  # numpy


def measure(rounds: int, variant: str) -> list[dict[str, Any]]:
    cases = {kind: make_case(kind, variant) for kind in KINDS}
    states = {kind: initial_state(parts.learner) for kind, parts in cases.items()}
    rows, inputs = first_step(cases["eagle3"])
    found = []
    for i in range(-1, rounds):  # the first compiles
        row: dict[str, Any] = {"round": i}
        for kind in sorted(KINDS, reverse=i % 2 == 0):
            start = time.perf_counter()
            states[kind], _ = update(cases[kind].learner, states[kind], rows, inputs=inputs, train_draft=False)
            jax.block_until_ready(states[kind])
            row[kind] = time.perf_counter() - start
        found.append(row)
    return found[1:]


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(rounds=(40, 1), variant=("small", "smoke", "of configs/rlzero_tiny.py"))
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.variant)
    with bench.csv_writer(arguments.output, ("round", *KINDS)) as write:
        for row in rows:
            write(row)
    ratios = [row["eagle3"] / row["none"] for row in rows]
    print(f"train phase with a frozen head, relative to none: {interval(ratios)}, {bench.quartiles(ratios)}")


if __name__ == "__main__":
    sys.exit(commands.run(main))
