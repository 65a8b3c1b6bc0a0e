"""Runs with the options of the algorithm: all at once, interrupted, and with gradients that are not finite."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import rlzero_tiny
from specrl_jax.errors import RunFailed, Stopped
from specrl_jax.io import hf
from specrl_jax.io.metrics import read_metrics
from specrl_jax.models import decoder
from specrl_jax.tasks.export import export
from specrl_jax.training import loop, monitor
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_params
from tests.helpers.rewards import FunctionScorer
from tests.helpers.training import Changed, StopAfter, lower_case, make_run, saved, train, untimed, with_config

STEPS = 4
EVERYTHING = {
    "policy__lora_rank": 3,
    "grpo__kl_coef": 0.01,
    "grpo__entropy_coef": 0.001,
    "grpo__advantage": "rloo",
    "grpo__loss": "gspo",
    "grpo__aggregation": "sequence",
    "grpo__correction": "sequence_mask",
    "grpo__minibatches": 2,
    "grpo__microbatch_tokens": 1,
    "rollout__temperature": 0.7,
    "rollout__top_k": 40,
    "rollout__top_p": 0.9,
    "grpo__epochs": 2,
    "grpo__sampling_rounds": 2,
    "grpo__overlong_buffer": 4,
    "checkpoint__keep_best": 1,
    "checkpoint__keep": 1,
    "draft__compare_rounds": 0,
    "draft__replay_updates": 3,
    "eval__every": 2,
    "eval__problems": 4,
    "optimizer__learning_rate": 3e-3,
    "optimizer__warmup": 0,
    "steps": STEPS,
}


@pytest.fixture(scope="module")
def everything():
    return make_run(rlzero_tiny.get_config("smoke"), None, FunctionScorer(lower_case), **EVERYTHING)


@pytest.fixture(scope="module")
def whole(everything, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("options")
    return workdir, train(everything, workdir)


@pytest.mark.slow
def test_every_row_is_finite_and_says_what_was_on(whole):
    for row in whole[1][1:]:
        assert all(np.isfinite(value) for value in row.values())
        assert row["policy/kl"] >= 0 and row["policy/correction"] > 0 and row["policy/nonfinite_updates"] == 0
        assert row["rollout/rounds"] in (1, 2) and row["rollout/count"] == 16 * row["rollout/rounds"]
        # Two updates of the draft a step, in the first epoch only, and three from kept texts.
        assert row["draft/version"] == 5 * row["step"] and row["draft/replay_updates"] == 3
        # Adapters or not, rollouts run on the sum that the learner has, which scores at the same temperature, over the
        # tokens that top-k and top-p kept.
        assert row["rollout_vs_learner/logprob_abs_max"] < 1e-4


@pytest.mark.slow
def test_adapters_learn_and_leave_the_reference(everything, whole):
    """It is the policy before the first step, and no part of a checkpoint."""
    state, _ = saved(everything, whole[0], STEPS)
    assert state.policy.frozen is None
    assert all(np.any(parts["b"]) for parts in state.policy.params.values())
    assert state.reference is None
    kl = [row["policy/kl"] for row in whole[1][1:]]
    assert kl == sorted(kl) and kl[0] > 0


@pytest.mark.slow
def test_a_run_stopped_and_resumed_ends_like_the_whole_one(everything, whole, tmp_path):
    for looks in (6, 9):
        with pytest.raises(Stopped):
            train(everything, tmp_path, StopAfter(looks))
    train(everything, tmp_path)
    assert untimed(read_metrics(str(tmp_path))) == untimed(whole[1])
    for got, expected in zip(saved(everything, tmp_path, STEPS), saved(everything, whole[0], STEPS)):
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_the_exported_policy_is_the_sum(everything, whole, tmp_path):
    setup = with_config(everything, export={"output": str(tmp_path), "dtype": "float32"})
    folder, _ = export(setup.learner, str(whole[0]))
    written = hf.load_params(folder, setup.learner.plan.model, setup.learner.plan.learner_partition, dtype=jnp.float32)
    state, _ = saved(everything, whole[0], STEPS)
    weights, _ = prepare(
        setup.learner, setup.rollout, state.replace(policy=state.policy.replace(frozen=initial_params(setup.learner)))
    )
    again = decoder.inference_params(written, setup.learner.plan.model, jnp.float32)
    # Summed by two programs.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, weights.policy)
    assert np.abs(written["layers"]["q"] - initial_params(setup.learner)["layers"]["q"]).max() > 1e-4


# ---- gradients that are not finite


class Poisoned:
    """A policy step whose advantages are not numbers in some updates, counted from 1."""

    def __init__(self, step, updates):
        self.step, self.updates, self.count, self.add = step, updates, 1, step.add
        self.gradient, self.apply = Changed(step.gradient, self._gradient), Changed(step.apply, self._apply)

    def _gradient(self, policy, rows, inputs):
        if self.count in self.updates:
            inputs = inputs.replace(advantages=np.full_like(inputs.advantages, np.nan))
        return self.step.gradient(policy, rows, inputs)

    def _apply(self, policy, sums):
        self.count += 1
        return self.step.apply(policy, sums)


def poisoned(everything, updates, **changes):
    setup = with_config(everything, **changes)
    step = Poisoned(everything.learner.policy_step, updates)
    return setup._replace(learner=dataclasses.replace(setup.learner, policy_step=step))


@pytest.mark.slow
def test_an_update_without_a_finite_gradient_is_skipped_and_counted(everything, whole, tmp_path):
    """All four of step 1: the policy stays as it was, and step 2 learns as if nothing had been."""
    setup = poisoned(everything, {1, 2, 3, 4}, steps=2)
    rows = train(setup, tmp_path)
    assert [row["policy/nonfinite_updates"] for row in rows[1:]] == [4, 0]
    # Written as null, which JSON has.
    assert rows[1]["policy/loss"] is None and np.isfinite(rows[2]["policy/loss"])
    state, host = saved(setup, tmp_path, 2)
    assert host["skipped"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.policy, state.draft)))
    # The rollouts of step 2 are those of the first weights: what is left of the mismatch is rounding.
    assert rows[2]["rollout_vs_learner/logprob_abs_max"] < 1e-4
    assert int(optax.tree.get_all_with_path(state.policy.opt_state, "count")[0][1]) == 4


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_and_name_the_checkpoint(everything, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "MOST_SKIPPED", 7)
    checkpoint = dataclasses.replace(everything.config.checkpoint, every=1)
    setup = poisoned(everything, set(range(5, 100)), checkpoint=checkpoint)
    # Step 2 is done, but all its updates were skipped: it is not saved.
    with pytest.raises(RunFailed, match=r"step 3: 8 updates in a row .*at most 6 may.* checkpoint is step 1; the same"):
        train(setup, tmp_path)
    assert [row["step"] for row in read_metrics(str(tmp_path))] == [0, 1, 2]


@pytest.mark.slow
def test_a_disk_that_refuses_ends_the_run_in_one_line(everything, tmp_path, monkeypatch):
    setup = with_config(everything, checkpoint=dataclasses.replace(everything.config.checkpoint, every=1))
    calls = []
    real = loop.MetricsWriter.write

    def write(self, row, *rest):
        calls.append(row)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", "metrics.jsonl")
        return real(self, row, *rest)

    monkeypatch.setattr(loop.MetricsWriter, "write", write)
    with pytest.raises(RunFailed, match=r"metrics.jsonl: No space left on device; the last good checkpoint is step 1"):
        train(setup, tmp_path)
