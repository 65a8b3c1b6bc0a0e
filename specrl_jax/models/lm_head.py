"""What follows from logits that are never there at once: log-probs, entropy and draft losses, from hidden states.

The unembedding is gone over in tiles of the vocabulary, with running maxima and sums (the online softmax of Milakov and
Gimelshein, arXiv 1805.02867); the backward pass goes over them again and recomputes each tile's logits. With n tokens
and a tile of m words the largest buffer is [n, m] float32, the gradient of the unembedding apart.

Where the vocabulary is split over devices, [V, D] is seen as [W, V / W, D] and a tile has rows of every part: each
device goes over its own, and parts meet once at the end.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.core import DraftTerms, at_least_float32, shift_left
from specrl_jax.models.layers import matmul
from specrl_jax.sharding import Partitioner


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a vocabulary is gone over. Hashable: static under jit."""

    words: int  # in a tile, over all devices; 0 = the whole vocabulary at once
    temperature: float  # of every softmax; 0 (greedy) counts as 1, the same rule for rollout and learner
    partition: Partitioner

    def parts(self, table: jax.Array) -> jax.Array:
        """[V, D] -> [W, V / W, D]; W = 1 where the vocabulary does not divide."""
        num_shards = self.partition.num_shards("vocab")
        num_shards = 1 if table.shape[0] % num_shards else num_shards
        return table.reshape(num_shards, -1, table.shape[1])

    def logits(self, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        """[B, T, W, M], at least float32, from hidden [B, T, D] and rows [W, M, D]."""
        logits = at_least_float32(matmul("BTD,WMD->BTWM", hidden, rows)) / (self.temperature or 1.0)
        return self.partition.constrain(logits, "batch", "sequence", "vocab" if rows.shape[0] > 1 else None, None)

    def fold(self, body: Callable[..., Any], carry: Any, *tables: jax.Array) -> Any:
        """carry <- body(carry, Tile, rows [W, M, D] of each of `tables`), tile by tile."""
        num_shards, size, _ = tables[0].shape
        M = min(max(self.words // num_shards, 1), size) if self.words else size

        def step(i: Any, carry: Any) -> Any:
            # The last tile ends with the vocabulary and overlaps the one before it.
            start = jnp.minimum(i * M, size - M)
            places = start + jnp.arange(M)
            tile = Tile(start, jnp.arange(num_shards)[:, None] * size + places[None], places >= i * M)
            return body(carry, tile, *[jax.lax.dynamic_slice_in_dim(table, start, M, axis=1) for table in tables])

        return step(0, carry) if size == M else jax.lax.fori_loop(0, -(-size // M), step, carry)


class Tile(NamedTuple):
    start: jax.Array  # [] int32, in each part
    ids: jax.Array  # [W, M] int32
    fresh: jax.Array  # [M] bool, false where the tile before had it

    def only(self, x: jax.Array, otherwise: float = 0.0) -> jax.Array:
        """x [..., M] where fresh."""
        return jnp.where(jnp.broadcast_to(self.fresh, x.shape), x, otherwise)


class TokenScores(NamedTuple):
    """Of log_softmax(logits / temperature), before any top-k or top-p; each [B, T], at least float32, in nats."""

    logprobs: jax.Array  # of the targets
    entropy: jax.Array
    normaliser: jax.Array  # logsumexp of logits / temperature


# ---- log-probs of tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_scores(hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling) -> TokenScores:
    """Scores of `targets` [B, T] int32 from hidden [B, T, D] and the unembedding table [V, D].

    Products have their operands in the narrower of the two dtypes and float32 results (`layers.matmul`). One pass
    forward, 2 B T V D operations; backward 6 B T V D.
    """
    return _token_scores(hidden, table, targets, tiling)


def _token_scores(hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling) -> TokenScores:
    parts = tiling.parts(table)

    def body(carry: Any, tile: Tile, rows: jax.Array) -> Any:
        most, total, weighted, chosen = carry
        logits = tiling.logits(hidden, rows)
        peak = jnp.maximum(most, tile.only(logits, -jnp.inf).max(axis=-1))
        above = logits - peak[..., None]
        weights = tile.only(jnp.exp(above))
        shrink = jnp.exp(most - peak)
        weighted = shrink * (weighted + (most - peak) * total) + (weights * above).sum(axis=-1)
        hit = _hits(tile, targets)
        return peak, shrink * total + weights.sum(axis=-1), weighted, chosen + jnp.where(hit, logits, 0.0).sum(axis=-1)

    dtype = jnp.promote_types(min(hidden.dtype, table.dtype, key=lambda dtype: dtype.itemsize), jnp.float32)
    zeros = jnp.zeros((*targets.shape, parts.shape[0]), dtype)
    # Lowest, not -inf: a difference of two infinities is not a number.
    start = (jnp.full_like(zeros, jnp.finfo(dtype).min / 2), zeros, zeros, zeros)
    most, total, weighted, chosen = tiling.fold(body, start, parts)
    peak = most.max(axis=-1, keepdims=True)
    shrink = jnp.exp(most - peak)
    # Entropy around the largest logit: logits far from zero would multiply the rounding of the sum of p.
    weighted = (shrink * (weighted + (most - peak) * total)).sum(axis=-1)
    total = (shrink * total).sum(axis=-1)
    normaliser = peak[..., 0] + jnp.log(total)
    return TokenScores(chosen.sum(axis=-1) - normaliser, jnp.log(total) - weighted / total, normaliser)


def _hits(tile: Tile, targets: jax.Array) -> jax.Array:
    """[B, T, W, M] bool: where the tile has the target."""
    return (targets[..., None, None] == tile.ids[None, None]) & tile.fresh[None, None, None]


def _token_scores_forward(hidden: jax.Array, table: jax.Array, targets: jax.Array, tiling: Tiling) -> Any:
    scores = _token_scores(hidden, table, targets, tiling)
    return scores, (hidden, table, targets, scores.entropy, scores.normaliser)


def _token_scores_backward(tiling: Tiling, saved: Any, gradient: TokenScores) -> Any:
    hidden, table, targets, entropy, normaliser = saved
    to_chosen, to_entropy, to_normaliser = (g[..., None, None] for g in gradient)
    entropy, normaliser = entropy[..., None, None], normaliser[..., None, None]

    def to_logits(tile: Tile, rows: jax.Array) -> jax.Array:
        logprobs = tiling.logits(hidden, rows) - normaliser
        share = to_normaliser - to_chosen - to_entropy * (logprobs + entropy)
        return jnp.exp(logprobs) * share + jnp.where(_hits(tile, targets), to_chosen, 0.0)

    to_hidden, to_table = _through_table(to_logits, hidden[None], tiling, tiling.parts(table))
    return to_hidden[0].astype(hidden.dtype), to_table.reshape(table.shape).astype(table.dtype), None


def _through_table(
    to_logits: Callable[..., jax.Array], hidden: jax.Array, tiling: Tiling, parts: jax.Array, *others: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of hidden [S, B, T, D] and parts [W, V / W, D] from those of the logits, made tile by tile.

    to_logits(tile, rows, *rows of others) -> [B, T, W, M] or [S, B, T, W, M], of logits / temperature.
    """
    temperature = tiling.temperature or 1.0

    def body(carry: Any, tile: Tile, rows: jax.Array, *others: jax.Array) -> Any:
        to_hidden, to_parts = carry
        gradient = tile.only(to_logits(tile, rows, *others)) / temperature
        gradient = gradient.reshape(hidden.shape[0], *gradient.shape[-4:]).astype(hidden.dtype)
        exact = {"preferred_element_type": to_hidden.dtype}
        to_hidden += jnp.einsum("SBTWM,WMD->SBTD", gradient, rows.astype(hidden.dtype), **exact)
        to_rows = jnp.einsum("SBTWM,SBTD->WMD", gradient, hidden, **exact)
        to_rows += jax.lax.dynamic_slice_in_dim(to_parts, tile.start, rows.shape[1], axis=1)
        return to_hidden, jax.lax.dynamic_update_slice_in_dim(to_parts, to_rows, tile.start, axis=1)

    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    return tiling.fold(body, (jnp.zeros(hidden.shape, dtype), jnp.zeros(parts.shape, dtype)), parts, *others)


token_scores.defvjp(_token_scores_forward, _token_scores_backward)


# ---- what a draft learns from


class TargetDistribution(NamedTuple):
    """The target as a draft's losses need it: no gradient goes there."""

    hidden: jax.Array  # [B, T, D], what its unembedding reads
    table: jax.Array  # [Vd, D], its unembedding's rows of the draft vocabulary
    normaliser: jax.Array  # [B, T] float32, logsumexp of its logits / temperature over the whole vocabulary


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def draft_terms(outputs: jax.Array, table: jax.Array, teacher: TargetDistribution, tiling: Tiling) -> DraftTerms:
    """Terms of the draft whose step i reads outputs[i] [B, T, D'] through its unembedding table [Vd, D'].

    Entry (i, t) predicts token t + 2 + i, so its teacher is the target after position t + 1 + i. Rows within 1 + i of
    the end are meaningless. Two passes, one for the normalisers and one for the sums, 4 (S + 1) B T Vd D operations;
    backward 6 S + 2. In one tile the compiler sees that both passes have the same logits.
    """
    return _draft_terms(outputs, table, teacher, tiling)[0]


def _draft_terms(
    outputs: jax.Array, table: jax.Array, teacher: TargetDistribution, tiling: Tiling
) -> tuple[DraftTerms, Any]:
    """The terms, and what the backward pass needs beside the inputs."""
    steps = outputs.shape[0]
    parts = tiling.parts(table), tiling.parts(teacher.table)
    to_student, to_teacher = _normalisers((*outputs, teacher.hidden), parts, tiling)

    def body(carry: Any, tile: Tile, rows: jax.Array, taught: jax.Array) -> Any:
        logits = tiling.logits(teacher.hidden, taught)
        p, log_share = jnp.exp(logits - teacher.normaliser[..., None, None]), logits - to_teacher[..., None, None]
        share = tile.only(jnp.exp(log_share))
        entropy = carry.entropy - (share * log_share).sum(axis=(-2, -1))
        sums = []
        for i in range(steps):
            log_q = tiling.logits(outputs[i], rows) - to_student[i, ..., None, None]
            q = tile.only(jnp.exp(log_q))
            p_then = shift_left(p, 1 + i)
            terms = shift_left(share, 1 + i) * -log_q, jnp.minimum(p_then, q), jnp.where(q <= p_then, q, 0.0)
            sums.append([term.sum(axis=(-2, -1)) for term in terms])
        crossed, overlap, below = (jnp.stack(x) for x in zip(*sums))
        return _Sums(carry.cross_entropy + crossed, entropy, carry.overlap + overlap, carry.below + below)

    zeros = jnp.zeros_like(to_student)
    sums = tiling.fold(body, _Sums(zeros, jnp.zeros_like(to_teacher), zeros, zeros), *parts)
    entropy = jnp.stack([shift_left(sums.entropy, 1 + i) for i in range(steps)])
    return DraftTerms(sums.cross_entropy, entropy, sums.overlap), (to_student, to_teacher, sums.below)


class _Sums(NamedTuple):
    cross_entropy: jax.Array  # [S, B, T]
    entropy: jax.Array  # [B, T]
    overlap: jax.Array  # [S, B, T]
    below: jax.Array  # [S, B, T], sum of q where q <= p


def _normalisers(hidden: tuple[jax.Array, ...], parts: Any, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    """logsumexp over the draft vocabulary: [S, B, T] of the draft's steps, [B, T] of the target, the last of hidden."""

    def body(carry: Any, tile: Tile, rows: jax.Array, taught: jax.Array) -> Any:
        most, total = carry
        tables = [rows] * (len(hidden) - 1) + [taught]
        logits = [tile.only(tiling.logits(x, table), -jnp.inf) for x, table in zip(hidden, tables)]
        peak = jnp.maximum(most, jnp.stack([x.max(axis=-1) for x in logits]))
        sums = jnp.stack([jnp.exp(x - top[..., None]).sum(axis=-1) for x, top in zip(logits, peak)])
        return peak, total * jnp.exp(most - peak) + sums

    dtype = jnp.promote_types(hidden[0].dtype, jnp.float32)
    zeros = jnp.zeros((len(hidden), *hidden[0].shape[:2], parts[0].shape[0]), dtype)
    most, total = tiling.fold(body, (jnp.full_like(zeros, jnp.finfo(dtype).min / 2), zeros), *parts)
    found = jax.nn.logsumexp(most, b=total, axis=-1)
    return found[:-1], found[-1]


def _draft_terms_forward(outputs: jax.Array, table: jax.Array, teacher: TargetDistribution, tiling: Tiling) -> Any:
    terms, kept = _draft_terms(outputs, table, teacher, tiling)
    return terms, (outputs, table, teacher, kept)


def _draft_terms_backward(tiling: Tiling, saved: Any, gradient: DraftTerms) -> Any:
    """d cross entropy / d logits = q - p~; d overlap / d logits = q (1[q <= p] - sum of q where q <= p)."""
    outputs, table, teacher, (to_student, to_teacher, below) = saved

    def to_logits(tile: Tile, rows: jax.Array, taught: jax.Array) -> jax.Array:
        logits = tiling.logits(teacher.hidden, taught)
        p, share = (jnp.exp(logits - x[..., None, None]) for x in (teacher.normaliser, to_teacher))
        found = []
        for i in range(outputs.shape[0]):
            crossed, overlap, low = (x[i, ..., None, None] for x in (gradient.cross_entropy, gradient.overlap, below))
            q = jnp.exp(tiling.logits(outputs[i], rows) - to_student[i, ..., None, None])
            kept = jnp.where(q <= shift_left(p, 1 + i), 1.0, 0.0)
            found.append(crossed * (q - shift_left(share, 1 + i)) + overlap * q * (kept - low))
        return jnp.stack(found)

    parts = tiling.parts(table), tiling.parts(teacher.table)
    to_outputs, to_table = _through_table(to_logits, outputs, tiling, *parts)
    return to_outputs.astype(outputs.dtype), to_table.reshape(table.shape).astype(table.dtype), None


draft_terms.defvjp(_draft_terms_forward, _draft_terms_backward)
