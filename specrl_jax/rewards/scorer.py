"""Rewards of a batch of answers, computed in worker processes: a bad answer costs its own reward, never the run."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.rewards.pool import Workers, cores
from specrl_jax.rewards.worker import BUILT_IN, Row

GIB = 2**30
MAX_WORKERS = 8  # by default

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Scores(NamedTuple):
    """Scores of R answers. A failed one has 0 from every reward."""

    total: np.ndarray  # [R] float32, weighted sum
    parts: dict[str, np.ndarray]  # reward name -> [R] float32, unweighted
    correct: np.ndarray  # [R] bool: the first reward is positive
    failures: dict[str, int]  # "timeout", "died", "error" or "memory" -> failed answers
    extracted: list[str | None]  # [R] answers in the first reward's canonical form; None without an answer
    first_failure: str = ""  # cause and message of the first failure

    def warning(self) -> str:
        """Return one line about the failures; "" without any."""
        if not self.failures:
            return ""
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.failures.items()))
        return f"rewards that failed count 0: {causes}; the first: {self.first_failure}"


class Scorer:
    """Scores answers in worker processes, which start when first needed and end with `close` or the program.

    A reward that hangs, raises, crashes, exceeds its memory or returns no finite number scores 0 for that answer;
    `Scores.failures` counts failures by cause.

    Args:
      names: rewards of `BUILT_IN`, or `package.module:function`, which is imported in workers only.
      weights: of the rewards in the total; () is 1 for each.
      timeout: seconds for all rewards of one answer.
      workers: processes; 0 is one per core, at most 8.
      memory: GiB that a worker may take beyond its imports.
    Raises:
      InputError: naming the key of `reward` that is wrong. A user's function is imported here, in a worker: about 2 s
        and the time of the import.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        weights: tuple[float, ...] = (),
        timeout: float = 10.0,
        workers: int = 0,
        memory: float = 4.0,
    ):
        check_rewards(names, weights)
        self.names = tuple(names)
        self.weights = tuple(weights) or (1.0,) * len(names)
        self._workers = Workers(self.names, timeout, workers or min(cores(), MAX_WORKERS), int(memory * GIB))
        if any(name not in BUILT_IN for name in names) and (problem := self._workers.problem()):
            self.close()
            raise InputError(f"reward.name: {problem}")

    def start(self) -> None:
        """Start the workers without waiting for them."""
        self._workers.start()

    def __call__(self, responses: Sequence[str], answers: Sequence[str]) -> Scores:
        """Score R responses against R answers."""
        rows = [Row(response, answer) for response, answer in zip(responses, answers, strict=True)]
        outcomes = self._workers.score(rows)
        failed = [outcome for outcome in outcomes if outcome.failure]
        none = (0.0,) * len(self.names)
        table = [none if outcome.failure else outcome.rewards for outcome in outcomes]
        rewards = np.array(table, np.float64).reshape(len(table), len(self.names))
        return Scores(
            total=(rewards @ np.array(self.weights, np.float64)).astype(np.float32),
            parts={name: rewards[:, i].astype(np.float32) for i, name in enumerate(self.names)},
            correct=rewards[:, 0] > 0,
            failures=dict(Counter(outcome.failure for outcome in failed)),
            extracted=[outcome.extracted for outcome in outcomes],
            first_failure=f"{failed[0].failure}: {failed[0].detail}" if failed else "",
        )

    def close(self) -> None:
        self._workers.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_rewards(names: Sequence[str], weights: Sequence[float]) -> None:
    """Raise InputError for unknown rewards and for weights that do not match them. Import no user's function."""
    if not names:
        raise InputError("reward.name: name at least one reward")
    for name in names:
        if name not in BUILT_IN and not _PATH.fullmatch(name):
            known = ", ".join(BUILT_IN)
            raise InputError(f"reward.name: no reward '{name}'; there are {known}, or package.module:function")
    if len(set(names)) < len(names):
        raise InputError(f"reward.name: a reward is named twice in {', '.join(names)}")
    if weights and len(weights) != len(names):
        raise InputError(f"reward.weights: {len(weights)} weights for {len(names)} rewards ({', '.join(names)})")
