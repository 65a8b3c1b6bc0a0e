"""task=train: RL steps with speculative rollouts."""

import dataclasses

from specrl_jax.config import Config
from specrl_jax.distributed import is_first_process
from specrl_jax.io.plots import plot_run
from specrl_jax.io.report import print_report
from specrl_jax.io.signals import stop_on_signal
from specrl_jax.io.workdir import open_workdir
from specrl_jax.training.build import build
from specrl_jax.training.loop import train
from specrl_jax.training.plan import open_mesh


def run(config: Config, workdir: str) -> None:
    """Train, or go on where the run in `workdir` stopped; print the closing table and plot the run."""
    setup = build(config, open_mesh(config))
    setup.check_problems()
    if is_first_process():
        open_workdir(workdir, dataclasses.asdict(config))
    with setup.scorer:
        rows = train(setup, workdir, stop_on_signal())
    if is_first_process():
        print_report(rows, plot_run(rows, workdir))
