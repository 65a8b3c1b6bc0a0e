"""Over-sampled groups and partial rollouts: what a step learns from, and what goes on in the next."""

import json

import jax
import numpy as np
import pytest

from specrl_jax.errors import InputError
from specrl_jax.io.metrics import read_metrics
from specrl_jax.rollout.prompt_lengths import SeenLengths
from specrl_jax.rollout.stale.partial import NO_PARTIAL_ROLLOUTS, PartialRollouts, enough_groups, local_partial_rollouts
from tests.helpers.training import assert_refused, saved, train, untimed
from tests.rollout.stale.test_exact import STEPS, forget, no_evaluation, run_of
from tests.rollout.test_groups import rollouts_of

assert no_evaluation  # a fixture of every test
G, P = 4, 4


def finished(*counts):
    """How many of each group's rollouts are finished."""
    return np.array([[i < count for i in range(G)] for count in counts]).reshape(-1)


def test_a_step_ends_when_enough_groups_are_complete():
    assert not enough_groups(2, G)(finished(4, 3, 3))
    assert enough_groups(2, G)(finished(4, 0, 4))


def partial_run(folder, schedule="partial", **changes):
    grpo = {"oversample": 2, "correction": "token_truncate", "old_logprobs": "learner"}
    rollout = {"num_slots": 8, "parity": False}
    pipeline = {"schedule": schedule}
    return run_of(folder, "sync", changes={"grpo": grpo, "rollout": rollout | changes, "pipeline": pipeline}, chunk=2)


def rows_of(workdir):
    return [json.loads(x) for step in range(1, STEPS + 1) for x in open(workdir / f"rollouts/step_{step}.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_partial_rollouts_go_on_in_the_next_step_and_over_a_kill(rule, tmp_path):
    run, workdir = partial_run(tmp_path, rule=rule), tmp_path / "run"
    rows = train(run, workdir)[1:]
    assert all(row["rollout/count"] == G * P for row in rows)
    assert max(row["rollout/carried"] for row in rows) in range(1, 9) and not any(
        row["rollout/dropped_tokens"] for row in rows
    )
    assert rows[0]["rollout/token_lag"] == 0 and max(row["rollout/token_lag"] for row in rows) > 0
    assert max(row["rollout/lag"] for row in rows) >= 1
    ids = [row["id"] for row in rows_of(workdir)]
    assert len(ids) == len(set(ids)) == STEPS * G * P
    # Log-probs are those of the weights that drew each token: the learner's differ by what has been learned since.
    assert (
        rows[0]["rollout_vs_learner/logprob_abs_max"]
        < 1e-4
        < max(row["rollout_vs_learner/logprob_abs_max"] for row in rows)
    )
    left = saved(run, workdir, 4)[1]["ahead"]["left"]
    assert len(left) == 1 and left[0]["problems"]
    expected, state, texts = untimed(read_metrics(str(workdir))), saved(run, workdir, STEPS)[0], rows_of(workdir)
    forget(workdir, 4, 5)
    train(run, workdir)
    assert untimed(read_metrics(str(workdir))) == expected and rows_of(workdir) == texts
    jax.tree.map(np.testing.assert_array_equal, saved(run, workdir, STEPS)[0], state)


@pytest.mark.slow
def test_without_carrying_the_other_groups_are_dropped(tmp_path):
    rows = train(partial_run(tmp_path, "sync"), tmp_path / "run")[1:]
    assert all(row["rollout/count"] == G * P and row["rollout/dropped_tokens"] > 0 for row in rows)
    assert not any(row["rollout/carried"] or row["rollout/lag"] for row in rows)
    assert max(row["rollout_vs_learner/logprob_abs_max"] for row in rows) < 1e-4


def test_other_processes_do_not_take_what_was_left():
    left = PartialRollouts([], rollouts_of(0))
    assert local_partial_rollouts([left]) is left and local_partial_rollouts([]).rollouts is None
    with pytest.raises(InputError, match="2 processes began this run, and 1 resume it"):
        local_partial_rollouts([left, left])
    seen = SeenLengths(np.array([7], np.uint64), np.array([2.0], np.float32))
    assert local_partial_rollouts([NO_PARTIAL_ROLLOUTS._replace(seen=seen)] * 2).seen.prompts.tolist() == [7, 7]


WRONG = [
    (
        {"pipeline": {"schedule": "partial"}, "grpo": {"oversample": 1}},
        r"grpo\.correction=none: other policies .*pipeline\.schedule=partial",
    ),
    ({"grpo": {"oversample": 1, "sampling_rounds": 2}}, r"grpo\.oversample=1 .*grpo\.sampling_rounds; leave 0"),
    (
        {"grpo": {"oversample": 1}, "pipeline": {"schedule": "exact"}, "rollout": {"rule": "coupled"}},
        r"grpo\.oversample=1 beside pipeline\.schedule=exact: a step then learns from",
    ),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_what_does_not_go_together_is_refused_in_one_line(changes, said):
    assert_refused(changes, said)
