"""Measure memory and time of token log-probs, forward and backward, from hidden states and the LM head.

    python -m experiments.unembedding.memory --output experiments/unembedding/memory.csv

Qwen3-0.6B's sizes by default: D = 1,024, V = 151,936, 8,192 tokens. `temporary` is what the compiled program allocates
beside its arguments and results, `largest` its largest buffer, both read from the program; `peak` is the growth of the
process's resident memory over a run, and `seconds` is the time of that run. Tile 0 is the whole vocabulary at once (the
full logits), which is only compiled unless --run-whole.
"""

import math
import re
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from experiments.engine import bench
from specrl_jax.models.lm_head import token_scores
from specrl_jax.models.vocab_tiles import Tiling
from specrl_jax.sharding import LEARNER, partitioner

FIELDS = ("tokens", "vocab", "embed", "tile", "temporary", "largest", "logits", "peak", "seconds")
# Bytes of an element; ru_maxrss counts KiB.
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}


def compile_gradient(tokens: int, vocab: int, embed: int, tile: int) -> Any:
    """Compile the gradient of the summed log-probs with respect to hidden states and table, both float32."""
    tiling = Tiling(tile, 1.0, partitioner(bench.one_device(), LEARNER))

    def loss(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
        return -token_scores(hidden, table, targets, tiling).logprobs.mean()

    shapes = [((1, tokens, embed), jnp.float32), ((vocab, embed), jnp.float32), ((1, tokens), jnp.int32)]
    return (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        .lower(*[jax.ShapeDtypeStruct(*shape) for shape in shapes])
        .compile()
    )


def largest_buffer(text: str) -> int:
    """Return the bytes of the largest array named in the text of an optimised program."""
    found = re.findall(r"\b(f32|s32|u32|bf16|pred)\[([\d,]+)\]", text)
    return max(BYTES[kind] * math.prod(map(int, shape.split(","))) for kind, shape in found)


def run(compiled: Any, tokens: int, vocab: int, embed: int) -> bench.Row:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, tokens, embed)).astype(np.float32))
    table = jnp.asarray(rng.standard_normal((vocab, embed), np.float32) / embed**0.5)
    targets = jnp.asarray(rng.integers(0, vocab, (1, tokens)).astype(np.int32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    jax.block_until_ready(compiled(hidden, table, targets))
    seconds = round(time.perf_counter() - start, 2)
    return {"peak": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), "seconds": seconds}


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        tokens=(8192, 64),
        vocab=(151_936, 256),
        embed=(1024, 16),
        tiles=([4096, 16_384, 0], [64], "vocabulary entries per tile"),
    )
    parser.add_argument("--run-whole", action="store_true")
    parser.add_argument("--output", default="experiments/unembedding/memory.csv")
    a = parser.parse_args()
    sizes = {"tokens": a.tokens, "vocab": a.vocab, "embed": a.embed}
    with bench.csv_writer(a.output, FIELDS) as write:
        for tile in a.tiles:
            compiled = compile_gradient(**sizes, tile=tile)
            memory = compiled.memory_analysis()
            assert memory is not None
            row = sizes | {"tile": tile, "temporary": memory.temp_size_in_bytes}
            row |= {"largest": largest_buffer(compiled.as_text()), "logits": 4 * a.tokens * a.vocab}
            if tile or a.run_whole:
                row |= run(compiled, **sizes)
            write(row)
            print(", ".join(f"{name} {row[name]}" for name in FIELDS if name in row), flush=True)


if __name__ == "__main__":
    sys.exit(commands.run(main))
