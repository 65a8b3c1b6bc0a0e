"""Show the metrics of a run beside metrics.jsonl: TensorBoard, Weights & Biases, a page for Prometheus."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np


class Tracker:
    """Shows nothing; the metrics of all processes but the first. Any call of a subclass may raise anything."""

    name = ""

    def configure(self, config: dict[str, object]) -> None:
        """Show the config with everything that the run has chosen."""

    def begin(self, kept: Sequence[Mapping[str, float]]) -> None:
        """Open it for the rows after `kept`."""

    def write(self, row: Mapping[str, float | None], histograms: Mapping[str, np.ndarray]) -> None:
        """Show one step; a value that is not finite is None."""

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Show sample rollouts."""

    def close(self) -> None:
        """End it."""


class Trackers:
    """The trackers of a run. One that fails is reported once and left out: metrics.jsonl has everything.

    Attributes:
      say: shows a line.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = print
        self._open: list[Tracker] = []

    def add(self, tracker: Tracker) -> None:
        self._open.append(tracker)

    def tell(self, call: Callable[[Tracker], None]) -> None:
        """Call each tracker that has not failed yet."""
        for tracker in list(self._open):
            try:
                call(tracker)
            except Exception as error:  # of the network, of a disk, of somebody else's program
                self._open.remove(tracker)
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self.say(f"{tracker.name} fails and is left out from here on ({reason[:300]}); metrics.jsonl goes on")

    def close(self) -> None:
        self.tell(lambda tracker: tracker.close())
        self._open.clear()
