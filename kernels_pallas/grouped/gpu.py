"""Experts of a mixture for NVIDIA GPUs of Hopper: Pallas Mosaic GPU.

Two kernels: gate, up and SwiGLU; then down. A warpgroup computes a tile's results in 64 or 128 columns: it copies
blocks of the expert's matrices from where they lie (TMA), SLOTS ahead of the tensor cores. The matrices are the left
operand, transposed, as a left operand has 64 rows and a tile of decoding about 16. What a row adds up, and in which
order, depends on nothing but the row and its expert.

Matrices in 8 bits are converted block by block on the way from shared memory to shared memory, exactly; the scale of a
column multiplies its sum.

tokamax 0.0.12 has such a kernel, but it does not lower for a GPU that is not there, so neither tests nor a dry run
could compile it; its tiles have at least 64 rows, where decoding has 16, and gate, up and SwiGLU are not joined.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped.types import Matrices

BLOCK = 64  # columns of a matrix, rows of a warpgroup's matmul; also rows of a matrix in one step
SLOTS = 4  # steps copied at once: 64 KiB of matrices, so that three warpgroups' buffers fit a multiprocessor
MOST_ROWS = 128  # of a tile: two sums of [64, 128] take half of a warpgroup's registers
NARROW = (jnp.int8, jnp.float8_e4m3fn)


class Buffers(NamedTuple):
    """Shared memory of a warpgroup."""

    rows: Any  # [SLOTS, M, BLOCK] bfloat16
    blocks: Any  # [2, SLOTS, BLOCK, BLOCK]
    wide: Any  # [2, 2, BLOCK, BLOCK] bfloat16, of this step and the one before; None where `blocks` is bfloat16
    barriers: Any  # [SLOTS]


def fits(x: jax.Array, w: Matrices) -> bool:
    """Return whether `swiglu` takes rows of x [n, D]: bfloat16, matrices too or in 8 bits, D of 128s and F of 64s.

    The tensor cores round float32 to 10 bits, so float32 is not taken.
    """
    D, F = x.shape[1], w.gate.shape[2]
    stored = NARROW if w.scales else (jnp.bfloat16,)
    matrices = any(all(m.dtype == dtype for m in w[:3]) for dtype in stored)
    return x.dtype == jnp.bfloat16 and matrices and D % (2 * BLOCK) == 0 and F % BLOCK == 0


def swiglu(rows: jax.Array, owners: jax.Array, w: Matrices, interpret: object = None) -> jax.Array:
    """Compute as `reference.swiglu`: sums and SwiGLU in float32; what goes into the last matmul is bfloat16.

    Reads the 3 D F numbers of a tile's expert. Tiles of one expert stand side by side in the grid: they run at the same
    time, and the cache answers all but the first. Raises ValueError for tiles of more than MOST_ROWS rows, or of a
    number that 8 does not divide.
    """
    J, M, D = rows.shape
    F = w.gate.shape[2]
    if M % 8 or M > MOST_ROWS:
        raise ValueError(f"tiles of {M} rows: the kernel takes 8, 16 .. {MOST_ROWS}")
    scales = w.scales or ()
    run = functools.partial(_tiles, owners=owners, interpret=interpret)

    def activated(gate: jax.Array, up: jax.Array) -> list[jax.Array]:
        return [gate / (1 + jnp.exp(-gate)) * up]

    def as_they_are(*sums: jax.Array) -> list[jax.Array]:
        return list(sums)

    middle, out = jax.ShapeDtypeStruct((J, M, F), rows.dtype), jax.ShapeDtypeStruct((J, M, D), jnp.float32)
    hidden = run(rows, (w.gate, w.up), scales[:2], finish=activated, out=middle)
    return run(hidden, (w.down,), scales[2:], finish=as_they_are, out=out)


def _tiles(
    rows: jax.Array,
    matrices: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    *,
    finish: Callable[..., list[jax.Array]],
    out: jax.ShapeDtypeStruct,
    owners: jax.Array,
    interpret: object,
) -> jax.Array:
    """Multiply every tile that has an owner by the owner's columns, a block of both matrices or two blocks of one.

    Args:
      rows: [J, M, D] bfloat16.
      matrices: one or two, [E, D, F] each.
      scales: of every matrix [E, 1, F], or none.
      finish: (two sums [BLOCK, M] float32) -> one or two blocks of the result's columns, [BLOCK, M] each.
    """
    (_, M, D), E, interpreted = rows.shape, len(matrices[0]), interpret is not None
    width = 2 * BLOCK // len(matrices)  # columns of the result

    def blocks(column: jax.Array) -> list[tuple[int, jax.Array]]:
        """Return (which matrix, its first column) of the two blocks of a column of the grid."""
        return [(i, column * BLOCK) if len(matrices) == 2 else (0, (2 * column + i) * BLOCK) for i in (0, 1)]

    def grouped_matmul(rows_ref: Any, owners_ref: Any, *refs: Any) -> None:
        given, refs = refs[: len(matrices)], refs[len(matrices) :]
        scale_refs, (out_ref, *scratch) = refs[: len(scales)], refs[len(scales) :]
        buffers = Buffers(scratch[0], scratch[1], scratch[3] if scales else None, barriers=scratch[2])
        results = scratch[4 if scales else 3 :]
        tile, column = jax.lax.axis_index("tile"), jax.lax.axis_index("column")
        owner = owners_ref[tile]

        def compute() -> None:
            parts = blocks(column)
            copy = _copies(rows_ref.at[tile], [(given[i].at[owner], first) for i, first in parts], buffers)
            sums = _sums(D // BLOCK, copy, buffers, interpreted)
            if scales:
                parts = [scale_refs[i].at[owner, 0, pl.ds(first, BLOCK)] for i, first in parts]
                sums = [total * _down_the_rows(part, M, interpreted) for total, part in zip(sums, parts, strict=True)]
            places = [out_ref.at[tile, :, pl.ds(column * width + i * BLOCK, BLOCK)] for i in range(len(results))]
            _store(finish(*sums), results, places, interpreted)

        pl.when(owner < E)(compute)

    return plgpu.kernel(
        grouped_matmul,
        out_type=out,
        scratch_types=[
            _tiled((SLOTS, M, BLOCK), rows.dtype),
            _tiled((2, SLOTS, BLOCK, BLOCK), matrices[0].dtype),
            plgpu.Barrier(num_arrivals=3, num_barriers=SLOTS),
            *([_tiled((2, 2, BLOCK, BLOCK), rows.dtype)] if scales else []),
            *[_tiled((M, BLOCK), out.dtype)] * (width // BLOCK),
        ],
        grid=(rows.shape[0], out.shape[2] // width),
        grid_names=("tile", "column"),
        interpret=interpret,
    )(rows, owners, *matrices, *scales)


def _tiled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * size)
    transforms = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _copies(rows: Any, blocks: list[tuple[Any, jax.Array]], buffers: Buffers) -> Callable[[jax.Array], None]:
    """Return what starts the copies of step i: BLOCK numbers of each row, and as many rows of both blocks."""

    def copy(i: jax.Array) -> None:
        slot, some = jax.lax.rem(i, SLOTS), pl.ds(i * BLOCK, BLOCK)
        barrier = buffers.barriers.at[slot]
        plgpu.copy_gmem_to_smem(rows.at[:, some], buffers.rows.at[slot], barrier)
        for n, (matrix, first) in enumerate(blocks):
            plgpu.copy_gmem_to_smem(matrix.at[some, pl.ds(first, BLOCK)], buffers.blocks.at[n, slot], barrier)

    return copy


def _sums(steps: int, copy: Callable[[jax.Array], None], buffers: Buffers, interpreted: bool) -> Sequence[jax.Array]:
    """Return the transposed products of all steps with both blocks, [BLOCK, M] float32 each."""
    M = buffers.rows.shape[1]
    for i in range(min(SLOTS, steps)):
        copy(jnp.int32(i))

    def after(i: jax.Array) -> None:
        pl.when(i + SLOTS < steps)(functools.partial(copy, i + SLOTS))

    def arrived(i: jax.Array) -> tuple[Any, list[Any]]:
        """Wait for step i; return its rows and both blocks in bfloat16."""
        slot = jax.lax.rem(i, SLOTS)
        plgpu.barrier_wait(buffers.barriers.at[slot])
        stored = [buffers.blocks.at[n, slot] for n in (0, 1)]
        if buffers.wide is None:
            return buffers.rows.at[slot], stored
        # Also of two steps ago: storing waits for all warps, and each has waited for those products.
        wide = [buffers.wide.at[n, jax.lax.rem(i, 2)] for n in (0, 1)]
        for block, place in zip(stored, wide, strict=True):
            place[...] = _widened(block, interpreted).astype(place.dtype)
        plgpu.commit_smem()
        return buffers.rows.at[slot], wide

    if interpreted:  # whose tensor cores take no transposed operand

        def add(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, blocks = arrived(i)
            products = [jnp.dot(w[...].T, x[...].T, preferred_element_type=jnp.float32) for w in blocks]
            after(i)
            return tuple(a + b for a, b in zip(sums, products, strict=True))

        return jax.lax.fori_loop(0, steps, add, (jnp.zeros((BLOCK, M), jnp.float32),) * 2)

    def accumulate(*sums: Any) -> list[jax.Array]:
        def add(i: jax.Array, _: None) -> None:
            x, blocks = arrived(i)
            for total, w in zip(sums, blocks, strict=True):
                plgpu.wgmma(total, plgpu.transpose_ref(w, (1, 0)), plgpu.transpose_ref(x, (1, 0)))
            plgpu.wgmma_wait(len(sums))  # for those of the step before, whose buffers are free then
            pl.when(i > 0)(functools.partial(after, i - 1))

        jax.lax.fori_loop(0, steps, add, None)
        return [total[...] for total in sums]

    return pl.run_scoped(accumulate, *[plgpu.ACC((BLOCK, M), jnp.float32)] * 2)


def _widened(block: Any, interpreted: bool) -> jax.Array:
    """Return a block of 8-bit numbers as what converts to bfloat16: e4m3 numbers have no other way than float32."""
    values = block[...] if interpreted else plgpu.load(block, (), layout=plgpu.Layout.WGMMA_UPCAST_2X)
    return values if values.dtype == jnp.int8 else values.astype(jnp.float32)


def _down_the_rows(scale: Any, M: int, interpreted: bool) -> jax.Array:
    """Return a scale of BLOCK columns, [BLOCK, M] float32."""
    if not interpreted:
        scale = plgpu.load(scale, (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return jax.lax.broadcast_in_dim(scale[...].astype(jnp.float32), (BLOCK, M), (0,))


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
