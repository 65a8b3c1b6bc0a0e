"""Worker processes that hold conversations.

A worker serves one turn at a time, and keeps the conversations that it began. Where it is lost, another worker repeats
a conversation from its beginning. So an environment that hangs or dies costs its own rollout its reward; the others of
the same worker only wait.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specrl_jax.rewards.environments.session import MOST_OPEN, PREFIX
from specrl_jax.rewards.messages import Context, Outcome, RewardInput
from specrl_jax.rewards.pool import Replies, Task, WorkerOptions, Workers
from specrl_jax.rewards.process import WorkerProcess


class Conversation(NamedTuple):
    """A conversation's session, data row and seed."""

    session: int  # a number of its own
    row: Mapping[str, object]
    seed: int


class EnvironmentWorkers(Workers):
    """Processes that hold the conversations of the environment `name`.

    Args:
      label: of its reward in the metrics.
      options: a conversation that is repeated may take `timeout` seconds for each of its steps.
    """

    kind, limit, most_rows = "environment", " for a step", 1

    def __init__(self, name: str, label: str, options: WorkerOptions) -> None:
        super().__init__((PREFIX + name,), options)
        self.label = label
        self._numbers = itertools.count()
        # Sessions that the worker in each place can go on with, in the order in which it drops them (`Sessions`).
        self._open: list[dict[int, None]] = [{} for _ in range(self.count)]

    def open(self, row: Mapping[str, object], seed: int) -> Conversation:
        """Return a new conversation, in which nothing has been said."""
        return Conversation(next(self._numbers), row, seed)

    def submit(self, conversation: Conversation, text: str, turns: Sequence[str] | None, *, replies: Replies) -> None:
        """Hand over a turn, whose reply, by its session, will be put into `replies`; None as `turns`: only begin the
        conversation.

        An exception there: no turn can be answered any more.
        """
        row = RewardInput(text, "", Context(row={**conversation._asdict(), "turns": turns}))
        self.add([Task(conversation.session, row, replies)])

    def _may_do(self, task: Task, place: int) -> bool:
        """Return whether a worker holds the conversation, or none does."""
        return task.number in self._open[place] or not any(task.number in held for held in self._open)

    def _seconds(self, task: Task, place: int) -> float:
        turns = task.row.context.row["turns"] or ()
        assert isinstance(turns, Sequence)
        return self.timeout * (1 if task.number in self._open[place] else 1 + len(turns))

    def _settle(self, task: Task, outcome: Outcome, place: int) -> None:
        with self._changed:
            held = self._open[place]
            held.pop(task.number, None)
            if outcome.messages is not None and task.row.context.row["turns"] is not None:
                held[task.number] = None
                if len(held) > MOST_OPEN:
                    del held[next(iter(held))]
        super()._settle(task, outcome, place)

    def _make(self, place: int) -> WorkerProcess:
        self._open[place].clear()  # any worker repeats them
        return super()._make(place)
