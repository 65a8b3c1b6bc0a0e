"""One RL step: GRPO (DeepSeekMath, arXiv 2402.03300, Algorithm 1) on speculative rollouts, in five phases.

Log-probs, ratio, KL and loss come from the policy's own forward. A draft with weights is trained in the train phase
from the features of that forward, and nothing of it reaches the policy. Where rollouts are generated beside the
learner, the phases data and generate of later steps run in a thread, beside the other phases of this one
(rollout/pipeline.py).
"""

import functools
import threading
from typing import NamedTuple

import jax

from specrl_jax import distributed
from specrl_jax.errors import Stopped
from specrl_jax.io.progress import PhaseClock
from specrl_jax.learner.batch import LearnerBatch, TrainingBatch, learner_batch
from specrl_jax.learner.build import Learner
from specrl_jax.learner.draft_step import DraftMetrics
from specrl_jax.learner.replay import Replay
from specrl_jax.learner.state import RunState
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.rollout.generate import Published, RolloutBatch
from specrl_jax.rollout.groups import ScoredRollouts, merge_rounds, select_groups
from specrl_jax.rollout.pipeline import Pipeline
from specrl_jax.rollout.speculation import Speculation
from specrl_jax.sharding import bytes_on_devices
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import with_initial_draft
from specrl_jax.training.update import Compared, Updates, compare_experts, compute_loss_inputs, update


class StepParts(NamedTuple):
    """Parts of a run that its steps share."""

    learner: Learner
    rollout: RolloutEngines
    pipeline: Pipeline
    speculation: Speculation
    replay: Replay | None
    stop: threading.Event  # set by a signal


class StepResult(NamedTuple):
    """The outcome of one step, on the host."""

    step: int
    produced: RolloutBatch  # by all processes, round by round
    generated: ScoredRollouts  # its rounds as one
    training_batch: TrainingBatch
    batch: LearnerBatch
    inputs: LossInputs
    compared: Compared | None  # the policy with its own experts, where the rollouts' are replayed
    updates: Updates
    replayed: list[DraftMetrics]  # the draft's further updates from the texts of earlier steps
    weights_bytes: int  # of the rollout weights, on all devices that generate
    coverage: dict[str, float]  # draft/coverage, where the draft has a vocabulary of its own
    seconds: dict[str, float]  # of the five phases; with an asynchronous pipeline, data and generate of its thread
    waited: float  # seconds that the learner waited for rollouts
    total: float  # seconds, the glue between the phases included


def train_step(parts: StepParts, state: RunState, *, step: int, clock: PhaseClock) -> tuple[RunState, StepResult]:
    """Run one step. Raise Stopped only while `state` is still whole, and NotScored where no response can be scored."""
    learner, rollout, pipeline, speculation, replay, stop = parts
    config, replayed, trains_draft = learner.plan.config, list[DraftMetrics](), speculation.trains_draft(step)
    leave_if(stop)
    with clock("data"):
        pipeline.draw()
    with clock("prepare"):
        weights, version = prepare(learner, rollout, state)
        published = Published(weights, version, speculation.observed)
        del weights
        weights_bytes = bytes_on_devices(published.weights) * jax.process_count() // len(rollout.plan.groups.own)
        pipeline.publish(step, published)
        del published  # in a synchronous run the rollout weights are gone before anything is learned
    leave_if(stop)
    with clock("generate"):
        if replay and replay.idle and trains_draft:
            state, replayed = replay.learn(state, step, functools.partial(_waits, pipeline, step, stop))
        produced = pipeline.take(step)
    leave_if(stop)
    with clock("logprob"):
        generated = merge_rounds(produced.rounds)
        generated.scores.require_some(f"step {step}")
        training_batch = select_groups(generated, config.grpo)
        batch = learner_batch(training_batch, rollout.tokenizer.pad_id, learner.packing)
        inputs = compute_loss_inputs(learner, state, batch)
        compared = compare_experts(learner, state, batch)
    leave_if(stop)
    with clock("train"):
        state, coverage = speculation.update_vocabulary(state, training_batch.rollouts)
        state, updates = update(learner, state, batch.rows, inputs=inputs, train_draft=trains_draft)
        if replay:
            replay.add(batch.rows)
            if trains_draft and not replay.idle:
                state, replayed = replay.learn(state, step)
        state = jax.block_until_ready(_with_replaced(learner, state, updates))
    result = StepResult(
        step,
        produced,
        generated,
        training_batch=training_batch,
        batch=batch,
        inputs=inputs,
        compared=compared,
        updates=updates,
        replayed=replayed,
        weights_bytes=weights_bytes,
        coverage=coverage,
        seconds=clock.seconds | {name: produced.seconds[name] for name in ("data", "generate")},
        waited=clock.seconds["generate"],
        total=clock.total(),
    )
    return state, result


def _with_replaced(learner: Learner, state: RunState, updates: Updates) -> RunState:
    """Return the state with a new draft where the old one is not finite."""
    if updates.diagnostics is not None and not updates.diagnostics.finite:
        # No update makes it finite again. The alarm says so (rollout/speculation.py).
        state = with_initial_draft(learner, state)
    return state


def _waits(pipeline: Pipeline, step: int, stop: threading.Event) -> bool:
    """Return whether the rollouts of a step are still to come and nobody wants to stop. Collective."""
    return not pipeline.ready(step) and not distributed.any_process(stop.is_set())


def leave_if(stop: threading.Event) -> None:
    """Raise Stopped where a signal has set `stop` in any process. Collective."""
    if distributed.any_process(stop.is_set()):
        raise Stopped
