"""The loop: one step is a street of five phases, data -> prepare -> generate -> logprob -> train.

Algorithm: GRPO (DeepSeekMath 2402.03300, Algorithm 1) on rollouts of the current policy, with the options of
specrl_jax/rl. Log-probs, ratio, KL and loss come from the policy's own forward. Where a draft has weights, it learns in
the train phase from the features of that forward, and nothing of it reaches the policy. Under `pipeline.mode=async`
data and generate of later steps run beside the other phases (training/pipeline.py).
"""

import contextlib
import dataclasses
import os
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax import distributed
from specrl_jax.config import Config
from specrl_jax.core import PHASES, InputError, RunFailed, Stopped
from specrl_jax.data.rows import Rows
from specrl_jax.data.sources import ProblemStream
from specrl_jax.data.tasks import Problem
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.rollouts import Rollouts, WeightsVersion, concatenated
from specrl_jax.drafts.base import TargetTables
from specrl_jax.drafts.weights import Weights
from specrl_jax.io.checkpoints import Checkpoints, Host
from specrl_jax.io.metrics import MetricsWriter, NoMetrics, read_metrics
from specrl_jax.io.progress import Display, PhaseClock
from specrl_jax.io.wandb import WandbRun
from specrl_jax.learner.batch import LearnerBatch, learner_batch
from specrl_jax.learner.draft_step import DraftDiagnostics, DraftMetrics
from specrl_jax.learner.policy_step import Features, UpdateMetrics
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.rewards.scorer import Scores
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.training.build import Setup
from specrl_jax.training.dynamic_sampling import Batch, batch_of_all, collect, lesson, merged_scores, of_all, unequal
from specrl_jax.training.evaluate import Evaluation, evaluate, score
from specrl_jax.training.metrics import (
    diagnostics_metrics,
    draft_metrics,
    mismatch_metrics,
    policy_metrics,
    reward_metrics,
    rollout_metrics,
    rollout_samples,
    speculation_metrics,
)
from specrl_jax.training.pipeline import Async, Pipeline, RolloutBatch, Sync
from specrl_jax.training.speculation import Speculation
from specrl_jax.training.speedup import compare_with_plain
from specrl_jax.training.watch import Watch


def train(setup: Setup, workdir: str, stop: threading.Event) -> list[dict[str, Any]]:
    """Runs, or resumes, a training run in `workdir`.

    Args:
      stop: set by a signal handler; the run then saves the last finished step and leaves.
    Returns:
      The run's metrics rows; row 0 is the evaluation before training.
    Raises:
      Stopped: after saving, where `stop` was set.
      InputError: a checkpoint or data position that does not fit.
      RunFailed: the policy's gradient stays without a finite value, or nothing can be written; says what is kept.
    """
    s = setup.settings
    setup.scorer.start()
    stream = setup.problems.stream(s.grpo.prompts_per_step)
    checkpoints = setup.open_checkpoints(workdir)
    state, first, watch = _restore(setup, checkpoints, stream)
    writer = open_metrics(s, workdir, first if first is not None else -1)
    step = first or 0
    host, devices = Host({}, {}), threading.Lock()
    with Display(s.steps, step, distributed.is_first_process()) as display, contextlib.ExitStack() as ending:
        try:
            announce_programs(setup, state, display)
            if first is None:
                writer.write({"step": 0} | evaluation_row(setup, state, workdir, 0, display, watch.speculation))
            pipeline = make_pipeline(setup, stream, step + 1, display, watch.speculation, devices)
            ending.callback(pipeline.close)
            while step < s.steps:
                with profiled(workdir, step + 1 in s.logging.profile_steps):
                    state, report = run_step(setup, state, pipeline, step + 1, display, stop, watch.speculation)
                step, row = step + 1, report.row
                row |= watch.observe(row, report.skipped, checkpoints, display)
                host = watch.state(report.position)
                if step == s.steps or (s.eval.every and step % s.eval.every == 0):
                    with devices:
                        row |= evaluation_row(setup, state, workdir, step, display, watch.speculation)
                if step == s.steps and setup.engine.draft_length and s.draft.compare_rounds:
                    row |= comparison_row(setup, state, display, watch.speculation, stop)
                writer.write(row, report.histograms)
                writer.write_rollouts(step, report.samples)
                if step == s.steps or step % s.checkpoint.every == 0:
                    checkpoints.save(step, _without_frozen(state), host, row.get("eval/accuracy"))
                display.finish_step(step, _note(row))
        except Stopped:
            if step:
                checkpoints.save(step, _without_frozen(state), host)
                raise Stopped(f"step {step} is saved; the same command resumes from there") from None
            raise Stopped("no step was done yet; the same command starts anew") from None
        except OSError as error:
            raise RunFailed(f"{error.filename or workdir}: {error.strerror}; {checkpoints.kept()}") from None
        finally:
            writer.close()
            checkpoints.close()
    return read_metrics(workdir)


class StepReport(NamedTuple):
    """What one step says of itself."""

    row: dict[str, Any]  # of metrics.jsonl
    samples: list[dict[str, Any]]  # of rollouts/step_N.jsonl
    histograms: dict[str, np.ndarray]  # values by name
    position: dict[str, Any]  # of the data
    skipped: list[bool]  # of each update of the policy, whether it had no finite loss or gradient


def run_step(
    setup: Setup,
    state: RunState,
    pipeline: Pipeline,
    step: int,
    display: Display,
    stop: threading.Event,
    speculation: Speculation,
) -> tuple[RunState, StepReport]:
    """One RL step. Raises Stopped only while `state` is still whole."""
    s, tokenizer = setup.settings, setup.tokenizer
    clock = PhaseClock(display)
    _leave_if(stop)

    with clock("prepare"):
        pipeline.publish(step, *setup.prepare(state))
    _leave_if(stop)

    with clock("generate"):
        produced = pipeline.take(step)
        if not pipeline.inline:
            produced = produced._replace(batches=[batch_of_all(own) for own in produced.batches])
    _leave_if(stop)

    with clock("logprob"):
        learnt = lesson(produced.batches, s.grpo)
        batch = learner_batch(learnt, tokenizer.pad_id, setup.packing)
        signal = learner_signal(setup, state, batch)
    _leave_if(stop)

    with clock("train"):
        state, vocabulary = speculation.fit_vocabulary(state, learnt.rollouts)
        state, updates = learn(setup, state, batch.rows, signal, speculation.draft_learns(step))
        if s.grpo.reference_every and step % s.grpo.reference_every == 0:
            state = state.replace(reference=jax.tree.map(jax.numpy.copy, state.policy.params))
        state = jax.block_until_ready(state)

    total, waited = clock.total(), clock.seconds["generate"] - (produced.seconds["data"] if pipeline.inline else 0)
    seconds = clock.seconds | {name: produced.seconds[name] for name in ("data", "generate")}
    scores = merged_scores([batch.scores for batch in produced.batches])
    rollouts = concatenated([part.rollouts for part in produced.batches])
    row = {"step": step} | {f"time/{name}": seconds[name] for name in PHASES} | {"time/total": total}
    row |= {"time/exposed_generation": waited, "time/idle_rollout": produced.seconds["idle"]}
    row |= reward_metrics(scores, _equal_share(produced.batches, s.grpo.group_size))
    row |= rollout_metrics(rollouts, seconds["generate"]) | {"rollout/rounds": len(produced.batches)}
    row |= {"rollout/lag": step - 1 - int(rollouts.weights_version.min())}
    row |= setup.performance.metrics(rollouts, learnt.rollouts, seconds, total)
    learner = updates.logprobs if s.grpo.old_logprobs != "learner" else signal.old_logprobs
    row |= updates.metrics() | vocabulary | mismatch_metrics(batch.behaviour, learner, batch.rows.mask)
    if setup.engine.draft_length:
        row |= speculation_metrics(rollouts) | speculation.observe(rollouts, updates.diagnostics)
    if state.draft:
        row |= {"draft/version": int(state.draft.step)}
    if warning := scores.warning():
        display.say(f"step {step}: {warning}")
    histograms = {"reward": scores.total, "rollout/response_length": rollouts.response_length}
    problems = [problem for part in produced.batches for problem in part.problems]
    samples = rollout_samples(rollouts, problems, scores, tokenizer, s.logging.rollouts)
    skipped = [bool(update.skipped) for update in updates.policy]
    return state, StepReport(row, samples, histograms, produced.position, skipped)


def make_pipeline(
    setup: Setup,
    stream: ProblemStream,
    first: int,
    display: Display,
    speculation: Speculation,
    devices: threading.Lock,
) -> Pipeline:
    """`first`: the step that is taken first. `devices` is held while an asynchronous one generates.

    Beside the learner a process generates without the others, and its share is all that a batch has.
    """
    s, tokenizer, p = setup.settings, setup.tokenizer, setup.settings.pipeline
    progress = display.update_phase if p.mode == "sync" else lambda done, total: None

    def produce(step: int, weights: Weights, stamp: WeightsVersion) -> RolloutBatch:
        def generate(problems: list[Problem], first_id: int) -> tuple[Rollouts, Scores]:
            own = distributed.process_slice(len(problems))
            prompts = [tokenizer.encode(problem.prompt) for problem in problems[own]]
            rollouts = setup.engine.generate(
                weights,
                prompts,
                s.grpo.group_size,
                s.rollout.seed,
                first_id + own.start * s.grpo.group_size,
                progress,
                stamp,
                speculation.lengths,
                speculation.history,
            )
            found = rollouts, score(rollouts, problems[own], tokenizer, setup.scorer)
            return of_all(*found) if p.mode == "sync" else found

        start = time.perf_counter()
        problems = next(stream)
        drawn = time.perf_counter()
        longest = s.rollout.max_response_tokens
        batches = collect(generate, problems, lambda: next(stream), s.grpo, longest, step)
        seconds = {"data": drawn - start, "generate": time.perf_counter() - drawn, "idle": 0.0}
        return RolloutBatch(step, batches, stream.position, seconds)

    if p.mode == "sync":
        return Sync(produce)
    return Async(produce, p.lag, first, s.steps, devices)


def _equal_share(batches: list[Batch], group_size: int) -> float:
    return float(1 - np.concatenate([unequal(batch.rewards, group_size) for batch in batches]).mean())


def learner_signal(setup: Setup, state: RunState, batch: LearnerBatch) -> LossInputs:
    """What the objective asks for, of the policy before the first update. Waits until it is there."""
    o = setup.objective
    params, rows = setup.whole(state.policy), setup.on_learner(batch.rows)
    old_logprobs = ref_logprobs = None
    if o.old_logprobs == "learner":
        old_logprobs = distributed.to_host(setup.logprob_step(params, rows)[0])
    elif o.old_logprobs == "rollout":
        old_logprobs = batch.behaviour
    if o.kl_coef:
        reference = setup.first_reference if state.reference is None else state.reference
        ref_logprobs = distributed.to_host(
            setup.logprob_step(setup.learner.merge(reference, state.policy.frozen), rows)[0]
        )
    behaviour = batch.behaviour if o.correction != "none" else None
    loss_mask = batch.loss_mask if setup.settings.grpo.leaves_out else None
    return LossInputs(old_logprobs, ref_logprobs, batch.advantages, behaviour, loss_mask)


class Updates(NamedTuple):
    """What the updates of one step reported, minibatch by minibatch."""

    policy: list[UpdateMetrics]
    draft: list[DraftMetrics]  # empty where no draft learns
    diagnostics: DraftDiagnostics | None  # on the host, of the draft before these updates; None: there is none
    draft_seconds: float
    logprobs: np.ndarray  # [B, T] float32, nats, each row's by the policy that first learnt from it

    def metrics(self) -> dict[str, float]:
        row = policy_metrics(self.policy) | diagnostics_metrics(self.diagnostics)
        return row | draft_metrics(self.draft, self.draft_seconds)


def learn(
    setup: Setup, state: RunState, rows: Rows, signal: LossInputs, draft_learns: bool
) -> tuple[RunState, Updates]:
    """One policy update per epoch and minibatch, in the first epoch followed by those of the draft from the features of
    that update's forward.

    Minibatch i takes rows i, i + n, ...: some of every group. A draft that does not learn is only asked what it expects
    to be accepted.
    """
    g = setup.settings.grpo
    policy, draft = state.policy, state.draft
    updates = Updates([], [], None, 0.0, np.zeros(rows.tokens.shape, np.float32))
    for i in range(g.epochs * g.minibatches):
        share = slice(i % g.minibatches, None, g.minibatches)
        part, part_signal = setup.on_learner(jax.tree.map(lambda x, share=share: x[share], (rows, signal)))
        first_epoch = i < g.minibatches
        wanted = draft is not None and first_epoch and (draft_learns or i == 0)
        # Before the update, which donates the tables and changes them.
        tables = setup.read_tables(policy.base, state.vocab_map) if wanted else None
        policy, metrics, learnt = setup.policy_step(policy, part, part_signal)
        updates.policy.append(metrics)
        if first_epoch:
            updates.logprobs[share] = distributed.to_host(learnt.logprobs)
        if not wanted:
            continue
        jax.block_until_ready(learnt)
        start = time.perf_counter()
        if draft_learns:
            draft, draft_updates = _learn_draft(setup, draft, tables, learnt.features, part)
            updates.draft.extend(draft_updates)
            diagnostics = draft_updates[0].diagnostics
        else:
            diagnostics = setup.predict_step(draft.params, tables, learnt.features, part)
        if i == 0:
            updates = updates._replace(diagnostics=jax.device_get(diagnostics))
        updates = updates._replace(draft_seconds=updates.draft_seconds + time.perf_counter() - start)
    policy = policy.replace(step=policy.step + 1)
    return state.replace(policy=policy, draft=draft), updates


def _learn_draft(
    setup: Setup, draft: TrainState, tables: TargetTables, features: Features, rows: Rows
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


def announce_programs(setup: Setup, state: RunState, display: Display) -> None:
    """Compiles every program of the training engine, and says how long each took."""
    weights, _ = setup.prepare(state)
    programs = setup.engine.programs
    display.start_phase("compile")
    programs.compile_all(weights, lambda program, seconds: display.say(f"engine program {program}: {seconds:.1f} s"))


def open_metrics(settings: Config, workdir: str, last_step: int) -> MetricsWriter | NoMetrics:
    """What the first process writes; the others write nothing."""
    if not distributed.is_first_process():
        return NoMetrics()
    return MetricsWriter(workdir, last_step, open_wandb(settings, workdir))


def open_wandb(settings: Config, workdir: str) -> WandbRun | None:
    """The run at Weights & Biases, where the config asks for one."""
    log = settings.logging
    if not log.wandb_project:
        return None
    return WandbRun(log.wandb_project, workdir, dataclasses.asdict(settings))


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
        lengths = None
        if speculation:
            # What is known of costs is known of the training engine's programs.
            lengths = speculation.lengths if engine is setup.engine else speculation.lengths_elsewhere
        words, scorer, seed = setup.tokenizer, setup.scorer, s.rollout.seed
        return evaluate(engine, weights, problems, samples, words, scorer, seed, display.update_phase, lengths)

    clock = PhaseClock(display)
    with clock("evaluate"):
        sampled = run(setup.eval_engine, s.eval.samples)
        row = sampled.metrics(setup.problems.validation)
        if warning := sampled.scores.warning():
            display.say(f"evaluation at step {step}: {warning}")
        if step in (0, s.steps):
            row["eval/accuracy_greedy"] = run(setup.greedy_engine, 1).accuracy
    if not distributed.is_first_process():
        return row
    os.makedirs(os.path.join(workdir, "evaluations"), exist_ok=True)
    path = os.path.join(workdir, "evaluations", f"step_{step}.jsonl")
    sampled.write(path, setup.tokenizer, setup.problems.validation)
    return row | {"time/evaluate": clock.seconds["evaluate"]}


def comparison_row(
    setup: Setup, state: RunState, display: Display, speculation: Speculation, stop: threading.Event
) -> dict[str, float]:
    """spec/speedup*: this run's own engine against draft.kind=none, on as many validation rollouts as a step has.

    Once `stop` is set no further round begins; without a single one there is nothing to say.
    """
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
            lambda: distributed.any_process(stop.is_set()),
        )
    if not len(ratios):
        return {}
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return {"spec/speedup": float(median), "spec/speedup_low": float(low), "spec/speedup_high": float(high)}


def _restore(setup: Setup, checkpoints: Checkpoints, stream: ProblemStream) -> tuple[RunState, int | None, Watch]:
    """(state, its step, the host's part), or all of it fresh and no step; the stream is moved to the saved position."""
    latest = checkpoints.latest()
    if latest is None:
        return setup.initial_state(), None, Watch(setup)
    if latest > setup.settings.steps:
        raise InputError(f"steps={setup.settings.steps}, but the run in this workdir has already done {latest}")
    state, host = checkpoints.restore(latest, setup.abstract_state())
    stream.position = host.values["position"]
    policy = state.policy.replace(frozen=setup.frozen_params())
    return state.replace(policy=policy), latest, Watch(setup, host)


def _without_frozen(state: RunState) -> RunState:
    return state.replace(policy=state.policy.replace(frozen=None))


def _leave_if(stop: threading.Event) -> None:
    if distributed.any_process(stop.is_set()):
        raise Stopped


def _note(row: dict[str, Any]) -> str:
    note = f"reward {row['reward/mean']:.3f}  {row['time/total']:.1f} s  {row['rollout/tokens_per_second']:.0f} tok/s"
    if "spec/acceptance_length" in row:
        note += f"  acceptance {row['spec/acceptance_length']:.2f}"
    if "eval/accuracy" in row:
        note += f"  accuracy {row['eval/accuracy']:.3f}"
    if row["policy/nonfinite_updates"]:
        note += f"  {row['policy/nonfinite_updates']} updates skipped"
    if alarms := [name.removeprefix("alarm/") for name, on in row.items() if name.startswith("alarm/") and on]:
        note += f"  ALARM {', '.join(alarms)}"
    return note
