"""The mathematics of the rules that know the draft's probabilities, as functions of arrays of any float dtype.

A row holds a draft x_1 .. x_k with x_i ~ q_i, and the target's p_1 .. p_{k+1}, each distribution given the drafts
before it. A rule is the chances that its uniforms are compared with, and the weights of the token emitted after the
last draft kept. Both rules give what is emitted the law of p, whatever q is.

Rejection (A): Leviathan et al. 2211.17192, Chen et al. 2302.01318. x_i is kept with chance min(1, p_i(x_i) / q_i(x_i))
if all before it were; the token after it has weights max(p - q, 0).

Block (C): Sun et al. 2403.10444, Algorithm 2. The longest prefix whose own chance comes up is kept, also where a
shorter one failed; on average it is at least as long as the rejection rule's.
"""

import jax
import jax.numpy as jnp


def rejection_chances(p_x: jax.Array, q_x: jax.Array) -> jax.Array:
    """[..., k] chance to keep each drafted token, given its probability under target and draft."""
    return _capped_ratio(p_x, q_x)


def block_chances(p: jax.Array, q: jax.Array, p_x: jax.Array, q_x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Chances h_1 .. h_k of the prefixes of a draft, and the scale P_0 .. P_k of p after each prefix.

    Args:
      p: [..., k+1, V] target probabilities.
      q: [..., k, V] draft probabilities on the target's vocabulary.
      p_x, q_x: [..., k], those of the drafted tokens; k >= 1.
    Returns:
      [..., k]; [..., k+1].
    """
    scale = block_scales(p_x, q_x)
    mass = excess(p[..., 1:-1, :], q[..., 1:, :], scale[..., 1:-1]).sum(axis=-1)
    return block_chances_of(scale, mass), scale


def block_scales(p_x: jax.Array, q_x: jax.Array) -> jax.Array:
    """[..., k+1]: P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))."""
    scale = [jnp.ones_like(p_x[..., 0])]
    for i in range(p_x.shape[-1]):
        scale.append(_capped_ratio(scale[-1] * p_x[..., i], q_x[..., i]))
    return jnp.stack(scale, axis=-1)


def block_chances_of(scale: jax.Array, mass: jax.Array) -> jax.Array:
    """[..., k]: h_i = S_i / (S_i + 1 - P_i), and h_k = P_k.

    Args:
      scale: [..., k+1], P.
      mass: [..., k-1], S_i of i = 1 .. k-1: the sum of max(P_i p_{i+1} - q_{i+1}, 0).
    """
    inner = scale[..., 1:-1]
    # P = 1 makes h = 1 whatever S is, and 0 / 0 where p and q are equal; below one the denominator is positive.
    h = jnp.where(inner < 1, mass / jnp.where(inner < 1, mass + (1 - inner), 1), 1)
    return jnp.concatenate([h, scale[..., -1:]], axis=-1)


def residual_weights(p: jax.Array, q: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """[..., V] weights max(scale p - q, 0) of the token after the last draft kept; scale [...], or None for one."""
    residual = excess(p, q, jnp.ones_like(p[..., 0]) if scale is None else scale)
    # p and q may differ by rounding only, with p <= q everywhere: then nothing is left, and p itself is the limit.
    return jnp.where((residual > 0).any(axis=-1, keepdims=True), residual, p)


def excess(p: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """[..., V]: max(scale p - q, 0), scale [...]."""
    return jnp.maximum(scale[..., None] * p - q, 0)


def _capped_ratio(p: jax.Array, q: jax.Array) -> jax.Array:
    """min(1, p / q): zero where p is, also over a q that rounds to zero, where all else is one."""
    return jnp.where(p > q, 1, p / jnp.where(q > 0, q, 1))
