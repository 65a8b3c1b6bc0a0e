"""Metrics of a run: a JSON object a step in metrics.jsonl; the same scalars, histograms and sample rollouts in
TensorBoard and, where asked for, Weights & Biases.
"""

import json
import math
import os
from typing import Any

import numpy as np
import tensorboardX

from specrl_jax.core import InputError, atomic_write
from specrl_jax.io.wandb import WandbRun

# Of the sample rollouts, those that TensorBoard shows.
SHOWN = 4


class MetricsWriter:
    """Appends rows to a workdir. Rows after `last_step` (of a run that is resumed from there) are dropped first.

    A step always has exactly one row: the file is line-buffered, and a half-written last line is dropped too.
    """

    def __init__(self, workdir: str, last_step: int, wandb: WandbRun | None = None) -> None:
        self._rollouts = os.path.join(workdir, "rollouts")
        os.makedirs(self._rollouts, exist_ok=True)
        path = os.path.join(workdir, "metrics.jsonl")
        kept = [row for row in read_metrics(workdir) if row["step"] <= last_step]
        with atomic_write(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (closed by close)
        self._board = tensorboardX.SummaryWriter(os.path.join(workdir, "tensorboard"), purge_step=last_step + 1)
        self._wandb = wandb

    def write(self, row: dict[str, Any], histograms: dict[str, np.ndarray] | None = None) -> None:
        """One step; `row` has its number under "step". Non-finite values become null: JSON has no NaN.

        `histograms`: values by name, for TensorBoard and Weights & Biases only.
        """
        clean = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        for name, value in clean.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, row["step"])
        for name, values in (histograms or {}).items():
            self._board.add_histogram(name, values, row["step"])
        if self._wandb:
            self._wandb.log(clean, histograms or {})

    def write_rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Sample rollouts: rollouts/step_N.jsonl, and a table of the first few elsewhere."""
        with open(os.path.join(self._rollouts, f"step_{step}.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._board.add_text("rollouts", _markdown(rows[:SHOWN]), step)
        if self._wandb:
            self._wandb.log_rollouts(step, rows)

    def close(self) -> None:
        self._file.close()
        self._board.close()
        if self._wandb:
            self._wandb.close()


class NoMetrics:
    """Takes the same calls and writes nothing."""

    def write(self, row: dict[str, Any], histograms: dict[str, np.ndarray] | None = None) -> None:
        pass

    def write_rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


def _markdown(rows: list[dict[str, Any]]) -> str:
    """A table whose cells are literal text."""

    def cell(text: str) -> str:
        return "`" + " ".join(text.split()).replace("`", "'").replace("|", "/") + "`"

    lines = [f"| {row['reward']:.3g} | {cell(row['prompt'])} | {cell(row['response'])} |" for row in rows]
    return "\n".join(["| reward | prompt | response |", "|---|---|---|", *lines])


def read_metrics(workdir: str) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl; an incomplete last line (a killed run's) is left out."""
    path = os.path.join(workdir, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path) as file:
        lines = file.read().split("\n")[:-1]  # what follows the last newline is incomplete
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON: {error.msg}") from None
    return rows
