"""Draw cases of attention over pages."""

import jax.numpy as jnp
import numpy as np

from kernels_pallas.attention.types import Pages


def draw(lengths, Q, K, N, H, T, dtype=np.float32, seed=0, pages_seed=0, C=None, spare=0):
    """Return q, pages, table, positions of rows that hold `lengths` tokens; the last Q of each are its queries.

    A row has pages for `spare` more tokens; the first page, the last and some others belong to none. Numbers depend
    neither on T nor on where the pages lie.
    """
    rng, B = np.random.default_rng(seed), len(lengths)
    longest = -(-max([*lengths, 1]) // 128) * 128
    contiguous = rng.normal(size=(2, B, longest, K, H)).astype(dtype)
    q = rng.normal(size=(B, Q, N, H)).astype(dtype)
    pages = [-(-(length + (spare if length else 0)) // T) for length in lengths]
    C = C or sum(pages) + 5
    free = 1 + np.random.default_rng(pages_seed).permutation(C - 2)
    table = np.full((B, -(-(longest + spare) // T)), C, np.int32)
    pools = np.zeros((2, C, K, T, H), dtype)
    for b, n in enumerate(pages):
        table[b, :n], free = free[:n], free[n:]
        held = np.zeros((2, n * T, K, H), dtype)
        held[:, : lengths[b]] = contiguous[:, b, : lengths[b]]
        pools[:, table[b, :n]] = np.swapaxes(held.reshape(2, n, T, K, H), 2, 3)
    positions = np.array(lengths)[:, None] + np.arange(-Q, 0)[None]
    positions = np.where(positions < 0, -1, positions).astype(np.int32)
    return jnp.asarray(q), Pages(*map(jnp.asarray, pools)), jnp.asarray(table), jnp.asarray(positions)


def scattered(pool, table, positions, value):
    """Return a pool with `value` at one position of each row."""
    T = pool.shape[2]
    page = jnp.take_along_axis(table, positions[:, None] // T, axis=1)[:, 0]
    return pool.at[page, :, positions % T].set(value, mode="drop")
