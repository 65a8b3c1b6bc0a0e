"""Kernels per tile for NVIDIA GPUs, Hopper and newer: Pallas Mosaic GPU.

One warpgroup handles eight tiles of one row: it starts all their copies at once (TMA, 16 KiB in flight per block,
fourteen blocks per multiprocessor), then reduces each tile in registers, four logits per thread. Columns beyond the
vocabulary arrive as zeros and are masked.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.noise import HALF
from kernels_pallas.verify import tiles
from kernels_pallas.verify.sampling import TILE
from kernels_pallas.verify.tiles import ResidualTerms, Statistics, TileOptions
from kernels_pallas.verify.types import Noise

TILES = 8  # per block
ALIGNED = 4  # columns: TMA needs rows that begin at multiples of 16 bytes


def statistics(
    options: TileOptions,
    logits: jax.Array,
    temperature: jax.Array,
    outside: jax.Array | None = None,
    noise: Noise | None = None,
    interpret: object = None,
) -> Statistics:
    """Return `tiles.statistics` of every tile of every row.

    Reads 4 R V bytes. Noise takes about 75 integer operations per two logits, three times as long as an H200 takes to
    read them (132 x 64 operations a cycle against 2,400 bytes).

    Args:
      logits: [R, V] float32.
      temperature: [R] float32; 0: greedy.
      outside: [V] float32.
      noise: of R rows.
      interpret: parameters of Pallas's interpreter, on a machine without such a GPU.
    Returns:
      [R, T] each.
    """
    logits = _aligned(logits)
    R, blocks = len(logits), _blocks(options.V)
    arrays = tiles.arrays_read(temperature, noise, _padded(outside, blocks))
    n = len(options.results)

    def body(logits_ref: jax.Ref, lanes_ref: jax.Ref, *refs: jax.Ref) -> None:
        given, refs = dict(zip(arrays, refs)), refs[len(arrays) :]
        results, (buffer, barriers) = refs[:n], refs[n:]
        r, block = jax.lax.axis_index("row"), jax.lax.axis_index("block")
        _start_copies(options.V, block, [(logits_ref, r, buffer)], barriers)

        def reduce(i: jax.Array, start: jax.Array) -> None:
            columns = _columns(lanes_ref, start)
            found = tiles.statistics(
                options,
                [buffer[i, 0], buffer[i, 1]],
                given["temperature"][r],
                columns=columns,
                outside=[given["outside"][pl.ds(start + h * HALF, HALF)] for h in (0, 1)] if options.outside else None,
                noise=tiles.halves_of_noise(given["seed"][0], given["ids"][r], given["positions"][r], columns=columns)
                if options.noise
                else None,
                keepdims=False,
            )
            for result, value in zip(results, found, strict=True):
                result[r, block * TILES + i] = value

        _reduce_each(options.V, block, barriers, reduce)

    found = plgpu.kernel(
        body,
        out_type=tuple(options.shapes(R, blocks * TILES)),
        scratch_types=[plgpu.SMEM((TILES, 2, HALF), jnp.float32), plgpu.Barrier(num_arrivals=2, num_barriers=TILES)],
        grid=(R, blocks),
        grid_names=("row", "block"),
        interpret=interpret,
    )(logits, _lanes(), *arrays.values())
    return options.named(found)


def residual(
    options: TileOptions,
    target: jax.Array,
    row: jax.Array,
    draft: jax.Array,
    terms: ResidualTerms,
    interpret: object = None,
) -> jax.Array:
    """Return `tiles.residual` of every tile of selected rows. Reads 8 N V bytes.

    Args:
      target: [R, V] float32 raw logits.
      row: [N] int32, selected rows of `target`.
      draft: [N, V] float32 raw logits.
      terms: [N] each.
    Returns:
      [N, T] float32.
    """
    target, draft = _aligned(target), _aligned(draft)
    N, blocks = len(row), _blocks(options.V)
    per_row, structure = jax.tree.flatten(terms)

    def body(target_ref: jax.Ref, draft_ref: jax.Ref, lanes_ref: jax.Ref, row_ref: jax.Ref, *refs: jax.Ref) -> None:
        numbers, (result, x, d, barriers) = refs[: len(per_row)], refs[len(per_row) :]
        n, block = jax.lax.axis_index("row"), jax.lax.axis_index("block")
        _start_copies(options.V, block, [(target_ref, row_ref[n], x), (draft_ref, n, d)], barriers)

        def reduce(i: jax.Array, start: jax.Array) -> None:
            result[n, block * TILES + i] = tiles.residual(
                options,
                [x[i, 0], x[i, 1]],
                [d[i, 0], d[i, 1]],
                columns=_columns(lanes_ref, start),
                terms=jax.tree.unflatten(structure, [number[n] for number in numbers]),
                keepdims=False,
            )

        _reduce_each(options.V, block, barriers, reduce)

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


def _start_copies(
    V: int, block: jax.Array, sources: list[tuple[jax.Ref, jax.Array, jax.Ref]], barriers: jax.Ref
) -> None:
    """Start the copies of a block's tiles; each source is (matrix, its row, [TILES, 2, HALF] destination)."""
    for i in range(TILES):
        start = (block * TILES + i) * TILE

        @pl.when(start < V)
        def _(i: int = i, start: jax.Array = start) -> None:
            for matrix, row, buffer in sources:
                for h in (0, 1):
                    half = matrix.at[row, pl.ds(start + h * HALF, HALF)]
                    plgpu.copy_gmem_to_smem(half, buffer.at[i, h], barriers.at[i])


def _reduce_each(V: int, block: jax.Array, barriers: jax.Ref, reduce: Callable[[jax.Array, jax.Array], None]) -> None:
    """Call reduce(place in the block, first column) for each tile once its copy has arrived.

    A loop, not unrolled: the time of layout inference grows with the square of a kernel's length (jax 0.12).
    """

    @pl.loop(0, TILES)
    def _(i: jax.Array) -> None:
        start = (block * TILES + i) * TILE

        @pl.when(start < V)
        def _() -> None:
            plgpu.barrier_wait(barriers.at[i])
            reduce(i, start)


def _lanes() -> jax.Array:
    # Read from memory, lane numbers get the same layout as everything else read from memory.
    return jnp.arange(HALF, dtype=jnp.int32)


def _columns(lanes_ref: jax.Ref, start: jax.Array) -> list[jax.Array]:
    lanes = lanes_ref[...]
    return [lanes + start, lanes + (start + HALF)]


def _blocks(V: int) -> int:
    return -(-V // (TILE * TILES))


def _padded(outside: jax.Array | None, blocks: int) -> jax.Array | None:
    return None if outside is None else jnp.pad(outside, (0, blocks * TILES * TILE - len(outside)))


def _aligned(matrix: jax.Array) -> jax.Array:
    """Pad columns. Copies only unusual vocabularies: all published ones are multiples of 64."""
    return jnp.pad(matrix, ((0, 0), (0, -matrix.shape[1] % ALIGNED)))
