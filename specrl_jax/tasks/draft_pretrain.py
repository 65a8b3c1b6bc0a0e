"""task=draft_pretrain: train a draft offline on the policy's own text, the distribution that it will draft for."""

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.config import Config
from specrl_jax.core import Params
from specrl_jax.data.features import FeatureStore
from specrl_jax.data.rows import Rows
from specrl_jax.errors import InputError
from specrl_jax.io.metrics import StepMetrics
from specrl_jax.io.progress import Display
from specrl_jax.io.signals import stop_on_signal, stopped_as
from specrl_jax.io.workdir import open_output, open_workdir
from specrl_jax.learner.build import Learner
from specrl_jax.learner.draft_vocab import change_vocabulary, most_frequent
from specrl_jax.learner.policy_step import Features
from specrl_jax.learner.state import RunState
from specrl_jax.planning.plan import Plan
from specrl_jax.planning.problems import Problems
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.tasks.draft_features import batches, fill_store, open_store
from specrl_jax.tasks.export import output_folder
from specrl_jax.tasks.pretrain import LOG_EVERY, write_log
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_state
from specrl_jax.training.inputs import open_inputs
from specrl_jax.training.metrics import speculation_metrics
from specrl_jax.training.speedup import mean_ratio, measure_speedup, step_workload, timed

LENGTH = "spec/acceptance_length"


def run(config: Config, workdir: str) -> None:
    """Train a draft on recorded features into `export.output`. Raises InputError where that is policy.path."""
    output = output_folder(config, workdir)
    if config.policy.path and os.path.realpath(output) == os.path.realpath(config.policy.path):
        raise InputError(f"export.output={output}: it is policy.path, whose weights the draft would replace")
    with open_inputs(config, workdir, rewards=False) as inputs:
        learner, rollout = inputs.build()
        grpo, num_shards = learner.plan.config.grpo, learner.plan.learner_partition.num_shards("batch")
        if (texts := grpo.prompts_per_step * grpo.group_size) % num_shards:
            raise InputError(
                f"grpo.prompts_per_step x grpo.group_size = {texts} texts at a time must divide by the {num_shards} "
                "shards of rows"
            )
        open_output("export.output", output)
        open_workdir(workdir, dataclasses.asdict(inputs.config))
        draft_pretrain(
            learner, rollout, inputs.problems, state=initial_state(learner), workdir=workdir, stop=stop_on_signal()
        )


def draft_pretrain(
    learner: Learner,
    rollout: RolloutEngines,
    problems: Problems,
    *,
    state: RunState,
    workdir: str,
    stop: threading.Event,
) -> list[StepMetrics]:
    """Train the draft of `state` for at most `steps` updates on the features of `pretrain.rollouts` texts.

    Write it to `export.output`.

    Starts from draft.path, or afresh over the `draft.vocab_size` ids that the texts use most. Acceptance on validation
    prompts is measured every `eval.every` updates, since the loss may fall while acceptance already does too; the best
    weights are kept, and `pretrain.patience` measurements without better ones end the training. Writes a head or block
    drafter in draft.dialect, a smaller policy as a Hugging Face folder.

    Returns the log: loss every 50 steps; acceptance where it was measured; last, of the weights as stored, their
    acceptance, their cost in seconds and the RL step at which it is earned back (None: never). It is written to
    log.jsonl in the workdir and beside the weights.
    """
    plan, config = learner.plan, learner.plan.config
    assert plan.draft is not None and state.draft is not None  # `validate` refuses others
    weights, _ = prepare(learner, rollout, state)
    output, dtype = output_folder(config, workdir), config.export.dtype
    kept = "the rollouts and their features are kept; the same command trains anew"
    with Display(config.steps, 0, stop) as display, contextlib.ExitStack() as says:
        says.enter_context(stopped_as(kept))
        learner.programs.on_program = display.say_learner_program
        rollout.announce(display.say_engine_program, display.say_begun)
        store = open_store(learner, config.pretrain.features or os.path.join(workdir, "features"), weights)
        seconds = fill_store(
            learner, rollout, problems, params=state.policy.params, weights=weights, store=store, display=display
        )
        if not config.draft.path and plan.draft.vocab < plan.model.vocab:
            state = choose_vocabulary(plan, state, store)
        data = batches(learner, rollout.tokenizer.pad_id, store)
        log, best, trained = train_draft(learner, rollout, problems, state=state, data=data, display=display)
        stored = jax.tree.map(lambda w: w.astype(dtype).astype(jnp.float32), best)
        assert state.draft is not None
        state = dataclasses.replace(state, draft=dataclasses.replace(state.draft, params=stored))
        plan.draft.save(output, stored, state.vocab_map, target=plan.model, dtype=dtype, target_path=config.policy.path)
        write_log(log, workdir, output)
        says.enter_context(stopped_as(f"the draft is in {output}; the measurement of its weights as stored is missing"))
        row = {"step": log[-1]["step"]} | held_out_acceptance(learner, rollout, problems, state=state, display=display)
        log.append(
            row | cost_metrics(learner, rollout, problems, state=state, seconds=seconds | trained, display=display)
        )
        display.finish_step(int(row["step"]), f"acceptance {row[LENGTH]:.2f} of {config.draft.length + 1}")
    write_log(log, workdir, output)
    return log


def choose_vocabulary(plan: Plan, state: RunState, store: FeatureStore) -> RunState:
    """Return the state with its head over the ids that the texts' responses use most."""
    assert plan.draft is not None
    texts = store.tokens()[: plan.config.pretrain.rollouts]
    counts = np.bincount(np.concatenate(texts), minlength=plan.model.vocab)
    return change_vocabulary(state, most_frequent(counts, plan.draft.vocab), plan.draft, model=plan.model)


def train_draft(
    learner: Learner,
    rollout: RolloutEngines,
    problems: Problems,
    *,
    state: RunState,
    data: Iterator[list[tuple[Features, Rows]]],
    display: Display,
) -> tuple[list[StepMetrics], Params, dict[str, float]]:
    """Return (log, the weights with the best acceptance, seconds). `state.draft` is not donated."""
    config = learner.plan.config
    assert learner.draft_step is not None
    tables = learner.read_tables(state.policy.params, state.vocab_map)
    draft = jax.tree.map(jnp.copy, state.draft)
    measure = functools.partial(held_out_acceptance, learner, rollout, problems, display=display)
    log: list[StepMetrics] = [{"step": 0} | measure(state=state)]
    best, worse = jax.device_get(draft.params), 0
    # Never select a random initialisation.
    best_length = log[0][LENGTH] if config.draft.path else 0.0
    seconds = {"train": 0.0, "evaluate": 0.0}
    start = time.perf_counter()
    for step in range(1, config.steps + 1):
        display.update_phase(step, config.steps)
        features, rows = zip(*next(data))
        draft, metrics = learner.draft_step(draft, tables, rows, features)
        measured = step == config.steps or (config.eval.every and step % config.eval.every == 0)
        if step % LOG_EVERY == 0 or measured:
            log.append({"step": step, "draft/loss": float(metrics.loss)})
        if not measured:
            continue
        seconds["train"] += time.perf_counter() - start
        start = time.perf_counter()
        log[-1] |= measure(state=dataclasses.replace(state, draft=draft))
        seconds["evaluate"] += time.perf_counter() - start
        start = time.perf_counter()
        length = log[-1][LENGTH]
        accepted = f"acceptance {length:.2f} of {config.draft.length + 1}"
        display.finish_step(step, f"loss {log[-1]['draft/loss']:.4f}  {accepted}")
        worse = 0 if length > best_length else worse + 1
        if not worse:
            best, best_length = jax.device_get(draft.params), length
        if config.pretrain.patience and worse >= config.pretrain.patience:
            break
    return log, best, seconds


def held_out_acceptance(
    learner: Learner, rollout: RolloutEngines, problems: Problems, *, state: RunState, display: Display
) -> StepMetrics:
    """Return spec/* of one response to each validation problem, at the full draft length."""
    weights, _ = prepare(learner, rollout, state)
    prompts = [rollout.tokenizer.encode_prompt(problem.prompt) for problem in problems.evaluation]
    rollouts = rollout.engine.generate(weights, prompts, 1, seed=rollout.config.seed, on_progress=display.update_phase)
    return speculation_metrics(rollouts)


def cost_metrics(
    learner: Learner,
    rollout: RolloutEngines,
    problems: Problems,
    *,
    state: RunState,
    seconds: dict[str, float],
    display: Display,
) -> StepMetrics:
    """Return the draft's cost in seconds, its saving per RL step of rollouts, and the step where the two are equal.

    Only the cost where draft.compare_rounds is 0 or a signal ends the comparison.
    """
    row: StepMetrics = {f"seconds/{name}": value for name, value in seconds.items()}
    rounds = learner.plan.config.draft.compare_rounds
    if not rounds:
        return row
    weights, _ = prepare(learner, rollout, state)
    work, on_progress = step_workload(rollout, problems.evaluation), display.update_phase
    ratios = measure_speedup(
        rollout.engine, rollout.plain_engine, weights, work=work, rounds=rounds, on_progress=on_progress
    )
    if len(ratios) < 2:
        return row
    speedup, _, _ = mean_ratio(ratios)
    _, plain = timed(rollout.plain_engine, weights, work)
    saved = plain * (1 - 1 / speedup)
    row |= {"spec/speedup": speedup, "seconds/plain_rollouts": plain}
    return row | {"break_even_step": cast(float, sum(seconds.values()) / saved if saved > 0 else None)}
