"""Metrics of a run: one JSON object per step in metrics.jsonl, and whatever else follows it (trackers)."""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np
import pydantic

from specrl_jax.core import atomic_write, naming, open_written
from specrl_jax.io.tensorboard import TensorBoard
from specrl_jax.io.trackers import Trackers
from specrl_jax.json_files import LINE_BYTES, Checked, check, parse_json, read_lines

StepMetrics = dict[str, float]  # metrics of one step by name; read back, None for a value that is not finite
Sample = dict[str, object]  # a rollout of rollouts/step_N.jsonl


class MetricsWriter:
    """Appends rows to those that a workdir keeps: of a resumed run, the rows up to its checkpoint.

    A step always has exactly one row: the file is line-buffered, and an incomplete last line is dropped. A file that
    cannot be written raises OSError, which names it.

    Args:
      trackers: get each row too, and TensorBoard with them; closed with the writer.
    """

    def __init__(
        self,
        workdir: str,
        kept: Sequence[StepMetrics] = (),
        trackers: Trackers | None = None,
    ) -> None:
        self._rollouts = os.path.join(workdir, "rollouts")
        os.makedirs(self._rollouts, exist_ok=True)
        self._path = os.path.join(workdir, "metrics.jsonl")
        with atomic_write(self._path) as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
        self._file = open(self._path, "a", buffering=1)  # noqa: SIM115 (closed by close)
        self._trackers = trackers or Trackers()
        self._trackers.add(TensorBoard(os.path.join(workdir, "tensorboard")))
        self._trackers.tell(lambda tracker: tracker.begin(kept))

    def write(self, row: StepMetrics, histograms: Mapping[str, np.ndarray] | None = None) -> None:
        """Write one step; `row` has its number under "step". Non-finite values become null.

        Args:
          histograms: values by name, for TensorBoard and Weights & Biases only.
        """
        clean = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        with naming(self._path):
            self._file.write(json.dumps(clean) + "\n")
        self._trackers.tell(lambda tracker: tracker.write(clean, histograms or {}))

    def write_rollouts(self, step: int, rows: list[Sample]) -> None:
        """Write sample rollouts to rollouts/step_N.jsonl."""
        with open_written(os.path.join(self._rollouts, f"step_{step}.jsonl")) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._trackers.tell(lambda tracker: tracker.write_rollouts(step, rows))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a row that could not be written, as `write` has said
            self._file.close()
        self._trackers.close()


class MetricsRow(Checked):
    """A line of metrics.jsonl; null stands for a value that was not finite."""

    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bool | int | float]
    step: int = pydantic.Field(ge=0)


def read_metrics(workdir: str) -> list[StepMetrics]:
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


def plain_seconds(row: StepMetrics, last: StepMetrics) -> float | None:
    """Return the seconds that a step would take without drafts: rollouts slower by the closing comparison of the
    `last` row, and no training of the draft. None without one, and where rollouts are generated beside the learner.
    """
    generate, speedup = row["time/generate"], last.get("spec/speedup")
    waited = row.get("time/exposed_generation", generate)
    if speedup is None or not math.isfinite(speedup) or waited < 0.98 * generate:
        return None
    return row["time/total"] - generate - row.get("draft/seconds", 0.0) + generate * speedup
