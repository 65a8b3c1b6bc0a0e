"""A run at Weights & Biases, where the config asks for one. WANDB_MODE=offline keeps it on this disk."""

import importlib
import os
from typing import Any

import numpy as np

from specrl_jax.core import InputError


class WandbRun:
    """One run of a project, resumed where the workdir has been before.

    Raises InputError where the package is missing or refuses.
    """

    def __init__(self, project: str, workdir: str, config: dict[str, Any]) -> None:
        try:
            # Only here: the package is no requirement of this project.
            self._wandb = importlib.import_module("wandb")
        except ImportError:
            raise InputError(f"logging.wandb_project={project}: needs `pip install wandb`") from None
        path = os.path.join(workdir, "wandb_id")
        try:
            self._run = self._wandb.init(
                project=project,
                name=os.path.basename(os.path.abspath(workdir)),
                dir=workdir,
                config=config,
                id=_read(path) or None,
                resume="allow",
            )
        except Exception as error:  # its errors are of many kinds; none is worth a traceback
            raise InputError(f"logging.wandb_project={project}: {' '.join(str(error).split())}") from None
        with open(path, "w") as file:
            file.write(self._run.id)
        # Its own counter may only grow; a run that was killed goes back to its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, row: dict[str, Any], histograms: dict[str, np.ndarray]) -> None:
        """`row` has "step"."""
        shown = {f"{name}_histogram": self._wandb.Histogram(values) for name, values in histograms.items()}
        self._run.log({name: value for name, value in row.items() if value is not None} | shown)

    def log_rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        columns = ["id", "reward", "prompt", "response"]
        table = self._wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({"step": step, "rollouts": table})

    def close(self) -> None:
        self._run.finish()


def _read(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read().strip()
