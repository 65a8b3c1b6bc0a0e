"""Worker processes that score answers, and recovery when one hangs, dies, stops or leaks.

Each worker has a thread, which hands it a few answers at a time and hears of each as it is done: a bad answer fails
alone, each has the full time limit, and it is known which one a worker was scoring when it died.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from specrl_jax.rewards.code.reward import CodeOptions
from specrl_jax.rewards.messages import Outcome, RewardInput
from specrl_jax.rewards.process import Lost, WorkerProcess
from specrl_jax.rewards.worker_group import WorkerGroup, WorkerOptions, how_lost

MAX_ROWS = 32  # that a worker gets at once
ATTEMPTS = 2  # workers that an answer may lose


class Workers(WorkerGroup):
    """Processes that score with the rewards `names`; arguments as of `WorkerGroup`."""

    def __init__(self, names: Sequence[str], options: WorkerOptions, code: CodeOptions | None = None) -> None:
        super().__init__(names, options, code)
        self._calls = threading.RLock()  # one at a time

    def problem(self) -> str:
        """Return why a worker cannot load the rewards, in one line; "" if it can. Waits for a worker."""
        with self._calls:
            self.start()
            worker = self._workers[0]
            try:
                return worker.hello().problem
            except Lost as lost:
                ending = how_lost(lost, worker.end())
            self.close()
            return f"loading {', '.join(self.names)}: the worker {ending}"

    def score(self, rows: Sequence[RewardInput], while_waiting: Callable[[], None] = lambda: None) -> list[Outcome]:
        """Return the outcomes in order. Raises NotScored if workers die before they score, RuntimeError on `close`.

        What `while_waiting`, called every second, raises ends the call and the workers.
        """
        with self._calls:
            self.start()
            batch = _Batch(rows)
            arguments = [(place, batch, self._workers) for place in range(self.count)]
            threads = [threading.Thread(target=self._work, args=a, name="rewards", daemon=True) for a in arguments]
            for thread in threads:
                thread.start()
            try:
                return batch.wait(while_waiting)
            except BaseException:
                self.close()  # ends the threads
                raise
            finally:
                for thread in threads:
                    thread.join()

    def _work(self, place: int, batch: "_Batch", workers: list[WorkerProcess]) -> None:
        """Score answers with the worker in one place until the batch has no more."""
        answers = False  # whether the worker does
        try:
            while chunk := batch.take(2 * self.count):
                try:
                    if not answers:
                        workers[place].check(self.timeout)
                except Lost as lost:
                    batch.give_back(chunk)
                    self._count_loss(self._replace(place, workers, lost))
                else:
                    answers = self._score_chunk(place, batch, chunk, workers)
        except BaseException as error:
            batch.fail(error)

    def _score_chunk(self, place: int, batch: "_Batch", chunk: list[int], workers: list[WorkerProcess]) -> bool:
        """Score answers; give back those that the worker did not begin. Return whether it lives on."""
        unscored, full = deque(chunk), False
        try:
            for outcome, is_full in workers[place].score([batch.rows[i] for i in chunk], self.timeout):
                batch.settle(unscored.popleft(), outcome)
                self._losses, full = 0, is_full
        except TimeoutError:
            self._replace(place, workers)
            batch.settle(unscored.popleft(), Outcome((), failure="timeout", detail=f"more than {self.timeout:g} s"))
            return False
        except Lost as lost:
            ending = self._replace(place, workers, lost)
            batch.lost[unscored[0]] += 1
            if batch.lost[unscored[0]] == ATTEMPTS:
                batch.settle(unscored.popleft(), Outcome((), failure="died", detail=f"the worker {ending}"))
            return False
        finally:
            batch.give_back(unscored)
        if full:
            self._replace(place, workers)
        return not full


class _Batch:
    """The answers of one call: those that wait, and what came out."""

    def __init__(self, rows: Sequence[RewardInput]) -> None:
        self.rows = rows
        self.lost: Counter[int] = Counter()  # workers that ended while they scored an answer
        self._waiting = deque(range(len(rows)))
        self._outcomes: dict[int, Outcome] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def take(self, shares: int) -> list[int]:
        """Return the next answers: a share of those that wait, so that all threads end together.

        Waits for what another thread may give back; [] where there is none any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over())
            count = 0 if self._over() else min(MAX_ROWS, max(1, len(self._waiting) // shares))
            return [self._waiting.popleft() for _ in range(count)]

    def give_back(self, answers: Sequence[int]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(answers))
            self._changed.notify_all()

    def settle(self, i: int, outcome: Outcome) -> None:
        with self._changed:
            self._outcomes[i] = outcome
            if self._over():
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, while_waiting: Callable[[], None]) -> list[Outcome]:
        """Return all outcomes in order, or raise the error of a thread or of `while_waiting`."""
        with self._changed:
            while not self._changed.wait_for(self._over, timeout=1.0):
                while_waiting()
            if self._error:
                raise self._error
            return [self._outcomes[i] for i in range(len(self.rows))]

    def _over(self) -> bool:
        return self._error is not None or len(self._outcomes) == len(self.rows)
