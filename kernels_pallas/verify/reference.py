"""Verification of drafted tokens: which are kept, and what is emitted instead of the first that is not.

What is emitted is distributed as the target's p, whatever was drafted. Two ways to get there:

By equality: a token y_i ~ p_i is drawn at every position; drafts are kept up to the first that differs from its y,
which is emitted in its place. Exact for every draft. Greedy decoding (y the best token), `coupled`, and under the other
rules the rows of a draft without probabilities, whose noise is that of the token's absolute position: they replay plain
decoding token for token.

By ratio: the rules of `rules.py`, exact for drafts drawn from the q they are verified against. Noise belongs to the
block: later offsets decide earlier ones, so what an offset drew must not return in the next block.

`coupled` (Daliri, Musco, Suresh 2408.07978): y_i is the argmax of log p_i + g, the draft's token that of log q_i + the
same Gumbel noise g of (rollout, absolute position, token). What is emitted depends on neither drafter nor k.

With nothing drafted (k = 0) every rule is plain sampling, so plain and speculative decoding are one code path.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import noise as counter
from kernels_pallas.verify import rules
from kernels_pallas.verify.sampling import Sampling, draw, final_logits, widened


class Noise(NamedTuple):
    """What the randomness of one verification is a function of."""

    seed: jax.Array  # [] uint32
    rollout_id: jax.Array  # [B] uint32
    position: jax.Array  # [B] int32, position of the first token this verification emits


class Verified(NamedTuple):
    tokens: jax.Array  # [B, k+1] int32; entries beyond num_accepted are meaningless
    num_accepted: jax.Array  # [B] int32 in 0..k; num_accepted + 1 tokens are emitted
    logprobs: jax.Array  # [B, k+1] float32 (float64), nats, of `tokens` under the target at T, before top-k and top-p


def verify(
    noise: Noise,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    one_hot: jax.Array,
    vocab_map: jax.Array | None,
    target_logits: jax.Array,
    sampling: Sampling,
) -> Verified:
    """Verifies k drafted tokens per row against k + 1 target distributions, by `sampling.rule`.

    Args:
      draft_tokens: [B, k] int32 target-vocabulary ids; k may be 0. -1: nothing was drafted here nor after, which is
        never accepted. Where draft_logits count, there is no -1 and the tokens were sampled from them.
      draft_logits: [B, k, Vd] float32 before temperature, or None where no row has any.
      one_hot: [B] bool, rows whose draft has no probabilities: their draft_logits do not count.
      vocab_map: [Vd] int32 target id of each draft id, or None where Vd = V.
      target_logits: [B, Q, V] float32 (float64), Q > k; entry i is the target's after the i-th drafted token. Those
        beyond k are of no use but for their shape: a sum is only sure to be the same to the last bit in the same one.
    """
    k = draft_tokens.shape[1]
    if sampling.temperature == 0:
        tokens, num_accepted = by_exact_match(draft_tokens, jnp.argmax(target_logits, axis=-1))
    elif sampling.rule == "coupled":
        tokens, num_accepted = by_exact_match(
            draft_tokens, _coupled_draws(noise, final_logits(target_logits, sampling))
        )
    else:
        logits = final_logits(target_logits, sampling)[:, : k + 1]

        def without_probabilities() -> tuple[jax.Array, jax.Array]:
            return by_exact_match(draft_tokens, _plain_draws(noise, logits))

        if draft_logits is None or k == 0:
            tokens, num_accepted = without_probabilities()
        else:
            scaled = widened(draft_logits) / sampling.temperature
            by_ratio = _by_ratio(noise, draft_tokens, scaled, vocab_map, logits, sampling.rule)
            # k + 1 draws a row: not for a batch that needs none.
            equal = jax.lax.cond(one_hot.any(), without_probabilities, lambda: by_ratio)
            tokens = jnp.where(one_hot[:, None], equal[0], by_ratio[0])
            num_accepted = jnp.where(one_hot, equal[1], by_ratio[1])
    tokens = jnp.pad(tokens, ((0, 0), (0, target_logits.shape[1] - tokens.shape[1])))
    logits = widened(target_logits) / (sampling.temperature or 1.0)
    logprobs = _pick(logits, tokens) - jax.nn.logsumexp(logits, axis=-1)
    return Verified(tokens[:, : k + 1], num_accepted, logprobs[:, : k + 1])


def by_exact_match(draft_tokens: jax.Array, drawn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tokens [B, Q], num_accepted [B]) where `drawn` [B, Q] is emitted up to the first of k drafts that differs."""
    drawn = drawn.astype(jnp.int32)
    return drawn, leading(draft_tokens == drawn[:, : draft_tokens.shape[1]])


def _plain_draws(noise: Noise, logits: jax.Array) -> jax.Array:
    """[B, k+1] tokens, as decoding one token at a time would draw them after the same prefix."""
    positions = noise.position[:, None] + jnp.arange(logits.shape[1])[None]
    uniforms = counter.uniforms(noise.seed, noise.rollout_id[:, None], positions, 0, counter.RESIDUAL)
    return draw(jax.nn.softmax(logits, axis=-1), uniforms)


def _coupled_draws(noise: Noise, logits: jax.Array) -> jax.Array:
    """[B, Q] tokens, each the best of logits + Gumbel noise of its absolute position."""
    positions = noise.position[:, None] + jnp.arange(logits.shape[1])[None]
    g = counter.gumbel_rows(noise.seed, noise.rollout_id[:, None], positions, logits.shape[-1])
    return jnp.argmax(logits + g.astype(logits.dtype), axis=-1)


def _by_ratio(
    noise: Noise,
    draft_tokens: jax.Array,
    draft_logits: jax.Array,
    vocab_map: jax.Array | None,
    logits: jax.Array,
    rule: str,
) -> tuple[jax.Array, jax.Array]:
    """(tokens [B, k+1], num_accepted [B]) of rules A and C; both logits are those of the distributions, k >= 1."""
    k, V = draft_tokens.shape[1], logits.shape[-1]
    # Only normalisers are taken of every row: rule A exponentiates one row of each model, the last one.
    p_norm = jax.nn.logsumexp(logits, axis=-1)
    q_norm = jax.nn.logsumexp(draft_logits, axis=-1)
    p_x = jnp.exp(_pick(logits[:, :-1], draft_tokens) - p_norm[:, :-1])
    q_x = jnp.exp(_pick(draft_logits, draft_tokens, vocab_map) - q_norm)
    places = jnp.arange(k, dtype=jnp.int32)[None]
    u, _ = counter.uniforms(noise.seed, noise.rollout_id[:, None], noise.position[:, None], places, counter.ACCEPT)
    if rule == "block":
        p = jnp.exp(logits - p_norm[..., None])
        q = _spread(jnp.exp(draft_logits - q_norm[..., None]), vocab_map, V)
        chances, scales = rules.block_chances(p, q, p_x, q_x)
        num_accepted = jnp.max(jnp.where(u < chances, places + 1, 0), axis=1)
        scale = _row(scales, num_accepted)
    else:
        num_accepted, scale = leading(u < rules.rejection_chances(p_x, q_x)), None
    p_last = jnp.exp(_row(logits, num_accepted) - _row(p_norm, num_accepted)[:, None])
    drafted = jnp.minimum(num_accepted, k - 1)
    q_last = _spread(jnp.exp(_row(draft_logits, drafted) - _row(q_norm, drafted)[:, None]), vocab_map, V)
    weights = rules.residual_weights(p_last, q_last, scale)
    # After the whole draft comes the bonus token, from p itself.
    weights = jnp.where(num_accepted[:, None] == k, p_last, weights)
    uniforms = counter.uniforms(noise.seed, noise.rollout_id, noise.position, num_accepted, counter.RESIDUAL)
    final = draw(weights, uniforms)
    tokens = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(k + 1)[None] == num_accepted[:, None], final[:, None], tokens), num_accepted


def leading(kept: jax.Array) -> jax.Array:
    """[B, k] bool -> [B] int32: how many are true before the first false."""
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _row(x: jax.Array, place: jax.Array) -> jax.Array:
    """x [B, Q, ...] at place [B] -> [B, ...]."""
    place = place.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, place, axis=1)[:, 0]


def _pick(logits: jax.Array, tokens: jax.Array, vocab_map: jax.Array | None = None) -> jax.Array:
    """[B, k] logits of `tokens` [B, k] among [B, k, V], or [B, k, Vd] with a map; -inf for a token that has none."""
    if vocab_map is not None:
        return jnp.max(logits, axis=-1, where=vocab_map[None, None] == tokens[..., None], initial=-jnp.inf)
    picked = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(tokens < 0, -jnp.inf, picked)


def _spread(q: jax.Array, vocab_map: jax.Array | None, V: int) -> jax.Array:
    """[..., Vd] on the draft's vocabulary -> [..., V] on the target's."""
    return q if vocab_map is None else jnp.zeros((*q.shape[:-1], V), q.dtype).at[..., vocab_map].set(q)
