"""Attention over pages for NVIDIA GPUs of Hopper: Pallas Mosaic GPU.

One warpgroup adds up every SPLITS-th block of one key/value head of one row, BLOCK positions each, and copies a block
while it computes another (TMA). A second kernel joins the parts of a row by their largest scores. Which positions a
part holds depends on nothing but the positions, so a row's bits do not depend on the other rows.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.attention import heads_gpu
from kernels_pallas.attention.types import KEYS, VALUES, Heads, Table, grouped, last_seen

BLOCK = 64  # positions
TILE = 64  # queries: rows of one warpgroup's matmul
SPLITS = 4  # of a row, so that few rows fill a GPU too
SLOTS = 2  # blocks copied at once: 64 KiB at H = 128, so that two warpgroups' buffers fit a multiprocessor
RUN = 16  # positions of the smallest page
LANES = 128  # of a warpgroup


def fits(q: jax.Array, pages: jax.Array, table: jax.Array) -> bool:
    """Return whether `attend` takes these arrays: bfloat16, pages of 16 positions or more, heads of 64 or 128.

    The tensor cores round float32 to 10 bits, so float32 is not taken. T divides BLOCK or is divided by it; the queries
    of one key/value head are at most 128.
    """
    _, K, _, T, H = pages.shape
    whole = T >= RUN and (BLOCK % T == 0 or T % BLOCK == 0)
    queries = q.shape[1] * q.shape[2] // K
    return pages.dtype == jnp.bfloat16 and whole and H in (64, 128) and queries <= 128 and q.dtype != jnp.float64


def attend(
    q: jax.Array, pages: jax.Array, table: jax.Array, positions: jax.Array, interpret: object = None
) -> jax.Array:
    """Compute as `reference.attend`; softmax and sums in float32, matmuls of bfloat16.

    Reads 4 K H bytes a position that a row sees, once for each 64 queries of a key/value head.
    """
    K, stored = pages.shape[1], _stored(q.shape[1] * q.shape[2] // pages.shape[1])
    queries = grouped(q, K, stored).astype(pages.dtype)
    return _attend(queries, pages, table, positions, q.shape[2], q.dtype, interpret)


def attend_fused(
    fused: jax.Array,
    heads: Heads,
    epsilon: float,
    pages: jax.Array,
    table: Table,
    positions: jax.Array,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """Place the heads of a fused product [B, Q, K, R + 2, H] (`heads_gpu.place`), then `attend`.

    Returns:
      [B, Q, N, H] in the dtype of `fused`; the pages.
    """
    _, Q, K, parts, _ = fused.shape
    M = Q * (parts - 2)
    rows = -(-M // TILE) * _stored(M)
    queries, pages = heads_gpu.place(
        fused, heads, epsilon, pages=pages, table=table.write, positions=positions, rows=rows, interpret=interpret
    )
    return _attend(queries, pages, table.read, positions, K * (parts - 2), fused.dtype, interpret), pages


def _stored(M: int) -> int:
    """Return the rows of a tile that hold queries, of M of a key/value head; the others hold anything."""
    return TILE if M > TILE else M + -M % 8


def _attend(
    queries: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    N: int,
    dtype: jnp.dtype,
    interpret: object,
) -> jax.Array:
    """Attend from the queries [B, K, tiles * stored, H] of N heads; return [B, Q, N, H] of `dtype`."""
    (B, Q), (C, K, _, T, H) = positions.shape, pages.shape
    seen = last_seen(table, positions, C, T=T)
    M = Q * N // K
    tiles, stored = -(-M // TILE), _stored(M)
    per_query = jnp.pad(jnp.repeat(seen, N // K, axis=1), ((0, 0), (0, tiles * TILE - M)), constant_values=-1)
    options = PartOptions(min(T, BLOCK), T, H**-0.5, stored=stored, interpreted=interpret is not None)
    found = plgpu.kernel(
        functools.partial(_part, options),
        out_type=(
            jax.ShapeDtypeStruct((B, K, tiles, SPLITS, stored, max(H, LANES)), jnp.float32),
            jax.ShapeDtypeStruct((B, K, tiles, SPLITS, TILE), jnp.float32),
            jax.ShapeDtypeStruct((B, K, tiles, SPLITS, TILE), jnp.float32),
        ),
        scratch_types=[
            _tiled((TILE, H), jnp.bfloat16),
            plgpu.SMEM((TILE,), jnp.int32),
            _tiled((SLOTS, BLOCK, H), jnp.bfloat16),
            _tiled((SLOTS, BLOCK, H), jnp.bfloat16),
            _tiled((TILE, H), jnp.float32),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2 * BLOCK // min(T, BLOCK), num_barriers=SLOTS),
        ],
        grid=(B, K, tiles, SPLITS),
        grid_names=("row", "head", "tile", "split"),
        interpret=interpret,
    )(queries, per_query, seen.max(axis=1) + 1, jnp.minimum(table, C - 1), pages)
    return _joined(found, Q, N, H, dtype, interpret)


def _joined(parts: Sequence[jax.Array], Q: int, N: int, H: int, dtype: jnp.dtype, interpret: object) -> jax.Array:
    """Join the parts of every query, one warpgroup each, a lane for each number.

    One launch; XLA makes two of it, one for the totals. Lanes beyond H hold anything.
    """
    B, K = parts[0].shape[:2]
    group = N // K

    def body(parts_ref: Any, largest_ref: Any, total_ref: Any, out_ref: Any) -> None:
        row, query, head = (jax.lax.axis_index(name) for name in ("row", "query", "head"))
        m = query * group + jax.lax.rem(head, group)  # among the queries of the key/value head
        where = (row, jax.lax.div(head, group), jax.lax.div(m, TILE))
        places = [(*where, i, jax.lax.rem(m, TILE)) for i in range(SPLITS)]
        top = functools.reduce(jnp.maximum, [largest_ref[place] for place in places])
        shrink = [jnp.exp(largest_ref[place] - top) for place in places]
        total = functools.reduce(operator.add, [total_ref[place] * s for place, s in zip(places, shrink)])
        out = functools.reduce(operator.add, [parts_ref[place] * s for place, s in zip(places, shrink)])
        out_ref[row, query, head] = (out / jnp.where(total > 0, total, 1)).astype(dtype)

    joined = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, Q, N, parts[0].shape[-1]), dtype),
        grid=(B, Q, N),
        grid_names=("row", "query", "head"),
        interpret=interpret,
    )(*parts)
    return joined[..., :H]


def _tiled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


class PartOptions(NamedTuple):
    """Static arguments of `_part`."""

    run: int  # positions of a page that a block holds
    T: int  # positions of a page
    scale: float  # of the scores
    stored: int  # rows of a tile that hold queries
    # The interpreter knows neither where values lie in registers nor a transposed operand of the tensor cores.
    interpreted: bool

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        """Return x in a layout of registers."""
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def matmul(self, a: jax.Array | jax.Ref, b: Any, transposed: bool = False) -> jax.Array:
        """Return a b or, transposed, a b^T, in float32."""
        if self.interpreted:
            return jnp.dot(a[...], b[...].T if transposed else b[...], preferred_element_type=jnp.float32)
        b = plgpu.transpose_ref(b, (1, 0)) if transposed else b

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((TILE, b.shape[1]), jnp.float32))


class PartRefs(NamedTuple):
    """Arguments, results and scratch of `_part`, in the order of the kernel's."""

    q: Any
    seen: Any
    held: Any
    table: Any
    pages: Any
    out: Any
    largest: Any
    total: Any
    q_tile: Any
    seen_tile: Any
    keys: Any
    values: Any
    out_tile: Any
    largest_tile: Any
    total_tile: Any
    q_barrier: Any
    barriers: Any


def _part(o: PartOptions, *arrays: Any) -> None:
    """Write a part's weighted values, largest scores and totals; `arrays`: the fields of PartRefs."""
    refs = PartRefs._make(arrays)
    row, head, tile, split = (jax.lax.axis_index(name) for name in ("row", "head", "tile", "split"))
    held, H, place = refs.held[row], refs.q_tile.shape[1], (row, head, tile, split)
    # Block i of this part is block split + i SPLITS of the row.
    count = jax.lax.div(jax.lax.div(held + (BLOCK - 1), BLOCK) - split + (SPLITS - 1), SPLITS)
    queries = refs.q.at[row, head, pl.ds(tile * TILE, o.stored)]
    plgpu.copy_gmem_to_smem(queries, refs.q_tile.at[pl.ds(0, o.stored)], refs.q_barrier)
    plgpu.copy_gmem_to_smem(refs.seen.at[row, pl.ds(tile * TILE, TILE)], refs.seen_tile, refs.q_barrier)
    copy = _copies(o, refs, held, row=row, head=head, split=split)
    for slot in range(SLOTS):
        pl.when(slot < count)(functools.partial(copy, jnp.int32(slot), jnp.int32(slot)))
    plgpu.barrier_wait(refs.q_barrier)
    per_row = plgpu.Layout.WGMMA.reduce(1)
    seen = o.cast(refs.seen_tile[...], per_row)

    def add(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, out = sums
        slot = jax.lax.rem(i, SLOTS)
        plgpu.barrier_wait(refs.barriers.at[slot])
        scores = o.matmul(refs.q_tile, refs.keys.at[slot], transposed=True) * o.scale
        columns = o.cast(jax.lax.broadcasted_iota(jnp.int32, (TILE, BLOCK), 1), plgpu.Layout.WGMMA)
        there = columns + (split + i * SPLITS) * BLOCK <= _across(seen, BLOCK)
        scores = jnp.where(there, scores, -jnp.inf)
        new = jnp.maximum(largest, scores.max(axis=1))
        weights, shrink = jnp.exp(scores - _across(new, BLOCK)), jnp.exp(largest - new)
        total = total * shrink + weights.sum(axis=1)
        added = o.matmul(weights.astype(refs.values.dtype), refs.values.at[slot])
        pl.when(i + SLOTS < count)(functools.partial(copy, i + SLOTS, slot))
        return new, total, out * _across(shrink, H) + added

    def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return o.cast(jnp.full(shape, value, jnp.float32), layout)

    sums = filled((TILE,), -1e30, per_row), filled((TILE,), 0, per_row), filled((TILE, H), 0, plgpu.Layout.WGMMA)
    refs.largest_tile[...], refs.total_tile[...], refs.out_tile[...] = jax.lax.fori_loop(0, count, add, sums)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.out_tile.at[pl.ds(0, o.stored)], refs.out.at[*place, :, pl.ds(0, H)])
    plgpu.copy_smem_to_gmem(refs.largest_tile, refs.largest.at[place])
    plgpu.copy_smem_to_gmem(refs.total_tile, refs.total.at[place])
    plgpu.wait_smem_to_gmem(0)


def _copies(
    o: PartOptions, refs: PartRefs, held: jax.Array, *, row: jax.Array, head: jax.Array, split: jax.Array
) -> Callable[[jax.Array, jax.Array], None]:
    """Return what starts the copies of block i of a part to a slot; the row holds `held` positions."""

    def copy(i: jax.Array, slot: jax.Array) -> None:
        first = (split + i * SPLITS) * BLOCK
        for part in range(BLOCK // o.run):
            # A page that the row does not have: one that it has, whose weights are 0.
            start = jnp.minimum(first + part * o.run, held - 1)
            page = refs.table[row, jax.lax.div(start, o.T)]
            offset = jax.lax.rem(first, o.T) if o.run < o.T else 0
            for which, buffer in ((KEYS, refs.keys), (VALUES, refs.values)):
                source = refs.pages.at[page, head, which, pl.ds(offset, o.run)]
                plgpu.copy_gmem_to_smem(source, buffer.at[slot, pl.ds(part * o.run, o.run)], refs.barriers.at[slot])

    return copy


def _across(x: jax.Array, columns: int) -> jax.Array:
    """Return x [TILE] in every column."""
    return jax.lax.broadcast_in_dim(x, (TILE, columns), (0,))
