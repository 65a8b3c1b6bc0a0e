"""Gated delta nets in decoding: what a row remembers between forwards, so that refused drafts never enter its state."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from specrl_jax.core import stand_in
from specrl_jax.models.delta_net import (
    DeltaNet,
    Mixed,
    Tokens,
    chunked,
    convolved,
    enter_state,
    recurrence_inputs,
    sequential,
)


class RowState(NamedTuple):
    """Memory of a layer, of B sequences: the state behind their first `base` tokens, and the tokens after them.

    A verification cannot take back what has entered the state. So the tokens of a forward wait, as inputs of the
    recurrence, for the next one: its first position says how many of them have been accepted.
    """

    state: jax.Array  # [B, N, dk, dv] float32
    recent: tuple[jax.Array, ...]  # q, k, v before the convolution, [B, W - 1 + M, heads, width], from base - W + 1 on
    waiting: Tokens  # [B, M] tokens from base on, without q


class Remembered(NamedTuple):
    """Memory of all layers that are gated delta nets, of B sequences."""

    base: jax.Array  # [B] int32, tokens
    layers: tuple[RowState, ...]


def empty_rows(net: DeltaNet, rows: int, *, waiting: int, dtype: jnp.dtype) -> Remembered:
    """Return what layers remember of sequences without tokens.

    Args:
      waiting: M, the most tokens of a forward that can be accepted.
      dtype: of the activations.
    """
    N, dk, dv, M = net.value_heads, net.key_dim, net.value_dim, waiting
    wide = jnp.promote_types(dtype, jnp.float32)

    def zeros(*shape: int, dtype: jnp.dtype = wide) -> jax.Array:
        return jnp.zeros((rows, *shape), dtype)

    def layer() -> RowState:
        recent = tuple(zeros(net.window - 1 + M, *part, dtype=dtype) for part in net.parts)
        waiting = Tokens(zeros(M, 0, 0), zeros(M, N, dk), zeros(M, N, dv), zeros(M, N), zeros(M, N))
        return RowState(zeros(N, dk, dv), recent, waiting)

    return Remembered(jnp.zeros((rows,), jnp.int32), tuple(layer() for _ in net.layers))


def rows_axes(net: DeltaNet) -> Remembered:
    """Return the logical axes of `empty_rows`'s arrays, as tuples in the same tree."""
    rows = "batch"
    heads = (rows, None, "heads")
    of_part = ((rows, None, "kv_heads", None),) * 2 + ((*heads, None),)
    queries, keys, gates = stand_in((rows, None, None, None)), stand_in((*heads, None)), stand_in(heads)
    layer = RowState(
        stand_in((rows, "heads", None, None)),
        cast("tuple[jax.Array, ...]", of_part),
        Tokens(queries, keys, keys, gates, gates),
    )
    return Remembered(stand_in((rows,)), (layer,) * len(net.layers))


class Advance(NamedTuple):
    """Progress of rows by a forward over tokens [B, Q], the same in every layer."""

    accepted: jax.Array  # [B] int32, waiting tokens that are committed
    most: jax.Array  # [] int32, of any row
    tokens: jax.Array  # [B] int32, of this forward


def advance(rows: Remembered, positions: jax.Array) -> Advance:
    """Compare a forward's positions [B, Q] with where its rows stand: what waits before the first one is committed.

    Positions ascend; a negative one is no token.
    """
    count = (positions >= 0).sum(axis=1, dtype=jnp.int32)
    accepted = jnp.where(count > 0, positions[:, 0] - rows.base, 0)
    return Advance(accepted, jnp.max(accepted, initial=0), count)


def next_base(rows: Remembered, at: Advance, prefills: bool) -> jax.Array:
    """Return `base` after a forward: its first position, or where it `prefills` its last one."""
    first = rows.base + at.accepted
    return first + jnp.where(at.tokens > 0, at.tokens - 1, 0) if prefills else first


class Recurrence:
    """Remember by rows: advance over the waiting tokens that are committed, then go over a forward's own.

    Where a forward verifies, all its tokens wait. Where it `prefills`, in chunks, the last one waits, as decoding
    begins with it again.

    Attributes:
      rows: of this layer; after the call, as the forward leaves it.
    """

    def __init__(self, rows: RowState, at: Advance, *, prefills: bool) -> None:
        self.rows, self._at, self._prefills = rows, at, prefills

    def __call__(self, mixed: Mixed, kernels: tuple[jax.Array, ...]) -> jax.Array:
        rows, at, M = self.rows, self._at, self.rows.waiting.k.shape[1]
        W = kernels[0].shape[-1]
        state = _advanced(rows, at)
        before = [_from(x, at.accepted, W - 1) for x in rows.recent]
        joined = [jnp.concatenate([a, b.astype(a.dtype)], axis=1) for a, b in zip(before, mixed.parts)]
        tokens = recurrence_inputs(mixed, [convolved(x, kernel) for x, kernel in zip(joined, kernels)])
        skipped = jnp.zeros_like(at.tokens)
        if self._prefills:
            skipped = jnp.maximum(at.tokens - 1, 0)
            o, state = _but_last(tokens, state, skipped)
        else:
            o = sequential(tokens, state)
        runs = at.tokens > 0

        def unless_idle(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(runs.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        new = RowState(
            state,
            tuple(_from(x, skipped, W - 1 + M) for x in joined),
            jax.tree.map(lambda x: _from(x, skipped, M), tokens)._replace(q=rows.waiting.q),
        )
        self.rows = jax.tree.map(unless_idle, new, rows)
        return o


def _from(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Return `count` entries of x [B, S, ...] from start [B] on; 0 behind its end."""
    columns = start[:, None] + jnp.arange(count)[None]
    return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=0))(x, columns)


def _advanced(rows: RowState, at: Advance) -> jax.Array:
    """Return the state after those of the waiting tokens that are committed."""

    def enter(i: jax.Array, state: jax.Array) -> jax.Array:
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), rows.waiting)
        return jnp.where((i < at.accepted)[:, None, None, None], enter_state(state, one), state)

    return jax.lax.fori_loop(0, at.most, enter, rows.state)


def _but_last(tokens: Tokens, state: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return o of tokens up to number `last` [B], and the state before that one, which enters by itself."""
    number = jnp.arange(tokens.k.shape[1])[None]
    enters = (number < last[:, None])[..., None]
    decay, rate = (jnp.where(enters, x, 0) for x in (tokens.decay, tokens.rate))
    o, state = chunked(tokens._replace(decay=decay, rate=rate), state)
    own = sequential(jax.tree.map(lambda x: _from(x, last, 1), tokens), state)
    return jnp.where((number == last[:, None])[..., None, None], own, o), state
