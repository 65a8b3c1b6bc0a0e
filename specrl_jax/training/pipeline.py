"""Where a step's rollouts come from: generated synchronously, or ahead of the learner by a thread.

Asynchronous (`pipeline.mode=async`): rollout devices and learner devices are disjoint, and generation of later steps
overlaps learning. The weights of a step's rollouts do not depend on timing: those of step t are drawn from the policy
after step t - 1 - lag (from the first one before that), so at most `lag` policy versions lie between generating a
rollout and learning from it. With lag 0 the order is the synchronous one. What drafts copy from and their lengths are
as old as the weights.

So the rollouts of steps t + 1 .. t + lag need nothing from after step t - 1. A checkpoint after step t keeps them. A
resumed run takes them instead of drawing them from its newer policy, and ends bit-equal to one without interruption.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from specrl_jax import distributed
from specrl_jax.data.problem import Problem
from specrl_jax.data.sources import ProblemStream
from specrl_jax.decoding.rollouts import Rollouts, WeightsVersion
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError
from specrl_jax.io.checkpoint_reader import HostState, with_packed
from specrl_jax.process_groups import ProcessGroups
from specrl_jax.rewards.scorer import Scorer, Scores
from specrl_jax.serialize import Packed, unpack
from specrl_jax.training.begun import Begun, Upcoming
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


class Published(NamedTuple):
    """The policy before a step, and what its rollouts may know."""

    weights: Weights
    version: WeightsVersion
    observed: int  # steps that Speculation had observed


class Devices:
    """A lock on the rollout devices whose holder sees that another waits for them."""

    def __init__(self) -> None:
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self.waiting = 0

    def __enter__(self) -> None:
        with self._counting:
            self.waiting += 1
        self._lock.acquire()
        with self._counting:
            self.waiting -= 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


# draws the problems of one round
Draw = Callable[[], list[Problem]]
# (step, policy before an earlier one, until): begins its rollouts until `until` says that it is enough; returns whether
# all are finished
Begin = Callable[[int, "Published", Callable[[], bool]], bool]
# (step, problems, policy) -> its rollouts; seconds: of generate
Generate = Callable[[int, list[Problem], Published], RolloutBatch]


class Pipeline(Protocol):
    """For each step t, counting up: `draw`, `publish` the policy before it, `take` its rollouts. In the end `close`."""

    def draw(self) -> None: ...
    def publish(self, step: int, policy: Published) -> None: ...
    def ready(self, step: int) -> bool:
        """Return whether `take` would not wait, or would fail, in every process. Collective."""

    def take(self, step: int) -> RolloutBatch: ...
    def ahead(self, step: int, wait: bool) -> list[RolloutBatch] | None:
        """Return the rollouts of the steps after `step` that its checkpoint keeps. Collective.

        None without `wait` where some are still being generated.
        """

    def close(self) -> None: ...


class Sync:
    """Generates in the learner's turn."""

    def __init__(self, draw: Draw, generate: Generate) -> None:
        self._draw, self._generate = draw, generate
        self._problems: list[Problem] = []
        self._data_seconds = 0.0
        self._newest: Published | None = None

    def draw(self) -> None:
        start = time.perf_counter()
        self._problems = self._draw()
        self._data_seconds = time.perf_counter() - start

    def publish(self, step: int, policy: Published) -> None:
        self._newest = policy

    def ready(self, step: int) -> bool:
        return True  # nobody else generates

    def take(self, step: int) -> RolloutBatch:
        assert self._newest is not None  # published
        # Released before learning: nothing reads these weights any more.
        policy, self._newest = self._newest, None
        batch = self._generate(step, self._problems, policy)
        return batch._replace(seconds=batch.seconds | {"data": self._data_seconds, "idle": 0.0})

    def ahead(self, step: int, wait: bool) -> list[RolloutBatch]:
        return []

    def close(self) -> None:
        pass


class Async:
    """Generates in a thread, ahead by at most `lag` steps. Its failure is raised where its rollouts are asked for.

    Args:
      first: the first step to take; its weights are the oldest available.
      last: the last step to generate for.
      devices: held while rollouts are generated, so that an evaluation may wait for its turn.
      restored: the rollouts of steps first, first + 1 ... of all processes, from a checkpoint.
      begin: called while the weights of the next step are not there, to begin its rollouts under those before them.
    """

    def __init__(
        self,
        draw: Draw,
        generate: Generate,
        lag: int,
        first: int,
        last: int,
        devices: Devices,
        groups: ProcessGroups,
        restored: Sequence[RolloutBatch] = (),
        begin: Begin | None = None,
    ) -> None:
        self._draw, self._generate, self._begin, self._devices = draw, generate, begin, devices
        self._groups = groups
        self._lag, self._first, self._last = lag, first, last
        self._published: dict[int, Published] = {}
        self._generated: dict[int, RolloutBatch] = {}  # this process's part, by step
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()  # guards the four above
        self._gathered = dict(enumerate(restored, start=first))  # of all processes; the learner's thread only
        self._thread = threading.Thread(target=self._run, args=(first + len(restored),), name="rollouts", daemon=True)
        self._thread.start()

    def draw(self) -> None:
        """Do nothing: the thread draws."""

    def publish(self, step: int, policy: Published) -> None:
        with self._changed:
            self._published[step] = policy
            self._changed.notify_all()

    def ready(self, step: int) -> bool:
        with self._changed:
            waits = step not in self._gathered and step not in self._generated and self._error is None
        return not distributed.any_process(waits)

    def take(self, step: int) -> RolloutBatch:
        """Wait for step t's rollouts, then gather those of all processes, which generate independently."""
        for learned in [known for known in self._gathered if known < step]:
            del self._gathered[learned]
        return self._gather(step)

    def ahead(self, step: int, wait: bool) -> list[RolloutBatch] | None:
        steps = range(step + 1, min(step + self._lag, self._last) + 1)
        missing = any(ahead not in self._gathered and ahead not in self._generated for ahead in steps)
        if not wait and distributed.any_process(missing):
            return None
        return [self._gather(ahead) for ahead in steps]

    def close(self) -> None:
        """Wait for the rollouts under way and drop them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _gather(self, step: int) -> RolloutBatch:
        """Return a step's rollouts of all processes; kept until a later step is taken, for a checkpoint before it."""
        if step not in self._gathered:
            own = distributed.together(lambda: self._own(step))
            self._gathered[step] = own._replace(rounds=[gather_round(part, self._groups.order) for part in own.rounds])
        return self._gathered[step]

    def _own(self, step: int) -> RolloutBatch:
        """Wait for this process's part of a step's rollouts."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._generated or self._error)
            if step not in self._generated:
                assert self._error is not None
                raise self._error
            return self._generated.pop(step)

    def _run(self, first: int) -> None:
        try:
            for step in range(first, self._last + 1):
                if self._begin is not None:
                    self._begin_early(step, self._begin)
                start = time.perf_counter()
                policy = self._policy(max(step - self._lag, self._first))
                idle = time.perf_counter() - start
                with self._devices:
                    start = time.perf_counter()
                    problems = self._draw()
                    data = time.perf_counter() - start
                    batch = self._generate(step, problems, policy)
                del policy
                with self._changed:
                    self._generated[step] = batch._replace(seconds=batch.seconds | {"data": data, "idle": idle})
                    self._changed.notify_all()
        except _Closed:
            return
        except BaseException as error:  # raised in the learner's thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _begin_early(self, step: int, begin: Begin) -> None:
        """Begin the rollouts of a step under the weights at hand, until its own are there."""

        def until() -> bool:
            return self._closed or step in self._published

        with self._changed:
            policy = next(iter(self._published.values()), None)
        finished = policy is None  # nothing is at hand before the first step
        while not finished and not until():
            assert policy is not None
            if self._devices.waiting:  # an evaluation goes first
                time.sleep(0.01)
                continue
            with self._devices:
                finished = begin(step, policy, lambda: until() or self._devices.waiting > 0)

    def _policy(self, step: int) -> Published:
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
    devices: Devices,
    restored: Sequence[RolloutBatch] = (),
) -> Pipeline:
    """Build the pipeline of pipeline.mode.

    Args:
      first: the first step to take.
      on_progress: of the engine; an asynchronous pipeline calls it in its own thread. Stopped, which it may raise, is
        raised by `take` in every process.
      devices: held while an asynchronous pipeline generates.
      restored: rollouts of step `first` and later ones, from a checkpoint.
    """
    config, tokenizer, group_size = rollout.plan.config, rollout.tokenizer, rollout.plan.config.grpo.group_size
    synchronous, exact = config.pipeline.mode == "sync", config.pipeline.update == "exact"
    lag, last, upcoming = config.pipeline.lag, config.steps, Upcoming(stream)
    groups = rollout.plan.groups
    begun = Begun(upcoming, tokenizer.encode, group_size, lag, last, groups) if exact else None

    def generate_step(step: int, problems: list[Problem], policy: Published) -> RolloutBatch:
        lengths, history = speculation.as_of(policy.observed)
        later = begun.after(step) if begun else None

        def generate(problems: Sequence[Problem], first_id: int) -> tuple[Rollouts, Scores]:
            share = groups.share(len(problems))

            def generate_own() -> tuple[Rollouts, Scores]:
                of_group = rollout.engine.generate(
                    policy.weights,
                    [tokenizer.encode(problem.prompt) for problem in problems[share.group]],
                    group_size,
                    config.rollout.seed,
                    first_id + share.group.start * group_size,
                    on_progress,
                    lengths,
                    history,
                    earlier=begun.texts if begun else None,
                    lookahead=later,
                ).with_version(policy.version)
                rollouts, own, count = of_group.of_prompts(share.within), problems[share.own], len(of_group.length)
                scores = score_rollouts(rollouts, own, tokenizer, scorer, lambda: on_progress(count, count))
                return rollouts, scores

            # Beside the learner a process generates without the others, whose rollouts `take` gathers.
            if synchronous:
                return gather_scored(*distributed.together(generate_own), groups.order)
            return generate_own()

        start = time.perf_counter()
        longest = config.rollout.max_response_tokens
        rounds = sample_rounds(generate, problems, upcoming.take, config.grpo, longest, step)
        if begun and later:
            begun.texts = later.texts
        return RolloutBatch(rounds, upcoming.position, {"generate": time.perf_counter() - start})

    def begin(step: int, policy: Published, until: Callable[[], bool]) -> bool:
        assert begun is not None
        lengths, history = speculation.as_of(policy.observed)
        later = begun.after(step - 1)
        shared = group_size, config.rollout.seed, until, lengths, history
        finished = rollout.engine.begin(policy.weights, later, *shared)
        begun.texts = later.texts
        return finished

    if synchronous:
        return Sync(upcoming.take, generate_step)
    lag, early = (0, begin) if exact else (lag, None)
    return Async(upcoming.take, generate_step, lag, first, last, devices, groups, restored, early)


# Name of the rollouts ahead among a checkpoint's values, and the beginning of the names of their arrays.
AHEAD = "ahead"


def with_rollouts(host: HostState, ahead: Sequence[RolloutBatch]) -> HostState:
    """Add the rollouts that the steps after a checkpoint learn from, of all processes."""
    return with_packed(host, AHEAD, list(ahead))


def without_rollouts(host: HostState) -> tuple[list[RolloutBatch], HostState]:
    """Return (the rollouts that `with_rollouts` added, the rest). Raises InputError for those of an older version."""
    arrays = {name: x for name, x in host.arrays.items() if name.startswith(f"{AHEAD}.")}
    values = {name: value for name, value in host.values.items() if name != AHEAD}
    rest = HostState(values, {name: x for name, x in host.arrays.items() if name not in arrays})
    try:
        return unpack(list[RolloutBatch], Packed(host.values[AHEAD], arrays)), rest
    except KeyError as error:
        raise InputError(
            f"checkpoints: the rollouts ahead lack {error}, an older version wrote them; resume with that version, or "
            "start anew in another --workdir"
        ) from None
