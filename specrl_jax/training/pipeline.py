"""The source of a step's rollouts, the synchronous one, and what a checkpoint keeps of rollouts that are ahead."""

import time
from collections.abc import Callable
from typing import Protocol

from specrl_jax.data.problem import Problem
from specrl_jax.errors import InputError
from specrl_jax.io.checkpoint_reader import HostState, with_packed
from specrl_jax.serialize import Packed, unpack
from specrl_jax.training.generation import (
    Newer,
    PrefetchedRollouts,
    Published,
    RolloutBatch,
    never,
)
from specrl_jax.training.partial import PartialRollouts, gather_partial_rollouts

# draws the problems of one round
Draw = Callable[[], list[Problem]]


class GenerateStep(Protocol):
    """Return the rollouts of a step; `newer` gives newer policies for what runs. Their seconds are of generate."""

    def __call__(self, step: int, problems: list[Problem], policy: Published, *, newer: Newer) -> RolloutBatch: ...


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

    def __init__(self, draw: Draw, generate: GenerateStep, left: list[PartialRollouts]) -> None:
        self._draw, self._generate, self._partial = draw, generate, left
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
        batch = self._generate(step, self._problems, policy, newer=never)
        self._partial = gather_partial_rollouts(*batch.left)
        seconds = batch.seconds | {"data": self._data_seconds, "idle": 0.0}
        return batch._replace(seconds=seconds, left=self._partial)

    def prefetched(self, step: int, wait: bool) -> PrefetchedRollouts:
        return PrefetchedRollouts([], self._partial)

    def close(self) -> None:
        pass


# Name of the rollouts ahead among a checkpoint's values, and the beginning of the names of their arrays.
AHEAD = "ahead"


def with_rollouts(host: HostState, prefetched: PrefetchedRollouts) -> HostState:
    """Add the rollouts that the steps after a checkpoint learn from, of all processes."""
    return with_packed(host, AHEAD, prefetched)


def without_rollouts(host: HostState) -> tuple[PrefetchedRollouts, HostState]:
    """Return (what `with_rollouts` added, the rest). Raises InputError for those of an older version."""
    arrays = {name: x for name, x in host.arrays.items() if name.startswith(f"{AHEAD}.")}
    values = {name: value for name, value in host.values.items() if name != AHEAD}
    rest = HostState(values, {name: x for name, x in host.arrays.items() if name not in arrays})
    try:
        return unpack(PrefetchedRollouts, Packed(host.values[AHEAD], arrays)), rest
    except (KeyError, TypeError) as error:
        raise InputError(
            f"checkpoints: the rollouts ahead lack {error}, an older version wrote them; resume with that version, or "
            "start anew in another --workdir"
        ) from None
