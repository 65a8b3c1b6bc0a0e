"""Verification by definition: which drafted tokens are accepted, and which token is emitted after them.

Emitted tokens are distributed as the target's p, for every draft. Two ways lead there:

Exact match: a token y_i ~ p_i is drawn at every position; drafts are accepted up to the first that differs from its y,
which is emitted instead. Correct for every draft. It serves greedy decoding (y is the argmax), `coupled`, and under the
other rules deterministic rows (drafts without probabilities), whose noise is keyed by the token's absolute position:
they reproduce plain decoding token for token.

Probability ratio: the rules of `rules.py`, correct for drafts sampled from the q they are verified against. Their noise
is keyed by the block: later offsets decide about earlier ones, so noise drawn at an offset must not be used again in
the next block.

`coupled` (Daliri, Musco, Suresh 2408.07978): y_i is the argmax of log p_i + g, the drafted token that of log q_i + the
same Gumbel noise g of (rollout, absolute position, token). Emitted tokens depend on neither drafter nor k.

A draft whose q is not a distribution (a logit of NaN or of +inf, or all of -inf) ends before it, under every rule: it
costs speed, never the distribution of what is emitted.

With nothing drafted (k = 0) every rule is plain sampling: plain and speculative decoding are one code path.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import noise as counter
from kernels_pallas.verify import rules
from kernels_pallas.verify.sampling import draw, draw_rows, truncate, widened
from kernels_pallas.verify.types import Draft, Noise, SamplingParams, Verified, VerifyInputs


class Emitted(NamedTuple):
    """Tokens of each row, of which num_accepted + 1 are emitted."""

    tokens: jax.Array  # [B, k+1] or [B, Q] int32
    num_accepted: jax.Array  # [B] int32


def verify(inputs: VerifyInputs, sampling: SamplingParams) -> Verified:
    """Verify k drafted tokens per row against k + 1 target distributions, by `sampling.rule`."""
    noise, draft = inputs.noise, inputs.draft
    k, Q = draft.tokens.shape[1], inputs.target_logits.shape[1]
    rows = inputs.rows(sampling)
    divisor, greedy = rows.divisor[:, None, None], rows.greedy
    kept, mask = truncate(widened(inputs.target_logits), sampling, inputs.sampling)
    log_weights = kept / divisor.astype(kept.dtype)
    if sampling.rule == "coupled":
        emitted = by_exact_match(draft, _coupled_draws(noise, log_weights, greedy))
    else:
        logits = log_weights[:, : k + 1]

        def matched() -> Emitted:
            return by_exact_match(draft, _plain_draws(noise, logits, greedy))

        if draft.logits is None or k == 0:
            emitted = matched()
        else:
            draft_logits = widened(draft.logits)
            by_ratio = _by_ratio(noise, draft, draft_logits / divisor.astype(draft_logits.dtype), logits, sampling.rule)
            # k + 1 draws per row, skipped in a batch without such rows.
            by_match = draft.deterministic | greedy
            emitted = choose_rows(by_match, jax.lax.cond(by_match.any(), matched, lambda: by_ratio), by_ratio)
    tokens = jnp.pad(emitted.tokens, ((0, 0), (0, Q - emitted.tokens.shape[1])))
    # The largest logit leaves before the log of the sum: far from zero, their sum is rounded to its own size.
    top = log_weights.max(axis=-1, keepdims=True)
    logprobs = (_pick(log_weights, tokens) - top[..., 0]) - jnp.log(jnp.exp(log_weights - top).sum(axis=-1))
    mask = jax.tree.map(lambda x: x[:, : k + 1], mask)
    return Verified(tokens[:, : k + 1], emitted.num_accepted, logprobs[:, : k + 1], mask=mask)


def by_exact_match(draft: Draft, drawn: jax.Array) -> Emitted:
    """Emit `drawn` [B, Q] up to the first position where it differs from the draft."""
    drawn = drawn.astype(jnp.int32)
    return Emitted(drawn, count_leading_true(within(draft, draft.tokens == drawn[:, : draft.tokens.shape[1]])))


def choose_rows(mask: jax.Array, a: Emitted, b: Emitted) -> Emitted:
    """Return rows of `a` where mask [B], else of `b`."""
    return Emitted(
        jnp.where(mask[:, None], a.tokens, b.tokens),
        jnp.where(mask, a.num_accepted, b.num_accepted),
    )


def within(draft: Draft, mask: jax.Array) -> jax.Array:
    """Return mask [B, k] bool, False at positions that a row did not draft."""
    if draft.num_drafted is None:
        return mask
    return mask & (jnp.arange(mask.shape[1])[None] < draft.num_drafted[:, None])


def before_nonfinite(draft: Draft, q_norm: jax.Array) -> Draft:
    """Return `draft` without the tokens from the first whose q is not a distribution: log-sum-exp [B, k] not finite.

    Whether a draft ends is known from the tokens before its end, so a rule that is exact for each length is exact.
    """
    return dataclasses.replace(draft, num_drafted=count_leading_true(within(draft, jnp.isfinite(q_norm))))


def whole_draft(draft: Draft, num_accepted: jax.Array) -> jax.Array:
    """Return [B] bool: every drafted token was accepted, so a bonus token from p follows."""
    return num_accepted == (draft.tokens.shape[1] if draft.num_drafted is None else draft.num_drafted)


def _plain_draws(noise: Noise, logits: jax.Array, greedy: jax.Array) -> jax.Array:
    """Return [B, k+1] tokens, as decoding one token at a time would draw them after the same prefix; of `greedy` rows
    [B] the likeliest.
    """
    positions = noise.position[:, None] + jnp.arange(logits.shape[1])[None]
    uniforms = counter.uniforms(noise.seed, noise.rollout_id[:, None], positions, 0, counter.RESIDUAL)
    return draw_rows(logits, uniforms, greedy)


def _coupled_draws(noise: Noise, logits: jax.Array, greedy: jax.Array) -> jax.Array:
    """Return [B, Q] tokens, each the argmax of logits + Gumbel noise of its absolute position; none of `greedy` rows
    [B].
    """
    positions = noise.position[:, None] + jnp.arange(logits.shape[1])[None]
    g = counter.gumbel_rows(noise.seed, noise.rollout_id[:, None], positions, logits.shape[-1])
    return jnp.argmax(logits + jnp.where(greedy[:, None, None], 0, g).astype(logits.dtype), axis=-1)


def _by_ratio(noise: Noise, draft: Draft, draft_logits: jax.Array, logits: jax.Array, rule: str) -> Emitted:
    """Apply rule A or C, k >= 1.

    Args:
      draft_logits: [B, k, Vd] log-weights of q.
      logits: [B, k+1, V] log-weights of p.
    """
    k, V = draft.tokens.shape[1], logits.shape[-1]
    # Only normalisers are computed for every row: rule A exponentiates one row of each model, the last one.
    p_norm = jax.nn.logsumexp(logits, axis=-1)
    q_norm = jax.nn.logsumexp(draft_logits, axis=-1)
    draft = before_nonfinite(draft, q_norm)
    p_x = jnp.exp(_pick(logits[:, :-1], draft.tokens) - p_norm[:, :-1])
    q_x = jnp.exp(_pick(draft_logits, draft.tokens, draft.vocab_map) - q_norm)
    places = jnp.arange(k, dtype=jnp.int32)[None]
    u, _ = counter.uniforms(noise.seed, noise.rollout_id[:, None], noise.position[:, None], places, counter.ACCEPT)
    if rule == "block":
        p = jnp.exp(logits - p_norm[..., None])
        q = _spread(jnp.exp(draft_logits - q_norm[..., None]), draft.vocab_map, V)
        chances, scales = rules.block_chances(p, q, p_x, q_x, draft.num_drafted)
        num_accepted = jnp.max(jnp.where(u < chances, places + 1, 0), axis=1)
        scale = _row(scales, num_accepted)
    else:
        num_accepted = count_leading_true(u < rules.rejection_chances(p_x, q_x, draft.num_drafted))
        scale = None
    p_last = jnp.exp(_row(logits, num_accepted) - _row(p_norm, num_accepted)[:, None])
    rejected = jnp.minimum(num_accepted, k - 1)
    q_last = _spread(jnp.exp(_row(draft_logits, rejected) - _row(q_norm, rejected)[:, None]), draft.vocab_map, V)
    weights = rules.residual_weights(p_last, q_last, scale)
    weights = jnp.where(whole_draft(draft, num_accepted)[:, None], p_last, weights)
    uniforms = counter.uniforms(noise.seed, noise.rollout_id, noise.position, num_accepted, counter.RESIDUAL)
    final = draw(weights, uniforms)
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(k + 1)[None] == num_accepted[:, None], final[:, None], tokens)
    return Emitted(tokens, num_accepted)


def count_leading_true(mask: jax.Array) -> jax.Array:
    """Return [B] int32: how many entries of each row of mask [B, k] bool are true before the first false one."""
    return jnp.cumprod(mask.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _row(x: jax.Array, place: jax.Array) -> jax.Array:
    """Return x [B, Q, ...] at place [B]: [B, ...]."""
    place = place.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, place, axis=1)[:, 0]


def _pick(logits: jax.Array, tokens: jax.Array, vocab_map: jax.Array | None = None) -> jax.Array:
    """Return [B, k] logits of `tokens` [B, k] in [B, k, V], or in [B, k, Vd] with a map; -inf for ids outside it."""
    if vocab_map is not None:
        return jnp.max(logits, axis=-1, where=vocab_map[None, None] == tokens[..., None], initial=-jnp.inf)
    picked = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(tokens < 0, -jnp.inf, picked)


def _spread(q: jax.Array, vocab_map: jax.Array | None, V: int) -> jax.Array:
    """Map [..., Vd] on the draft's vocabulary to [..., V] on the target's."""
    return q if vocab_map is None else jnp.zeros((*q.shape[:-1], V), q.dtype).at[..., vocab_map].set(q)
