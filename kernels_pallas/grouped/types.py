"""The experts' matrices of one device.

Letters: E experts, D model width, F width of an expert, J tiles of M rows each.
"""

from typing import NamedTuple

import jax


class Matrices(NamedTuple):
    """Matrices of every expert. Those in 8 bits stand for `values * scale`, one scale for each column."""

    gate: jax.Array  # [E, D, F]
    up: jax.Array  # [E, D, F]
    down: jax.Array  # [E, F, D]
    scales: tuple[jax.Array, jax.Array, jax.Array] | None = None  # [E, 1, F], [E, 1, F], [E, 1, D]; None: not in 8 bits
