"""Losses of a draft against its target, for each draft step, from `core.DraftTerms`.

Alignment (the same in every EAGLE-3 trainer; SafeAILab's cnets.py): pair t = (feature of position t, token t + 1), and
its draft step i predicts token t + 2 + i from the target's distribution p after position t + 1 + i.

    ce      - sum p~ log q                      EAGLE-3 (arXiv 2503.01840); p~ is p renormalised on the draft vocabulary
    kl      sum p~ log(p~ / q)                  gradient of ce; zero at the optimum
    tv      1 - sum min(p, q)                   probability that a sampled draft is rejected
    e2e_tv  1 - prod over j <= i of sum min(p_j, q_j)
                                                its mean over steps is one minus the normalised expected number of
                                                accepted drafts: each step weighs as much as decoding reaches it

Step i of ce, kl and tv weighs DECAY ** i (EAGLE-3). The steps of e2e_tv weigh the same: its products decay already.
"""

import jax
import jax.numpy as jnp

from specrl_jax.core import DraftTerms, Mean, ahead

LOSSES = ("ce", "kl", "tv", "e2e_tv")
# EAGLE-3: weight of draft step i is DECAY ** i.
DECAY = 0.8


def step_losses(name: str, terms: DraftTerms) -> jax.Array:
    """Return the loss [steps, B, T] of each pair at each step; `name` is one of LOSSES."""
    if name == "ce":
        return terms.cross_entropy
    if name == "kl":
        return terms.cross_entropy - terms.entropy
    if name == "tv":
        return 1.0 - terms.overlap
    return 1.0 - cumulative_acceptance(terms)


def confidence_loss(logits: jax.Array, terms: DraftTerms) -> jax.Array:
    """Return [steps, B, T]: the binary cross-entropy of a confidence head's logits to the chance that a draft is kept.

    The chance is 1 - TV(p, q), of drafts before it that are kept (DSpark, as in speculators' models/dspark/metrics.py).
    """
    kept = jax.lax.stop_gradient(terms.overlap)
    return jax.nn.softplus(logits) - kept * logits


def cumulative_acceptance(terms: DraftTerms) -> jax.Array:
    """Return the probability [steps, B, T] that verification accepts draft i and all before it.

    Exact for drafts sampled from q under the rejection rule, along the row's own text; meaningless at temperature 0.
    """
    return jnp.cumprod(terms.overlap, axis=0)


def step_weights(name: str, steps: int) -> jax.Array:
    """Return the weight of each step's mean in the loss, [steps] float32."""
    if name == "e2e_tv":
        return jnp.full(steps, 1.0 / steps, jnp.float32)
    return DECAY ** jnp.arange(steps, dtype=jnp.float32)


def draft_loss_mask(
    mask: jax.Array, steps: int, segments: jax.Array | None = None, *, anchors: jax.Array | None = None
) -> jax.Array:
    """Return the mask [steps, B, T] of pairs that a step's loss counts.

    A pair counts where decoding can start a draft, so where token t + 2 is a response token, and at step i where all up
    to token t + 2 + i are: no draft goes on behind what an environment wrote.

    Args:
      mask: [B, T] bool, true where token t + 1 is a response token.
      segments: [B, T] int32 of packed rows, 0 padding; a draft stays within its own.
      anchors: [A] int32, the pairs that the mask is of, [steps, B, A]; None = all.
    """
    found = jnp.cumprod(jnp.stack([ahead(mask, 1 + i, anchors) for i in range(steps)]), axis=0, dtype=bool)
    if segments is None:
        return found
    own = ahead(segments, 0, anchors)
    return found & jnp.stack([ahead(segments, 2 + i, anchors) == own for i in range(steps)])


def step_means(values: jax.Array, weights: jax.Array) -> Mean:
    """Sum the values [steps, B, T] and their weights (or mask) by step, so that microbatches and shards add up."""
    counted = jnp.where(weights > 0, values * weights, 0.0)
    return Mean(counted.sum(axis=(1, 2)), weights.sum(axis=(1, 2), dtype=jnp.float32))
