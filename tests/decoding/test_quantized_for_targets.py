"""Quantised weights on an accelerator: an iteration reads them and writes none, compiled without a device."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from experiments.hlo.count import parse
from experiments.hlo.iteration import iteration_bytes
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DrafterConfig, DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.dry_run.phases import device_bytes
from specrl_jax.models import decoder
from specrl_jax.rollout.inference_engine import InferenceConfig, make_rollout_engine
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from tests.helpers import targets
from tests.helpers.abstract import inference_weights, policy_weights

WHOLE, BF16, B = decoder.preset("qwen3_8b"), jnp.dtype("bfloat16"), 32
SHALLOW = dataclasses.replace(WHOLE, layers=2)
LIMITS = EngineConfig(B, 512, 1536, chunk=64, prefill_rows=8, page_tokens=64)
# Numbers of a layer's q/k/v, o, and gate, up or down.
HEADS = (WHOLE.heads + 2 * WHOLE.kv_heads, WHOLE.heads)
MATRICES = {*(WHOLE.embed * WHOLE.head_dim * n for n in HEADS), WHOLE.embed * WHOLE.mlp}


@functools.cache
def partition():
    if not targets.installed("cuda"):
        pytest.skip("requirements-aot.txt is not installed")
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, targets.devices("cuda")[:1])
    return partitioner(mesh, ROLLOUT)


def read_bytes(model, quantize):
    """Bytes of the weights that an iteration reads: all but the embedding."""
    return device_bytes(policy_weights(model, BF16, partition(), quantize)) - 2 * model.vocab * model.embed


@functools.cache
def decode(quantize):
    """Return (text of the decode program of two layers, pages of its pool)."""
    config = InferenceConfig(Sampling(), LIMITS, 0, dtype=BF16, cache_dtype=BF16, compute_dtype=BF16, quantize=quantize)
    made = make_rollout_engine(
        SHALLOW, None, NO_DRAFTER, config=config, tokenizer=CharTokenizer(), partition=partition()
    )
    weights = inference_weights(SHALLOW, None, BF16, partition(), quantize)
    lowered = made.compiled.lower(Program("decode", B, 0), weights)
    return lowered.compile().as_text(), made.config.shard_pages


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_an_iteration_of_8b_reads_little_more_than_half(quantize):
    """Of all layers by sizes, and of two by their program: what the plain one moves less what is saved."""
    assert read_bytes(WHOLE, quantize) < 0.55 * read_bytes(WHOLE, "none")
    saved = read_bytes(SHALLOW, "none") - read_bytes(SHALLOW, quantize)
    plain, quantised = (iteration_bytes(*decode(kind)).fixed for kind in ("none", quantize))
    assert quantised < plain - 0.98 * saved


def wide_matrices(text):
    """The arrays of a weight's size in 16 or 32 bits that exist outside kernels."""
    computations, _ = parse(text)
    inside = set(re.findall(r"calls=%?([\w.\-]+)", text))
    types = [i.type for name, computation in computations.items() if name not in inside for i in computation.values()]
    arrays = {found for kind in types for found in re.findall(r"(bf16|f32)\[([\d,]+)\]", kind)}
    return {found for found in arrays if math.prod(map(int, found[1].split(","))) in MATRICES}


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_no_converted_weight_is_ever_written(quantize):
    assert wide_matrices(decode("none")[0]) and not wide_matrices(decode(quantize)[0])


@functools.cache
def twin_chunk(quantize, k=3):
    """Return (text of the program in which a twin of two layers drafts, pages of its pool, bytes of its weights)."""
    method = make_method(DraftOptions("self", quantize=quantize), SHALLOW)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), decoder.param_specs(SHALLOW))
    shapes = jax.eval_shape(lambda params: method.derived.make(params, BF16), params)
    shardings = partition().shardings(method.derived.specs)
    twin = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    config = InferenceConfig(Sampling(), LIMITS, 0, dtype=BF16, cache_dtype=BF16, compute_dtype=BF16)
    drafter = method.make_drafter(DrafterConfig(k, config.sampling, BF16, partition=partition()))
    made = make_rollout_engine(
        SHALLOW, None, drafter, config=config, tokenizer=CharTokenizer(), partition=partition(), lengths=(0, k)
    )
    weights = inference_weights(SHALLOW, None, BF16, partition())._replace(draft=twin)
    compiled = made.compiled.lower(Program("decode", B, k), weights).compile()
    return compiled.as_text(), made.config.shard_pages, device_bytes(twin)


@pytest.mark.slow
def test_each_draft_of_a_twin_reads_its_weights_in_four_bits():
    """Beside int8, three drafts save what three passes over the weights do."""
    (*eight, larger), (*four, smaller) = (twin_chunk(quantize) for quantize in ("int8", "int4"))
    saved = iteration_bytes(*eight).fixed - iteration_bytes(*four).fixed
    assert saved == pytest.approx(3 * (larger - smaller), rel=0.01)
    assert 2 * smaller == pytest.approx(larger, rel=0.01)
