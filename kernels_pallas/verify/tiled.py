"""Verification from the kernels' results per tile: arrays here have the size of rows and tiles, not of vocabularies.

One pass over the target's logits gives the normalisers, the log-probs, the plain and the bonus draws and the best
token. The ratio rules add a pass over the draft's logits; `block` adds one over the draft's vocabulary in the target's
rows before the last; the token emitted after the last accepted draft adds one over a single row of each: its tile is
drawn by the tile's sum, the token inside the tile as in `sampling.draw`.

Bytes at Qwen3-8B (V = 151,936, Vd = 32,000, k = 3), B = 64: 155.6 MB of target and 24.6 MB of draft logits once; the
last row's 38.9 MB of target once and of the draft, spread to the whole vocabulary, written and read; `block` 16.4 MB
of draft logits and as much of the target's gathered, written and read. In all 0.30 GB, `block` 0.35 GB.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import noise as counter
from kernels_pallas.verify import rules
from kernels_pallas.verify.reference import (
    Emitted,
    before_nonfinite,
    by_exact_match,
    choose_rows,
    count_leading_true,
    whole_draft,
)
from kernels_pallas.verify.sampling import TILE, first_above, truncate
from kernels_pallas.verify.tiles import ResidualTerms, Statistics, TileOptions
from kernels_pallas.verify.types import Draft, Noise, SamplingParams, Verified, VerifyInputs


class Kernels(NamedTuple):
    """Kernels of one backend; `gpu` documents their arguments."""

    statistics: Callable[..., Statistics]
    residual: Callable[..., jax.Array]


class _Rows(NamedTuple):
    """R rows of logits of one width, with their statistics."""

    logits: jax.Array  # [R, V] float32, raw; -inf where top-k or top-p cut them
    temperature: jax.Array  # [R], positive
    top: jax.Array  # [R] largest logits / temperature
    log_sum: jax.Array  # [R] log of the sum of exp(logits / temperature - top)
    tiles: jax.Array  # [R, T] those sums by tile

    @property
    def norm(self) -> jax.Array:
        """Return the log-sum-exp [R] of logits / temperature."""
        return self.log_sum + self.top

    def pick(self, row: jax.Array, token: jax.Array) -> jax.Array:
        """Return logits / temperature at tokens; -inf for negative ids."""
        return jnp.where(token < 0, -jnp.inf, self.logits[row, jnp.maximum(token, 0)]) / self.temperature[row]

    def window(self, row: jax.Array, tile: jax.Array) -> jax.Array:
        """Return [..., TILE] logits / temperature of one tile of each `row` [...]; -inf beyond the vocabulary."""
        inside = self.logits.at[row[..., None], _columns(tile)].get(mode="fill", fill_value=-jnp.inf)
        return inside / self.temperature[row][..., None]


class _Target(NamedTuple):
    """The target's B * Q rows, and where each position's row is."""

    rows: _Rows
    place: jax.Array  # [B, Q] int32
    outside: jax.Array | None  # [B, Q] probability of ids outside the draft's vocabulary; None: it has all


class _Draft(NamedTuple):
    """The draft's B * k rows, and where each position's row is."""

    rows: _Rows
    place: jax.Array  # [B, k] int32
    vocab_map: jax.Array | None


def verify(inputs: VerifyInputs, sampling: SamplingParams, kernels: Kernels) -> Verified:
    """Compute `reference.verify` of float32 logits by kernels.

    Random bits are the same; tokens differ only where two are within rounding.
    """
    noise, draft = inputs.noise, inputs.draft
    B, Q, V = inputs.target_logits.shape
    k = draft.tokens.shape[1]
    sampled = inputs.rows(sampling)
    temperature = jnp.repeat(sampled.temperature, Q)
    kept, mask = truncate(inputs.target_logits, sampling, inputs.sampling)
    logits = kept.reshape(B * Q, V)
    coupled = sampling.rule == "coupled"
    # Any row may be greedy where rows have values of their own.
    by_best = coupled or inputs.sampling is not None or sampling.temperature == 0
    by_ratio = not coupled and draft.logits is not None and k > 0
    outside = None
    if by_ratio and sampling.rule == "block" and draft.vocab_map is not None:
        outside = jnp.ones(V, jnp.float32).at[draft.vocab_map].set(0.0)
    options = TileOptions(V, outside is not None, by_best, noise=coupled)
    ids = jnp.repeat(noise.rollout_id, Q)
    positions = (noise.position[:, None] + jnp.arange(Q)[None]).reshape(-1)
    noises = Noise(noise.seed, ids, positions) if options.noise else None
    found = kernels.statistics(options, logits, temperature, outside, noises)
    rows = _rows(logits, jnp.repeat(sampled.divisor, Q), found)
    index = jnp.arange(B)[:, None] * Q + jnp.arange(Q)[None]

    def plain() -> Emitted:
        uniforms = counter.uniforms(noise.seed, ids, positions, 0, counter.RESIDUAL)
        drawn = _draw(rows, uniforms)
        drawn = jnp.where(temperature == 0, _best(found), drawn) if by_best else drawn
        return by_exact_match(draft, drawn.reshape(B, Q))

    if coupled:
        emitted = by_exact_match(draft, _best(found).reshape(B, Q))
    elif not by_ratio:
        emitted = plain()
    else:
        share = None if found.outside is None else _probability(found.top, found.outside, rows.norm).reshape(B, Q)
        ratio = _by_ratio(noise, draft, _Target(rows, index, share), sampling.rule, kernels)
        by_match = draft.deterministic | sampled.greedy
        emitted = choose_rows(by_match, jax.lax.cond(by_match.any(), plain, lambda: ratio), ratio)
    logprobs = (rows.pick(index, emitted.tokens) - rows.top[index]) - rows.log_sum[index]
    mask = jax.tree.map(lambda x: x[:, : k + 1], mask)
    return Verified(emitted.tokens[:, : k + 1], emitted.num_accepted, logprobs[:, : k + 1], mask=mask)


def _best(found: Statistics) -> jax.Array:
    """Return [R] int32, the best token of each row."""
    assert found.best is not None and found.token is not None, "requested by the options"
    tile = jnp.argmax(found.best, axis=-1)
    return jnp.take_along_axis(found.token, tile[:, None], axis=-1)[:, 0]


def _rows(logits: jax.Array, temperature: jax.Array, found: Statistics) -> _Rows:
    top = found.top.max(axis=-1)
    tiles = jnp.exp(found.top - top[:, None]) * found.total
    return _Rows(logits, temperature, top, log_sum=jnp.log(tiles.sum(axis=-1)), tiles=tiles)


def _columns(tile: jax.Array) -> jax.Array:
    """Return [..., TILE] token ids of tiles [...]."""
    return jnp.expand_dims(tile, -1) * TILE + jax.lax.broadcasted_iota(jnp.int32, (*tile.shape, TILE), tile.ndim)


def _probability(top: jax.Array, sums: jax.Array, norm: jax.Array) -> jax.Array:
    """Return [R] probability of the tokens in `sums` [R, T] of exp(x - top)."""
    return (jnp.exp(top - norm[:, None]) * sums).sum(axis=-1)


def _draw(rows: _Rows, uniforms: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Draw one token of each row's distribution, [R]."""
    tile = first_above(rows.tiles, uniforms[0])
    row = jnp.arange(len(tile))
    weights = jnp.exp(rows.window(row, tile) - rows.top[:, None])
    return tile * TILE + first_above(weights, uniforms[1])


def _by_ratio(noise: Noise, draft: Draft, target: _Target, rule: str, kernels: Kernels) -> Emitted:
    """Apply rule A or C, k >= 1."""
    assert draft.logits is not None, "rows with probabilities have logits"
    (B, k), Q = draft.tokens.shape, target.place.shape[1]
    rows = target.rows
    draft_options = TileOptions(draft.logits.shape[-1])
    flat, temperature = draft.logits.reshape(B * k, -1), rows.temperature[target.place[:, :k].reshape(-1)]
    draft_rows = _rows(flat, temperature, kernels.statistics(draft_options, flat, temperature))
    draft = before_nonfinite(draft, draft_rows.norm.reshape(B, k))
    drafted = _Draft(draft_rows, jnp.arange(B)[:, None] * k + jnp.arange(k)[None], draft.vocab_map)
    before = target.place[:, :k]
    p_x = jnp.exp(rows.pick(before, draft.tokens) - rows.norm[before])
    ids = _draft_ids(draft.tokens, draft.vocab_map)
    q_x = jnp.exp(draft_rows.pick(drafted.place, ids) - draft_rows.norm[drafted.place])
    places = jnp.arange(k, dtype=jnp.int32)[None]
    u, _ = counter.uniforms(noise.seed, noise.rollout_id[:, None], noise.position[:, None], places, counter.ACCEPT)
    if rule == "block":
        scales = rules.block_scales(p_x, q_x)
        mass = _inner_mass(target, drafted, scales[:, 1:-1], kernels) if k > 1 else jnp.zeros((B, 0), jnp.float32)
        chances = rules.block_chances_from_mass(scales, mass, draft.num_drafted)
        num_accepted = jnp.max(jnp.where(u < chances, places + 1, 0), axis=1)
        scale = jnp.take_along_axis(scales, num_accepted[:, None], axis=1)[:, 0]
    else:
        num_accepted = count_leading_true(u < rules.rejection_chances(p_x, q_x, draft.num_drafted))
        scale = jnp.ones(B, jnp.float32)
    uniforms = counter.uniforms(noise.seed, noise.rollout_id, noise.position, num_accepted, counter.RESIDUAL)
    bonus = whole_draft(draft, num_accepted)
    final = _draw_residual(target, drafted, num_accepted, scale, bonus, uniforms, kernels)
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, Q - k)))
    tokens = jnp.where(jnp.arange(Q)[None] == num_accepted[:, None], final[:, None], tokens)
    return Emitted(tokens, num_accepted)


def _draft_ids(tokens: jax.Array, vocab_map: jax.Array | None) -> jax.Array:
    """Return [B, k] draft-vocabulary ids of tokens [B, k], -1 for tokens that it lacks."""
    if vocab_map is None:
        return tokens
    same = vocab_map[None, None] == tokens[..., None]
    return jnp.where(same.any(axis=-1), jnp.argmax(same, axis=-1), -1)


def _inner_mass(target: _Target, draft: _Draft, scale: jax.Array, kernels: Kernels) -> jax.Array:
    """Return S_i of i = 1 .. k-1, [B, k-1]: the sum of max(scale p - q, 0) over the target's vocabulary."""
    k = draft.place.shape[1]
    row, draft_row = target.place[:, 1:k].reshape(-1), draft.place[:, 1:].reshape(-1)
    p, at = (
        (target.rows.logits, row)
        if draft.vocab_map is None
        else (target.rows.logits[row[:, None], draft.vocab_map[None]], jnp.arange(len(row)))
    )
    options = TileOptions(draft.rows.logits.shape[1])
    terms = _terms(target, draft, row, draft_row, scale.reshape(-1))
    mass = kernels.residual(options, p, at, draft.rows.logits[draft_row], terms).sum(axis=-1).reshape(scale.shape)
    return mass if target.outside is None else mass + scale * target.outside[:, 1:k]


def _draw_residual(
    target: _Target,
    draft: _Draft,
    num_accepted: jax.Array,
    scale: jax.Array,
    bonus: jax.Array,
    uniforms: tuple[jax.Array, jax.Array],
    kernels: Kernels,
) -> jax.Array:
    """Draw [B] tokens of weights max(scale p - q, 0) after num_accepted drafts; of p if `bonus` or nothing is left."""
    rows, k = target.rows, draft.place.shape[1]
    row = jnp.take_along_axis(target.place, num_accepted[:, None], axis=1)[:, 0]
    draft_row = draft.place[:, 0] + jnp.minimum(num_accepted, k - 1)
    V = rows.logits.shape[1]
    d = draft.rows.logits[draft_row]
    if draft.vocab_map is not None:
        d = jnp.full((len(row), V), -jnp.inf, jnp.float32).at[:, draft.vocab_map].set(d)
    options = TileOptions(V)
    terms = _terms(target, draft, row, draft_row, scale)
    left = kernels.residual(options, rows.logits, row, d, terms)
    from_p = bonus | ~(left > 0).any(axis=-1)
    tile = first_above(jnp.where(from_p[:, None], rows.tiles[row], left), uniforms[0])
    p = jnp.exp(rows.window(row, tile) - terms.p_norm[:, None])
    inside = d.at[jnp.arange(len(row))[:, None], _columns(tile)].get(mode="fill", fill_value=-jnp.inf)
    q = jnp.exp(inside / terms.temperature[:, None] - terms.q_norm[:, None])
    weights = rules.residual(p, q, scale)
    # The kernel's exponential may leave a last bit of weight in a tile where this one leaves none.
    from_p |= ~(weights > 0).any(axis=-1)
    return tile * TILE + first_above(jnp.where(from_p[:, None], p, weights), uniforms[1])


def _terms(target: _Target, draft: _Draft, row: jax.Array, draft_row: jax.Array, scale: jax.Array) -> ResidualTerms:
    return ResidualTerms(target.rows.temperature[row], scale, target.rows.norm[row], q_norm=draft.rows.norm[draft_row])
