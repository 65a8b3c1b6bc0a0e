"""Quantised weights: their error, and the forward pass and the rollouts with them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax import Config, validate
from specrl_jax.errors import InputError
from specrl_jax.models.layers import matmul
from specrl_jax.models.quantized import FORMATS, quantize

W = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32) * np.array([[1, 10, 0.1, 3, 0, 1e-4]], np.float32)


@pytest.mark.parametrize("kind, step", [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_rounded_to_the_nearest_by_channel(kind, step):
    """int8 errs by half a step of the largest, fp8 (3 bits) by 2^-4 of the number itself."""
    q = quantize(jnp.asarray(W), (0,), kind, dtype=jnp.float32)
    assert q.values.dtype == FORMATS[kind][0] and q.scale.shape == (1, 6)
    error = np.abs(np.asarray(q.values, np.float32) * np.asarray(q.scale) - W)
    assert (error <= 1.001 * step * np.abs(W).max(axis=0)).all()


def test_the_scale_is_a_factor_of_the_product():
    """Of a batched product, too, where the result has an axis that the weight has not."""
    x, w = (
        np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate([(2, 5, 8), (2, 8, 3)])
    )
    q = quantize(jnp.asarray(w), (1,), "int8", dtype=jnp.float32)
    exact = np.einsum("JMD,JDF->JMF", x, np.asarray(q.values, np.float32) * np.asarray(q.scale))
    np.testing.assert_allclose(matmul("JMD,JDF->JMF", jnp.asarray(x), q), exact, rtol=0, atol=1e-5)


def test_training_without_a_correction_is_refused():
    config = Config(task="train")
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, quantize="int8"))
    with pytest.raises(InputError, match=r"grpo\.correction=none.*rollout\.quantize=int8"):
        validate(config)
    validate(dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, correction="token_truncate")))
