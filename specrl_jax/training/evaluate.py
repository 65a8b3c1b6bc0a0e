"""Evaluation of a policy on fixed sets of problems: accuracy metrics, and every response in a file."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax import distributed
from specrl_jax.config import Config
from specrl_jax.core import open_written
from specrl_jax.data.problem import Problem
from specrl_jax.data.special import recorded
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.drafts.weights import Weights
from specrl_jax.io.progress import Display, PhaseClock
from specrl_jax.planning.problems import Problems
from specrl_jax.rewards.accuracy import accuracy_metrics
from specrl_jax.rewards.scorer import Scorer, Scores
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.rollout.conversations import begin_conversations
from specrl_jax.rollout.groups import ScoredRollouts, gather_round, score_rollouts
from specrl_jax.training.metrics import environment_metrics

# Separate noise: an evaluation rollout never shares that of a training rollout with the same id.
EVAL_SEED_OFFSET = 1_000_003


class Evaluation(NamedTuple):
    """Scored responses to fixed problems."""

    problems: Sequence[Problem]  # [P]
    samples: int  # n, responses to each
    scores: Scores  # of the P x n rollouts, problem by problem
    rollouts: Rollouts
    greedy_accuracy: float | None = None  # of one more, greedy response to each, where the engine makes them

    @property
    def correct(self) -> np.ndarray:
        """Return [P, n] bool, which responses are correct."""
        return self.scores.correct.reshape(-1, self.samples)

    @property
    def accuracy(self) -> float:
        """Return the mean over problems and samples (mean@n)."""
        return float(self.correct.mean())

    def metrics(self, sets: Mapping[str, list[Problem]]) -> dict[str, float]:
        """Return eval/*: accuracy, pass@k and maj@n over all problems, with several sets eval/<set>/* of each; response
        lengths; what their environments did; means of the rewards' parts; the number of responses whose reward failed.
        """
        answers, n = self.scores.extracted, self.samples
        stated = [answers[i : i + n] for i in range(0, len(answers), n)]
        row = accuracy_metrics(self.correct, stated, "eval/")
        first = 0
        for name, problems in sets.items() if len(sets) > 1 else ():
            part = slice(first, first + len(problems))
            row |= accuracy_metrics(self.correct[part], stated[part], f"eval/{name}/")
            first += len(problems)
        response = self.rollouts.policy_tokens
        row |= {"eval/response_length_mean": float(response.mean())}
        row |= {"eval/truncated": float(1 - self.rollouts.ended.mean())}
        row |= environment_metrics(self.rollouts, self.scores, "eval/environment/")
        return row | self.scores.part_means("eval/part/") | {"eval/unscored": sum(self.scores.failures.values())}

    def write(self, path: str, tokenizer: Tokenizer, sets: Mapping[str, list[Problem]]) -> None:
        """Write every response as a line of JSON."""
        names = [name for name, problems in sets.items() for _ in problems]
        with open_written(path) as file:
            for row, prompt in enumerate(self.rollouts.prompt_index):
                problem = self.problems[prompt]
                record = {
                    "set": names[prompt],
                    **recorded(problem.prompt),
                    "answer": problem.answer,
                    "response": tokenizer.decode(self.rollouts.response(row)),
                    "stated": self.scores.extracted[row],
                    "reward": float(self.scores.total[row]),
                    "correct": bool(self.scores.correct[row]),
                }
                file.write(json.dumps(record) + "\n")


def evaluate(
    rollout: RolloutEngines,
    engine: Engine,
    weights: Weights,
    *,
    problems: Sequence[Problem],
    samples: int,
    scorer: Scorer,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    lengths: DraftLengthPolicy | None = None,
) -> Evaluation:
    """Generate and score `samples` responses per problem. Equal seeds give equal noise: two policies compare paired.

    Args:
      engine: one of `rollout`; the greedy one shares each prompt's prefill between the samples and a greedy response.
      on_progress: of the engine; where it raises Stopped in one process, all raise it.
      lengths: chooses draft lengths; None: always the engine's own.
    Raises:
      NotScored: the reward of every response failed.
    """
    with distributed.together():
        own = _own_answers(
            rollout,
            engine,
            weights,
            problems=problems,
            samples=samples,
            scorer=scorer,
            on_progress=on_progress,
            lengths=lengths,
        )
    sampled, *greedy = (gather_round(part, rollout.plan.groups.order) for part in own)
    sampled.scores.require_some("evaluation")
    accuracy = float(greedy[0].scores.correct.mean()) if greedy else None
    return Evaluation(problems, samples, sampled.scores, rollouts=sampled.rollouts, greedy_accuracy=accuracy)


def _own_answers(
    rollout: RolloutEngines,
    engine: Engine,
    weights: Weights,
    *,
    problems: Sequence[Problem],
    samples: int,
    scorer: Scorer,
    on_progress: Callable[[int, int], None],
    lengths: DraftLengthPolicy | None,
) -> list[ScoredRollouts]:
    """Return this process's part of the sampled responses, and of the greedy ones where the engine makes them."""
    share, each = rollout.plan.groups.share(len(problems)), samples + engine.greedy
    count = len(problems[share.group]) * each
    asked, turns = begin_conversations(
        scorer,
        rollout.plan.config,
        rollout.tokenizer,
        problems=problems[share.group],
        samples=each,
        step=0,
        waiting=lambda: on_progress(0, count),
    )
    found = engine.generate(
        weights,
        [rollout.tokenizer.encode_prompt(problem.prompt) for problem in asked],
        samples,
        seed=rollout.config.seed + EVAL_SEED_OFFSET,
        options=CallOptions(first_id=share.group.start * samples, turns=turns),
        on_progress=on_progress,
        lengths=lengths,
    )
    own = np.arange(count).reshape(-1, each)[share.within]
    parts = list[ScoredRollouts]()
    # The samples of each prompt, then its greedy response if there is one.
    for rows in (part.reshape(-1) for part in np.split(own, [samples], axis=1) if part.size):
        part, waiting = found.take(rows), functools.partial(on_progress, count, count)
        scores = score_rollouts(
            part, asked, rollout.tokenizer, scorer=scorer, while_waiting=waiting, turns=turns, rows=rows
        )
        part = dataclasses.replace(part, prompt_index=part.prompt_index - share.within.start)
        parts.append(ScoredRollouts(part, list(problems[share.own]), scores, rewards=scores.total))
    return parts


def greedy_too(config: Config, step: int) -> bool:
    """Return whether the evaluation after a step has the likeliest answers beside the sampled ones."""
    return config.eval.greedy and step in (0, config.steps)


def evaluation_metrics(
    rollout: RolloutEngines,
    weights: Weights,
    problems: Problems,
    *,
    scorer: Scorer,
    step: int,
    workdir: str,
    display: Display,
    lengths_for: Callable[[Engine], DraftLengthPolicy | None] = lambda engine: None,
) -> dict[str, float]:
    """Return eval/* of these weights, and write their responses to evaluations/step_N.jsonl.

    Greedy accuracy is measured too, in the same call, where `greedy_too` says so.

    Args:
      lengths_for: chooses the draft lengths of an engine.
    """
    config, clock = rollout.plan.config, PhaseClock(display)
    engine = rollout.greedy_engine if greedy_too(config, step) else rollout.eval_engine
    with clock("evaluate"):
        sampled = evaluate(
            rollout,
            engine,
            weights,
            problems=problems.evaluation,
            samples=config.eval.samples,
            scorer=scorer,
            on_progress=display.update_phase,
            lengths=lengths_for(engine),
        )
        row = sampled.metrics(problems.validation)
        if warning := sampled.scores.warning():
            display.say(f"evaluation at step {step}: {warning}")
        if sampled.greedy_accuracy is not None:
            row["eval/accuracy_greedy"] = sampled.greedy_accuracy
    if not distributed.is_first_process():
        return row
    os.makedirs(os.path.join(workdir, "evaluations"), exist_ok=True)
    path = os.path.join(workdir, "evaluations", f"step_{step}.jsonl")
    sampled.write(path, rollout.tokenizer, problems.validation)
    return row | {"time/evaluate": clock.seconds["evaluate"]}
