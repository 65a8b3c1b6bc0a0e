"""The acceptance rules of drafts with known probabilities, as functions of arrays of any float dtype.

A row holds a draft x_1 .. x_k with x_i ~ q_i and the target's p_1 .. p_{k+1}, each distribution given the drafts before
it. A rule consists of the chances that its uniforms are compared with, and of the weights of the token emitted after
the last accepted draft. Under both rules the emitted tokens are distributed as p, for every q.

Rejection (A): Leviathan et al. 2211.17192, Chen et al. 2302.01318. x_i is accepted with chance
min(1, p_i(x_i) / q_i(x_i)) if all drafts before it were; the next token has weights max(p - q, 0).

Block (C): Sun et al. 2403.10444, Algorithm 2. The longest prefix whose own chance succeeds is accepted, even if a
shorter prefix failed; on average it is at least as long as under rejection.
"""

import jax
import jax.numpy as jnp


def rejection_chances(p_x: jax.Array, q_x: jax.Array, num_drafted: jax.Array | None = None) -> jax.Array:
    """Return [..., k] chances to accept each drafted token, given its probability under target and draft.

    Args:
      num_drafted: [...] int32, chances beyond it are 0; None: k everywhere.
    """
    chances = _capped_ratio(p_x, q_x)
    if num_drafted is None:
        return chances
    return jnp.where(_places(chances) < num_drafted[..., None], chances, 0)


def block_chances(
    p: jax.Array, q: jax.Array, p_x: jax.Array, q_x: jax.Array, num_drafted: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the chances h_1 .. h_k of a draft's prefixes, and the scale P_0 .. P_k of p after each prefix.

    Args:
      p: [..., k+1, V] target probabilities.
      q: [..., k, V] draft probabilities on the target's vocabulary.
      p_x, q_x: [..., k] probabilities of the drafted tokens; k >= 1.
      num_drafted: [...] int32, chances beyond it are 0; None: k everywhere.
    Returns:
      [..., k]; [..., k+1].
    """
    scale = block_scales(p_x, q_x)
    mass = residual(p[..., 1:-1, :], q[..., 1:, :], scale[..., 1:-1]).sum(axis=-1)
    return block_chances_from_mass(scale, mass, num_drafted), scale


def block_scales(p_x: jax.Array, q_x: jax.Array) -> jax.Array:
    """Return [..., k+1]: P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))."""
    scale = [jnp.ones_like(p_x[..., 0])]
    for i in range(p_x.shape[-1]):
        scale.append(_capped_ratio(scale[-1] * p_x[..., i], q_x[..., i]))
    return jnp.stack(scale, axis=-1)


def block_chances_from_mass(scale: jax.Array, mass: jax.Array, num_drafted: jax.Array | None = None) -> jax.Array:
    """Return [..., k]: h_i = S_i / (S_i + 1 - P_i) for i < n, h_n = P_n, and 0 for i > n, with n drafted tokens.

    Args:
      scale: [..., k+1], P.
      mass: [..., k-1], S_i for i = 1 .. k-1: the sum of max(P_i p_{i+1} - q_{i+1}, 0).
      num_drafted: [...] int32, n; None: k everywhere.
    """
    inner = scale[..., 1:-1]
    # P = 1 makes h = 1 for every S, and 0 / 0 where p and q are equal; below one the denominator is positive.
    h = jnp.where(inner < 1, mass / jnp.where(inner < 1, mass + (1 - inner), 1), 1)
    h = jnp.concatenate([h, scale[..., -1:]], axis=-1)
    if num_drafted is None:
        return h
    place, n = 1 + _places(h), num_drafted[..., None]
    return jnp.where(place < n, h, jnp.where(place == n, scale[..., 1:], 0))


def residual_weights(p: jax.Array, q: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Return [..., V] weights max(scale p - q, 0) of the token after the last accepted draft; scale [...], None: 1."""
    weights = residual(p, q, jnp.ones_like(p[..., 0]) if scale is None else scale)
    # If p and q differ by rounding only, p <= q may hold everywhere: nothing is left, and the limit is p itself.
    return jnp.where((weights > 0).any(axis=-1, keepdims=True), weights, p)


def residual(p: jax.Array, q: jax.Array, scale: jax.Array) -> jax.Array:
    """Return [..., V]: max(scale p - q, 0), scale [...]."""
    return jnp.maximum(scale[..., None] * p - q, 0)


def _places(x: jax.Array) -> jax.Array:
    """Return 0 .. k-1 along the last axis of x [..., k]."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


def _capped_ratio(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return min(1, p / q); where q rounds to zero: 0 if p is zero too, else 1."""
    return jnp.where(p > q, 1, p / jnp.where(q > 0, q, 1))
