"""The policies and heads that the repository carries: they load, there is something to learn, and the heads draft."""

import os
import pathlib
from typing import NamedTuple

import pytest

from configs import demo, rlzero_tiny
from specrl_jax.rewards.verifiable import exact
from specrl_jax.training.evaluate import evaluate
from specrl_jax.training.initial import initial_weights
from specrl_jax.training.metrics import speculation_metrics
from tests.helpers.rewards import FunctionScorer
from tests.helpers.training import make_run

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


class Carried(NamedTuple):
    """A config that starts from weights in the repository, and what they were made for."""

    get_config: object
    greedy: float  # largest accuracy without sampling
    acceptance_length: float  # smallest
    megabytes: float  # largest


CARRIED = {"rlzero_tiny": Carried(rlzero_tiny.get_config, 0.6, 3.3, 10), "demo": Carried(demo.get_config, 0.6, 4.3, 30)}


@pytest.fixture(scope="module", params=["rlzero_tiny", pytest.param("demo", marks=pytest.mark.long)])
def carried(request):
    return CARRIED[request.param]


@pytest.fixture(scope="module")
def config(carried):
    config = carried.get_config()
    config.policy.path, config.draft.path = (str(ROOT / path) for path in (config.policy.path, config.draft.path))
    config.eval.problems, config.rollout.num_slots = 96, 96
    return config


@pytest.fixture(scope="module")
def run(config):
    return make_run(config, scorer=FunctionScorer(exact))


@pytest.fixture(scope="module")
def weights(run):
    return initial_weights(run.learner, run.rollout)


def test_the_base_solves_few_problems_and_greedily_fewer(run, weights, carried):
    found = evaluate(
        run.rollout, run.rollout.greedy_engine, weights, problems=run.problems.evaluation, samples=1, scorer=run.scorer
    )
    # The noise is fixed, so these are two fixed numbers; the bounds are what the base was made for.
    assert 0.2 < found.accuracy < 0.5
    assert found.greedy_accuracy < carried.greedy


def test_the_head_drafts_for_the_base(run, weights, carried):
    """The noise is fixed, so this is one fixed number; the bound is what the head was made for."""
    prompts = [run.rollout.tokenizer.encode_prompt(problem.prompt) for problem in run.problems.evaluation[:64]]
    rollouts = run.rollout.engine.generate(weights, prompts, 1, seed=0)
    assert speculation_metrics(rollouts)["spec/acceptance_length"] > carried.acceptance_length


def test_base_and_head_stay_small(config, carried):
    folders = [pathlib.Path(path) for path in (config.policy.path, config.draft.path)]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert sum(os.path.getsize(path) for path in files) < carried.megabytes * 1e6
