"""Rows that wait on the host until there are pages for them again, and the functions that move them.

A row is copied bit for bit, its pages too, and goes on where it stood: its rollout is the one it would have been.
Moving it costs its bytes twice over the host's link (8B, 2,500 tokens: 0.37 GB), prefilling it again a forward over
them. It is no feature that can be off: pages may run out under any config.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.pages import gather_pages, release, scatter_pages, take
from specrl_jax.decoding.state import Cache, Slots

# Pages of a row that are copied at a time: bounds the copy beside the cache.
PAGES = 16


class PreemptedRow(NamedTuple):
    """A row on the host."""

    request: int
    row: Slots  # its values, with no leading axis
    pages: list[object]  # of every cache, PAGES at a time


def read_row(slots: Slots[Cache], row: jax.Array) -> Slots:
    """Return the values of one row, its pages' contents aside."""
    return jax.tree.map(lambda x: x[row], slots.by_row())


def read_pages(slots: Slots[Cache], row: jax.Array, first: jax.Array) -> Cache:
    """Return the contents of pages [first, first + PAGES) of a row; of any page where it has none."""
    D, C = slots.pool.free.shape
    shard, ids = _ids(slots, row, first)
    pages = gather_pages(D, slots.cache, jnp.broadcast_to(jnp.minimum(ids, C - 1), (D, PAGES)))
    return jax.tree.map(lambda x: x[shard], pages)


def drop_row(slots: Slots[Cache], row: jax.Array) -> Slots[Cache]:
    """End a row and free its pages."""
    chosen = jnp.arange(len(slots.done)) == row
    pool, held = release(slots.pool, slots.held, chosen)
    return dataclasses.replace(slots, done=slots.done | chosen, pool=pool, held=held)


def restore_row(slots: Slots[Cache], row: jax.Array, values: Slots) -> Slots[Cache]:
    """Put the values of `read_row` into a free row and take as many pages as it had, all of them its own."""
    restored = jax.tree.map(lambda x, new: x.at[row].set(new), slots.by_row(), values)
    chosen = jnp.arange(len(slots.done)) == row
    empty = slots.held._replace(num_shared=jnp.where(chosen, 0, slots.held.num_shared))
    pool, held = take(slots.pool, empty, jnp.where(chosen, values.held.count, 0), slots.held.table.shape[1])
    # It runs again where it ran, and waits where its turn had ended.
    return dataclasses.replace(restored, lookup_cache=slots.lookup_cache, cache=slots.cache, pool=pool, held=held)


def write_pages(slots: Slots[Cache], row: jax.Array, first: jax.Array, contents: Cache) -> Slots[Cache]:
    """Write the contents of pages [first, first + PAGES) of a row."""
    D, C = slots.pool.free.shape
    shard, ids = _ids(slots, row, first)
    here = jnp.arange(D)[:, None] == shard
    values = jax.tree.map(lambda x: jnp.broadcast_to(x, (D, *x.shape)), contents)
    return dataclasses.replace(slots, cache=scatter_pages(D, slots.cache, jnp.where(here, ids, C), values=values))


def _ids(slots: Slots[Cache], row: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the shard of a row, and the ids [PAGES] of its pages from column `first` on."""
    D, C = slots.pool.free.shape
    columns = first + jnp.arange(PAGES)
    ids = slots.held.table[row].at[columns].get(mode="fill", fill_value=C)
    return row // (len(slots.done) // D), ids


def first_columns(count: int) -> list[np.int32]:
    """Return the first column of each copy of a row of `count` pages."""
    return [np.int32(first) for first in range(0, count, PAGES)]
