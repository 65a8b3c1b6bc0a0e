"""Compare the bytes of an engine's buffers with the formulas in the docstrings.

    python -m experiments.engine.memory --output experiments/engine/memory.csv

tiny: the slots of a new engine on its device. qwen3_0p6b: shapes only, nothing is allocated.
The arithmetic is that of `models/cache.py` (KVCache), `drafts/recurrent/network.py` (DraftCache) and
`decoding/lookup_cache.py`.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from experiments import commands
from experiments.engine import bench
from specrl_jax.decoding.refill import empty_slots
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig, Prompts, Slots
from specrl_jax.drafts.base import DrafterConfig
from specrl_jax.drafts.eagle3 import network as eagle3
from specrl_jax.drafts.eagle3.draft import Eagle3Draft
from specrl_jax.models import qwen3
from specrl_jax.sharding import ROLLOUT, partitioner
from specrl_jax.training.inference_engine import InferenceConfig

FIELDS = ("preset", "dtype", "slots", "tokens", "buffer", "how", "bytes", "arithmetic")
# preset: (slots, prompt tokens, response tokens, dtype, whether buffers are made)
CASES = {
    "tiny": (128, bench.PROMPT_TOKENS, bench.RESPONSE_TOKENS, "float32", True),
    "qwen3_0p6b": (256, 512, 3584, "bfloat16", False),
}


def size(tree: Any) -> int:
    """Return the bytes of every shard on its device, or of the shapes if there are no arrays."""

    def leaf_bytes(leaf: Any) -> int:
        if isinstance(leaf, jax.Array):
            return sum(shard.data.on_device_size_in_bytes() for shard in leaf.addressable_shards)
        return leaf.size * leaf.dtype.itemsize

    return sum(map(leaf_bytes, jax.tree.leaves(tree)))


def buffers(slots: Slots, carried: Prompts) -> dict[str, Any]:
    """Return every array of an engine between two chunks, by name."""
    draft = slots.cache.draft
    return {
        "target keys and values": slots.cache.target,
        "draft hidden states": draft.hidden,
        "draft keys and values": draft.pages,
        "corpus": slots.lookup_cache,
        "tokens and log-probs": (slots.tokens, slots.logprobs),
        "who holds the pages": (slots.pool, slots.held, carried.held),
    }


def arithmetic(model: qwen3.Qwen3Config, limits: EngineConfig, dtype: str) -> dict[str, int]:
    """Return the bytes of the same buffers by the docstrings' formulas; cache and activations share one dtype."""
    S, K, H, C, P = limits.cache_length, model.kv_heads, model.head_dim, limits.shard_pages, limits.columns
    itemsize = jnp.dtype(dtype).itemsize
    target = 2 * model.layers * K * H * itemsize  # a token
    hidden, draft = model.embed * itemsize, 2 * K * H * itemsize
    tokens = C * limits.page_tokens
    return {
        "target keys and values": tokens * target,
        "draft hidden states": tokens * hidden,
        "draft keys and values": tokens * draft,
        "corpus": limits.groups * limits.sequences * (S + 1) * 4,
        "tokens and log-probs": limits.num_slots * S * 8,
        "who holds the pages": 4 * (2 * C + 1 + (limits.num_slots + 1) * (P + 2)),
    }


def measure(preset: str, limits: EngineConfig, dtype: str, allocate: bool) -> list[bench.Row]:
    model, partition = qwen3.preset(preset), partitioner(bench.one_device(), ROLLOUT)
    draft = Eagle3Draft(eagle3.eagle3_config(model, model.vocab))
    config = InferenceConfig(Sampling(), limits, 0, dtype=jnp.dtype(dtype), cache_dtype=jnp.dtype(dtype))
    drafter = draft.drafter(DrafterConfig(7, config.sampling, config.dtype, partition=partition))
    parts = bench.engine_parts(model, draft, drafter, config, bench.Stops((model.vocab,)), partition)
    make = functools.partial(empty_slots, parts, limits)
    found = buffers(*(jax.jit(make)() if allocate else jax.eval_shape(make)))
    expected = arithmetic(model, limits, dtype)
    common = {"preset": preset, "dtype": dtype, "slots": limits.num_slots, "tokens": limits.cache_length}
    how = "device" if allocate else "shapes"
    return [
        common | {"buffer": name, "how": how, "bytes": size(tree), "arithmetic": expected[name]}
        for name, tree in found.items()
    ]


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.add_argument("--output", default="experiments/engine/memory.csv")
    a = parser.parse_args()
    with bench.csv_writer(a.output, FIELDS) as write:
        for preset, (slots, prompt, response, dtype, allocate) in CASES.items():
            limits = EngineConfig(slots, prompt, response, chunk=16, groups=slots // 8 + 1, sequences=8 + 8)
            for row in measure(preset, limits, dtype, allocate):
                write(row)
                shown = f"{row['bytes']:>14,} bytes, {row['arithmetic']:>14,} by arithmetic ({row['how']})"
                print(f"{preset:<11} {slots} x {row['tokens']} {dtype:<9} {row['buffer']:<24} {shown}")


if __name__ == "__main__":
    sys.exit(commands.run(main))
