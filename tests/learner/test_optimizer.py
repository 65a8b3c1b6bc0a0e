"""Optimizers: updates that are skipped, and Muon on matrices by their layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.config import OptimizerConfig
from specrl_jax.learner.optimizer import apply_gradient, make_optimizer
from specrl_jax.learner.state import init_state, state_shardings
from tests.helpers.training import make_run
from tests.learner.test_policy_step import MESHES, SPECS, partition_of
from tests.learner.test_policy_step import initial_params as nano_params


@pytest.mark.parametrize("healthy", [True, False])
def test_a_skipped_update_changes_no_bit(healthy):
    optimizer = make_optimizer(OptimizerConfig("adamw", 1e-2, 0, clip=1.0, weight_decay=0.0, b2=0.999, decay_steps=0))
    params = {"w": jnp.array([1.0, 2.0])}
    state = init_state(params, {"w": SPECS["final_norm"]}, optimizer, partition=partition_of("one"))
    before = jax.device_get(state)
    gradient = {"w": jnp.array([0.5, np.nan])}
    after, growth = jax.jit(apply_gradient, static_argnums=2)(state, gradient, optimizer, healthy)
    assert np.isnan(growth) if healthy else growth == 1.0
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), jax.device_get(after), before)
    assert all(jax.tree.leaves(same)) == (not healthy)


@pytest.mark.parametrize("rate", [0.5, 1e6])
def test_the_growth_of_an_update(rate):
    """Adam's first update moves each weight by the rate, against its gradient."""
    optimizer = make_optimizer(OptimizerConfig("adamw", rate))
    state = init_state(
        {"w": jnp.array([1.0, 2.0])}, {"w": SPECS["final_norm"]}, optimizer, partition=partition_of("one")
    )
    _, growth = jax.jit(apply_gradient, static_argnums=2)(state, {"w": jnp.array([-1.0, 1.0])}, optimizer, True)
    # Adam's epsilon is 1e-8 of the gradient, and its bias corrections are a few float32 roundings.
    np.testing.assert_allclose(growth, np.hypot(1 + rate, 2 - rate) / np.hypot(1, 2), rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_muons_moments_lie_where_their_parameters_lie(mesh):
    partition, optimizer = (
        partition_of(mesh),
        make_optimizer(OptimizerConfig("muon", 1e-3, 0, clip=1.0, weight_decay=0.0, b2=0.999, decay_steps=0)),
    )
    shardings = state_shardings(SPECS, optimizer, partition)
    shapes = jax.eval_shape(optimizer.init, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), SPECS))
    wanted = {s.shape: partition.sharding(s.axes) for s in jax.tree.leaves(SPECS) if len(s.shape) > 1}
    found = jax.tree.leaves(jax.tree.map(lambda x, s: (x.shape, s), shapes, shardings.opt_state), is_leaf=is_pair)
    moments = [(shape, sharding) for shape, sharding in found if shape in wanted]
    # One of each matrix of the layers, two of the table.
    assert len(moments) == 7 + 2 + 2 * 4 and all(sharding == wanted[shape] for shape, sharding in moments)


def is_pair(x):
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], jax.sharding.Sharding)


def test_muons_update_of_a_matrix_is_orthogonal_and_as_large_as_adamws():
    """Each layer by itself: singular values near 1 times 0.2 sqrt(max(inputs, outputs)) (Moonlight, section 2.2).

    Five turns of Newton-Schulz bring all but the smallest between 0.7 and 1.2. Norms and tables are NAdamW's.
    """
    optimizer = make_optimizer(OptimizerConfig("muon", 1.0, 0, clip=1e9, weight_decay=0.0, b2=0.999, decay_steps=0))
    params, rng = nano_params(), np.random.default_rng(0)
    gradient = jax.tree.map(lambda w: rng.normal(size=w.shape).astype("f4"), params)
    updates, _ = jax.jit(optimizer.update)(gradient, jax.jit(optimizer.init)(params), params)
    _, D, N, H = params["layers"]["q"].shape
    for name, inputs, outputs in (("q", D, N * H), ("o", N * H, D), ("down", 128, 64)):
        for layer in np.asarray(updates["layers"][name]):
            values = np.linalg.svd(layer.reshape(inputs, outputs), compute_uv=False)
            low, high = np.quantile(values / (0.2 * max(inputs, outputs) ** 0.5), (0.1, 1.0))
            assert low > 0.6 and high < 1.3, name
    # The first update of Adam with Nesterov's momentum: 0.9 x 0.1 / (1 - 0.81) + 0.1 / (1 - 0.9), of one sign each.
    for table in ("final_norm", "embed"):
        np.testing.assert_allclose(np.abs(updates[table]), 0.09 / 0.19 + 1, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [("eagle3", "fc"), ("mtp", "eh_proj")])
def test_muon_takes_what_a_head_reads_as_matrices_of_their_own(kind, name):
    """The halves of a head's queries (embedding, hidden state) and of its projection: each orthogonal, none AdamW's."""
    options = {"draft__kind": kind, "optimizer__name": "muon", "draft__clip": 1e9}
    setup, rng = make_run(rlzero_tiny.get_config("smoke"), **options), np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype("f4"), setup.learner.plan.draft.specs)
    optimizer = setup.learner.draft_optimizer
    updates, _ = jax.jit(optimizer.update)(params, jax.jit(optimizer.init)(params), params)
    (found,) = [leaf for path, leaf in jax.tree.leaves_with_path(updates) if path[-1].key == name]
    for matrix in np.asarray(found).reshape(-1, *found.shape[-2:]):
        values = np.linalg.svd(matrix, compute_uv=False)
        low, high = np.quantile(values, (0.2, 1.0))
        assert high < 2.2 * low, name
