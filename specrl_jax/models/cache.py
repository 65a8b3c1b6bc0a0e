"""The paged key/value cache of decoding: what a network reads and writes of it, and by which tables.

Keys and values of every layer lie in pages (`kernels_pallas.attention`); one table of pages serves all layers and the
draft's caches. Commit and rollback are index arithmetic: entries at or beyond a row's length are never read (the mask
is by position) and are overwritten when their position is next computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.attention import op
from kernels_pallas.attention.op import Heads, Paging, Table
from specrl_jax.sharding import Partitioner

__all__ = ["Heads", "KVCache", "PageShape", "Paging", "Table"]

# One array [C, K, 2, T, H] per layer: inference layers are unrolled; separate buffers are donated and updated in place.
# Memory: L * 2 * pages * T * K * H * bytes(dtype); Qwen3-8B in bfloat16 takes 147,456 bytes a token.
KVCache = tuple[jax.Array, ...]

GB = 1e9
# Of an accelerator's memory, for the pages of all caches where rollout.cache_gb does not say. It holds the learner too.
ACCELERATOR_SHARE = 1 / 3

# Logical axes of a pool of keys and values, and of one of hidden states; "batch": a shard's rows have its pages.
Axes = tuple[str | None, ...]
PAGE_AXES: Axes = ("batch", "kv_heads", None, None, "head_dim")
TOKEN_AXES: Axes = ("batch", None, None)


class PageShape(NamedTuple):
    """Sizes of the pools of every cache."""

    pages: int  # C, of all shards together
    tokens: int  # T, of a page
    dtype: jnp.dtype
    platform: str  # of the devices


def is_axes(node: object) -> bool:
    """Return whether a node of a cache's tree of axes is the axes of one pool."""
    return isinstance(node, tuple) and node[:1] == PAGE_AXES[:1]


def init_cache(layers: int, kv_heads: int, head_dim: int, *, shape: PageShape) -> KVCache:
    """Return empty pools of every layer."""
    sizes = shape.pages, kv_heads, 2, shape.tokens, head_dim
    return tuple(op.empty_pool(sizes, shape.dtype, shape.platform) for _ in range(layers))


def init_tokens(width: int, shape: PageShape) -> jax.Array:
    """Return an empty pool [C, T, width] of one vector a token."""
    return op.empty_pool((shape.pages, shape.tokens, width), shape.dtype, shape.platform)


def write(pages: jax.Array, k: jax.Array, v: jax.Array, *, paging: Paging, partition: Partitioner) -> jax.Array:
    """Write k and v [B, Q, K, H]."""
    return op.write(
        pages,
        paging.table.write,
        paging.positions,
        keys=k,
        values=v,
        mesh=partition.mesh,
        rows=partition.axes("batch"),
        heads=partition.axes("kv_heads"),
    )


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, pages: jax.Array, paging: Paging, partition: Partitioner
) -> tuple[jax.Array, jax.Array]:
    """Write k and v [B, Q, K, H], then attend from q [B, Q, N, H] up to each query's own position.

    Returns [B, Q, N, H] in the dtype of q, and the pages.
    """
    pages = write(pages, k, v, paging=paging, partition=partition)
    return _attend(q, pages, paging.table.read, positions=paging.positions, partition=partition), pages


def attend_up_to(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    pages: jax.Array,
    paging: Paging,
    last: jax.Array,
    partition: Partitioner,
) -> tuple[jax.Array, jax.Array]:
    """Do as `attend`, but let each query read up to `last` [B, Q] int32, ascending, instead of its own position."""
    pages = write(pages, k, v, paging=paging, partition=partition)
    return _attend(q, pages, paging.table.read, positions=last, partition=partition), pages


def _attend(
    q: jax.Array, pages: jax.Array, table: jax.Array, *, positions: jax.Array, partition: Partitioner
) -> jax.Array:
    return op.attend(
        q,
        pages,
        table,
        positions=positions,
        mesh=partition.mesh,
        rows=partition.axes("batch"),
        heads=partition.axes("kv_heads"),
    )


def attend_fused(
    fused: jax.Array, heads: Heads, epsilon: float, *, pages: jax.Array, paging: Paging, partition: Partitioner
) -> tuple[jax.Array, jax.Array] | None:
    """Do in few launches what `attend` does of queries, keys and values that are normed and rotated first.

    Returns what `attend` returns; None where no kernel does it.

    Args:
      fused: [B, Q, K, R + 2, H], not normed and not rotated: of each key/value head R queries, the key, the value.
      epsilon: of the norm.
    """
    kernel = op.fused_kernel(fused, pages, paging.table.read, device=partition.mesh.devices.flat[0])
    if kernel is None:
        return None
    return op.attend_fused(
        kernel,
        fused,
        heads,
        epsilon=epsilon,
        pages=pages,
        table=paging.table,
        positions=paging.positions,
        mesh=partition.mesh,
        rows=partition.axes("batch"),
        split=partition.axes("kv_heads"),
    )


def write_tokens(pool: jax.Array, paging: Paging, new: jax.Array, *, partition: Partitioner) -> jax.Array:
    """Write new [B, Q, D] to a pool [C, T, D]."""
    return op.write_pool(
        pool, paging.table.write, paging.positions, new=new, mesh=partition.mesh, rows=partition.axes("batch")
    )


def read_tokens(pool: jax.Array, paging: Paging, partition: Partitioner) -> jax.Array:
    """Read [B, Q, D] from a pool [C, T, D]."""
    return op.read_pool(pool, paging.table.read, paging.positions, mesh=partition.mesh, rows=partition.axes("batch"))
