"""Logging to Weights & Biases, if configured. WANDB_MODE=offline keeps the run on disk."""

import importlib
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.io.trackers import Tracker


class WandbRun(Tracker):
    """One run of a project, resumed if the workdir has been logged before.

    Raises InputError if the package is missing or does not open the run: the config asks for it.
    """

    name = "wandb"

    def __init__(self, project: str, workdir: str, config: dict[str, object]) -> None:
        path, self._config = pathlib.Path(workdir, "wandb_id"), config
        try:
            os.makedirs(workdir, exist_ok=True)
            # Imported here: the package is not a requirement.
            self._wandb = importlib.import_module("wandb")
            self._run = self._wandb.init(
                project=project,
                name=os.path.basename(os.path.abspath(workdir)),
                dir=workdir,
                config=config,
                id=(path.read_text().strip() if path.exists() else "") or None,
                resume="allow",
            )
            path.write_text(self._run.id)
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise InputError(f"logging.wandb_project={project}: {error}") from None
            raise InputError(f"logging.wandb_project={project}: needs `pip install wandb`") from None
        except Exception as error:  # wandb raises errors of many types
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"logging.wandb_project={project}: {reason}; '' does without") from None

    def configure(self, config: dict[str, object]) -> None:
        if config != self._config:
            self._run.config.update(config, allow_val_change=True)

    def begin(self, kept: Sequence[Mapping[str, float]]) -> None:
        # wandb's own step counter cannot go back, and a killed run resumes from its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, float | None], histograms: Mapping[str, np.ndarray]) -> None:
        shown = {f"{name}_histogram": self._wandb.Histogram(values) for name, values in histograms.items()}
        self._run.log({name: value for name, value in row.items() if value is not None} | shown)

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        columns = ["id", "reward", "prompt", "response"]
        table = self._wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({"step": step, "rollouts": table})

    def close(self) -> None:
        self._run.finish()
