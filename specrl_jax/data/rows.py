"""Fixed-shape rows of tokens for the learner."""

from collections.abc import Sequence

import flax.struct
import jax
import numpy as np

Array = np.ndarray | jax.Array


@flax.struct.dataclass
class Rows:
    """Token rows, padded right; entry t of `targets` and `mask` belongs to token t + 1."""

    tokens: Array  # [B, T] int32
    positions: Array  # [B, T] int32
    targets: Array  # [B, T] int32, the next token
    mask: Array  # [B, T] bool, true where the next token is a response token
    segments: Array | None = None  # [B, T] int32, which sequence of a packed row, 0 padding; None: one sequence a row


def make_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], length: int, pad_id: int) -> Rows:
    """One row per (prompt, response), padded right to `length` tokens. A pair that is longer is a caller's bug."""
    tokens = np.full((len(prompts), length), pad_id, np.int32)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens[row, : len(prompt) + len(response)] = [*prompt, *response]
    prompt_length = np.array([len(prompt) for prompt in prompts])
    return rows_of(tokens, prompt_length, prompt_length + [len(response) for response in responses], pad_id)


def rows_of(tokens: np.ndarray, prompt_length: np.ndarray, length: np.ndarray, pad_id: int) -> Rows:
    """Rows from padded `tokens` [B, T] int32, whose row b is a prompt, then its response, of `length` [B] together."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    mask = (positions >= prompt_length[:, None] - 1) & (positions < length[:, None] - 1)
    return Rows(tokens, positions, np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=pad_id), mask)
