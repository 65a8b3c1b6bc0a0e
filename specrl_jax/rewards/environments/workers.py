"""Worker processes that hold conversations, and recovery when one hangs, dies or leaks.

A worker serves one turn at a time, and keeps the conversations that it began. Where it is lost, another worker repeats
a conversation from its beginning. So an environment that hangs or dies costs its own rollout its reward; the others of
the same worker only wait.
"""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specrl_jax.rewards.environments.session import MOST_OPEN, PREFIX
from specrl_jax.rewards.messages import Context, Outcome, RewardInput
from specrl_jax.rewards.pool import ATTEMPTS
from specrl_jax.rewards.process import Lost, WorkerProcess
from specrl_jax.rewards.worker_group import WorkerGroup, WorkerOptions


class Conversation(NamedTuple):
    """A conversation's session, data row and seed."""

    session: int  # a number of its own
    row: Mapping[str, object]
    seed: int


class TurnResult(NamedTuple):
    """A worker's result for a turn."""

    session: int
    outcome: Outcome
    seconds: float  # that the worker took


class _Task(NamedTuple):
    conversation: Conversation
    text: str
    turns: Sequence[str] | None  # the texts before; None: begin only
    replies: "queue.SimpleQueue[TurnResult | BaseException]"

    def row(self) -> RewardInput:
        """Return the turn as a worker reads it."""
        session, row, seed = self.conversation
        return RewardInput(
            self.text, "", Context(row={"session": session, "row": row, "seed": seed, "turns": self.turns})
        )


class _Holder(NamedTuple):
    """The worker that can go on with a session."""

    place: int
    answers: int  # that it had given by then


class EnvironmentWorkers(WorkerGroup):
    """Processes that hold the conversations of the environment `name`.

    Args:
      label: of its reward in the metrics.
      options: a conversation that is repeated may take `timeout` seconds for each of its steps.
    """

    def __init__(self, name: str, label: str, options: WorkerOptions) -> None:
        super().__init__((PREFIX + name,), options, kind="environment")
        self.name, self.label = name, label
        self._numbers = itertools.count()
        self._waiting: deque[_Task] = deque()
        self._holders: dict[int, _Holder] = {}  # by session
        self._answers = [0] * self.count  # of the worker in each place

    def start(self) -> None:
        """Start the processes without waiting for them."""
        with self._changed:
            if self._workers:
                return
            super().start()
            for place in range(self.count):
                arguments = (place, self._workers)
                threading.Thread(target=self._work, args=arguments, name="environment", daemon=True).start()

    def close(self) -> None:
        """End the processes and drop the turns that wait. A later turn starts new ones."""
        with self._changed:
            self._waiting.clear()
            self._holders.clear()
        super().close()

    def problem(self) -> str:
        """Return why a worker cannot load the environment, in one line; "" if it can. Waits for a worker of its own."""
        worker = self._make()
        try:
            return worker.hello().problem
        except Lost as lost:
            return f"loading {self.name}: the worker {lost}"
        finally:
            worker.end()

    def open(self, row: Mapping[str, object], seed: int) -> Conversation:
        """Return a new conversation, in which nothing has been said."""
        return Conversation(next(self._numbers), row, seed)

    def submit(
        self,
        conversation: Conversation,
        text: str,
        turns: Sequence[str] | None,
        *,
        replies: "queue.SimpleQueue[TurnResult | BaseException]",
    ) -> None:
        """Hand over a turn, whose reply will be put into `replies`; None as `turns`: only begin the conversation.

        An exception there: no turn can be answered any more.
        """
        self.start()
        with self._changed:
            self._waiting.append(_Task(conversation, text, turns, replies=replies))
            self._changed.notify_all()

    def release(self, conversation: Conversation) -> None:
        """Forget a conversation that does not go on although its environment would."""
        with self._changed:
            self._holders.pop(conversation.session, None)

    def _work(self, place: int, workers: list[WorkerProcess]) -> None:
        """Answer turns with the worker in one place until the workers are closed."""
        while (task := self._next(place, workers)) is not None:
            try:
                begin = time.monotonic()
                outcome = self._answer(task, place, workers)
                task.replies.put(TurnResult(task.conversation.session, outcome, time.monotonic() - begin))
            except BaseException as error:
                task.replies.put(error)

    def _next(self, place: int, workers: list[WorkerProcess]) -> _Task | None:
        """Wait for a turn: of a conversation that this worker holds, or that none does."""
        with self._changed:
            while workers is self._workers:
                for task in self._waiting:
                    holder = self._holders.get(task.conversation.session)
                    if holder is None or holder.place == place:
                        self._waiting.remove(task)
                        return task
                self._changed.wait()
            return None

    def _answer(self, task: _Task, place: int, workers: list[WorkerProcess]) -> Outcome:
        """Return the outcome of a turn. A turn is given up once ATTEMPTS workers have died of it."""
        session, died = task.conversation.session, 0
        while True:
            try:
                workers[place].check(self.timeout)
            except Lost as lost:
                self._count_loss(self._replace(place, workers, lost))
                continue
            holder = self._holders.get(session)
            # After as many answers the worker may have dropped the conversation, and repeats it.
            goes_on = holder is not None and self._answers[place] - holder.answers < MOST_OPEN
            steps = 1 if goes_on else 1 + len(task.turns or ())
            try:
                outcome, full = next(workers[place].score([task.row()], steps * self.timeout))
            except TimeoutError:
                self._replace(place, workers)
                outcome, full = Outcome((), failure="timeout", detail=f"more than {self.timeout:g} s for a step"), False
            except Lost as lost:
                ending, died = self._replace(place, workers, lost), died + 1
                if died < ATTEMPTS:
                    continue
                outcome, full = Outcome((), failure="died", detail=f"the worker {ending}"), False
            self._losses = 0
            if full:
                self._replace(place, workers)
            with self._changed:
                self._answers[place] += 1
                self._holders.pop(session, None)
                if outcome.messages is not None and task.turns is not None and not full:
                    self._holders[session] = _Holder(place, self._answers[place])
            return outcome

    def _replace(self, place: int, workers: list[WorkerProcess], lost: Lost | None = None) -> str:
        """Replace the worker in a place, whose conversations any worker repeats; return what became of it."""
        try:
            return super()._replace(place, workers, lost)
        finally:
            with self._changed:
                self._holders = {session: one for session, one in self._holders.items() if one.place != place}
                self._changed.notify_all()
