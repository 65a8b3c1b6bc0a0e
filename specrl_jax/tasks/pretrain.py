"""task=pretrain: a small base policy by next-token prediction on worked solutions of a built-in task, many wrong."""

import dataclasses
import json
import os
import threading
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specrl_jax.config import Config
from specrl_jax.core import Mean, Params, masked_mean, open_written
from specrl_jax.data.problem import TURN_END, Problem
from specrl_jax.data.rows import Rows, make_rows, packed_rows
from specrl_jax.data.sources import ProblemStream
from specrl_jax.data.tasks import TaskSource
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.io.progress import Display
from specrl_jax.io.signals import stop_on_signal, stopped_as
from specrl_jax.io.workdir import open_output, open_workdir, try_workdir
from specrl_jax.learner.batch import Packing, pack_alike, power_of_two
from specrl_jax.learner.build import Learner
from specrl_jax.learner.microbatches import Update, make_add
from specrl_jax.learner.optimizer import apply_gradient
from specrl_jax.learner.policy_step import PolicyForward
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.planning.problems import Problems, load_problems
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.rollout.scoring import make_scorer
from specrl_jax.sharding import Partitioner
from specrl_jax.tasks.export import output_folder
from specrl_jax.training.build import build, prepare
from specrl_jax.training.evaluate import evaluation_metrics
from specrl_jax.training.initial import initial_state

LOG_EVERY = 50  # steps
SHORTEST = 256  # row, tokens


def run(config: Config, workdir: str) -> None:
    """Train a policy from random weights into `export.output`."""
    learner, rollout = build(config)
    try_workdir(workdir, dataclasses.asdict(config))
    open_output("export.output", output_folder(config, workdir))
    problems = load_problems(config, rollout.tokenizer)
    with make_scorer(config, problems.first_rows(rollout.tokenizer)) as scorer:
        open_workdir(workdir, dataclasses.asdict(config))
        pretrain(learner, rollout, problems, scorer=scorer, workdir=workdir, stop=stop_on_signal())


def pretrain(
    learner: Learner,
    rollout: RolloutEngines,
    problems: Problems,
    *,
    scorer: Scorer,
    workdir: str,
    stop: threading.Event,
) -> list[dict[str, float]]:
    """Train from random weights, and write `export.output` as a Hugging Face folder.

    Returns the log: loss in nats per response token every 50 steps, at the end eval/* of the weights as stored. It is
    written to log.jsonl in the workdir and beside the weights.
    """
    config, model = learner.plan.config, learner.plan.model
    output, dtype = output_folder(config, workdir), config.export.dtype
    source = TaskSource(config.data.task, "train", config.seed, error_rate=config.pretrain.error_rate)
    stream = ProblemStream([source], config.pretrain.batch_size, config.seed)
    state = initial_state(learner).policy
    step_fn = make_pretrain_step(learner.forward, learner.optimizer, learner.plan.learner_partition)
    log: list[dict[str, float]] = []
    with Display(config.steps, 0, stop) as display:
        rollout.announce(display.say_engine_program, display.say_begun)
        for step in range(1, config.steps + 1):
            with stopped_as(f"pretraining keeps no checkpoints; step {step} is lost"):
                display.update_phase(step, config.steps)
            rows = solution_rows(next(stream), rollout.tokenizer, learner.packing)
            state, loss, _ = step_fn(state, [(part,) for part in learner.microbatches(rows)])
            if step % LOG_EVERY == 0 or step == config.steps:
                log.append({"step": step, "loss": float(loss.value())})
                display.finish_step(step, f"loss {log[-1]['loss']:.4f} nats/token")
        log = log or [{"step": 0}]
        stored = jax.tree.map(lambda w: w.astype(dtype).astype(jnp.float32), state.params)
        weights, _ = prepare(learner, rollout, RunState(dataclasses.replace(state, params=stored), None, None))
        hf.save_params(output, stored, model, dtype=dtype)
        write_log(log, workdir, output)
        with stopped_as(f"the policy is in {output}; its evaluation is missing"):
            log[-1] |= evaluation_metrics(
                rollout, weights, problems, scorer=scorer, step=config.steps, workdir=workdir, display=display
            )
    write_log(log, workdir, output)
    return log


def write_log(log: Sequence[Mapping[str, float | None]], *folders: str) -> None:
    """Write log.jsonl to each folder."""
    for folder in folders:
        with open_written(os.path.join(folder, "log.jsonl")) as file:
            file.writelines(json.dumps(row) + "\n" for row in log)


def make_pretrain_step(
    forward: PolicyForward, optimizer: optax.GradientTransformation, partition: Partitioner
) -> Update[TrainState, None, Mean]:
    """Return the update by the mean cross-entropy in nats, its metrics; a microbatch is (rows,)."""

    def loss(params: Params, rows: Rows) -> tuple[jax.Array, Mean]:
        logprobs = forward.apply(params, rows, partition).logprobs
        assert logprobs is not None  # rows have targets
        mean = masked_mean(-logprobs, rows.mask)
        return mean.total, mean

    def gradient(state: TrainState, rows: Rows) -> tuple[tuple[Params, Mean], None]:
        return jax.grad(loss, has_aux=True)(state.params, rows), None

    def apply(state: TrainState, sums: tuple[Params, Mean]) -> tuple[TrainState, Mean]:
        gradient = jax.tree.map(lambda g: g / jnp.maximum(sums[1].count, 1.0), sums[0])
        healthy = jnp.isfinite(optax.tree.norm(gradient))
        updated, _ = apply_gradient(state, gradient, optimizer, healthy)
        return dataclasses.replace(updated, step=state.step + 1), sums[1]

    sums = partition.shardings(forward.specs), partition.replicated
    return Update(
        gradient=jax.jit(gradient, out_shardings=(sums, None)),
        add=make_add(sums),
        apply=jax.jit(apply, donate_argnums=0),
    )


def solution_tokens(solution: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a worked solution, an end-of-text behind each of its turns (TURN_END)."""
    turns = (tokenizer.encode(turn) for turn in solution.split(TURN_END))
    return [token for turn in turns for token in (*turn, tokenizer.eos_ids[0])]


def solution_rows(problems: Sequence[Problem], tokenizer: Tokenizer, packing: Packing) -> Rows:
    """Return packed rows of prompt and worked solution with end-of-text; the loss is on the solution.

    Rows are as long as the longest solution that there may be. Raises InputError where a worked solution does not fit.
    """
    prompts = [tokenizer.encode_prompt(problem.prompt) for problem in problems]
    solutions = [solution_tokens(problem.solution, tokenizer) for problem in problems]
    lengths = np.array([len(p) + len(r) for p, r in zip(prompts, solutions, strict=True)])
    if (longest := lengths.max()) > packing.limit:
        raise InputError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {packing.limit}, a worked solution needs "
            f"{longest}"
        )
    places = pack_alike(lengths, packing, packing.divisible(power_of_two(max(packing.limit, SHORTEST))))
    return packed_rows(
        make_rows(prompts, solutions, longest, pad_id=tokenizer.pad_id), places, lengths, pad_id=tokenizer.pad_id
    )
