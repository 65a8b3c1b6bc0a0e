"""The tiles' kernels on an NVIDIA GPU, Hopper and newer: Pallas Mosaic GPU.

One warpgroup goes over eight tiles of one row: all are asked for at once (TMA, 16 KiB in flight a block, fourteen
blocks a multiprocessor), then each is reduced in registers, four logits a thread. Columns beyond the vocabulary arrive
as zeros and are masked.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.noise import HALF
from kernels_pallas.verify import tiles
from kernels_pallas.verify.sampling import TILE
from kernels_pallas.verify.tiles import Options, Statistics

TILES = 8  # of a block
ALIGNED = 4  # columns: TMA wants rows to begin at multiples of 16 bytes


def statistics(
    options: Options,
    logits: jax.Array,
    cut: jax.Array | None = None,
    outside: jax.Array | None = None,
    noise: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    interpret: Any = None,
) -> Statistics:
    """Of every tile of every row; see `tiles.statistics`.

    Reads 4 R V bytes. With noise about 75 integer operations for two logits, three times what an H200 does while it
    reads them (132 x 64 a cycle against 2,400 bytes).

    Args:
      logits: [R, V] float32.
      cut: [R] float32.
      outside: [V] float32.
      noise: seed [] uint32, rollout_id [R] uint32, position [R] int32.
      interpret: parameters of the interpreter, on a machine without such a GPU.
    Returns:
      [R, T] each.
    """
    logits = _aligned(logits)
    R, blocks = len(logits), _blocks(options.V)
    asked = {
        "cut": cut,
        "ids": noise and noise[1],
        "positions": noise and noise[2].astype(jnp.uint32),
        "seed": noise and noise[0].astype(jnp.uint32).reshape(1),
        "outside": _padded(outside, blocks),
    }
    arrays = {name: x for name, x in asked.items() if x is not None}
    n = len(options.results)

    def body(logits_ref: Any, lanes_ref: Any, *refs: Any) -> None:
        given, refs = dict(zip(arrays, refs)), refs[len(arrays) :]
        results, (buffer, barriers) = refs[:n], refs[n:]
        r, block = jax.lax.axis_index("row"), jax.lax.axis_index("block")
        _ask(options.V, block, [(logits_ref, r, buffer)], barriers)

        def reduce(i: jax.Array, start: jax.Array) -> None:
            columns = _columns(lanes_ref, start)
            found = tiles.statistics(
                options,
                [buffer[i, 0], buffer[i, 1]],
                columns,
                given["cut"][r] if options.cut else None,
                [given["outside"][pl.ds(start + h * HALF, HALF)] for h in (0, 1)] if options.outside else None,
                tiles.halves_of_noise(given["seed"][0], given["ids"][r], given["positions"][r], columns)
                if options.noise
                else None,
                keepdims=False,
            )
            for result, value in zip(results, found, strict=True):
                result[r, block * TILES + i] = value

        _each(options.V, block, barriers, reduce)

    found = plgpu.kernel(
        body,
        out_type=tuple(options.shapes(R, blocks * TILES)),
        scratch_types=[
            plgpu.SMEM((TILES, 2, HALF), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=TILES),
        ],
        grid=(R, blocks),
        grid_names=("row", "block"),
        interpret=interpret,
    )(logits, _lanes(), *arrays.values())
    return options.named(found)


def excess(
    options: Options,
    target: jax.Array,
    row: jax.Array,
    draft: jax.Array,
    scale: jax.Array,
    p_norm: jax.Array,
    q_norm: jax.Array,
    cut: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Of every tile of some rows; see `tiles.excess`. Reads 8 N V bytes.

    Args:
      target: [R, V] float32 raw logits.
      row: [N] int32, rows of it.
      draft: [N, V] float32 raw logits.
      scale, p_norm, q_norm, cut: [N] float32.
    Returns:
      [N, T] float32.
    """
    target, draft = _aligned(target), _aligned(draft)
    N, blocks = len(row), _blocks(options.V)
    per_row = [scale, p_norm, q_norm, *([cut] if options.cut else [])]

    def body(target_ref: Any, draft_ref: Any, lanes_ref: Any, row_ref: Any, *refs: Any) -> None:
        numbers, (result, x, d, barriers) = refs[: len(per_row)], refs[len(per_row) :]
        n, block = jax.lax.axis_index("row"), jax.lax.axis_index("block")
        _ask(options.V, block, [(target_ref, row_ref[n], x), (draft_ref, n, d)], barriers)

        def reduce(i: jax.Array, start: jax.Array) -> None:
            values = [number[n] for number in numbers]
            result[n, block * TILES + i] = tiles.excess(
                options,
                [x[i, 0], x[i, 1]],
                [d[i, 0], d[i, 1]],
                _columns(lanes_ref, start),
                values[3] if options.cut else None,
                *values[:3],
                keepdims=False,
            )

        _each(options.V, block, barriers, reduce)

    buffer = functools.partial(plgpu.SMEM, (TILES, 2, HALF), jnp.float32)
    found = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((N, blocks * TILES), jnp.float32),
        scratch_types=[buffer(), buffer(), plgpu.Barrier(num_arrivals=4, num_barriers=TILES)],
        grid=(N, blocks),
        grid_names=("row", "block"),
        interpret=interpret,
    )(target, draft, _lanes(), row, *per_row)
    return found[:, : -(-options.V // TILE)]


def _ask(V: int, block: jax.Array, sources: list[tuple[Any, jax.Array, Any]], barriers: Any) -> None:
    """Begins the copies of a block's tiles: (matrix, row of it, [TILES, 2, HALF] to copy to) each."""
    for i in range(TILES):
        start = (block * TILES + i) * TILE

        @pl.when(start < V)
        def _(i: int = i, start: jax.Array = start) -> None:
            for matrix, row, buffer in sources:
                for h in (0, 1):
                    half = matrix.at[row, pl.ds(start + h * HALF, HALF)]
                    plgpu.copy_gmem_to_smem(half, buffer.at[i, h], barriers.at[i])


def _each(V: int, block: jax.Array, barriers: Any, reduce: Any) -> None:
    """Calls `reduce` (place in the block, first column) for each tile once it is there.

    A loop, not unrolled: how long layouts take to be inferred grows with the square of a kernel's length (jax 0.12).
    """

    @pl.loop(0, TILES)
    def _(i: jax.Array) -> None:
        start = (block * TILES + i) * TILE

        @pl.when(start < V)
        def _() -> None:
            plgpu.barrier_wait(barriers.at[i])
            reduce(i, start)


def _lanes() -> jax.Array:
    # Read from memory, they have the layout of everything else that is.
    return jnp.arange(HALF, dtype=jnp.int32)


def _columns(lanes_ref: Any, start: jax.Array) -> list[jax.Array]:
    lanes = lanes_ref[...]
    return [lanes + start, lanes + (start + HALF)]


def _blocks(V: int) -> int:
    return -(-V // (TILE * TILES))


def _padded(outside: jax.Array | None, blocks: int) -> jax.Array | None:
    return None if outside is None else jnp.pad(outside, (0, blocks * TILES * TILE - len(outside)))


def _aligned(matrix: jax.Array) -> jax.Array:
    """A copy for vocabularies that no one has: all published ones are multiples of 64."""
    return jnp.pad(matrix, ((0, 0), (0, -matrix.shape[1] % ALIGNED)))
