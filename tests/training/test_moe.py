"""A mixture-of-experts policy through all five phases, over meshes that split its experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.learner.policy_step import PolicyForward, make_policy_step
from specrl_jax.learner.state import TrainState
from specrl_jax.models import decoder
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.policies import random_params
from tests.helpers.training import drafted_run, policy_rows
from tests.helpers.updates import update_policy
from tests.learner.test_policy_step import WITH_KL, assert_trees_close, batch, recorder

pytestmark = pytest.mark.slow

NANO = decoder.preset("nano_moe")


def recorded_gradient(partition):
    """Of one policy step, and its metrics."""
    params = jax.device_put(random_params(NANO), partition.shardings(decoder.param_specs(NANO)))
    learner = PolicyForward(NANO, jnp.dtype("float32"), True, vocab_tile=0, temperature=1.0)
    step = make_policy_step(learner, WITH_KL, recorder(), partition=partition)
    state = TrainState(jnp.zeros((), jnp.int32), params, jax.tree.map(jnp.zeros_like, params))
    state, metrics, _ = update_policy(step, state, *batch())
    return jax.device_get((state.opt_state, metrics))


def test_a_policy_step_over_split_experts_is_that_of_one_device(partition):
    over = partitioner(make_mesh({"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}), LEARNER)
    one, many = recorded_gradient(partition), recorded_gradient(over)
    assert_trees_close(many[0], one[0], rtol=1e-5)
    assert_trees_close(many[1], one[1], rtol=1e-5)
    router = one[0]["layers"]["router"]
    assert np.abs(router).max() > 0


def test_it_learns_and_is_drafted_for(tmp_path):
    """Two steps with a fresh head on eight devices: what it decodes is what the learner scores."""
    run = drafted_run("nano_moe_deep", 2, make_mesh({"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}))
    for row in policy_rows(run, tmp_path, steps=2):
        assert row["policy/grad_norm"] > 0 and row["draft/grad_norm"] > 0
        # Of eight experts: 1 where all are used alike, up to 4 for one of a token's two in every token.
        assert 0.5 < row["policy/expert_entropy"] <= 1 <= row["policy/expert_peak"] <= 4
        assert row["spec/accepted"] > 0
        # float32 on both sides, seven layers; the second row after an update.
        assert row["rollout_vs_learner/logprob_abs_max"] < 2e-5
