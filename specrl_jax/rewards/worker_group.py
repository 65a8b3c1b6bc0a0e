"""Worker processes in places: one that is lost is replaced in its place, and too many losses in a row end the run."""

import atexit
import multiprocessing
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from specrl_jax.rewards.code.reward import CodeOptions
from specrl_jax.rewards.messages import NotScored
from specrl_jax.rewards.process import GONE, Lost, WorkerProcess
from specrl_jax.rewards.sandbox.limits import GIB

MAX_WORKERS = 8  # by default
LOSSES = 5  # times the number of workers: so many that end in a row before they score anything fail the run


class WorkerOptions(NamedTuple):
    """Options of worker processes."""

    processes: int = 0  # 0: one per core, at most MAX_WORKERS
    timeout: float = 10.0  # seconds for all rewards of one answer, or for a step of an environment
    memory: float = 4.0  # GiB that a worker may take beyond its imports


DEFAULT = WorkerOptions()


class WorkerGroup:
    """Processes that start when first needed.

    Args:
      names: the rewards, or the environment.
      code: options of the reward `code`, where it is among them.
      kind: of the workers, for messages.
    """

    def __init__(
        self, names: Sequence[str], options: WorkerOptions, code: CodeOptions | None = None, *, kind: str = "reward"
    ) -> None:
        self.names, self.timeout, self.code, self._kind = tuple(names), options.timeout, code, kind
        self.count = options.processes or min(cores(), MAX_WORKERS)
        self._memory = int(options.memory * GIB)  # bytes
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._workers: list[WorkerProcess] = []
        self._losses = 0  # since a worker last scored something

    def start(self) -> None:
        """Start the processes without waiting for them."""
        with self._changed:
            if not self._workers:
                self._workers = [self._make() for _ in range(self.count)]
                atexit.register(self.close)

    def close(self) -> None:
        """End the processes; a call in another thread raises RuntimeError. A later call starts new ones."""
        with self._changed:
            workers, self._workers, self._losses = self._workers, [], 0
            self._changed.notify_all()
        if workers:
            atexit.unregister(self.close)
        for worker in workers:
            worker.end()

    def _make(self) -> WorkerProcess:
        return WorkerProcess(self.names, self._memory, self.code)

    def _replace(self, place: int, workers: list[WorkerProcess], lost: Lost | None = None) -> str:
        """Replace the worker in a place; return what became of it."""
        ended = workers[place].end()
        with self._changed:
            if workers is not self._workers:
                raise RuntimeError(f"{self._kind} workers: closed during a call")
            workers[place] = self._make()
        return how_lost(lost, ended)

    def _count_loss(self, ending: str) -> None:
        with self._changed:
            self._losses += 1
            if self._losses >= LOSSES * self.count:
                raise NotScored(f"{self._kind} workers die: {self._losses} times in a row; the last {ending}")


def how_lost(lost: Lost | None, ended: str) -> str:
    """Return what became of a worker: how it ended, unless it had to be ended."""
    return ended if lost is None or str(lost) == GONE else str(lost)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else multiprocessing.cpu_count()
