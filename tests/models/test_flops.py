"""Weights and bytes against the models' parameter specs (FLOPs: tests/training/test_performance.py)."""

import dataclasses

import pytest

from specrl_jax.models import decoder
from specrl_jax.models.flops import matmul_weights, parameters, twin_bytes, weight_bytes
from specrl_jax.models.layers import count_params

NANO = decoder.preset("nano")
MIXTURE = dataclasses.replace(NANO, experts=8, experts_per_token=2)


@pytest.mark.parametrize("model", [NANO, decoder.preset("qwen3_8b"), decoder.preset("qwen3_235b_a22b"), MIXTURE])
def test_parameters_equal_the_models_specs(model):
    norms = model.layers * (2 * model.embed + 2 * model.head_dim) + model.embed
    assert parameters(model) == count_params(decoder.param_specs(model)) - norms


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b"])
def test_quantised_weights_by_hand(name):
    """The layers' matrices take a byte; tables and routers keep bfloat16."""
    policy = decoder.preset(name)
    total = parameters(policy)
    kept = 2 * policy.vocab * policy.embed + policy.layers * policy.embed * policy.experts
    assert weight_bytes(policy, "bfloat16", "fp8") == total + kept
    assert weight_bytes(policy, "bfloat16", "none") == 2 * total


def test_a_twin_has_matrices_and_an_lm_head_of_its_own():
    policy = decoder.preset("qwen3_8b")  # dense: no routers
    assert twin_bytes(policy, "int4") == matmul_weights(policy) / 2 and twin_bytes(policy, "none") == 0
