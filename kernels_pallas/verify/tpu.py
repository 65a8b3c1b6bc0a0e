"""Kernels per tile for TPUs: Pallas Mosaic TPU.

A block is eight rows of up to 128 tiles, 2 MiB, so that its results are one [8, 128] register tile. Columns beyond the
vocabulary and rows beyond the last hold arbitrary values: the columns are masked, the rows never written.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.noise import HALF
from kernels_pallas.verify import tiles
from kernels_pallas.verify.sampling import TILE
from kernels_pallas.verify.tiles import ResidualTerms, Statistics, TileOptions
from kernels_pallas.verify.types import Noise

ROWS, MOST_TILES = 8, 128  # per block


def statistics(
    options: TileOptions,
    logits: jax.Array,
    temperature: jax.Array,
    outside: jax.Array | None = None,
    noise: Noise | None = None,
    interpret: object = False,
) -> Statistics:
    """Compute as `gpu.statistics` does."""
    R, (blocks, n) = len(logits), _blocks(options.V)
    arrays = tiles.arrays_read(temperature, noise, outside)
    row = {name: arrays.pop(name).reshape(1, -1) for name in ("seed", "outside") if name in arrays}
    column = {name: x[:, None] for name, x in arrays.items()}
    specs = [_block(n), *(pl.BlockSpec((ROWS, 1), lambda r, b: (r, 0)) for _ in column)]
    specs += [pl.BlockSpec((1, 1), lambda r, b: (0, 0)) if name == "seed" else _block(n, 1) for name in row]
    names, shapes = [*column, *row], options.shapes(R, blocks * n)

    def body(logits_ref: jax.Ref, *refs: jax.Ref) -> None:
        given, results = dict(zip(names, refs)), refs[len(names) :]
        per_row = {name: given[name][...] for name in ("temperature", "ids", "positions", "seed") if name in given}

        def reduce(i: jax.Array, columns: list[jax.Array]) -> tuple[jax.Array, ...]:
            return tiles.statistics(
                options,
                _halves(logits_ref, i),
                per_row["temperature"],
                columns=columns,
                outside=_halves(given["outside"], i) if options.outside else None,
                noise=tiles.halves_of_noise(per_row["seed"], per_row["ids"], per_row["positions"], columns=columns)
                if options.noise
                else None,
                keepdims=True,
            )

        _reduce_each([shape.dtype for shape in shapes], results, n, reduce)

    found = pl.pallas_call(
        body,
        out_shape=shapes,
        grid=(-(-R // ROWS), blocks),
        in_specs=specs,
        out_specs=[_results(n)] * len(options.results),
        interpret=interpret,
    )(logits, *column.values(), *row.values())
    return options.named(found)


def residual(
    options: TileOptions,
    target: jax.Array,
    row: jax.Array,
    draft: jax.Array,
    terms: ResidualTerms,
    interpret: object = False,
) -> jax.Array:
    """Compute as `gpu.residual` does, after one copy of the selected rows: a block is eight consecutive rows."""
    N, (blocks, n) = len(row), _blocks(options.V)
    per_row, structure = jax.tree.flatten(terms)

    def body(target_ref: jax.Ref, draft_ref: jax.Ref, *refs: jax.Ref) -> None:
        values = jax.tree.unflatten(structure, [ref[...] for ref in refs[: len(per_row)]])

        def reduce(i: jax.Array, columns: list[jax.Array]) -> tuple[jax.Array]:
            found = tiles.residual(
                options, _halves(target_ref, i), _halves(draft_ref, i), columns=columns, terms=values, keepdims=True
            )
            return (found,)

        _reduce_each([jnp.float32], refs[len(per_row) :], n, reduce)

    found = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((N, blocks * n), jnp.float32),
        grid=(-(-N // ROWS), blocks),
        in_specs=[_block(n), _block(n), *(pl.BlockSpec((ROWS, 1), lambda r, b: (r, 0)) for _ in per_row)],
        out_specs=_results(n),
        interpret=interpret,
    )(target[row], draft, *(x[:, None] for x in per_row))
    return found[:, : -(-options.V // TILE)]


def _reduce_each(
    dtypes: Sequence[jax.typing.DTypeLike],
    results: Sequence[jax.Ref],
    n: int,
    reduce: Callable[[jax.Array, list[jax.Array]], tuple[jax.Array, ...]],
) -> None:
    """Write the results of reduce(tile of the block, its columns), [ROWS, 1] each, for all n tiles."""
    first = pl.program_id(1) * n
    place = jax.lax.broadcasted_iota(jnp.int32, (ROWS, n), 1)
    lanes = jax.lax.broadcasted_iota(jnp.int32, (ROWS, HALF), 1)

    def step(i: jax.Array, collected: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = (first + i) * TILE
        found = reduce(i, [lanes + start, lanes + (start + HALF)])
        return tuple(jnp.where(place == i, new, old) for new, old in zip(found, collected, strict=True))

    collected = jax.lax.fori_loop(0, n, step, tuple(jnp.zeros((ROWS, n), dtype) for dtype in dtypes))
    for result, values in zip(results, collected, strict=True):
        result[...] = values


def _halves(ref: jax.Ref, i: jax.Array) -> list[jax.Array]:
    start = pl.multiple_of(i * TILE, TILE)
    return [ref[:, pl.ds(start + h * HALF, HALF)] for h in (0, 1)]


def _blocks(V: int) -> tuple[int, int]:
    """Return the number of blocks per row, and of tiles per block."""
    n = min(MOST_TILES, -(-V // TILE))
    return -(-V // (TILE * n)), n


def _block(n: int, rows: int = ROWS) -> pl.BlockSpec:
    return pl.BlockSpec((rows, n * TILE), (lambda r, b: (r, b)) if rows > 1 else (lambda r, b: (0, b)))


def _results(n: int) -> pl.BlockSpec:
    return pl.BlockSpec((ROWS, n), lambda r, b: (r, b))
