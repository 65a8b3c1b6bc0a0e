"""Fixed-shape rows of tokens for the learner."""

from collections.abc import Sequence

import flax.struct
import jax
import numpy as np

Array = np.ndarray | jax.Array


@flax.struct.dataclass
class Rows:
    """Token rows, one sequence each, padded right; entry t of `targets` and `mask` belongs to token t + 1."""

    tokens: Array  # [B, T] int32
    positions: Array  # [B, T] int32
    targets: Array  # [B, T] int32, the next token
    mask: Array  # [B, T] bool, true where the next token is a response token


def make_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], length: int, pad_id: int) -> Rows:
    """One row per (prompt, response), padded right to `length` tokens. A pair that is longer is a caller's bug."""
    count = len(prompts)
    tokens = np.full((count, length + 1), pad_id, np.int32)
    mask = np.zeros((count, length), bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        total = len(prompt) + len(response)
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : total] = response
        mask[row, len(prompt) - 1 : total - 1] = True
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (count, length))
    return Rows(tokens[:, :-1], positions, tokens[:, 1:], mask)
