"""The bytes of an engine's buffers are those of the docstrings' formulas.

These are in models/cache.py (KVCache), drafts/head.py (HeadCache) and decoding/lookup_cache.py.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from experiments.engine import bench
from specrl_jax.decoding.refill import empty_slots
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts import eagle3
from specrl_jax.drafts.base import DrafterConfig
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.models import decoder
from specrl_jax.rollout.inference_engine import InferenceConfig
from specrl_jax.sharding import ROLLOUT, partitioner


def size(tree):
    """Return the bytes of every shard on its device, or of the shapes if there are no arrays."""

    def leaf_bytes(leaf):
        if isinstance(leaf, jax.Array):
            return sum(shard.data.on_device_size_in_bytes() for shard in leaf.addressable_shards)
        return leaf.size * leaf.dtype.itemsize

    return sum(map(leaf_bytes, jax.tree.leaves(tree)))


def buffers(slots, carried):
    """Return every array of an engine between two chunks, by name."""
    draft = slots.cache.draft
    return {
        "target keys and values": slots.cache.target,
        "draft hidden states": draft.hidden,
        "draft keys and values": draft.layers,
        "corpus": slots.lookup_cache,
        "tokens and log-probs": (slots.tokens, slots.logprobs),
        "who holds the pages": (slots.pool, slots.held, carried.held),
    }


def arithmetic(model, limits, dtype):
    """Return the bytes of the same buffers by the docstrings' formulas; cache and activations share one dtype."""
    S, K, H, C, P = limits.cache_length, model.kv_heads, model.head_dim, limits.shard_pages, limits.columns
    itemsize = jnp.dtype(dtype).itemsize
    tokens = C * limits.page_tokens
    return {
        "target keys and values": tokens * 2 * model.layers * K * H * itemsize,
        "draft hidden states": tokens * model.embed * itemsize,
        "draft keys and values": tokens * 2 * K * H * itemsize,
        "corpus": limits.groups * limits.sequences * (S + 1) * 4,
        "tokens and log-probs": limits.num_slots * S * 8,
        "who holds the pages": 4 * (2 * C + 1 + (limits.num_slots + 1) * (P + 2)),
    }


TINY = EngineConfig(128, bench.PROMPT_TOKENS, bench.RESPONSE_TOKENS, chunk=16, groups=17, sequences=16)
SMALL = EngineConfig(4, 6, 10, chunk=4, groups=2, sequences=3)


@pytest.mark.parametrize(
    ("preset", "limits", "dtype", "allocate"),
    [
        ("nano_deep", SMALL, "bfloat16", True),
        ("nano_deep", SMALL, "bfloat16", False),
        ("tiny", TINY, "float32", True),
        ("qwen3_0p6b", EngineConfig(256, 512, 3584, chunk=16, groups=33, sequences=16), "bfloat16", False),
    ],
)
def test_buffers_have_the_bytes_of_the_docstrings(preset, limits, dtype, allocate):
    """On their device, or of the shapes alone."""
    model, partition, kind = decoder.preset(preset), partitioner(bench.one_device(), ROLLOUT), jnp.dtype(dtype)
    draft = Eagle3Draft(eagle3.eagle3_config(model, model.vocab))
    config = InferenceConfig(Sampling(), limits, 0, dtype=kind, cache_dtype=kind)
    drafter = draft.drafter(DrafterConfig(7, config.sampling, config.dtype, partition=partition))
    parts = bench.engine_parts(model, draft, drafter, config, bench.Stops((model.vocab,)), partition)
    make = functools.partial(empty_slots, parts, limits)
    found = buffers(*(jax.jit(make)() if allocate else jax.eval_shape(make)))
    assert {name: size(tree) for name, tree in found.items()} == arithmetic(model, limits, dtype)
    assert all(map(size, found.values()))
