"""The configs of published checkpoints: each loads, and its steps are built without weights, for eight devices."""

import importlib

import jax
import jax.numpy as jnp
import pytest

from specrl_jax.data.rows import Rows
from specrl_jax.decoding.compiled import Program
from specrl_jax.drafts.base import TargetTables
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.policy_step import Features
from specrl_jax.models import qwen3
from specrl_jax.models.layers import abstract_params
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import abstract_run_state
from tests.helpers.training import make_run

pytestmark = pytest.mark.slow

# Their meshes, folded onto eight devices: (fsdp, expert, tensor).
MESHES = {
    "rlzero_0p6b": (8, 1, 1),
    "rlzero_1p7b": (8, 1, 1),
    "rlzero_8b": (2, 1, 4),
    "rlthink_8b": (2, 1, 4),
    "rlzero_30b_a3b": (2, 4, 1),
    "rlzero_235b_a22b": (2, 2, 2),
}


# Devices of one process on the nodes that the configs name; rollouts reach no further.
NODE = 4


@pytest.mark.parametrize("name", sorted(MESHES.keys() - {"rlzero_235b_a22b"}))
def test_a_copy_of_the_policy_that_generates_fits_into_a_node(name):
    """What local_mesh asks for. The 235B config says of itself that it does not."""
    mesh = importlib.import_module(f"configs.{name}").get_config().mesh
    assert NODE % (mesh.expert * mesh.tensor) == 0


@pytest.fixture(scope="module", params=MESHES)
def setup(request):
    config = importlib.import_module(f"configs.{request.param}").get_config()
    config.policy.path = config.data.path = config.data.schema = config.eval.path = config.eval.schema = ""
    config.data.tokenizer, config.data.chat = "char", False
    fsdp, expert, tensor = MESHES[request.param]
    return make_run(config, make_mesh({"data": 1, "fsdp": fsdp, "expert": expert, "tensor": tensor}))


def shape(*sizes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.fixture(scope="module")
def rows(setup):
    """(rows, inputs) of a minibatch."""
    g, limits = setup.config.grpo, setup.rollout.config.limits
    B, T = g.prompts_per_step * g.group_size // g.minibatches, limits.cache_length
    rows = Rows(shape(B, T), shape(B, T), shape(B, T), shape(B, T, dtype=jnp.bool_))
    return rows, LossInputs(shape(B, T, dtype=jnp.float32), None, shape(B, T, dtype=jnp.float32))


def test_policy_and_logprob_steps_are_built(setup, rows):
    state = abstract_run_state(setup.learner)
    setup.learner.policy_step.lower(state.policy, *rows)
    setup.learner.logprob_step.lower(state.policy.params, rows[0])


def test_the_draft_step_is_built(setup, rows):
    state, model, dtype = abstract_run_state(setup.learner), setup.learner.plan.model, jnp.bfloat16
    B, T = rows[0].tokens.shape
    D = model.embed
    features = Features(shape(B, T, 3, D, dtype=dtype), shape(B, T, D, dtype=dtype), shape(B, T, dtype=jnp.float32))
    tables = TargetTables(*(shape(V, D, dtype=jnp.float32) for V in (model.vocab, setup.learner.plan.draft.vocab)))
    setup.learner.draft_step.lower(state.draft, tables, features, rows[0])


def test_the_generation_loop_is_built(setup):
    partition, dtype = setup.learner.plan.rollout_partition, setup.rollout.config.dtype

    def tree(specs):
        return abstract_params(specs, dtype, partition.shardings(specs))

    weights = Weights(
        tree(qwen3.inference_specs(setup.learner.plan.model)),
        tree(setup.learner.plan.draft.inference_specs),
        jax.ShapeDtypeStruct((setup.learner.plan.draft.vocab,), jnp.int32, sharding=partition.replicated),
        None,
    )
    program = Program("decode", setup.config.rollout.num_slots, setup.config.draft.length)
    setup.rollout.engine.compiled.lower(program, weights)
