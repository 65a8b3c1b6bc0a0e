"""The GRPO family's objective from log-probs, advantages and masks. It never sees a model, nor a draft.

    loss = w * surrogate(log pi - log pi_old, A) + kl_coef * kl(pi, ref) - entropy_coef * entropy

per response token, with w the correction for the rollouts' own policy (rl/correction.py), kl an estimator of
rl/divergences.py, and aggregated as rl/sequences.py says. Left out: dual clipping.
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from specrl_jax.core import InputError, Mean, masked_mean
from specrl_jax.rl.correction import CORRECTIONS, importance_weights
from specrl_jax.rl.divergences import ESTIMATORS, divergence
from specrl_jax.rl.sequences import AGGREGATIONS, aggregate, sequence_sum

OLD_LOGPROBS = ("learner", "rollout", "current")


@dataclasses.dataclass(frozen=True)
class Objective:
    clip_low: float
    clip_high: float
    kl_coef: float  # 0: no reference is needed
    loss: str = "clip"  # of SURROGATES
    aggregation: str = "token"  # of AGGREGATIONS
    kl: str = "k3"  # of ESTIMATORS
    entropy_coef: float = 0.0  # of the bonus
    old_logprobs: str = "learner"  # whose the ratio's denominator is: of OLD_LOGPROBS
    correction: str = "none"  # of CORRECTIONS
    correction_cap: float = 2.0
    longest: int = 1  # tokens of an answer, for the constant aggregation

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0 or self.kl_coef < 0 or self.entropy_coef < 0:
            raise InputError(
                "grpo: 0 <= clip_low <= 1, clip_high >= 0, kl_coef >= 0 and entropy_coef >= 0 are needed, not "
                f"{self.clip_low}, {self.clip_high}, {self.kl_coef}, {self.entropy_coef}"
            )
        choices = {
            "loss": tuple(SURROGATES),
            "aggregation": AGGREGATIONS,
            "kl": tuple(ESTIMATORS),
            "old_logprobs": OLD_LOGPROBS,
            "correction": CORRECTIONS,
        }
        for key, names in choices.items():
            if getattr(self, key) not in names:
                raise InputError(f"grpo.{key}: there is no '{getattr(self, key)}'; there are {', '.join(names)}")
        if self.correction != "none" and self.old_logprobs == "rollout":
            raise InputError(
                f"grpo.correction={self.correction} compares the rollouts' log-probs with the learner's: "
                "grpo.old_logprobs must be learner or current"
            )
        if self.correction != "none" and self.correction_cap <= 1:
            raise InputError(f"grpo.correction_cap={self.correction_cap}: above 1 is needed")


@flax.struct.dataclass
class LossInputs:
    """What the policy learns from, beside the rows. What an objective does not use is None."""

    old_logprobs: jax.Array | None  # [B, T] float32, nats; None: the policy's own, as it is before this update
    ref_logprobs: jax.Array | None  # [B, T] float32, nats
    advantages: jax.Array  # [B, T] float32, the same at every token of an answer; [B, 1] where a row is one answer
    behaviour: jax.Array | None = None  # [B, T] float32, nats, the rollouts' own
    loss_mask: jax.Array | None = None  # [B, T] bool, tokens that the objective sees of the response's; None: all


@flax.struct.dataclass
class Terms:
    """Everything the objective reports: the loss as aggregated, the others as (sum, count) over response tokens."""

    loss: Mean
    kl: Mean  # against the reference, nats; zero without one
    clip_fraction: Mean  # tokens whose clipped branch is the smaller one (CISPO: whose weight is clipped)
    entropy: Mean  # nats; of all answers, also those that teach nothing
    correction: Mean  # importance weight, 1 without correction

    def __add__(self, other: "Terms") -> "Terms":
        return jax.tree.map(jnp.add, self, other)


def grpo_loss(
    logprobs: jax.Array,
    entropy: jax.Array,
    signal: LossInputs,
    mask: jax.Array,
    segments: jax.Array | None,
    objective: Objective,
) -> Terms:
    """Terms of a batch; the gradient is that of `loss`.

    Args:
      logprobs, entropy: [B, T] float32, nats, of the policy that learns.
      mask: [B, T] bool, response tokens, of which `signal.loss_mask` may leave answers out.
      segments: [B, T] int32 of packed rows; None: a row is one answer.
    """
    o = objective
    responses = mask
    if signal.loss_mask is not None:
        mask = mask & signal.loss_mask
    old = jax.lax.stop_gradient(logprobs) if signal.old_logprobs is None else signal.old_logprobs
    # Outside the mask the log-probs are of padding: keep their exp from overflowing into the gradient.
    log_ratio = jnp.where(mask, logprobs - old, 0.0)
    loss, is_clipped = SURROGATES[o.loss](log_ratio, logprobs, signal.advantages, mask, segments, o)
    weight, kl = jnp.ones_like(loss), jnp.zeros_like(loss)
    if o.correction != "none":
        weight = importance_weights(old, signal.behaviour, mask, segments, o.correction, o.correction_cap)
        loss = weight * loss
    if o.kl_coef:
        kl = divergence(logprobs, signal.ref_logprobs, mask, o.kl)
        loss = loss + o.kl_coef * kl
    if o.entropy_coef:
        loss = loss - o.entropy_coef * entropy
    kl, is_clipped, weight = (masked_mean(x, mask) for x in (kl, is_clipped, weight))
    loss = aggregate(loss, mask, segments, o.aggregation, o.longest)
    return Terms(loss, kl, is_clipped, masked_mean(entropy, responses), weight)


def _clip(log_ratio, logprobs, advantages, mask, segments, o):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (DeepSeekMath 2402.03300, eq. 3; two bounds: DAPO, eq. 8)."""
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - o.clip_low, 1 + o.clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages


def _gspo(log_ratio, logprobs, advantages, mask, segments, o):
    """The same with one ratio an answer, exp(mean of log r over its tokens) (GSPO, arXiv 2507.18071, eq. 5 and 7)."""
    length = jnp.maximum(sequence_sum(mask.astype(log_ratio.dtype), mask, segments), 1)
    return _clip(sequence_sum(log_ratio, mask, segments) / length, logprobs, advantages, mask, segments, o)


def _cispo(log_ratio, logprobs, advantages, mask, segments, o):
    """-sg(clip(r)) A log pi: a clipped token still teaches (CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5)."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    clipped = jnp.clip(ratio, 1 - o.clip_low, 1 + o.clip_high)
    return -clipped * advantages * logprobs, clipped != ratio


# (log ratio, log-probs, advantages, mask, segments, objective) -> ([B, T] loss, [B, T] bool, clipped)
Surrogate = Callable[..., tuple[jax.Array, jax.Array]]
SURROGATES: dict[str, Surrogate] = {"clip": _clip, "gspo": _gspo, "cispo": _cispo}
