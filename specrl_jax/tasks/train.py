"""task=train: RL steps with speculative rollouts."""

import dataclasses

from specrl_jax.config import Config
from specrl_jax.distributed import is_first_process
from specrl_jax.io.plots import plot_run
from specrl_jax.io.report import print_report
from specrl_jax.io.signals import stop_on_signal
from specrl_jax.io.workdir import open_workdir
from specrl_jax.training.build import make_learner, make_rollout, make_scorer
from specrl_jax.training.loop import train
from specrl_jax.training.plan import make_plan, open_mesh
from specrl_jax.training.problems import load_problems


def run(config: Config, workdir: str) -> None:
    """Train, or resume the run in `workdir`; print the closing table and plot the run."""
    plan = make_plan(config, open_mesh(config))
    learner, rollout = make_learner(plan), make_rollout(plan)
    problems = load_problems(config, rollout.tokenizer)
    if is_first_process():
        open_workdir(workdir, dataclasses.asdict(config))
    with make_scorer(config.reward) as scorer:
        rows = train(learner, rollout, problems, scorer, workdir, stop_on_signal())
    if is_first_process():
        print_report(rows, plot_run(rows, workdir))
