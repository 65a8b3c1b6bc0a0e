"""The rollouts that a step learns from: generated, scored, and where asked for generated again until they teach."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.config import GRPOConfig
from specrl_jax.data.tasks import Problem
from specrl_jax.decoding.rollouts import Rollouts, concatenated
from specrl_jax.distributed import all_gather_objects
from specrl_jax.learner.batch import TrainingBatch
from specrl_jax.rewards.scorer import Scores
from specrl_jax.rl.advantages import ADVANTAGES, overlong_penalty


class Batch(NamedTuple):
    """Scored rollouts of whole groups, group by group; R = groups x G."""

    rollouts: Rollouts  # prompt_index counts `problems`
    problems: list[Problem]
    scores: Scores
    rewards: np.ndarray  # [R] float32, what advantages are made of: the scores' total, less what length costs


# (problems, id of the first rollout) -> their rollouts and scores
Generate = Callable[[Sequence[Problem], int], tuple[Rollouts, Scores]]


def collect(
    generate: Generate,
    problems: list[Problem],
    more: Callable[[], list[Problem]],
    g: GRPOConfig,
    longest: int,
    step: int,
) -> list[Batch]:
    """Batches of P groups each, until P groups have unequal rewards, or `grpo.sampling_rounds` are done.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2): a group whose answers all earn the same teaches nothing.

    Args:
      problems: of the first batch; `more` draws those of the next.
      longest: tokens that an answer may have.
    """
    batches: list[Batch] = []
    per_round = g.prompts_per_step * g.group_size
    while True:
        first_id = (step * g.sampling_rounds + len(batches)) * per_round
        rollouts, scores = generate(problems, first_id)
        batches.append(Batch(rollouts, problems, scores, _rewards(rollouts, scores, g, longest)))
        found = sum(unequal(batch.rewards, g.group_size).sum() for batch in batches)
        if found >= g.prompts_per_step or len(batches) == g.sampling_rounds:
            return batches
        problems = more()


def _rewards(rollouts: Rollouts, scores: Scores, g: GRPOConfig, longest: int) -> np.ndarray:
    if not g.overlong_buffer:
        return scores.total
    return scores.total + g.overlong_penalty * overlong_penalty(rollouts.response_length, longest, g.overlong_buffer)


def unequal(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """[P] bool: groups of rewards [P x G] that differ."""
    groups = rewards.reshape(-1, group_size)
    return np.any(groups != groups[:, :1], axis=1)


def lesson(batches: list[Batch], g: GRPOConfig) -> TrainingBatch:
    """P groups of the batches: those with unequal rewards first where several rounds were allowed, in their order.

    What fills up the batch then, and answers cut by the limit under `grpo.mask_truncated`, do not teach.
    """
    rollouts = concatenated([batch.rollouts for batch in batches])
    rewards = np.concatenate([batch.rewards for batch in batches])
    differs = unequal(rewards, g.group_size)
    order = np.argsort(~differs, kind="stable") if g.sampling_rounds > 1 else np.arange(len(differs))
    groups = np.sort(order[: g.prompts_per_step])
    rows = (groups[:, None] * g.group_size + np.arange(g.group_size)).reshape(-1)
    advantages = ADVANTAGES[g.advantage](rewards[rows].reshape(-1, g.group_size)).reshape(-1)
    loss_mask = np.repeat(differs[groups], g.group_size) if g.sampling_rounds > 1 else np.ones(len(rows), bool)
    if g.mask_truncated:
        loss_mask &= rollouts.ended[rows]
    return TrainingBatch(rollouts.take(rows), advantages, loss_mask)


def merged_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of all parts, as of one."""
    first, *others = parts
    for scores in others:
        first = Scores(
            np.concatenate([first.total, scores.total]),
            {name: np.concatenate([first.parts[name], scores.parts[name]]) for name in first.parts},
            np.concatenate([first.correct, scores.correct]),
            {
                cause: first.failures.get(cause, 0) + scores.failures.get(cause, 0)
                for cause in first.failures | scores.failures
            },
            first.extracted + scores.extracted,
            first.first_failure or scores.first_failure,
        )
    return first


def of_all(rollouts: Rollouts, scores: Scores) -> tuple[Rollouts, Scores]:
    """Those of every process, in their order; of the chunks this one's, whose seconds they are."""
    parts = all_gather_objects((rollouts, scores))
    together = concatenated([part for part, _ in parts])
    return dataclasses.replace(together, chunks=rollouts.chunks), merged_scores([part for _, part in parts])


def batch_of_all(own: Batch) -> Batch:
    """The batch of all processes from this one's share of its rollouts. All must call it, and together."""
    rewards = np.concatenate(all_gather_objects(own.rewards))
    rollouts, scores = of_all(own.rollouts, own.scores)
    return Batch(rollouts, own.problems, scores, rewards)
