"""Accuracy of a policy on a fixed set of problems."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specrl_jax.data.tasks import Problem
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.engine import Engine, Lengths
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.rewards.verifiable import Reward
from specrl_jax.training.measures import speculation_metrics
from specrl_jax.training.setup import Setup

# Evaluation draws noise of its own: never that of a training rollout with the same id.
EVAL_SEED_OFFSET = 1_000_003


class Evaluation(NamedTuple):
    rewards: np.ndarray  # [P, n] float32
    rollouts: Rollouts

    @property
    def accuracy(self) -> float:
        """Mean over problems and samples (mean@n)."""
        return float((self.rewards > 0).mean())

    @property
    def pass_at_k(self) -> float:
        """Share of problems solved by at least one of the n samples; k = n."""
        return float((self.rewards > 0).any(axis=1).mean())


def evaluate(
    engine: Engine,
    params: Any,
    problems: Sequence[Problem],
    samples: int,
    tokenizer: Tokenizer,
    reward: Reward,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    lengths: Lengths | None = None,
) -> Evaluation:
    """`samples` answers per problem, scored. Equal seeds give equal noise, so two policies are compared paired.

    `lengths` chooses draft lengths; None: always the engine's own.
    """
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    rollouts = engine.generate(
        params, prompts, samples, seed + EVAL_SEED_OFFSET, on_progress=on_progress, lengths=lengths
    )
    return Evaluation(score(rollouts, problems, tokenizer, reward).reshape(len(problems), samples), rollouts)


def score(rollouts: Rollouts, problems: Sequence[Problem], tokenizer: Tokenizer, reward: Reward) -> np.ndarray:
    """[R] float32 rewards. A response that was cut at the limit is scored as it stands."""
    return np.array(
        [
            reward(tokenizer.decode(rollouts.response(row)), problems[prompt].answer)
            for row, prompt in enumerate(rollouts.prompt_index)
        ],
        np.float32,
    )


def run_evaluation(setup: Setup, workdir: str) -> None:
    """task=evaluate: scores the policy on the validation set, into evaluation.json and generations.jsonl."""
    s = setup.settings
    problems = setup.eval_problems
    weights = setup.initial_weights()
    result = evaluate(
        setup.eval_engine, weights, problems, s.eval.samples, setup.tokenizer, setup.reward, s.rollout.seed
    )
    summary = {
        "eval/accuracy": result.accuracy,
        "eval/pass_at_k": result.pass_at_k,
        "problems": len(problems),
        "samples": s.eval.samples,
        "temperature": s.eval.temperature,
    }
    if setup.eval_engine.draft_length:
        summary |= speculation_metrics(result.rollouts)
    with open(os.path.join(workdir, "evaluation.json"), "w") as file:
        json.dump(summary, file, indent=2)
    with open(os.path.join(workdir, "generations.jsonl"), "w") as file:
        for row, prompt in enumerate(result.rollouts.prompt_index):
            problem = problems[prompt]
            response = setup.tokenizer.decode(result.rollouts.response(row))
            record = {"prompt": problem.prompt, "answer": problem.answer, "response": response}
            file.write(json.dumps(record | {"reward": float(result.rewards.reshape(-1)[row])}) + "\n")
    print(json.dumps(summary))
