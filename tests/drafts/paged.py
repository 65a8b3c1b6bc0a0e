"""Pages for caches that a test fills by hand, and what a cache's pages hold, by position."""

import jax.numpy as jnp
import numpy as np

from kernels_pallas.attention.types import Table
from specrl_jax.models.cache import PageShape


def own_pages(rows, length, page_tokens=4):
    """Return the shape of a pool, and a table by which every row has `length` tokens in pages of its own.

    A row's pages are not in order, and the last page of the pool is nobody's.
    """
    columns = -(-length // page_tokens)
    pages = np.random.default_rng(0).permutation(rows * columns).reshape(rows, columns)
    table = jnp.asarray(pages, jnp.int32)
    return PageShape(rows * columns + 1, page_tokens, jnp.dtype("float32"), platform="cpu"), Table(table, table)


def by_position(pool, table, length):
    """Return [B, length, ...] of a pool [C, T, D] or [C, K, T, H] by a table [B, P]; zeros where a row has no page."""
    pool = np.asarray(pool)
    pool = np.moveaxis(pool, 2, 1) if pool.ndim == 4 else pool
    pages = np.concatenate([pool, np.zeros_like(pool[:1])])[np.asarray(table)]
    return pages.reshape(len(pages), -1, *pool.shape[2:])[:, :length]
