"""What a draft learns from its target, draft step by draft step: four losses over `core.DraftTerms`.

Alignment (shared by every EAGLE-3 trainer; SafeAILab's cnets.py): pair t = (feature of position t, token t + 1), and
its draft step i predicts token t + 2 + i, whose teacher is the target's distribution p after position t + 1 + i.

    ce      - sum p~ log q                      EAGLE-3 (arXiv 2503.01840); p~ is p renormalised on the draft vocabulary
    kl      sum p~ log(p~ / q)                  the same gradient; zero where there is nothing left to learn
    tv      1 - sum min(p, q)                   the chance that a sampled draft is refused
    e2e_tv  1 - prod over j <= i of sum min(p_j, q_j)
                                                its mean over steps is one minus the normalised expected number of
                                                drafts kept: a step counts as much as decoding gets there

ce, kl and tv of step i weigh DECAY ** i (EAGLE-3); e2e_tv weighs its steps alike, its products decay by themselves.
"""

import jax
import jax.numpy as jnp

from specrl_jax.core import DraftTerms, Mean, shift_left

LOSSES = ("ce", "kl", "tv", "e2e_tv")
# EAGLE-3: weight of draft step i is DECAY ** i.
DECAY = 0.8


def step_losses(name: str, terms: DraftTerms) -> jax.Array:
    """[steps, B, T] of each pair; `name` is one of LOSSES."""
    if name == "ce":
        return terms.cross_entropy
    if name == "kl":
        return terms.cross_entropy - terms.entropy
    if name == "tv":
        return 1.0 - terms.overlap
    return 1.0 - survival(terms)


def survival(terms: DraftTerms) -> jax.Array:
    """[steps, B, T]: the chance that verification keeps draft i and all before it, along the text of the row.

    Of sampled drafts under the rejection rule, where the text is the one drafted; at temperature 0 it says nothing.
    """
    return jnp.cumprod(terms.overlap, axis=0)


def step_weights(name: str, steps: int) -> jax.Array:
    """[steps] float32: what each step's average counts in the loss."""
    if name == "e2e_tv":
        return jnp.full(steps, 1.0 / steps, jnp.float32)
    return DECAY ** jnp.arange(steps, dtype=jnp.float32)


def supervised(mask: jax.Array, steps: int, segments: jax.Array | None = None) -> jax.Array:
    """[steps, B, T] bool: pairs from which decoding can start a draft, and whose step i predicts a response token.

    A draft starts at pair t to predict token t + 2, so it does if and only if that is a response token.

    Args:
      mask: [B, T] bool, true where token t + 1 is a response token.
      segments: [B, T] int32 of packed rows, 0 padding; a draft stays within its own.
    """
    found = jnp.stack([shift_left(mask, 1) & shift_left(mask, 1 + i) for i in range(steps)])
    if segments is None:
        return found
    return found & jnp.stack([shift_left(segments, 2 + i) == segments for i in range(steps)])


def step_means(values: jax.Array, where: jax.Array) -> Mean:
    """Sums and counts [steps] of values [steps, B, T] where `where`, so that microbatches and shards add up."""
    return Mean(jnp.where(where, values, 0.0).sum(axis=(1, 2)), where.sum(axis=(1, 2), dtype=jnp.float32))
