"""Metrics of a run: one JSON object per step in metrics.jsonl; scalars, histograms and sample rollouts in TensorBoard
and, if configured, Weights & Biases; scalars on a page for Prometheus.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pydantic
import tensorboardX

from specrl_jax.core import atomic_write
from specrl_jax.io.prometheus import PrometheusPage
from specrl_jax.io.wandb import WandbRun
from specrl_jax.json_files import LINE_BYTES, Checked, check, parse_json, read_lines

Row = dict[str, float]  # metrics of one step by name; read back, None for a value that is not finite
Sample = dict[str, object]  # a rollout of rollouts/step_N.jsonl

SHOWN = 4  # sample rollouts in TensorBoard


class MetricsWriter:
    """Appends rows to those that a workdir keeps: of a resumed run, the rows up to its checkpoint.

    A step always has exactly one row: the file is line-buffered, and an incomplete last line is dropped.

    Args:
      page: shows the newest values, those of the kept rows first; it stays open.
    """

    def __init__(
        self,
        workdir: str,
        kept: Sequence[Row] = (),
        wandb: WandbRun | None = None,
        page: PrometheusPage | None = None,
    ) -> None:
        self._rollouts = os.path.join(workdir, "rollouts")
        os.makedirs(self._rollouts, exist_ok=True)
        path = os.path.join(workdir, "metrics.jsonl")
        with atomic_write(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (closed by close)
        first = int(kept[-1]["step"]) + 1 if kept else 0
        self._board = tensorboardX.SummaryWriter(os.path.join(workdir, "tensorboard"), purge_step=first)
        self._wandb, self._page = wandb, page
        if page:
            for row in kept:
                page.write(row)

    def write(self, row: Row, histograms: Mapping[str, np.ndarray] | None = None) -> None:
        """Write one step; `row` has its number under "step". Non-finite values become null.

        Args:
          histograms: values by name, for TensorBoard and Weights & Biases only.
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
        if self._page:
            self._page.write(clean)

    def write_rollouts(self, step: int, rows: list[Sample]) -> None:
        """Write sample rollouts to rollouts/step_N.jsonl, and the first few as a table to TensorBoard."""
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
    """Accepts the same calls and writes nothing."""

    def write(self, row: Row, histograms: Mapping[str, np.ndarray] | None = None) -> None:
        pass

    def write_rollouts(self, step: int, rows: list[Sample]) -> None:
        pass

    def close(self) -> None:
        pass


def _markdown(rows: list[Sample]) -> str:
    """Return rewards, prompts and responses; texts stand in fenced code, where Markdown changes none but tabs."""

    def fenced(text: object) -> str:
        fence = "~" * max(3, 1 + max(map(len, re.findall("~+", str(text))), default=0))
        return f"{fence}\n{text}\n{fence}"

    return "\n\n".join(
        f"**rollout {row['id']}**, reward {row['reward']:.3g}\n\n{fenced(row['prompt'])}\n\n{fenced(row['response'])}"
        for row in rows
    )


class MetricsRow(Checked):
    """A line of metrics.jsonl; null stands for a value that was not finite."""

    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bool | int | float]
    step: int = pydantic.Field(ge=0)


def read_metrics(workdir: str) -> list[Row]:
    """Read the rows of metrics.jsonl, without an incomplete last line of a killed run. Raises InputError by line."""
    path = os.path.join(workdir, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    rows = []
    for line, text in read_lines(path, LINE_BYTES):
        row = parse_json(text, path, line=line)
        check(MetricsRow, row, f"{path}:{line}")
        rows.append(row)
    return rows
