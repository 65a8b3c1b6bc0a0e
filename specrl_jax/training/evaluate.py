"""A policy on fixed sets of problems: how often it is right, and what it wrote."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specrl_jax import distributed
from specrl_jax.data.tasks import Problem
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.engine import Engine, Lengths
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.rewards.accuracy import accuracy_metrics
from specrl_jax.rewards.scorer import Scorer, Scores
from specrl_jax.training.build import Setup
from specrl_jax.training.dynamic_sampling import of_all
from specrl_jax.training.metrics import speculation_metrics

# Evaluation draws noise of its own: never that of a training rollout with the same id.
EVAL_SEED_OFFSET = 1_000_003


class Evaluation(NamedTuple):
    problems: Sequence[Problem]  # [P]
    samples: int  # n, answers to each
    scores: Scores  # of the P x n rollouts, problem by problem
    rollouts: Rollouts

    @property
    def correct(self) -> np.ndarray:
        """[P, n] bool."""
        return self.scores.correct.reshape(-1, self.samples)

    @property
    def accuracy(self) -> float:
        """Mean over problems and samples (mean@n)."""
        return float(self.correct.mean())

    def metrics(self, sets: dict[str, list[Problem]]) -> dict[str, float]:
        """eval/*: accuracy, pass@k and maj@n of all problems, with several sets eval/<set>/* of each; lengths;
        how many answers a fault cost their reward.
        """
        stated = [
            self.scores.extracted[i : i + self.samples] for i in range(0, len(self.scores.extracted), self.samples)
        ]
        row = accuracy_metrics(self.correct, stated, "eval/")
        first = 0
        for name, problems in sets.items() if len(sets) > 1 else ():
            part = slice(first, first + len(problems))
            row |= accuracy_metrics(self.correct[part], stated[part], f"eval/{name}/")
            first += len(problems)
        response = self.rollouts.response_length
        row |= {"eval/response_length_mean": float(response.mean())}
        row |= {"eval/truncated": float(1 - self.rollouts.ended.mean())}
        return row | {"eval/unscored": sum(self.scores.failures.values())}

    def write(self, path: str, tokenizer: Tokenizer, sets: dict[str, list[Problem]]) -> None:
        """Every answer as a JSON object a line."""
        names = [name for name, problems in sets.items() for _ in problems]
        with open(path, "w") as file:
            for row, prompt in enumerate(self.rollouts.prompt_index):
                problem = self.problems[prompt]
                record = {
                    "set": names[prompt],
                    "prompt": problem.prompt,
                    "answer": problem.answer,
                    "response": tokenizer.decode(self.rollouts.response(row)),
                    "stated": self.scores.extracted[row],
                    "reward": float(self.scores.total[row]),
                    "correct": bool(self.scores.correct[row]),
                }
                file.write(json.dumps(record) + "\n")


def evaluate(
    engine: Engine,
    params: Any,
    problems: Sequence[Problem],
    samples: int,
    tokenizer: Tokenizer,
    scorer: Scorer,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    lengths: Lengths | None = None,
) -> Evaluation:
    """`samples` answers per problem, scored. Equal seeds give equal noise, so two policies are compared paired.

    `lengths` chooses draft lengths; None: always the engine's own.
    """
    own = distributed.process_slice(len(problems))
    prompts = [tokenizer.encode(problem.prompt) for problem in problems[own]]
    noise, first_id = seed + EVAL_SEED_OFFSET, own.start * samples
    rollouts = engine.generate(params, prompts, samples, noise, first_id, on_progress=on_progress, lengths=lengths)
    rollouts, scores = of_all(rollouts, score(rollouts, problems[own], tokenizer, scorer))
    return Evaluation(problems, samples, scores, rollouts)


def score(rollouts: Rollouts, problems: Sequence[Problem], tokenizer: Tokenizer, scorer: Scorer) -> Scores:
    """Of every rollout. A response that was cut at the limit is scored as it stands."""
    responses = [tokenizer.decode(rollouts.response(row)) for row in range(len(rollouts.length))]
    return scorer(responses, [problems[prompt].answer for prompt in rollouts.prompt_index])


def run_evaluation(setup: Setup, workdir: str) -> None:
    """task=evaluate: scores the policy on the validation sets, into evaluation.json and generations.jsonl."""
    s = setup.settings
    result = evaluate(
        setup.eval_engine,
        setup.initial_weights(),
        setup.eval_problems,
        s.eval.samples,
        setup.tokenizer,
        setup.scorer,
        s.rollout.seed,
    )
    summary = result.metrics(setup.problems.validation) | {
        "problems": len(result.problems),
        "samples": s.eval.samples,
        "temperature": s.eval.temperature,
    }
    if setup.eval_engine.draft_length:
        summary |= speculation_metrics(result.rollouts)
    with open(os.path.join(workdir, "evaluation.json"), "w") as file:
        json.dump(summary, file, indent=2)
    result.write(os.path.join(workdir, "generations.jsonl"), setup.tokenizer, setup.problems.validation)
    if warning := result.scores.warning():
        print(warning)
    print(json.dumps(summary))
