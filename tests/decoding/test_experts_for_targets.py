"""Experts on a GPU: each chosen one is read once, where it lies; two layers of Qwen3-30B-A3B, without a device."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.compiled import Program
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.dry_run.iteration import iteration_bytes
from specrl_jax.models import qwen3
from specrl_jax.models.grouped import LARGEST, MOST_COPIES
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from specrl_jax.training.rollouts import InferenceConfig, make_rollout_engine
from tests.helpers import targets
from tests.helpers.abstract import inference_weights

pytestmark = pytest.mark.slow

MODEL, BF16 = qwen3.preset("qwen3_30b_a3b"), jnp.dtype("bfloat16")
EXPERT = 3 * 2 * MODEL.embed * MODEL.mlp  # bytes
# Bytes of what else a layer has: query, key, value and output matrices, and the router.
REST = 2 * MODEL.embed * (2 * (MODEL.heads + MODEL.kv_heads) * MODEL.head_dim + MODEL.experts)


@functools.cache
def compiled(kind, B, layers):
    """Return (program, pages of its pool)."""
    if not targets.installed("cuda"):
        pytest.skip("requirements-aot.txt is not installed")
    partition = partitioner(make_mesh({"tensor": 1}, targets.devices("cuda")[:1]), ROLLOUT)
    limits = EngineConfig(B, 512, 1536, 64, sizes=(8,), prefill_rows=8, page_tokens=64, prefill_tokens=512)
    model = dataclasses.replace(MODEL, layers=layers)
    config = InferenceConfig(Sampling(), limits, 0, BF16, BF16, BF16)
    made = make_rollout_engine(model, None, NO_DRAFTER, config, CharTokenizer(), partition)
    weights = inference_weights(model, None, BF16, partition)
    return made.compiled.lower(Program(kind, B, 0), weights).compile(), made.config.shard_pages


def iterations(B):
    """Return what an iteration of one and of two layers moves, without live pages."""
    found = [compiled("decode", B, layers) for layers in (1, 2)]
    return [iteration_bytes(program.as_text(), pages) for program, pages in found]


@pytest.mark.parametrize("B", [8, 128])
def test_a_layer_reads_each_chosen_expert_once(B):
    """Each row chooses 8 of 128: together 64 at most, or all. One read more of each would be 1.5 or twice as much."""
    one, two = iterations(B)
    assert not one.blocks and not two.blocks  # no loop in the loop
    needed = min(MODEL.experts, B * MODEL.experts_per_token) * EXPERT + REST
    assert needed < two.fixed - one.fixed < 1.2 * needed


def test_a_layer_takes_few_kernels():
    """Of the experts five of router and top-k, six that lay out the tiles, a gather, the kernel's two, and the sum."""
    one, two = iterations(128)
    assert two.kernels - one.kernels <= 28


@pytest.mark.parametrize("kind", ["decode", "refill"])
def test_no_expert_is_copied(kind):
    """Temporaries of two layers hold logits, of a prompt's piece the rows of one call, and little more."""
    program, _ = compiled(kind, 128, 2)
    rows = MOST_COPIES + MODEL.experts * LARGEST if kind == "refill" else 0
    # The rows, their results in float32, and between them the hidden ones.
    expected = 4 * 128 * MODEL.vocab + rows * (6 * MODEL.embed + 2 * MODEL.mlp)
    assert "/grouped_matmul/" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < expected + 0.1 * MODEL.experts * EXPERT
