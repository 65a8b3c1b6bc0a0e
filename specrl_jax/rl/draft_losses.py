"""What a draft head learns from its target: cross-entropy to the target's distribution, draft step by draft step.

Alignment (shared by every EAGLE-3 trainer; SafeAILab's cnets.py): pair t = (feature of position t, token t + 1), and
its draft step i predicts token t + 2 + i, whose teacher is the target's distribution after position t + 1 + i.
"""

import jax
import jax.numpy as jnp

from specrl_jax.core import Mean, shift_left

# EAGLE-3 (arXiv 2503.01840): weight of draft step i is DECAY ** i.
DECAY = 0.8


def soft_cross_entropy(student: jax.Array, teacher: jax.Array, mask: jax.Array, temperature: float) -> Mean:
    """Cross-entropy in nats of each draft step, both distributions renormalised on the draft vocabulary.

    Args:
      student: [steps, B, T, Vd] logits; entry (i, t) is draft step i of the pair t.
      teacher: [B, T, Vd] float32, the target's logits after each position, on the same vocabulary.
      mask: [B, T] bool, true where token t + 1 is a response token.
      temperature: the rollouts', of both; 0 counts as 1, as in every log-prob.
    Returns:
      Mean whose total and count are [steps] float32.
    """
    steps = student.shape[0]
    student, teacher = (x.astype(jnp.float32) / (temperature or 1.0) for x in (student, teacher))
    probs = jax.lax.stop_gradient(jax.nn.softmax(teacher, axis=-1))
    totals = []
    for i in range(steps):
        loss = -jnp.sum(shift_left(probs, 1 + i) * jax.nn.log_softmax(student[i], axis=-1), axis=-1)
        totals.append(jnp.where(supervised(mask, i), loss, 0.0).sum())
    return Mean(jnp.stack(totals), supervised_counts(mask, steps))


def supervised(mask: jax.Array, step: int) -> jax.Array:
    """[B, T] bool: pairs from which decoding can start a draft, and whose draft step `step` predicts a response token.

    A draft starts at pair t to predict token t + 2, so it does if and only if that is a response token.
    """
    return shift_left(mask, 1) & shift_left(mask, 1 + step)


def supervised_counts(mask: jax.Array, steps: int) -> jax.Array:
    """[steps] float32."""
    return jnp.stack([supervised(mask, i).sum(dtype=jnp.float32) for i in range(steps)])


def unrolled_loss(loss: Mean) -> jax.Array:
    """[] float32: the decayed sum over draft steps of their averages."""
    return jnp.sum(DECAY ** jnp.arange(loss.total.shape[0], dtype=jnp.float32) * loss.value())


def predicted_acceptance(
    student: jax.Array, teacher: jax.Array, normaliser: jax.Array, mask: jax.Array, temperature: float
) -> Mean:
    """How often verification would keep draft i and all before it: the product over j <= i of sum_v min(p_j, q_j).

    p is over the target's whole vocabulary, so that words which cannot be drafted count as not kept. Along the sampled
    text, where verification follows the drafted one. Of sampled decoding: at temperature 0 it says nothing.

    Args:
      student, teacher, mask, temperature: as in `soft_cross_entropy`.
      normaliser: [B, T] float32, logsumexp over the whole vocabulary of the target's logits / temperature.
    Returns:
      Mean whose total and count are [steps] float32.
    """
    steps = student.shape[0]
    student, teacher = (jax.lax.stop_gradient(x).astype(jnp.float32) / (temperature or 1.0) for x in (student, teacher))
    p = jnp.exp(teacher - normaliser[..., None])
    kept, totals = 1.0, []
    for i in range(steps):
        kept = kept * jnp.minimum(shift_left(p, 1 + i), jax.nn.softmax(student[i], axis=-1)).sum(axis=-1)
        totals.append(jnp.where(supervised(mask, i), kept, 0.0).sum())
    return Mean(jnp.stack(totals), supervised_counts(mask, steps))
