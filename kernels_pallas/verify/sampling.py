"""The final sampling distribution of logits, and one draw from it.

A draw costs one 64-bit counter-based uniform and a tiled inverse CDF. Gumbel noise over the vocabulary would cost more
than the forward pass before it (V = 32,000, 56 rows on a CPU: 41 ms against 1.3 ms); only `coupled` needs it.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.verify.limits import MOST_KEPT
from kernels_pallas.verify.types import RowSampling, SamplingMask, SamplingParams

# Vocabulary entries per tile of the inverse CDF. Part of the definition of a draw: changing it changes tokens.
TILE = 512


def widened(x: jax.Array) -> jax.Array:
    """Convert bfloat16 to float32; leave float32 and float64 as they are."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def most_kept(sampling: SamplingParams) -> int:
    """Return K, the most tokens that top-k and top-p keep; 0: both are off, or decoding is greedy.

    Bounded, so that the tokens kept can be recorded: `top_p` alone chooses among the MOST_KEPT likeliest tokens.
    """
    if not sampling.temperature or (not sampling.top_k and sampling.top_p == 1.0):
        return 0
    return sampling.top_k or MOST_KEPT


def truncate(
    logits: jax.Array, sampling: SamplingParams, rows: RowSampling | None = None
) -> tuple[jax.Array, SamplingMask | None]:
    """Return raw logits [..., V], -inf where top-k or top-p cut them, and what they keep; None if both are off.

    Top-k keeps the likeliest tokens; of these, top-p keeps every one before which less than top_p of their mass at the
    temperature lies. Of equally likely tokens the lowest ids are kept.

    Args:
      rows: of logits [B, Q, V]; `sampling` then says the K tokens that are kept at most, and greedy rows are not cut.
    """
    K = min(most_kept(sampling), logits.shape[-1])
    if not K:
        return logits, None
    if rows is not None:
        temperature, top_k, top_p = (x[:, None, None] for x in (rows.divisor, rows.top_k, rows.top_p))
        cut, mask = _truncate(logits, K, temperature, top_k, top_p)
        return jnp.where(rows.greedy[:, None, None], logits, cut), mask
    return _truncate(logits, K, sampling.temperature, 0, sampling.top_p)


def _truncate(
    logits: jax.Array, K: int, temperature: jax.Array | float, top_k: jax.Array | int, top_p: jax.Array | float
) -> tuple[jax.Array, SamplingMask]:
    """Truncate to top_k (0: K), then to top_p; values [B, 1, 1] or of all."""
    # Zero equals minus zero, but a sort may put it first.
    logits = jnp.where(logits == 0, 0.0, logits)
    likeliest, ids = jax.lax.top_k(logits, K)
    place = jax.lax.broadcasted_iota(jnp.int32, likeliest.shape, likeliest.ndim - 1)
    kept = (likeliest > -jnp.inf) & (place < jnp.where(top_k == 0, K, top_k))
    probs = jax.nn.softmax(jnp.where(kept, likeliest, -jnp.inf) / temperature, axis=-1)
    kept &= (top_p >= 1.0) | (jnp.cumsum(probs, axis=-1) - probs < top_p)
    count = jnp.maximum(kept.sum(axis=-1, dtype=jnp.int32), 1)
    # Of the tokens with the smallest kept logit, `ids` has the lowest in rising order: those up to the last one stay.
    smallest, last = (jnp.take_along_axis(x, count[..., None] - 1, axis=-1) for x in (likeliest, ids))
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    stays = (logits > smallest) | ((logits == smallest) & (columns <= last))
    return jnp.where(stays, logits, -jnp.inf), SamplingMask(ids.astype(jnp.int32), count)


def final_logits(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
    """Return [..., V] log-weights of the sampling distribution of [..., V] raw logits; -inf where cut.

    float64 stays float64, other types become float32. Temperature 0 has no distribution and is not allowed.
    """
    return truncate(widened(logits), sampling)[0] / sampling.temperature


def draw(weights: jax.Array, uniforms: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Draw one index per row, with probability weights / sum(weights).

    Args:
      weights: [..., V] float, non-negative, not all zero; an entry of zero is never drawn.
      uniforms: two [...] float32 in [0, 1): one picks the tile, the other the entry in it, so that entries with
        probabilities far below 2**-24 are still drawn in proportion inside their tile.
    Returns:
      [...] int32.
    """
    V = weights.shape[-1]
    if V <= TILE:
        return first_above(weights, uniforms[1])
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -V % TILE)])
    tiles = padded.reshape(*weights.shape[:-1], -1, TILE)
    tile = first_above(tiles.sum(axis=-1), uniforms[0])
    inside = jnp.take_along_axis(tiles, tile[..., None, None], axis=-2)[..., 0, :]
    return tile * TILE + first_above(inside, uniforms[1])


def draw_rows(logits: jax.Array, uniforms: tuple[jax.Array, jax.Array], greedy: jax.Array) -> jax.Array:
    """Draw [B, ...] indices of softmax(logits [B, ..., V]) as `draw` does; of `greedy` rows [B] the likeliest."""
    drawn = draw(jax.nn.softmax(logits, axis=-1), uniforms)
    likeliest = jax.lax.cond(greedy.any(), lambda: jnp.argmax(logits, axis=-1).astype(drawn.dtype), lambda: drawn)
    return jnp.where(jnp.expand_dims(greedy, range(1, drawn.ndim)), likeliest, drawn)


def first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return the first entry with positive weight whose cumulative weight exceeds uniform * total."""
    positive = weights > 0
    # A parallel prefix sum is not monotone to the last bit: take the total among positive entries, skip zero ones.
    cumulative = jnp.where(positive, jnp.cumsum(weights, axis=-1), 0.0)
    total = jnp.max(cumulative, axis=-1)
    return jnp.argmax(cumulative > (uniform * total)[..., None], axis=-1).astype(jnp.int32)
