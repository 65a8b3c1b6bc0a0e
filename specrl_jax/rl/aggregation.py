"""Sums over sequences, and the aggregation of a batch's tokens into one loss. Rows may be packed."""

import jax
import jax.numpy as jnp

from specrl_jax.core import Mean, masked_mean

AGGREGATIONS = ("token", "sequence", "constant")


def sequence_sum(values: jax.Array, mask: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Sum `values` over the masked tokens of each sequence; every token [B, T] gets its sequence's sum.

    Args:
      values, mask: [B, T].
      segments: [B, T] int32, 0 .. T, the sequence of each token in its row; None: a row is one sequence.
    """
    values = jnp.where(mask, values, 0)
    if segments is None:
        return jnp.broadcast_to(values.sum(axis=1, keepdims=True), values.shape)

    def sum_row(values: jax.Array, segments: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, segments, len(values) + 1)[segments]

    return jax.vmap(sum_row)(values, segments)


def count_sequences(mask: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Count sequences with a masked token, [] float32; mask and segments as in `sequence_sum`."""
    if segments is None:
        return mask.any(axis=1).sum(dtype=jnp.float32)

    def count_row(mask: jax.Array, segments: jax.Array) -> jax.Array:
        return jax.ops.segment_max(mask.astype(jnp.int32), segments, mask.size + 1).clip(0).sum(dtype=jnp.float32)

    return jax.vmap(count_row)(mask, segments).sum()


def aggregate(values: jax.Array, mask: jax.Array, segments: jax.Array | None, *, how: str, longest: int) -> Mean:
    """Reduce the losses of a batch to one number, as (sum, count).

    Args:
      values, mask: [B, T], response tokens under the mask.
      segments: [B, T] int32 of packed rows; None: a row is one answer.
      how: "token", the mean over all tokens, so that long answers weigh more (DAPO, arXiv 2503.14476, eq. 8);
        "sequence", the mean over answers of their tokens' means (DeepSeekMath, arXiv 2402.03300, eq. 3);
        "constant", the sum over tokens by answers x `longest`, so that no answer's own length divides (Dr. GRPO,
        arXiv 2503.20783, section 3.2).
        An answer without a token under the mask (cut at the limit with grpo.mask_truncated, or of a group that teaches
        nothing) is in no denominator, as in verl: the loss is a mean over what it counts, so that answers left out do
        not shrink the others' gradient. TRL counts them: with one of four left out, its `sequence` and `constant` are
        3 / 4 of these.
      longest: tokens of the longest answer that is possible.
    """
    tokens = masked_mean(values, mask)
    if how == "token":
        return tokens
    count = count_sequences(mask, segments)
    if how == "constant":
        return Mean(tokens.total, count * longest)
    length = sequence_sum(mask.astype(values.dtype), mask, segments)
    return Mean(masked_mean(values / jnp.maximum(length, 1), mask).total, count)
