"""Rollouts that a thread generates ahead of the learner, and the choice between this and the synchronous source.

Asynchronous (`PipelineConfig.asynchronous`): rollout devices and learner devices are disjoint, and generation of later
steps overlaps learning. The weights of a step's rollouts do not depend on timing: those of step t are drawn from the
policy after step t - 1 - lag (from the first one before that), so at most `lag` policy versions lie between generating
a rollout and learning from it. With lag 0 the order is the synchronous one. What drafts copy from and their lengths
are as old as the weights.

So the rollouts of steps t + 1 .. t + lag need nothing from after step t - 1. A checkpoint after step t keeps them. A
resumed run takes them instead of drawing them from its newer policy, and ends bit-equal to one without interruption.
"""

import enum
import threading
import time

from specrl_jax import distributed
from specrl_jax.coordinator import Agreement
from specrl_jax.decoding.broadcast import Broadcast, alone
from specrl_jax.errors import Stopped
from specrl_jax.planning.plan import Plan
from specrl_jax.rollout.devices import Devices
from specrl_jax.rollout.generate import (
    NOTHING_PREFETCHED,
    Newer,
    PrefetchedRollouts,
    Published,
    RolloutBatch,
    RolloutGenerator,
    never,
)
from specrl_jax.rollout.pipeline import Pipeline, Sync
from specrl_jax.rollout.stale.inflight import WeightUpdates


class _Turn(enum.IntEnum):
    """The next task of the rollout devices."""

    CLOSE = 0
    LEND = 1  # to an evaluation
    GENERATE = 2
    BEGIN = 3


class Async:
    """Generates in a thread, ahead by at most `lag` steps. Its failure is raised where its rollouts are asked for.

    The thread decides what the rollout devices do next (`_Turn`): in several processes that hold one copy of the
    weights that of the first one, since all must start the same programs in the same order.

    Args:
      steps: to take and to generate for; the weights of the first are the oldest available.
      devices: held by the thread, which lends them to evaluations.
      restored: the rollouts of the first of `steps` of all processes, from a checkpoint.
      updates: gives running rollouts newer weights.
      agree: returns the turn of the first process of a copy in all of its processes.
    """

    def __init__(
        self,
        generation: RolloutGenerator,
        lag: int,
        *,
        steps: range,
        devices: Devices,
        restored: PrefetchedRollouts = NOTHING_PREFETCHED,
        updates: WeightUpdates | None = None,
        agree: Broadcast = alone,
    ) -> None:
        self._generation, self._lag, self._first, self._last = generation, lag, steps.start, steps.stop - 1
        self._devices, self._updates, self._agree = devices, updates, agree
        self._partial = restored.left
        self._published: dict[int, Published] = {}
        self._generated: dict[int, RolloutBatch] = {}  # this process's part, by step
        self._error: BaseException | None = None
        self._closed = False
        self._changed = devices.changed  # guards the four above
        # Of all processes; the learner's thread only.
        self._gathered = dict(zip(steps, restored.batches))
        to_generate = steps[len(restored.batches) :]
        self._thread = threading.Thread(target=self._run, args=(to_generate,), name="rollouts", daemon=True)
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

    def prefetched(self, step: int, wait: bool) -> PrefetchedRollouts | None:
        steps = range(step + 1, min(step + self._lag, self._last) + 1)
        missing = any(later not in self._gathered and later not in self._generated for later in steps)
        if not wait and distributed.any_process(missing):
            return None
        batches = [self._gather(later) for later in steps]
        # The steps before the last are there, too: `step` itself, or nothing was generated yet.
        last = self._gathered.get(steps[-1] if steps else step)
        return PrefetchedRollouts(batches, last.left if last else self._partial)

    def close(self) -> None:
        """Wait for the rollouts under way and drop them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _gather(self, step: int) -> RolloutBatch:
        """Return a step's rollouts of all processes; kept until a later step is taken, for a checkpoint before it."""
        if step not in self._gathered:
            with distributed.together():
                own = self._own(step)
            self._gathered[step] = self._generation.gather(own)
        return self._gathered[step]

    def _own(self, step: int) -> RolloutBatch:
        """Wait for this process's part of a step's rollouts."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._generated or self._error)
            if step not in self._generated:
                assert self._error is not None
                raise self._error
            return self._generated.pop(step)

    def _run(self, steps: range) -> None:
        try:
            with self._devices:
                for step in steps:
                    if not self._run_step(step):
                        return
        except BaseException as error:  # raised in the learner's thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _run_step(self, step: int) -> bool:
        """Generate the rollouts of a step once its policy is there; return False where the pipeline was closed."""
        oldest = max(step - self._lag, self._first)
        idle = self._wait_for_policy(step, oldest)
        if idle is None:
            return False
        first, newer = self._in_flight(step, oldest)
        policy, start = self._policy(first), time.perf_counter()
        problems = self._generation.draw()
        data = time.perf_counter() - start
        batch = self._generation.generate(step, problems, policy, newer=newer)
        with self._changed:
            self._generated[step] = batch._replace(seconds=batch.seconds | {"data": data, "idle": idle})
            self._changed.notify_all()
        return True

    def _wait_for_policy(self, step: int, oldest: int) -> float | None:
        """Wait for the oldest policy that may draw the rollouts of a step; return the seconds in which the devices were
        idle, None where the pipeline was closed. Meanwhile rollouts begin early where they may.
        """
        idle = 0.0
        # Under the weights at hand; before the first step there are none.
        begins = self._generation.begins_early and step > self._first
        while True:
            start = time.perf_counter()
            turn = self._turn(oldest, begins)
            if turn == _Turn.CLOSE:
                return None
            if turn == _Turn.LEND:
                self._devices.lend()
            if turn == _Turn.BEGIN:
                begins = begins and not self._begin_early(step)
            else:
                idle += time.perf_counter() - start
            if turn == _Turn.GENERATE:
                return idle

    def _turn(self, oldest: int, begins: bool) -> int:
        """Return what is next: at once where rollouts can begin early, else as soon as it is anything else."""

        def found() -> _Turn:
            if self._closed or self._devices.waiting:
                return _Turn.CLOSE if self._closed else _Turn.LEND
            # Rollouts in flight may have taken a newer policy, and released the oldest.
            return _Turn.GENERATE if max(self._published, default=0) >= oldest else _Turn.BEGIN

        with self._changed:
            self._changed.wait_for(lambda: begins or found() != _Turn.BEGIN)
            turn = found()
        return self._agree(int(turn))[0]

    def _begin_early(self, step: int) -> bool:
        """Begin the rollouts of a step under the weights at hand, until something else is next; return whether all are
        finished.
        """
        with self._changed:
            policy = next(iter(self._published.values()))
        return self._generation.begin(
            step, policy, lambda: self._closed or step in self._published or self._devices.waiting > 0
        )

    def _in_flight(self, step: int, policy: int) -> tuple[int, Newer]:
        """Return (the policy that the rollouts of a step begin with, what gives them newer ones); `policy` is there."""
        if self._updates is None:
            return policy, never
        choose = self._updates.of(step, policy)

        def choice() -> int:
            with self._changed:
                newest = max(self._published)
            return choose(newest)

        current = choice()

        def newer() -> Published | None:
            nonlocal current
            before, current = current, choice()
            return self._policy(current) if current != before else None

        return current, newer

    def _policy(self, step: int) -> Published:
        """Wait for the policy before `step`, and release older ones. Raises Stopped where the pipeline is closed."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._published or self._closed)
            if step not in self._published:
                raise Stopped
            for old in [known for known in self._published if known < step]:
                del self._published[old]
            return self._published[step]


def make_pipeline(
    plan: Plan,
    generation: RolloutGenerator,
    *,
    first: int,
    devices: Devices,
    workdir: str,
    restored: PrefetchedRollouts = NOTHING_PREFETCHED,
) -> Pipeline:
    """Build the pipeline of pipeline.schedule.

    Args:
      generation: an asynchronous pipeline calls it in its own thread. Stopped, which it may raise, is raised by `take`
        in every process.
      first: the first step to take.
      devices: held while an asynchronous pipeline generates.
      workdir: in-flight weight updates are written there.
      restored: from a checkpoint.
    """
    pipeline, steps = plan.config.pipeline, range(first, plan.config.steps + 1)
    if not pipeline.asynchronous:
        return Sync(generation, restored.left)
    agree, updates, exact = Agreement(plan.groups.own), None, pipeline.schedule == "exact"
    if pipeline.schedule == "inflight":
        updates = WeightUpdates(workdir, pipeline.repeat, first + len(restored.batches), agree=agree)
    return Async(
        generation,
        0 if exact else pipeline.lag,
        steps=steps,
        devices=devices,
        restored=restored,
        updates=updates,
        agree=agree,
    )
