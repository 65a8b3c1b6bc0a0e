"""Where a step's rollouts come from: generated when they are asked for, or ahead of the learner by another thread.

Asynchronous (`pipeline.mode=async`): rollout devices and learner devices are disjoint, and generation of later steps
overlaps learning. Which weights a step's rollouts come from does not depend on timing: those of step t are drawn from
the policy after step t - 1 - lag (from the first one before that), so at most `lag` policy versions lie between what
drew a rollout and what learns from it. With lag 0 the order is the synchronous one.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from specrl_jax.decoding.rollouts import WeightsVersion
from specrl_jax.drafts.weights import Weights
from specrl_jax.training.dynamic_sampling import Batch


class RolloutBatch(NamedTuple):
    """One step's rollouts: all, where they were asked for; this process' share, where they came ahead."""

    step: int
    batches: list[Batch]
    position: dict[str, Any]  # of the data, behind what was drawn for them
    seconds: dict[str, float]  # of the phases data and generate, and idle: the rollout devices waited before


# (step, weights, stamp) -> its rollouts
Produce = Callable[[int, Weights, WeightsVersion], RolloutBatch]


class Pipeline(Protocol):
    """`publish` the policy before step t, then `take` step t's rollouts; t counts up. `close` in the end."""

    inline: bool  # whether `take` generates

    def publish(self, step: int, weights: Weights, stamp: WeightsVersion) -> None: ...
    def take(self, step: int) -> RolloutBatch: ...
    def close(self) -> None: ...


class Sync:
    """Generates in the learner's turn."""

    inline = True

    def __init__(self, produce: Produce) -> None:
        self._produce = produce
        self._newest: tuple[Weights, WeightsVersion] | None = None

    def publish(self, step: int, weights: Weights, stamp: WeightsVersion) -> None:
        self._newest = weights, stamp

    def take(self, step: int) -> RolloutBatch:
        # Let go of before learning: a copy of the weights that nothing reads.
        (weights, stamp), self._newest = self._newest, None
        return self._produce(step, weights, stamp)

    def close(self) -> None:
        pass


class Async:
    """Generates in a thread of its own, ahead by at most `lag` steps. Its failure is raised by the next `take`.

    Args:
      first: the step that is taken first; its weights are the oldest there are.
      last: after which nothing is generated any more.
      devices: held while rollouts are generated, so that an evaluation may wait for its turn.
    """

    inline = False

    def __init__(self, produce: Produce, lag: int, first: int, last: int, devices: threading.Lock) -> None:
        self._produce, self._lag, self._first, self._last, self._devices = produce, lag, first, last, devices
        self._published: dict[int, tuple[Weights, WeightsVersion]] = {}
        self._changed = threading.Condition()
        self._closed = False
        # One place a lag: what is finished beyond it waits in the thread.
        self._finished: queue.Queue[RolloutBatch | BaseException] = queue.Queue(maxsize=max(lag, 1))
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def publish(self, step: int, weights: Weights, stamp: WeightsVersion) -> None:
        with self._changed:
            self._published[step] = weights, stamp
            self._changed.notify_all()

    def take(self, step: int) -> RolloutBatch:
        found = self._finished.get()
        if isinstance(found, BaseException):
            raise found
        assert found.step == step, (found.step, step)
        return found

    def close(self) -> None:
        """Waits for the rollouts under way; they are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._thread.is_alive():
            try:
                self._finished.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self) -> None:
        try:
            for step in range(self._first, self._last + 1):
                start = time.perf_counter()
                weights, stamp = self._weights(max(step - self._lag, self._first))
                idle = time.perf_counter() - start
                with self._devices:
                    produced = self._produce(step, weights, stamp)
                del weights
                self._finished.put(produced._replace(seconds=produced.seconds | {"idle": idle}))
        except _Closed:
            return
        except BaseException as error:  # the learner's to raise
            self._finished.put(error)

    def _weights(self, step: int) -> tuple[Weights, WeightsVersion]:
        """Of the policy before `step`, once they are there. Older ones are let go."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step in self._published)
            if self._closed:
                raise _Closed
            for old in [known for known in self._published if known < step]:
                del self._published[old]
            return self._published[step]


class _Closed(Exception):
    pass
