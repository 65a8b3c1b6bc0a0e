"""Each alarm at its threshold and reported once; skipped updates counted in a row."""

import dataclasses
import types

import pytest

from specrl_jax.errors import RunFailed
from specrl_jax.training import monitor as monitoring
from specrl_jax.training.monitor import ENTROPY, EQUAL, GROWTH, NAMES, TRUNCATED, UNSCORED, WEIGHTS, Alarms, Monitor
from tests.rollout.test_speculation import setup_of as speculation_parts

HEALTHY = {
    "rollout_vs_learner/kl": 2e-3,
    "reward/unscored": 0,
    "rollout/count": 100,
    "reward/equal_groups": 0.3,
    "rollout/truncated": 0.1,
    "policy/entropy": 1.0,
    "policy/weight_growth": 1.0,
    "spec/alarm": 0.0,
}
SICK = {
    "acceptance": {"spec/alarm": 1.0},
    "mismatch": {"rollout_vs_learner/kl": 1.01 * GROWTH * 2e-3},
    "rewards": {"reward/unscored": 100 * UNSCORED + 1},
    "equal_groups": {"reward/equal_groups": EQUAL},
    "truncated": {"rollout/truncated": TRUNCATED + 0.01},
    "entropy": {"policy/entropy": 0.99 * ENTROPY},
    "weights": {"policy/weight_growth": 1.01 * WEIGHTS},
}
WELL = {
    "mismatch": {"rollout_vs_learner/kl": 0.99 * GROWTH * 2e-3},
    "rewards": {"reward/unscored": 100 * UNSCORED},
    "equal_groups": {"reward/equal_groups": EQUAL - 0.01},
    "truncated": {"rollout/truncated": TRUNCATED},
    "entropy": {"policy/entropy": 1.01 * ENTROPY},
    "weights": {"policy/weight_growth": WEIGHTS},
}


def names(row):
    return [name.removeprefix("alarm/") for name, on in row.items() if on]


def test_there_is_a_case_of_each():
    assert tuple(SICK) == NAMES


@pytest.mark.parametrize("name", SICK)
def test_it_rings_when_it_begins_and_rests_when_it_is_over(name):
    alarms = Alarms()
    assert names(alarms.observe(HEALTHY)[0]) == []
    row, begun = alarms.observe(HEALTHY | SICK[name])
    assert names(row) == [name] and len(begun) == 1
    row, begun = alarms.observe(HEALTHY | SICK[name])
    assert names(row) == [name] and not begun
    if name == "weights":  # what is lost does not come back
        assert names(alarms.observe(HEALTHY)[0]) == ["weights"]
        return
    assert names(alarms.observe(HEALTHY)[0]) == []
    assert len(alarms.observe(HEALTHY | SICK[name])[1]) == 1


@pytest.mark.parametrize("name", WELL)
def test_just_below_it_is_silent(name):
    alarms = Alarms()
    alarms.observe(HEALTHY)
    assert names(alarms.observe(HEALTHY | WELL[name])[0]) == []


def test_one_dead_worker_rings():
    alarms = Alarms()
    assert names(alarms.observe(HEALTHY | {"reward/unscored": 1, "reward/unscored_died": 1})[0]) == ["rewards"]


def test_a_mismatch_that_is_no_number_rings():
    alarms = Alarms()
    alarms.observe(HEALTHY)
    assert names(alarms.observe(HEALTHY | {"rollout_vs_learner/kl": float("nan")})[0]) == ["mismatch"]


def test_rounding_is_no_mismatch_and_a_grown_one_not_the_new_normal():
    alarms = Alarms()
    alarms.observe(HEALTHY | {"rollout_vs_learner/kl": 1e-13})
    assert names(alarms.observe(HEALTHY | {"rollout_vs_learner/kl": 1e-4})[0]) == []
    for _ in range(100):
        assert names(alarms.observe(HEALTHY | {"rollout_vs_learner/kl": 1.0})[0]) == ["mismatch"]


def test_weights_that_grow_step_by_step_ring_once_ten_times_as_large_and_for_good():
    """Tripled three times, kept by a checkpoint in between; or NaN, since the norm itself overflowed."""
    alarms = Alarms()
    for found in ([], [], ["weights"]):
        assert names(alarms.observe(HEALTHY | {"policy/weight_growth": 3.0})[0]) == found
        alarms = Alarms(**dataclasses.asdict(alarms))
    assert names(alarms.observe(HEALTHY)[0]) == ["weights"]
    alarms = Alarms()
    assert names(alarms.observe(HEALTHY | {"policy/weight_growth": float("nan")})[0]) == ["weights"]
    assert names(alarms.observe(HEALTHY)[0]) == ["weights"]


def test_a_run_without_a_draft_has_no_acceptance_to_lose():
    row = {name: value for name, value in HEALTHY.items() if name != "spec/alarm"}
    assert names(Alarms().observe(row)[0]) == []


def test_what_it_knows_survives_a_restart():
    alarms = Alarms()
    alarms.observe(HEALTHY | SICK["truncated"])
    again = Alarms(**dataclasses.asdict(alarms))
    row, begun = again.observe(HEALTHY | SICK["truncated"] | SICK["entropy"])
    assert names(row) == ["truncated", "entropy"] and len(begun) == 1


# ---- updates skipped in a row


def monitor_of(host=None):
    plan, engine = speculation_parts(weights=False)
    return Monitor(plan, engine, host)


def observe(monitor, step, *skipped):
    checkpoints = types.SimpleNamespace(kept=lambda: "the last good checkpoint is step 2")
    return monitor.observe(HEALTHY | {"step": step}, skipped, checkpoints)


def test_too_many_skipped_updates_in_a_row_end_the_run_and_name_the_checkpoint(monkeypatch):
    monkeypatch.setattr(monitoring, "MOST_SKIPPED", 3)
    monitor = monitor_of()
    observe(monitor, 1, True, True, False)
    observe(monitor, 2, False, True)
    # Counted over the end of a step, and through a checkpoint.
    restored = monitor_of(monitor.state({}))
    with pytest.raises(RunFailed, match=r"step 3: 3 updates in a row .*at most 2 may.* checkpoint is step 2"):
        observe(restored, 3, True, True, False)


def test_skipped_updates_with_good_ones_between_are_not_in_a_row(monkeypatch):
    monkeypatch.setattr(monitoring, "MOST_SKIPPED", 2)
    monitor = monitor_of()
    for step in range(1, 6):
        observe(monitor, step, True, False)
