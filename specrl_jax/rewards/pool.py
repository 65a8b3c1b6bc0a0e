"""Worker processes that score answers, in pebble's pools, and recovery when a worker hangs, dies or leaks.

Answers travel in chunks, since sending one costs more than scoring an integer. A chunk has a short time limit; if it
expires or the worker dies, the answers of the chunk are scored again one by one, each with the full limit. So a bad
answer fails alone, and a slow one is not lost.

Each worker is its own pool with one task at a time: with more, pebble may attribute a death to the previous task.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import context, reduction, spawn
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool

from specrl_jax.rewards import worker
from specrl_jax.rewards.worker import Outcome, Row

MAX_ROWS = 32  # of a chunk
CHUNK_SECONDS = 2.0  # limit of a chunk; no answer starts in its second half
START_SECONDS = 120.0  # limit for a worker to start and import
ATTEMPTS = 3  # of a chunk whose worker ended without a result
LOSSES = 5  # consecutive such ends per worker after which the run fails


class Chunk(NamedTuple):
    rows: list[int]  # indices into the answers of the call
    attempts: int = 0


class Task(NamedTuple):
    """A chunk that a worker is scoring."""

    worker: int
    chunk: Chunk
    deadline: float  # on the monotonic clock; exceeded only if pebble fails


class Workers:
    """`count` processes that score with the rewards `names`; they start when first needed.

    Args:
      timeout: seconds for all rewards of one answer; the pool checks ten times a second.
      memory: bytes that a worker may take beyond its imports.
    """

    def __init__(self, names: Sequence[str], timeout: float, count: int, memory: int):
        self.names, self.timeout, self.count, self.memory = tuple(names), timeout, count, memory
        self._calls = threading.RLock()  # one at a time
        self._pools: list[ProcessPool] = []
        self._starter: ThreadPoolExecutor | None = None
        self._losses = 0  # since a worker last did something

    def start(self) -> None:
        """Start the processes without waiting for them."""
        with self._calls:
            if not self._pools:
                # The kernel kills a worker when the thread that started it ends: this thread lives until `close`.
                self._starter = ThreadPoolExecutor(1, "reward workers")
                self._pools = [self._start_one(self._starter) for _ in range(self.count)]
                atexit.register(self.close)

    def close(self) -> None:
        """End the processes; a call in another thread raises RuntimeError. A later call starts new ones."""
        pools, self._pools = self._pools, []
        if pools:
            atexit.unregister(self.close)
            for pool in pools:
                pool.stop()
            for pool in pools:
                pool.join()
            assert self._starter is not None, "set with the pools"
            self._starter.shutdown()

    def problem(self) -> str:
        """Return why a worker cannot load the rewards, in one line; "" if it can. Waits for a worker."""
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
        """Return the outcomes in order. Raises RuntimeError if no worker starts, or on `close`."""
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

    def _start_one(self, starter: ThreadPoolExecutor) -> ProcessPool:
        arguments = self.names, self.memory, os.getpid()
        pool = ProcessPool(1, initializer=worker.initialise, initargs=arguments, context=Spawn())
        starter.submit(getattr, pool, "active").result()  # the first access starts it
        return pool

    def _split(self, rows: Sequence[int]) -> deque[Chunk]:
        """Split into equal chunks, at least two per worker if there are enough answers."""
        size = min(MAX_ROWS, max(1, len(rows) // (2 * self.count)))
        return deque(Chunk(list(rows[i : i + size])) for i in range(0, len(rows), size))

    def _hand_out(self, waiting: deque[Chunk], running: dict[Future, Task], rows: Sequence[Row]) -> None:
        """Give a chunk to each idle worker."""
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
        except RuntimeError:  # the worker ended while idle
            future: Future = Future()
            future.set_exception(BrokenProcessPool())
            return future

    def _wait(self, running: dict[Future, Task]) -> set[Future]:
        """Return the futures that are done, and those that their pool has lost."""
        done, _ = wait(running, 1.0, FIRST_COMPLETED)
        pools, now = self._all_pools(), time.monotonic()
        return done | {f for f, task in running.items() if not pools[task.worker].active or now > task.deadline}

    def _settle(self, future: Future, task: Task, outcomes: dict[int, Outcome]) -> list[Chunk]:
        """Put the results of a task into `outcomes`; return the chunks that remain."""
        chunk = task.chunk
        try:
            if not future.done():
                raise BrokenProcessPool
            found = future.result()
        except BrokenProcessPool:  # the chunk is to blame only if it happens repeatedly
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
        """Replace a pool that broke or stalled."""
        self._losses += 1
        if self._losses >= LOSSES * self.count:
            raise RuntimeError(f"reward workers: {self._losses} in a row ended without a result")
        pools = self._all_pools()
        pools[number].stop()
        pools[number].join()
        assert self._starter is not None, "set with the pools"
        pools[number] = self._start_one(self._starter)

    def _all_pools(self) -> list[ProcessPool]:
        if not self._pools:
            raise RuntimeError("reward workers: closed during a call")
        return self._pools


class _Process(context.SpawnProcess):
    """Unpickles its arguments when it runs: if its pool is gone by then, it ends silently."""

    _args: tuple[object, ...] | bytes

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_args": bytes(reduction.ForkingPickler.dumps(self._args))}

    def run(self) -> None:
        try:
            self._args = pickle.loads(self._args)  # type: ignore[arg-type]
        except (OSError, EOFError):
            return
        super().run()

    @staticmethod
    def _Popen(process: BaseProcess) -> object:  # type: ignore[override]
        with _without_main(), _without_interrupts():
            return context.SpawnProcess._Popen(process)


class Spawn(context.SpawnContext):
    """Spawns processes that do not import the parent's main module, which imports jax, and ignore Ctrl-C."""

    Process = _Process


_STARTING = threading.Lock()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module from processes that this thread starts; multiprocessing has no option for that."""
    thread = threading.get_ident()

    def without_main(name: str) -> dict[str, object]:
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
    """Block SIGINT in this thread, where it stays pending; processes started meanwhile inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else multiprocessing.cpu_count()
