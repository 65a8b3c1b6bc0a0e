"""Attention over pages in blocks of positions, compiled by XLA: any platform and dtype.

A block is BLOCK positions of every row, gathered from its pages; softmax is accumulated from block to block. Blocks
stand at fixed positions whatever the page, and one beyond a row's length changes none of its bits, so a row's result
depends neither on the other rows nor on the pages.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Pages

BLOCK = 64  # positions
FEWEST_ROWS = 4  # of a group of rows that goes on by itself

# Running maximum [B, K, M] and sum [B, K, M] of the exponentials, and weighted values [B, K, M, H], float32 at least.
Sums = tuple[jax.Array, jax.Array, jax.Array]


def attend(q: jax.Array, pages: Pages, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Attend as `reference.attend`; softmax in float32 at least, matmuls in the dtype of the pages.

    Rows are ordered by length, longest first: once the shorter half has no block left, the longer half goes on alone,
    and so on. The work is at most about twice what the rows hold, not the number of rows times the longest.
    """
    B, Q, N, H = q.shape
    C, K, T = pages.keys.shape[:3]
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % max(1, BLOCK // T))), constant_values=C)
    order = jnp.argsort(-positions.max(axis=1))
    table, seen = table[order], jnp.repeat(positions[order], N // K, axis=1)[:, None, :, None]
    # The queries that share a key/value head are the rows of one matmul.
    grouped = jnp.swapaxes(q[order].reshape(B, Q, K, N // K, H), 1, 2).reshape(B, K, -1, H)
    blocks = (positions.max(axis=1)[order] + BLOCK) // BLOCK  # descending; 0: nothing to read
    wide = jnp.promote_types(q.dtype, jnp.float32)
    M = grouped.shape[2]
    sums = jnp.full((B, K, M), -1e30, wide), jnp.zeros((B, K, M), wide), jnp.zeros((B, K, M, H), wide)
    start, rows = jnp.int32(0), B
    while True:
        alone = rows // 2 if rows >= 2 * FEWEST_ROWS else 0
        stop = jnp.maximum(start, blocks[alone])
        part = _over_blocks(
            start, stop, grouped[:rows], pages, table[:rows], seen[:rows], tuple(x[:rows] for x in sums)
        )
        sums = tuple(jnp.concatenate([new, old[rows:]]) for new, old in zip(part, sums))
        if not alone:
            break
        start, rows = stop, alone
    _, total, out = sums
    out = (out / jnp.where(total > 0, total, 1)[..., None])[jnp.argsort(order)]
    return jnp.swapaxes(out.reshape(B, K, Q, N // K, H), 1, 2).reshape(B, Q, N, H).astype(q.dtype)


def _over_blocks(
    start: jax.Array, stop: jax.Array, q: jax.Array, pages: Pages, table: jax.Array, seen: jax.Array, sums: Sums
) -> Sums:
    """Add blocks [start, stop) to the sums of q [B, K, M, H], which see positions up to `seen` [B, 1, M, 1]."""
    scale = q.shape[-1] ** -0.5

    def add(j: jax.Array, sums: Sums) -> Sums:
        largest, total, out = sums
        keys, values = (_block(pool, table, j) for pool in pages)
        scores = jnp.einsum("BKMH,BKSH->BKMS", q.astype(keys.dtype), keys, preferred_element_type=total.dtype) * scale
        scores = jnp.where(j * BLOCK + jnp.arange(BLOCK) <= seen, scores, -jnp.inf)
        new = jnp.maximum(largest, scores.max(axis=-1))
        weights, shrink = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
        added = jnp.einsum("BKMS,BKSH->BKMH", weights.astype(values.dtype), values, preferred_element_type=total.dtype)
        return new, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + added

    return jax.lax.fori_loop(start, stop, add, sums)


def _block(pool: jax.Array, table: jax.Array, j: jax.Array) -> jax.Array:
    """Return block j [B, K, BLOCK, H] of every row, from a pool [C, K, T, H]; some page's values where it has none."""
    C, K, T, H = pool.shape
    if T >= BLOCK:
        page = jax.lax.dynamic_slice_in_dim(table, j * BLOCK // T, 1, axis=1)[:, 0]
        offset = j * BLOCK % T

        def part(page: jax.Array) -> jax.Array:
            start = (page, jnp.zeros_like(page), offset.astype(page.dtype), jnp.zeros_like(page))
            return jax.lax.dynamic_slice(pool, start, (1, K, BLOCK, H))[0]

        # In bounds by construction, after `minimum`: XLA then need not clamp every element.
        block = jax.vmap(part)(jnp.minimum(page, C - 1)) if T > BLOCK else _take(pool, page)
    else:
        n = BLOCK // T
        block = _take(pool, jax.lax.dynamic_slice_in_dim(table, j * n, n, axis=1))  # [B, n, K, T, H]
        block = jnp.swapaxes(block, 1, 2).reshape(len(table), K, BLOCK, H)
    return loaded(block)


def _take(pool: jax.Array, page: jax.Array) -> jax.Array:
    return pool.at[jnp.minimum(page, len(pool) - 1)].get(mode="promise_in_bounds")


def write(pool: jax.Array, table: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """Write new [B, Q, ...] at `positions` [B, Q] of the rows' pages; where a row has no page it goes nowhere.

    Args:
      pool: [C, T, ...], or [C, K, T, H] for new [B, Q, K, H].
    """
    axis = 2 if new.ndim == 4 else 1
    C, T = pool.shape[0], pool.shape[axis]
    column = jnp.where(positions < 0, table.shape[1], positions // T)
    page = jnp.take_along_axis(table, column, axis=1, mode="fill", fill_value=C)
    index = (page, slice(None), positions % T) if axis == 2 else (page, positions % T)
    return pool.at[index].set(stored(new, pool.dtype), mode="drop")


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return x as a pool of `dtype` holds it."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype) if dtype == jnp.uint16 else x.astype(dtype)


def loaded(x: jax.Array) -> jax.Array:
    """Return what a pool holds as numbers."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
