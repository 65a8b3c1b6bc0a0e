"""The GRPO objective from log-probs, advantages and masks. It never sees a model, nor a draft.

Per response token, with ratio r = exp(logprob - old_logprob) (DeepSeekMath 2402.03300, eq. 3; clip-low and clip-high
from DAPO 2503.14476, eq. 8):

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3

    k3   = exp(ref - logprob) - (ref - logprob) - 1      (Schulman's unbiased, non-negative estimator)

Aggregation is token-level: the mean over all response tokens of the batch (DAPO), so long answers weigh more.
Left out: dual clipping, entropy bonus, sequence-level ratios.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from specrl_jax.core import BadInput, Mean, masked_mean


@dataclasses.dataclass(frozen=True)
class Objective:
    clip_low: float
    clip_high: float
    kl_coef: float  # 0: no reference is needed

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1 or self.clip_high < 0 or self.kl_coef < 0:
            raise BadInput(f"grpo: 0 <= clip_low < 1, clip_high >= 0 and kl_coef >= 0 are needed, not {self}")


@flax.struct.dataclass
class Terms:
    """Everything the objective reports, as (sum, count) over response tokens."""

    loss: Mean
    kl: Mean  # k3 against the reference, nats; zero without one
    clip_fraction: Mean  # tokens whose clipped branch is the smaller one

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(self.loss + other.loss, self.kl + other.kl, self.clip_fraction + other.clip_fraction)


def objective_terms(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    ref_logprobs: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    objective: Objective,
) -> Terms:
    """GRPO terms of a batch.

    Args:
      logprobs, old_logprobs, ref_logprobs: [B, T] float32, nats; ref_logprobs is None exactly where kl_coef is 0.
      advantages: [B] float32, one a sequence.
      mask: [B, T] bool, response tokens.
    """
    advantages = advantages[:, None]
    # Outside the mask the log-probs are of padding: keep their exp from overflowing into the gradient.
    log_ratio = jnp.where(mask, logprobs - old_logprobs, 0.0)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
    loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    kl = jnp.zeros_like(loss)
    if objective.kl_coef:
        kl = k3(logprobs, ref_logprobs, mask)
        loss = loss + objective.kl_coef * kl
    is_clipped = clipped * advantages < ratio * advantages
    return Terms(masked_mean(loss, mask), masked_mean(kl, mask), masked_mean(is_clipped, mask))


def k3(logprobs: jax.Array, other: jax.Array, mask: jax.Array) -> jax.Array:
    """[B, T] estimate of KL(p || other) in nats from samples of p (Schulman 2020, "Approximating KL divergence")."""
    difference = jnp.where(mask, other - logprobs, 0.0)
    return jnp.expm1(difference) - difference
