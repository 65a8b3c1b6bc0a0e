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


def _shards(partition: Partitioner) -> op.Shards:
    return op.Shards(partition.mesh, partition.axes("batch"), partition.axes("kv_heads"))


def write(pages: jax.Array, k: jax.Array, v: jax.Array, *, paging: Paging, partition: Partitioner) -> jax.Array:
    """Write k and v [B, Q, K, H]."""
    new = jnp.stack([k, v], axis=3)
    return op.write_pool(pages, paging.table.write, paging.positions, new=new, shards=_shards(partition))


class PagedAttention:
    """Attention of tokens [B, Q] over the pages of one layer, to which their keys and values are written first.

    Args:
      last: [B, Q] int32, ascending, the position up to which each query reads; None: its own.

    Attributes:
      pages: [C, K, 2, T, H]; after the call those with the new keys and values.
    """

    def __init__(
        self, pages: jax.Array, paging: Paging, partition: Partitioner, *, last: jax.Array | None = None
    ) -> None:
        self.pages, self._paging, self._partition = pages, paging, partition
        self._last = paging.positions if last is None else last

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Return [B, Q, N, H] in the dtype of q, of q [B, Q, N, H], k and v [B, Q, K, H]."""
        self.pages = write(self.pages, k, v, paging=self._paging, partition=self._partition)
        return op.attend(q, self.pages, self._paging.table.read, self._last, shards=_shards(self._partition))

    def fused(self, fused: jax.Array, heads: Heads, epsilon: float) -> jax.Array | None:
        """Norm, rotate, write and attend from a fused product, as `op.attend_fused`; None where no kernel does."""
        paging, shards = self._paging, _shards(self._partition)
        found = op.attend_fused(
            fused,
            heads,
            epsilon=epsilon,
            pages=self.pages,
            table=paging.table,
            positions=paging.positions,
            shards=shards,
        )
        if found is None:
            return None
        out, self.pages = found
        return out


def write_tokens(pool: jax.Array, paging: Paging, new: jax.Array, *, partition: Partitioner) -> jax.Array:
    """Write new [B, Q, D] to a pool [C, T, D]."""
    return op.write_pool(pool, paging.table.write, paging.positions, new=new, shards=_shards(partition))


def read_tokens(pool: jax.Array, paging: Paging, partition: Partitioner) -> jax.Array:
    """Read [B, Q, D] from a pool [C, T, D]."""
    return op.read_pool(pool, paging.table.read, paging.positions, shards=_shards(partition))
