"""Compare the train phase on packed and on padded rows, at the tiny task's lengths.

    python -m experiments.grpo_step.packing --rounds 9 --output experiments/grpo_step/packing.csv

Policy, prompts and shapes are those of configs/rlzero_tiny.py: 128 rollouts of its base, one update, packed into rows
as in training. Each round times the log-probs and the update of both layouts; the order alternates. The CSV has one row
per round.
"""

import sys
import time
from typing import Any

import jax
import numpy as np

from configs import rlzero_tiny
from experiments import commands
from experiments.engine import bench
from experiments.parts import Parts, make_parts
from specrl_jax.data.sources import ProblemStream
from specrl_jax.data.tasks import TaskSource
from specrl_jax.learner.batch import LearnerBatch, TrainingBatch, learner_batch
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.sharding import make_mesh
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_state
from specrl_jax.training.update import score

FIELDS = ("round", "padded_rows", "packed_rows", "padded_logprob", "packed_logprob", "padded_train", "packed_train")


def make_training_batch(parts: Parts, weights: Any) -> TrainingBatch:
    """Return one step's rollouts with made-up advantages."""
    s = parts.learner.plan.config
    source = TaskSource(s.data.task, "train", s.seed)
    problems = next(ProblemStream([source], s.grpo.prompts_per_step, s.seed))
    prompts = [parts.rollout.tokenizer.encode_prompt(problem.prompt) for problem in problems]
    rollouts = parts.rollout.engine.generate(weights, prompts, s.grpo.group_size, seed=0)
    advantages = np.random.default_rng(0).normal(size=len(rollouts.length)).astype(np.float32)
    return TrainingBatch(rollouts, advantages, np.ones(len(advantages), bool))


def batches(parts: Parts, weights: Any) -> dict[str, LearnerBatch]:
    """Return one step's rollouts in both layouts."""
    batch, pad_id = make_training_batch(parts, weights), parts.rollout.tokenizer.pad_id
    return {"padded": learner_batch(batch, pad_id), "packed": learner_batch(batch, pad_id, parts.learner.packing)}


def timed(parts: Parts, state: Any, batch: LearnerBatch) -> tuple[Any, float, float]:
    """Time one step; return (policy, seconds of the log-prob pass, seconds of the update)."""
    start = time.perf_counter()
    old = score(parts.learner, state.params, batch.rows)
    middle = time.perf_counter()
    inputs: Any = LossInputs(old, None, batch.advantages)  # type: ignore[arg-type]  # numpy, as the loop gives them
    state, _, outputs = parts.learner.policy_step(state, parts.learner.microbatches((batch.rows, inputs)))
    jax.block_until_ready((state, outputs))
    return state, middle - start, time.perf_counter() - middle


def measure(rounds: int, prompts: int) -> list[dict[str, Any]]:
    config = rlzero_tiny.get_config()
    config.grpo.prompts_per_step = prompts
    config.draft.kind, config.draft.path = "none", ""
    parts = make_parts(config, make_mesh(config.mesh.to_dict()))
    state = initial_state(parts.learner)
    found = batches(parts, prepare(parts.learner, parts.rollout, state)[0])
    policy, rows = state.policy, list[bench.Row]()
    for i in range(-1, rounds):  # the first compiles
        row: bench.Row = {"round": i} | {f"{name}_rows": len(batch.rows.tokens) for name, batch in found.items()}
        for name in sorted(found, reverse=i % 2 == 0):
            policy, row[f"{name}_logprob"], row[f"{name}_train"] = timed(parts, policy, found[name])
        rows.append(row)
    return rows[1:]


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(rounds=(9, 1), prompts=(16, 2, "with eight rollouts each"))
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.prompts)
    with bench.csv_writer(arguments.output, FIELDS) as write:
        for row in rows:
            write(row)
    print(f"{rows[0]['padded_rows']} padded rows, {rows[0]['packed_rows']} packed")
    for phase in ("logprob", "train"):
        ratios = bench.quartiles([row[f"padded_{phase}"] / row[f"packed_{phase}"] for row in rows])
        print(f"{phase}: speedup by packing {ratios}")


if __name__ == "__main__":
    sys.exit(commands.run(main))
