"""Dynamic sampling (DAPO): generate and score rounds of rollouts until enough groups have reward variance."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.config import GRPOConfig
from specrl_jax.data.problem import Problem
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.rollouts import Rollouts, concatenate, group_rows
from specrl_jax.distributed import all_gather_objects
from specrl_jax.learner.batch import TrainingBatch
from specrl_jax.rewards.messages import Context
from specrl_jax.rewards.scorer import Scorer, Scores
from specrl_jax.rl.advantages import ADVANTAGES, overlong_penalty
from specrl_jax.rollout.conversations import Conversations


class ScoredRollouts(NamedTuple):
    """One round of scored rollouts, group by group; R = groups x G."""

    rollouts: Rollouts  # prompt_index counts `problems`
    problems: list[Problem]
    scores: Scores
    rewards: np.ndarray  # [R] float32, for the advantages: the scores' total, less the overlong penalty


def needs_round(rounds: Sequence[ScoredRollouts], grpo: GRPOConfig) -> bool:
    """Return whether a step generates again: until P groups have reward variance or `grpo.sampling_rounds` are done.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2): a group without reward variance has no gradient.
    """
    varied = sum(has_variance(one.rewards, grpo.group_size).sum() for one in rounds)
    return not rounds or (varied < grpo.prompts_per_step and len(rounds) < grpo.sampling_rounds)


def first_id(grpo: GRPOConfig, step: int, index: int) -> int:
    """Return the id of the first rollout of a round of a step; no other rollout of the run has it."""
    return (step * grpo.sampling_rounds + index) * grpo.prompts_at_once * grpo.group_size


def with_rewards(
    rollouts: Rollouts, problems: list[Problem], scores: Scores, *, grpo: GRPOConfig, longest: int
) -> ScoredRollouts:
    """Return rollouts with the rewards that their advantages come from.

    Args:
      longest: tokens that a response may have.
    """
    rewards = scores.total
    if grpo.overlong_buffer:
        penalty = overlong_penalty(rollouts.response_length, longest, grpo.overlong_buffer)
        rewards = rewards + penalty
    return ScoredRollouts(rollouts, problems, scores, rewards=rewards)


def has_variance(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Return [P] bool: groups of rewards [P x G] that are not all equal."""
    groups = rewards.reshape(-1, group_size)
    return np.any(groups != groups[:, :1], axis=1)


def merge_rounds(rounds: list[ScoredRollouts]) -> ScoredRollouts:
    """Concatenate the rounds of one step."""
    return ScoredRollouts(
        rollouts=concatenate([one.rollouts for one in rounds]),
        problems=[problem for one in rounds for problem in one.problems],
        scores=merge_scores([one.scores for one in rounds]),
        rewards=np.concatenate([one.rewards for one in rounds]),
    )


def select_groups(generated: ScoredRollouts, grpo: GRPOConfig) -> TrainingBatch:
    """Select P groups: those with reward variance first where several rounds were allowed, in order.

    Groups without variance that fill up the batch are masked out of the loss, as are responses and conversations that a
    limit cut under `grpo.mask_truncated`.
    """
    rollouts, rewards = generated.rollouts, generated.rewards
    varies = has_variance(rewards, grpo.group_size)
    order = np.argsort(~varies, kind="stable") if grpo.sampling_rounds > 1 else np.arange(len(varies))
    groups = np.sort(order[: grpo.prompts_per_step])
    rows = group_rows(groups, grpo.group_size)
    advantages = ADVANTAGES[grpo.advantage](rewards[rows].reshape(-1, grpo.group_size)).reshape(-1)
    loss_mask = np.repeat(varies[groups], grpo.group_size) if grpo.sampling_rounds > 1 else np.ones(len(rows), bool)
    if grpo.mask_truncated:
        loss_mask &= rollouts.ended[rows]
    return TrainingBatch(rollouts.take(rows), advantages, loss_mask)


def score_rollouts(
    rollouts: Rollouts,
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    scorer: Scorer,
    while_waiting: Callable[[], None],
    turns: Conversations | None = None,
    rows: np.ndarray | None = None,
) -> Scores:
    """Score every rollout. A response that was cut at the limit is scored as it is.

    What `while_waiting`, called every second, raises ends the call.

    Args:
      turns: the conversations that the rollouts are; None: a response is one turn.
      rows: the rollouts' places among those of `turns`; None: all of them.
    """
    if turns is not None:
        return turns.scores(
            rollouts, np.arange(len(rollouts.length)) if rows is None else rows, scorer, waiting=while_waiting
        )
    tokens = [rollouts.response(row) for row in range(len(rollouts.length))]
    asked = [problems[prompt] for prompt in rollouts.prompt_index]
    contexts = [Context(problem.prompt, problem.row, ids) for problem, ids in zip(asked, tokens)]
    responses, answers = [tokenizer.decode(ids) for ids in tokens], [problem.answer for problem in asked]
    return scorer(responses, answers, contexts, while_waiting)


def merge_scores(parts: Sequence[Scores]) -> Scores:
    """Concatenate scores; failures are added up by cause."""
    failures: Counter[str] = Counter()
    for one in parts:
        failures.update(one.failures)
    return Scores(
        total=np.concatenate([one.total for one in parts]),
        rewards={name: np.concatenate([one.rewards[name] for one in parts]) for name in parts[0].rewards},
        correct=np.concatenate([one.correct for one in parts]),
        failures=dict(failures),
        extracted=[answer for one in parts for answer in one.extracted],
        first_failure=next((one.first_failure for one in parts if one.first_failure), ""),
        parts=_merge_columns([one.parts for one in parts], parts, np.nan),
        environment=_merge_columns([one.environment for one in parts], parts, 0.0),
    )


def _merge_columns(
    columns: Sequence[Mapping[str, np.ndarray]], scores: Sequence[Scores], absent: float
) -> dict[str, np.ndarray]:
    """Concatenate named columns of scores; `absent` where there is no such name."""
    names = sorted({name for one in columns for name in one})
    none = [np.full(len(one.total), absent, np.float32) for one in scores]
    return {name: np.concatenate([one.get(name, zero) for one, zero in zip(columns, none)]) for name in names}


def gather_round(own: ScoredRollouts, order: Sequence[int]) -> ScoredRollouts:
    """Return one round of all processes, in `order`, from this one's part of it; its chunk timings are this one's.

    Collective.
    """
    gathered = all_gather_objects(ScoredRollouts, own)
    merged = merge_rounds([gathered[i] for i in order])
    return merged._replace(rollouts=dataclasses.replace(merged.rollouts, chunks=own.rollouts.chunks))
