"""Worker processes that score answers: pebble's pools, and what to do when one hangs, dies or grows.

Answers travel in chunks, since handing one over costs more than scoring an integer. A chunk has a short limit; when it
is over, or its worker dies, the chunk's answers are scored again one by one, each with the whole limit. So an answer
fails only alone, and an answer that is merely slow is not lost.

Each worker is a pool of its own with one task at a time: with more, pebble may blame a death on the task before.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import context, reduction, spawn
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from specrl_jax.rewards import worker
from specrl_jax.rewards.worker import Outcome, Row

MOST_ROWS = 32  # of a chunk
CHUNK_SECONDS = 2.0  # at most, for a chunk; half of it to begin an answer in
START_SECONDS = 120.0  # a worker may take to start and import
ATTEMPTS = 3  # of a chunk whose worker ended without a word
LOSSES = 5  # such ends in a row, per worker, after which nothing can be hoped for


class Chunk(NamedTuple):
    rows: list[int]  # indices of the call's answers
    attempts: int = 0


class Task(NamedTuple):
    """A chunk in the hands of a worker."""

    worker: int
    chunk: Chunk
    deadline: float  # of the monotonic clock; later only if pebble fails


class Workers:
    """`count` processes that score with the rewards `names`; they start when first needed.

    Args:
      names: rewards, see `worker.begin`.
      timeout: seconds that one answer may take, for all rewards together. The pool looks ten times a second.
      count: of processes.
      memory: bytes that a worker may take beyond its imports.
    """

    def __init__(self, names: Sequence[str], timeout: float, count: int, memory: int):
        self.names, self.timeout, self.count, self.memory = tuple(names), timeout, count, memory
        self._calls = threading.RLock()  # one at a time
        self._pools: list[ProcessPool] = []
        self._starter: ThreadPoolExecutor | None = None
        self._losses = 0  # since a worker last did something

    def start(self) -> None:
        """Starts the processes and does not wait for them."""
        with self._calls:
            if not self._pools:
                # The kernel ends a worker with the thread that started it: this one lives until `close`.
                self._starter = ThreadPoolExecutor(1, "reward workers")
                self._pools = [self._start_one() for _ in range(self.count)]
                atexit.register(self.close)

    def close(self) -> None:
        """Ends the processes and, with RuntimeError, a call in another thread. A later call starts new ones."""
        pools, self._pools = self._pools, []
        if pools:
            atexit.unregister(self.close)
            for pool in pools:
                pool.stop()
            for pool in pools:
                pool.join()
            self._starter.shutdown()

    def problem(self) -> str:
        """Why a worker cannot load the rewards, in one line; "" if it can. Waits for a worker."""
        with self._calls:
            self.start()
            try:
                return self._pools[0].schedule(worker.problem).result(timeout=START_SECONDS)
            except TimeoutError:
                cause = f"takes more than {START_SECONDS:g} s"
            except (BrokenProcessPool, ProcessExpired, RuntimeError):
                cause = "ends the process"
            self.close()
            return f"loading {', '.join(self.names)} {cause}"

    def score(self, rows: Sequence[Row]) -> list[Outcome]:
        """Their outcomes, in order. Raises RuntimeError where no worker can be started, and when closed meanwhile."""
        with self._calls:
            self.start()
            outcomes: dict[int, Outcome] = {}
            waiting = self._split(range(len(rows)))
            running: dict[Future, Task] = {}
            try:
                while waiting or running:
                    self._hand_out(waiting, running, rows)
                    for future in self._wait(running):
                        waiting.extendleft(reversed(self._settle(future, running.pop(future), outcomes)))
            finally:
                for future in running:
                    future.cancel()
            return [outcomes[i] for i in range(len(rows))]

    def _start_one(self) -> ProcessPool:
        arguments = self.names, self.memory, os.getpid()
        pool = ProcessPool(1, initializer=worker.begin, initargs=arguments, context=_Spawn())
        self._starter.submit(getattr, pool, "active").result()  # the first look starts it
        return pool

    def _split(self, rows: Sequence[int]) -> deque[Chunk]:
        """Chunks of one size, at least two per worker where there are as many answers."""
        size = min(MOST_ROWS, max(1, len(rows) // (2 * self.count)))
        return deque(Chunk(list(rows[i : i + size])) for i in range(0, len(rows), size))

    def _hand_out(self, waiting: deque[Chunk], running: dict[Future, Task], rows: Sequence[Row]) -> None:
        """A chunk to each worker that has none."""
        idle = set(range(self.count)) - {task.worker for task in running.values()}
        for number in sorted(idle)[: len(waiting)]:
            chunk = waiting.popleft()
            begin_within = min(self.timeout, CHUNK_SECONDS) / 2
            limit = self.timeout if len(chunk.rows) == 1 else 2 * begin_within
            future = self._schedule(number, [rows[i] for i in chunk.rows], begin_within, limit)
            running[future] = Task(number, chunk, time.monotonic() + limit + START_SECONDS)

    def _schedule(self, number: int, rows: list[Row], begin_within: float, limit: float) -> Future:
        try:
            return self._all_pools()[number].schedule(worker.score_rows, (rows, begin_within), timeout=limit)
        except RuntimeError:  # its worker ended while it had nothing to do
            future: Future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    def _wait(self, running: dict[Future, Task]) -> set[Future]:
        """Those that are done, and those that never will be, since their pool has lost them."""
        done, _ = wait(running, 1.0, FIRST_COMPLETED)
        pools, now = self._all_pools(), time.monotonic()
        return done | {f for f, task in running.items() if not pools[task.worker].active or now > task.deadline}

    def _settle(self, future: Future, task: Task, outcomes: dict[int, Outcome]) -> list[Chunk]:
        """Puts what a task has brought into `outcomes`; chunks that are still to do."""
        chunk = task.chunk
        try:
            if not future.done():
                raise BrokenProcessPool
            found = future.result()
        except BrokenProcessPool:  # says nothing of this chunk, unless it happens again and again
            self._replace(task.worker)
            if chunk.attempts + 1 < ATTEMPTS:
                return [chunk._replace(attempts=chunk.attempts + 1)]
            failure, detail = "died", "the worker ended"
        except TimeoutError:
            failure, detail = "timeout", f"more than {self.timeout:g} s"
        except ProcessExpired as error:
            if error.exitcode == worker.RETIRED:
                return [chunk]
            failure, detail = "died", f"the worker ended with status {error.exitcode}"
        except Exception as error:
            failure, detail = "error", worker.one_line(error)
        else:
            self._losses = 0
            outcomes |= zip(chunk.rows, found)
            rest = chunk.rows[len(found) :]
            return [Chunk(rest)] if rest else []
        if len(chunk.rows) > 1:
            return [Chunk([i]) for i in chunk.rows]
        outcomes[chunk.rows[0]] = Outcome((), None, failure, detail)
        return []

    def _replace(self, number: int) -> None:
        """A new pool for one that broke down or does nothing."""
        self._losses += 1
        if self._losses >= LOSSES * self.count:
            raise RuntimeError(f"reward workers: {self._losses} in a row ended without having done anything")
        pools = self._all_pools()
        pools[number].stop()
        pools[number].join()
        pools[number] = self._start_one()

    def _all_pools(self) -> list[ProcessPool]:
        if not self._pools:
            raise RuntimeError("reward workers: closed while they were at work")
        return self._pools


class _Process(context.SpawnProcess):
    """Reads its arguments when it runs: one whose pool is gone by then ends without a word."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_args": bytes(reduction.ForkingPickler.dumps(self._args))}

    def run(self) -> None:
        try:
            self._args = pickle.loads(self._args)
        except (OSError, EOFError):
            return
        super().run()

    @staticmethod
    def _Popen(process: Any) -> Any:
        with _without_main(), _without_interrupts():
            return context.SpawnProcess._Popen(process)


class _Spawn(context.SpawnContext):
    """Spawned processes that do not import the parent's main module, which imports jax, nor hear Ctrl-C."""

    Process = _Process


_STARTING = threading.Lock()


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that this thread starts are told of no main module; multiprocessing has no option for that."""
    thread = threading.get_ident()

    def without_main(name: str) -> dict[str, Any]:
        data = prepare(name)
        if threading.get_ident() == thread:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    with _STARTING:
        prepare = spawn.get_preparation_data
        spawn.get_preparation_data = without_main
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """SIGINT blocked in this thread; a process that it starts inherits that, for its life. It stays pending here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cores() -> int:
    """That this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return multiprocessing.cpu_count()
