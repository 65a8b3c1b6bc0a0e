"""Experts of a mixture for NVIDIA GPUs of Hopper: Pallas Mosaic GPU.

Two kernels: gate, up and SwiGLU; then down. A warpgroup computes a tile's results in 64 or 128 columns: it copies
blocks of the expert's matrices from where they lie (TMA), SLOTS ahead of the tensor cores. The matrices are the left
operand, transposed, as a left operand has 64 rows and a tile of decoding about 16. What a row adds up, and in which
order, depends on nothing but the row and its expert.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK = 64  # columns of a matrix, rows of a warpgroup's matmul; also rows of a matrix in one step
SLOTS = 4  # steps copied at once: 64 KiB of matrices, so that three warpgroups' buffers fit a multiprocessor
MOST_ROWS = 128  # of a tile: two sums of [64, 128] take half of a warpgroup's registers

Block = tuple[Any, jax.Array]  # a matrix of every expert [E, D, F], and the first of BLOCK of its columns


def fits(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> bool:
    """Return whether `swiglu` takes rows of x [n, D] and these matrices: bfloat16, D of 128s and F of 64s.

    The tensor cores round float32 to 10 bits, so float32 is not taken.
    """
    D, F = x.shape[1], gate.shape[2]
    return D % (2 * BLOCK) == 0 and F % BLOCK == 0 and all(a.dtype == jnp.bfloat16 for a in (x, gate, up, down))


def swiglu(
    rows: jax.Array,
    owners: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    interpret: object = None,
) -> jax.Array:
    """Compute as `reference.swiglu`: sums and SwiGLU in float32; what goes into the last matmul is bfloat16.

    Reads the 6 D F bytes of a tile's expert. Tiles of one expert stand side by side in the grid: they run at the same
    time, and the cache answers all but the first. Raises ValueError for tiles of more than MOST_ROWS rows, or of a
    number that 8 does not divide.
    """
    J, M, D = rows.shape
    F = gate.shape[2]
    if M % 8 or M > MOST_ROWS:
        raise ValueError(f"tiles of {M} rows: the kernel takes 8, 16 .. {MOST_ROWS}")
    run = functools.partial(_tiles, owners=owners, interpret=interpret)

    def of_both(matrices: Sequence[Any], column: jax.Array) -> list[Block]:
        return [(matrix, column * BLOCK) for matrix in matrices]

    def of_down(matrices: Sequence[Any], column: jax.Array) -> list[Block]:
        return [(matrices[0], (2 * column + i) * BLOCK) for i in (0, 1)]

    def activated(gate: jax.Array, up: jax.Array) -> list[jax.Array]:
        return [gate / (1 + jnp.exp(-gate)) * up]

    def as_they_are(*sums: jax.Array) -> list[jax.Array]:
        return list(sums)

    hidden = run(rows, (gate, up), of_both, activated, jax.ShapeDtypeStruct((J, M, F), jnp.bfloat16))
    return run(hidden, (down,), of_down, as_they_are, jax.ShapeDtypeStruct((J, M, D), jnp.float32), width=2 * BLOCK)


def _tiles(
    rows: jax.Array,
    matrices: tuple[jax.Array, ...],
    blocks: Callable[[Sequence[Any], jax.Array], list[Block]],
    finish: Callable[..., list[jax.Array]],
    out: jax.ShapeDtypeStruct,
    owners: jax.Array,
    interpret: object,
    width: int = BLOCK,
) -> jax.Array:
    """Multiply every tile in use by its expert's blocks of columns, two at a time.

    Args:
      rows: [J, M, D] bfloat16.
      matrices: [E, D, F] each, bfloat16.
      blocks: (matrices, which) -> the two that a warpgroup multiplies by.
      finish: (two sums [BLOCK, M] float32) -> columns `which * width` and so on of the result, [BLOCK, M] each.
    """
    (_, M, D), dtype, interpreted = rows.shape, rows.dtype, interpret is not None

    def grouped_matmul(*refs: Any) -> None:
        rows_ref, owners_ref, *rest = refs
        given, (out_ref, x, w, barriers, *results) = rest[: len(matrices)], rest[len(matrices) :]
        tile, column = jax.lax.axis_index("tile"), jax.lax.axis_index("column")
        owner = owners_ref[tile]

        def compute() -> None:
            copy = _copies(rows_ref, owner, blocks(given, column), tile, x, w, barriers)
            found = finish(*_sums(D // BLOCK, copy, x, w, barriers, interpreted))
            places = [out_ref.at[tile, :, pl.ds(column * width + i * BLOCK, BLOCK)] for i in range(len(results))]
            _store(found, results, places, interpreted)

        pl.when(owner < matrices[0].shape[0])(compute)

    return plgpu.kernel(
        grouped_matmul,
        out_type=out,
        scratch_types=[
            _tiled((SLOTS, M, BLOCK), dtype),
            _tiled((2, SLOTS, BLOCK, BLOCK), dtype),
            plgpu.Barrier(num_arrivals=3, num_barriers=SLOTS),
            *[_tiled((M, BLOCK), out.dtype)] * (width // BLOCK),
        ],
        grid=(rows.shape[0], out.shape[2] // width),
        grid_names=("tile", "column"),
        interpret=interpret,
    )(rows, owners, *matrices)


def _tiled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def _copies(
    rows: Any, owner: jax.Array, blocks: list[Block], tile: jax.Array, x: Any, w: Any, barriers: Any
) -> Callable[[jax.Array], None]:
    """Return what starts the copies of step i: BLOCK numbers of each row, and as many rows of both blocks."""

    def copy(i: jax.Array) -> None:
        slot, some = jax.lax.rem(i, SLOTS), pl.ds(i * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(rows.at[tile, :, some], x.at[slot], barriers.at[slot])
        for n, (matrix, column) in enumerate(blocks):
            block = matrix.at[owner, some, pl.ds(column, BLOCK)]
            plgpu.copy_gmem_to_smem(block, w.at[n, slot], barriers.at[slot])

    return copy


def _sums(
    steps: int, copy: Callable[[jax.Array], None], x: Any, w: Any, barriers: Any, interpreted: bool
) -> Sequence[jax.Array]:
    """Return the transposed products of all steps with both blocks, [BLOCK, M] float32 each."""
    for i in range(min(SLOTS, steps)):
        copy(jnp.int32(i))

    def after(i: jax.Array) -> None:
        pl.when(i + SLOTS < steps)(functools.partial(copy, i + SLOTS))

    if interpreted:  # whose tensor cores take no transposed operand

        def add(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = jax.lax.rem(i, SLOTS)
            plgpu.barrier_wait(barriers.at[slot])
            products = [jnp.dot(w[n, slot].T, x[slot].T, preferred_element_type=jnp.float32) for n in (0, 1)]
            after(i)
            return tuple(a + b for a, b in zip(sums, products, strict=True))

        return jax.lax.fori_loop(0, steps, add, (jnp.zeros((BLOCK, x.shape[1]), jnp.float32),) * 2)

    def accumulate(*sums: Any) -> list[jax.Array]:
        def add(i: jax.Array, _: None) -> None:
            slot = jax.lax.rem(i, SLOTS)
            plgpu.barrier_wait(barriers.at[slot])
            for n, total in enumerate(sums):
                plgpu.wgmma(total, plgpu.transpose_ref(w.at[n, slot], (1, 0)), plgpu.transpose_ref(x.at[slot], (1, 0)))
            plgpu.wgmma_wait(len(sums))  # for those of the step before, whose buffers are free then
            pl.when(i > 0)(functools.partial(after, i - 1))

        jax.lax.fori_loop(0, steps, add, None)
        return [total[...] for total in sums]

    return pl.run_scoped(accumulate, *[plgpu.ACC((BLOCK, x.shape[1]), jnp.float32)] * 2)


def _store(results: list[jax.Array], buffers: Sequence[Any], places: list[Any], interpreted: bool) -> None:
    """Write results [BLOCK, M], transposed, through shared memory."""
    for result, buffer in zip(results, buffers, strict=True):
        result = result.astype(buffer.dtype)
        if interpreted:
            buffer[...] = result.T
        else:
            across = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.transpose_ref(buffer, (1, 0))[...] = across
    plgpu.commit_smem()
    for buffer, place in zip(buffers, places, strict=True):
        plgpu.copy_smem_to_gmem(buffer, place)
    plgpu.wait_smem_to_gmem(0)
