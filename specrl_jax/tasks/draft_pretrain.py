"""Makes a draft for a policy from the policy's own text: the law that the draft will be verified against."""

import dataclasses
import os
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.config import Config
from specrl_jax.core import InputError, Stopped
from specrl_jax.data.features import FeatureStore
from specrl_jax.io.progress import Display
from specrl_jax.io.signals import stop_on_signal
from specrl_jax.io.workdir import open_output, open_workdir
from specrl_jax.learner.draft_vocab import change_vocabulary, most_frequent
from specrl_jax.learner.state import RunState
from specrl_jax.tasks.draft_features import batches, collect, open_store
from specrl_jax.tasks.pretrain import LOG_EVERY, write_log
from specrl_jax.training.build import Setup, build
from specrl_jax.training.metrics import speculation_metrics
from specrl_jax.training.plan import open_mesh
from specrl_jax.training.speedup import compare_with_plain

LENGTH = "spec/acceptance_length"


def run(config: Config, workdir: str) -> None:
    """task=draft_pretrain: train a draft on recorded features into `pretrain.output`."""
    setup = build(config, open_mesh(config))
    setup.check_problems()
    check_draft_pretrain(setup)
    open_workdir(workdir, dataclasses.asdict(config))
    draft_pretrain(setup, workdir, stop_on_signal())


def draft_pretrain(setup: Setup, workdir: str, stop: threading.Event) -> list[dict[str, Any]]:
    """Trains at most `steps` updates over the features of `pretrain.rollouts` texts, and writes `pretrain.output`.

    Starts from draft.path, or afresh over the `draft.vocab_size` ids that the texts use most. The acceptance on
    validation prompts is measured every `eval.every` updates, since a loss that still falls can go with an acceptance
    that has begun to; the best weights are kept, and after `pretrain.patience` measurements without better ones it is
    over. What is written: an EAGLE-3 or MTP head in draft.dialect, a smaller policy as a folder.

    Returns the log: loss every 50 steps; acceptance where it was measured; last, of the weights as stored, their
    acceptance, what they cost in seconds and the RL step at which that is earned back (None: never). It is written to
    log.jsonl in the workdir and beside the weights.
    """
    s = setup.settings
    state = setup.initial_state()
    weights, _ = setup.prepare(state)
    with Display(s.steps, 0) as display:
        store = open_store(setup, s.pretrain.features or os.path.join(workdir, "features"), weights)
        seconds = collect(setup, state.policy.params, weights, store, display, stop)
        if not s.draft.path and setup.draft.vocab < setup.model.vocab:
            state = choose_vocabulary(setup, state, store)
        log, best, trained = learn(setup, state, batches(setup, store), display, stop)
        stored = jax.tree.map(lambda w: w.astype(s.pretrain.dtype).astype(jnp.float32), best)
        state = state.replace(draft=state.draft.replace(params=stored))
        row = {"step": log[-1]["step"]} | held_out_acceptance(setup, state)
        log.append(row | cost(setup, state, seconds | trained))
        display.finish_step(row["step"], f"acceptance length {row[LENGTH]:.3f}")
    setup.draft.save(s.pretrain.output, stored, state.vocab_map, setup.model, s.pretrain.dtype, s.policy.path)
    write_log(log, workdir, s.pretrain.output)
    return log


def choose_vocabulary(setup: Setup, state: RunState, store: FeatureStore) -> RunState:
    """The state with its head over the ids that the texts' responses use most."""
    counts = np.bincount(np.concatenate(store.tokens()), minlength=setup.model.vocab)
    return change_vocabulary(state, most_frequent(counts, setup.draft.vocab), setup.model)


def learn(
    setup: Setup, state: RunState, data: Any, display: Display, stop: threading.Event
) -> tuple[list[dict[str, Any]], Any, dict[str, float]]:
    """(log, the weights whose acceptance was best, seconds). `state.draft` is not donated."""
    s = setup.settings
    tables = setup.read_tables(state.policy.params, state.vocab_map)
    draft = jax.tree.map(jnp.copy, state.draft)
    log: list[dict[str, Any]] = [{"step": 0} | held_out_acceptance(setup, state)]
    best, worse = jax.device_get(draft.params), 0
    # Weights that were drawn are nobody's best, however lucky.
    best_length = log[0][LENGTH] if s.draft.path else 0.0
    seconds = {"train": 0.0, "evaluate": 0.0}
    start = time.perf_counter()
    for step in range(1, s.steps + 1):
        if stop.is_set():
            raise Stopped(f"draft pretraining keeps no checkpoints; step {step} is lost")
        draft, metrics = setup.draft_step(draft, tables, *next(data))
        measured = step == s.steps or (s.eval.every and step % s.eval.every == 0)
        if step % LOG_EVERY == 0 or measured:
            log.append({"step": step, "draft/loss": float(metrics.loss)})
        if not measured:
            continue
        seconds["train"] += time.perf_counter() - start
        start = time.perf_counter()
        log[-1] |= held_out_acceptance(setup, state.replace(draft=draft))
        seconds["evaluate"] += time.perf_counter() - start
        start = time.perf_counter()
        length = log[-1][LENGTH]
        display.finish_step(step, f"loss {log[-1]['draft/loss']:.4f}  acceptance length {length:.3f}")
        worse = 0 if length > best_length else worse + 1
        if not worse:
            best, best_length = jax.device_get(draft.params), length
        if s.pretrain.patience and worse >= s.pretrain.patience:
            break
    return log, best, seconds


def held_out_acceptance(setup: Setup, state: RunState) -> dict[str, float]:
    """spec/* of one answer to each validation problem, at the full draft length."""
    weights, stamp = setup.prepare(state)
    prompts = [setup.tokenizer.encode(problem.prompt) for problem in setup.eval_problems]
    rollouts = setup.engine.generate(weights, prompts, 1, setup.settings.rollout.seed, stamp=stamp)
    return speculation_metrics(rollouts)


def cost(setup: Setup, state: RunState, seconds: dict[str, float]) -> dict[str, Any]:
    """Seconds that the draft took, those that it saves of one RL step's rollouts, and when the two are even."""
    s = setup.settings
    row: dict[str, Any] = {f"seconds/{name}": value for name, value in seconds.items()}
    if not s.draft.compare_rounds:
        return row
    weights, _ = setup.prepare(state)
    prompts = [setup.tokenizer.encode(problem.prompt) for problem in setup.eval_problems][: s.grpo.prompts_per_step]
    job = (weights, prompts, s.grpo.group_size, s.rollout.seed)
    speedup = float(np.median(compare_with_plain(setup.engine, setup.plain_engine, *job, s.draft.compare_rounds)))
    start = time.perf_counter()
    setup.plain_engine.generate(*job)
    plain = time.perf_counter() - start
    saved = plain * (1 - 1 / speedup)
    row |= {"spec/speedup": speedup, "seconds/plain_rollouts": plain}
    return row | {"break_even_step": sum(seconds.values()) / saved if saved > 0 else None}


def check_draft_pretrain(setup: Setup) -> None:
    """Raises InputError for what would fail late in a run; makes `pretrain.output`."""
    settings = setup.settings
    rows = settings.pretrain.batch_size
    if rows % setup.learner_partition.num_shards("batch"):
        raise InputError(
            f"pretrain.batch_size={rows} must divide by the {setup.learner_partition.num_shards('batch')} shards of rows"
        )
    open_output("pretrain.output", settings.pretrain.output)
