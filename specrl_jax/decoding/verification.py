"""Verification of drafted tokens: which are kept, and what is emitted instead of the first that is not.

Rejection rule (A): Leviathan et al. 2211.17192, Chen et al. 2302.01318. Draft x_i ~ q_i is kept with probability
min(1, p_i(x_i) / q_i(x_i)); at the first one not kept a token is drawn from max(p - q, 0) normalised; where all are
kept a bonus token is drawn from p. What is emitted is distributed as p, whatever q is. With nothing drafted (k = 0)
the rule is plain sampling, so plain and speculative decoding are one code path.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import noise as counter
from specrl_jax.core import logprobs_and_entropy
from specrl_jax.decoding.sampling import Sampling, draw, final_logits


class Noise(NamedTuple):
    """What the randomness of one verification is a function of."""

    seed: jax.Array  # [] uint32
    rollout_id: jax.Array  # [B] uint32
    position: jax.Array  # [B] int32, position of the first token this verification emits


class Verified(NamedTuple):
    tokens: jax.Array  # [B, k+1] int32; entries beyond num_accepted are meaningless
    num_accepted: jax.Array  # [B] int32 in 0..k; num_accepted + 1 tokens are emitted
    logprobs: jax.Array  # [B, k+1] float32, nats, of `tokens` under the target at T, before top-k and top-p


def verify(
    noise: Noise,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    one_hot: jax.Array,
    vocab_map: jax.Array | None,
    target_logits: jax.Array,
    sampling: Sampling,
) -> Verified:
    """Verifies k drafted tokens per row against k + 1 target distributions.

    Args:
      draft_tokens: [B, k] int32 target-vocabulary ids, sampled from the draft; k may be 0.
      draft_logits: [B, k, Vd] float32 before temperature, or None where no row has any.
      one_hot: [B] bool, rows whose draft has no probabilities: q is all on the drafted token.
      vocab_map: [Vd] int32 target id of each draft id, or None where Vd = V.
      target_logits: [B, k+1, V] float32; entry i is the target's after the i-th drafted token.
    """
    if sampling.temperature == 0:
        best = jnp.argmax(target_logits, axis=-1).astype(jnp.int32)
        num_accepted = _leading(draft_tokens == best[:, :-1])
        return Verified(best, num_accepted, logprobs_and_entropy(target_logits, best, 0)[0])
    B, k = draft_tokens.shape
    p = jax.nn.softmax(final_logits(target_logits, sampling), axis=-1)
    if k:
        q = _draft_probs(draft_tokens, draft_logits, one_hot, vocab_map, target_logits.shape[-1], sampling)
        num_accepted = _leading(_accepts(noise, draft_tokens, p[:, :-1], q))
        weights = _residual(p, q, num_accepted)
    else:
        num_accepted, weights = jnp.zeros((B,), jnp.int32), p[:, 0]
    uniforms = counter.uniforms(noise.seed, noise.rollout_id, noise.position, num_accepted, counter.RESIDUAL)
    final = draw(weights, uniforms)
    tokens = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(k + 1)[None] == num_accepted[:, None], final[:, None], tokens)
    return Verified(tokens, num_accepted, logprobs_and_entropy(target_logits, tokens, sampling.temperature)[0])


def _leading(kept: jax.Array) -> jax.Array:
    """[B, k] bool -> [B] int32: how many are true before the first false."""
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _draft_probs(
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    one_hot: jax.Array,
    vocab_map: jax.Array | None,
    V: int,
    sampling: Sampling,
) -> jax.Array:
    """q on the target vocabulary [B, k, V] float32."""
    certain = jax.nn.one_hot(draft_tokens, V, dtype=jnp.float32)
    if draft_logits is None:
        return certain
    q = jax.nn.softmax(draft_logits.astype(jnp.float32) / sampling.temperature, axis=-1)
    if vocab_map is not None:
        q = jnp.zeros((*q.shape[:2], V), jnp.float32).at[:, :, vocab_map].set(q)
    return jnp.where(one_hot[:, None, None], certain, q)


def _residual(p: jax.Array, q: jax.Array, num_accepted: jax.Array) -> jax.Array:
    """[B, V] weights of the last emitted token: max(p - q, 0) where a draft was rejected, p where none was."""
    # q of the bonus position is zero, so one expression serves both.
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    p_last, q_last = (jnp.take_along_axis(x, num_accepted[:, None, None], axis=1)[:, 0] for x in (p, q))
    residual = jnp.maximum(p_last - q_last, 0.0)
    # p and q may differ by rounding only, with p <= q everywhere: then nothing is left, and p itself is the limit.
    return jnp.where((residual > 0).any(axis=-1, keepdims=True), residual, p_last)


def _accepts(noise: Noise, draft_tokens: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """[B, k] bool: u < p(x) / q(x), without the division."""
    offsets = jnp.arange(draft_tokens.shape[1])[None]
    u, _ = counter.uniforms(noise.seed, noise.rollout_id[:, None], noise.position[:, None], offsets, counter.ACCEPT)
    p_x, q_x = (jnp.take_along_axis(x, draft_tokens[..., None], axis=-1)[..., 0] for x in (p, q))
    return u * q_x < p_x
