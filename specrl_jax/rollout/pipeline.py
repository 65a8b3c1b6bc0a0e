"""The source of a step's rollouts, the synchronous one, and what a checkpoint keeps of prefetched rollouts."""

import time
from typing import Protocol

from specrl_jax.data.problem import Problem
from specrl_jax.io.checkpoint_reader import HostState, of_this_version, with_packed
from specrl_jax.rollout.generate import PrefetchedRollouts, Published, RolloutBatch, RolloutGenerator, never
from specrl_jax.rollout.stale.partial import PartialRollouts
from specrl_jax.serialize import Packed, unpack


class Pipeline(Protocol):
    """For each step t, counting up: `draw`, `publish` the policy before it, `take` its rollouts. In the end `close`."""

    def draw(self) -> None: ...
    def publish(self, step: int, policy: Published) -> None: ...
    def ready(self, step: int) -> bool:
        """Return whether `take` would not wait, or would fail, in every process. Collective."""

    def take(self, step: int) -> RolloutBatch: ...
    def prefetched(self, step: int, wait: bool) -> PrefetchedRollouts | None:
        """Return what the checkpoint of a step keeps for those after it. Collective.

        None without `wait` where some are still being generated.
        """

    def close(self) -> None: ...


class Sync:
    """Generates in the learner's turn."""

    def __init__(self, generation: RolloutGenerator, left: list[PartialRollouts]) -> None:
        self._generation, self._partial = generation, left
        self._problems: list[Problem] = []
        self._data_seconds = 0.0
        self._newest: Published | None = None

    def draw(self) -> None:
        start = time.perf_counter()
        self._problems = self._generation.draw()
        self._data_seconds = time.perf_counter() - start

    def publish(self, step: int, policy: Published) -> None:
        self._newest = policy

    def ready(self, step: int) -> bool:
        return True  # nobody else generates

    def take(self, step: int) -> RolloutBatch:
        assert self._newest is not None  # published
        # Released before learning: nothing reads these weights any more.
        policy, self._newest = self._newest, None
        batch = self._generation.gather(self._generation.generate(step, self._problems, policy, newer=never))
        self._partial = batch.left
        return batch._replace(seconds=batch.seconds | {"data": self._data_seconds, "idle": 0.0})

    def prefetched(self, step: int, wait: bool) -> PrefetchedRollouts:
        return PrefetchedRollouts([], self._partial)

    def close(self) -> None:
        pass


# Name of prefetched rollouts among a checkpoint's values, and the beginning of the names of their arrays.
PREFETCHED = "ahead"


def with_rollouts(host: HostState, prefetched: PrefetchedRollouts) -> HostState:
    """Add the rollouts that the steps after a checkpoint learn from, of all processes."""
    return with_packed(host, PREFETCHED, prefetched)


def rollouts_of(host: HostState) -> PrefetchedRollouts:
    """Return what `with_rollouts` added. Raises InputError for what another version wrote."""
    with of_this_version():
        return unpack(PrefetchedRollouts, Packed(host.values[PREFETCHED], dict(host.arrays)))
