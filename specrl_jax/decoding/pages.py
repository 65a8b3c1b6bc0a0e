"""Pages of the caches: who holds which, taken and given back on the device.

A page is `page_tokens` positions of one sequence, in every cache of the engine alike: target, head or small model. The
rows of a data shard share the pages of that shard, and never change shard. Siblings hold the full pages of their prompt
together; a page whose last holder lets go is free again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import Table
from specrl_jax.core import Tree


class PagePool(NamedTuple):
    """The pages of D shards, C each."""

    references: jax.Array  # [D, C] int32, rows and prompts that hold each page
    free: jax.Array  # [D, C] int32, a stack: the first `count` are the ids of free pages
    count: jax.Array  # type: ignore[assignment]  # [D] int32, free pages; hides tuple.count


class PageTable(NamedTuple):
    """The pages of B rows, those of shard d in rows d B / D and up. C: no page."""

    table: jax.Array  # [B, P] int32, page of positions [j T, (j + 1) T) at column j, an id of the row's shard
    count: jax.Array  # type: ignore[assignment]  # [B] int32, pages that the row holds, from column 0; hides tuple.count
    num_shared: jax.Array  # [B] int32, the first of them that it may not write: other rows read them too


def empty_pool(shards: int, pages: int) -> PagePool:
    """Return `pages` free pages in each shard; the lowest ids are taken first."""
    free = jnp.broadcast_to(jnp.arange(pages - 1, -1, -1, dtype=jnp.int32), (shards, pages))
    return PagePool(jnp.zeros((shards, pages), jnp.int32), free, jnp.full((shards,), pages, jnp.int32))


def no_pages(rows: int, columns: int, pages: int) -> PageTable:
    """Return rows without pages, of at most `columns`, out of a pool of `pages` a shard."""
    zeros = jnp.zeros((rows,), jnp.int32)
    return PageTable(jnp.full((rows, columns), pages, jnp.int32), zeros, zeros)


def tables(held: PageTable, pages: int) -> Table:
    """Return the tables that a forward reads by and writes by."""
    writable = jnp.arange(held.table.shape[1])[None] >= held.num_shared[:, None]
    return Table(held.table, jnp.where(writable, held.table, pages))


def missing(pool: PagePool, held: PageTable, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return how many pages each row [B] lacks to hold `wanted` [B], and whether every shard [D] has as many free."""
    need = jnp.maximum(wanted - held.count, 0)
    return need, need.reshape(len(pool.count), -1).sum(axis=1, dtype=jnp.int32) <= pool.count


def take(pool: PagePool, held: PageTable, need: jax.Array, most: int) -> tuple[PagePool, PageTable]:
    """Give every row `need` [B] more pages, at most `most`; each shard must have as many free."""
    D, C = pool.free.shape
    by_shard = need.reshape(D, -1)
    # Rank of each new page [D, B / D, most] among those that its shard gives.
    rank = (jnp.cumsum(by_shard, axis=1) - by_shard)[..., None] + jnp.arange(most)[None, None]
    given = jnp.arange(most)[None, None] < by_shard[..., None]
    stack_index = jnp.where(given, pool.count[:, None, None] - 1 - rank, C).reshape(D, -1)
    ids = jnp.take_along_axis(pool.free, stack_index, axis=1, mode="fill", fill_value=C)
    references = jax.vmap(lambda row, new: row.at[new].set(1, mode="drop"))(pool.references, ids)
    columns = jnp.where(given.reshape(-1, most), held.count[:, None] + jnp.arange(most)[None], held.table.shape[1])
    new_table = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
        held.table, columns, ids.reshape(-1, most)
    )
    count = pool.count - by_shard.sum(axis=1, dtype=jnp.int32)
    return PagePool(references, pool.free, count), PageTable(new_table, held.count + need, held.num_shared)


def release(pool: PagePool, held: PageTable, rows: jax.Array) -> tuple[PagePool, PageTable]:
    """Take every page from `rows` [B] bool; those that nobody else holds are free again."""
    D, C = pool.free.shape
    let_go = jnp.where(rows[:, None], held.table, C).reshape(D, -1)
    references = jax.vmap(lambda row, ids: row.at[ids].add(-1, mode="drop"))(pool.references, let_go)
    freed = (pool.references > 0) & (references == 0)
    order = pool.count[:, None] + jnp.cumsum(freed, axis=1, dtype=jnp.int32) - 1
    ids = jnp.broadcast_to(jnp.arange(C, dtype=jnp.int32), (D, C))
    free = jax.vmap(lambda stack, at, new: stack.at[at].set(new, mode="drop"))(
        pool.free, jnp.where(freed, order, C), ids
    )
    pool = PagePool(references, free, pool.count + freed.sum(axis=1, dtype=jnp.int32))
    table = jnp.where(rows[:, None], C, held.table)
    return pool, PageTable(table, jnp.where(rows, 0, held.count), jnp.where(rows, 0, held.num_shared))


def share(pool: PagePool, prompts: PageTable, source: jax.Array, pages: jax.Array) -> tuple[PagePool, PageTable]:
    """Let rows hold the first pages of prompts, beside who holds them now.

    Args:
      prompts: pages of n prompts, n / D of each shard.
      source: [B] int32, index among the prompts of the row's shard.
      pages: [B] int32, pages to share; 0: none.
    Returns:
      the pool, and the rows' pages.
    """
    D, C = pool.free.shape
    table = pick(prompts.table, source.reshape(D, -1))
    table = jnp.where(jnp.arange(table.shape[1])[None] < pages[:, None], table, C)
    references = jax.vmap(lambda row, ids: row.at[ids].add(1, mode="drop"))(pool.references, table.reshape(D, -1))
    return pool._replace(references=references), PageTable(table, pages, pages)


def gather_pages(shards: int, cache: Tree, ids: jax.Array) -> Tree:
    """Return pages `ids` [D, n] of every array [D C, ...] of a cache, as [D, n, ...]."""
    return jax.tree.map(lambda x: jax.vmap(lambda pool, at: pool[at])(split(x, shards), ids), cache)


def scatter_pages(shards: int, cache: Tree, ids: jax.Array, *, values: Tree) -> Tree:
    """Write pages `ids` [D, n], C: none, of every array [D C, ...] of a cache; values [D, n, ...]."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        write = jax.vmap(lambda pool, at, new: pool.at[at].set(new, mode="drop"))
        return write(split(x, shards), ids, new).reshape(x.shape)

    return jax.tree.map(put, cache, values)


def split(x: jax.Array, shards: int) -> jax.Array:
    """Return rows or pages [D n, ...] by shard, [D, n, ...]."""
    return x.reshape(shards, len(x) // shards, *x.shape[1:])


def join(x: jax.Array) -> jax.Array:
    """Invert `split`."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def where_rows(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return `old` [B, ...] with `new` in `rows` [B] bool."""
    return jnp.where(jnp.expand_dims(rows, range(1, old.ndim)), new, old)


def pick(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Return rows [D, m, ...] int32, numbers within their shard, of x [D n, ...], as [D m, ...]."""
    return join(jax.vmap(lambda x, rows: x[rows])(split(x, len(rows)), rows))
