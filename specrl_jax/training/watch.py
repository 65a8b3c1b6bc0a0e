"""What the host knows of a run beside its arrays: speculation, alarms, and updates that were skipped."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specrl_jax.core import RunFailed
from specrl_jax.io.checkpoints import Checkpoints, Host
from specrl_jax.io.progress import Display
from specrl_jax.training.alarms import Alarms
from specrl_jax.training.build import Setup
from specrl_jax.training.speculation import Speculation


class Watch:
    """`host`: as it was, from the run's checkpoint."""

    def __init__(self, setup: Setup, host: Host | None = None) -> None:
        values = host.values if host else {}
        self._limit = setup.settings.optimizer.max_skipped
        self.speculation = Speculation(setup, Host(values["speculation"], host.arrays) if host else None)
        self._alarms = Alarms(**values.get("alarms", {}))
        self._skipped = values.get("skipped", 0)

    def state(self, position: dict[str, Any]) -> Host:
        """For a checkpoint, with the data position."""
        saved = self.speculation.state()
        values = {"position": position, "speculation": saved.values, "skipped": self._skipped}
        return Host(values | {"alarms": dataclasses.asdict(self._alarms)}, saved.arrays)

    def observe(
        self, row: dict[str, Any], skipped: Sequence[bool], checkpoints: Checkpoints, display: Display
    ) -> dict[str, float]:
        """alarm/* of a step. Raises RunFailed where too many updates in a row were skipped.

        Args:
          skipped: of each update of the step, in their order.
        """
        alarms, begun = self._alarms.observe(row)
        for message in begun:
            display.say(f"step {row['step']}: ALARM: {message}")
        most = 0
        for update in skipped:
            self._skipped = self._skipped + 1 if update else 0
            most = max(most, self._skipped)
        if self._limit and most >= self._limit:
            raise RunFailed(
                f"step {row['step']}: {most} updates in a row had no finite loss or gradient "
                f"(optimizer.max_skipped={self._limit}); {checkpoints.kept()}"
            )
        return alarms
