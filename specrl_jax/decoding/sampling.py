"""From logits to a token: the final sampling distribution, and one draw from it.

A draw costs one 64-bit counter-based uniform and a tiled inverse CDF. Gumbel noise over the vocabulary would cost more
than the forward pass it follows (V = 32,000, 56 rows on a CPU: 41 ms against 1.3 ms); only `coupled` needs it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specrl_jax.core import BadInput, at_least_float32

# Vocabulary entries per tile of the inverse CDF. Part of the definition of a draw: changing it changes tokens.
TILE = 512

# How drafts are verified; `verification` says what each one is.
RULES = ("rejection", "block", "coupled")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p. temperature 0 = greedy, top_k 0 = off, top_p 1.0 = off; `rule` of RULES."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    rule: str = "rejection"

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise BadInput(f"rollout: temperature >= 0, top_k >= 0 and 0 < top_p <= 1 are needed, not {self}")
        if self.rule not in RULES:
            raise BadInput(f"rollout.rule={self.rule!r}: it is one of {', '.join(RULES)}")


def final_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """[..., V] raw logits -> [..., V] log-weights of the sampling distribution; -inf where cut.

    float64 stays float64, all else becomes float32. Tokens that tie with the last one kept are kept too. Not for
    temperature 0, which has no distribution.
    """
    logits = at_least_float32(logits) / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if sampling.top_p < 1.0:
        ordered = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(ordered, axis=-1)
        # Kept: every token before which less than top_p of the mass lies; the first always is.
        kept = jnp.cumsum(probs, axis=-1) - probs < sampling.top_p
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    return logits


def draw(weights: jax.Array, uniforms: tuple[jax.Array, jax.Array]) -> jax.Array:
    """One index per row, with probability weights / sum(weights).

    Args:
      weights: [..., V] float, non-negative, not all zero; an entry of zero is never drawn.
      uniforms: two [...] float32 in [0, 1): one picks the tile, the other the entry in it, so that probabilities far
        below 2**-24 are still hit in proportion inside their tile.
    Returns:
      [...] int32.
    """
    V = weights.shape[-1]
    if V <= TILE:
        return _first_above(weights, uniforms[1])
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -V % TILE)])
    tiles = padded.reshape(*weights.shape[:-1], -1, TILE)
    tile = _first_above(tiles.sum(axis=-1), uniforms[0])
    inside = jnp.take_along_axis(tiles, tile[..., None, None], axis=-2)[..., 0, :]
    return tile * TILE + _first_above(inside, uniforms[1])


def _first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """First entry with positive weight whose cumulative weight exceeds uniform * total."""
    positive = weights > 0
    # A parallel prefix sum is not monotone to the last bit: take the total among positive entries, skip zero ones.
    cumulative = jnp.where(positive, jnp.cumsum(weights, axis=-1), 0.0)
    total = jnp.max(cumulative, axis=-1)
    return jnp.argmax(cumulative > (uniform * total)[..., None], axis=-1).astype(jnp.int32)
