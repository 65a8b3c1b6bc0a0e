"""Draw cases of attention over pages."""

import jax.numpy as jnp
import numpy as np


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
    pools = np.zeros((C, K, 2, T, H), dtype)
    for b, n in enumerate(pages):
        table[b, :n], free = free[:n], free[n:]
        held = np.zeros((2, n * T, K, H), dtype)
        held[:, : lengths[b]] = contiguous[:, b, : lengths[b]]
        pools[table[b, :n]] = np.transpose(held.reshape(2, n, T, K, H), (1, 3, 0, 2, 4))
    positions = np.array(lengths)[:, None] + np.arange(-Q, 0)[None]
    positions = np.where(positions < 0, -1, positions).astype(np.int32)
    return jnp.asarray(q), jnp.asarray(pools), jnp.asarray(table), jnp.asarray(positions)


def scattered(pages, table, positions, value):
    """Return pages with `value` at one position of each row."""
    T = pages.shape[3]
    page = jnp.take_along_axis(table, positions[:, None] // T, axis=1)[:, 0]
    return pages.at[page, :, :, positions % T].set(value, mode="drop")
