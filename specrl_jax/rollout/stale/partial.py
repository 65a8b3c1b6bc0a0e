"""Over-sampled groups and partial rollouts: a step learns from the groups that are complete first.

A step begins `grpo.oversample` groups more than it learns from, and ends once enough are complete. The others are
dropped, or, under `pipeline.schedule=partial`, go on in the next step with their tokens. Either way a rollout's length
decides when it is learned from, and carried tokens are of older weights: the rollouts of a step are no sample of its
policy (by how much, on a toy: experiments/early_rollouts/README.md).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specrl_jax import distributed
from specrl_jax.data.problem import Problem
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.errors import InputError
from specrl_jax.rollout.prompt_lengths import NONE_SEEN, SeenLengths


class PartialRollouts(NamedTuple):
    """State that a step passes on to the next: groups begun and not learned from, and prompt lengths seen."""

    problems: list[Problem]  # of groups that go on in the next step
    rollouts: Rollouts | None  # theirs, finished or not; None: no groups
    dropped: int = 0  # response tokens of groups that do not go on
    seen: SeenLengths = NONE_SEEN  # of the prompts of all steps

    @property
    def carried(self) -> int:
        """Return the number of unfinished rollouts that go on."""
        return 0 if self.rollouts is None else int((~self.rollouts.finished).sum())


NO_PARTIAL_ROLLOUTS = PartialRollouts([], None)


def gather_partial_rollouts(own: PartialRollouts) -> list[PartialRollouts]:
    """Return what every process has left, in their order. Collective."""
    return distributed.all_gather_objects(PartialRollouts, own)


def local_partial_rollouts(left: Sequence[PartialRollouts]) -> PartialRollouts:
    """Return this process's part of what `gather_partial_rollouts` returned.

    Where the number of processes has changed, every one knows the prompt lengths that all had seen. Raises InputError
    where it has and rollouts are left.
    """
    if len(left) == jax.process_count():
        return left[jax.process_index()]
    if any(each.rollouts is not None for each in left):
        raise InputError(f"grpo.oversample: {len(left)} processes began this run, and {jax.process_count()} resume it")
    if not left:
        return NO_PARTIAL_ROLLOUTS
    return NO_PARTIAL_ROLLOUTS._replace(seen=SeenLengths(*map(np.concatenate, zip(*(each.seen for each in left)))))


def enough_groups(groups: int, group_size: int) -> Callable[[np.ndarray], bool]:
    """Return whether, of rollouts that are `finished` [R] bool, `groups` are complete."""

    def enough(finished: np.ndarray) -> bool:
        return bool(finished.reshape(-1, group_size).all(axis=1).sum() >= groups)

    return enough


def split_groups(
    found: Rollouts, problems: list[Problem], groups: int, *, group_size: int, carries: bool
) -> tuple[Rollouts, list[Problem], PartialRollouts]:
    """Return the first complete groups, their problems, and what is left."""
    complete = np.flatnonzero(found.finished.reshape(-1, group_size).all(axis=1))[:groups]
    others = np.setdiff1d(np.arange(len(problems)), complete)
    learned, remaining = found.take_groups(complete, group_size), found.take_groups(others, group_size)
    chosen = [problems[i] for i in complete]
    if not carries:
        return learned, chosen, PartialRollouts([], None, int(remaining.response_length.sum()))
    remaining = dataclasses.replace(remaining, chunks=())  # their time is this step's
    return learned, chosen, PartialRollouts([problems[i] for i in others], remaining)
