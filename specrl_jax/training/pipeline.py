"""Where a step's rollouts come from: generated synchronously, or ahead of the learner by a thread.

Asynchronous (`pipeline.mode=async`): rollout devices and learner devices are disjoint, and generation of later steps
overlaps learning. The weights of a step's rollouts do not depend on timing: those of step t are drawn from the policy
after step t - 1 - lag (from the first one before that), so at most `lag` policy versions lie between generating a
rollout and learning from it. With lag 0 the order is the synchronous one.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from specrl_jax import distributed
from specrl_jax.data.sources import ProblemStream
from specrl_jax.data.tasks import Problem
from specrl_jax.decoding.rollouts import Rollouts, WeightsVersion
from specrl_jax.drafts.weights import Weights
from specrl_jax.rewards.scorer import Scorer, Scores
from specrl_jax.training.build import Rollout
from specrl_jax.training.dynamic_sampling import (
    ScoredRollouts,
    gather_round,
    gather_scored,
    sample_rounds,
    score_rollouts,
)
from specrl_jax.training.speculation import Speculation


class RolloutBatch(NamedTuple):
    """One step's rollouts, of all processes."""

    rounds: list[ScoredRollouts]
    position: dict[str, object]  # of the data stream, after the problems drawn for them
    seconds: dict[str, float]  # of data and generate; "idle": the rollout devices waited for weights


# draws the problems of one round
Draw = Callable[[], list[Problem]]
# (step, problems, weights, their version) -> its rollouts; seconds: of generate
Generate = Callable[[int, list[Problem], Weights, WeightsVersion], RolloutBatch]


class Pipeline(Protocol):
    """For each step t, counting up: `draw`, `publish` the policy before it, `take` its rollouts. In the end `close`."""

    def draw(self) -> None: ...
    def publish(self, step: int, weights: Weights, version: WeightsVersion) -> None: ...
    def take(self, step: int) -> RolloutBatch: ...
    def close(self) -> None: ...


class Sync:
    """Generates in the learner's turn."""

    def __init__(self, draw: Draw, generate: Generate) -> None:
        self._draw, self._generate = draw, generate
        self._problems: list[Problem] = []
        self._data_seconds = 0.0
        self._newest: tuple[Weights, WeightsVersion] | None = None

    def draw(self) -> None:
        start = time.perf_counter()
        self._problems = self._draw()
        self._data_seconds = time.perf_counter() - start

    def publish(self, step: int, weights: Weights, version: WeightsVersion) -> None:
        self._newest = weights, version

    def take(self, step: int) -> RolloutBatch:
        assert self._newest is not None  # published
        # Released before learning: nothing reads these weights any more.
        (weights, version), self._newest = self._newest, None
        batch = self._generate(step, self._problems, weights, version)
        return batch._replace(seconds=batch.seconds | {"data": self._data_seconds, "idle": 0.0})

    def close(self) -> None:
        pass


class Async:
    """Generates in a thread, ahead by at most `lag` steps. Its failure is raised by the next `take`.

    Args:
      first: the first step to take; its weights are the oldest available.
      last: the last step to generate for.
      devices: held while rollouts are generated, so that an evaluation may wait for its turn.
    """

    def __init__(
        self, draw: Draw, generate: Generate, lag: int, first: int, last: int, devices: threading.Lock
    ) -> None:
        self._draw, self._generate, self._devices = draw, generate, devices
        self._lag, self._first, self._last = lag, first, last
        self._published: dict[int, tuple[Weights, WeightsVersion]] = {}
        self._changed = threading.Condition()
        self._closed = False
        # Queue bounded by the lag.
        self._finished: queue.Queue[tuple[int, RolloutBatch] | BaseException] = queue.Queue(maxsize=max(lag, 1))
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def draw(self) -> None:
        """Do nothing: the thread draws."""

    def publish(self, step: int, weights: Weights, version: WeightsVersion) -> None:
        with self._changed:
            self._published[step] = weights, version
            self._changed.notify_all()

    def take(self, step: int) -> RolloutBatch:
        """Wait for step t's rollouts, then gather those of all processes, which generate independently."""
        found = self._finished.get()
        if isinstance(found, BaseException):
            raise found
        produced_for, batch = found
        assert produced_for == step, (produced_for, step)
        return batch._replace(rounds=[gather_round(own) for own in batch.rounds])

    def close(self) -> None:
        """Wait for the rollouts under way and drop them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._thread.is_alive():
            try:
                self._finished.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self) -> None:
        try:
            for step in range(self._first, self._last + 1):
                start = time.perf_counter()
                weights, version = self._weights(max(step - self._lag, self._first))
                idle = time.perf_counter() - start
                with self._devices:
                    start = time.perf_counter()
                    problems = self._draw()
                    data = time.perf_counter() - start
                    batch = self._generate(step, problems, weights, version)
                del weights
                self._finished.put((step, batch._replace(seconds=batch.seconds | {"data": data, "idle": idle})))
        except _Closed:
            return
        except BaseException as error:  # raised in the learner's thread
            self._finished.put(error)

    def _weights(self, step: int) -> tuple[Weights, WeightsVersion]:
        """Wait for the policy before `step`, and release older ones."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step in self._published)
            if self._closed:
                raise _Closed
            for old in [known for known in self._published if known < step]:
                del self._published[old]
            return self._published[step]


class _Closed(Exception):
    pass


def make_pipeline(
    rollout: Rollout,
    stream: ProblemStream,
    scorer: Scorer,
    speculation: Speculation,
    first: int,
    on_progress: Callable[[int, int], None],
    devices: threading.Lock,
) -> Pipeline:
    """Build the pipeline of pipeline.mode.

    Args:
      first: the first step to take.
      on_progress: called with (rollouts finished, rollouts in all) while the learner waits for them.
      devices: held while an asynchronous pipeline generates.
    """
    config, tokenizer, group_size = rollout.plan.config, rollout.tokenizer, rollout.plan.config.grpo.group_size
    synchronous = config.pipeline.mode == "sync"

    def generate_step(step: int, problems: list[Problem], weights: Weights, version: WeightsVersion) -> RolloutBatch:
        def generate(problems: Sequence[Problem], first_id: int) -> tuple[Rollouts, Scores]:
            own = distributed.process_slice(len(problems))
            rollouts = rollout.engine.generate(
                weights,
                [tokenizer.encode(problem.prompt) for problem in problems[own]],
                group_size,
                config.rollout.seed,
                first_id + own.start * group_size,
                on_progress if synchronous else lambda done, total: None,
                speculation.lengths,
                speculation.history,
            ).with_version(version)
            scored = rollouts, score_rollouts(rollouts, problems[own], tokenizer, scorer)
            # Beside the learner a process generates without the others, whose rollouts `take` gathers.
            return gather_scored(*scored) if synchronous else scored

        start = time.perf_counter()
        longest = config.rollout.max_response_tokens
        rounds = sample_rounds(generate, problems, lambda: next(stream), config.grpo, longest, step)
        return RolloutBatch(rounds, stream.position, {"generate": time.perf_counter() - start})

    if synchronous:
        return Sync(lambda: next(stream), generate_step)
    return Async(lambda: next(stream), generate_step, config.pipeline.lag, first, config.steps, devices)
