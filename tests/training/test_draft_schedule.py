"""When a draft learns: the turn of its updates, when it rests, and what wakes it."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from specrl_jax.training.draft_schedule import LOWER, PATIENCE, DraftSchedule


def resting(growth=0.5, level=1.0, every=1):
    """A schedule that has found its level."""
    schedule = DraftSchedule(every, growth)
    for _ in range(1 + PATIENCE * every):
        schedule.observe(level)
    assert schedule.state()["resting"]
    return schedule


def learning_steps(schedule, mismatches):
    """The steps that update, of a run that sees these mismatches."""
    steps = []
    for step, mismatch in enumerate(mismatches, start=1):
        if schedule.learns(step):
            steps.append(step)
        schedule.observe(mismatch)
    return steps


@pytest.mark.parametrize(
    ("every", "expected"), [(1, [*range(1, 13)]), (2, [2, 4, 6, 8, 10, 12]), (5, [5, 10]), (13, [])]
)
def test_every_n_steps(every, expected):
    """Without `growth` whatever the mismatch does."""
    for mismatches in ([1.0] * 12, [2.0**-i for i in range(12)], [2.0**i for i in range(12)]):
        assert learning_steps(DraftSchedule(every, 0.0), mismatches) == expected


def test_without_growth_nothing_is_kept():
    schedule = DraftSchedule(1, 0.0)
    fresh = schedule.state()
    schedule.observe(1.0)
    assert schedule.state() == fresh


def test_a_mismatch_that_falls_is_learnt_from():
    """By more than a hundredth within each PATIENCE updates, however slowly."""
    falling = [0.9**i for i in range(40)]
    assert learning_steps(DraftSchedule(1, 0.5), falling) == [*range(1, 41)]
    slowly = [(1 - 1.1 * LOWER) ** (i // (PATIENCE - 1)) for i in range(40)]
    assert learning_steps(DraftSchedule(1, 0.5), slowly) == [*range(1, 41)]


def test_it_rests_once_the_level_is_found():
    """One update finds it and PATIENCE more find nothing lower; noise above it and a hundredth below are the level."""
    for level in ([1.0] * 20, [1.0, 1.3, 1.1, 0.995, 1.2, 0.991] + [1.0] * 14):
        assert learning_steps(DraftSchedule(1, 0.5), level) == [*range(1, 2 + PATIENCE)]
    # Something lower meanwhile starts the count again.
    again = [1.0] * PATIENCE + [0.98] + [1.0] * 20
    assert learning_steps(DraftSchedule(1, 0.5), again) == [*range(1, 2 + 2 * PATIENCE)]


@pytest.mark.parametrize("growth", [0.1, 0.5, 2.0])
def test_growth_wakes_it(growth):
    """Above the lowest by that share, not at it; it goes on until the new level is found."""
    schedule = resting(growth, level=0.4)
    schedule.observe((1 + growth) * 0.4 * 0.999)
    assert not schedule.learns(1)
    schedule.observe((1 + growth) * 0.4 * 1.001)
    assert schedule.learns(1)
    # The new level is higher: at it there is nothing more to learn, though the old one stays out of reach.
    assert learning_steps(schedule, [1.05 * (1 + growth) * 0.4] * 20) == [*range(1, 1 + PATIENCE)]


def test_falling_at_rest_does_not_wake_it():
    schedule = resting()
    for mismatch in (0.9, 0.5, 0.1):
        schedule.observe(mismatch)
        assert not schedule.learns(1)


@pytest.mark.parametrize("every", [2, 10])
def test_patience_counts_updates(every):
    """A draft that learns every tenth step only is not at its level because nothing changes in between."""
    mismatch, learnt = 8.0, 0
    schedule = DraftSchedule(every, 0.5)
    for step in range(1, 8 * every + 1):
        updates = schedule.learns(step)
        assert updates == (step % every == 0)
        schedule.observe(mismatch)
        # Each update halves it.
        mismatch, learnt = mismatch / (1 + updates), learnt + updates
    assert learnt == 8
    # Then it finds its level, and rests after as many updates as one that learns at every step.
    assert len(learning_steps(schedule, [mismatch] * 20 * every)) in (PATIENCE, PATIENCE + 1)


def test_asking_changes_nothing():
    schedule = DraftSchedule(3, 0.5)
    for mismatch in (2.0, 1.0, *[1.0] * 3 * PATIENCE, 3.0):
        schedule.observe(mismatch)
        before = schedule.state()
        answers = [schedule.learns(step) for step in range(1, 10)]
        assert [schedule.learns(step) for step in range(1, 10)] == answers
        assert schedule.state() == before


mismatches = st.lists(st.floats(0.0, 10.0), max_size=40)


@hypothesis.given(mismatches, mismatches, st.integers(1, 3))
@hypothesis.example([], [1.0] * 20, 1)
@hypothesis.example([1.0] * 20, [1.6] * 20, 1)
def test_a_saved_state_goes_on_alike(before, after, every):
    """Through JSON, as a run saves it: at any point, the fresh one included."""
    schedule, loaded = DraftSchedule(every, 0.5), DraftSchedule(every, 0.5)
    for mismatch in before:
        schedule.observe(mismatch)
    loaded.restore(json.loads(json.dumps(schedule.state())))
    assert loaded.state() == schedule.state()
    assert learning_steps(loaded, after) == learning_steps(schedule, after)
    assert loaded.state() == schedule.state()
