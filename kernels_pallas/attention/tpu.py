"""Attention over pages for TPUs: Pallas Mosaic TPU.

A step of the grid is one block of one row, BLOCK positions of all key/value heads; the number of steps is what the rows
hold together, known when the kernel starts. Small pages come as several inputs of one step, so a block is the same
positions whatever the page. jax's own `ragged_paged_attention` would need keys and values interleaved in pages
[T, 2 K, H], has no float32, and no interpreter runs it, so nothing could be proven about it without a TPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.attention.types import KEYS, VALUES, grouped, last_seen, ungrouped

BLOCK = 128  # positions
ROWS = 8  # of a register: queries of a key/value head are padded to a multiple
MOST_SCALARS = 1 << 17  # int32, half of what a core keeps


def fits(q: jax.Array, pages: jax.Array, table: jax.Array) -> bool:
    """Return whether `attend` takes these arrays: bfloat16 or float32 alone, and pages of whole tiles.

    A page has 16 positions (float32: 8) or a multiple that divides BLOCK or is divided by it. H is a multiple of 128:
    XLA keeps narrower float32 heads in another layout and would copy the pool. The queries of one key/value head are at
    most 128, and the table fits the memory of scalars.
    """
    _, K, _, T, H = pages.shape
    tile = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float32): 8}.get(pages.dtype, BLOCK + 1)
    queries, scalars = q.shape[1] * q.shape[2] // K, 3 * table.size + 2 * len(table)
    whole = T % tile == 0 and (BLOCK % T == 0 or T % BLOCK == 0)
    return whole and H % 128 == 0 and queries <= 128 and scalars <= MOST_SCALARS and q.dtype != jnp.float64


def attend(
    q: jax.Array, pages: jax.Array, table: jax.Array, positions: jax.Array, interpret: object = False
) -> jax.Array:
    """Compute as `reference.attend`; softmax and sums in float32, matmuls in the dtype of the pages."""
    B, Q, N, H = q.shape
    C, K, _, T, _ = pages.shape
    run = min(T, BLOCK)  # positions of a page that a block holds
    n = BLOCK // run  # pages of a block
    table_, seen = jnp.minimum(table, C - 1), last_seen(table, positions, C, T=T)
    if not interpret:
        # Else XLA copies a pool that would fit into VMEM there and back, in every iteration.
        pages = pltpu.with_memory_space_constraint(pages, pltpu.HBM)
    table_ = jnp.pad(table_, ((0, 0), (0, -table_.shape[1] % max(1, n))))
    blocks = jnp.maximum((seen.max(axis=1) + BLOCK) // BLOCK, 1)  # an empty row has one, to write its zeros
    steps = -(-table_.shape[1] * T // BLOCK) * B
    ends = jnp.cumsum(blocks)
    row = jnp.minimum(jnp.searchsorted(ends, jnp.arange(steps), side="right"), B - 1).astype(jnp.int32)
    block = jnp.arange(steps, dtype=jnp.int32) - (ends - blocks)[row].astype(jnp.int32)
    queries = grouped(q, K, ROWS).astype(pages.dtype)
    M = queries.shape[2]
    # A query without a position sees none: its sums stay 0.
    rows_seen = jnp.pad(jnp.repeat(seen, N // K, axis=1), ((0, 0), (0, M - Q * N // K)), constant_values=-1)[..., None]

    def page(i: int, s: jax.Array, row: jax.Ref, block: jax.Ref, count: jax.Ref, table: jax.Ref) -> tuple:
        first = block[s] * BLOCK
        # A page that the row does not see is not fetched: its number is the one before.
        seen = jnp.clip(first + i * run, 0, jnp.maximum(count[row[s]] - 1, 0))
        return table[row[s], jax.lax.div(seen, T)], 0, 0, jax.lax.div(jax.lax.rem(first, T), run) if run < T else 0, 0

    def of_row(s: jax.Array, row: jax.Ref, *_: jax.Ref) -> tuple:
        return row[s], 0, 0, 0

    pool = [pl.BlockSpec((1, K, 2, run, H), functools.partial(page, i)) for i in range(n)]
    per_row = pl.BlockSpec((1, K, M, H), of_row)
    out = pl.pallas_call(
        functools.partial(_step, n, H**-0.5),
        out_shape=jax.ShapeDtypeStruct((B, K, M, H), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(ends[-1].astype(jnp.int32),),
            in_specs=[pl.BlockSpec((1, M, 1), lambda s, row, *_: (row[s], 0, 0)), per_row, *pool],
            out_specs=per_row,
            scratch_shapes=[pltpu.VMEM((K, M, 1), jnp.float32)] * 2 + [pltpu.VMEM((K, M, H), jnp.float32)],
        ),
        interpret=interpret,
    )(
        row,
        block,
        (seen.max(axis=1) + 1).astype(jnp.int32),
        table_,
        rows_seen,
        queries,
        *[pages] * n,
    )
    return ungrouped(out, Q, N).astype(q.dtype)


def _step(n: int, scale: float, row: jax.Ref, block: jax.Ref, count: jax.Ref, table: jax.Ref, *refs: jax.Ref) -> None:
    """Add one block to its row's sums; the row's last one divides them."""
    seen_ref, q_ref, pages = refs[0], refs[1], refs[2 : 2 + n]
    out_ref, largest_ref, total_ref, sum_ref = refs[2 + n :]
    s = pl.program_id(0)
    j, held = block[s], count[row[s]]
    exact = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    @pl.when(j == 0)
    def _() -> None:
        largest_ref[...] = jnp.full(largest_ref.shape, -1e30, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    position = j * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)
    place = j * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0)
    for k in range(q_ref.shape[1]):
        keys, values = (jnp.concatenate([ref[0, k, which] for ref in pages], axis=0) for which in (KEYS, VALUES))
        # What lies beyond the row's end may be another's, and no number: 0 * NaN is NaN.
        values = jnp.where(place < held, values.astype(jnp.float32), 0).astype(values.dtype)
        scores = _dot(q_ref[0, k], keys, 1, exact) * scale
        scores = jnp.where(position <= seen_ref[0], scores, -jnp.inf)
        largest = jnp.maximum(largest_ref[k], scores.max(axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - largest), jnp.exp(largest_ref[k] - largest)
        largest_ref[k] = largest
        total_ref[k] = total_ref[k] * shrink + weights.sum(axis=1, keepdims=True)
        sum_ref[k] = sum_ref[k] * shrink + _dot(weights.astype(values.dtype), values, 0, exact)

    @pl.when((j + 1) * BLOCK >= held)
    def _() -> None:
        total = total_ref[...]
        out_ref[0] = sum_ref[...] / jnp.where(total > 0, total, 1)


def _dot(x: jax.Array, y: jax.Array, axis: int, precision: jax.lax.Precision | None) -> jax.Array:
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)
