"""The contiguous key/value cache of decoding, indexed by absolute position.

Token at position s of row b lives at [b, s]: commit and rollback are index arithmetic. Entries at or beyond a row's
length are never read (the mask is by position) and are overwritten when their position is next computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """One array pair per layer: rollout layers are unrolled, and separate buffers are donated and updated in place.

    Memory: L * 2 * B * S * K * H * bytes(dtype); Qwen3-8B in bfloat16 takes 147,456 bytes a token.
    """

    keys: tuple[jax.Array, ...]  # L x [B, S, K, H]
    values: tuple[jax.Array, ...]  # L x [B, S, K, H]


AXES = ("batch", None, "kv_heads", "head_dim")


def init_cache(layers: int, batch: int, length: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    def buffers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((batch, length, kv_heads, head_dim), dtype) for _ in range(layers))

    return KVCache(buffers(), buffers())


def write(buffer: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """Writes new [B, Q, ...] at positions [B, Q] of buffer [B, S, ...]; positions beyond S are dropped.

    Mapped over rows, so the scatter carries a batch dimension and stays local when rows are sharded.
    """

    def row(buffer: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
        return buffer.at[positions].set(new, mode="drop")

    return jax.vmap(row)(buffer, positions, new.astype(buffer.dtype))


def take_rows(cache: KVCache, rows: jax.Array) -> KVCache:
    """The cache with row i replaced by row rows[i]: shares one prefill among the answers of its group."""
    return jax.tree.map(lambda buffer: buffer[rows], cache)
