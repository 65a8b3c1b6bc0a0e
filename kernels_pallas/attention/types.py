"""Keys and values in pages.

Letters: B rows, Q queries of a row, N query heads, K key/value heads, H head width, T tokens of a page, P pages that a
row can have, C pages of the pool.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pages(NamedTuple):
    """Keys and values of one layer, T positions of one sequence a page.

    The table [B, P] int32 of a call names the page of positions [j T, (j + 1) T) of each row at column j; C: none, and
    none after it. What a page holds beyond its row's length is finite: its weights are 0.
    bfloat16 is kept as uint16 on a CPU, where XLA would convert the whole pool to float32 at every write.
    """

    keys: jax.Array  # [C, K, T, H]
    values: jax.Array  # [C, K, T, H]


def last_seen(table: jax.Array, positions: jax.Array, C: int, T: int) -> jax.Array:
    """Return the last position [B, Q] that each query sees: its own, or the end of its row's pages; -1: none."""
    held = (table < C).sum(axis=1, keepdims=True, dtype=positions.dtype) * T
    return jnp.maximum(jnp.minimum(positions, held - 1), -1)
