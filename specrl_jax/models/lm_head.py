"""Log-probs, entropy and draft losses from hidden states, without materialising logits [B, T, V].

The lm_head's table is read in tiles of the vocabulary with running maxima and sums (online softmax, Milakov and
Gimelshein, arXiv 1805.02867); the backward pass recomputes each tile's logits. With n tokens and m entries in a tile,
the largest buffer is [n, m] float32, beside the gradient of the table.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.core import DraftTerms, ahead
from specrl_jax.data.rows import KeptTokens
from specrl_jax.models.layers import narrower
from specrl_jax.models.vocab_tiles import Normaliser, Support, Tile, Tiling, input_gradients, product


class TokenScores(NamedTuple):
    """Under log_softmax(logits / temperature) over the tokens that could be sampled; each [B, T], at least float32,
    in nats."""

    logprobs: jax.Array  # of the targets
    entropy: jax.Array
    normaliser: jax.Array  # logsumexp of logits / temperature, rounded to its own size


# ---- log-probs of tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_scores(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling, kept: KeptTokens | None = None
) -> TokenScores:
    """Score `targets` [B, T] int32 from hidden [B, T, D] and the lm_head's table [V, D].

    Operands of matmuls have the narrower of the two dtypes, results are float32 (`layers.matmul`). One pass forward,
    2 B T V D operations; backward 6 B T V D. `kept` is a constant: the gradient is that of the distribution over those
    tokens.
    """
    return _token_scores(hidden, table, targets, tiling, kept)[0]


def _token_scores(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling, kept: KeptTokens | None
) -> tuple[TokenScores, Normaliser]:
    """Fold, over the logits z seen so far, each [B, T, W]:

        maximum       m = max z
        sum_exp       Z = sum of exp(z - m)
        weighted_sum  sum of exp(z - m) (z - m)
        target_logit  z of the target, 0 before its tile

    A new maximum m' multiplies Z by exp(m - m'). Entropy = log Z - weighted_sum / Z, and logsumexp = m + log Z. The
    maximum is subtracted before log Z, from the target's logit as from every other: logits far from zero would
    multiply the rounding of their sum. A logit of -inf has probability 0, and 0 log 0 = 0.
    """
    parts, support = tiling.parts(table), Support.of(kept)

    def body(carry: tuple[jax.Array, ...], tile: Tile, rows: jax.Array) -> tuple[jax.Array, ...]:
        maximum, sum_exp, weighted_sum, target_logit = carry
        logits = tiling.logits(hidden, rows, tile, support=support)
        peak = jnp.maximum(maximum, tile.only(logits, -jnp.inf).max(axis=-1))
        above = logits - peak[..., None]
        weights = tile.only(jnp.exp(above))
        rescale = jnp.exp(maximum - peak)
        weighted_sum = rescale * (weighted_sum + (maximum - peak) * sum_exp) + product(weights, above).sum(axis=-1)
        is_target = _is_target(tile, targets)
        sum_exp = rescale * sum_exp + weights.sum(axis=-1)
        return peak, sum_exp, weighted_sum, target_logit + jnp.where(is_target, logits, 0.0).sum(axis=-1)

    dtype = jnp.promote_types(narrower(hidden.dtype, table.dtype), jnp.float32)
    zeros = jnp.zeros((*targets.shape, parts.shape[0]), dtype)
    # Lowest, not -inf: a difference of two infinities is not a number.
    start: tuple[jax.Array, ...] = (jnp.full_like(zeros, jnp.finfo(dtype).min / 2), zeros, zeros, zeros)
    maximum, sum_exp, weighted_sum, target_logit = tiling.fold(body, start, parts)
    peak = maximum.max(axis=-1, keepdims=True)
    rescale = jnp.exp(maximum - peak)
    weighted_sum = (rescale * (weighted_sum + (maximum - peak) * sum_exp)).sum(axis=-1)
    sum_exp = (rescale * sum_exp).sum(axis=-1)
    normaliser = Normaliser(peak[..., 0], jnp.log(sum_exp))
    entropy = normaliser.log_sum - weighted_sum / sum_exp
    logprobs = normaliser.logprobs(target_logit.sum(axis=-1))
    return TokenScores(logprobs, entropy, normaliser.peak + normaliser.log_sum), normaliser


def _is_target(tile: Tile, targets: jax.Array) -> jax.Array:
    """Return a mask [B, T, W, M], true at each target's entry in the tile."""
    return (targets[..., None, None] == tile.ids[None, None]) & tile.fresh[None, None, None]


class _SavedScores(NamedTuple):
    """For the backward pass of token_scores."""

    hidden: jax.Array
    table: jax.Array
    targets: jax.Array
    kept: KeptTokens | None
    entropy: jax.Array
    normaliser: Normaliser


def _token_scores_forward(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling, kept: KeptTokens | None
) -> tuple[TokenScores, _SavedScores]:
    scores, normaliser = _token_scores(hidden, table, targets, tiling, kept)
    return scores, _SavedScores(hidden, table, targets, kept=kept, entropy=scores.entropy, normaliser=normaliser)


def _token_scores_backward(
    tiling: Tiling, saved: _SavedScores, gradient: TokenScores
) -> tuple[jax.Array, jax.Array, None, None]:
    """Use, with p = softmax(z) and entropy H, by the logit z_v:

    d logprob = 1[v is the target] - p_v,  d entropy = -p_v (log p_v + H),  d normaliser = p_v.
    """
    hidden, table, targets, kept, entropy, normaliser = saved
    support = Support.of(kept)
    d_logprob, d_entropy, d_normaliser = (g[..., None, None] for g in gradient)
    entropy = entropy[..., None, None]

    def logit_gradient(tile: Tile, rows: jax.Array) -> jax.Array:
        logprobs = normaliser.logprobs(tiling.logits(hidden, rows, tile, support=support))
        share = d_normaliser - d_logprob - d_entropy * (logprobs + entropy)
        return product(jnp.exp(logprobs), share) + jnp.where(_is_target(tile, targets), d_logprob, 0.0)

    d_hidden, d_table = input_gradients(logit_gradient, hidden[None], tiling, tiling.parts(table))
    return d_hidden[0].astype(hidden.dtype), d_table.reshape(table.shape).astype(table.dtype), None, None


token_scores.defvjp(_token_scores_forward, _token_scores_backward)


# ---- terms of draft losses


class TargetDistribution(NamedTuple):
    """The target's distribution on the draft vocabulary, as the draft's losses read it; it gets no gradient."""

    hidden: jax.Array  # [B, T, D], input of its lm_head
    table: jax.Array  # [Vd, D], its lm_head's rows of the draft vocabulary
    # [B, T] float32, logsumexp of its logits / temperature over the whole vocabulary. Rounded to its own size, it
    # multiplies all of p by one number near 1, at logits of 1e4 by 1 +- 5e-4; only acceptance reads this p.
    normaliser: jax.Array
    kept: KeptTokens | None = None  # ids of the draft vocabulary; None: every token could be sampled
    anchors: jax.Array | None = None  # [A] int32, the tokens t that the draft's outputs are of; None = all T

    def ahead(self, x: jax.Array, by: int) -> jax.Array:
        """Return entry t + by of x [B, T, ...] where the draft has outputs."""
        return ahead(x, by, self.anchors)


class _DraftTermSums(NamedTuple):
    cross_entropy: jax.Array  # [S, B, T]
    entropy: jax.Array  # [B, T]
    overlap: jax.Array  # [S, B, T]
    below: jax.Array  # [S, B, T], sum of q where q <= p


class _Saved(NamedTuple):
    """For the backward pass, beside the inputs."""

    draft_normaliser: Normaliser  # [S, B, T], over the draft vocabulary
    target_normaliser: Normaliser  # [B, T], the same of the target
    below: jax.Array  # [S, B, T], as in _DraftTermSums


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def draft_terms(outputs: jax.Array, table: jax.Array, target: TargetDistribution, tiling: Tiling) -> DraftTerms:
    """Compute the terms of the losses of a draft with outputs[i] [B, T, D'] at step i and lm_head table [Vd, D'].

    With `target.anchors` outputs and terms are [B, A, ...].

    Entry (i, t) predicts token t + 2 + i, so it compares with the target after position t + 1 + i. The last 1 + i
    entries of a row are meaningless. Two passes, one for the normalisers and one for the sums: 4 (S + 1) B T Vd D
    operations; backward 6 S + 2. With one tile the compiler merges the logits of both passes.
    """
    return _draft_terms(outputs, table, target, tiling)[0]


def _draft_terms(
    outputs: jax.Array, table: jax.Array, target: TargetDistribution, tiling: Tiling
) -> tuple[DraftTerms, _Saved]:
    steps, support = outputs.shape[0], Support.of(target.kept)
    parts = tiling.parts(table), tiling.parts(target.table)
    draft_normaliser, target_normaliser = _normalisers((*outputs, target.hidden), parts, tiling, support)

    def body(carry: _DraftTermSums, tile: Tile, rows: jax.Array, target_rows: jax.Array) -> _DraftTermSums:
        logits = tiling.logits(target.hidden, target_rows, tile, support=support)
        p = jnp.exp(logits - target.normaliser[..., None, None])
        log_renormalised = target_normaliser.logprobs(logits)
        renormalised = tile.only(jnp.exp(log_renormalised))
        entropy = carry.entropy - product(renormalised, log_renormalised).sum(axis=(-2, -1))
        sums = []
        for i in range(steps):
            log_q = draft_normaliser.of_step(i).logprobs(tiling.logits(outputs[i], rows))
            q = tile.only(jnp.exp(log_q))
            p_then = target.ahead(p, 1 + i)
            crossed = product(target.ahead(renormalised, 1 + i), -log_q)
            terms = crossed, jnp.minimum(p_then, q), jnp.where(q <= p_then, q, 0.0)
            sums.append([term.sum(axis=(-2, -1)) for term in terms])
        crossed, overlap, below = (jnp.stack(x) for x in zip(*sums))
        return _DraftTermSums(
            carry.cross_entropy + crossed, entropy, carry.overlap + overlap, below=carry.below + below
        )

    zeros = jnp.zeros_like(draft_normaliser.peak)
    sums = tiling.fold(body, _DraftTermSums(zeros, jnp.zeros_like(target_normaliser.peak), zeros, below=zeros), *parts)
    entropy = jnp.stack([target.ahead(sums.entropy, 1 + i) for i in range(steps)])
    terms = DraftTerms(sums.cross_entropy, entropy, sums.overlap)
    return terms, _Saved(draft_normaliser, target_normaliser, sums.below)


def _normalisers(
    hidden: tuple[jax.Array, ...], parts: tuple[jax.Array, jax.Array], tiling: Tiling, support: Support | None
) -> tuple[Normaliser, Normaliser]:
    """Return the normalisers over the draft vocabulary, [S, B, T] of the draft's steps, [B, T] of the target (last).

    `parts` are those of the draft's and of the target's table, `support` is the target's.
    """

    def body(carry: tuple[_Peak, ...], tile: Tile, rows: jax.Array, target_rows: jax.Array) -> tuple[_Peak, ...]:
        logits = [tile.only(tiling.logits(x, rows), -jnp.inf) for x in hidden[:-1]]
        logits.append(tile.only(tiling.logits(hidden[-1], target_rows, tile, support=support), -jnp.inf))
        return tuple(found.with_logits(x) for found, x in zip(carry, logits, strict=True))

    dtype = jnp.promote_types(hidden[0].dtype, jnp.float32)
    zeros = [jnp.zeros((*x.shape[:2], parts[0].shape[0]), dtype) for x in hidden]
    lowest = jnp.finfo(dtype).min / 2
    found = tiling.fold(body, tuple(_Peak(jnp.full_like(x, lowest), x) for x in zeros), *parts)
    *draft, target = [one.normaliser(support) for one in found]
    return Normaliser(jnp.stack([x.peak for x in draft]), jnp.stack([x.log_sum for x in draft])), target


class _Peak(NamedTuple):
    """Of the logits seen so far of some tokens, by share of the vocabulary."""

    maximum: jax.Array  # [B, T, W]
    sum_exp: jax.Array  # [B, T, W], of exp(logit - maximum)

    def with_logits(self, logits: jax.Array) -> "_Peak":
        """Return the same with logits [B, T, W, M] seen too."""
        peak = jnp.maximum(self.maximum, logits.max(axis=-1))
        return _Peak(peak, self.sum_exp * jnp.exp(self.maximum - peak) + jnp.exp(logits - peak[..., None]).sum(axis=-1))

    def normaliser(self, support: Support | None) -> Normaliser:
        """Return [B, T] over the whole vocabulary."""
        peak = self.maximum.max(axis=-1)
        total = (self.sum_exp * jnp.exp(self.maximum - peak[..., None])).sum(axis=-1)
        # Where the draft vocabulary has no token that could be sampled, p~ is 0 and not 0 / 0.
        return Normaliser(peak, jnp.log(total if support is None else jnp.where(total > 0, total, 1.0)))


def _draft_terms_forward(
    outputs: jax.Array, table: jax.Array, target: TargetDistribution, tiling: Tiling
) -> tuple[DraftTerms, tuple[jax.Array, jax.Array, TargetDistribution, _Saved]]:
    terms, saved = _draft_terms(outputs, table, target, tiling)
    return terms, (outputs, table, target, saved)


def _draft_terms_backward(
    tiling: Tiling, saved: tuple[jax.Array, jax.Array, TargetDistribution, _Saved], gradient: DraftTerms
) -> tuple[jax.Array, jax.Array, None]:
    """Use d cross entropy / d logits = q - p~ and d overlap / d logits = q (1[q <= p] - sum of q where q <= p)."""
    outputs, table, target, (draft_normaliser, target_normaliser, below) = saved
    support = Support.of(target.kept)
    cross_entropy = gradient.cross_entropy
    if support is not None:
        # No token of the draft vocabulary could be sampled: there is no p~ to learn.
        some = target_normaliser.peak > jnp.finfo(target_normaliser.peak.dtype).min / 2
        cross_entropy *= jnp.stack([target.ahead(some, 1 + i) for i in range(outputs.shape[0])])

    def logit_gradient(tile: Tile, rows: jax.Array, target_rows: jax.Array) -> jax.Array:
        logits = tiling.logits(target.hidden, target_rows, tile, support=support)
        p = jnp.exp(logits - target.normaliser[..., None, None])
        renormalised = jnp.exp(target_normaliser.logprobs(logits))
        found = []
        for i in range(outputs.shape[0]):
            crossed, overlap, low = (x[i, ..., None, None] for x in (cross_entropy, gradient.overlap, below))
            q = jnp.exp(draft_normaliser.of_step(i).logprobs(tiling.logits(outputs[i], rows)))
            kept = jnp.where(q <= target.ahead(p, 1 + i), 1.0, 0.0)
            found.append(crossed * (q - target.ahead(renormalised, 1 + i)) + overlap * q * (kept - low))
        return jnp.stack(found)

    parts = tiling.parts(table), tiling.parts(target.table)
    d_outputs, d_table = input_gradients(logit_gradient, outputs, tiling, *parts)
    return d_outputs.astype(outputs.dtype), d_table.reshape(table.shape).astype(table.dtype), None


draft_terms.defvjp(_draft_terms_forward, _draft_terms_backward)
