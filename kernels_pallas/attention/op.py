"""Attention over key/value pages on every platform: `attend` and `write` are the public functions of this folder."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas.attention import blocks
from kernels_pallas.attention.types import Pages

__all__ = ["Pages", "attend", "empty_pool", "loaded", "write", "write_pool"]

# (q [B, Q, N, H], pages, table [B, P], positions [B, Q]) -> [B, Q, N, H]
Kernel = Callable[[jax.Array, Pages, jax.Array, jax.Array], jax.Array]
Axes = str | tuple[str, ...] | None

loaded = blocks.loaded


def empty_pool(shape: tuple[int, ...], dtype: jnp.dtype, platform: str) -> jax.Array:
    """Return a pool of zeros, as the platform keeps values of `dtype`."""
    return jnp.zeros(shape, jnp.uint16 if platform == "cpu" and dtype == jnp.bfloat16 else dtype)


def attend(
    q: jax.Array,
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    mesh: Mesh | None = None,
    rows: Axes = None,
    heads: Axes = None,
) -> jax.Array:
    """Attend from each query to the keys and values of its row up to its own position.

    Args:
      q: [B, Q, N, H]; consecutive query heads share one of the K key/value heads.
      table: [B, P] int32, pages of each row.
      positions: [B, Q] int32, ascending; negative: no query, its result is 0.
      mesh: devices that hold the arrays; None: one.
      rows: mesh axes that split the rows and, with them, the pages: the table has numbers of the row's own part.
      heads: mesh axes that split the heads.
    Returns:
      [B, Q, N, H] in the dtype of q.
    """
    fn: Kernel = blocks.attend
    if mesh is None or mesh.size == 1:
        return fn(q, pages, table, positions)
    by_head, pool = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    specs = (by_head, Pages(pool, pool), PartitionSpec(rows), PartitionSpec(rows))  # type: ignore[arg-type]
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=by_head, check_vma=False)(q, pages, table, positions)


def write(
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mesh: Mesh | None = None,
    rows: Axes = None,
    heads: Axes = None,
) -> Pages:
    """Write keys and values [B, Q, K, H] at `positions` [B, Q] of the rows' pages.

    Where the table names no page, and at a negative position, nothing is written. The other arguments are those of
    `attend`.
    """
    return Pages(*(write_pool(pool, table, positions, x, mesh, rows, heads) for pool, x in zip(pages, (keys, values))))


def write_pool(
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    new: jax.Array,
    mesh: Mesh | None = None,
    rows: Axes = None,
    heads: Axes = None,
) -> jax.Array:
    """Write new [B, Q, ...] to one pool: [C, K, T, H] for new [B, Q, K, H], [C, T, ...] otherwise."""
    if mesh is None or mesh.size == 1:
        return blocks.write(pool, table, positions, new)
    by_head = new.ndim == 4
    pool_spec = PartitionSpec(rows, heads) if by_head else PartitionSpec(rows)
    new_spec = PartitionSpec(rows, None, heads) if by_head else PartitionSpec(rows)
    specs = (pool_spec, PartitionSpec(rows), PartitionSpec(rows), new_spec)
    fn = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=pool_spec, check_vma=False)
    return fn(blocks.write)(pool, table, positions, new)
