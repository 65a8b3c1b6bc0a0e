"""Rollouts that begin before their weights are there: what was drawn of later steps, kept from call to call.

Under `pipeline.schedule=exact` rollouts of the next `pipeline.lag` steps begin under the weights at hand: in slots
that stand free at the end of a step, and, asynchronously, while the learner makes the next weights. Every step verifies
its texts under its own weights before it goes on (features/reverify.py). Noise is keyed by rollout and position, so a
step has the rollouts that it would have without them. Nothing of it is saved: a resumed run draws them again.

Which rollouts a step has is fixed before any is drawn: by (step, prompt, sample), whatever was drawn early.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from specrl_jax.config import GRPOConfig
from specrl_jax.data.problem import Problem
from specrl_jax.data.sources import ProblemStream
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.process_groups import ProcessGroups
from specrl_jax.rollout.groups import first_id


class Upcoming:
    """The problems of a step and of those after it, drawn from the stream in their order."""

    def __init__(self, stream: ProblemStream, rounds: int = 1) -> None:
        """
        Args:
          rounds: batches of problems that a step has for itself, whether it needs them or not: those of the steps after
            it do then not depend on its rewards.
        """
        self._stream, self._rounds = stream, rounds
        self._drawn: deque[tuple[list[list[Problem]], dict[str, object]]] = deque()
        self._more = deque[list[Problem]]()  # of the step that was taken last
        self.position = stream.position  # after the problems that were taken

    def take(self) -> list[Problem]:
        """Return the problems of the next step."""
        self._draw(1)
        (problems, *more), self.position = self._drawn.popleft()
        self._more = deque(more)
        return problems

    def take_more(self) -> list[Problem]:
        """Return the problems of the next round of the same step."""
        return self._more.popleft() if self._rounds > 1 else self.take()

    def peek(self, steps: int) -> list[list[Problem]]:
        """Return the problems of the first round of so many steps after the one that was taken last."""
        self._draw(steps)
        return [problems for (problems, *_), _ in list(self._drawn)[:steps]]

    def _draw(self, steps: int) -> None:
        while len(self._drawn) < steps:
            batches = [next(self._stream) for _ in range(self._rounds)]
            self._drawn.append((batches, self._stream.position))


class LookaheadBuffer:
    """Rollouts of later steps that this process's group has begun."""

    def __init__(
        self,
        upcoming: Upcoming,
        encode: Callable[[str], list[int]],
        grpo: GRPOConfig,
        *,
        lag: int,
        last: int,
        groups: ProcessGroups,
    ) -> None:
        """
        Args:
          grpo: sizes of a step.
          lag: steps that may begin early.
          last: the run's last step.
        """
        self._upcoming, self._encode, self._grpo = upcoming, encode, grpo
        self._lag, self._last, self._groups = lag, last, groups
        self.texts: dict[int, np.ndarray] = {}  # rollout id -> response

    def after(self, step: int) -> Lookahead:
        """Return the rollouts of the steps after `step` that may begin, with what is drawn of them already."""
        steps = range(step + 1, min(step + self._lag, self._last) + 1)
        prompts, ids = list[list[int]](), [np.zeros(0, np.int64)]
        for later, problems in zip(steps, self._upcoming.peek(len(steps)), strict=True):
            own, G = self._groups.share(len(problems)).group, self._grpo.group_size
            prompts += [self._encode(problem.prompt) for problem in problems[own]]
            first = first_id(self._grpo, later, 0) + own.start * G
            ids.append(first + np.arange((own.stop - own.start) * G))
        found = np.concatenate(ids)
        return Lookahead(prompts, found, {i: self.texts[i] for i in found.tolist() if i in self.texts})
