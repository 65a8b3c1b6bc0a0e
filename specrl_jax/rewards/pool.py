"""Worker processes that score answers or hold conversations, and recovery when one hangs, dies, stops or leaks.

Each worker has a thread, which hands it a few tasks at a time and hears of each as it is done: a bad answer fails
alone, each has the full time limit, and it is known which one a worker was scoring when it died. A worker that is lost
is replaced in its place.
"""

import atexit
import dataclasses
import itertools
import multiprocessing
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specrl_jax.rewards.code.reward import CodeOptions
from specrl_jax.rewards.messages import NotScored, Outcome, RewardInput
from specrl_jax.rewards.process import GONE, Lost, WorkerProcess
from specrl_jax.rewards.sandbox.limits import GIB

MAX_WORKERS = 8  # by default
MAX_ROWS = 32  # that a worker gets at once
ATTEMPTS = 2  # workers that an answer may lose
LOSSES = 5  # times the number of workers: so many that end in a row before they score anything fail the run


class WorkerOptions(NamedTuple):
    """Options of worker processes."""

    processes: int = 0  # 0: one per core, at most MAX_WORKERS
    timeout: float = 10.0  # seconds for all rewards of one answer, or for a step of an environment
    memory: float = 4.0  # GiB that a worker may take beyond its imports


DEFAULT = WorkerOptions()


class Reply(NamedTuple):
    """The result of a task."""

    number: int  # of the task
    outcome: Outcome
    seconds: float  # that workers took


Replies = queue.SimpleQueue[Reply | BaseException]


@dataclasses.dataclass(eq=False)
class Task:
    """A row to score."""

    number: int
    row: RewardInput
    replies: Replies  # gets its reply, or why no task can be done any more
    began: float = 0.0  # when a worker first had it
    lost: int = 0  # workers that ended with it


class Workers:
    """Processes that score with the rewards `names`, and start when first needed.

    Args:
      code: options of the reward `code`, where it is among them.
    """

    kind, limit, most_rows = "reward", "", MAX_ROWS  # limit: of what the time is

    def __init__(self, names: Sequence[str], options: WorkerOptions, code: CodeOptions | None = None) -> None:
        self.names, self.timeout, self.code = tuple(names), options.timeout, code
        self.count = options.processes or min(cores(), MAX_WORKERS)
        self._memory = int(options.memory * GIB)  # bytes
        self._calls = threading.RLock()  # of `score`, one at a time
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[Task] = deque()
        self._losses = 0  # since a worker last scored something

    def start(self) -> None:
        """Start the processes without waiting for them."""
        with self._changed:
            if self._workers:
                return
            self._workers = [self._make(place) for place in range(self.count)]
            atexit.register(self.close)
            for place in range(self.count):
                arguments = (place, self._workers)
                threading.Thread(target=self._work, args=arguments, name=self.kind, daemon=True).start()

    def close(self) -> None:
        """End the processes; tasks under way have a RuntimeError as their reply. A later call starts new ones."""
        with self._changed:
            workers, self._workers, self._losses = self._workers, [], 0
            self._answer_all(self._waiting, self._closed())
            self._changed.notify_all()
        if workers:
            atexit.unregister(self.close)
        for worker in workers:
            worker.end()

    def problem(self) -> str:
        """Return why a worker cannot load the rewards, in one line; "" if it can. Waits for a worker."""
        self.start()
        worker = self._workers[0]
        try:
            found = worker.hello().problem
        except Lost as lost:
            found = f"loading {', '.join(self.names)}: the worker {how_lost(lost, worker.end())}"
        if found:
            self.close()
        return found

    def score(self, rows: Sequence[RewardInput], while_waiting: Callable[[], None] = lambda: None) -> list[Outcome]:
        """Return the outcomes in order. Raises NotScored if workers die before they score, RuntimeError on `close`.

        What `while_waiting`, called every second, raises ends the call and the workers.
        """
        replies, outcomes = Replies(), dict[int, Outcome]()
        with self._calls:
            try:
                self.add([Task(i, row, replies) for i, row in enumerate(rows)])
                look = time.monotonic() + 1.0
                while len(outcomes) < len(rows):
                    left = look - time.monotonic()
                    outcomes |= {reply.number: reply.outcome for reply in received(replies, max(0.0, left))}
                    if left <= 0.0:
                        while_waiting()
                        look += 1.0
            except BaseException:
                self.close()
                raise
        return [outcomes[i] for i in range(len(rows))]

    def add(self, tasks: Sequence[Task]) -> None:
        """Let the workers do tasks."""
        self.start()
        with self._changed:
            self._waiting.extend(tasks)
            self._changed.notify_all()

    def _work(self, place: int, workers: list[WorkerProcess]) -> None:
        """Do tasks with the worker in one place until the workers are closed."""
        while tasks := self._take(place, workers):
            try:
                self._serve(place, workers, tasks)
                with self._changed:
                    if tasks and workers is not self._workers:
                        raise self._closed()
                    self._waiting.extendleft(reversed(tasks))
                    self._changed.notify_all()
            except BaseException as error:
                self._answer_all(tasks, error)

    def _take(self, place: int, workers: list[WorkerProcess]) -> deque[Task]:
        """Wait for tasks: a share of those that wait, so that all workers end together; none once they are closed."""
        with self._changed:
            while workers is self._workers:
                most = min(self.most_rows, max(1, len(self._waiting) // (2 * self.count)))
                if found := deque(itertools.islice((t for t in self._waiting if self._may_do(t, place)), most)):
                    for task in found:
                        self._waiting.remove(task)
                        task.began = task.began or time.monotonic()
                    return found
                self._changed.wait()
            return deque()

    def _serve(self, place: int, workers: list[WorkerProcess], tasks: deque[Task]) -> None:
        """Do tasks, at least the first of them unless the worker is lost before; leave the others."""
        try:
            workers[place].check(self.timeout)
        except Lost as lost:
            self._count_loss(self._replace(place, workers, lost))
            return
        try:
            for outcome, full in workers[place].score([task.row for task in tasks], self._seconds(tasks[0], place)):
                self._losses = 0
                self._settle(tasks.popleft(), outcome, place)
                if full:
                    self._replace(place, workers)
        except TimeoutError:
            self._replace(place, workers)
            detail = f"more than {self.timeout:g} s{self.limit}"
            self._settle(tasks.popleft(), Outcome((), failure="timeout", detail=detail), place)
        except Lost as lost:
            ending = self._replace(place, workers, lost)
            tasks[0].lost += 1
            if tasks[0].lost == ATTEMPTS:
                outcome = Outcome((), failure="died", detail=f"the worker {ending}")
                self._settle(tasks.popleft(), outcome, place)

    def _may_do(self, task: Task, place: int) -> bool:
        """Return whether a task may go to the worker in a place."""
        return True

    def _seconds(self, task: Task, place: int) -> float:
        """Return the seconds that the worker in a place has for a task."""
        return self.timeout

    def _settle(self, task: Task, outcome: Outcome, place: int) -> None:
        """Give the outcome of a task that the worker in a place has done, or failed to do."""
        task.replies.put(Reply(task.number, outcome, time.monotonic() - task.began))

    @staticmethod
    def _answer_all(tasks: deque[Task], error: BaseException) -> None:
        while tasks:
            tasks.popleft().replies.put(error)

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"{self.kind} workers: closed during a call")

    def _make(self, place: int) -> WorkerProcess:
        return WorkerProcess(self.names, self._memory, self.code)

    def _replace(self, place: int, workers: list[WorkerProcess], lost: Lost | None = None) -> str:
        """Replace the worker in a place; return what became of it."""
        ended = workers[place].end()
        with self._changed:
            if workers is not self._workers:
                raise self._closed()
            workers[place] = self._make(place)
            self._changed.notify_all()
        return how_lost(lost, ended)

    def _count_loss(self, ending: str) -> None:
        with self._changed:
            self._losses += 1
            if self._losses >= LOSSES * self.count:
                raise NotScored(f"{self.kind} workers die: {self._losses} times in a row; the last {ending}")


def received(replies: Replies, seconds: float) -> list[Reply]:
    """Return all replies that are there; wait up to `seconds` for the first. Raises what a worker's thread raised."""
    found = list[Reply]()
    try:
        while True:
            reply = replies.get(timeout=seconds) if seconds and not found else replies.get_nowait()
            if isinstance(reply, BaseException):
                raise reply
            found.append(reply)
    except queue.Empty:
        return found


def how_lost(lost: Lost | None, ended: str) -> str:
    """Return what became of a worker: how it ended, unless it had to be ended."""
    return ended if lost is None or str(lost) == GONE else str(lost)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else multiprocessing.cpu_count()
