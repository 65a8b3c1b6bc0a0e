"""Rewards of a batch of answers, computed in worker processes: a bad answer costs its own reward, never the run."""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.rewards.code.reward import CodeOptions
from specrl_jax.rewards.environments.session import BUILT_IN as ENVIRONMENTS
from specrl_jax.rewards.environments.workers import EnvironmentWorkers
from specrl_jax.rewards.function import file_of
from specrl_jax.rewards.messages import Context, NotScored, Outcome, RewardInput
from specrl_jax.rewards.pool import DEFAULT, WorkerOptions, Workers
from specrl_jax.rewards.worker import CODE, NAMES

MAX_NAMES = 64  # different parts in one batch

_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_PATH = re.compile(rf"(.*\.py|{_NAME}):{_NAME}")


class OwnAnswer(NamedTuple):
    """A row with its own answer as the response."""

    where: str  # file:line
    reward: str  # the built-in reward that must pay 1 for it
    row: RewardInput


class Scores(NamedTuple):
    """Scores of R answers. A failed one has 0 from every reward, and is not correct."""

    total: np.ndarray  # [R] float32, weighted sum
    rewards: dict[str, np.ndarray]  # reward label -> [R] float32, unweighted
    correct: np.ndarray  # [R] bool: what the first reward says, else whether it is at least `correct_from`
    failures: dict[str, int]  # "timeout", "died", "error" or "memory" -> failed answers
    extracted: list[str | None]  # [R] answers in the first reward's canonical form; None without an answer
    first_failure: str = ""  # cause and message of the first failure
    parts: Mapping[str, np.ndarray] = {}  # part that a reward returned -> [R] float32; NaN where it did not
    environment: Mapping[str, np.ndarray] = {}  # what is counted of each conversation -> [R] float32; {}: single turns

    def warning(self) -> str:
        """Return one line about the failures; "" without any."""
        if not self.failures:
            return ""
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.failures.items()))
        return f"rewards that failed count 0: {causes}; the first: {self.first_failure}"

    def require_some(self, where: str) -> None:
        """Raise NotScored, which begins with `where`, if no answer at all could be scored."""
        if 0 < len(self.total) == sum(self.failures.values()):
            raise NotScored(
                f"{where}: the reward failed for all {len(self.total)} responses; the first: {self.first_failure}"
            )

    def part_means(self, prefix: str) -> dict[str, float]:
        """Return the mean of each part over the answers that have it, by `prefix` and name."""
        return {f"{prefix}{name}": float(np.nanmean(values)) for name, values in self.parts.items()}


class Scorer:
    """Scores answers in worker processes, which start when first needed and end with `close` or the program.

    A reward that hangs, raises, crashes, exceeds its memory or returns no finite number scores 0 for that answer;
    `Scores.failures` counts failures by cause.

    Args:
      names: rewards of `NAMES`, `package.module:function` or `FILE.py:function`; a function is imported in
        workers only.
      weights: of the rewards in the total; () is 1 for each.
      correct_from: the first reward, or the sum of an environment that alone rewards, from which an answer is correct
        where neither says.
      code: sandbox and limits of the reward `code`, which needs them.
      environment: the workers of conversations, which start and end with the scorer's; it may be all that rewards.
    Raises:
      InputError: naming the key of `reward` that is wrong. A user's function is imported here, in a worker: about 2 s
        and the time of the import.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        weights: tuple[float, ...] = (),
        *,
        workers: WorkerOptions = DEFAULT,
        correct_from: float = 1.0,
        code: CodeOptions | None = None,
        environment: EnvironmentWorkers | None = None,
    ):
        if names or environment is None:
            check_rewards(names, weights)
        if CODE in names and code is None:
            raise InputError("reward.name=code: programs need a sandbox; see specrl_jax.rewards.sandbox.choose")
        self.environment = environment
        self.names, self.correct_from = tuple(names), correct_from
        self.weights = tuple(weights) or (1.0,) * len(names)
        self._workers = Workers(self.names, workers, code)
        if missing := [file for file in map(file_of, self.names) if file and not os.path.isfile(file)]:
            raise InputError(f"reward.name: no file '{missing[0]}'")
        if self._has_users() and (problem := self._workers.problem()):
            self.close()
            raise InputError(f"reward.name: {problem}")
        if environment and (problem := environment.problem()):
            self.close()
            raise InputError(f"environment.name: {problem}")

    def start(self) -> None:
        """Start the workers without waiting for them."""
        if self.names:
            self._workers.start()
        if self.environment:
            self.environment.start()

    def try_rows(self, rows: Sequence[RewardInput]) -> None:
        """Call the user's rewards once with each row: they must score it. Built-in ones are known to.

        Raises InputError with what the first one that fails said.
        """
        key = f"reward.name={','.join(self.names)}"
        try:
            outcomes = self._workers.score(rows) if rows and self._has_users() else []
        except NotScored as error:
            raise InputError(f"{key}: {error}") from None
        for outcome in outcomes:
            if outcome.failure:
                tried = "called with the first row of the data, its answer as the response"
                raise InputError(f"{key}: {tried}: {outcome.failure}: {outcome.detail}")

    def require_own(self, own: Sequence[OwnAnswer]) -> None:
        """Score rows' own answers. Raises InputError naming the first place where one does not earn 1."""
        outcomes = self._workers.score([one.row for one in own]) if own else []
        for one, outcome in zip(own, outcomes):
            reason = f"{outcome.failure}: {outcome.detail}"
            if not outcome.failure:
                paid = outcome.rewards[self.names.index(one.reward)]
                if paid == 1:
                    continue
                reason = f"earns {paid:g}, so no response can earn 1"
            raise InputError(
                f"{one.where}: the row's own answer, {one.row.response!r:.200}, scored by reward.name={one.reward}: "
                f"{reason}; mend the row or leave it out"
            )

    def __call__(
        self,
        responses: Sequence[str],
        answers: Sequence[str],
        contexts: Sequence[Context] | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Scores:
        """Score R responses against R answers.

        Args:
          contexts: what rewards may ask for beside them.
          while_waiting: called every second; what it raises ends the call and the workers.
        """
        contexts = [Context()] * len(responses) if contexts is None else contexts
        rows = [RewardInput(*row) for row in zip(responses, answers, contexts, strict=True)]
        # Without a reward the environment alone says what its conversations are worth.
        outcomes = self._workers.score(rows, while_waiting) if self.names else [Outcome((), False)] * len(rows)
        outcomes = _with_few_parts(outcomes)
        failed = [outcome for outcome in outcomes if outcome.failure]
        none = (0.0,) * len(self.names)
        table = [none if outcome.failure else outcome.rewards for outcome in outcomes]
        rewards = np.array(table, np.float64).reshape(len(table), len(self.names))
        return Scores(
            total=(rewards @ np.array(self.weights, np.float64)).astype(np.float32),
            rewards={label(name): rewards[:, i].astype(np.float32) for i, name in enumerate(self.names)},
            correct=np.array([self._is_correct(outcome) for outcome in outcomes], bool),
            failures=dict(Counter(outcome.failure for outcome in failed)),
            extracted=[outcome.extracted for outcome in outcomes],
            first_failure=f"{failed[0].failure}: {failed[0].detail}" if failed else "",
            parts=_part_columns(outcomes),
        )

    def close(self) -> None:
        self._workers.close()
        if self.environment:
            self.environment.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_users(self) -> bool:
        return any(name not in NAMES for name in self.names)

    def _is_correct(self, outcome: Outcome) -> bool:
        if outcome.failure:
            return False
        return outcome.rewards[0] >= self.correct_from if outcome.correct is None else outcome.correct


def _with_few_parts(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Fail the outcomes whose parts would make more than MAX_NAMES different ones: each is a column and a metric."""
    names: set[str] = set()
    checked = []
    for outcome in outcomes:
        if len(names | outcome.parts.keys()) > MAX_NAMES:
            outcome = Outcome((), failure="error", detail=f"rewards return more than {MAX_NAMES} different parts")
        names |= outcome.parts.keys()
        checked.append(outcome)
    return checked


def _part_columns(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    names = sorted({name for outcome in outcomes for name in outcome.parts})
    return {name: np.array([o.parts.get(name, np.nan) for o in outcomes], np.float32) for name in names}


def label(name: str) -> str:
    """Return the name of a reward's metric: of a file without its folder, `closeness:score`."""
    return os.path.basename(name).replace(".py:", ":") if file_of(name) else name


def make_environment(name: str, workers: WorkerOptions) -> EnvironmentWorkers | None:
    """Return the workers of an environment, None where `name` is ''. Raises InputError for a missing file."""
    if not name:
        return None
    check_environment(name)
    if (file := file_of(name)) and not os.path.isfile(file):
        raise InputError(f"environment.name: no file '{file}'")
    return EnvironmentWorkers(name, label(name), workers)


def check_environment(name: str) -> None:
    """Raise InputError for an unknown environment. Import no user's class."""
    _check_name("environment", name, ENVIRONMENTS, form="Class")


def check_rewards(names: Sequence[str], weights: Sequence[float]) -> None:
    """Raise InputError for unknown rewards and for weights that do not match them. Import no user's function."""
    if not names:
        raise InputError("reward.name: name at least one reward")
    for name in names:
        _check_name("reward", name, NAMES, form="function")
    if len(set(map(label, names))) < len(names):
        raise InputError(f"reward.name: a reward is named twice in {', '.join(names)}")
    if weights and len(weights) != len(names):
        raise InputError(f"reward.weights: {len(weights)} weights for {len(names)} rewards ({', '.join(names)})")


def _check_name(kind: str, name: str, known: Collection[str], *, form: str) -> None:
    if name not in known and not _PATH.fullmatch(name):
        listed = ", ".join(known)
        raise InputError(
            f"{kind}.name: no {kind} '{name}'; there are {listed}, package.module:{form} and FILE.py:{form}"
        )
