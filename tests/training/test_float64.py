"""In float64, where rounding hides nothing: packing, microbatches, minibatches, remat and adapters give one gradient.

The attention is by definition here, since jax.nn.dot_product_attention rounds its softmax to float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.core import at_least_float32
from specrl_jax.learner.batch import learner_batch
from specrl_jax.learner.policy_step import make_policy_step
from specrl_jax.learner.state import TrainState
from specrl_jax.models import decoder
from specrl_jax.models.lora import EQUATIONS, LoRA, attach, init_adapters, merged
from specrl_jax.rl.objectives import LossInputs
from tests.helpers.long import long_but
from tests.helpers.updates import update_policy
from tests.learner.test_batch import OBJECTIVES, PACKING, training_batch
from tests.learner.test_policy_step import PLAIN, initial_params, partition_of, recorder

WIDE = dataclasses.replace(PLAIN, dtype=jnp.dtype("float64"))
ADAPTERS = LoRA(3, 6.0, tuple(EQUATIONS))


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    with jax.enable_x64(True):
        yield


def attention(q, k, v, mask=None, is_causal=True):
    _, length, heads, H = q.shape
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    scores = at_least_float32(jnp.einsum("BTNH,BSNH->BNTS", q, k)) / np.sqrt(H)
    allowed = jnp.tril(jnp.ones((length, length), bool))[None, None]
    allowed = allowed if mask is None else allowed & mask
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(jnp.where(allowed, scores, -1e300), axis=-1), v)


def wide(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)


def batch_of(packing=None):
    """(rows, inputs); what belongs to a token is a function of its target, so that every layout has the same."""
    batch = learner_batch(training_batch(), 0, packing)
    ref = (-4.85 + np.random.default_rng(7).normal(0, 0.3, 128))[batch.rows.targets]
    inputs = LossInputs(*map(np.float64, (batch.behaviour, ref, batch.advantages, ref - 0.2)), batch.loss_mask)
    return batch.rows, inputs


def gradient(name, learner, batch, trained=None, frozen=None, size=None):
    """(gradient of the mean loss, what it is a mean over)."""
    step = make_policy_step(learner, OBJECTIVES[name], recorder(), partition=partition_of("one"))
    # Copied, since the step donates it.
    trained = jax.tree.map(jnp.array, wide(initial_params()) if trained is None else trained)
    nothing = jax.tree.map(jnp.zeros_like, trained)
    state = TrainState(jnp.zeros((), jnp.int32), trained, nothing, frozen=frozen)
    state, metrics, _ = update_policy(step, state, *batch, size)
    return jax.device_get((state.opt_state, metrics.terms.loss.count))


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * np.abs(b).max())


@pytest.mark.parametrize("name", long_but(["token"], OBJECTIVES))
def test_packed_rows(name):
    packed = batch_of(PACKING)
    assert len(packed[0].tokens) < len(batch_of()[0].tokens)
    assert_same(gradient(name, WIDE, packed)[0], gradient(name, WIDE, batch_of())[0])


@pytest.mark.slow
@pytest.mark.parametrize("packing", [None, PACKING])
def test_microbatches_with_recomputed_layers(packing):
    batch = batch_of(packing)
    parts = dataclasses.replace(WIDE, remat="full", vocab_tile=48)
    assert_same(gradient("token", parts, batch, size=2)[0], gradient("token", WIDE, batch)[0])


@pytest.mark.slow
def test_minibatches():
    """Of one policy, each weighed by its tokens, they add up to the gradient of the whole."""
    batch = batch_of()
    parts = [gradient("token", WIDE, jax.tree.map(lambda x, i=i: x[i::2], batch)) for i in range(2)]
    whole, count = gradient("token", WIDE, batch)
    assert count == sum(n for _, n in parts)
    assert_same(
        jax.tree.map(lambda *g: sum(n * x for (_, n), x in zip(parts, g)) / count, *[g for g, _ in parts]), whole
    )


@pytest.mark.slow
def test_adapters():
    """dA = scale dW B^T and dB = scale A^T dW, with dW the gradient of weights that are the sum."""
    learner = dataclasses.replace(WIDE, lora=ADAPTERS, remat="full")
    frozen, rng = wide(initial_params()), np.random.default_rng(3)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape)), init_adapters(jax.random.key(0), learner.trained_specs)
    )
    plain, _ = gradient("token", WIDE, batch_of(), trained=merged(attach(frozen, adapters, ADAPTERS)))
    got, _ = gradient("token", learner, batch_of(), adapters, frozen, size=2)
    assert set(got) == set(adapters) <= set(decoder.param_specs(PLAIN.model)["layers"])
    for name, parts in got.items():
        inputs, out = EQUATIONS[name].split("->")
        left, right = inputs.split(",")
        a, b, dw = adapters[name]["a"], adapters[name]["b"], plain["layers"][name]
        to_a, to_b = np.einsum(f"{out},{right}->{left}", dw, b), np.einsum(f"{left},{out}->{right}", a, dw)
        assert_same(parts, {"a": 2 * to_a, "b": 2 * to_b})
