"""Estimates of KL(p || q), token by token, from samples of p (Schulman 2020, "Approximating KL divergence").

As a number k1 and k3 are unbiased, and k2 and k3 non-negative. As a loss only k2's gradient is that of the divergence,
in expectation: k1's is zero, k3's that of the forward divergence KL(q || p) near p = q.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def k1(difference: jax.Array) -> jax.Array:
    return -difference


def k2(difference: jax.Array) -> jax.Array:
    return difference**2 / 2


def k3(difference: jax.Array) -> jax.Array:
    return jnp.expm1(difference) - difference


# log q - log p of the samples, [B, T] nats -> [B, T] nats.
ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {"k1": k1, "k2": k2, "k3": k3}


def divergence(logprobs: jax.Array, other: jax.Array, mask: jax.Array, estimator: str = "k3") -> jax.Array:
    """[B, T] estimate in nats of KL(p || q), zero outside the mask.

    Args:
      logprobs, other: [B, T], log p and log q of tokens drawn from p.
    """
    return ESTIMATORS[estimator](jnp.where(mask, other - logprobs, 0.0))
