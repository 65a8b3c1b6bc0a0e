"""The comparison of two versions: equal runs pass, and whatever differs is named."""

import inspect
import json
from types import SimpleNamespace

import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments.robustness.killed import MOMENTS
from experiments.robustness.same_run import Run, check_moved, differences, load, same_bits, untimed


def make_run():
    weights = np.linspace(-1, 1, 6, dtype=np.float32)
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    rows += [{"step": i, "policy/grad_norm": 0.25 * i, "reward/mean": float("nan")} for i in range(1, 5)]
    arrays = {f"{step}/state/policy/params/o": weights * step for step in range(1, 5)}
    arrays["4/state/policy/step"] = np.int32(4)[None]
    return Run(rows, [{"id": 3, "tokens": [1, 2], "logprobs": [-0.5, -1.0]}], arrays, {"4": {"position": 16}})


def test_equal_runs_have_no_differences():
    assert differences(make_run(), make_run()) == []


def change_metric(run):
    run.rows[2]["reward/mean"] = 0.1


def drop_metric(run):
    del run.rows[4]["policy/grad_norm"]


def drop_row(run):
    run.rows.pop()


def flip_bit(run):
    run.arrays["4/state/policy/params/o"].view(np.uint32)[2] ^= 1


def drop_array(run):
    del run.arrays["3/state/policy/params/o"]


def change_token(run):
    run.rollouts[0]["tokens"][1] = 7


def change_host(run):
    run.host["4"]["position"] = 17


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_metric, "step 2: reward/mean: nan and 0.1"),
        (drop_metric, "step 4: policy/grad_norm: only in the old tree"),
        (drop_row, "rows: 5 and 4"),
        (flip_bit, "4/state/policy/params/o: other bits, up to"),
        (drop_array, "3/state/policy/params/o: only in the old tree"),
        (change_token, "rollout 0: tokens: [1, 2] and [1, 7]"),
        (change_host, "checkpoint 4: {'position': 16} and {'position': 17}"),
    ],
)
def test_one_change_is_found_and_named(change, named):
    new = make_run()
    change(new)
    (found,) = differences(make_run(), new)
    assert found.startswith(named)


def test_bits_are_compared_not_values():
    zeros = np.zeros(2, np.float32)
    assert same_bits(zeros, zeros.copy())
    assert not same_bits(zeros, -zeros)
    assert not same_bits(zeros, np.zeros(2, np.int32))
    nan = np.float32([np.nan])
    assert same_bits(nan, nan.copy())


def test_metrics_of_the_clock_are_not_compared():
    row = {"step": 1, "time/total": 2.0, "draft/seconds": 0.1, "draft/kl": 0.5}
    assert untimed(row) == {"step": 1, "draft/kl": 0.5}


def no_gradient(run):
    run.rows[3]["policy/grad_norm"] = 0.0


def no_update(run):
    run.arrays["4/state/policy/params/o"] = run.arrays["1/state/policy/params/o"]


@pytest.mark.parametrize(("change", "said"), [(no_gradient, r"steps \[3\]"), (no_update, "state/policy")])
def test_a_policy_that_stands_still_proves_nothing(change, said):
    run = make_run()
    check_moved(run)
    change(run)
    with pytest.raises(AssertionError, match=said):
        check_moved(run)


def test_a_finished_run_is_read(tmp_path):
    run = make_run()
    (tmp_path / "rollouts").mkdir()
    lines = [json.dumps(row | {"time/total": 1.0}).replace("NaN", "null") for row in run.rows]  # as MetricsWriter does
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "rollouts" / "step_4.jsonl").write_text(json.dumps(run.rollouts[0]) + "\n")
    for step in range(1, 5):
        folder = tmp_path / "checkpoints" / str(step)
        state = {"policy": {"params": {"o": run.arrays[f"{step}/state/policy/params/o"]}}}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", state)
        (folder / "values").mkdir()
        (folder / "values" / "metadata").write_text(json.dumps({"position": step}))
    found = load(tmp_path)
    assert found.rows[0] == run.rows[0] and found.rollouts == run.rollouts and found.host["2"] == {"position": 2}
    assert same_bits(found.arrays["4/state/policy/params/o"], run.arrays["4/state/policy/params/o"])


# Part of a step -> the call that begins it in step 7, as the library makes it: arguments, and those by keyword.
CALLS = {
    "generation": ((None, 7, [], None), {"newer": None}),
    "learning": ((None, SimpleNamespace(policy=SimpleNamespace(step=6)), None), {"inputs": None, "train_draft": True}),
    "save": ((None, 7, None, None), {"accuracy": None}),
    "between": ((None, 7, "note", 0.0), {"ahead": 0.0}),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_parts_of_a_step_that_are_killed_begin_with_functions_of_the_library(moment):
    owner, name, step_of = MOMENTS[moment]
    arguments, options = CALLS[moment]
    inspect.signature(getattr(owner, name)).bind(*arguments, **options)
    assert step_of(*arguments, **options) == 7
