"""task=evaluate: its files agree with its rewards."""

import json

import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.data.tasks import in_validation
from specrl_jax.tasks.evaluate import evaluate_policy, print_evaluation
from tests.helpers.rewards import FunctionScorer
from tests.helpers.training import NEVER, lower_case, make_run


def test_the_table_has_a_column_for_each_of_several_sets(capsys):
    summary = {"problems": 5, "samples": 2, "temperature": 1.0, "spec/acceptance_length": 2.94}
    summary |= {"eval/response_length_mean": 12.34, "eval/truncated": 0.125, "eval/unscored": 1}
    for name, value in (("accuracy", 0.5), ("pass_at_2", 0.75), ("one/accuracy", 0.25), ("two/accuracy", 0.625)):
        summary |= {f"eval/{name}": value, f"eval/{name}_low": value - 0.125, f"eval/{name}_high": value + 0.125}
    print_evaluation(summary, {"one": [None] * 2, "two": [None] * 3}, draft_length=3)
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert cells == [
        ["accuracy", "0.500 (0.375 to 0.625)", "0.250 (0.125 to 0.375)", "0.625 (0.500 to 0.750)"],
        ["pass@2", "0.750 (0.625 to 0.875)", "-", "-"],
        ["problems", "5", "2", "3"],
        ["answers to each", "2, temperature 1", "", ""],
        ["length of an answer", "12.3 tokens", "", ""],
        ["cut at the longest", "12.5%", "", ""],
        ["not scored", "1", "", ""],
        ["acceptance", "2.9 of 4 tokens", "", ""],
    ]
    assert max(map(len, out.splitlines())) <= 100
    print_evaluation(summary, {"one": [None] * 5}, draft_length=0)
    out = capsys.readouterr().out
    assert "two" not in out and "acceptance" not in out


@pytest.mark.slow
def test_evaluation_of_a_policy(tmp_path, capsys):
    run = make_run(rlzero_tiny.get_config("smoke"), scorer=FunctionScorer(lower_case))
    evaluate_policy(run.learner, run.rollout, run.problems, scorer=run.scorer, workdir=str(tmp_path), stop=NEVER)
    summary = json.loads((tmp_path / "evaluation.json").read_text())
    *table, line = capsys.readouterr().out.splitlines()
    assert json.loads(line) == summary and any("accuracy" in row for row in table)
    rows = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert summary["problems"] == len(rows) == 16 and summary["eval/unscored"] == 0
    assert summary["eval/accuracy"] == np.mean([row["reward"] >= 1 for row in rows])
    assert all(in_validation(row["prompt"]) for row in rows)
    assert all(row["reward"] == pytest.approx(lower_case(row["response"], row["answer"])) for row in rows)
