"""task=evaluate: its files agree with its rewards."""

import json

import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.data.tasks import in_validation
from specrl_jax.tasks.evaluate import evaluate_policy
from tests.helpers.rewards import FunctionScorer
from tests.helpers.training import NEVER, lower_case, make_run


@pytest.mark.slow
def test_evaluation_of_a_policy(tmp_path):
    run = make_run(rlzero_tiny.get_config("smoke"), scorer=FunctionScorer(lower_case))
    evaluate_policy(*run, str(tmp_path), NEVER)
    summary = json.loads((tmp_path / "evaluation.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert summary["problems"] == len(rows) == 16 and summary["eval/unscored"] == 0
    assert summary["eval/accuracy"] == np.mean([row["reward"] >= 1 for row in rows])
    assert all(in_validation(row["prompt"]) for row in rows)
    assert all(row["reward"] == pytest.approx(lower_case(row["response"], row["answer"])) for row in rows)
