"""The training loop: steps, evaluations, checkpoints, resuming and ending. One step is in training/step.py."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping

import jax

from specrl_jax import distributed
from specrl_jax.config import Config
from specrl_jax.data.sources import ProblemStream
from specrl_jax.errors import InputError, RunFailed, Stopped
from specrl_jax.io.checkpoints import Checkpoints, HostState
from specrl_jax.io.metrics import MetricsWriter, NoMetrics, Row
from specrl_jax.io.progress import Display, PhaseClock
from specrl_jax.io.wandb import WandbRun
from specrl_jax.learner.state import RunState
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.training.build import Learner, Rollout, prepare
from specrl_jax.training.evaluate import evaluation_metrics
from specrl_jax.training.initial import abstract_run_state, frozen_params, initial_state, initial_trained
from specrl_jax.training.metrics import rollout_samples, speculation_metrics, step_metrics
from specrl_jax.training.monitor import Monitor
from specrl_jax.training.performance import make_performance
from specrl_jax.training.pipeline import make_pipeline
from specrl_jax.training.problems import Problems
from specrl_jax.training.speedup import speedup_metrics
from specrl_jax.training.step import train_step
from specrl_jax.training.update import copy_params


def training_steps(
    learner: Learner, rollout: Rollout, problems: Problems, scorer: Scorer, workdir: str, stop: threading.Event
) -> Iterator[Row]:
    """Run, or resume, a training run in `workdir`; yield the metrics of each step once they are written.

    Row 0, the evaluation before training, comes first.

    Args:
      stop: set by a signal handler; the run then saves the last finished step and leaves.
    Raises:
      Stopped: after saving, where `stop` was set.
      InputError: a checkpoint or data position that does not fit.
      RunFailed: the policy's gradient stays without a finite value, or nothing can be written; says what is kept.
    """
    config = learner.plan.config
    scorer.start()
    stream, checkpoints = problems.stream(config.grpo.prompts_per_step), open_checkpoints(config, workdir)
    state, restored, monitor = _start(learner, rollout, checkpoints, stream)
    step, host, speculation = restored or 0, HostState({}, {}), monitor.speculation
    writer = _open_metrics(config, workdir, -1 if restored is None else restored)
    performance, devices = make_performance(learner), threading.Lock()

    def evaluation(state: RunState, step: int) -> dict[str, float]:
        weights, _ = prepare(learner, rollout, state)
        return evaluation_metrics(rollout, weights, problems, scorer, step, workdir, display, speculation.lengths_for)

    with Display(config.steps, step, distributed.is_first_process()) as display, contextlib.ExitStack() as ending:
        try:
            display.start_phase("compile")
            weights, _ = prepare(learner, rollout, state)
            say = lambda program, seconds: display.say(f"engine program {program}: {seconds:.1f} s")  # noqa: E731
            rollout.engine.compiled.compile_all(weights, say)
            del weights
            if restored is None:
                row: Row = {"step": 0} | evaluation(state, 0)
                writer.write(row)
                yield row
            pipeline = make_pipeline(rollout, stream, scorer, speculation, step + 1, display.update_phase, devices)
            ending.callback(pipeline.close)
            while step < config.steps:
                clock = PhaseClock(display)
                profiled = step + 1 in config.logging.profile_steps  # for Perfetto or TensorBoard
                with jax.profiler.trace(os.path.join(workdir, "profile")) if profiled else contextlib.nullcontext():
                    state, result = train_step(learner, rollout, state, pipeline, speculation, step + 1, clock, stop)
                step, generated = step + 1, result.generated
                row = step_metrics(result, learner, performance)
                if rollout.engine.draft_length:
                    row |= speculation_metrics(generated.rollouts)
                    row |= speculation.observe(generated.rollouts, result.updates.diagnostics)
                if state.draft:
                    row |= {"draft/version": int(state.draft.step)}
                if warning := generated.scores.warning():
                    display.say(f"step {step}: {warning}")
                row |= monitor.observe(row, [bool(u.skipped) for u in result.updates.policy], checkpoints, display)
                host = monitor.state(result.position)
                if step == config.steps or (config.eval.every and step % config.eval.every == 0):
                    with devices:
                        row |= evaluation(state, step)
                if step == config.steps and rollout.engine.draft_length and config.draft.compare_rounds:
                    display.start_phase("speedup")
                    weights, _ = prepare(learner, rollout, state)
                    row |= speedup_metrics(rollout, weights, problems.evaluation, speculation.lengths, stop)
                lengths = generated.rollouts.response_length
                writer.write(row, {"reward": generated.scores.total, "rollout/response_length": lengths})
                writer.write_rollouts(step, rollout_samples(generated, rollout.tokenizer, config.logging.rollouts))
                if step == config.steps or step % config.checkpoint.every == 0:
                    checkpoints.save(step, _saved_part(state, config), host, row.get("eval/accuracy"))
                display.finish_step(step, _note(row, rollout.engine.draft_length))
                yield row
        except Stopped:
            if step:
                checkpoints.save(step, _saved_part(state, config), host)
                raise Stopped(f"step {step} is saved; the same command resumes from there") from None
            raise Stopped("no step was done yet; the same command starts anew") from None
        except OSError as error:
            raise RunFailed(f"{error.filename or workdir}: {error.strerror}; {checkpoints.kept()}") from None
        finally:
            writer.close()
            checkpoints.close()


def open_checkpoints(config: Config, workdir: str) -> Checkpoints:
    """Open checkpoints/ of a workdir with the retention of checkpoint.*."""
    c = config.checkpoint
    return Checkpoints(workdir, c.keep, c.keep_best)


def _start(
    learner: Learner, rollout: Rollout, checkpoints: Checkpoints, stream: ProblemStream
) -> tuple[RunState, int | None, Monitor]:
    """Return (state, its step, monitor) of the last checkpoint, or fresh ones and None; seek the stream to there."""
    plan, steps = learner.plan, learner.plan.config.steps
    latest = checkpoints.latest()
    if latest is None:
        state, monitor = initial_state(learner), Monitor(plan, rollout.engine)
    elif latest > steps:
        raise InputError(f"steps={steps}, but the run in this workdir has already done {latest}")
    else:
        state, host = checkpoints.restore(latest, abstract_run_state(learner))
        stream.position, monitor = host.values["position"], Monitor(plan, rollout.engine, host)
        state = dataclasses.replace(state, policy=dataclasses.replace(state.policy, frozen=frozen_params(learner)))
    if plan.config.grpo.kl_coef and state.reference is None:
        reference = copy_params(state.policy) if latest is None else initial_trained(learner)
        state = dataclasses.replace(state, reference=reference)
    return state, latest, monitor


def _saved_part(state: RunState, config: Config) -> RunState:
    """Return what a checkpoint holds: without frozen weights and a first reference, which the config determines."""
    reference = state.reference if config.grpo.reference_every else None
    return dataclasses.replace(state, policy=dataclasses.replace(state.policy, frozen=None), reference=reference)


def _open_metrics(config: Config, workdir: str, last_step: int) -> MetricsWriter | NoMetrics:
    """Open the metrics of the first process; the others write none."""
    if not distributed.is_first_process():
        return NoMetrics()
    project = config.logging.wandb_project
    wandb = WandbRun(project, workdir, dataclasses.asdict(config)) if project else None
    return MetricsWriter(workdir, last_step, wandb)


def _note(row: Mapping[str, float], draft_length: int) -> str:
    """Return the progress line of a step."""
    note = f"reward {row['reward/mean']:.3f}  {row['time/total']:.1f} s  {row['rollout/tokens_per_second']:.0f} tok/s"
    if "spec/acceptance_length" in row:
        note += f"  {row['spec/acceptance_length']:.1f} of {draft_length + 1} tokens"
    if "eval/accuracy" in row:
        note += f"  accuracy {row['eval/accuracy']:.3f}"
    if row["policy/nonfinite_updates"]:
        note += f"  {row['policy/nonfinite_updates']} updates skipped"
    if alarms := [name.removeprefix("alarm/") for name, on in row.items() if name.startswith("alarm/") and on]:
        note += f"  ALARM {', '.join(alarms)}"
    return note
