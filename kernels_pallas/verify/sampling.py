"""The final sampling distribution of logits, and one draw from it.

A draw costs one 64-bit counter-based uniform and a tiled inverse CDF. Gumbel noise over the vocabulary would cost more
than the forward pass before it (V = 32,000, 56 rows on a CPU: 41 ms against 1.3 ms); only `coupled` needs it.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.verify.types import Sampling

# Vocabulary entries per tile of the inverse CDF. Part of the definition of a draw: changing it changes tokens.
TILE = 512


def widened(x: jax.Array) -> jax.Array:
    """Convert bfloat16 to float32; leave float32 and float64 as they are."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def smallest_kept(logits: jax.Array, sampling: Sampling) -> jax.Array | None:
    """Return [..., 1], the smallest of [..., V] raw logits that top-k and top-p keep; None if both are off.

    Tokens that tie with it are kept too. A raw logit, since a quotient may be rounded differently in another program.
    """
    smallest = None
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if sampling.top_p < 1.0:
        ordered = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(ordered / sampling.temperature, axis=-1)
        # Keep every token before which less than top_p of the mass lies. The first always is kept. Tokens cut by top-k
        # never are, even if the sum of the others is rounded to less than top_p.
        kept = (jnp.cumsum(probs, axis=-1) - probs < sampling.top_p) & (ordered > -jnp.inf)
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return smallest


def final_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Return [..., V] log-weights of the sampling distribution of [..., V] raw logits; -inf where cut.

    float64 stays float64, other types become float32. Temperature 0 has no distribution and is not allowed.
    """
    logits = widened(logits)
    smallest = smallest_kept(logits, sampling)
    scaled = logits / sampling.temperature
    return scaled if smallest is None else jnp.where(logits >= smallest, scaled, -jnp.inf)


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


def first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return the first entry with positive weight whose cumulative weight exceeds uniform * total."""
    positive = weights > 0
    # A parallel prefix sum is not monotone to the last bit: take the total among positive entries, skip zero ones.
    cumulative = jnp.where(positive, jnp.cumsum(weights, axis=-1), 0.0)
    total = jnp.max(cumulative, axis=-1)
    return jnp.argmax(cumulative > (uniform * total)[..., None], axis=-1).astype(jnp.int32)
