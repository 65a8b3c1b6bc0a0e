"""task=train: RL steps with speculative rollouts."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator

from specrl_jax.config import Config
from specrl_jax.coordinator import refused_together
from specrl_jax.distributed import is_first_process
from specrl_jax.io.metrics import StepMetrics, read_metrics
from specrl_jax.io.prometheus import PrometheusPage
from specrl_jax.io.report import print_report
from specrl_jax.io.signals import stop_on_signal
from specrl_jax.io.trackers import Trackers
from specrl_jax.io.wandb import WandbRun
from specrl_jax.io.workdir import open_workdir
from specrl_jax.logs import silenced
from specrl_jax.rollout.workers.engine import with_workers
from specrl_jax.rollout.workers.processes import open_workers
from specrl_jax.training.inputs import open_inputs
from specrl_jax.training.loop import training_steps
from specrl_jax.training.resume import check_files


def run(config: Config, workdir: str, changed_files: bool = False) -> None:
    """Train, or resume the run in `workdir`; print the closing table and plot the run. `changed_files`: see `train`."""
    for _ in train(config, workdir, stop_on_signal(), changed_files=changed_files):
        pass
    if is_first_process():
        from specrl_jax.io.plots import plot_run  # matplotlib takes most of a second to import

        rows = read_metrics(workdir)
        print_report(rows, config.draft.length, plot_run(rows, workdir))


def train(
    config: Config,
    workdir: str,
    stop: threading.Event | None = None,
    *,
    changed_files: bool = False,
    quiet: bool = False,
) -> Iterator[StepMetrics]:
    """Train, or resume the run in `workdir`; yield the metrics of each step (docs/metrics.md).

    Row 0 is the evaluation before training. The workdir gets the same files as those of the command.

    Args:
      stop: once set, the run saves the last finished step and raises Stopped.
      changed_files: resume although files that the config names were replaced since.
      quiet: print nothing. What is printed otherwise goes through the logger `specrl_jax`.

    Raises:
      InputError: for a config, file or workdir that is wrong.

    Examples:
      >>> import tempfile
      >>> from specrl_jax import base, from_config_dict, train
      >>> c = base()
      >>> c.policy.preset, c.draft.kind, c.draft.length, c.draft.compare_rounds = "nano", "ngram", 1, 0
      >>> c.steps, c.grpo.prompts_per_step, c.grpo.group_size, c.rollout.num_slots = 1, 1, 2, 1
      >>> c.rollout.max_response_tokens, c.eval.samples, c.eval.problems = 4, 1, 1
      >>> rows = list(train(from_config_dict(c), tempfile.mkdtemp(), quiet=True))
      >>> [row["step"] for row in rows]
      [0, 1]
    """
    with contextlib.ExitStack() as ending:
        if quiet:
            ending.enter_context(silenced())
        trackers = ending.enter_context(contextlib.closing(Trackers()))
        checking = functools.partial(check_files, workdir, changed=changed_files)
        opening = functools.partial(open_trackers, trackers, workdir)
        inputs = ending.enter_context(open_inputs(config, workdir, checking=checking, opening=opening))
        assert inputs.scorer is not None  # it was asked for
        trackers.tell(lambda tracker: tracker.configure(dataclasses.asdict(inputs.config)))
        with refused_together():
            learner, rollout = inputs.build()
            if is_first_process():
                open_workdir(workdir, dataclasses.asdict(inputs.config))
        if config.pipeline.workers:
            rollout = with_workers(rollout, ending.enter_context(open_workers(config, workdir)))
        stop = stop or threading.Event()
        yield from training_steps(
            learner, rollout, inputs.problems, scorer=inputs.scorer, workdir=workdir, stop=stop, trackers=trackers
        )


def open_trackers(trackers: Trackers, workdir: str, config: Config) -> None:
    """Open those that the config asks for. Raises InputError where one cannot be had."""
    logging = config.logging
    if logging.prometheus_port:
        trackers.add(PrometheusPage(logging.prometheus_port))
    if logging.wandb_project:
        trackers.add(WandbRun(logging.wandb_project, workdir, dataclasses.asdict(config)))
