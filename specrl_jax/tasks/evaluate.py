"""task=evaluate: accuracy of a policy on the validation sets."""

import dataclasses

from specrl_jax.config import Config
from specrl_jax.io.workdir import open_workdir
from specrl_jax.training.build import build
from specrl_jax.training.evaluate import run_evaluation
from specrl_jax.training.plan import open_mesh


def run(config: Config, workdir: str) -> None:
    """Evaluate and write the result to `workdir`."""
    setup = build(config, open_mesh(config))
    setup.check_problems(train=False)
    open_workdir(workdir, dataclasses.asdict(config))
    with setup.scorer:
        run_evaluation(setup, workdir)
