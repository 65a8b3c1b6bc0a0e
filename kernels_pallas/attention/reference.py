"""Attention over pages by its definition: every page of every row gathered, one softmax."""

import jax
import jax.numpy as jnp

from kernels_pallas.attention.types import KEYS, VALUES


def attend(q: jax.Array, pages: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Attend from q [B, Q, N, H] at `positions` [B, Q] to the keys and values of each row up to its own position.

    Computed in the dtype of q. A query without a position (negative) has the result 0.
    """
    B, Q, N, H = q.shape
    C, K, _, T, _ = pages.shape

    def whole(which: int) -> jax.Array:
        """Return the keys or values [B, K, P T, H] of every row."""
        return jnp.swapaxes(pages[jnp.minimum(table, C - 1), :, which], 1, 2).reshape(B, K, -1, H).astype(q.dtype)

    grouped = q.reshape(B, Q, K, N // K, H)
    scores = jnp.einsum("BQKRH,BKSH->BKRQS", grouped, whole(KEYS)) * H**-0.5
    there = jnp.repeat(table < C, T, axis=1)[:, None] & (
        jnp.arange(table.shape[1] * T)[None, None] <= positions[:, :, None]
    )
    weights = jax.nn.softmax(scores, axis=-1, where=there[:, None, None])
    out = jnp.einsum("BKRQS,BKSH->BQKRH", jnp.nan_to_num(weights), whole(VALUES))
    return out.reshape(B, Q, N, H)
