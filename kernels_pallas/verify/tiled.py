"""Verification from what the kernels say of tiles: all here is of the size of rows and tiles, not of vocabularies.

One pass over the target's logits serves the normalisers, the log-probs, the plain and the bonus draws and the best
token. The ratio rules add a pass over the draft's logits, `block` one over its vocabulary in the target's rows before
the last, and the token emitted after the last draft kept one over a single row of each: the tile is drawn by its sum,
the token inside it as in `draws.draw`.

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
from kernels_pallas.verify.reference import Noise, Verified, by_exact_match, leading
from kernels_pallas.verify.sampling import TILE, Sampling, first_above, smallest_kept
from kernels_pallas.verify.tiles import Options, Statistics


class Kernels(NamedTuple):
    """Of one back end; `gpu` and `tpu` say what they take."""

    statistics: Callable[..., Statistics]
    excess: Callable[..., jax.Array]


class _Rows(NamedTuple):
    """Rows of logits of one width and what is known of each, [R]."""

    logits: jax.Array  # [R, V] float32, raw
    temperature: float
    cut: jax.Array | None  # smallest raw logit kept
    top: jax.Array  # largest logits / temperature
    norm: jax.Array  # log-sum-exp of those kept
    tiles: jax.Array  # [R, T]: exp of those kept, over exp(top)

    def pick(self, row: jax.Array, token: jax.Array) -> jax.Array:
        """Raw logits at tokens; -inf for those below zero."""
        return jnp.where(token < 0, -jnp.inf, self.logits[row, jnp.maximum(token, 0)])

    def scaled(self, logits: jax.Array, row: jax.Array) -> jax.Array:
        """Over the temperature; -inf where cut."""
        x = logits / self.temperature
        return x if self.cut is None else jnp.where(logits >= self.cut[row], x, -jnp.inf)

    def window(self, row: jax.Array, tile: jax.Array) -> jax.Array:
        """[..., TILE] kept logits / temperature of one tile of each `row` [...]; -inf beyond the vocabulary."""
        columns = _columns(tile)
        inside = self.logits.at[row[..., None], columns].get(mode="fill", fill_value=-jnp.inf)
        return self.scaled(inside, row[..., None])


def verify(
    noise: Noise,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    one_hot: jax.Array,
    vocab_map: jax.Array | None,
    target_logits: jax.Array,
    sampling: Sampling,
    kernels: Kernels,
) -> Verified:
    """`reference.verify` of float32 logits. Random bits are the same; tokens too but where two are within rounding."""
    B, Q, V = target_logits.shape
    k = draft_tokens.shape[1]
    temperature = sampling.temperature or 1.0
    cut = smallest_kept(target_logits, sampling) if sampling.temperature else None
    cut = None if cut is None else cut.reshape(-1)
    logits = target_logits.reshape(B * Q, V)
    by_best = sampling.temperature == 0 or sampling.rule == "coupled"
    by_ratio = not by_best and draft_logits is not None and k > 0
    outside = None
    if by_ratio and sampling.rule == "block" and vocab_map is not None:
        outside = jnp.ones(V, jnp.float32).at[vocab_map].set(0.0)
    options = Options(
        V, temperature, cut is not None, outside is not None, by_best, by_best and sampling.temperature != 0
    )
    ids = jnp.repeat(noise.rollout_id, Q)
    positions = (noise.position[:, None] + jnp.arange(Q)[None]).reshape(-1)
    found = kernels.statistics(options, logits, cut, outside, (noise.seed, ids, positions) if options.noise else None)
    target, whole_norm = _rows(logits, temperature, cut, found)
    row = jnp.arange(B)[:, None] * Q + jnp.arange(Q)[None]

    def plain() -> tuple[jax.Array, jax.Array]:
        uniforms = counter.uniforms(noise.seed, ids, positions, 0, counter.RESIDUAL)
        return by_exact_match(draft_tokens, _draw(target, uniforms).reshape(B, Q))

    if by_best:
        tile = jnp.argmax(found.best, axis=-1)
        token = jnp.take_along_axis(found.token, tile[:, None], axis=-1)[:, 0]
        tokens, num_accepted = by_exact_match(draft_tokens, token.reshape(B, Q))
    elif not by_ratio:
        tokens, num_accepted = plain()
    else:
        outside_share = None
        if outside is not None:
            outside_share = _total(found.top, found.outside, target.norm).reshape(B, Q)
        ratio = _by_ratio(
            noise, draft_tokens, draft_logits, vocab_map, target, row, outside_share, sampling.rule, kernels
        )
        equal = jax.lax.cond(one_hot.any(), plain, lambda: ratio)
        tokens = jnp.where(one_hot[:, None], equal[0], ratio[0])
        num_accepted = jnp.where(one_hot, equal[1], ratio[1])
    logprobs = target.pick(row, tokens) / temperature - whole_norm.reshape(B, Q)
    return Verified(tokens[:, : k + 1], num_accepted, logprobs[:, : k + 1])


def _rows(logits: jax.Array, temperature: float, cut: jax.Array | None, found: Statistics) -> tuple[_Rows, jax.Array]:
    """Rows, and the log-sum-exp [R] before any cut."""
    top = found.top.max(axis=-1)
    scale = jnp.exp(found.top - top[:, None])
    tiles = scale * (found.whole if found.kept is None else found.kept)
    norm = jnp.log(tiles.sum(axis=-1)) + top
    whole_norm = norm if found.kept is None else jnp.log((scale * found.whole).sum(axis=-1)) + top
    return _Rows(logits, temperature, cut, top, norm, tiles), whole_norm


def _columns(tile: jax.Array) -> jax.Array:
    """[..., TILE] tokens of tiles [...]."""
    return jnp.expand_dims(tile, -1) * TILE + jax.lax.broadcasted_iota(jnp.int32, (*tile.shape, TILE), tile.ndim)


def _total(top: jax.Array, sums: jax.Array, norm: jax.Array) -> jax.Array:
    """[R] probability of what `sums` [R, T] of exp(x - top) are over."""
    return (jnp.exp(top - norm[:, None]) * sums).sum(axis=-1)


def _draw(rows: _Rows, uniforms: tuple[jax.Array, jax.Array]) -> jax.Array:
    """[R] tokens, one of each row's distribution."""
    tile = first_above(rows.tiles, uniforms[0])
    row = jnp.arange(len(tile))
    weights = jnp.exp(rows.window(row, tile) - rows.top[:, None])
    return tile * TILE + first_above(weights, uniforms[1])


def _by_ratio(
    noise: Noise,
    draft_tokens: jax.Array,
    draft_logits: jax.Array,
    vocab_map: jax.Array | None,
    target: _Rows,
    row: jax.Array,
    outside: jax.Array | None,
    rule: str,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """(tokens [B, Q], num_accepted [B]).

    Args:
      row: [B, Q], the target's entries among its rows.
      outside: [B, Q], the probability that they give to tokens the draft has not; None: it has all.
    """
    (B, k), Q = draft_tokens.shape, row.shape[1]
    draft_options = Options(draft_logits.shape[-1], target.temperature)
    flat = draft_logits.reshape(B * k, -1)
    draft, _ = _rows(flat, target.temperature, None, kernels.statistics(draft_options, flat))
    draft_row = jnp.arange(B)[:, None] * k + jnp.arange(k)[None]
    drafted = row[:, :k]
    p_x = jnp.exp(target.scaled(target.pick(drafted, draft_tokens), drafted) - target.norm[drafted])
    index = _draft_index(draft_tokens, vocab_map)
    q_x = jnp.exp(draft.scaled(draft.pick(draft_row, index), draft_row) - draft.norm[draft_row])
    places = jnp.arange(k, dtype=jnp.int32)[None]
    u, _ = counter.uniforms(noise.seed, noise.rollout_id[:, None], noise.position[:, None], places, counter.ACCEPT)
    if rule == "block":
        scales = rules.block_scales(p_x, q_x)
        mass = jnp.zeros((B, 0), jnp.float32)
        if k > 1:
            mass = _inner_mass(target, draft, row[:, 1:k], draft_row[:, 1:], scales[:, 1:-1], vocab_map, kernels)
            mass = mass if outside is None else mass + scales[:, 1:-1] * outside[:, 1:k]
        num_accepted = jnp.max(jnp.where(u < rules.block_chances_of(scales, mass), places + 1, 0), axis=1)
        scale = jnp.take_along_axis(scales, num_accepted[:, None], axis=1)[:, 0]
    else:
        num_accepted = leading(u < rules.rejection_chances(p_x, q_x))
        scale = jnp.ones(B, jnp.float32)
    last = jnp.take_along_axis(row, num_accepted[:, None], axis=1)[:, 0]
    refused = draft_row[:, 0] + jnp.minimum(num_accepted, k - 1)
    uniforms = counter.uniforms(noise.seed, noise.rollout_id, noise.position, num_accepted, counter.RESIDUAL)
    final = _draw_residual(target, draft, last, refused, scale, num_accepted == k, vocab_map, uniforms, kernels)
    tokens = jnp.pad(draft_tokens, ((0, 0), (0, Q - k)))
    return jnp.where(jnp.arange(Q)[None] == num_accepted[:, None], final[:, None], tokens), num_accepted


def _draft_index(tokens: jax.Array, vocab_map: jax.Array | None) -> jax.Array:
    """[B, k] index of tokens [B, k] in the draft's vocabulary, -1 where they are not in it."""
    if vocab_map is None:
        return tokens
    same = vocab_map[None, None] == tokens[..., None]
    return jnp.where(same.any(axis=-1), jnp.argmax(same, axis=-1), -1)


def _inner_mass(
    target: _Rows,
    draft: _Rows,
    row: jax.Array,
    draft_row: jax.Array,
    scale: jax.Array,
    vocab_map: jax.Array | None,
    kernels: Kernels,
) -> jax.Array:
    """[B, k-1]: sum of max(scale p - q, 0) over the draft's vocabulary, of entries `row` and `draft_row` [B, k-1]."""
    row, draft_row = row.reshape(-1), draft_row.reshape(-1)
    p, at = (
        (target.logits, row)
        if vocab_map is None
        else (target.logits[row[:, None], vocab_map[None]], jnp.arange(len(row)))
    )
    options = Options(draft.logits.shape[1], target.temperature, target.cut is not None)
    norms = target.norm[row], draft.norm[draft_row]
    cut = None if target.cut is None else target.cut[row]
    found = kernels.excess(options, p, at, draft.logits[draft_row], scale.reshape(-1), *norms, cut)
    return found.sum(axis=-1).reshape(scale.shape)


def _draw_residual(
    target: _Rows,
    draft: _Rows,
    row: jax.Array,
    draft_row: jax.Array,
    scale: jax.Array,
    bonus: jax.Array,
    vocab_map: jax.Array | None,
    uniforms: tuple[jax.Array, jax.Array],
    kernels: Kernels,
) -> jax.Array:
    """[B] tokens of weights max(scale p - q, 0), rows `row` and `draft_row` [B]; p where `bonus` or nothing is left."""
    V = target.logits.shape[1]
    d = draft.logits[draft_row]
    if vocab_map is not None:
        d = jnp.full((len(row), V), -jnp.inf, jnp.float32).at[:, vocab_map].set(d)
    options = Options(V, target.temperature, target.cut is not None)
    norms = target.norm[row], draft.norm[draft_row]
    cut = None if target.cut is None else target.cut[row]
    left = kernels.excess(options, target.logits, row, d, scale, *norms, cut)
    from_p = bonus | ~(left > 0).any(axis=-1)
    tile = first_above(jnp.where(from_p[:, None], target.tiles[row], left), uniforms[0])
    columns = _columns(tile)
    p = jnp.exp(target.window(row, tile) - norms[0][:, None])
    inside = d.at[jnp.arange(len(row))[:, None], columns].get(mode="fill", fill_value=-jnp.inf)
    q = jnp.exp(inside / target.temperature - norms[1][:, None])
    residual = rules.excess(p, q, scale)
    # A kernel's exponential may find a last bit of weight in a tile where this one finds none.
    from_p |= ~(residual > 0).any(axis=-1)
    return tile * TILE + first_above(jnp.where(from_p[:, None], p, residual), uniforms[1])
