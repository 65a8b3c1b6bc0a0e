"""A step that is not good is not saved, and what a run then says is true."""

import functools

import jax.numpy as jnp
import pytest

from specrl_jax.errors import RunFailed
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.training.saving import DueSaves, save_good

GOOD = {"policy": jnp.ones(3), "draft": jnp.ones(2)}
NAN_DRAFT = GOOD | {"draft": jnp.array([1.0, jnp.nan])}
NAN_POLICY = GOOD | {"policy": jnp.array([1.0, jnp.inf, 0.0])}


@pytest.fixture
def run(tmp_path):
    """run(state, ...) -> (lines said, steps kept): one state a step, a save due every second step; None: skipping."""

    def run(*states):
        checkpoints, said = Checkpoints(str(tmp_path), 9), []
        due = DueSaves(checkpoints, every=2, last=6, say=said.append)
        try:
            for step, state in enumerate(states, start=1):
                host, kept = HostState({}, {}), state or GOOD
                save = functools.partial(save_good, checkpoints, step, kept, host=host, skipping=state is None)
                due.finish_step(step, save)
        finally:
            checkpoints.close()
        return said, sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())

    return run


def test_due_steps_are_saved(run):
    assert run(*[GOOD] * 6) == ([], [2, 4, 6])


def test_a_step_whose_update_was_skipped_is_not_saved_but_the_next_good_one(run):
    said, kept = run(GOOD, None, None, GOOD, GOOD)
    assert said == ["step 2 is not saved: its last update had no finite loss or gradient"] and kept == [4]


def test_a_draft_that_is_not_finite_is_not_saved_and_the_run_goes_on(run):
    said, kept = run(GOOD, GOOD, GOOD, NAN_DRAFT, GOOD)
    assert said == ["step 4 is not saved: draft has a value that is not finite"] and kept == [2, 5]


def test_a_policy_that_is_not_finite_ends_the_run(run):
    says = r"^step 4: policy has a value that is not finite; the last good checkpoint is step 2; the same"
    with pytest.raises(RunFailed, match=says):
        run(GOOD, GOOD, GOOD, NAN_POLICY)
    assert run()[1] == [2]


@pytest.mark.parametrize(("last", "why"), [(None, "its last update"), (NAN_DRAFT, "draft has a value")])
def test_a_last_step_that_is_not_good_is_said(run, last, why):
    with pytest.raises(
        RunFailed, match=rf"^step 6, the last, is not saved: {why} .*; the last good checkpoint is step 4"
    ):
        run(*[GOOD] * 5, last)
