"""Experts on accelerators: chosen ones are read once, where they lie; Qwen3-30B-A3B compiled without a device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from experiments.hlo.iteration import iteration_bytes
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.models import decoder
from specrl_jax.models.grouped import LARGEST, MOST_COPIES, by_ragged_dot
from specrl_jax.rollout.inference_engine import InferenceConfig, make_rollout_engine
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from tests.helpers import targets
from tests.helpers.abstract import inference_weights

pytestmark = pytest.mark.slow

MODEL, BF16 = decoder.preset("qwen3_30b_a3b"), jnp.dtype("bfloat16")
D, F = MODEL.embed, MODEL.mlp


def expert_bytes(quantize="none"):
    """Bytes of one expert of a layer; of 8-bit ones with their scales."""
    return 3 * D * F * 2 if quantize == "none" else 3 * D * F + 2 * (2 * F + D)


def rest_bytes(quantize="none"):
    """Bytes of what else a layer has: the router, and query, key, value and output matrices."""
    return 2 * D * MODEL.experts + 2 * D * (MODEL.heads + MODEL.kv_heads) * MODEL.head_dim * (
        1 if quantize != "none" else 2
    )


@functools.cache
def compiled(kind, B, layers, quantize="none"):
    """Return (program, pages of its pool)."""
    if not targets.installed("cuda"):
        pytest.skip("requirements-aot.txt is not installed")
    partition = partitioner(make_mesh({"tensor": 1}, targets.devices("cuda")[:1]), ROLLOUT)
    limits = EngineConfig(B, 512, 1536, chunk=64, sizes=(8,), prefill_rows=8, page_tokens=64, prefill_tokens=512)
    model = dataclasses.replace(MODEL, layers=layers)
    config = InferenceConfig(Sampling(), limits, 0, dtype=BF16, cache_dtype=BF16, compute_dtype=BF16, quantize=quantize)
    made = make_rollout_engine(model, None, NO_DRAFTER, config=config, tokenizer=CharTokenizer(), partition=partition)
    weights = inference_weights(model, None, BF16, partition, quantize)
    return made.compiled.lower(Program(kind, B, 0), weights).compile(), made.config.shard_pages


def iterations(B, quantize="none"):
    """Return what an iteration of one and of two layers moves, without live pages."""
    found = [compiled("decode", B, layers, quantize) for layers in (1, 2)]
    return [iteration_bytes(program.as_text(), pages) for program, pages in found]


def layer(B, quantize="none"):
    """Return what a layer adds to an iteration: (bytes, kernels)."""
    one, two = iterations(B, quantize)
    assert not one.blocks and not two.blocks  # no loop in the loop
    return two.fixed - one.fixed, two.kernels - one.kernels


def needed(B, quantize="none"):
    return min(MODEL.experts, B * MODEL.experts_per_token) * expert_bytes(quantize) + rest_bytes(quantize)


@pytest.mark.parametrize("B", [8, 128])
def test_a_layer_reads_each_chosen_expert_once(B):
    """Each row chooses 8 of 128: together 64 at most, or all. Reading each twice would be nearly twice as much."""
    assert needed(B) < layer(B)[0] < 1.2 * needed(B)


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_experts_in_8_bits_save_what_they_are_smaller(quantize):
    assert layer(128, quantize)[0] < layer(128)[0] - 0.97 * (needed(128) - needed(128, quantize))


def test_a_layer_takes_few_kernels():
    """Of the experts five of router and top-k, six that lay out the tiles, a gather, the kernel's two, and the sum."""
    assert layer(128)[1] <= 25


@pytest.mark.parametrize("kind", ["decode", "refill"])
def test_no_expert_is_copied(kind):
    """Temporaries of two layers hold logits, of a prompt's piece the rows of one call, and little more."""
    program, _ = compiled(kind, 128, 2)
    rows = MOST_COPIES + MODEL.experts * LARGEST if kind == "refill" else 0
    # The rows, their results in float32, and between them the hidden ones.
    expected = 4 * 128 * MODEL.vocab + rows * (6 * D + 2 * F)
    assert "/grouped_matmul/" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < expected + 0.1 * MODEL.experts * expert_bytes()


def test_a_tpu_copies_no_expert():
    """Its compiler makes kernels of `ragged_dot`; copies for tiles or products with all would be as large as these."""
    if not targets.installed("tpu"):
        pytest.skip("requirements-aot.txt is not installed")
    B, E, k = 128, MODEL.experts, MODEL.experts_per_token

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    w = {"gate": of(BF16, E, D, F), "up": of(BF16, E, D, F), "down": of(BF16, E, F, D)}
    given = of(BF16, B, D), of(jnp.float32, B, k), of(jnp.int32, B, k), w
    found = targets.compiled("tpu", lambda *given: by_ragged_dot(*given, E), *given).memory_analysis()
    assert found.temp_size_in_bytes < 0.02 * E * expert_bytes()
