"""The contiguous key/value cache of decoding, indexed by absolute position, and attention over it.

The value at position s of row b is at [b, :, s], the key at [b, :, :, s]: commit and rollback are index arithmetic.
Entries at or beyond a row's length are never read (the mask is by position) and are overwritten when their position is
next computed.

In this layout both matmuls of attention read consecutive memory. With keys laid out like values, the first of them
takes a CPU 2.5 times as long (8 rows, 160 positions, 2 heads of 64: 25 against 10 us); with positions before heads, XLA
transposes a copy of the cache in every layer of every forward.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """One pair of arrays per layer: inference layers are unrolled; separate buffers are donated and updated in place.

    Memory: L * 2 * B * S * K * H * bytes(dtype); Qwen3-8B in bfloat16 takes 147,456 bytes a token.
    """

    keys: tuple[jax.Array, ...]  # L x [B, K, H, S]
    values: tuple[jax.Array, ...]  # L x [B, K, S, H]


KEY_AXES = ("batch", "kv_heads", "head_dim", None)
VALUE_AXES = ("batch", "kv_heads", None, "head_dim")


def init_cache(layers: int, batch: int, length: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """Return a cache of zeros for `batch` rows of `length` positions."""
    keys = tuple(jnp.zeros((batch, kv_heads, head_dim, length), dtype) for _ in range(layers))
    return KVCache(keys, tuple(jnp.zeros((batch, kv_heads, length, head_dim), dtype) for _ in range(layers)))


def write_keys(buffer: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """Write new [B, Q, K, H] at positions [B, Q] of buffer [B, K, H, S]; positions beyond S are dropped.

    vmapped over rows and heads, so that the scatter has batch dimensions and stays local where those are sharded.
    """
    new = jnp.transpose(new, (0, 2, 3, 1)).astype(buffer.dtype)

    def write(buffer: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
        return buffer.at[:, positions].set(new, mode="drop")

    return jax.vmap(jax.vmap(write, (0, None, 0)))(buffer, positions, new)


def write_values(buffer: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """Write new [B, Q, K, H] at positions [B, Q] of buffer [B, K, S, H]; positions beyond S are dropped."""
    new = jnp.swapaxes(new, 1, 2).astype(buffer.dtype)
    return jax.vmap(jax.vmap(_write_row, (0, None, 0)))(buffer, positions, new)


def write_tokens(buffer: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """Write new [B, Q, ...] at positions [B, Q] of buffer [B, S, ...]; positions beyond S are dropped."""
    return jax.vmap(_write_row)(buffer, positions, new.astype(buffer.dtype))


def _write_row(buffer: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    return buffer.at[positions].set(new, mode="drop")


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """Attend from queries at `positions` [B, Q] to keys and values of a cache up to each query's own position.

    The queries that share a key/value head are the rows of one matmul. Softmax in float32; matmuls in the dtype of the
    cache, which may be wider than the activations (float32 on a CPU).

    Args:
      keys: [B, K, H, S].
      values: [B, K, S, H].
      q: [B, Q, N, H]; consecutive query heads share one of the K.
    Returns:
      [B, Q, N, H] in the dtype of q.
    """
    B, Q, N, H = q.shape
    K, S = values.shape[1:3]
    grouped = jnp.swapaxes(q.reshape(B, Q, K, N // K, H), 1, 2).reshape(B, K, -1, H).astype(keys.dtype)
    scores = jnp.einsum("BKMH,BKHS->BKMS", grouped, keys, preferred_element_type=jnp.float32)
    visible = jnp.arange(S)[None, None] <= jnp.repeat(positions, N // K, axis=1)[:, :, None]  # [B, M, S]
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores * H**-0.5, -jnp.inf), axis=-1)
    out = jnp.einsum("BKMS,BKSH->BKMH", weights.astype(values.dtype), values)
    return jnp.swapaxes(out.reshape(B, K, Q, N // K, H), 1, 2).reshape(B, Q, N, H).astype(q.dtype)
