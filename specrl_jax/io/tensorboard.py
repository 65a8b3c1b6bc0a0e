"""The metrics of a run in a folder that TensorBoard reads."""

import os
import re
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tensorboardX
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from specrl_jax.io.trackers import Tracker

SHOWN = 4  # sample rollouts


class TensorBoard(Tracker):
    """Writes scalars, histograms and a few rollouts; what an earlier file has after the kept rows is not shown."""

    name = "tensorboard"

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def begin(self, kept: Sequence[Mapping[str, float]]) -> None:
        self._board = _Board(self._folder, purge_step=int(kept[-1]["step"]) + 1 if kept else 0)

    def write(self, row: Mapping[str, float | None], histograms: Mapping[str, np.ndarray]) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, row["step"])
        for name, values in histograms.items():
            self._board.add_histogram(name, values, row["step"])
        self._board.flush()

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the first few as a table."""
        self._board.add_text("rollouts", as_markdown(rows[:SHOWN]), step)

    def close(self) -> None:
        self._board.close()


class _Board(tensorboardX.SummaryWriter):
    """Writes in the caller's thread: its own dies of a full disk with a traceback, and its queue then blocks a run."""

    file_writer: "_EventsFile | None"

    def _get_file_writer(self) -> "_EventsFile":
        if self.file_writer is None:
            self.file_writer = _EventsFile(self.logdir, self.purge_step)
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer


class _EventsFile(EventsWriter):
    def __init__(self, folder: str, purge_step: int) -> None:
        os.makedirs(folder, exist_ok=True)
        super().__init__(os.path.join(folder, "events"))
        self.write_event(Event(step=purge_step, file_version="brain.Event:2"))
        self.write_event(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def add_summary(self, summary: object, step: int, _: object = None) -> None:
        self.write_event(Event(summary=summary, step=int(step), wall_time=time.time()))


def as_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rewards, prompts and responses; texts stand in fenced code, where Markdown changes none but tabs."""

    def fenced(text: object) -> str:
        fence = "~" * max(3, 1 + max(map(len, re.findall("~+", str(text))), default=0))
        return f"{fence}\n{text}\n{fence}"

    return "\n\n".join(
        f"**rollout {row['id']}**, reward {row['reward']:.3g}\n\n{fenced(row['prompt'])}\n\n{fenced(row['response'])}"
        for row in rows
    )
