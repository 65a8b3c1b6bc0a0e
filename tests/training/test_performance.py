"""Operations against counts by hand and by the compiler, and what is made of them."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.flops import PEAK_FLOPS, forward_flops, matmul_weights, peak_flops
from specrl_jax.models.layers import abstract_params, count_params
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from specrl_jax.training.performance import Performance


def test_products_are_the_weights_but_for_norms_and_the_embedding():
    for name in ("nano", "tiny", "qwen3_8b"):
        c = decoder.preset(name)
        norms = c.layers * (2 * c.embed + 2 * c.head_dim) + c.embed
        embedding = 0 if c.tied else c.vocab * c.embed
        assert matmul_weights(c) == count_params(decoder.param_specs(c)) - norms - embedding


def test_a_mixture_counts_the_experts_that_a_token_sees():
    """Qwen3-30B-A3B is named for its 30.5 and 3.3 billion weights (its card); the embedding is not multiplied with."""
    c = decoder.preset("qwen3_30b_a3b")
    assert matmul_weights(c) + c.vocab * c.embed == pytest.approx(3.3e9, rel=0.02)


def test_operations_are_those_that_the_compiler_counts():
    c, (B, T) = decoder.preset("nano"), (2, 64)
    partition = partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]), LEARNER)
    specs = decoder.param_specs(c)
    # Layers one by one: the compiler counts the body of a scan once.
    params = abstract_params(decoder.inference_specs(c), jnp.float32, partition.shardings(decoder.inference_specs(c)))
    shape = kv.PageShape(B * T // 8, 8, jnp.dtype(jnp.float32), platform=jax.default_backend())
    cache = jax.eval_shape(lambda: kv.init_cache(c.layers, c.kv_heads, c.head_dim, shape=shape))
    tokens, rows = (jax.ShapeDtypeStruct((B, width), jnp.int32) for width in (T, T // 8))

    def decode(params, tokens, positions, cache, table):
        return decoder.forward(
            params, c, decoder.ModelInputs(tokens, positions), partition=partition, cache=cache, table=table
        ).logits

    compiled = jax.jit(decode).lower(params, tokens, tokens, cache, kv.Table(rows, rows)).compile()
    # Every query reads all T keys of its row's pages there, masked or not; the rest is element by element.
    expected = forward_flops(c, B * T, B * T * T)
    assert compiled.cost_analysis()["flops"] == pytest.approx(expected, rel=0.1)
    assert count_params(specs) > 0


def test_utilisation_is_operations_over_time_and_ceiling():
    c = decoder.preset("nano")
    rollouts = types.SimpleNamespace(prompt_length=np.array([3, 5]), length=np.array([10, 25]))
    trained = types.SimpleNamespace(prompt_length=np.array([5]), length=np.array([25]))
    learners = (jax.devices()[0],) * 4
    performance = Performance(c, learners, learners, peak=1e9, scored=2, epochs=3)
    row = performance.metrics(rollouts, trained, {"generate": 2.0, "logprob": 0.5, "train": 1.0}, total=4.0)
    whole = forward_flops(c, 35, (100 + 625) / 2)
    kept = forward_flops(c, 25, 625 / 2)
    assert row["perf/mfu_train"] == pytest.approx(9 * kept / 4e9)
    assert row["perf/mfu_logprob"] == pytest.approx(2 * kept / 0.5 / 4e9)
    assert row["perf/mfu_generate"] == pytest.approx((whole - forward_flops(c, 8, (9 + 25) / 2)) / 2.0 / 4e9)
    assert row["perf/tokens_per_second_per_device"] == 35 / 4 / 4
    assert 0.01 < row["perf/host_memory"] < 1000
    # Twelve devices that only generate, of all processes, four of them here.
    elsewhere = dataclasses.replace(performance, rollout_devices=12).metrics(
        rollouts, trained, {"generate": 2.0, "logprob": 0.5, "train": 1.0}, total=4.0
    )
    assert elsewhere["perf/mfu_generate"] == pytest.approx(row["perf/mfu_generate"] / 3)
    assert elsewhere["perf/mfu_train"] == row["perf/mfu_train"]
    assert elsewhere["perf/tokens_per_second_per_device"] == 35 / 4 / 16


def test_a_known_device_has_its_data_sheets_peak_and_another_one_is_measured():
    class Known:
        device_kind = "NVIDIA H200 141GB"

    assert peak_flops(Known(), jnp.float32) == PEAK_FLOPS["NVIDIA H200"]
    assert 1e8 < peak_flops(jax.devices()[0], jnp.float32) < 1e14
