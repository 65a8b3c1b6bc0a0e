"""What an evaluation says and keeps of its answers: by set, and of those whose reward failed."""

import json

import numpy as np
import pytest

from specrl_jax.data.problem import Problem
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.io.progress import Display
from specrl_jax.rewards.scorer import Scores
from specrl_jax.training.evaluate import Evaluation
from tests.helpers.training import NEVER
from tests.rollout.test_groups import rollouts_of

SETS = {"one": [Problem("1", "1", "")], "two": [Problem("2", "2", ""), Problem("3", "3", "")]}


@pytest.fixture
def evaluation():
    """Two answers to each of three problems; the last one's reward failed."""
    rewards = np.array([1, 0, 1, 1, 0, 0], np.float32)
    scores = Scores(
        rewards,
        {"math": rewards},
        rewards > 0,
        failures={"timeout": 1},
        extracted=["1", "2", "2", "2", "4", None],
        first_failure="timeout: [/x]",
    )
    return Evaluation(
        [problem for problems in SETS.values() for problem in problems], 2, scores, rollouts=rollouts_of(0)
    )


def test_every_set_has_its_numbers(evaluation):
    row = evaluation.metrics(SETS)
    assert [row[f"eval/{name}accuracy"] for name in ("", "one/", "two/")] == [0.5, 0.5, 0.5]
    assert [row[f"eval/{name}pass_at_2"] for name in ("", "one/", "two/")] == [pytest.approx(2 / 3), 1.0, 0.5]
    assert [row[f"eval/{name}majority"] for name in ("one/", "two/")] == [0.5, 0.5]
    assert row["eval/one/accuracy_low"] == row["eval/one/accuracy_high"] == 0.5  # one problem does not vary
    assert row["eval/two/accuracy_low"] == 0.0 and row["eval/two/accuracy_high"] == 1.0
    assert row["eval/unscored"] == 1


def test_every_answer_is_kept_with_its_set(evaluation, tmp_path):
    evaluation.write(str(tmp_path / "kept.jsonl"), CharTokenizer(), SETS)
    rows = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [(row["set"], row["prompt"]) for row in rows] == [("one", "1")] * 2 + [("two", "2")] * 2 + [("two", "3")] * 2
    assert [row["correct"] for row in rows] == [True, False, True, True, False, False]
    assert rows[0].keys() == {"set", "prompt", "answer", "response", "stated", "reward", "correct"}


def test_what_a_reward_said_is_shown_as_it_is(evaluation, capsys):
    """Brackets are the display's own language."""
    Display(1, 0, NEVER).say(evaluation.scores.warning())
    assert capsys.readouterr().out == "rewards that failed count 0: 1 timeout; the first: timeout: [/x]\n"
