"""Where a step's rollouts come from: generated synchronously, or ahead of the learner by a thread.

Asynchronous (`pipeline.mode=async`): rollout devices and learner devices are disjoint, and generation of later steps
overlaps learning. The weights of a step's rollouts do not depend on timing: those of step t are drawn from the policy
after step t - 1 - lag (from the first one before that), so at most `lag` policy versions lie between generating a
rollout and learning from it. With lag 0 the order is the synchronous one. What drafts copy from and their lengths are
as old as the weights.

So the rollouts of steps t + 1 .. t + lag need nothing from after step t - 1. A checkpoint after step t keeps them. A
resumed run takes them instead of drawing them from its newer policy, and ends bit-equal to one without interruption.
"""

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from specrl_jax import distributed
from specrl_jax.data.problem import Problem
from specrl_jax.data.sources import ProblemStream
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.rollouts import Rollouts, WeightsVersion
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError
from specrl_jax.io.checkpoint_reader import HostState, with_packed
from specrl_jax.process_groups import ALONE, Agreement, ProcessGroups
from specrl_jax.rewards.scorer import Scorer, Scores
from specrl_jax.serialize import Packed, unpack
from specrl_jax.training.begun import Begun, Upcoming
from specrl_jax.training.build import Rollout
from specrl_jax.training.devices import Devices
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


class _Turn(enum.IntEnum):
    """What the rollout devices do next."""

    CLOSE = 0
    LEND = 1  # to an evaluation
    GENERATE = 2
    BEGIN = 3


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

    The thread decides what the rollout devices do next (`_Turn`): in several processes that hold one copy of the
    weights that of the first one, since all must start the same programs in the same order.

    Args:
      first: the first step to take; its weights are the oldest available.
      last: the last step to generate for.
      devices: held by the thread, which lends them to evaluations.
      restored: the rollouts of steps first, first + 1 ... of all processes, from a checkpoint.
      begin: called while the weights of the next step are not there, to begin its rollouts under those before them.
      groups: of the processes.
    """

    def __init__(
        self,
        draw: Draw,
        generate: Generate,
        lag: int,
        first: int,
        last: int,
        devices: Devices,
        restored: Sequence[RolloutBatch] = (),
        begin: Begin | None = None,
        groups: ProcessGroups = ALONE,
    ) -> None:
        self._draw, self._generate, self._begin, self._devices = draw, generate, begin, devices
        self._groups, self._agree = groups, Agreement(groups.own)
        self._lag, self._first, self._last = lag, first, last
        self._published: dict[int, Published] = {}
        self._generated: dict[int, RolloutBatch] = {}  # this process's part, by step
        self._error: BaseException | None = None
        self._closed = False
        self._changed = devices.changed  # guards the four above
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
            with self._devices:
                for step in range(first, self._last + 1):
                    if not self._run_step(step):
                        return
        except BaseException as error:  # raised in the learner's thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _run_step(self, step: int) -> bool:
        """Generate the rollouts of a step once its policy is there; return False where the pipeline was closed."""
        wanted, idle = max(step - self._lag, self._first), 0.0
        # Under the weights at hand; before the first step there are none.
        begin = self._begin if step > self._first else None
        while True:
            start = time.perf_counter()
            turn = self._turn(wanted, begin is not None)
            if turn == _Turn.CLOSE:
                return False
            if turn == _Turn.LEND:
                self._devices.lend()
            if turn == _Turn.BEGIN and begin is not None and self._begin_early(step, begin):
                begin = None  # all are finished
            if turn != _Turn.BEGIN:
                idle += time.perf_counter() - start
            if turn == _Turn.GENERATE:
                break
        policy, start = self._policy(wanted), time.perf_counter()
        problems = self._draw()
        data = time.perf_counter() - start
        batch = self._generate(step, problems, policy)
        with self._changed:
            self._generated[step] = batch._replace(seconds=batch.seconds | {"data": data, "idle": idle})
            self._changed.notify_all()
        return True

    def _turn(self, wanted: int, begins: bool) -> int:
        """Return what is next: at once where rollouts can begin early, else as soon as it is anything else."""

        def found() -> _Turn:
            if self._closed or self._devices.waiting:
                return _Turn.CLOSE if self._closed else _Turn.LEND
            return _Turn.GENERATE if wanted in self._published else _Turn.BEGIN

        with self._changed:
            self._changed.wait_for(lambda: begins or found() != _Turn.BEGIN)
            turn = found()
        return self._agree(int(turn))[0]

    def _begin_early(self, step: int, begin: Begin) -> bool:
        """Begin the rollouts of a step under the weights at hand, until something else is next."""
        with self._changed:
            policy = next(iter(self._published.values()))
        return begin(step, policy, lambda: self._closed or step in self._published or self._devices.waiting > 0)

    def _policy(self, step: int) -> Published:
        """Wait for the policy before `step`, and release older ones."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._published)
            for old in [known for known in self._published if known < step]:
                del self._published[old]
            return self._published[step]


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
    lag, last, grpo, groups = config.pipeline.lag, config.steps, config.grpo, rollout.plan.groups
    upcoming = Upcoming(stream, grpo.sampling_rounds if exact else 1)
    begun = Begun(upcoming, tokenizer.encode, grpo, lag, last, groups) if exact else None

    def generate_step(step: int, problems: list[Problem], policy: Published) -> RolloutBatch:
        lengths, history = speculation.as_of(policy.observed)
        later = begun.after(step) if begun else None

        def generate(problems: Sequence[Problem], first_id: int) -> tuple[Rollouts, Scores]:
            share = groups.share(len(problems))
            # A further round goes on with what the last one began of later steps.
            earlier = begun.texts | later.texts if begun and later else {}
            continuation: Continuation[Weights] = Continuation(policy.version, earlier, later)

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
                    continuation=continuation,
                )
                rollouts, own, count = of_group.of_prompts(share.within), problems[share.own], len(of_group.length)

                def waiting() -> None:
                    # Processes of one copy that generate beside the learner end in the engine, all at one place.
                    if synchronous or len(groups.own) == 1:
                        on_progress(count, count)

                return rollouts, score_rollouts(rollouts, own, tokenizer, scorer, waiting)

            # Beside the learner a process generates without the others, whose rollouts `take` gathers.
            if synchronous:
                return gather_scored(*distributed.together(generate_own), groups.order)
            return generate_own()

        start = time.perf_counter()
        longest = config.rollout.max_response_tokens
        rounds = sample_rounds(generate, problems, upcoming.take_more, grpo, longest, step)
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
    return Async(upcoming.take, generate_step, lag, first, last, devices, restored, early, groups)


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
