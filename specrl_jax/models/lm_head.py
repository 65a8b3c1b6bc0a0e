"""Log-probs, entropy and draft losses from hidden states, without materialising logits [B, T, V].

The lm_head's table is read in tiles of the vocabulary with running maxima and sums (online softmax, Milakov and
Gimelshein, arXiv 1805.02867); the backward pass recomputes each tile's logits. With n tokens and m entries in a tile,
the largest buffer is [n, m] float32, beside the gradient of the table.

Where the vocabulary is split over devices, the table [V, D] is viewed as [W, V / W, D] and a tile takes rows of all W
parts: each device reads its own rows, and the parts are combined once at the end.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specrl_jax.core import DraftTerms, at_least_float32, shift_left
from specrl_jax.models.layers import matmul, narrower
from specrl_jax.sharding import Partitioner

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How to loop over the vocabulary. Hashable: static under jit."""

    entries: int  # vocabulary entries in a tile, over all devices; 0: all at once
    temperature: float  # of every softmax; 0 (greedy) counts as 1, in rollouts and in the learner
    partition: Partitioner

    def parts(self, table: jax.Array) -> jax.Array:
        """View a table [V, D] as [W, V / W, D]; W = 1 where the vocabulary does not divide over the devices."""
        shards = self.partition.num_shards("vocab")
        shards = 1 if table.shape[0] % shards else shards
        return table.reshape(shards, -1, table.shape[1])

    def logits(self, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        """Return logits / temperature [B, T, W, M], at least float32, of hidden [B, T, D] and rows [W, M, D]."""
        logits = at_least_float32(matmul("BTD,WMD->BTWM", hidden, rows)) / (self.temperature or 1.0)
        return self.partition.constrain(logits, "batch", "sequence", "vocab" if rows.shape[0] > 1 else None, None)

    def fold(self, body: Callable[..., Carry], carry: Carry, *tables: jax.Array) -> Carry:
        """Fold `carry = body(carry, tile, rows)` over the tiles, with the rows [W, M, D] of each of `tables`."""
        shards, size, _ = tables[0].shape
        M = min(max(self.entries // shards, 1), size) if self.entries else size

        def step(i: int | jax.Array, carry: Carry) -> Carry:
            # The last tile ends with the vocabulary and overlaps the one before it.
            start = jnp.minimum(i * M, size - M)
            places = start + jnp.arange(M)
            tile = Tile(start, jnp.arange(shards)[:, None] * size + places[None], places >= i * M)
            return body(carry, tile, *[jax.lax.dynamic_slice_in_dim(table, start, M, axis=1) for table in tables])

        return step(0, carry) if size == M else jax.lax.fori_loop(0, -(-size // M), step, carry)


class Tile(NamedTuple):
    """M rows of each of the table's W parts."""

    start: jax.Array  # [] int32, first row of the tile in each part
    ids: jax.Array  # [W, M] int32, vocabulary ids
    fresh: jax.Array  # [M] bool, false for rows that the tile before had too

    def only(self, x: jax.Array, otherwise: float = 0.0) -> jax.Array:
        """Replace entries of x [..., M] that are not fresh."""
        return jnp.where(jnp.broadcast_to(self.fresh, x.shape), x, otherwise)


class TokenScores(NamedTuple):
    """Under log_softmax(logits / temperature), before any top-k or top-p; each [B, T], at least float32, in nats."""

    logprobs: jax.Array  # of the targets
    entropy: jax.Array
    normaliser: jax.Array  # logsumexp of logits / temperature


# ---- log-probs of tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_scores(hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling) -> TokenScores:
    """Score `targets` [B, T] int32 from hidden [B, T, D] and the lm_head's table [V, D].

    Operands of matmuls have the narrower of the two dtypes, results are float32 (`layers.matmul`). One pass forward,
    2 B T V D operations; backward 6 B T V D.
    """
    return _token_scores(hidden, table, targets, tiling)


def _token_scores(hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling) -> TokenScores:
    """Fold, over the logits z seen so far, each [B, T, W]:

        maximum       m = max z
        sum_exp       Z = sum of exp(z - m)
        weighted_sum  sum of exp(z - m) (z - m)
        target_logit  z of the target, 0 before its tile

    A new maximum m' multiplies Z by exp(m - m'). Entropy = log Z - weighted_sum / Z, and logsumexp = m + log Z.
    """
    parts = tiling.parts(table)

    def body(carry: tuple[jax.Array, ...], tile: Tile, rows: jax.Array) -> tuple[jax.Array, ...]:
        maximum, sum_exp, weighted_sum, target_logit = carry
        logits = tiling.logits(hidden, rows)
        peak = jnp.maximum(maximum, tile.only(logits, -jnp.inf).max(axis=-1))
        above = logits - peak[..., None]
        weights = tile.only(jnp.exp(above))
        rescale = jnp.exp(maximum - peak)
        weighted_sum = rescale * (weighted_sum + (maximum - peak) * sum_exp) + (weights * above).sum(axis=-1)
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
    # Entropy relative to the largest logit: logits far from zero would multiply the rounding of the sum of p.
    weighted_sum = (rescale * (weighted_sum + (maximum - peak) * sum_exp)).sum(axis=-1)
    sum_exp = (rescale * sum_exp).sum(axis=-1)
    normaliser = peak[..., 0] + jnp.log(sum_exp)
    return TokenScores(target_logit.sum(axis=-1) - normaliser, jnp.log(sum_exp) - weighted_sum / sum_exp, normaliser)


def _is_target(tile: Tile, targets: jax.Array) -> jax.Array:
    """Return a mask [B, T, W, M], true at each target's entry in the tile."""
    return (targets[..., None, None] == tile.ids[None, None]) & tile.fresh[None, None, None]


def _token_scores_forward(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling
) -> tuple[TokenScores, tuple[jax.Array, ...]]:
    scores = _token_scores(hidden, table, targets, tiling)
    return scores, (hidden, table, targets, scores.entropy, scores.normaliser)


def _token_scores_backward(
    tiling: Tiling, saved: tuple[jax.Array, ...], gradient: TokenScores
) -> tuple[jax.Array, jax.Array, None]:
    """Use, with p = softmax(z) and entropy H, by the logit z_v:

    d logprob = 1[v is the target] - p_v,  d entropy = -p_v (log p_v + H),  d normaliser = p_v.
    """
    hidden, table, targets, entropy, normaliser = saved
    d_logprob, d_entropy, d_normaliser = (g[..., None, None] for g in gradient)
    entropy, normaliser = entropy[..., None, None], normaliser[..., None, None]

    def logit_gradient(tile: Tile, rows: jax.Array) -> jax.Array:
        logprobs = tiling.logits(hidden, rows) - normaliser
        share = d_normaliser - d_logprob - d_entropy * (logprobs + entropy)
        return jnp.exp(logprobs) * share + jnp.where(_is_target(tile, targets), d_logprob, 0.0)

    d_hidden, d_table = _input_gradients(logit_gradient, hidden[None], tiling, tiling.parts(table))
    return d_hidden[0].astype(hidden.dtype), d_table.reshape(table.shape).astype(table.dtype), None


def _input_gradients(
    logit_gradient: Callable[..., jax.Array], hidden: jax.Array, tiling: Tiling, parts: jax.Array, *others: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of hidden [S, B, T, D] and parts [W, V / W, D], tile by tile.

    logit_gradient(tile, rows, *rows of others) -> [B, T, W, M] or [S, B, T, W, M], by logits / temperature.
    """
    temperature = tiling.temperature or 1.0

    def body(
        carry: tuple[jax.Array, jax.Array], tile: Tile, rows: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        d_hidden, d_parts = carry
        gradient = tile.only(logit_gradient(tile, rows, *others)) / temperature
        gradient = gradient.reshape(hidden.shape[0], *gradient.shape[-4:]).astype(hidden.dtype)
        d_hidden += jnp.einsum("SBTWM,WMD->SBTD", gradient, rows.astype(hidden.dtype), preferred_element_type=dtype)
        d_rows = jnp.einsum("SBTWM,SBTD->WMD", gradient, hidden, preferred_element_type=dtype)
        d_rows += jax.lax.dynamic_slice_in_dim(d_parts, tile.start, rows.shape[1], axis=1)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_parts, d_rows, tile.start, axis=1)

    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    return tiling.fold(body, (jnp.zeros(hidden.shape, dtype), jnp.zeros(parts.shape, dtype)), parts, *others)


token_scores.defvjp(_token_scores_forward, _token_scores_backward)


# ---- terms of draft losses


class TargetDistribution(NamedTuple):
    """The target's distribution on the draft vocabulary, as the draft's losses read it; it gets no gradient."""

    hidden: jax.Array  # [B, T, D], input of its lm_head
    table: jax.Array  # [Vd, D], its lm_head's rows of the draft vocabulary
    normaliser: jax.Array  # [B, T] float32, logsumexp of its logits / temperature over the whole vocabulary


class _Sums(NamedTuple):
    cross_entropy: jax.Array  # [S, B, T]
    entropy: jax.Array  # [B, T]
    overlap: jax.Array  # [S, B, T]
    below: jax.Array  # [S, B, T], sum of q where q <= p


class _Saved(NamedTuple):
    """For the backward pass, beside the inputs."""

    draft_normaliser: jax.Array  # [S, B, T], logsumexp over the draft vocabulary
    target_normaliser: jax.Array  # [B, T], the same of the target
    below: jax.Array  # [S, B, T], as in _Sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def draft_terms(outputs: jax.Array, table: jax.Array, target: TargetDistribution, tiling: Tiling) -> DraftTerms:
    """Compute the terms of the losses of a draft with outputs[i] [B, T, D'] at step i and lm_head table [Vd, D'].

    Entry (i, t) predicts token t + 2 + i, so it compares with the target after position t + 1 + i. The last 1 + i
    entries of a row are meaningless. Two passes, one for the normalisers and one for the sums: 4 (S + 1) B T Vd D
    operations; backward 6 S + 2. With one tile the compiler merges the logits of both passes.
    """
    return _draft_terms(outputs, table, target, tiling)[0]


def _draft_terms(
    outputs: jax.Array, table: jax.Array, target: TargetDistribution, tiling: Tiling
) -> tuple[DraftTerms, _Saved]:
    steps = outputs.shape[0]
    parts = tiling.parts(table), tiling.parts(target.table)
    draft_normaliser, target_normaliser = _normalisers((*outputs, target.hidden), parts, tiling)

    def body(carry: _Sums, tile: Tile, rows: jax.Array, target_rows: jax.Array) -> _Sums:
        logits = tiling.logits(target.hidden, target_rows)
        p = jnp.exp(logits - target.normaliser[..., None, None])
        log_renormalised = logits - target_normaliser[..., None, None]
        renormalised = tile.only(jnp.exp(log_renormalised))
        entropy = carry.entropy - (renormalised * log_renormalised).sum(axis=(-2, -1))
        sums = []
        for i in range(steps):
            log_q = tiling.logits(outputs[i], rows) - draft_normaliser[i, ..., None, None]
            q = tile.only(jnp.exp(log_q))
            p_then = shift_left(p, 1 + i)
            terms = shift_left(renormalised, 1 + i) * -log_q, jnp.minimum(p_then, q), jnp.where(q <= p_then, q, 0.0)
            sums.append([term.sum(axis=(-2, -1)) for term in terms])
        crossed, overlap, below = (jnp.stack(x) for x in zip(*sums))
        return _Sums(carry.cross_entropy + crossed, entropy, carry.overlap + overlap, carry.below + below)

    zeros = jnp.zeros_like(draft_normaliser)
    sums = tiling.fold(body, _Sums(zeros, jnp.zeros_like(target_normaliser), zeros, zeros), *parts)
    entropy = jnp.stack([shift_left(sums.entropy, 1 + i) for i in range(steps)])
    terms = DraftTerms(sums.cross_entropy, entropy, sums.overlap)
    return terms, _Saved(draft_normaliser, target_normaliser, sums.below)


def _normalisers(
    hidden: tuple[jax.Array, ...], parts: tuple[jax.Array, jax.Array], tiling: Tiling
) -> tuple[jax.Array, jax.Array]:
    """Return logsumexp over the draft vocabulary: [S, B, T] of the draft's steps, [B, T] of the target, last of hidden.

    `parts` are those of the draft's and of the target's table.
    """

    def body(
        carry: tuple[jax.Array, jax.Array], tile: Tile, rows: jax.Array, target_rows: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        maximum, sum_exp = carry
        tables = [rows] * (len(hidden) - 1) + [target_rows]
        logits = [tile.only(tiling.logits(x, table), -jnp.inf) for x, table in zip(hidden, tables)]
        peak = jnp.maximum(maximum, jnp.stack([x.max(axis=-1) for x in logits]))
        sums = jnp.stack([jnp.exp(x - top[..., None]).sum(axis=-1) for x, top in zip(logits, peak)])
        return peak, sum_exp * jnp.exp(maximum - peak) + sums

    dtype = jnp.promote_types(hidden[0].dtype, jnp.float32)
    zeros = jnp.zeros((len(hidden), *hidden[0].shape[:2], parts[0].shape[0]), dtype)
    maximum, sum_exp = tiling.fold(body, (jnp.full_like(zeros, jnp.finfo(dtype).min / 2), zeros), *parts)
    found = jax.nn.logsumexp(maximum, b=sum_exp, axis=-1)
    return found[:-1], found[-1]


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

    def logit_gradient(tile: Tile, rows: jax.Array, target_rows: jax.Array) -> jax.Array:
        logits = tiling.logits(target.hidden, target_rows)
        p, renormalised = (jnp.exp(logits - x[..., None, None]) for x in (target.normaliser, target_normaliser))
        found = []
        for i in range(outputs.shape[0]):
            crossed, overlap, low = (x[i, ..., None, None] for x in (gradient.cross_entropy, gradient.overlap, below))
            q = jnp.exp(tiling.logits(outputs[i], rows) - draft_normaliser[i, ..., None, None])
            kept = jnp.where(q <= shift_left(p, 1 + i), 1.0, 0.0)
            found.append(crossed * (q - shift_left(renormalised, 1 + i)) + overlap * q * (kept - low))
        return jnp.stack(found)

    parts = tiling.parts(table), tiling.parts(target.table)
    d_outputs, d_table = _input_gradients(logit_gradient, outputs, tiling, *parts)
    return d_outputs.astype(outputs.dtype), d_table.reshape(table.shape).astype(table.dtype), None


draft_terms.defvjp(_draft_terms_forward, _draft_terms_backward)
