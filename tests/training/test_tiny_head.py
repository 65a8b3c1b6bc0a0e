"""The head that the repository carries: of the stated run, for the base that the repository carries."""

import json
import os
import pathlib

import pytest

from configs import draft_tiny, rlzero_tiny
from specrl_jax.training.initial import initial_weights
from specrl_jax.training.metrics import speculation_metrics
from tests.helpers.training import make_run

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
CARRIED = [ROOT / "experiments" / name / "checkpoint" for name in ("tiny_base", "tiny_head")]


@pytest.fixture(scope="module")
def setup():
    config = rlzero_tiny.get_config()
    config.policy.path, config.draft.path = (str(folder) for folder in CARRIED)
    config.eval.problems = 128
    return make_run(config)


def test_the_head_drafts_for_the_base(setup):
    """The noise is fixed, so this is one fixed number; the bound is what the head was made for."""
    prompts = [setup.rollout.tokenizer.encode(problem.prompt) for problem in setup.problems.evaluation]
    rollouts = setup.rollout.engine.generate(initial_weights(setup.learner, setup.rollout), prompts, 1, seed=0)
    assert speculation_metrics(rollouts)["spec/acceptance_length"] > 3.3


def test_the_carried_log_is_of_the_stated_run():
    first, *_, last = [json.loads(line) for line in (CARRIED[1] / "log.jsonl").read_text().splitlines()]
    assert first["step"] == 0 and last["step"] == draft_tiny.get_config().steps
    # Random at first: nothing but chance is accepted.
    assert first["spec/acceptance_length"] < 1.1
    assert last["spec/acceptance_length"] > 3.3


def test_base_and_head_stay_small():
    files = [path for folder in CARRIED for path in folder.rglob("*") if path.is_file()]
    assert sum(os.path.getsize(path) for path in files) < 10e6
