"""The training loop: steps, evaluations, checkpoints, resuming and ending. One step is in training/step.py."""

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from specrl_jax import coordinator, distributed
from specrl_jax.errors import RunFailed, Stopped, WorkersFailed, system_line
from specrl_jax.io.agreement import named_files
from specrl_jax.io.metrics import MetricsWriter, StepMetrics, read_metrics
from specrl_jax.io.progress import Display, PhaseClock, compiles
from specrl_jax.io.signals import raise_once_set
from specrl_jax.io.trackers import Tracker, Trackers
from specrl_jax.learner.beside import Beside
from specrl_jax.learner.build import Learner
from specrl_jax.planning.problems import Problems
from specrl_jax.rewards.messages import NotScored
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rollout.async_pipeline import make_pipeline
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.rollout.devices import Devices
from specrl_jax.rollout.generate import NOTHING_PREFETCHED, RolloutGenerator
from specrl_jax.rollout.pipeline import with_rollouts
from specrl_jax.rollout.stale.partial import local_partial_rollouts
from specrl_jax.training.build import prepare
from specrl_jax.training.evaluate import evaluation_metrics, greedy_too
from specrl_jax.training.metrics import rollout_samples, speculation_metrics, step_metrics
from specrl_jax.training.performance import make_performance
from specrl_jax.training.resume import open_checkpoints, saved_part, start_run
from specrl_jax.training.saving import DueSaves, save_good
from specrl_jax.training.speedup import comparison_share, speedup_metrics
from specrl_jax.training.step import StepParts, StepResult, train_step


def training_steps(
    learner: Learner,
    rollout: RolloutEngines,
    problems: Problems,
    *,
    scorer: Scorer,
    workdir: str,
    stop: threading.Event,
    trackers: Trackers | None = None,
    evaluates: bool = True,
) -> Iterator[StepMetrics]:
    """Run, or resume, a training run in `workdir`; yield the metrics of each step once they are written.

    Row 0, the evaluation before training, comes first.

    Args:
      stop: set by a signal handler; the run then saves the last finished step and leaves.
      trackers: show the metrics too; of the first process.
      evaluates: False leaves out every evaluation and what it compiles, for measurements of steps alone.
    Raises:
      Stopped: where `stop` was set; the last finished step is saved, unless its next rollouts are still under way.
      InputError: a checkpoint or data position that does not fit.
      RunFailed: no response can be scored, the policy or its gradient stays without a finite value, nothing can be
        written, or no checkpoint is whole; says what is kept.
    """
    scorer.start()
    run = _Run(
        learner, rollout, problems, scorer, workdir, stop=stop, trackers=trackers or Trackers(), evaluates=evaluates
    )
    with run.display, contextlib.ExitStack() as ending:
        try:
            with coordinator.leave_with_others():
                run.wait_for_workers()
                if run.step < run.config.steps and jax.process_count() == 1:
                    ending.callback(run.compile_beside().close)
                if run.unfinished:
                    row = run.finish_row(run.unfinished, {})
                    run.show_step(row)
                    yield row
                run.open_pipeline()
                ending.callback(run.parts.pipeline.close)
                while run.step < run.config.steps:
                    yield run.make_step()
        except Stopped:
            raise Stopped(run.save_stopped()) from None
        except (NotScored, WorkersFailed) as error:
            raise RunFailed(f"{error}; {run.checkpoints.kept()}") from None
        except OSError as error:
            raise RunFailed(f"{system_line(error)}; {run.checkpoints.kept()}") from None
        finally:
            ending.close()  # before what all devices take part in
            run.close()


@dataclasses.dataclass(eq=False)
class _Run:
    """A run from its start, fresh or from a checkpoint, to its end: what its steps share."""

    learner: Learner
    rollout: RolloutEngines
    problems: Problems
    scorer: Scorer
    workdir: str
    _: dataclasses.KW_ONLY
    stop: threading.Event
    trackers: Trackers
    evaluates: bool

    def __post_init__(self) -> None:
        learner, rollout = self.learner, self.rollout
        self.config = learner.plan.config
        grpo = self.config.grpo
        self.stream = self.problems.stream(1 if grpo.oversample else grpo.prompts_per_step)
        self.checkpoints = open_checkpoints(self.config, self.workdir)
        with coordinator.refused_together():  # before the checkpoint is: a damaged file is found before long work
            written = read_metrics(self.workdir) if distributed.is_first_process() else []
        self.files = named_files(dataclasses.asdict(self.config))  # as they are now, for whoever resumes
        start = start_run(learner, rollout, self.checkpoints, stream=self.stream)
        self.state, self.monitor, self.prefetched = start.state, start.monitor, start.prefetched
        self.replay = start.replay
        self.restored, self.step = start.step, start.step or 0
        # Of a step whose metrics are not written yet.
        self.unfinished = start.unfinished
        is_written = any(row["step"] == self.step for row in written)
        if self.unfinished and self.restored is not None and distributed.any_process(is_written):
            self.unfinished = {}
        self.position: Mapping[str, object] | None = None  # of the data stream after `step`, once a step was done
        earlier_rows = [row for row in written if self.restored is not None and row["step"] <= self.restored]
        self.performance, self.devices = make_performance(learner), Devices()
        self.display = Display(self.config.steps, self.step, self.stop, shown=distributed.is_first_process())
        self.trackers.say = self.display.say
        first = distributed.is_first_process()
        self.writer = MetricsWriter(self.workdir, earlier_rows, self.trackers) if first else Tracker()
        learner.programs.on_program = self.display.say_learner_program
        rollout.engine.compiled.beside = True
        # A controller follows the clock in any case; processes that run in lock-step shrink together.
        adaptive = self.config.draft.adaptive and rollout.engine.draft_length > 0
        rollout.engine.compiled.stays_large = adaptive and jax.process_count() == 1
        rollout.announce(self.display.say_engine_program, self.display.say_begun)
        self.evaluation, self.generation = 0.0, 0.0  # seconds of the last one, without those of compiling
        self.remarks = ""  # on `step`, for its line
        self.due = DueSaves(self.checkpoints, self.config.checkpoint.every, self.config.steps, say=self.display.say)

    @property
    def compares(self) -> bool:
        """Return whether the run ends with a comparison with plain decoding, which is of single turns."""
        single = not self.config.environment.name
        return bool(single and self.rollout.engine.draft_length and self.config.draft.compare_rounds)

    def compile_beside(self) -> Beside:
        """Begin to compile the learner's programs."""
        spare = self.rollout.engine.compiled.spare
        if self.config.pipeline.workers:
            spare.set()
        return Beside(self.learner, self.state, spare)

    def wait_for_workers(self) -> None:
        """Wait until a worker has compiled its programs; an engine of this process compiles what its calls run."""
        if not self.config.pipeline.workers:
            return
        self.display.start_phase("compile")
        weights, _ = prepare(self.learner, self.rollout, self.state)
        look = functools.partial(self.display.update_phase, 0, 0)
        with distributed.together():
            self.rollout.engine.compile_all(weights, self.display.say_compiled, look)

    def open_pipeline(self) -> None:
        """Open the source of rollouts, with those that the checkpoint held."""
        # The display belongs to this thread.
        synchronous = not self.config.pipeline.asynchronous
        on_progress = self.display.update_phase if synchronous else raise_once_set(self.stop)
        generation = RolloutGenerator(
            self.rollout,
            self.stream,
            self.scorer,
            speculation=self.monitor.speculation,
            on_progress=on_progress,
            partial=local_partial_rollouts(self.prefetched.left),
        )
        pipeline = make_pipeline(
            self.learner.plan,
            generation,
            first=self.step + 1,
            devices=self.devices,
            workdir=self.workdir,
            restored=self.prefetched,
        )
        self.prefetched = NOTHING_PREFETCHED
        speculation, replay = self.monitor.speculation, self.replay
        self.parts = StepParts(
            self.learner, self.rollout, pipeline, speculation=speculation, replay=replay, stop=self.stop
        )

    def make_step(self) -> StepMetrics:
        """Make the next step: train, evaluate, write its row, save. Return the row."""
        step, clock = self.step + 1, PhaseClock(self.display)
        profiled = step in self.config.logging.profile_steps  # for Perfetto or TensorBoard
        with jax.profiler.trace(os.path.join(self.workdir, "profile")) if profiled else contextlib.nullcontext():
            self.state, result = train_step(self.parts, self.state, step=step, clock=clock)
        self.step, self.position, generated = step, result.produced.position, result.generated
        row = self._metrics(result) | {"time/compile": min(clock.compiled(), result.total)}
        if not (self.generation and compiles(row)):
            self.generation = row["time/generate"]
        tokenizer, shown = self.rollout.tokenizer, self.config.logging.rollouts
        self.writer.write_rollouts(step, rollout_samples(generated, tokenizer, self.config.draft.kind, count=shown))
        lengths = generated.rollouts.response_length
        self.finish_row(row, {"reward": generated.scores.total, "rollout/response_length": lengths})
        self.due.finish_step(step, functools.partial(self._save, row.get("eval/accuracy")))
        self.show_step(row)
        return row

    @property
    def _comparison(self) -> float:
        """Estimate the seconds that the comparison takes: those of a warm-up, then of rounds, of both engines.

        Plain decoding is taken for half as fast.
        """
        rounds = 1 + self.config.draft.compare_rounds
        return 3 * rounds * comparison_share(self.config) * self.generation if self.compares else 0.0

    def show_step(self, row: StepMetrics) -> None:
        """Print the line of a step whose row is written."""
        note = _note(row, self.rollout.engine.draft_length, self.remarks)
        ahead = self._comparison + self.evaluation * evaluations_left(
            self.step, self.config.steps, self.config.eval.every
        )
        self.display.finish_step(self.step, note, row.get("time/evaluate", 0.0), ahead=ahead)

    def _metrics(self, result: StepResult) -> StepMetrics:
        """Return the metrics of the step, with its alarms; keep its remarks."""
        generated = result.generated
        remote = self.rollout.engine.remote
        workers = remote.metrics() if remote else {}
        beside = self.performance.rollout_devices or int(workers.get("rollout/worker_devices", 0))
        performance = dataclasses.replace(self.performance, rollout_devices=beside)
        row = step_metrics(result, self.learner, performance) | workers
        if self.rollout.engine.draft_length:
            row |= speculation_metrics(generated.rollouts)
            row |= self.monitor.speculation.observe(generated.rollouts, result.updates.diagnostics)
        if self.state.draft:
            row |= {"draft/version": int(self.state.draft.step)}
        skipped = [bool(update.skipped) for update in result.updates.policy]
        alarms, message = self.monitor.observe(row, skipped, self.checkpoints)
        self.remarks = "  ".join(filter(None, (generated.scores.warning(), message)))
        return row | alarms

    def finish_row(self, row: StepMetrics, histograms: Mapping[str, np.ndarray]) -> StepMetrics:
        """Add what is due after the row's step, and write the row. Raise Stopped before anything is written."""
        self.unfinished = row
        step, last, config = int(row["step"]), int(row["step"]) == self.config.steps, self.config
        if self.evaluates and (not step or last or (config.eval.every and step % config.eval.every == 0)):
            row |= self._evaluate(step)
        if step and last and self.compares:
            row |= self._compare()
        self.writer.write(row, histograms)
        self.unfinished = {}
        return row

    # Each of the two releases its rollout weights when it returns: there is memory for one copy.

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation after a step."""
        samples, about = self.config.eval.samples + greedy_too(self.config, step), ""
        answers = len(self.problems.evaluation) * samples
        if self.evaluation:
            about = f", about {self.evaluation:.0f} s"
        self.display.say_wait(f"evaluating {answers} answers{about}", self.evaluation)
        with self.devices:
            weights, _ = prepare(self.learner, self.rollout, self.state)
            clock = PhaseClock(self.display)
            row = evaluation_metrics(
                self.rollout,
                weights,
                self.problems,
                scorer=self.scorer,
                step=step,
                workdir=self.workdir,
                display=self.display,
                lengths_for=self.monitor.speculation.lengths_for,
            )
            self.evaluation = clock.total() - clock.compiled()
            return row

    def _compare(self) -> dict[str, float]:
        """Return the metrics of the closing comparison with plain decoding."""
        about = self._comparison
        self.display.say_wait(f"comparing with plain decoding, about {about:.0f} s", about)
        self.display.start_phase("speedup")
        self.rollout.engine.compiled.beside = False
        weights, _ = prepare(self.learner, self.rollout, self.state)
        problems, lengths = self.problems.evaluation, self.monitor.speculation.lengths
        return speedup_metrics(self.rollout, weights, problems, lengths=lengths, on_progress=self.display.update_phase)

    def _save(self, accuracy: float | None = None, wait: bool = True) -> str:
        """Save the last step. Return why it is not saved, "" if it is; without `wait` not for its next rollouts."""
        if self.step == self.restored:
            return ""
        if self.position is None or (prefetched := self.parts.pipeline.prefetched(self.step, wait)) is None:
            return f"the rollouts after step {self.step} were under way"
        host = with_rollouts(self.monitor.state(self.position), prefetched)
        host = host._replace(values=host.values | {"files": self.files})
        if self.replay:
            host = self.replay.with_texts(host)
        if self.unfinished:
            host = host._replace(values=host.values | {"unfinished": self.unfinished})
        state = saved_part(self.state)
        with self.devices:  # all devices take part when processes wait for each other here
            return save_good(
                self.checkpoints, self.step, state, host=host, skipping=self.monitor.skipping, accuracy=accuracy
            )

    def save_stopped(self) -> str:
        """Save the last step after a signal; return what the user is told."""
        if not self.step:
            return "no step was done yet; the same command starts anew"
        if why := self._save(wait=False):
            return f"step {self.step} is not saved: {why}; {self.checkpoints.kept()}"
        return f"step {self.step} is saved; the same command resumes from there"

    def close(self) -> None:
        self.writer.close()
        self.checkpoints.close()


def evaluations_left(step: int, steps: int, every: int) -> int:
    """Return how many evaluations there are after `step`: every `every` steps, 0 being never, and after the last."""
    if step >= steps:
        return 0
    return 1 if not every else -(-steps // every) - step // every


def _note(row: Mapping[str, float], draft_length: int, remarks: str) -> str:
    """Return what the line of a step says. Row 0 has an accuracy only."""
    parts = []
    if "time/total" in row:
        speed = row["rollout/tokens_per_second"]
        parts += [f"reward {row['reward/mean']:.3f}", f"{row['time/total']:.1f} s", f"{speed:.0f} tokens/s"]
    if "spec/acceptance_length" in row:
        parts.append(f"acceptance {row['spec/acceptance_length']:.1f} of {draft_length + 1}")
    if "eval/accuracy" in row:
        parts.append(f"accuracy {row['eval/accuracy']:.3f}")
    if row.get("policy/nonfinite_updates"):
        parts.append(f"{row['policy/nonfinite_updates']} updates skipped")
    return "  ".join(filter(None, (*parts, remarks)))
