"""Makes a small base policy by next-token prediction on worked solutions of a built-in task, many of them wrong."""

import dataclasses
import json
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specrl_jax.config import Config
from specrl_jax.core import InputError, Mean, Stopped, masked_mean
from specrl_jax.data.rows import Rows, make_rows
from specrl_jax.data.sources import ProblemStream
from specrl_jax.data.tasks import Problem, TaskSource
from specrl_jax.io import hf
from specrl_jax.io.progress import Display
from specrl_jax.io.signals import stop_on_signal
from specrl_jax.io.workdir import open_output, open_workdir
from specrl_jax.learner.optimizer import apply_gradient
from specrl_jax.learner.policy_step import PolicyForward
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.sharding import Partitioner
from specrl_jax.training.build import Setup, build
from specrl_jax.training.loop import evaluation_row
from specrl_jax.training.plan import open_mesh

LOG_EVERY = 50  # steps


def run(config: Config, workdir: str) -> None:
    """task=pretrain: train a policy from random weights into `pretrain.output`."""
    setup = build(config, open_mesh(config))
    open_output("pretrain.output", config.pretrain.output)
    setup.check_problems()
    open_workdir(workdir, dataclasses.asdict(config))
    with setup.scorer:
        pretrain(setup, workdir, stop_on_signal())


def pretrain(setup: Setup, workdir: str, stop: threading.Event) -> list[dict[str, Any]]:
    """Trains from random weights and writes `pretrain.output` as a Hugging Face folder.

    Returns the log: loss in nats per response token every 50 steps, at the end the accuracy on the validation split
    of the weights as stored. It is written to log.jsonl in the workdir and beside the weights.
    """
    s = setup.settings
    source = TaskSource(s.data.task, "train", s.seed, s.pretrain.error_rate)
    stream = ProblemStream([source], s.pretrain.batch_size, s.seed)
    state = setup.initial_state().policy
    step_fn = make_pretrain_step(setup.learner, setup.optimizer, setup.learner_partition)
    log: list[dict[str, Any]] = []
    with Display(s.steps, 0) as display:
        for step in range(1, s.steps + 1):
            if stop.is_set():
                raise Stopped(f"pretraining keeps no checkpoints; step {step} is lost")
            state, loss = step_fn(state, solution_rows(next(stream), setup))
            if step % LOG_EVERY == 0 or step == s.steps:
                log.append({"step": step, "loss": float(loss.value())})
                display.finish_step(step, f"loss {log[-1]['loss']:.4f} nats/token")
        stored = jax.tree.map(lambda w: w.astype(s.pretrain.dtype).astype(jnp.float32), state.params)
        log[-1] |= evaluation_row(
            setup, RunState(state.replace(params=stored), None, None), workdir, s.steps, display, None
        )
    hf.save_params(s.pretrain.output, stored, setup.model, s.pretrain.dtype)
    write_log(log, workdir, s.pretrain.output)
    return log


def write_log(log: list[dict[str, Any]], *folders: str) -> None:
    """log.jsonl in each folder: the run's own, and beside what it made."""
    for folder in folders:
        with open(os.path.join(folder, "log.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in log)


def make_pretrain_step(learner: PolicyForward, optimizer: optax.GradientTransformation, partition: Partitioner) -> Any:
    """(state, rows) -> (state, mean cross-entropy); the state is donated."""

    def loss(params: Any, rows: Rows) -> tuple[jax.Array, Mean]:
        mean = masked_mean(-learner.apply(params, rows, partition).logprobs, rows.mask)
        return mean.value(), mean

    def update(state: TrainState, rows: Rows) -> tuple[TrainState, Mean]:
        gradient, mean = jax.grad(loss, has_aux=True)(state.params, rows)
        healthy = jnp.isfinite(optax.tree.norm(gradient))
        return apply_gradient(state, gradient, optimizer, healthy).replace(step=state.step + 1), mean

    return jax.jit(update, donate_argnums=0)


def solution_rows(problems: list[Problem], setup: Setup) -> Rows:
    """Prompt and worked solution, ended; only the solution is learnt."""
    encode, eos = setup.tokenizer.encode, setup.tokenizer.eos_ids[0]
    prompts = [encode(problem.prompt) for problem in problems]
    solutions = [[*encode(problem.solution), eos] for problem in problems]
    length = setup.rollout.limits.cache_length
    longest = max(len(p) + len(r) for p, r in zip(prompts, solutions))
    if longest > length:
        raise InputError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {length}, a worked solution needs {longest}"
        )
    return make_rows(prompts, solutions, length, setup.tokenizer.pad_id)
