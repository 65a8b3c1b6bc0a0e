"""Sums over sequences, and how a batch's tokens become one number. Rows may be packed."""

import jax
import jax.numpy as jnp

from specrl_jax.core import Mean, masked_mean, shift_left

AGGREGATIONS = ("token", "sequence", "constant")


def sequence_sum(values: jax.Array, mask: jax.Array, segments: jax.Array | None) -> jax.Array:
    """[B, T]: at every token the sum of `values` over the masked tokens of its sequence.

    Args:
      values, mask: [B, T].
      segments: [B, T] int32, 0 .. T, which sequence of its row a token belongs to; None: a row is one sequence.
    """
    values = jnp.where(mask, values, 0)
    if segments is None:
        return jnp.broadcast_to(values.sum(axis=1, keepdims=True), values.shape)

    def of_row(values: jax.Array, segments: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, segments, len(values) + 1)[segments]

    return jax.vmap(of_row)(values, segments)


def count_sequences(mask: jax.Array) -> jax.Array:
    """[] float32, sequences with a masked token, which follow each other up to the one before the sequence's last.

    That last token has no target in its sequence, so no mask: what is next in a packed row begins after a gap.
    """
    return (mask & ~shift_left(mask, 1)).sum(dtype=jnp.float32)


def aggregate(values: jax.Array, mask: jax.Array, segments: jax.Array | None, how: str, longest: int) -> Mean:
    """One number of a batch, as (sum, count).

    Args:
      values, mask: [B, T], response tokens under the mask.
      how: "token", the mean over all tokens, so that long answers weigh more (DAPO, arXiv 2503.14476, eq. 8);
        "sequence", the mean over answers of their tokens' means (DeepSeekMath, arXiv 2402.03300, eq. 3);
        "constant", the sum over tokens by answers x `longest`, so that no answer's own length divides (Dr. GRPO,
        arXiv 2503.20783, section 3.2).
      longest: tokens that an answer may have.
    """
    tokens = masked_mean(values, mask)
    if how == "token":
        return tokens
    count = count_sequences(mask)
    if how == "constant":
        return Mean(tokens.total, count * longest)
    length = sequence_sum(mask.astype(values.dtype), mask, segments)
    return Mean(masked_mean(values / jnp.maximum(length, 1), mask).total, count)
