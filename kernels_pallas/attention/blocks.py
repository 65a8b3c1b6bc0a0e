"""Attention over pages in blocks of positions, compiled by XLA: any platform and dtype.

A block is BLOCK positions of every row, gathered from its pages; softmax is accumulated from block to block. Blocks
stand at fixed positions whatever the page, and one beyond a row's length changes none of its bits, so a row's result
depends neither on the other rows nor on the pages.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import KEYS, VALUES, find, grouped, last_seen, ungrouped

BLOCK = 64  # positions
FEWEST_ROWS = 4  # of a group of rows that goes on by itself
FEWEST_BLOCKS = 4  # of a table whose rows are grouped; each group is a loop more to compile


Rows = tuple[jax.Array, jax.Array, jax.Array]  # q [B, K, M, H], table [B, P], last position seen [B, 1, M, 1]


class Sums(NamedTuple):
    """Running softmax sums for M queries of each key/value head; float32 at least."""

    largest: jax.Array  # [B, K, M] score
    total: jax.Array  # [B, K, M] of the exponentials
    out: jax.Array  # [B, K, M, H] weighted values


def attend(q: jax.Array, pages: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Attend as `reference.attend`; softmax in float32 at least, matmuls in the dtype of the pages."""
    B, Q, N, H = q.shape
    C, K, _, T, _ = pages.shape
    wide, M = jnp.promote_types(q.dtype, jnp.float32), Q * N // K
    seen = last_seen(table, positions, C, T=T)
    # A row's own page in place of one that it has not: its weights are 0, but 0 * NaN is NaN.
    table = jnp.minimum(jnp.where(table < C, table, table[:, :1]), C - 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % max(1, BLOCK // T))), mode="edge")
    sums = Sums(jnp.full((B, K, M), -1e30, wide), jnp.zeros((B, K, M), wide), jnp.zeros((B, K, M, H), wide))
    rows = grouped(q, K), table, jnp.repeat(seen, N // K, axis=1)[:, None, :, None]
    sums = _add_live(pages, rows, (seen.max(axis=1) + BLOCK) // BLOCK, sums)
    total = sums.total[..., None]
    out = jnp.where(total > 0, sums.out / jnp.where(total > 0, total, 1), 0)
    return ungrouped(out, Q, N).astype(q.dtype)


def _add_live(pages: jax.Array, rows: Rows, blocks: jax.Array, sums: Sums) -> Sums:
    """Add the first `blocks` [B] blocks of each row.

    Rows are ordered by length, longest first: once the shorter half has no block left, the longer half goes on alone,
    and so on. The work is at most about twice what the rows hold, not the number of rows times the longest. Of short
    tables all rows go on to the longest's end.
    """
    if rows[1].shape[1] * pages.shape[3] <= FEWEST_BLOCKS * BLOCK:
        return jax.lax.fori_loop(0, blocks.max(), functools.partial(_add, pages, *rows), sums)
    order = jnp.argsort(-blocks)
    blocks, rows = jax.tree.map(lambda x: x[order], (blocks, rows))
    start, count = jnp.int32(0), len(blocks)
    while count:
        alone = count // 2 if count >= 2 * FEWEST_ROWS else 0
        stop = jnp.maximum(start, blocks[alone])
        part, rows = jax.tree.map(lambda x, n=count: x[:n], (sums, rows))
        part = jax.lax.fori_loop(start, stop, functools.partial(_add, pages, *rows), part)
        sums = jax.tree.map(lambda new, old, n=count: jnp.concatenate([new, old[n:]]), part, sums)
        start, count = stop, alone
    return jax.tree.map(lambda x: x[jnp.argsort(order)], sums)


def _add(pages: jax.Array, q: jax.Array, table: jax.Array, seen: jax.Array, j: jax.Array, sums: Sums) -> Sums:
    """Add block j to the sums of q [B, K, M, H], which see positions up to `seen` [B, 1, M, 1]."""
    keys, values = (_block(pages, which, table, j) for which in (KEYS, VALUES))
    # Transposed while they are gathered: a CPU multiplies by keys [S, H] at a third of the speed.
    keys = jax.lax.optimization_barrier(jnp.swapaxes(keys, 2, 3))
    scores = jnp.einsum("BKMH,BKHS->BKMS", q.astype(keys.dtype), keys, preferred_element_type=sums.total.dtype)
    there = j * BLOCK + jnp.arange(BLOCK)[None, None, None] <= seen
    scores = jnp.where(there, scores * q.shape[-1] ** -0.5, -jnp.inf)
    largest = jnp.maximum(sums.largest, _halved(scores, jnp.maximum))
    weights, shrink = jnp.exp(scores - largest[..., None]), jnp.exp(sums.largest - largest)
    added = jnp.einsum("BKMS,BKSH->BKMH", weights.astype(values.dtype), values, preferred_element_type=shrink.dtype)
    return Sums(largest, sums.total * shrink + _halved(weights, jnp.add), sums.out * shrink[..., None] + added)


def _halved(x: jax.Array, join: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Reduce the last axis, a power of two, in one fixed order.

    XLA on a CPU sums in an order that depends on how many rows there are, and then makes another exp, too.
    """
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = join(x[..., :half], x[..., half:])
    return x[..., 0]


def _block(pages: jax.Array, which: int, table: jax.Array, j: jax.Array) -> jax.Array:
    """Return the keys or values [B, K, BLOCK, H] of block j of every row; the table names existing pages."""
    C, K, _, T, H = pages.shape
    run = min(T, BLOCK)  # positions of a page that a block holds: one run in memory for each head
    page = jax.lax.dynamic_slice_in_dim(table, j * BLOCK // T, BLOCK // run, axis=1)[:, None]  # [B, 1, BLOCK / run]
    index = ((page * K + jnp.arange(K)[None, :, None]) * 2 + which) * (T // run) + j * BLOCK % T // run
    # In bounds by construction: XLA need not clamp every element. Whole runs are gathered faster than parts of pages.
    block = pages.reshape(C * K * 2 * T // run, run, H).at[index].get(mode="promise_in_bounds")
    return loaded(block.reshape(len(table), K, BLOCK, H))


def write(pool: jax.Array, table: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """Write new [B, Q, ...] at `positions` [B, Q] of the rows' pages; where a row has no page it goes nowhere.

    Args:
      pool: [C, T, ...], or [C, K, 2, T, H] for new [B, Q, K, 2, H].
    """
    axis = 3 if new.ndim == 5 else 1
    page, offset = find(table, positions, len(pool), T=pool.shape[axis])
    index: tuple[jax.Array, ...] = page, offset
    if axis == 3:
        # Heads are indices too: of a slice, XLA on a TPU would keep the pool in another layout, and copy it to read it.
        head, which = jnp.arange(pool.shape[1])[None, None, :, None], jnp.arange(2)[None, None, None]
        index = page[..., None, None], head, which, offset[..., None, None]
    return pool.at[index].set(stored(new, pool.dtype), mode="drop")


def read(pool: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Read `positions` [B, Q] of the rows' pages in a pool [C, T, ...]; zeros where a row has no page."""
    return loaded(pool.at[find(table, positions, pool.shape[0], T=pool.shape[1])].get(mode="fill", fill_value=0))


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return x as a pool of `dtype` holds it."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype) if dtype == jnp.uint16 else x.astype(dtype)


def loaded(x: jax.Array) -> jax.Array:
    """Return what a pool holds as numbers."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
