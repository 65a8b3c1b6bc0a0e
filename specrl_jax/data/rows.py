"""Fixed-shape rows of tokens for the learner: one sequence per row, or several packed into a row."""

from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import numpy as np

from specrl_jax.core import stand_in

Array = np.ndarray | jax.Array


@flax.struct.dataclass
class KeptTokens:
    """The token ids that top-k and top-p kept where each target of rows [B, T] was sampled: the sampling mask.

    Log-probs, entropy and the draft's target are then of the distribution over those ids.
    """

    ids: jax.Array  # [B, N] int32, those of a row's targets one after the other, then -1
    count: jax.Array  # [B, T] int32, how many of them each target has; 0: every token could be sampled


@flax.struct.dataclass
class Rows:
    """Token rows, padded right, on the host or on devices; entry t of `targets` and `mask` refers to token t + 1."""

    tokens: jax.Array  # [B, T] int32
    positions: jax.Array  # [B, T] int32
    targets: jax.Array  # [B, T] int32, the next token
    mask: jax.Array  # [B, T] bool, true where the next token is a response token
    segments: jax.Array | None = None  # [B, T] int32, sequence of a packed row, 0 padding; None: one sequence per row
    kept: KeptTokens | None = None  # None: every token could be sampled
    # [B, T, L k], the experts of each token (models/decoder/expert_record.py); None: none
    experts: jax.Array | None = None


class Places(NamedTuple):
    """Positions of R sequences in packed rows."""

    row: np.ndarray  # [R] int64
    start: np.ndarray  # [R] int64, position of the first token
    segment: np.ndarray  # [R] int64, from 1
    rows: int  # B
    tokens: int  # T, of a row


def make_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], length: int, *, pad_id: int
) -> Rows:
    """Make one row per (prompt, response), padded right to `length` tokens. Raises ValueError for a longer pair."""
    tokens = np.full((len(prompts), length), pad_id, np.int32)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens[row, : len(prompt) + len(response)] = [*prompt, *response]
    prompt_length = np.array([len(prompt) for prompt in prompts])
    return rows_of(tokens, prompt_length, prompt_length + [len(response) for response in responses], pad_id=pad_id)


def rows_of(
    tokens: np.ndarray,
    prompt_length: np.ndarray,
    length: np.ndarray,
    *,
    pad_id: int,
    environment: np.ndarray | None = None,
) -> Rows:
    """Make rows from padded `tokens` [B, T] int32: prompt, then response, `length` [B] tokens together.

    Args:
      environment: [B, T] bool, tokens that an environment wrote: context, and no target; None: none.
    """
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    mask = (positions >= prompt_length[:, None] - 1) & (positions < length[:, None] - 1)
    if environment is not None:
        mask &= ~np.pad(environment[:, 1:], ((0, 0), (0, 1)))
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=pad_id)
    return Rows(stand_in(tokens), stand_in(positions), stand_in(targets), mask=stand_in(mask))


def pack(length: np.ndarray, row_length: int) -> Places:
    """Pack by first-fit decreasing: longest first, each into the first row that fits (at most 11/9 of the optimum + 1).

    Args:
      length: [R] tokens of the sequences, at most `row_length`.
    """
    row, start, segment = (np.zeros(len(length), np.int64) for _ in range(3))
    used, held = np.zeros(len(length), np.int64), np.zeros(len(length), np.int64)
    for i in np.argsort(-length, kind="stable"):
        r = int(np.argmax(used + length[i] <= row_length))
        row[i], start[i], segment[i] = r, used[r], held[r] + 1
        used[r] += length[i]
        held[r] += 1
    return Places(row, start, segment, rows=int((held > 0).sum()), tokens=row_length)


def packed(values: Array, places: Places, length: np.ndarray, *, empty: int | float | bool) -> np.ndarray:
    """Move per-token values [R, S, ...] of sequences to packed rows [B, T, ...], padded with `empty`."""
    out = np.full((places.rows, places.tokens, *values.shape[2:]), empty, values.dtype)
    for i, (row, start) in enumerate(zip(places.row, places.start)):
        out[row, start : start + length[i]] = values[i, : length[i]]
    return out


def packed_rows(rows: Rows, places: Places, length: np.ndarray, *, pad_id: int) -> Rows:
    """Pack `rows` of one sequence each, `length` [R] tokens, into `places`, with segment ids."""
    segments = np.broadcast_to(places.segment[:, None].astype(np.int32), rows.tokens.shape)

    def move(values: Array, empty: int | bool) -> jax.Array:
        return stand_in(packed(values, places, length, empty=empty))

    return Rows(
        move(rows.tokens, pad_id),
        move(rows.positions, 0),
        move(rows.targets, pad_id),
        mask=move(rows.mask, False),
        segments=move(segments, 0),
    )
