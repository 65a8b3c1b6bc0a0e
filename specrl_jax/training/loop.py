"""The synchronous loop: one step is a street of five phases, data -> prepare -> generate -> logprob -> train.

Algorithm: GRPO (DeepSeekMath 2402.03300, Algorithm 1 with one inner iteration per minibatch) on rollouts of the
current policy. Log-probs, ratio, KL and loss come from the policy's own forward. Where a draft has weights, it learns
in the train phase from the features of that forward, and nothing of it reaches the policy.
"""

import contextlib
import dataclasses
import os
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax.core import PHASES, BadInput, Stopped
from specrl_jax.data.rows import Rows, rows_of
from specrl_jax.data.sources import ProblemStream
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.io.metrics import MetricsWriter, read_metrics
from specrl_jax.io.wandb import WandbRun
from specrl_jax.rl.advantages import group_normalised
from specrl_jax.training.compare import compare_with_plain
from specrl_jax.training.draft_learning import DraftMetrics, Outlook, Tables
from specrl_jax.training.evaluate import Evaluation, evaluate, score
from specrl_jax.training.measures import (
    draft_metrics,
    mismatch_metrics,
    outlook_metrics,
    policy_metrics,
    reward_metrics,
    rollout_metrics,
    rollout_samples,
    speculation_metrics,
)
from specrl_jax.training.progress import Display, PhaseClock
from specrl_jax.training.settings import Settings
from specrl_jax.training.setup import Setup
from specrl_jax.training.speculation import Speculation
from specrl_jax.training.state import RunState, TrainState
from specrl_jax.training.steps import Features, Signal, UpdateMetrics


def train(setup: Setup, workdir: str, stop: threading.Event) -> list[dict[str, Any]]:
    """Runs, or resumes, a training run in `workdir`.

    Args:
      stop: set by a signal handler; the run then saves the last finished step and leaves.
    Returns:
      The run's metrics rows; row 0 is the evaluation before training.
    Raises:
      Stopped: after saving, where `stop` was set.
      BadInput: a checkpoint or data position that does not fit.
    """
    s = setup.settings
    setup.scorer.start()
    stream = setup.problems.stream(s.grpo.prompts_per_step)
    checkpoints = Checkpoints(workdir, s.checkpoint.keep)
    state, first = _restore(setup, checkpoints, stream)
    reference = setup.initial_params() if s.grpo.kl_coef else None
    speculation = Speculation(setup, workdir)
    writer = MetricsWriter(workdir, first if first is not None else -1, open_wandb(s, workdir))
    step = first or 0
    position = stream.position
    with Display(s.steps, step) as display:
        try:
            announce_programs(setup, state, display)
            if first is None:
                writer.write({"step": 0} | evaluation_row(setup, state, workdir, 0, display, speculation))
            while step < s.steps:
                with profiled(workdir, step + 1 in s.logging.profile_steps):
                    state, report = run_step(setup, state, reference, stream, step + 1, display, stop, speculation)
                step, position, row = step + 1, stream.position, report.row
                if step == s.steps or (s.eval.every and step % s.eval.every == 0):
                    row |= evaluation_row(setup, state, workdir, step, display, speculation)
                if step == s.steps and setup.engine.draft_length and s.draft.compare_rounds:
                    row |= comparison_row(setup, state, display, speculation)
                writer.write(row, report.histograms)
                writer.write_rollouts(step, report.samples)
                if step == s.steps or step % s.checkpoint.every == 0:
                    checkpoints.save(step, state, position)
                    speculation.save()
                display.finish_step(step, _note(row))
        except Stopped:
            if step:
                checkpoints.save(step, state, position)
                speculation.save()
                raise Stopped(f"step {step} is saved; the same command resumes from there") from None
            raise Stopped("no step was done yet; the same command starts anew") from None
        finally:
            writer.close()
            checkpoints.close()
    return read_metrics(workdir)


class StepReport(NamedTuple):
    """What one step says of itself."""

    row: dict[str, Any]  # of metrics.jsonl
    samples: list[dict[str, Any]]  # of rollouts/step_N.jsonl
    histograms: dict[str, np.ndarray]  # values by name


def run_step(
    setup: Setup,
    state: RunState,
    reference: Any,
    stream: ProblemStream,
    step: int,
    display: Display,
    stop: threading.Event,
    speculation: Speculation,
) -> tuple[RunState, StepReport]:
    """One RL step. Raises Stopped only while `state` is still whole."""
    s, tokenizer = setup.settings, setup.tokenizer
    clock = PhaseClock(display)

    with clock("data"):
        problems = next(stream)
        prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    _leave_if(stop)

    with clock("prepare"):
        weights, stamp = setup.prepare(state)
    _leave_if(stop)

    with clock("generate"):
        first_id = step * s.grpo.prompts_per_step * s.grpo.group_size
        rollouts = setup.engine.generate(
            weights,
            prompts,
            s.grpo.group_size,
            s.rollout.seed,
            first_id,
            display.update_phase,
            stamp,
            speculation.lengths,
            speculation.history,
        )
        scores = score(rollouts, problems, tokenizer, setup.scorer)
    _leave_if(stop)

    with clock("logprob"):
        rows, behaviour = learner_rows(rollouts, setup)
        old_logprobs, _ = setup.logprob_step(state.policy.params, rows)
        ref_logprobs = setup.logprob_step(reference, rows)[0] if reference is not None else None
        jax.block_until_ready((old_logprobs, ref_logprobs))
    _leave_if(stop)

    with clock("train"):
        state, vocabulary = speculation.fit_vocabulary(state, rollouts)
        advantages = group_normalised(scores.total.reshape(-1, s.grpo.group_size)).reshape(-1)
        signal = Signal(old_logprobs, ref_logprobs, advantages)
        state, updates = learn(setup, state, rows, signal, speculation.draft_learns(step))
        state = jax.block_until_ready(state)

    row = {"step": step} | {f"time/{name}": clock.seconds[name] for name in PHASES} | {"time/total": clock.total()}
    row |= reward_metrics(scores) | rollout_metrics(rollouts, clock.seconds["generate"])
    row |= setup.performance.metrics(rollouts, clock.seconds, row["time/total"])
    row |= updates.metrics() | vocabulary | mismatch_metrics(behaviour, old_logprobs, rows.mask)
    if setup.engine.draft_length:
        row |= speculation_metrics(rollouts) | speculation.observe(rollouts, updates.outlook)
    if state.draft:
        row |= {"draft/version": int(state.draft.step)}
    if scores.failures:
        display.say(f"step {step}: rewards that failed count 0: {scores.failures}")
    histograms = {"reward": scores.total, "rollout/response_length": rollouts.response_length}
    samples = rollout_samples(rollouts, problems, scores, tokenizer, s.logging.rollouts)
    return state, StepReport(row, samples, histograms)


class Updates(NamedTuple):
    """What the updates of one step reported, minibatch by minibatch."""

    policy: list[UpdateMetrics]
    draft: list[DraftMetrics]  # empty where no draft learns
    outlook: Outlook | None  # on the host, of the draft before these updates; None: there is none
    draft_seconds: float

    def metrics(self) -> dict[str, float]:
        row = policy_metrics(self.policy) | outlook_metrics(self.outlook)
        return row | draft_metrics(self.draft, self.draft_seconds)


def learn(setup: Setup, state: RunState, rows: Rows, signal: Signal, draft_learns: bool) -> tuple[RunState, Updates]:
    """One policy update per minibatch, each followed by those of the draft from the features of that update's forward.

    Minibatch i takes rows i, i + n, ...: some of every group. A draft that does not learn is only asked what it expects
    to be accepted.
    """
    minibatches = setup.settings.grpo.minibatches
    policy, draft, updates = state.policy, state.draft, Updates([], [], None, 0.0)
    for i in range(minibatches):
        part, part_signal = jax.tree.map(lambda x, i=i: x[i::minibatches], (rows, signal))
        wanted = draft is not None and (draft_learns or i == 0)
        # Before the update, which donates the tables and changes them.
        tables = setup.read_tables(policy.params, state.vocab_map) if wanted else None
        policy, metrics, features = setup.policy_step(policy, part, part_signal)
        updates.policy.append(metrics)
        if not wanted:
            continue
        jax.block_until_ready(features)
        start = time.perf_counter()
        if draft_learns:
            draft, draft_updates = _learn_draft(setup, draft, tables, features, part)
            updates.draft.extend(draft_updates)
            outlook = draft_updates[0].outlook
        else:
            outlook = setup.predict_step(draft.params, tables, features, part)
        if i == 0:
            updates = updates._replace(outlook=jax.device_get(outlook))
        updates = updates._replace(draft_seconds=updates.draft_seconds + time.perf_counter() - start)
    policy = policy.replace(step=policy.step + 1)
    return state.replace(policy=policy, draft=draft), updates


def _learn_draft(
    setup: Setup, draft: TrainState, tables: Tables, features: Features, rows: Rows
) -> tuple[TrainState, list[DraftMetrics]]:
    """`draft.epochs` times over the rows, `draft.minibatches` updates each time."""
    d = setup.settings.draft
    found = []
    for i in range(d.epochs * d.minibatches):
        part = features, rows
        if d.minibatches > 1:
            part = jax.tree.map(lambda x, i=i: x[i % d.minibatches :: d.minibatches], part)
        draft, metrics = setup.draft_step(draft, tables, *part)
        found.append(metrics)
    return jax.block_until_ready(draft), found


def learner_rows(rollouts: Rollouts, setup: Setup) -> tuple[Rows, np.ndarray]:
    """The rollouts as rows of one fixed shape, and their behaviour log-probs [B, T] aligned with the rows' targets."""
    rows = rows_of(rollouts.tokens, rollouts.prompt_length, rollouts.length, setup.tokenizer.pad_id)
    return rows, np.pad(rollouts.logprobs[:, 1:], ((0, 0), (0, 1)))


def announce_programs(setup: Setup, state: RunState, display: Display) -> None:
    """Compiles every program of the training engine, and says how long each took."""
    weights, _ = setup.prepare(state)
    programs = setup.engine.programs
    display.start_phase("compile")
    programs.compile_all(weights, lambda program, seconds: display.say(f"engine program {program}: {seconds:.1f} s"))


def open_wandb(settings: Settings, workdir: str) -> WandbRun | None:
    """The run at Weights & Biases, where the config asks for one."""
    log = settings.logging
    if not log.wandb_project:
        return None
    return WandbRun(log.wandb_project, log.wandb_name, workdir, dataclasses.asdict(settings))


def profiled(workdir: str, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """A jax.profiler trace of what runs inside, for Perfetto or TensorBoard; nothing where it is not wanted."""
    return jax.profiler.trace(os.path.join(workdir, "profile")) if wanted else contextlib.nullcontext()


def evaluation_row(
    setup: Setup, state: RunState, workdir: str, step: int, display: Display, speculation: Speculation | None
) -> dict[str, Any]:
    """eval/* metrics of the current policy, its answers in evaluations/step_N.jsonl; before the first and after the
    last step greedy accuracy too. `speculation` None: always draft.length.
    """
    s, problems = setup.settings, setup.eval_problems
    weights, _ = setup.prepare(state)

    def run(engine: Engine, samples: int) -> Evaluation:
        # What is known of lengths is known of the training engine's programs.
        lengths = speculation.lengths if speculation and engine is setup.engine else None
        words, scorer, seed = setup.tokenizer, setup.scorer, s.rollout.seed
        return evaluate(engine, weights, problems, samples, words, scorer, seed, display.update_phase, lengths)

    clock = PhaseClock(display)
    with clock("evaluate"):
        sampled = run(setup.eval_engine, s.eval.samples)
        row = sampled.metrics(setup.problems.validation)
        if step in (0, s.steps):
            row["eval/accuracy_greedy"] = run(setup.greedy_engine, 1).accuracy
    os.makedirs(os.path.join(workdir, "evaluations"), exist_ok=True)
    sampled.write(os.path.join(workdir, "evaluations", f"step_{step}.jsonl"), setup.tokenizer)
    return row | {"time/evaluate": clock.seconds["evaluate"]}


def comparison_row(setup: Setup, state: RunState, display: Display, speculation: Speculation) -> dict[str, float]:
    """spec/speedup*: this run's own engine against draft.kind=none, on as many validation rollouts as a step has."""
    s = setup.settings
    problems = setup.eval_problems[: s.grpo.prompts_per_step]
    prompts = [setup.tokenizer.encode(problem.prompt) for problem in problems]
    weights, _ = setup.prepare(state)
    clock = PhaseClock(display)
    with clock("compare"):
        ratios = compare_with_plain(
            setup.engine,
            setup.plain_engine,
            weights,
            prompts,
            s.grpo.group_size,
            s.rollout.seed,
            s.draft.compare_rounds,
            speculation.lengths,
        )
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return {"spec/speedup": float(median), "spec/speedup_low": float(low), "spec/speedup_high": float(high)}


def _restore(setup: Setup, checkpoints: Checkpoints, stream: ProblemStream) -> tuple[RunState, int | None]:
    """(state, its step), or (fresh state, None); the stream is moved to the saved position."""
    latest = checkpoints.latest()
    if latest is None:
        return setup.initial_state(), None
    if latest > setup.settings.steps:
        raise BadInput(f"steps={setup.settings.steps}, but the run in this workdir has already done {latest}")
    state, stream.position = checkpoints.restore(latest, setup.abstract_state())
    return state, latest


def _leave_if(stop: threading.Event) -> None:
    if stop.is_set():
        raise Stopped


def _note(row: dict[str, Any]) -> str:
    note = f"reward {row['reward/mean']:.3f}  {row['time/total']:.1f} s  {row['rollout/tokens_per_second']:.0f} tok/s"
    if "spec/acceptance_length" in row:
        note += f"  acceptance {row['spec/acceptance_length']:.2f}"
    if "eval/accuracy" in row:
        note += f"  accuracy {row['eval/accuracy']:.3f}"
    return note
