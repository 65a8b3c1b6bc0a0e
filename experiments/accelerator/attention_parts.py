"""Time the GPU's attention over pages by the parts of a row, the layers of a cell one after the other.

    python -m experiments.accelerator.attention_parts [--output FOLDER]     # 35 seconds on an H200, of Hopper alone

Writes attention_parts.csv: microseconds of a layer, and those of a copy of its keys and values. How many parts a row
has must not depend on the other rows, whose number changes while it is decoded: its bits would change with it.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.accelerator.parts import Row
from experiments.engine.bench import csv_writer
from experiments.kernels.run import FULL, ceilings
from kernels_pallas.attention import gpu
from specrl_jax.errors import fail

HEADS, KV_HEADS, HEAD_DIM, PAGE, QUERIES = 32, 8, 128, 64, 4  # of Qwen3-8B with three drafts
PARTS = (4, 8, 16, 32)
# Rows, live tokens of each, layers: whose keys and values together are more than the L2 cache holds.
CASES = ((1, 1024, 36), (1, 10_240, 16), (4, 10_240, 8), (8, 4096, 8), (32, 1024, 8), (32, 10_240, 2), (256, 1024, 2))
FIELDS = ("rows", "live", "parts", "copy_us", "us", "low", "high")
CALLS, ROUNDS = 64, 7  # layers of a timed call, at least; rounds, in turns


def make_case(rows: int, live: int, layers: int) -> tuple[jax.Array, ...]:
    """Return random queries, pages of all layers, the table of the first one, and positions."""
    pages = live // PAGE
    pool = jax.random.normal(jax.random.key(0), (layers * rows * pages, KV_HEADS, 2, PAGE, HEAD_DIM), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (rows, QUERIES, HEADS, HEAD_DIM), jnp.bfloat16)
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    positions = jnp.broadcast_to(live - QUERIES + jnp.arange(QUERIES, dtype=jnp.int32), (rows, QUERIES))
    return q, pool, table, positions


def compile_for(parts: int, layers: int, calls: int, case: tuple[jax.Array, ...]) -> Callable[..., jax.Array]:
    """Compile so many layers, one after the other, whose rows have `parts` parts."""

    def attend(q: jax.Array, pool: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
        def layer(i: jax.Array, q: jax.Array) -> jax.Array:
            found = gpu.attend(q, pool, table + jax.lax.rem(i, layers) * table.size, positions)
            return (0.5 * (q + found)).astype(q.dtype)

        return jax.lax.fori_loop(0, calls, layer, q)

    gpu.SPLITS = parts
    return jax.jit(attend).lower(*case).compile()


def time_case(rows: int, live: int, layers: int, copy: float) -> list[Row]:
    """Return a row for each number of parts; `copy`: bytes a second."""
    case, calls = make_case(rows, live, layers), layers * max(1, CALLS // layers)
    programs = {parts: compile_for(parts, layers, calls, case) for parts in PARTS}
    seconds: dict[int, list[float]] = {parts: [] for parts in PARTS}
    for i in range(1 + ROUNDS):
        for parts, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*case))
            if i:
                seconds[parts].append((time.perf_counter() - start) / calls)
    copied = 1e6 * 2 * 2 * KV_HEADS * HEAD_DIM * rows * live / copy
    return [
        {"rows": rows, "live": live, "parts": parts, "copy_us": round(copied, 2)}
        | {name: round(1e6 * float(f(found)), 2) for name, f in (("us", np.median), ("low", min), ("high", max))}
        for parts, found in seconds.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/accelerator", help="folder")
    folder = pathlib.Path(parser.parse_args().output)
    if jax.devices()[0].platform != "gpu":
        return fail("attention_parts: this machine has no GPU that jax finds")
    copy = ceilings(FULL)["copy_bytes_per_second"]
    folder.mkdir(parents=True, exist_ok=True)
    with csv_writer(str(folder / "attention_parts.csv"), FIELDS) as write:
        for case in CASES:
            for row in time_case(*case, copy):
                write(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
