"""Adapters: the sum, its gradient, and that nothing else learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.errors import InputError
from specrl_jax.learner.policy_step import make_policy_step
from specrl_jax.learner.state import TrainState
from specrl_jax.models import decoder
from specrl_jax.models.lora import EQUATIONS, Adapted, LoRA, adapter_specs, attach, init_adapters, merged
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.policies import MOE, SMALL, random_params
from tests.helpers.updates import update_policy
from tests.learner.test_policy_step import PLAIN, WITH_KL, batch, initial_params, recorder

ALL = LoRA(3, 6.0, tuple(EQUATIONS))


@functools.cache
def random_adapters(config, lora=ALL):
    rng = np.random.default_rng(3)
    specs = adapter_specs(decoder.param_specs(config), lora)
    return jax.tree.map(lambda spec: (0.1 * rng.normal(size=spec.shape)).astype("f4"), specs)


@pytest.mark.parametrize("config", [SMALL, MOE], ids=["dense", "experts"])
def test_the_sum_is_w_plus_scaled_a_b(config):
    """As matrices [inputs, outputs], layer by layer and expert by expert, in float64."""
    params, adapters = random_params(config), random_adapters(config)
    whole = merged(attach(params, adapters, ALL))
    for name, parts in adapters.items():
        weight, inputs = np.asarray(params["layers"][name], np.float64), {"o": 2}.get(name, 1)
        lead = weight.ndim - inputs - {"q": 2, "k": 2, "v": 2}.get(name, 1)
        for at in np.ndindex(*weight.shape[:lead]):
            rows = np.prod(weight.shape[lead : lead + inputs])
            a, b = parts["a"][at].reshape(rows, 3), parts["b"][at].reshape(3, -1)
            expected = weight[at].reshape(rows, -1) + 2.0 * a.astype(float) @ b
            np.testing.assert_allclose(np.asarray(whole["layers"][name])[at].reshape(rows, -1), expected, atol=1e-6)


@pytest.mark.slow
def test_fresh_adapters_change_nothing():
    specs = adapter_specs(decoder.param_specs(SMALL), ALL)
    adapters = init_adapters(jax.random.key(0), specs)
    for name, weight in merged(attach(random_params(SMALL), adapters, ALL))["layers"].items():
        np.testing.assert_array_equal(weight, random_params(SMALL)["layers"][name])
    assert np.std(adapters["down"]["a"]) == pytest.approx(SMALL.mlp**-0.5, rel=0.2)


def test_rollouts_run_on_the_sum():
    params, adapters = random_params(SMALL), random_adapters(SMALL)
    of_parts = decoder.inference_params(attach(params, adapters, ALL), SMALL, jnp.float32)
    of_sum = decoder.inference_params(merged(attach(params, adapters, ALL)), SMALL, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, of_parts, of_sum)


@functools.cache
def update(mesh, microbatch=None):
    """(gradient of the adapters, frozen weights afterwards) of one step on the host."""
    partition = partitioner(make_mesh(mesh_sizes(mesh), jax.devices()[: 8 if mesh else 1]), LEARNER)
    learner = dataclasses.replace(PLAIN, lora=ALL, remat="full")
    step = make_policy_step(learner, WITH_KL, recorder(), partition=partition)
    adapters = jax.device_put(random_adapters(PLAIN.model), partition.shardings(learner.trained_specs))
    frozen = jax.device_put(initial_params(), partition.shardings(decoder.param_specs(PLAIN.model)))
    nothing = jax.tree.map(jnp.zeros_like, adapters)
    state = TrainState(jnp.zeros((), jnp.int32), adapters, nothing, frozen=frozen)
    state, _, _ = update_policy(step, state, *batch(), microbatch)
    return jax.device_get((state.opt_state, state.frozen))


def mesh_sizes(mesh):
    return {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2} if mesh else dict.fromkeys(LEARNER_AXES, 1)


LEARNER_AXES = ("data", "fsdp", "expert", "tensor")


@pytest.mark.slow
def test_gradients_are_those_of_the_plain_path():
    """dA = scale dW B^T and dB = scale A^T dW, with dW that of a step whose weights are the sum."""
    adapters = random_adapters(PLAIN.model)
    whole = merged(attach(initial_params(), adapters, ALL))
    partition = partitioner(make_mesh(mesh_sizes(False), jax.devices()[:1]), LEARNER)
    step = make_policy_step(PLAIN, WITH_KL, recorder(), partition=partition)
    state = TrainState(jnp.zeros((), jnp.int32), whole, jax.tree.map(jnp.zeros_like, whole))
    plain = jax.device_get(update_policy(step, state, *batch())[0].opt_state)
    gradient, frozen = update(False)
    for name, parts in adapters.items():
        a, b = (np.asarray(parts[x], np.float64) for x in "ab")
        inputs, out = EQUATIONS[name].split("->")
        left, right = inputs.split(",")
        expected = {
            "a": 2 * np.einsum(f"{out},{right}->{left}", plain["layers"][name], b),
            "b": 2 * np.einsum(f"{left},{out}->{right}", a, plain["layers"][name]),
        }
        for x in "ab":
            # Float32 sums over 128 positions and up to 128 terms.
            np.testing.assert_allclose(gradient[name][x], expected[x], atol=1e-5 * np.abs(expected[x]).max())
            assert np.abs(expected[x]).max() > 0
    jax.tree.map(np.testing.assert_array_equal, frozen, initial_params())


@pytest.mark.slow
@pytest.mark.parametrize("mesh,microbatch", [(True, None), (False, 2)])
def test_neither_devices_nor_microbatches_matter(mesh, microbatch):
    for got, want in zip(jax.tree.leaves(update(mesh, microbatch)[0]), jax.tree.leaves(update(False)[0])):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
def test_the_sum_exists_for_one_layer_at_a_time():
    """No array as large as a stack of summed weights among the temporaries of a step: what would LoRA be for."""
    config = dataclasses.replace(PLAIN.model, layers=24)
    learner = dataclasses.replace(PLAIN, model=config, lora=ALL, remat="full")
    partition = partitioner(make_mesh(mesh_sizes(False), jax.devices()[:1]), LEARNER)
    step = make_policy_step(learner, WITH_KL, recorder(), partition=partition)
    abstract = lambda specs: jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)  # noqa: E731
    adapters = abstract(learner.trained_specs)
    state = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32), adapters, adapters, frozen=abstract(decoder.param_specs(config))
    )
    stack = "f32[24,64,128]"  # of gate, up: only ever read
    text = step.gradient.lower(state, *batch()).compile().as_text()
    made = [line for line in text.splitlines() if f" = {stack}" in line and " parameter(" not in line]
    assert not [line for line in made if "get-tuple-element" not in line and "bitcast" not in line], made


@pytest.mark.parametrize("values", [(0, 1.0, ("q",)), (2, 0.0, ("q",)), (2, 1.0, ()), (2, 1.0, ("router",))])
def test_nonsense_is_refused(values):
    with pytest.raises(InputError, match=r"policy\.lora_"):
        LoRA(*values)


@pytest.mark.slow
def test_an_adapted_matrix_is_a_node_of_the_tree():
    tree = attach(decoder.param_specs(SMALL), adapter_specs(decoder.param_specs(SMALL), ALL), ALL)
    assert (
        isinstance(tree["layers"]["q"], Adapted)
        and len(jax.tree.leaves(tree)) == len(jax.tree.leaves(decoder.param_specs(SMALL))) + 2 * 7
    )
