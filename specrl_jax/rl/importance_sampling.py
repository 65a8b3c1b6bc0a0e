"""Ratios of probabilities, and importance weights for what the rollouts' policy and the learner's differ in.

With equal weights the two differ by dtype and kernels; asynchronous rollouts are also some updates behind. The weight
w = pi_learner / pi_rollout is of a token or of its whole answer, carries no gradient, and is bounded from above:
  truncate  min(w, cap)               (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL")
  mask      w where w <= cap, else 0  (the upper bound of IcePop, Ling team 2025; its lower bound is left out)
"""

import jax
import jax.numpy as jnp

from specrl_jax.rl.aggregation import sequence_sum

# nats. Beyond it a ratio of probabilities tells only that the two policies have nothing to do with each other, and from
# 88.7 on its exp overflows float32: then even the gradient of a clipped ratio is 0 x inf = NaN. verl has the same.
MAX_LOG_RATIO = 20.0

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def probability_ratio(log_ratio: jax.Array) -> jax.Array:
    """Return exp(log_ratio), which is bounded to +-MAX_LOG_RATIO before; the gradient beyond the bound is zero."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def importance_weights(
    logprobs: jax.Array, behaviour: jax.Array, mask: jax.Array, *, segments: jax.Array | None, how: str, cap: float
) -> jax.Array:
    """Return the weight [B, T] of each token's loss.

    Args:
      logprobs, behaviour: [B, T], nats, under the learner's and under the rollouts' policy.
      mask: [B, T] bool, response tokens.
      segments: [B, T] int32 of packed rows; None: a row is one answer.
      how: one of CORRECTIONS but "none".
      cap: above 1.
    """
    log_weight = jnp.where(mask, logprobs - behaviour, 0.0)
    level, _, bound = how.partition("_")
    if level == "sequence":
        log_weight = sequence_sum(log_weight, mask, segments)
    weight = probability_ratio(jax.lax.stop_gradient(log_weight))
    return jnp.minimum(weight, cap) if bound == "truncate" else jnp.where(weight <= cap, weight, 0.0)
