"""Logging to Weights & Biases, if configured. WANDB_MODE=offline keeps the run on disk."""

import importlib
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from specrl_jax.errors import InputError


class WandbRun:
    """One run of a project, resumed if the workdir has been logged before.

    Raises InputError if the package is missing or fails.
    """

    def __init__(self, project: str, workdir: str, config: dict[str, object]) -> None:
        try:
            # Imported here: the package is not a requirement.
            self._wandb = importlib.import_module("wandb")
        except ImportError:
            raise InputError(f"logging.wandb_project={project}: needs `pip install wandb`") from None
        path = pathlib.Path(workdir, "wandb_id")
        try:
            self._run = self._wandb.init(
                project=project,
                name=os.path.basename(os.path.abspath(workdir)),
                dir=workdir,
                config=config,
                id=(path.read_text().strip() if path.exists() else "") or None,
                resume="allow",
            )
        except Exception as error:  # wandb raises errors of many types
            raise InputError(f"logging.wandb_project={project}: {' '.join(str(error).split())}") from None
        path.write_text(self._run.id)
        # wandb's own step counter cannot go back, and a killed run resumes from its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, row: dict[str, float | None], histograms: Mapping[str, np.ndarray]) -> None:
        """`row` has "step"."""
        shown = {f"{name}_histogram": self._wandb.Histogram(values) for name, values in histograms.items()}
        self._run.log({name: value for name, value in row.items() if value is not None} | shown)

    def log_rollouts(self, step: int, rows: list[dict[str, object]]) -> None:
        columns = ["id", "reward", "prompt", "response"]
        table = self._wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({"step": step, "rollouts": table})

    def close(self) -> None:
        self._run.finish()
