"""Worker processes that score answers: pebble's pool, and what to do when one hangs, dies or grows.

Answers travel in chunks, since handing one over costs more than scoring an integer. A chunk has a short limit; when it
is over, or its worker dies, the chunk's answers are scored again one by one, each with the whole limit. So an answer
fails only alone, and an answer that is merely slow is not lost.
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
from concurrent.futures import FIRST_COMPLETED, Future, wait
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
ATTEMPTS = 3  # of a chunk whose pool broke down
LAUNCHES = 5  # of pools in a row in which no worker did anything


class Chunk(NamedTuple):
    rows: list[int]  # indices of the call's answers
    attempts: int = 0


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
        self._lock = threading.RLock()  # a call at a time
        self._pool: ProcessPool | None = None
        self._over = threading.Event()
        self._launches = 0  # since a worker last did something

    def start(self) -> None:
        """Starts the processes and does not wait for them."""
        with self._lock:
            if self._pool is None:
                self._pool, self._over = ProcessPool(**self._options()), threading.Event()
                _start_in_thread(self._pool, self._over)
                atexit.register(self.close)

    def close(self) -> None:
        """Ends the processes; nothing when there are none. A later call starts new ones."""
        with self._lock:
            if self._pool is not None:
                atexit.unregister(self.close)
                self._pool.stop()
                self._pool.join()
                self._over.set()
                self._pool = None

    def problem(self) -> str:
        """Why a worker cannot load the rewards, in one line; "" if it can. Waits for a worker."""
        with self._lock:
            self.start()
            try:
                return self._pool.schedule(worker.problem).result(timeout=START_SECONDS)
            except TimeoutError:
                cause = f"takes more than {START_SECONDS:g} s"
            except (BrokenProcessPool, ProcessExpired, RuntimeError):
                cause = "ends the process"
            self.close()
            return f"loading {', '.join(self.names)} {cause}"

    def score(self, rows: Sequence[Row]) -> list[Outcome]:
        """Their outcomes, in order. Raises RuntimeError where no worker can be started."""
        with self._lock:
            self.start()
            outcomes: dict[int, Outcome] = {}
            waiting = self._split(range(len(rows)))
            running: dict[Future, Chunk] = {}
            try:
                while waiting or running:
                    self._hand_out(waiting, running, rows)
                    done = self._wait(running)
                    if not done:
                        self._start_again(waiting, running)
                    for future in done:
                        waiting.extendleft(reversed(self._settle(future, running.pop(future), outcomes)))
            finally:
                for future in running:
                    future.cancel()
            return [outcomes[i] for i in range(len(rows))]

    def _options(self) -> dict[str, Any]:
        return {
            "max_workers": self.count,
            "initializer": worker.begin,
            "initargs": (self.names, self.memory, os.getpid()),
            "context": _Spawn(),
        }

    def _split(self, rows: Sequence[int]) -> deque[Chunk]:
        """Chunks of one size, at least two per worker where there are as many answers."""
        size = min(MOST_ROWS, max(1, len(rows) // (2 * self.count)))
        return deque(Chunk(list(rows[i : i + size])) for i in range(0, len(rows), size))

    def _hand_out(self, waiting: deque[Chunk], running: dict[Future, Chunk], rows: Sequence[Row]) -> None:
        """Two chunks per worker: one to work on and one at hand."""
        limit = min(self.timeout, CHUNK_SECONDS)
        while waiting and len(running) < 2 * self.count:
            chunk = waiting.popleft()
            alone = len(chunk.rows) == 1
            arguments = [rows[i] for i in chunk.rows], limit / 2
            try:
                task = self._pool.schedule(worker.score_rows, arguments, timeout=self.timeout if alone else limit)
            except RuntimeError:  # it has broken down
                waiting.appendleft(chunk)
                self._start_again(waiting, running)
            else:
                running[task] = chunk

    def _wait(self, running: dict[Future, Chunk]) -> set[Future]:
        """Those that are done, at least one; none where the pool broke down or does nothing."""
        end = time.monotonic() + self.timeout + START_SECONDS
        while time.monotonic() < end and self._pool.active:
            done, _ = wait(running, 1.0, FIRST_COMPLETED)
            if done:
                return done
        return set()

    def _settle(self, task: Future, chunk: Chunk, outcomes: dict[int, Outcome]) -> list[Chunk]:
        """Puts what a task brought into `outcomes`; chunks that are still to do."""
        try:
            found = task.result()
        except BrokenProcessPool:  # says nothing of this chunk, unless it happens again and again
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
            self._launches = 0
            outcomes |= zip(chunk.rows, found)
            rest = chunk.rows[len(found) :]
            return [Chunk(rest)] if rest else []
        if len(chunk.rows) > 1:
            return [Chunk([i]) for i in chunk.rows]
        outcomes[chunk.rows[0]] = Outcome((), None, failure, detail)
        return []

    def _start_again(self, waiting: deque[Chunk], running: dict[Future, Chunk]) -> None:
        """A new pool for one that broke down or does nothing; what it was doing is to be done."""
        self._launches += 1
        if self._launches >= LAUNCHES:
            raise RuntimeError(f"reward workers: {LAUNCHES} times in a row none of them could be started")
        self.close()
        waiting.extendleft(reversed(running.values()))
        running.clear()
        self.start()


def _start_in_thread(pool: ProcessPool, over: threading.Event) -> None:
    """Starts a pool from a thread that lives as long as it does.

    A worker asks the kernel to die with its parent, which to the kernel is the thread that started it.
    """
    started = threading.Event()

    def live() -> None:
        try:
            _ = pool.active  # the first look starts it
        finally:
            started.set()
        over.wait()

    threading.Thread(target=live, daemon=True, name="reward workers").start()
    started.wait()


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
    prepare, thread = spawn.get_preparation_data, threading.get_ident()

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
