"""Keys and values in pages.

Letters: B rows, Q queries of a row, N query heads, K key/value heads, H head width, T tokens of a page, P pages that a
row can have, C pages of the pool.

`pages` [C, K, 2, T, H] are the keys (KEYS) and values (VALUES) of one layer, T positions of one sequence a page: one
array, so that both are written at once. The table [B, P] int32 of a call names the page of positions [j T, (j + 1) T)
of each row at column j; C: none, and none after it. What a page holds beyond its row's length is finite: its weights
are 0. bfloat16 is kept as uint16 on a CPU, where XLA would convert the whole pool to float32 at every write.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

KEYS, VALUES = 0, 1


class Table(NamedTuple):
    """Pages of every row, to read and to write."""

    read: jax.Array  # [B, P] int32
    write: jax.Array  # [B, P] int32, without the pages that other rows read too


class Paging(NamedTuple):
    """Positions and pages of a forward's tokens [B, Q]: at `positions` of their sequences, in the pages of `table`."""

    table: Table
    positions: jax.Array  # [B, Q] int32; negative: no token, which reads and writes nothing


class Heads(NamedTuple):
    """Scales and rotations that make queries and keys of a layer's projections: RMSNorm over each head, then RoPE."""

    q_scale: jax.Array | None  # [H]; None: heads are not normalised
    k_scale: jax.Array | None  # [H]
    sin: jax.Array  # [B, Q, 1, H / 2] float32
    cos: jax.Array  # [B, Q, 1, H / 2] float32


def find(table: jax.Array, positions: jax.Array, C: int, *, T: int) -> tuple[jax.Array, jax.Array]:
    """Return page and offset [B, Q] of each position; page C: none."""
    column = jnp.where(positions < 0, table.shape[1], positions // T)
    return jnp.take_along_axis(table, column, axis=1, mode="fill", fill_value=C), positions % T


def last_seen(table: jax.Array, positions: jax.Array, C: int, *, T: int) -> jax.Array:
    """Return the last position [B, Q] that each query sees: its own, or the end of its row's pages; -1: none."""
    held = (table < C).sum(axis=1, keepdims=True, dtype=positions.dtype) * T
    return jnp.maximum(jnp.minimum(positions, held - 1), -1)


def grouped(q: jax.Array, K: int, multiple: int = 1) -> jax.Array:
    """Return q [B, Q, N, H] as [B, K, M, H]: the queries of one key/value head are the rows of one matmul.

    M is Q N / K, padded with zeros to a multiple.
    """
    B, Q, N, H = q.shape
    x = jnp.swapaxes(q.reshape(B, Q, K, N // K, H), 1, 2).reshape(B, K, -1, H)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % multiple), (0, 0)))


def ungrouped(x: jax.Array, Q: int, N: int) -> jax.Array:
    """Return the first Q N / K rows of x [B, K, M, H] as [B, Q, N, H]."""
    B, K, _, H = x.shape
    x = x[:, :, : Q * N // K].reshape(B, K, Q, N // K, H)
    return jnp.swapaxes(x, 1, 2).reshape(B, Q, N, H)
