"""Keys and values in pages.

Letters: B rows, Q queries of a row, N query heads, K key/value heads, H head width, T tokens of a page, P pages that a
row can have, C pages of the pool.
"""

from typing import NamedTuple

import jax


class Pages(NamedTuple):
    """Keys and values of one layer, T positions of one sequence a page.

    The table [B, P] int32 of a call names the page of positions [j T, (j + 1) T) of each row at column j; C: none.
    bfloat16 is kept as uint16 on a CPU, where XLA would convert the whole pool to float32 at every write.
    """

    keys: jax.Array  # [C, K, T, H]
    values: jax.Array  # [C, K, T, H]
