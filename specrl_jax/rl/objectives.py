"""Policy losses of the GRPO family, from log-probs, advantages and masks; no model and no draft.

Of each response token,

    loss = w * surrogate(log pi - log pi_old, A) + kl_coef * KL(pi || ref) - entropy_coef * entropy

with the importance weight w of rl/importance_sampling.py, aggregated over the batch as in rl/aggregation.py. Every
log-ratio is bounded before its exp (MAX_LOG_RATIO), so that no pair of finite log-probs makes a loss or a gradient that
is not finite.

The KL is estimated token by token from samples of pi (Schulman 2020, "Approximating KL divergence"), with
d = log ref - log pi: k2 = d^2 / 2, k3 = exp(d) - 1 - d. Both are non-negative and k3 is unbiased. As a loss, only k2
has the gradient of KL(pi || ref) in expectation; that of k3 is the gradient of KL(ref || pi) near ref = pi. k3 stops
growing at d = 20, below any d it is the formula.
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from specrl_jax.core import Mean, masked_mean
from specrl_jax.errors import InputError
from specrl_jax.rl.aggregation import AGGREGATIONS, aggregate, sequence_sum
from specrl_jax.rl.importance_sampling import CORRECTIONS, MAX_LOG_RATIO, importance_weights, probability_ratio

OLD_LOGPROBS = ("learner", "rollout", "current")


def logprob_passes(old_logprobs: str, kl_coef: float) -> int:
    """Return how many forwards the logprob phase makes: for old log-probs, and for those of the reference."""
    return int(old_logprobs == "learner") + int(kl_coef > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Options of the loss, as in the config's section grpo. Raises InputError for a name that is in no table."""

    clip_low: float  # the ratio is clipped to 1 - clip_low .. 1 + clip_high
    clip_high: float
    kl_coef: float  # 0: no reference is needed
    clip_dual: float = 3.0  # above 1; where the advantage is negative, a larger ratio counts as this one. 0: no bound
    loss: str = "clip"  # of SURROGATES
    aggregation: str = "token"  # of AGGREGATIONS
    entropy_coef: float = 0.0  # of the entropy bonus
    old_logprobs: str = "learner"  # of OLD_LOGPROBS: which log-probs are the ratio's denominator
    correction: str = "none"  # of CORRECTIONS
    correction_cap: float = 2.0
    longest: int = 1  # tokens of the longest answer, for aggregation "constant"

    def __post_init__(self) -> None:
        tables = {"loss": SURROGATES, "aggregation": AGGREGATIONS, "correction": CORRECTIONS}
        for key, names in tables.items():
            if getattr(self, key) not in names:
                raise InputError(f"grpo.{key}: there is no '{getattr(self, key)}'; there are {', '.join(names)}")
        if 0 != self.clip_dual <= 1:
            raise InputError(f"grpo.clip_dual={self.clip_dual}: above 1 is needed, or 0 for no bound")


@flax.struct.dataclass
class LossInputs:
    """Inputs of the loss beside the rows and the policy's log-probs; None where the objective does not use them."""

    old_logprobs: jax.Array | None  # [B, T] float32, nats; None: the policy's own before this update
    ref_logprobs: jax.Array | None  # [B, T] float32, nats, of the KL reference
    advantages: jax.Array  # [B, T] float32, equal at every token of an answer; [B, 1] where a row is one answer
    behaviour: jax.Array | None = None  # [B, T] float32, nats, log-probs of the rollouts' policy
    loss_mask: jax.Array | None = None  # [B, T] bool, the response tokens that the loss counts; None: all


@flax.struct.dataclass
class LossMetrics:
    """The aggregated loss, and diagnostics as (sum, count) over response tokens."""

    loss: Mean
    kl: Mean  # KL(policy || reference), nats; zero without a reference
    clip_fraction: Mean  # tokens whose surrogate is a bound, without a gradient (CISPO: whose weight is clipped)
    entropy: Mean  # nats, over all response tokens, also those that loss_mask leaves out
    correction: Mean  # importance weight; 1 without correction

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        return jax.tree.map(jnp.add, self, other)


def kl_estimate(logprobs: jax.Array, other: jax.Array, mask: jax.Array) -> jax.Array:
    """Estimate KL(p || q) token by token, [B, T] nats, zero outside the mask, by k3: not negative, and unbiased.

    Schulman 2020, "Approximating KL divergence".

    Args:
      logprobs, other: [B, T], log p and log q of tokens drawn from p.
      mask: [B, T] bool.
    """
    d = jnp.minimum(jnp.where(mask, other - logprobs, 0.0), MAX_LOG_RATIO)
    return jnp.expm1(d) - d


def grpo_loss(
    *,
    logprobs: jax.Array,
    entropy: jax.Array,
    inputs: LossInputs,
    mask: jax.Array,
    segments: jax.Array | None,
    objective: Objective,
) -> LossMetrics:
    """Compute the loss of a batch and its diagnostics; differentiate `loss`.

    DeepSeekMath (arXiv 2402.03300), eq. 3 and 4, with the variants that `objective` names.

    Args:
      logprobs, entropy: [B, T] float32, nats, of the policy that learns.
      mask: [B, T] bool, response tokens; `inputs.loss_mask` may leave some of them out.
      segments: [B, T] int32, the sequence of each token in packed rows; None: a row is one answer.

    Examples:
      >>> import jax.numpy as jnp
      >>> from specrl_jax import LossInputs, Objective, grpo_loss
      >>> logprobs, entropy, mask = jnp.full((2, 3), -1.0), jnp.ones((2, 3)), jnp.ones((2, 3), bool)
      >>> inputs = LossInputs(None, None, advantages=jnp.array([[1.0], [-0.5]]))
      >>> objective = Objective(clip_low=0.2, clip_high=0.2, kl_coef=0.0)
      >>> terms = {"logprobs": logprobs, "entropy": entropy, "inputs": inputs, "mask": mask}
      >>> float(grpo_loss(**terms, segments=None, objective=objective).loss.value())
      -0.25
    """
    o = objective
    responses = mask
    if inputs.loss_mask is not None:
        mask = mask & inputs.loss_mask
    old = jax.lax.stop_gradient(logprobs) if inputs.old_logprobs is None else inputs.old_logprobs
    # Outside the mask the log-probs are of padding: keep their exp from overflowing into the gradient.
    log_ratio = jnp.where(mask, logprobs - old, 0.0)
    if o.loss == "gspo":
        length = jnp.maximum(sequence_sum(mask.astype(log_ratio.dtype), mask, segments), 1)
        log_ratio = sequence_sum(log_ratio, mask, segments) / length
    loss, is_clipped = SURROGATES[o.loss](log_ratio, logprobs, inputs.advantages, o)
    weight, kl = jnp.ones_like(loss), jnp.zeros_like(loss)
    if o.correction != "none":
        assert inputs.behaviour is not None, "a correction compares with the rollouts' log-probs"
        weight = importance_weights(
            old, inputs.behaviour, mask, segments=segments, how=o.correction, cap=o.correction_cap
        )
        loss = weight * loss
    if o.kl_coef:
        assert inputs.ref_logprobs is not None, "the KL term needs the reference's log-probs"
        kl = kl_estimate(logprobs, inputs.ref_logprobs, mask)
        loss = loss + o.kl_coef * kl
    if o.entropy_coef:
        loss = loss - o.entropy_coef * entropy
    return LossMetrics(
        loss=aggregate(loss, mask, segments, how=o.aggregation, longest=o.longest),
        kl=masked_mean(kl, mask),
        clip_fraction=masked_mean(is_clipped, mask),
        entropy=masked_mean(entropy, responses),
        correction=masked_mean(weight, mask),
    )


def _clip(
    log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array, o: Objective
) -> tuple[jax.Array, jax.Array]:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO's surrogate (DeepSeekMath, arXiv 2402.03300, eq. 3)
    with the two bounds of DAPO (arXiv 2503.14476, eq. 8). Where A < 0 that has no lower bound, and is at least
    clip_dual A: dual clipping (Ye et al., arXiv 1912.09729, eq. 3; verl's clip_ratio_c)."""
    ratio = probability_ratio(log_ratio)
    clipped = jnp.clip(ratio, 1 - o.clip_low, 1 + o.clip_high)
    surrogate, is_clipped = (
        jnp.minimum(ratio * advantages, clipped * advantages),
        clipped * advantages < ratio * advantages,
    )
    if not o.clip_dual:
        return -surrogate, is_clipped
    is_bound = surrogate < o.clip_dual * jnp.minimum(advantages, 0.0)
    bound = o.clip_dual * advantages
    return -jnp.where(is_bound, bound, surrogate), is_clipped | is_bound


def _cispo(
    log_ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array, o: Objective
) -> tuple[jax.Array, jax.Array]:
    """Return -stop_gradient(clip(r)) A log pi: clipped tokens keep a gradient (CISPO, arXiv 2506.13585, eq. 4, 5)."""
    ratio = jax.lax.stop_gradient(probability_ratio(log_ratio))
    clipped = jnp.clip(ratio, 1 - o.clip_low, 1 + o.clip_high)
    return -clipped * advantages * logprobs, clipped != ratio


# (log ratio, log-probs, advantages, objective) -> ([B, T] loss, [B, T] bool, clipped). gspo is PPO's surrogate, dual
# clipping included, with one ratio an answer, exp(mean over tokens of log r) (GSPO, arXiv 2507.18071, eq. 5 and 7).
Surrogate = Callable[[jax.Array, jax.Array, jax.Array, Objective], tuple[jax.Array, jax.Array]]
SURROGATES: dict[str, Surrogate] = {"clip": _clip, "gspo": _clip, "cispo": _cispo}
