"""Metrics of a run: a JSON object a step in metrics.jsonl, the same scalars in TensorBoard, sample rollouts beside."""

import json
import math
import os
from typing import Any

import tensorboardX

from specrl_jax.core import BadInput


class MetricsWriter:
    """Appends rows to a workdir. Rows after `last_step` (of a run that is resumed from there) are dropped first.

    A step always has exactly one row: the file is line-buffered, and a half-written last line is dropped too.
    """

    def __init__(self, workdir: str, last_step: int) -> None:
        self._rollouts = os.path.join(workdir, "rollouts")
        os.makedirs(self._rollouts, exist_ok=True)
        path = os.path.join(workdir, "metrics.jsonl")
        kept = [row for row in read_metrics(workdir) if row["step"] <= last_step]
        with open(path + ".tmp", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
        os.replace(path + ".tmp", path)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (closed by close)
        self._board = tensorboardX.SummaryWriter(os.path.join(workdir, "tensorboard"), purge_step=last_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """One step; `row` has its number under "step". Non-finite values become null: JSON has no NaN."""
        clean = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        for name, value in clean.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, row["step"])

    def write_rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        with open(os.path.join(self._rollouts, f"step_{step}.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def close(self) -> None:
        self._file.close()
        self._board.close()


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
            raise BadInput(f"{path}:{number}: not JSON: {error.msg}") from None
    return rows
