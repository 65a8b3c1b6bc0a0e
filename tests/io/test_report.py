"""The closing table and the plot of rows with values that are missing, None or not finite."""

import math

import pytest

from specrl_jax.core import PHASES
from specrl_jax.io import plots
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
    print_report(rows, 3, plot_run(rows, str(tmp_path)))
    lines = printed(capsys)
    assert lines["accuracy, sampled"] == "0.250 -> - (-)"
    assert lines["mean reward"] == "0.500 -> - (-), first and last step"
    assert lines["rollouts"] == "100 tokens/s; - times plain decoding (95 %: 1.00 to 1.10)"
    assert (tmp_path / "plots/run.png").exists()


def printed(capsys):
    """Return {label: text} of the closing table."""
    lines = (line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())
    return {label: text.strip() for label, text in lines}


def test_one_line_each_for_what_a_run_achieved(capsys):
    rows = [{"step": 0, "eval/accuracy": 0.25, "eval/accuracy_greedy": 0.5}]
    rows += [row_of(step, **{"spec/acceptance_length": 2 + step / 2}) for step in (1, 2)]
    rows[-1] |= {"eval/accuracy": 0.75, "eval/accuracy_greedy": 0.625, "reward/mean": 0.8}
    rows[-1] |= {"spec/speedup": 1.6, "spec/speedup_low": 1.5, "spec/speedup_high": 1.7}
    print_report(rows, 3, "figure.png")
    assert printed(capsys) == {
        "accuracy, sampled": "0.250 -> 0.750 (+0.500)",
        "accuracy, greedy": "0.500 -> 0.625 (+0.125)",
        "mean reward": "0.500 -> 0.800 (+0.300), first and last step",
        "rollouts": "100 tokens/s; 1.60 times plain decoding (95 %: 1.50 to 1.70)",
        "accepted tokens": "2.5 of 4 a verification in the first step, 3.0 of 4 in the last",
        "time of a step": "data 20%, prepare 20%, generate 20%, logprob 20%, train 20% of 5 s",
        "a plain step": "5.6 s: with drafts a step is 1.12 times as fast",
    }


def shares(line):
    """Return {part: per cent} and the seconds of the line about a step."""
    parts, _, total = line.rpartition(" of ")
    return {name: int(share[:-1]) for name, _, share in (part.rpartition(" ") for part in parts.split(", "))}, total


@pytest.mark.parametrize("seconds", [(1, 1, 1, 1, 1), (0.014, 0.014, 3.2, 0.114, 1.6), (1, 1, 1, 0, 0)])
@pytest.mark.parametrize("glue", [0.0, 0.3, 5.0])
def test_the_shares_of_a_step_add_up(seconds, glue, capsys):
    """Steps of different seconds, whose medians would not; what is between the phases has a share too."""
    rows = [{"step": 0}, row_of(1, **{"time/total": 99.0, "time/train": 95.0})]
    for step in (2, 3, 4):
        phases = {f"time/{phase}": x * (1 + (i == step)) for i, (phase, x) in enumerate(zip(PHASES, seconds))}
        rows.append(row_of(step, **phases, **{"time/total": sum(phases.values()) + glue}))
    print_report(rows, 0, "figure.png")
    found, _ = shares(printed(capsys)["time of a step"])
    assert sum(found.values()) == 100 and min(found.values()) >= 0
    assert found.get("other", 0) == pytest.approx(100 * 3 * glue / sum(r["time/total"] for r in rows[2:]), abs=1)


def test_what_is_generated_beside_the_learner_is_no_share_of_its_step(capsys):
    beside = {"time/generate": 7.0, "time/exposed_generation": 1.0, "time/data": 3.0, "time/total": 4.0}
    print_report([row_of(step, **beside) for step in (1, 2)], 0, "figure.png")
    found, _ = shares(printed(capsys)["time of a step"])
    assert found == {"prepare": 25, "waiting for rollouts": 25, "logprob": 25, "train": 25}


def test_medians_leave_out_steps_that_compiled(capsys):
    def step(number, compiled, total, speed):
        times = {"time/compile": compiled, "time/total": total, "rollout/tokens_per_second": speed}
        return row_of(number, **times, **{"time/train": total - 4})

    slow = [step(i, 90.0, 100.0, 7.0) for i in (1, 2, 4, 5)]
    print_report([*slow[:2], step(3, 0.1, 10.0, 100.0), *slow[2:], step(6, 0.0, 10.0, 100.0)], 0, "figure.png")
    lines = printed(capsys)
    assert lines["rollouts"] == "100 tokens/s"
    assert lines["time of a step"] == "data 10%, prepare 10%, generate 10%, logprob 10%, train 60% of 10 s"
    print_report(slow, 0, "figure.png")
    assert printed(capsys)["time of a step"].endswith("of 100 s, compiling")


DRAFT = {"spec/acceptance_length": 2.5, "spec/acceptance_rate_pos_1": 0.8}
TRAINED = DRAFT | {"draft/loss": 1.0, "draft/grad_norm": 1.0}
PANELS = {
    "no step": ([], 1),
    "one step, no draft": ([row_of(1)], 4),
    "a draft without weights": ([row_of(1, **DRAFT), row_of(2, **DRAFT)], 5),
    "a draft with weights": ([row_of(step, **TRAINED) for step in range(1, 9)], 6),
}


@pytest.mark.parametrize(("steps", "count"), PANELS.values(), ids=PANELS)
def test_every_panel_has_values_and_whole_steps(steps, count, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots.plt, "close", drawn.append)
    monkeypatch.setattr(plots.plt.Figure, "savefig", lambda *_, **__: None)
    plot_run([{"step": 0, "eval/accuracy": 0.25}, *steps], str(tmp_path))
    panels = [axis for axis in drawn[0].axes if axis.get_xlabel()]
    assert len(panels) == count
    for axis in panels:
        assert axis.get_ylabel() and (axis.collections or any(len(line.get_xdata()) for line in axis.lines))
        assert all(tick == int(tick) for tick in axis.get_xticks())
