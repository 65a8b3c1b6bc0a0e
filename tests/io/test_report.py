"""The closing table and the plot of rows with values that are missing, None or not finite."""

import math

import pytest

from specrl_jax.core import PHASES
from specrl_jax.io.plots import plot_run
from specrl_jax.io.report import print_report


def row_of(step, **values):
    times = dict.fromkeys((f"time/{phase}" for phase in PHASES), 1.0)
    row = {"step": step, "time/total": 5.0, "rollout/tokens_per_second": 100.0, "rollout/response_length_mean": 9.0}
    row |= {"reward/mean": 0.5, "policy/entropy": 1.0, "policy/grad_norm": 0.1, "rollout_vs_learner/kl": 1e-3}
    return row | times | values


LOST = [None, math.nan, math.inf]


@pytest.mark.parametrize("lost", LOST, ids=str)
def test_a_value_that_is_not_there_is_a_dash(lost, tmp_path, capsys):
    """Of a draft that turned NaN, as the run has it and as the file gives it back; of one that drafted nothing last."""
    draft = {"spec/acceptance_length": 2.5, "spec/acceptance_rate_pos_1": 0.8, "draft/loss": 1.25, "draft/grad_norm": 2}
    gone = {"spec/acceptance_length": 1.0, "draft/loss": lost, "draft/grad_norm": lost, "spec/acceptance_rate_pos_2": 0}
    rows = [{"step": 0, "eval/accuracy": 0.25}, row_of(1, **draft)]
    rows.append(row_of(2, **gone, **{"spec/speedup": lost, "spec/speedup_low": 1.0, "spec/speedup_high": 1.1}))
    rows[-1] |= {"eval/accuracy": lost, "policy/grad_norm": lost, "reward/mean": lost}
    print_report(rows, plot_run(rows, str(tmp_path)))
    lines = {
        line.split("│")[1].strip(): line.split("│")[2:] for line in capsys.readouterr().out.splitlines() if "│" in line
    }
    cells = {label: [cell.strip() for cell in line] for label, line in lines.items()}
    assert cells["accuracy, sampled"][:3] == ["0.250", "-", "-"]
    assert cells["draft loss"][:2] == ["1.250", "-"] and cells["draft 2 accepted"][:2] == ["-", "0.000"]
    assert cells["generation speedup over draft.kind=none"][1] == "- (1.00 to 1.10)"
    assert (tmp_path / "plots/run.png").exists()
