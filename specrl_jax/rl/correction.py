"""Importance weights for rollouts that another policy drew than the one whose log-probs the learner computes.

Where both are the same weights, the difference is that of two programs (dtype, kernels); asynchronous rollouts differ
by updates too. Weight w = pi_learner / pi_rollout, of a token or of its whole answer, behind no gradient:
  truncate  min(w, cap)            (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL")
  mask      w where w <= cap, else 0   (the one-sided form of IcePop, Ling team 2025)
"""

import jax
import jax.numpy as jnp

from specrl_jax.rl.sequences import sequence_sum

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_weights(
    logprobs: jax.Array, behaviour: jax.Array, mask: jax.Array, segments: jax.Array | None, how: str, cap: float
) -> jax.Array:
    """[B, T] weights of the tokens' losses.

    Args:
      logprobs, behaviour: [B, T], nats, of the learner's and of the rollouts' policy.
      how: one of CORRECTIONS but "none".
      cap: above 1.
    """
    log_weight = jnp.where(mask, logprobs - behaviour, 0.0)
    level, _, bound = how.partition("_")
    if level == "sequence":
        log_weight = sequence_sum(log_weight, mask, segments)
    weight = jnp.exp(jax.lax.stop_gradient(log_weight))
    return jnp.minimum(weight, cap) if bound == "truncate" else jnp.where(weight <= cap, weight, 0.0)
