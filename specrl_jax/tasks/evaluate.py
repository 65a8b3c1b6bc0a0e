"""task=evaluate: the accuracy of a policy on the validation sets."""

import dataclasses
import json
import os
import threading

from specrl_jax.config import Config
from specrl_jax.io.signals import raise_once_set, stop_on_signal, stopped_as
from specrl_jax.io.workdir import open_workdir
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.training.build import Learner, Rollout, build, make_scorer
from specrl_jax.training.evaluate import evaluate
from specrl_jax.training.initial import initial_weights
from specrl_jax.training.metrics import speculation_metrics
from specrl_jax.training.problems import Problems, load_problems


def run(config: Config, workdir: str) -> None:
    """Evaluate, and write the result to `workdir`."""
    learner, rollout = build(config)
    problems = load_problems(config, rollout.tokenizer, train=False)
    says = stopped_as("an evaluation keeps nothing; the same command starts anew")
    with make_scorer(config.reward, problems.first_rows(rollout.tokenizer)) as scorer, says:
        open_workdir(workdir, dataclasses.asdict(config))
        evaluate_policy(learner, rollout, problems, scorer, workdir, stop_on_signal())


def evaluate_policy(
    learner: Learner, rollout: Rollout, problems: Problems, scorer: Scorer, workdir: str, stop: threading.Event
) -> None:
    """Score the initial policy on the validation sets, into evaluation.json and generations.jsonl.

    Raises Stopped soon after `stop` is set.
    """
    e, weights = learner.plan.config.eval, initial_weights(learner, rollout)
    on_progress = raise_once_set(stop)
    result = evaluate(rollout, rollout.eval_engine, weights, problems.evaluation, e.samples, scorer, on_progress)
    summary = result.metrics(problems.validation) | {
        "problems": len(result.problems),
        "samples": e.samples,
        "temperature": e.temperature,
    }
    if rollout.eval_engine.draft_length:
        summary |= speculation_metrics(result.rollouts)
    with open(os.path.join(workdir, "evaluation.json"), "w") as file:
        json.dump(summary, file, indent=2)
    result.write(os.path.join(workdir, "generations.jsonl"), rollout.tokenizer, problems.validation)
    if warning := result.scores.warning():
        print(warning)
    print(json.dumps(summary))
