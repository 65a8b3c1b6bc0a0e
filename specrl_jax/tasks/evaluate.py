"""task=evaluate: the accuracy of a policy on the validation sets."""

import dataclasses
import json
import os
import threading
from collections.abc import Mapping, Sequence

import rich.table

from specrl_jax.config import Config
from specrl_jax.core import open_written
from specrl_jax.data.problem import Problem
from specrl_jax.errors import printable
from specrl_jax.io.report import table_console
from specrl_jax.io.signals import raise_once_set, stop_on_signal, stopped_as
from specrl_jax.io.workdir import open_workdir
from specrl_jax.learner.build import Learner
from specrl_jax.planning.problems import Problems
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.training.evaluate import evaluate
from specrl_jax.training.initial import initial_weights
from specrl_jax.training.inputs import open_inputs
from specrl_jax.training.metrics import speculation_metrics


def run(config: Config, workdir: str) -> None:
    """Evaluate, write the result to `workdir` and print it."""
    says = stopped_as("an evaluation keeps nothing; the same command starts anew")
    with open_inputs(config, workdir, train=False) as inputs, says:
        assert inputs.scorer is not None  # it was asked for
        learner, rollout = inputs.build()
        open_workdir(workdir, dataclasses.asdict(inputs.config))
        evaluate_policy(learner, rollout, inputs.problems, scorer=inputs.scorer, workdir=workdir, stop=stop_on_signal())


def evaluate_policy(
    learner: Learner,
    rollout: RolloutEngines,
    problems: Problems,
    *,
    scorer: Scorer,
    workdir: str,
    stop: threading.Event,
) -> None:
    """Score the initial policy on the validation sets, into evaluation.json and generations.jsonl.

    Raises Stopped soon after `stop` is set.
    """
    e, weights = learner.plan.config.eval, initial_weights(learner, rollout)
    on_progress = raise_once_set(stop)
    result = evaluate(
        rollout,
        rollout.eval_engine,
        weights,
        problems=problems.evaluation,
        samples=e.samples,
        scorer=scorer,
        on_progress=on_progress,
    )
    summary = result.metrics(problems.validation) | {
        "problems": len(result.problems),
        "samples": e.samples,
        "temperature": e.temperature,
    }
    if rollout.eval_engine.draft_length:
        summary |= speculation_metrics(result.rollouts)
    with open_written(os.path.join(workdir, "evaluation.json")) as file:
        json.dump(summary, file, indent=2)
    result.write(os.path.join(workdir, "generations.jsonl"), rollout.tokenizer, problems.validation)
    if warning := result.scores.warning():
        print(printable(warning))
    print_evaluation(summary, problems.validation, rollout.eval_engine.draft_length)
    print(json.dumps(summary))


def print_evaluation(summary: Mapping[str, float], sets: Mapping[str, Sequence[Problem]], draft_length: int) -> None:
    """Print the numbers of evaluation.json as a table, with a column for each of several validation sets.

    Args:
      draft_length: k; 0 where nothing drafted.
    """
    columns = {"all": "eval/"} | ({name: f"eval/{name}/" for name in sets} if len(sets) > 1 else {})
    table = rich.table.Table("", title="95 % intervals are over problems", title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    measured = [name.removesuffix("_low") for name in summary if name.count("/") == 1 and name.endswith("_low")]
    for metric in (name.removeprefix("eval/") for name in measured):
        cells = [_with_interval(summary, prefix + metric) for prefix in columns.values()]
        table.add_row(metric.replace("pass_at_", "pass@"), *cells)
    table.add_row("problems", str(summary["problems"]), *(str(len(sets[name])) for name in list(columns)[1:]))
    table.add_row("answers to each", f"{summary['samples']}, temperature {summary['temperature']:g}")
    table.add_row("length of an answer", f"{summary['eval/response_length_mean']:.1f} tokens")
    table.add_row("cut at the longest", f"{summary['eval/truncated']:.1%}")
    table.add_row("not scored", str(summary["eval/unscored"]))
    if draft_length:
        table.add_row("acceptance", f"{summary['spec/acceptance_length']:.1f} of {draft_length + 1} tokens")
    table_console().print(table)


def _with_interval(summary: Mapping[str, float], name: str) -> str:
    """Return a metric with its interval; "-" where a set has none."""
    if name not in summary:
        return "-"
    return f"{summary[name]:.3f} ({summary[f'{name}_low']:.3f} to {summary[f'{name}_high']:.3f})"
